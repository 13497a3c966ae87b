"""A Qwen-style decoder as one table of parameters and a few pure functions.

`parameter_table` declares every parameter once: shape, logical axes, initial scale. Initialization,
sharding, import and export read that table. Layers are stacked on a leading axis and run under
`lax.scan` in training; the sampler unrolls them (see `rollout/sampler.py`). The head that turns
hidden states into log-probabilities is not here but in `learn/head.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from demyrl.model.attention import attend_segments, rotate
from demyrl.model.attention_blocks import ATTENDED
from demyrl.model.config import ModelConfig
from demyrl.model.embedding import lookup
from demyrl.model.mesh import constrain

Params = dict[str, Any]


class Parameter(NamedTuple):
    """One row of the table: a leading "layers" axis means one slice per layer."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: float | None  # standard deviation at the start; None: ones (norms); 0: zeros (biases)


def parameter_table(config: ModelConfig) -> dict[str, Any]:
    """Nested dict, name to Parameter, in the layout of the parameter tree itself."""
    d, f, h = config.width, config.feed_forward, config.head_dim
    n, k, depth = config.heads, config.kv_heads, config.layers
    near, deep = d**-0.5, 1 / math.sqrt(2 * depth)

    def layer(shape, axes, scale):
        return Parameter((depth, *shape), ("layers", *axes), scale)

    layers = {
        "attention_norm": layer((d,), ("width",), None),
        "query": layer((d, n, h), ("width", "heads", "head_dim"), near),
        "key": layer((d, k, h), ("width", "kv_heads", "head_dim"), near),
        "value": layer((d, k, h), ("width", "kv_heads", "head_dim"), near),
        "out": layer((n, h, d), ("heads", "head_dim", "width"), (n * h) ** -0.5 * deep),
        "mlp_norm": layer((d,), ("width",), None),
        "gate": layer((d, f), ("width", "feed_forward"), near),
        "up": layer((d, f), ("width", "feed_forward"), near),
        "down": layer((f, d), ("feed_forward", "width"), f**-0.5 * deep),
    }
    if config.qk_norm:
        layers["query_norm"] = layer((h,), ("head_dim",), None)
        layers["key_norm"] = layer((h,), ("head_dim",), None)
    if config.attention_bias:
        layers["query_bias"] = layer((n, h), ("heads", "head_dim"), 0.0)
        layers["key_bias"] = layer((k, h), ("kv_heads", "head_dim"), 0.0)
        layers["value_bias"] = layer((k, h), ("kv_heads", "head_dim"), 0.0)
    table = {
        "embedding": Parameter((config.vocab, d), ("vocab", "width"), near),
        "layers": layers,
        "final_norm": Parameter((d,), ("width",), None),
    }
    if not config.tied_embeddings:
        table["head"] = Parameter((config.vocab, d), ("vocab", "width"), near)
    return table


def is_parameter(leaf: Any) -> bool:
    """True at the leaves of a parameter table."""
    return isinstance(leaf, Parameter)


def map_table(function: Callable[[Parameter], Any], config: ModelConfig) -> Params:
    """The parameter tree with `function(row)` at every leaf."""
    return jax.tree.map(function, parameter_table(config), is_leaf=is_parameter)


def init_params(config: ModelConfig, key: Array) -> Params:
    """Float32 master weights drawn from truncated normals; the same for the same key."""
    rows, tree = jax.tree.flatten(parameter_table(config), is_leaf=is_parameter)
    keys = jax.random.split(key, len(rows))

    def draw(row: Parameter, key: Array) -> Array:
        if row.scale is None:
            return jnp.ones(row.shape, jnp.float32)
        return row.scale * jax.random.truncated_normal(key, -3, 3, row.shape, jnp.float32)

    return jax.tree.unflatten(tree, [draw(row, key) for row, key in zip(rows, keys, strict=True)])


def parameter_count(config: ModelConfig) -> int:
    """Numbers in the parameter tree; tied embeddings count once."""
    sizes = jax.tree.leaves(map_table(lambda row: math.prod(row.shape), config))
    return sum(sizes)


def rms_norm(
    x: Float[Array, "*rows W"], scale: Float[Array, " W"], eps: float
) -> Float[Array, "*rows W"]:
    """x over its root mean square, computed in float32 at least."""
    exact = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    exact *= jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + eps)
    return (exact * scale.astype(exact.dtype)).astype(x.dtype)


def embed(params: Params, tokens: Int[Array, "B C"], config: ModelConfig) -> Float[Array, "B C D"]:
    """Embedding rows of the tokens, in the compute dtype."""
    return params["embedding"].astype(config.dtype)[tokens]


