import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demyrl.model.attention import attend_segments, rotate
from demyrl.model.transformer import (
    hidden_states,
    init_params,
    parameter_count,
    parameter_table,
)
from tests.tiny import MODEL, params


def rows(tokens, segments=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return tokens, positions, jnp.ones_like(tokens) if segments is None else jnp.asarray(segments)


def test_a_position_turns_channels_by_the_textbook_rotation():
    x = jnp.arange(1.0, 5.0).reshape(1, 1, 1, 4)
    got = rotate(x, jnp.array([[3]]), 100.0)[0, 0, 0]
    fast, slow = 3 * 1.0, 3 * 100.0**-0.5
    want = [
        1 * np.cos(fast) - 3 * np.sin(fast),
        2 * np.cos(slow) - 4 * np.sin(slow),
        3 * np.cos(fast) + 1 * np.sin(fast),
        4 * np.cos(slow) + 2 * np.sin(slow),
    ]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_attention_equals_a_loop_over_heads_in_float64():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 5, n, 4)).astype(np.float32) for n in (4, 2, 2))
    segments = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]])
    got = attend_segments(*map(jnp.asarray, (q, k, v)), jnp.asarray(segments))
    for b, t, n in np.ndindex(2, 5, 4):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        scores = np.array([q[b, t, n] @ k[b, s, n // 2] / 2.0 for s in seen], np.float64)
        probs = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        want = sum(p * v[b, s, n // 2] for p, s in zip(probs, seen, strict=True))
        np.testing.assert_allclose(got[b, t, n], want, atol=1e-5)


def test_packed_sequences_do_not_see_each_other():
    a, b = [5, 6, 7], [8, 9, 10, 11]
    alone = hidden_states(params(), *rows([b]), MODEL)
    tokens = jnp.array([[*a, *b]])
    positions = jnp.array([[0, 1, 2, 0, 1, 2, 3]])
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2]])
    packed = hidden_states(params(), tokens, positions, segments, MODEL)
    np.testing.assert_allclose(packed[0, 3:], alone[0], atol=1e-5)


def test_what_comes_after_a_token_does_not_change_it():
    first = hidden_states(params(), *rows([[1, 2, 3, 4]]), MODEL)
    other = hidden_states(params(), *rows([[1, 2, 9, 9]]), MODEL)
    np.testing.assert_array_equal(first[0, :2], other[0, :2])


def test_the_table_counts_what_a_hand_count_does():
    d, f, h, n, k, v = 32, 48, 8, 4, 2, 768
    layer = 2 * d + d * h * (n + 2 * k) + n * h * d + 3 * d * f + 2 * h
    assert parameter_count(MODEL) == v * d + 2 * layer + d


def test_every_parameter_has_an_axis_name_for_each_dimension():
    leaves = jax.tree.leaves(parameter_table(MODEL), is_leaf=lambda x: hasattr(x, "axes"))
    assert all(len(leaf.shape) == len(leaf.axes) for leaf in leaves)


def test_initial_weights_depend_on_the_key_only():
    first, again, other = (init_params(MODEL, jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embedding"], other["embedding"])


def test_heads_that_do_not_share_evenly_are_refused():
    import dataclasses

    with pytest.raises(ValueError, match="kv_heads is 3"):
        dataclasses.replace(MODEL, kv_heads=3)
