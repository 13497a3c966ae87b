"""The shapes of published models, for planning and benchmarks that have no checkpoint at hand.

A checkpoint's own config.json has the last word on what it is: see `hf_config.py`. Qwen2.5 is
listed as Instruct; its base models differ in `max_positions`, some in `norm_eps`.
"""

from typing import Any

from demyrl.model.config import ModelConfig

QWEN25 = {
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qk_norm": False,
    "attention_bias": True,
    "max_positions": 32_768,
}
QWEN3 = {
    "vocab": 151_936,
    "kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qk_norm": True,
    "attention_bias": False,
    "max_positions": 40_960,
}
SMOLLM2 = {
    "rope_theta": 1e5,
    "norm_eps": 1e-5,
    "qk_norm": False,
    "attention_bias": False,
    "max_positions": 8_192,
}


def qwen25(width: int, layers: int, heads: int, kv_heads: int, feed_forward: int) -> dict[str, Any]:
    """A Qwen2.5 model: those up to 3B share the embedding and pad its vocabulary less."""
    small = width < 3_000
    return QWEN25 | {
        "vocab": 151_936 if small else 152_064,
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": width // heads,
        "feed_forward": feed_forward,
        "tied_embeddings": small,
    }


def qwen3(width: int, layers: int, heads: int, feed_forward: int) -> dict[str, Any]:
    """A dense Qwen3 model: those up to 4B share the embedding."""
    return QWEN3 | {
        "width": width,
        "layers": layers,
        "heads": heads,
        "feed_forward": feed_forward,
        "tied_embeddings": width < 4_000,
    }


SIZES: dict[str, dict[str, Any]] = {
    "qwen2.5_0.5b": qwen25(896, 24, 14, 2, 4_864),
    "qwen2.5_1.5b": qwen25(1_536, 28, 12, 2, 8_960),
    "qwen2.5_3b": qwen25(2_048, 36, 16, 2, 11_008),
    "qwen2.5_7b": qwen25(3_584, 28, 28, 4, 18_944),
    "qwen2.5_14b": qwen25(5_120, 48, 40, 8, 13_824),
    "qwen2.5_32b": qwen25(5_120, 64, 40, 8, 27_648),
    "qwen3_0.6b": qwen3(1_024, 28, 16, 3_072),
    "qwen3_1.7b": qwen3(2_048, 28, 16, 6_144),
    "qwen3_4b": qwen3(2_560, 36, 32, 9_728),
    "qwen3_4b_2507": qwen3(2_560, 36, 32, 9_728) | {"rope_theta": 5e6, "max_positions": 262_144},
    "qwen3_8b": qwen3(4_096, 36, 32, 12_288),
    "qwen3_14b": qwen3(5_120, 40, 40, 17_408),
    "qwen3_32b": qwen3(5_120, 64, 64, 25_600),
    "smollm2_135m": SMOLLM2
    | {
        "vocab": 49_152,
        "width": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "feed_forward": 1_536,
        "tied_embeddings": True,
    },
}


def size(name: str, dtype: str) -> ModelConfig:
    """The published model of that name, computing in `dtype`.

    Raises ValueError, listing the names, when there is none.
    """
    if name not in SIZES:
        raise ValueError(f"There is no size {name!r}: use one of {', '.join(SIZES)}.")
    return ModelConfig(**SIZES[name], dtype=dtype)
