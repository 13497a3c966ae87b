"""The head: plain log-softmax for any chunk, mask and mesh, and never logits of all tokens."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from demyrl.learn import head
from demyrl.learn.head import token_logprobs
from demyrl.model.mesh import MeshConfig, make_mesh, spec

B, T, D, V = 2, 7, 8, 11
HEAD = {"embedding": jax.random.normal(jax.random.key(0), (V, D))}
HIDDEN = jax.random.normal(jax.random.key(1), (B, T, D))
TOKENS = jax.random.randint(jax.random.key(2), (B, T), 0, V)
WEIGHTS = jax.random.normal(jax.random.key(3), (B, T))
ALL = jnp.ones((B, T), bool)
MASKS = {
    "all": ALL,
    "none": jnp.zeros((B, T), bool),
    "one": jnp.zeros((B, T), bool).at[1, 4].set(True),
    "ragged": jnp.bool_([[1, 1, 0, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1, 0]]),
}

OF_HEAD = jax.jit(token_logprobs, static_argnums=(4, 5))


def plain(weights, hidden, tokens, needed, temperature):
    """Log-probs and entropy by the textbook, all logits at once."""
    matrix = weights.get("head", weights["embedding"])
    every = jax.nn.log_softmax(hidden[:, :-1] @ matrix.T / temperature)
    chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(every) * every, axis=-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) * needed for x in (chosen, entropy))


@functools.partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(of, fixed, weights, hidden, tokens, needed, factors):
    """What `of` gives, and the gradients of its log-probs times the factors."""

    def total(weights, hidden):
        logprobs, entropy = of(weights, hidden, tokens, needed, *fixed)
        return jnp.sum(factors * logprobs), (logprobs, entropy)

    grads, values = jax.grad(total, argnums=(0, 1), has_aux=True)(weights, hidden)
    return values, grads


def assert_close(got, want, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, 12, 1000])  # 12 tokens in all: 5 does not divide them
def test_any_chunk_gives_the_plain_values_and_gradients(chunk, temperature):
    batch = (HEAD, HIDDEN, TOKENS, ALL, WEIGHTS)
    got = values_and_gradients(token_logprobs, (temperature, chunk), *batch)
    want = values_and_gradients(plain, (temperature,), *batch)
    assert_close(got, want, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_any_mask_gives_the_plain_values_and_gradients_and_zeros_elsewhere(mask):
    batch = (HEAD, HIDDEN, TOKENS, MASKS[mask], WEIGHTS)
    got = values_and_gradients(token_logprobs, (0.7, 4), *batch)
    assert_close(got, values_and_gradients(plain, (0.7,), *batch), atol=1e-5)


@pytest.mark.parametrize("mask", ["all", "ragged"])
def test_in_float64_nothing_is_rounded_to_float32(mask):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (HEAD, HIDDEN, WEIGHTS))
        batch = (*wide[:2], TOKENS, MASKS[mask], wide[2])
        got = values_and_gradients(token_logprobs, (0.7, 5), *batch)
        want = values_and_gradients(plain, (0.7,), *batch)
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float64")}
        assert_close(got, want, atol=1e-10, rtol=1e-10)


def test_a_head_of_its_own_is_used_when_embeddings_are_not_tied():
    untied = {"embedding": HEAD["embedding"], "head": jnp.flip(HEAD["embedding"], 0)}
    batch = (untied, HIDDEN, TOKENS, ALL, WEIGHTS)
    got = values_and_gradients(token_logprobs, (1.0, 4), *batch)
    assert_close(got, values_and_gradients(plain, (1.0,), *batch), atol=1e-5)
    assert not got[1][0]["embedding"].any()


def test_hidden_states_that_predict_nothing_needed_may_hold_anything():
    needed = MASKS["ragged"]
    before = jnp.pad(needed[:, 1:], ((0, 0), (0, 1)))[..., None]
    nothing = jnp.where(jnp.arange(D) % 2, jnp.nan, jnp.inf)
    broken = jnp.where(before, HIDDEN, nothing)
    got, want = (
        values_and_gradients(token_logprobs, (1.0, 4), HEAD, hidden, TOKENS, needed, WEIGHTS)
        for hidden in (broken, HIDDEN)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_one_program_turns_its_loops_as_often_as_there_are_chunks_to_do(monkeypatch):
    turns, whole = [], head.chunk_logits

    def counted(*args):
        jax.debug.callback(lambda: turns.append(1))
        return whole(*args)

    monkeypatch.setattr(head, "chunk_logits", counted)

    @jax.jit
    def program(count):
        needed = jnp.pad(jnp.arange(12).reshape(B, 6) < count, ((0, 0), (1, 0)))
        batch = (HEAD, HIDDEN, TOKENS, needed, WEIGHTS)
        return values_and_gradients.__wrapped__(token_logprobs, (1.0, 4), *batch)

    def turned(count):
        turns.clear()
        jax.block_until_ready(program(count))
        jax.effects_barrier()
        return len(turns) / 2  # once for the values, once for the gradients

    assert [turned(count) for count in (0, 1, 4, 5, 8, 12)] == [0, 1, 1, 2, 2, 3]
    assert program._cache_size() == 1


def head_on(logits):
    """Log-prob of token 0 and entropy, of the distribution with these logits."""
    weights = {"embedding": jnp.float32(logits)[:, None]}
    tokens, needed = jnp.zeros((1, 2), int), jnp.ones((1, 2), bool)
    logprobs, entropy = OF_HEAD(weights, jnp.ones((1, 2, 1)), tokens, needed, 1.0, 8)
    return float(logprobs[0, 1]), float(entropy[0, 1])


@pytest.mark.parametrize(
    "logits, logprob, entropy",
    [
        ([0, 0, 0, 0], -1.3863, 1.3863),  # uniform over four: log 4
        ([0, 0], -0.6931, 0.6931),
        ([200, 0, 0, 0], 0.0, 0.0),  # one-hot
        ([2, 0], -0.1269, 0.3653),
    ],
)
def test_log_probs_and_entropies_worked_out_by_hand(logits, logprob, entropy):
    assert head_on(logits) == pytest.approx((logprob, entropy), abs=1e-4)


@pytest.mark.parametrize("temperature, want", [(1.0, -0.1269), (0.5, -0.0181), (2.0, -0.3133)])
def test_the_temperature_divides_the_logits_not_the_log_prob(temperature, want):
    weights = {"embedding": jnp.float32([[2.0], [0.0]])}
    tokens, needed = jnp.zeros((1, 2), int), jnp.ones((1, 2), bool)
    got, _ = OF_HEAD(weights, jnp.ones((1, 2, 1)), tokens, needed, temperature, 8)
    assert float(got[0, 1]) == pytest.approx(want, abs=1e-4)


def test_entropies_are_those_of_the_tokens_they_stand_at():
    """Three prompt tokens and three sampled ones, each predicted with another certainty."""
    rise = jnp.float32([2.0, 1.0, 0.5, 0.0, 3.0, 9.0])
    weights, needed = {"embedding": jnp.float32([[1.0], [0.0]])}, jnp.arange(6)[None] >= 3
    _, entropy = OF_HEAD(weights, rise[None, :, None], jnp.zeros((1, 6), int), needed, 1.0, 4)
    right = 1 / (1 + np.exp(-np.float64([0.5, 0.0, 3.0])))  # what predicts tokens 3, 4 and 5
    want = -right * np.log(right) - (1 - right) * np.log(1 - right)
    np.testing.assert_allclose(entropy[0], [0, 0, 0, *want], atol=1e-5)


def test_entropy_passes_no_gradient():
    @jax.jit
    @jax.grad
    def grad(hidden):
        return jnp.sum(token_logprobs(HEAD, hidden, TOKENS, ALL, 1.0, 4)[1])

    assert not grad(HIDDEN).any()


def test_nothing_predicts_the_first_token():
    logprobs, entropy = OF_HEAD(HEAD, HIDDEN, TOKENS, ALL, 1.0, 4)
    assert logprobs[:, 0].tolist() == entropy[:, 0].tolist() == [0.0, 0.0]


def test_three_prompt_tokens_and_two_sampled_ones_train_two_targets():
    """[P, P, P, R, R]: hidden states 2 and 3 predict the sampled tokens, the others nothing."""
    needed = jnp.bool_([[0, 0, 0, 1, 1]])
    batch = (HEAD, HIDDEN[:1, :5], TOKENS[:1, :5], needed, jnp.ones((1, 5)))
    _, (_, grad) = values_and_gradients(token_logprobs, (1.0, 4), *batch)
    assert np.abs(grad).sum(-1).astype(bool).tolist() == [[False, False, True, True, False]]


def test_logits_of_bfloat16_states_are_summed_up_in_float32():
    hidden = HIDDEN.astype(jnp.bfloat16)
    logprobs, entropy = OF_HEAD(HEAD, hidden, TOKENS, ALL, 1.0, 4)
    rounded = {"embedding": HEAD["embedding"].astype(hidden.dtype).astype(jnp.float32)}
    want = plain(rounded, hidden.astype(jnp.float32), TOKENS, ALL, 1.0)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    assert_close((logprobs, entropy), want, atol=1e-5)


def test_gradients_of_bfloat16_states_are_added_up_in_float32():
    """A thousand equal addends: in bfloat16 the sum would stop growing at 256 of them."""
    count = 1001
    weights = {"embedding": jnp.zeros((2, 1))}
    hidden = jnp.ones((1, count, 1), jnp.bfloat16)
    tokens, ones = jnp.zeros((1, count), int), jnp.ones((1, count))
    batch = (weights, hidden, tokens, ones > 0, ones)
    _, (grad, d_hidden) = values_and_gradients(token_logprobs, (1.0, 1), *batch)
    assert grad["embedding"].ravel().tolist() == [500.0, -500.0]
    assert d_hidden.dtype == jnp.bfloat16


LARGE = {"rows": 4, "length": 256, "width": 8, "vocab": 768, "chunk": 16}


def compiled_gradients(of, fixed, rows, length, width, vocab, chunk):
    """The program that makes values and gradients at these sizes, compiled and not run."""
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    needed = jax.ShapeDtypeStruct((rows, length), jnp.bool_)
    weights, hidden = {"embedding": shaped((vocab, width))}, shaped((rows, length, width))
    batch = (weights, hidden, tokens, needed, shaped((rows, length)))
    return values_and_gradients.lower(of, fixed, *batch).compile()


def largest_array(compiled):
    """Elements of the largest array that a compiled program names."""
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_the_compiled_gradients_hold_the_logits_of_a_chunk_and_no_more():
    compiled = compiled_gradients(token_logprobs, (1.0, LARGE["chunk"]), **LARGE)
    assert largest_array(compiled) == LARGE["chunk"] * LARGE["vocab"]


def test_the_compiled_gradients_take_a_fraction_of_the_memory_of_all_logits():
    compiled = compiled_gradients(token_logprobs, (1.0, LARGE["chunk"]), **LARGE)
    everything = 4 * LARGE["rows"] * LARGE["length"] * LARGE["vocab"]
    assert compiled.memory_analysis().temp_size_in_bytes < everything / 8


def test_both_measures_of_memory_find_logits_that_exist():
    compiled = compiled_gradients(plain, (1.0,), **LARGE)
    everything = LARGE["rows"] * (LARGE["length"] - 1) * LARGE["vocab"]
    assert largest_array(compiled) >= everything
    assert compiled.memory_analysis().temp_size_in_bytes > 4 * everything


def spread_batch():
    """Eight rows of 16 tokens: one whole, one without any needed token, the others at random."""
    keys = jax.random.split(jax.random.key(5), 5)
    weights = {"embedding": jax.random.normal(keys[0], (64, 16)) / 4}
    needed = jax.random.bernoulli(keys[3], 0.5, (8, 16)).at[0].set(True).at[3].set(False)
    tokens = jax.random.randint(keys[2], (8, 16), 0, 64)
    hidden, factors = jax.random.normal(keys[1], (8, 16, 16)), jax.random.normal(keys[4], (8, 16))
    return weights, hidden, tokens, needed, factors


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)])
def test_eight_devices_give_the_values_and_gradients_of_one(sizes):
    mesh, batch = make_mesh(MeshConfig(*sizes)), spread_batch()
    got = values_and_gradients(token_logprobs, (0.7, 5, mesh), *batch)
    want = values_and_gradients(token_logprobs, (0.7, 5), *batch)
    assert_close(got, want, atol=1e-5, rtol=1e-5)
    place = NamedSharding(mesh, spec(("vocab", "width")))
    assert got[1][0]["embedding"].sharding.is_equivalent_to(place, 2)
