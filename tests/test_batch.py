"""Token weights and packing: every token once, whatever the order, and back again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.learn.batch import (
    Example,
    PackConfig,
    first_fit_decreasing,
    pack,
    token_weights,
    unpack,
)
from demyrl.learn.loss import LossConfig, grpo_loss, sft_loss

ROWS = PackConfig(rows=2, row_tokens=10)
LENGTHS = st.lists(st.integers(1, 10), min_size=1, max_size=12)


def masks_of(*lengths):
    return [np.ones(n, bool) for n in lengths]


def examples_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Example(
            tokens=rng.integers(1, 700, n).astype(np.int32),
            weights=rng.random(n).astype(np.float32),
            advantage=float(rng.normal()),
            old_logprobs=-rng.random(n).astype(np.float32),
        )
        for n in lengths
    ]


def laid_out(values, packed):
    """Values of the examples' tokens as one array for each micro-batch, 0 elsewhere."""
    arrays = [np.zeros(batch.tokens.shape) for batch in packed.batches]
    for value, (b, r, c) in zip(values, packed.places, strict=True):
        arrays[b][r, c : c + len(value)] = value
    return arrays


def weighted(weights, losses):
    """The sum that the losses of all tokens add up to."""
    return sum(float(w @ np.full(len(w), loss)) for w, loss in zip(weights, losses, strict=True))


@pytest.mark.parametrize("aggregation, want", [("token", 3.0), ("sequence", 2.5)])
def test_lengths_two_and_four_with_losses_one_and_four(aggregation, want):
    assert weighted(token_weights(masks_of(2, 4), aggregation), [1, 4]) == pytest.approx(want)


def test_lengths_one_and_nine_give_a_tenth_not_a_half():
    assert weighted(token_weights(masks_of(1, 9), "token"), [1, 0]) == pytest.approx(0.1)


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_the_global_mean_is_the_same_for_any_micro_batches(split):
    weights, logprobs = token_weights(masks_of(1, 9), "token"), [-np.ones(1), np.zeros(9)]
    total = 0.0
    for part in split:
        packed = pack(
            [Example(np.zeros(len(weights[i]), np.int32), weights[i]) for i in part], ROWS
        )
        (row,) = laid_out([logprobs[i] for i in part], packed)
        total += float(sft_loss(jnp.float32(row), packed.batches[0])[0])
    assert total == pytest.approx(0.1)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_weights_sum_to_one_and_stand_on_sampled_tokens_only(aggregation, masks):
    masks = [np.array(mask) for mask in masks]
    weights = token_weights(masks, aggregation)
    total = sum(float(w.sum()) for w in weights)
    assert total == pytest.approx(1.0 if any(m.any() for m in masks) else 0.0, abs=1e-6)
    for mask, row in zip(masks, weights, strict=True):
        np.testing.assert_array_equal(row > 0, mask)


def test_tool_tokens_do_not_count_as_length():
    masks = [np.array([0, 1, 1, 0, 0, 0, 1, 1], bool), np.ones(4, bool)]
    (with_tool, without) = token_weights(masks, "token")
    assert with_tool[1] == without[0] == pytest.approx(1 / 8)


def test_an_unknown_aggregation_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="aggregation is 'tokens': use one of token, sequence"):
        token_weights(masks_of(1), "tokens")


def test_the_longest_goes_first_and_each_into_the_first_row_it_fits():
    assert first_fit_decreasing([3, 7, 2, 8], 10) == [[3, 2], [1, 0]]


