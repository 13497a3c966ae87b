"""A checkpoint's config.json as a `ModelConfig`, and back.

What the decoder does not compute (scaled rotary positions, sliding windows, experts, ...) is
refused by its key: leaving it out would give other logits without a word. Names of the weights are
in `hf_names.py`.
"""

import json
import math
from pathlib import Path
from typing import Any

from demyrl.model.config import ModelConfig

ARCHITECTURES = {  # model_type, and the class that transformers makes of it
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
SIZES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
}
ROPE_THETA = 10_000.0  # where config.json says nothing: the default of all three classes
NORM_EPS = 1e-6
QWEN3_HEAD_DIM = 128
ROPE_KEYS = ("rope_scaling", "rope_parameters")  # the older and the newer name of one thing
MODALITIES = ("vl", "omni", "audio", "vision", "image", "video")
ONLY = {  # key: the values that this decoder computes; null and a missing key are fine too
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
}
REMEDIES = {
    "use_sliding_window": "Set it to false if the weights were trained without.",
    "quantization_config": "Take the checkpoint's unquantized version (bf16, f16 or f32).",
}


class Keys:
    """The keys of one config.json, each read with a check that names file and key."""

    def __init__(self, path: Path):
        self.path, self.keys = path, parsed(path)

    def __getitem__(self, key: str) -> Any:
        """The value; None where the key is missing."""
        return self.keys.get(key)

    def wrong(self, key: str, expected: str) -> ValueError:
        found = f"is {json.dumps(self[key])}" if key in self.keys else "is missing"
        return ValueError(f"{self.path}: {key} {found}; {expected}")

    def whole(self, key: str, missing: int | None = None) -> int:
        """A whole number above 0; `missing` stands for null and for no key."""
        value = missing if self[key] is None else self[key]
        if type(value) is not int or (value < 1 and self[key] is not None):
            raise self.wrong(key, "expected a whole number above 0.")
        return value

    def number(self, key: str, missing: float) -> float:
        return positive(missing if self[key] is None else self[key], self.path, key)

    def switch(self, key: str) -> bool:
        """True or false; a missing key is false."""
        value = False if self[key] is None else self[key]
        if type(value) is not bool:
            raise self.wrong(key, "expected true or false.")
        return value


def read_config(folder: Path, dtype: str) -> ModelConfig:
    """The model of a checkpoint folder, computing in `dtype`.

    Raises ValueError, naming file and key, when config.json cannot be read, misses a key, or asks
    for something that this decoder does not compute.
    """
    keys = Keys(folder / "config.json")
    kind = model_type(keys)
    refuse_other_parts(keys, kind)
    sizes = {ours: keys.whole(theirs) for ours, theirs in SIZES.items()}
    values = {
        "kv_heads": keys.whole("num_key_value_heads", sizes["heads"]),
        "head_dim": head_dim(keys, kind),
        "rope_theta": rope_theta(keys),
        "norm_eps": keys.number("rms_norm_eps", NORM_EPS),
        "qk_norm": kind == "qwen3",
        "attention_bias": kind == "qwen2",
        "tied_embeddings": keys.switch("tie_word_embeddings"),
        "max_positions": keys.whole("max_position_embeddings", 0),
    }
    try:
        return ModelConfig(**sizes, **values, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"{error} (The shape is that of {keys.path}.)") from None


def parsed(path: Path) -> dict[str, Any]:
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist: a checkpoint folder holds a config.json beside its weights, "
            "as `save_pretrained` writes them."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: neither UTF-8 nor JSON
        raise ValueError(f"{path} cannot be read as JSON: {error}. Get it again.") from None
    if not isinstance(keys, dict):
        raise ValueError(f"{path} holds a JSON {type(keys).__name__}; expected an object of keys.")
    return keys


