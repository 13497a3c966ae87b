"""The key/value cache of the sampler: allocation and the copying of a shared prompt.

The cache holds no lengths: the host, which knows every trajectory, passes them in. A write at or
past the last slot is dropped, and the host checks that none is asked for.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from demyrl.arrays import KVCache
from demyrl.model.config import ModelConfig
from demyrl.model.mesh import HEADS_SPREAD, spec

CACHE_AXES = ("rows", "kv_heads", None, "head_dim")  # of each array


def empty_cache(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """Zeros for `rows` sequences of up to `slots` tokens, in the compute dtype."""
    shape = (rows, config.kv_heads, slots, config.head_dim)

    def zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, config.dtype) for _ in range(config.layers))

    return KVCache(keys=zeros(), values=zeros())


def abstract_cache(config: ModelConfig, rows: int, slots: int, mesh: Mesh) -> KVCache:
    """The shapes and places of a cache, without the cache."""
    place = NamedSharding(mesh, spec(CACHE_AXES, HEADS_SPREAD))
    shapes = jax.eval_shape(functools.partial(empty_cache, config, rows, slots))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes
    )


def write(
    cached: tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]],
    fresh: tuple[Float[Array, "R C K H"], Float[Array, "R C K H"]],
    rows: Int[Array, " R"],
    starts: Int[Array, " R"],
    counts: Int[Array, " R"],
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """A layer's keys and values with the first counts[r] of the fresh ones in row rows[r], from
    slot starts[r] on.

    One window a row, and always the same layout: a scatter would be given another one on a TPU, for
    which the whole cache is copied. A window that reaches past the last slot is moved back.
    """
    capacity = cached[0].shape[2]
    size = min(fresh[0].shape[1], capacity)
    first_R = jnp.minimum(starts, capacity - size)
    moved_R = starts - first_R
    order_RC = jnp.arange(size) - moved_R[:, None]
    real_RC1 = ((order_RC >= 0) & (order_RC < counts[:, None]))[..., None]
    fresh_RKCH = [new[:, :size].swapaxes(1, 2).astype(cached[0].dtype) for new in fresh]

    def write_one(r: Array, cached: tuple[Array, Array]) -> tuple[Array, Array]:
        def written(old: Array, new_RKCH: Array) -> Array:
            at, new_KCH = (rows[r], 0, first_R[r], 0), new_RKCH[r]
            if size > 1:
                new_KCH = jnp.roll(new_KCH, moved_R[r], axis=1)
            window = jax.lax.dynamic_slice(old, at, (1, *new_KCH.shape))
            window = jnp.where(real_RC1[r], new_KCH, window)
            return in_order(jax.lax.dynamic_update_slice(old, window, at))

        return tuple(map(written, cached, fresh_RKCH))

    return jax.lax.fori_loop(0, len(rows), write_one, cached)


def in_order(x: Array) -> Array:
    """The array, on TPUs with its last axis contiguous in memory, then the one before, and so on.

    Elsewhere that is so anyhow, and to demand it would gather what is spread.
    """

    def demanded(x: Array) -> Array:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    return jax.lax.platform_dependent(x, tpu=demanded, default=lambda x: x)


def copy_rows(
    cache: KVCache, sources: Int[Array, " B"], targets: Int[Array, " B"], count: Int[Array, ""]
) -> KVCache:
    """Row sources[i] copied over row targets[i], for i below count, one after another.

    Each array on its own, so that only one row of one array is in between.
    """

    def copied(array: Array) -> Array:
        def copy_one(i, array):
            row = jax.lax.dynamic_index_in_dim(array, sources[i], keepdims=True)
            return in_order(jax.lax.dynamic_update_index_in_dim(array, row, targets[i], axis=0))

        return jax.lax.fori_loop(0, count, copy_one, array)

    return jax.tree.map(copied, cache)
