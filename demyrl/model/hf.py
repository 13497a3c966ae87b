"""Checkpoints in Hugging Face format: a Qwen3-style `model.safetensors` beside a `config.json`."""

import importlib.resources
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from demyrl.model.config import ModelConfig
from demyrl.model.transformer import Params, map_table

LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
CONFIG_NAMES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "feed_forward": "intermediate_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}

ANOTHER_KIND = (
    "a model of this config does not match. Check model.layers, model.qk_norm, "
    "model.attention_bias and model.tied_embeddings."
)


def builtin_folder(source: str) -> Path:
    """The folder of a checkpoint that ships with the package."""
    return Path(str(importlib.resources.files("demyrl") / "assets" / source.split(":", 1)[1]))


def to_hf(name: str, array: np.ndarray) -> np.ndarray:
    """One layer's array as torch's Linear holds it: two axes, output first."""
    if name == "out":
        return array.reshape(-1, array.shape[-1]).T
    if array.ndim == 1 or name.endswith("_bias"):
        return array.reshape(-1)
    return array.reshape(array.shape[0], -1).T


def from_hf(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_hf`, for one layer's array of `shape`."""
    return (array.T if array.ndim == 2 else array).reshape(shape)


def hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of `to_hf` of one layer's array of `shape`."""
    if name == "out":
        return shape[-1], math.prod(shape[:-1])
    if len(shape) == 1 or name.endswith("_bias"):
        return (math.prod(shape),)
    return math.prod(shape[1:]), shape[0]


def save_checkpoint(folder: Path, params: Params, model: ModelConfig) -> None:
    """Writes config.json and model.safetensors in float32."""
    tensors = {}
    for name, array in params.items():
        if name != "layers":
            tensors[TOP_NAMES[name]] = np.array(array, np.float32)
    for name, stack in params["layers"].items():
        for i, array in enumerate(np.asarray(stack, np.float32)):
            key = f"model.layers.{i}.{LAYER_NAMES[name]}"
            tensors[key] = np.ascontiguousarray(to_hf(name, array))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(model), indent=2) + "\n")


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of a Qwen3 model of this size."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": model.attention_bias,
        "torch_dtype": "float32",
        **{theirs: getattr(model, ours) for ours, theirs in CONFIG_NAMES.items()},
    }


def load_params(folder: Path, model: ModelConfig, sharding: Params) -> Params:
    """The checkpoint's parameters in float32, each leaf on its sharding.

    Raises ValueError, naming the key, when the folder holds another model.
    """
    config = json.loads((folder / "config.json").read_text())
    for ours, theirs in CONFIG_NAMES.items():
        if theirs in config and config[theirs] != getattr(model, ours):
            raise ValueError(
                f"{folder} has {theirs} = {config[theirs]}, this config has model.{ours} = "
                f"{getattr(model, ours)}: another model. Make them agree."
            )
    arrays = arrays_of(load_file(folder / "model.safetensors"), model)
    return jax.tree.map(jax.device_put, arrays, sharding)


def arrays_of(tensors: dict[str, np.ndarray], model: ModelConfig) -> Params:
    """The parameter tree of a checkpoint's tensors, in float32.

    Raises ValueError, naming the tensor, when one is missing, has another shape, or has no place:
    weights that are left out would give other logits without a word.
    """
    surplus = set(tensors) - {TOP_NAMES["head"]}  # which some write even when it is tied

    def taken(key: str, shape: tuple[int, ...]) -> np.ndarray:
        if key not in tensors:
            raise ValueError(f"model.safetensors has no tensor {key}: {ANOTHER_KIND}")
        if tensors[key].shape != shape:
            raise ValueError(
                f"{key} has shape {tensors[key].shape} in model.safetensors, a model of this "
                f"config {shape}: is the config.json beside it that of another model?"
            )
        surplus.discard(key)
        return tensors[key].astype(np.float32)

    def stacked(name: str, shape: tuple[int, ...]) -> np.ndarray:
        keys = [f"model.layers.{i}.{LAYER_NAMES[name]}" for i in range(model.layers)]
        return np.stack([from_hf(taken(key, hf_shape(name, shape)), shape) for key in keys])

    shapes = map_table(lambda row: row.shape, model)
    layers = {name: stacked(name, shape[1:]) for name, shape in shapes.pop("layers").items()}
    arrays = {name: taken(TOP_NAMES[name], shape) for name, shape in shapes.items()}
    if surplus:
        raise ValueError(f"model.safetensors has a tensor {min(surplus)}: {ANOTHER_KIND}")
    return arrays | {"layers": layers}
