"""The size and shape of a Qwen-style decoder, and nothing about how it is trained."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen3-style decoder; with `attention_bias` and without `qk_norm` it is a Qwen2."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    attention_bias: bool
    tied_embeddings: bool
    dtype: str  # of activations and of the sampling copy: "float32" or "bfloat16"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads is {self.heads} and model.kv_heads is {self.kv_heads}: every "
                "key/value head serves the same number of query heads, so the second must divide "
                "the first."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim is {self.head_dim}: rotary positions turn pairs of channels, so "
                "it must be even."
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"model.dtype is {self.dtype!r}: use 'float32' or 'bfloat16'.")
