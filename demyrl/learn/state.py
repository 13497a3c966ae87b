"""The train state: made new, and described without its arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, Sharding

from demyrl.arrays import TrainState
from demyrl.model.sharding import replicated
from demyrl.model.transformer import Params

HOST = "pinned_host"  # JAX's name of the host memory that devices read from


def start_state(
    params: Params, optimizer: optax.GradientTransformation, offload: bool = False
) -> TrainState:
    """Step 0: the given parameters and a fresh optimizer, placed like after an update.

    Arrays that JAX may move, as it may a new one, would make the second update compile again.
    """
    there = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(params, optimizer, offload))
    rest = jax.jit(
        lambda params: (jnp.int32(0), optimizer.init(params)),
        out_shardings=(there.step, there.opt_state),
    )
    step, opt_state = rest(params)
    return TrainState(step, jax.device_put(params, there.params) if offload else params, opt_state)


def abstract_state(
    params: Params, optimizer: optax.GradientTransformation, offload: bool = False
) -> TrainState:
    """The shapes and places of `start_state`, from those of the parameters, without its arrays."""
    everywhere = replicated_beside(params)

    def beside(leaf: Any, param: Any) -> jax.ShapeDtypeStruct:
        place = param.sharding.with_memory_kind(HOST) if offload else param.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    def alone(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    moments = jax.eval_shape(optimizer.init, params)
    moments = optax.tree.map_params(optimizer, beside, moments, params, transform_non_params=alone)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(step, jax.tree.map(beside, params, params), moments)


def replicated_beside(params: Params) -> Sharding:
    """A copy on every device that the parameters lie on."""
    place = jax.tree.leaves(params)[0].sharding
    return replicated(place.mesh) if isinstance(place, NamedSharding) else place