def qkv(
    layer: Params,
    x: Float[Array, "B C D"],
    positions: Int[Array, "B C"],
    config: ModelConfig,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B C N H"], Float[Array, "B C K H"], Float[Array, "B C K H"]]:
    """Queries, keys and values of one layer, normalized and rotated to their positions.

    With a mesh they are spread by their tokens, as in training; here and below the compiler would
    otherwise gather activations where it should gather weights.
    """
    x_BCD = rms_norm(x, layer["attention_norm"], config.norm_eps)

    def projected(weight: Array, heads: str) -> Array:
        return constrain(product(x_BCD, weight, mesh), ("rows", "tokens", heads, None), mesh)

    q_BCNH = projected(layer["query"], "heads")
    k_BCKH = projected(layer["key"], "kv_heads")
    v_BCKH = projected(layer["value"], "kv_heads")
    if config.attention_bias:
        q_BCNH += layer["query_bias"].astype(x.dtype)
        k_BCKH += layer["key_bias"].astype(x.dtype)
        v_BCKH += layer["value_bias"].astype(x.dtype)
    if config.qk_norm:
        q_BCNH = rms_norm(q_BCNH, layer["query_norm"], config.norm_eps)
        k_BCKH = rms_norm(k_BCKH, layer["key_norm"], config.norm_eps)
    theta = config.rope_theta
    return rotate(q_BCNH, positions, theta), rotate(k_BCKH, positions, theta), v_BCKH


def close_block(
    layer: Params,
    x: Float[Array, "B C D"],
    attended: Float[Array, "B C N H"],
    config: ModelConfig,
    mesh: Mesh | None = None,
) -> Float[Array, "B C D"]:
    """The rest of a block after attention: output projection, then the gated feed forward."""

    def placed(x: Array, axis: str | None = None) -> Array:
        return constrain(x, ("rows", "tokens", axis), mesh)

    out = layer["out"].reshape(-1, x.shape[-1])
    x_BCD = placed(x + product(attended.reshape(*x.shape[:2], -1), out, mesh))
    y_BCD = rms_norm(x_BCD, layer["mlp_norm"], config.norm_eps)
    gate_BCF = placed(product(y_BCD, layer["gate"], mesh), "feed_forward")
    up_BCF = placed(product(y_BCD, layer["up"], mesh), "feed_forward")
    return placed(x_BCD + product(jax.nn.silu(gate_BCF) * up_BCF, layer["down"], mesh))


def product(
    x: Float[Array, "B C X"], weight: Float[Array, " X *Y"], mesh: Mesh | None
) -> Float[Array, "B C *Y"]:
    """x times the weight, in the dtype of x.

    Training on one device joins the rows: the weight's gradient is then a product of matrices,
    while for one over two axes XLA turns arrays over on a CPU (a fifth of the time of an update).
    """
    weight = weight.astype(x.dtype)
    if mesh is None or mesh.size > 1:
        return jnp.tensordot(x, weight, axes=1)
    joined = jnp.tensordot(x.reshape(-1, x.shape[-1]), weight, axes=1)
    return joined.reshape(*x.shape[:2], *weight.shape[1:])


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a training pass runs, and what of it is kept for the way back."""

    mesh: Mesh | None  # None: wherever the arrays are
    remat: str  # of each layer is kept: "none": all; "dots": products, attention; "full": its input


REMAT: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda block: block,
    "dots": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names(ATTENDED),
        ),
    ),
    "full": jax.checkpoint,
}
ALONE = Layout(mesh=None, remat="none")


def hidden_states(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    config: ModelConfig,
    layout: Layout = ALONE,
) -> Float[Array, "B T D"]:
    """Final normalized hidden states of packed rows; attention stays within a segment."""
    table, mesh = parameter_table(config), layout.mesh

    def block(x_BTD, layer):
        layer = {name: whole(w, table["layers"][name].axes[1:], mesh) for name, w in layer.items()}
        q, k, v = qkv(layer, x_BTD, positions, config, mesh)
        attended = attend_segments(q, k, v, segments, mesh)
        return close_block(layer, x_BTD, attended, config, mesh), None

    if mesh is None or mesh.size == 1:
        x_BTD = embed(params, tokens, config)
    else:
        x_BTD = lookup(params["embedding"].astype(config.dtype), tokens, mesh)
    x_BTD, _ = jax.lax.scan(REMAT[layout.remat](block), x_BTD, params["layers"])
    norm = whole(params["final_norm"], table["final_norm"].axes, mesh)
    return rms_norm(x_BTD, norm, config.norm_eps)


def whole(weight: Array, axes: tuple[str | None, ...], mesh: Mesh | None) -> Array:
    """A weight gathered along its width, for its use; its gradient is spread again.

    Without the second half the gradient would be summed on every device, to be cut afterwards.
    """
    gathered = tuple(None if axis == "width" else axis for axis in axes)
    if mesh is None or mesh.size == 1 or gathered == axes:
        return weight

    @jax.custom_vjp
    def gather(weight):
        return constrain(weight, gathered, mesh)

    def back(_, cotangent):
        return (constrain(cotangent, axes, mesh),)

    gather.defvjp(lambda weight: (gather(weight), None), back)
    return gather(weight)


def output_embedding(params: Params) -> Float[Array, "V D"]:
    """The matrix of the head: the embedding itself when tied."""
    return params["head"] if "head" in params else params["embedding"]