def positive(value: Any, path: Path, key: str) -> float:
    """`value` as a float. Raises ValueError unless it is a finite number above 0."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{path}: {key} is {value!r}; expected a number above 0.")
    return float(value)


def model_type(keys: Keys) -> str:
    """Which of ARCHITECTURES it is, by either key.

    Raises ValueError when it is none, or when `model_type` and `architectures` disagree.
    """
    kind, classes = keys["model_type"], keys["architectures"]
    if kind is None and classes is None:
        raise keys.wrong("model_type", f"expected one of {', '.join(ARCHITECTURES)}.")
    for name, cls in ARCHITECTURES.items():
        if kind in (None, name) and classes in (None, [cls]):
            return name
    unknown = kind is not None and kind not in list(ARCHITECTURES)
    key = "model_type" if unknown else "architectures"
    known = ", ".join(f"{name} ({cls})" for name, cls in ARCHITECTURES.items())
    raise keys.wrong(key, f"supported are {known}, both keys in agreement.{why_not(keys[key])}")


def why_not(value: Any) -> str:
    """What kind of model an unsupported name stands for, where the name says so."""
    name = str(value).lower()
    if "moe" in name or "mixtral" in name:
        return " Mixtures of experts are not supported: take a dense model."
    if any(word in name for word in MODALITIES):
        return " Models that see or hear are not supported: take the text model."
    if "classification" in name or "reward" in name:
        return " This one scores text; a policy needs a language model head."
    return ""


def refuse_other_parts(keys: Keys, kind: str) -> None:
    """Raises ValueError, naming the key, for a part that this decoder does not have."""
    for key, values in ONLY.items():
        if keys[key] is not None and keys[key] not in values:
            wanted = " or ".join(json.dumps(value) for value in values[:1]) or "none"
            remedy = REMEDIES.get(key, "Take another model.")
            raise keys.wrong(key, f"this decoder computes only {wanted}. {remedy}")
    if kind != "qwen2" and keys.switch("attention_bias"):
        raise keys.wrong(
            "attention_bias",
            f"in a {kind} model it gives the output projection a bias too, which has no place "
            "here. Take another model.",
        )
    layers = keys["layer_types"]
    if layers is not None and (type(layers) is not list or set(layers) - {"full_attention"}):
        raise keys.wrong("layer_types", 'only layers of "full_attention" are computed.')


def head_dim(keys: Keys, kind: str) -> int:
    """The size of a head: null means that the width is shared out, as does no key but in Qwen3."""
    if keys["head_dim"] is not None:
        return keys.whole("head_dim")
    if kind == "qwen3" and "head_dim" not in keys.keys:
        return QWEN3_HEAD_DIM
    width, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    if width % heads:
        raise keys.wrong(
            "head_dim",
            f"without it the {heads} heads share hidden_size {width}, which they do not divide. "
            "Write the true head_dim there.",
        )
    return width // heads


def rope_theta(keys: Keys) -> float:
    """The base of the rotary frequencies, from wherever config.json keeps it."""
    found = {} if keys["rope_theta"] is None else {"rope_theta": keys["rope_theta"]}
    for key in ROPE_KEYS:
        rope = {} if keys[key] is None else keys[key]
        if not isinstance(rope, dict):
            raise keys.wrong(key, "expected an object or null.")
        refuse_scaling(keys.path, key, rope)
        if rope.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = rope["rope_theta"]
    values = {positive(value, keys.path, key) for key, value in found.items()}
    if len(values) > 1:
        said = " and ".join(f"{key} = {value}" for key, value in found.items())
        raise ValueError(f"{keys.path} has {said}: which one is true? Remove the other.")
    return values.pop() if values else ROPE_THETA


def refuse_scaling(path: Path, key: str, rope: dict[str, Any]) -> None:
    """Raises ValueError unless these are plain rotary positions over all channels."""
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    if not kinds and rope.get("factor") is not None:
        kinds = ["unnamed"]
    for kind in kinds:
        if kind != "default":
            raise ValueError(
                f"{path}: {key} asks for {kind!r} scaling of the rotary positions, which is not "
                f"implemented. If the weights were made without it (it is often added to stretch "
                f"the context), remove {key} but for its rope_theta."
            )
    layered = [name for name, value in rope.items() if isinstance(value, dict)]
    if layered:
        raise ValueError(
            f"{path}: {key} differs by kind of layer ({', '.join(layered)}); expected one "
            "rope_theta for all layers."
        )
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        raise ValueError(
            f"{path}: {key}.partial_rotary_factor is {rope['partial_rotary_factor']!r}; only 1, "
            "positions in all channels of a head, is computed."
        )


def config_of(model: ModelConfig) -> dict[str, Any]:
    """A config.json of float32 weights of this model, as transformers 4 and 5 read it.

    Raises ValueError for a model that is of no architecture there.
    """
    if model.qk_norm and model.attention_bias:
        raise ValueError(
            "model.qk_norm and model.attention_bias are both on: of Qwen2 and Qwen3 each has one, "
            "so no config.json can say it. Turn one off."
        )
    kind = "qwen3" if model.qk_norm else "qwen2" if model.attention_bias else "llama"
    limits = {"max_position_embeddings": model.max_positions} if model.max_positions else {}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "attention_bias": model.attention_bias,
        "dtype": "float32",
        "torch_dtype": "float32",  # the name of `dtype` in transformers 4
        "bos_token_id": None,
        "eos_token_id": None,
        **{theirs: getattr(model, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "rope_theta": model.rope_theta,  # at the top level both versions find it
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        **limits,
    }