@given(LENGTHS, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_and_nothing_overlaps(lengths, seed):
    examples = examples_of(lengths, seed)
    packed = pack(examples, ROWS)
    taken = [np.zeros((2, 10), int) for _ in packed.batches]
    for example, (b, r, c) in zip(examples, packed.places, strict=True):
        here = (r, slice(c, c + len(example.tokens)))
        taken[b][here] += 1
        np.testing.assert_array_equal(packed.batches[b].tokens[here], example.tokens)
        np.testing.assert_array_equal(packed.batches[b].weights[here], example.weights)
        np.testing.assert_array_equal(packed.batches[b].old_logprobs[here], example.old_logprobs)
        assert set(packed.batches[b].advantages[here]) == {np.float32(example.advantage)}
    for batch, count in zip(packed.batches, taken, strict=True):
        np.testing.assert_array_equal(count, batch.segments > 0)  # once where real, else never


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_each_segment_counts_its_own_positions_from_zero(lengths):
    for batch in pack(examples_of(lengths), ROWS).batches:
        for positions, segments in zip(batch.positions, batch.segments, strict=True):
            used = segments[segments > 0]
            assert np.all(np.isin(np.diff(used), [0, 1])) and used[:1].tolist() in ([], [1])
            for segment in np.unique(used):
                own = positions[segments == segment]
                np.testing.assert_array_equal(own, np.arange(len(own)))


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_padding_has_neither_weight_nor_segment(lengths):
    for batch in pack(examples_of(lengths), ROWS).batches:
        blank = batch.segments == 0
        for field in (batch.tokens, batch.positions, batch.weights, batch.advantages):
            assert not field[blank].any()


@given(LENGTHS, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_unpacking_is_the_inverse_of_packing(lengths, seed):
    examples = examples_of(lengths, seed)
    packed = pack(examples, ROWS)
    got = unpack(packed, [batch.old_logprobs for batch in packed.batches], lengths)
    for row, example in zip(got, examples, strict=True):
        np.testing.assert_array_equal(row, example.old_logprobs)


def test_the_same_examples_are_packed_the_same_way():
    first, second = (pack(examples_of([3, 9, 4, 4, 1, 7]), ROWS) for _ in range(2))
    assert first.places == second.places
    jax.tree.map(np.testing.assert_array_equal, first.batches, second.batches)


def test_every_micro_batch_has_the_same_shape():
    packed = pack(examples_of([9, 9, 9, 9, 9]), ROWS)
    assert [batch.tokens.shape for batch in packed.batches] == [(2, 10)] * 3


def test_the_fill_is_the_share_of_tokens_that_are_real():
    assert pack(examples_of([9, 9, 9, 9, 9]), ROWS).fill == pytest.approx(45 / 60)


def test_no_examples_make_one_blank_micro_batch():
    (batch,) = pack([], ROWS).batches
    assert not batch.segments.any()


def test_a_sequence_longer_than_a_row_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="a sequence has 11 tokens, more than a row's 10. Raise"):
        pack(examples_of([4, 11]), ROWS)


def test_any_packing_of_any_order_gives_one_gradient_in_float64():
    lengths = [1, 9, 4, 3, 10, 2, 2, 6]
    examples, rng = examples_of(lengths), np.random.default_rng(0)
    now = [
        e.old_logprobs + 0.3 * rng.normal(size=n) for e, n in zip(examples, lengths, strict=True)
    ]
    with jax.enable_x64(True):
        grads = [gradients(examples, now, rng.permutation(8), rows) for rows in [1, 2, 3] * 10]
    for other in grads[1:]:
        np.testing.assert_allclose(other, grads[0], atol=1e-10, rtol=0)


@functools.partial(jax.jit, static_argnums=2)
@functools.partial(jax.grad, has_aux=True)
def gradient(logprobs, batch, config):
    return grpo_loss(logprobs, batch, config)


def gradients(examples, now, order, rows):
    """The gradient of every token's log-prob, in the order of the examples."""
    packed = pack([examples[i] for i in order], PackConfig(rows, 10))
    held = laid_out([now[i] for i in order], packed)
    config = LossConfig(0.2, 0.28, 10.0)
    grads = [gradient(x, b, config)[0] for x, b in zip(held, packed.batches, strict=True)]
    assert grads[0].dtype == np.float64
    each = unpack(packed, jax.device_get(grads), [len(now[i]) for i in order])
    return np.concatenate([each[i] for i in np.argsort(order)])
