"""Which Hugging Face tensor holds which part of the parameter tree, and in what layout.

A tensor of theirs is one layer of one of our stacks, as torch's Linear holds it: two axes, output
first. Reading (`hf_load.py`) and writing (`hf_save.py`) both go through this table.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Array, Shaped

from demyrl.model.config import ModelConfig
from demyrl.model.transformer import map_table

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
TIED_HEAD = TOP_NAMES["head"]  # which some files hold although it is tied to the embedding


class Tensor(NamedTuple):
    """One tensor of a Hugging Face checkpoint and its place in our tree."""

    name: str  # theirs
    shape: tuple[int, ...]  # theirs
    leaf: str  # our name: a key of the tree, or of its "layers"
    layer: int | None  # which slice of the stack; None outside the layers
    our_shape: tuple[int, ...]  # of that slice, or of the whole leaf


def tensors_of(model: ModelConfig) -> Iterator[Tensor]:
    """Every tensor that a checkpoint of this model must have, layer by layer."""
    shapes = map_table(lambda row: row.shape, model)
    stacks = shapes.pop("layers")
    for leaf, shape in shapes.items():
        yield Tensor(TOP_NAMES[leaf], shape, leaf, None, shape)
    for layer in range(model.layers):
        for leaf, (_, *shape) in stacks.items():
            name = f"model.layers.{layer}.{LAYER_NAMES[leaf]}"
            yield Tensor(name, hf_shape(leaf, tuple(shape)), leaf, layer, tuple(shape))


def hf_shape(leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of their tensor for one layer's array of `shape`."""
    if leaf == "out":
        return shape[-1], math.prod(shape[:-1])
    if len(shape) == 1 or leaf.endswith("_bias"):
        return (math.prod(shape),)
    return math.prod(shape[1:]), shape[0]


def to_hf(tensor: Tensor, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Our slice in their layout."""
    if tensor.layer is None or len(tensor.shape) == 1:
        return array.reshape(tensor.shape)
    return array.reshape(tensor.shape[::-1]).T


def from_hf(tensor: Tensor, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The inverse of `to_hf`."""
    if tensor.layer is None or len(tensor.shape) == 1:
        return array.reshape(tensor.our_shape)
    return array.T.reshape(tensor.our_shape)
