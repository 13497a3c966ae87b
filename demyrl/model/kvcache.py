"""The key/value cache of the sampler: allocation and the copying of a shared prompt.

The cache holds no lengths: the host, which knows every trajectory, passes them in. A write at or
past the last slot is dropped, and the host checks that none is asked for.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from demyrl.arrays import KVCache
from demyrl.model.config import ModelConfig


def empty_cache(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """Zeros for `rows` sequences of up to `slots` tokens, in the compute dtype."""
    shape = (rows, config.kv_heads, slots, config.head_dim)

    def zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, config.dtype) for _ in range(config.layers))

    return KVCache(keys=zeros(), values=zeros())


def write(
    cached: Float[Array, "B K S H"],
    new: Float[Array, "R C K H"],
    rows: Int[Array, " R"],
    slots: Int[Array, "R C"],
) -> Float[Array, "B K S H"]:
    """The cache with new[r, c] at [rows[r], :, slots[r, c]]; entries out of range are dropped."""
    return cached.at[rows[:, None], :, slots].set(new.astype(cached.dtype), mode="drop")


def copy_rows(
    cache: KVCache, sources: Int[Array, " B"], targets: Int[Array, " B"], count: Int[Array, ""]
) -> KVCache:
    """Row sources[i] copied over row targets[i], for i below count, one after another."""

    def copy_one(i, cache: KVCache) -> KVCache:
        def copied(array):
            row = jax.lax.dynamic_index_in_dim(array, sources[i], keepdims=True)
            return jax.lax.dynamic_update_index_in_dim(array, row, targets[i], axis=0)

        return jax.tree.map(copied, cache)

    return jax.lax.fori_loop(0, count, copy_one, cache)
