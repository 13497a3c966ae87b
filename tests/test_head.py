"""The head: plain log-softmax for any chunk, no shift error, and never a [B, T, V] array."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from demyrl.arrays import Batch
from demyrl.learn.head import token_logprobs
from demyrl.learn.loss import sft_loss
from demyrl.learn.update import make_programs
from tests.tiny import MODEL, drawn_params

B, T, D, V = 2, 7, 8, 11
HEAD = {"embedding": jax.random.normal(jax.random.key(0), (V, D))}
HIDDEN = jax.random.normal(jax.random.key(1), (B, T, D))
TOKENS = jax.random.randint(jax.random.key(2), (B, T), 0, V)

OF_HEAD = jax.jit(token_logprobs, static_argnums=(3, 4))


def plain(head, hidden, tokens, temperature):
    """Log-probs and entropy by the textbook, all logits at once."""
    every = jax.nn.log_softmax(hidden[:, :-1] @ head["embedding"].T / temperature)
    chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(every) * every, axis=-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, 12, 1000])  # 12 tokens in all: 5 does not divide them
def test_any_chunk_gives_the_plain_log_softmax(chunk, temperature):
    got = OF_HEAD(HEAD, HIDDEN, TOKENS, temperature, chunk)
    want = plain(HEAD, HIDDEN, TOKENS, temperature)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_any_chunk_gives_the_plain_gradient(chunk):
    weights = jax.random.normal(jax.random.key(3), (B, T))

    def total(of, head, hidden):
        return jnp.sum(weights * of(head, hidden)[0])

    chunked = functools.partial(total, lambda a, b: token_logprobs(a, b, TOKENS, 0.7, chunk))
    textbook = functools.partial(total, lambda a, b: plain(a, b, TOKENS, 0.7))
    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(HEAD, HIDDEN) for f in (chunked, textbook))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def head_on(logits):
    """Log-prob of token 0 and entropy, of the distribution with these logits."""
    head = {"embedding": jnp.float32(logits)[:, None]}
    logprobs, entropy = token_logprobs(head, jnp.ones((1, 2, 1)), jnp.zeros((1, 2), int), 1.0, 8)
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
    head = {"embedding": jnp.float32([[2.0], [0.0]])}
    got, _ = token_logprobs(head, jnp.ones((1, 2, 1)), jnp.zeros((1, 2), int), temperature, 8)
    assert float(got[0, 1]) == pytest.approx(want, abs=1e-4)


def test_entropies_are_those_of_the_tokens_they_stand_at():
    """Three prompt tokens and three sampled ones, each predicted with another certainty."""
    rise = jnp.float32([2.0, 1.0, 0.5, 0.0, 3.0, 9.0])
    head = {"embedding": jnp.float32([[1.0], [0.0]])}
    _, entropy = token_logprobs(head, rise[None, :, None], jnp.zeros((1, 6), int), 1.0, 4)
    right = 1 / (1 + np.exp(-np.float64([0.5, 0.0, 3.0])))  # what predicts tokens 3, 4 and 5
    want = -right * np.log(right) - (1 - right) * np.log(1 - right)
    np.testing.assert_allclose(entropy[0, 3:], want, atol=1e-5)


def test_entropy_passes_no_gradient():
    grad = jax.grad(lambda hidden: token_logprobs(HEAD, hidden, TOKENS, 1.0, 4)[1].sum())(HIDDEN)
    assert not grad.any()


def test_nothing_predicts_the_first_token():
    logprobs, entropy = OF_HEAD(HEAD, HIDDEN, TOKENS, 1.0, 4)
    assert logprobs[:, 0].tolist() == entropy[:, 0].tolist() == [0.0, 0.0]


def test_three_prompt_tokens_and_two_sampled_ones_train_two_targets():
    """[P, P, P, R, R]: hidden states 2 and 3 predict the sampled tokens, the others nothing."""
    weights = jnp.float32([[0, 0, 0, 0.5, 0.5]])
    tokens, blank = jnp.int32([[1, 2, 3, 4, 5]]), jnp.zeros((1, 5))
    batch = Batch(tokens, tokens, tokens, weights, blank, blank)

    def loss(hidden):
        return sft_loss(token_logprobs(HEAD, hidden, tokens, 1.0, 4)[0], batch)[0]

    grad = jax.grad(loss)(HIDDEN[:1, :5])
    assert np.abs(grad).sum(-1).astype(bool).tolist() == [[False, False, True, True, False]]
    every = jax.nn.log_softmax(HIDDEN[0, :5] @ HEAD["embedding"].T)
    assert float(loss(HIDDEN[:1, :5])) == pytest.approx(-float(every[2, 4] + every[3, 5]) / 2)


def test_the_compiled_training_step_holds_no_logits_of_all_tokens():
    rows, length, model = 4, 32, dataclasses.replace(MODEL, layers=1)
    everything = rows * (length - 1) * model.vocab
    weights = drawn_params(model)
    programs = make_programs(model, optax.identity(), sft_loss, 1.0, chunk=16)
    blank = jnp.zeros((rows, length))
    whole = jnp.zeros((rows, length), jnp.int32)
    batch = Batch(whole, whole, whole, blank, blank, blank)
    total = (weights, {"sft/loss": jnp.float32(0)})
    compiled = programs.accumulate.lower(weights, total, batch).compile()
    assert largest_array(compiled) < everything


def test_the_search_for_the_largest_array_finds_logits_that_exist():
    compiled = OF_HEAD.lower(HEAD, HIDDEN, TOKENS, 1.0, 12).compile()
    assert largest_array(compiled) >= 12 * V


def largest_array(compiled):
    """Elements of the largest array that a compiled program names."""
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_a_head_of_its_own_is_used_when_embeddings_are_not_tied():
    untied = {**HEAD, "head": -HEAD["embedding"]}
    got, _ = OF_HEAD(untied, HIDDEN, TOKENS, 1.0, 4)
    want, _ = plain({"embedding": -HEAD["embedding"]}, HIDDEN, TOKENS, 1.0)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_logits_of_bfloat16_states_are_summed_up_in_float32():
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    hidden = HIDDEN.astype(model.dtype)
    logprobs, entropy = OF_HEAD(HEAD, hidden, TOKENS, 1.0, 4)
    rounded = {"embedding": HEAD["embedding"].astype(model.dtype).astype(jnp.float32)}
    want = plain(rounded, hidden.astype(jnp.float32), TOKENS, 1.0)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, want[0], atol=1e-5)
