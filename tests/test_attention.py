"""Attention over packed rows, a block of queries at a time, against all of it at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demyrl.model.attention import MOST_BLOCKS, QUERY_BLOCK, attend, attend_segments, frequencies


def packed_row(length: int, seed: int = 0):
    """Queries, keys and values of one row, and the segments of three trajectories and padding."""
    rng = np.random.default_rng(seed)
    draw = [jnp.asarray(rng.normal(size=(1, length, n, 4)), jnp.float32) for n in (4, 2, 2)]
    ends = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
    segments = np.searchsorted(ends, np.arange(length), side="right") + 1
    return (*draw, jnp.asarray(np.where(segments > 3, 0, segments))[None])


def all_at_once(q, k, v, segments):
    order = jnp.arange(q.shape[1])
    visible = (segments[:, :, None] == segments[:, None, :]) & (order[:, None] >= order[None, :])
    return attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible)


@pytest.mark.parametrize("length", [1 + 3, QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK + 5])
def test_blocks_of_queries_give_the_values_of_all_at_once(length):
    row = packed_row(length)
    want = jax.jit(all_at_once)(*row)
    np.testing.assert_allclose(jax.jit(attend_segments)(*row), want, atol=2e-6)


def test_blocks_of_queries_give_the_gradients_of_all_at_once():
    q, k, v, segments = packed_row(QUERY_BLOCK + 40)

    def loss(attention):
        return jax.jit(
            jax.grad(lambda *qkv: jnp.sum(attention(*qkv, segments) ** 2), argnums=(0, 1, 2))
        )

    for got, want in zip(loss(attend_segments)(q, k, v), loss(all_at_once)(q, k, v), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_long_row_is_no_more_than_sixteen_blocks():
    shapes = [jax.ShapeDtypeStruct((1, 5000, n, 4), jnp.float32) for n in (4, 2, 2)]
    segments = jax.ShapeDtypeStruct((1, 5000), jnp.int32)
    text = str(jax.make_jaxpr(attend_segments)(*shapes, segments))
    assert text.count("exp ") == MOST_BLOCKS == 16


def test_one_position_turns_the_first_pair_of_channels_by_one_radian():
    turns = frequencies(8, 10_000.0)
    np.testing.assert_allclose(turns, [1, 0.1, 0.01, 0.001], rtol=1e-6)
