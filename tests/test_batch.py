"""Token weights and packing: every token once, whatever the order, and back again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.learn.batch import (
    Example,
    PackConfig,
    blank_batch,
    lay_out,
    pack,
    shapes,
    token_weights,
    unpack,
    weigh_by_micro_batch,
)
from demyrl.learn.loss import sft_loss

ROWS = PackConfig(rows=2, row_tokens=12, rungs=1)
LADDER = PackConfig(rows=2, row_tokens=12, rungs=3)  # rows of 12, 6 and 3 tokens
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


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
            ref_logprobs=-rng.random(n).astype(np.float32),
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


@pytest.mark.parametrize("aggregation", ["token", "sequence", "micro_batch"])
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


def test_a_constant_of_eight_makes_every_token_an_eighth_of_its_sequences_share():
    weights = token_weights(masks_of(2, 4), "constant", constant=8)
    np.testing.assert_allclose(np.concatenate(weights), 1 / 16)


def test_a_constant_of_zero_is_refused():
    with pytest.raises(ValueError, match="constant is 0 with aggregation .* must be above 0"):
        token_weights(masks_of(2), "constant")


def test_the_token_mean_of_each_micro_batch_is_not_that_of_all_tokens():
    """The reference code's fault: 9 + 1 tokens in two micro-batches of one sequence each."""
    weights = token_weights(masks_of(9, 1), "micro_batch")
    examples = [Example(np.ones(len(w), np.int32), w) for w in weights]
    packed = weigh_by_micro_batch(pack(examples, PackConfig(rows=1, row_tokens=9, rungs=1)))
    np.testing.assert_allclose(packed.batches[0].weights, np.full((1, 9), 1 / 18))
    np.testing.assert_allclose(packed.batches[1].weights, [[1 / 2] + [0] * 8])


def test_a_micro_batch_counts_its_share_of_the_sequences_whatever_its_tokens():
    masks = [np.array(m, bool) for m in ([0, 1, 1, 1], [1, 1], [0, 1])]
    weights = token_weights(masks, "micro_batch")
    examples = [Example(np.ones(len(w), np.int32), w) for w in weights]
    packed = weigh_by_micro_batch(pack(examples, PackConfig(rows=1, row_tokens=4, rungs=1)))
    np.testing.assert_allclose(packed.batches[0].weights, [[0, 1 / 9, 1 / 9, 1 / 9]])
    np.testing.assert_allclose(packed.batches[1].weights, [[2 / 9, 2 / 9, 0, 2 / 9]])


def test_an_unknown_aggregation_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="aggregation is 'tokens': use one of token, sequence"):
        token_weights(masks_of(1), "tokens")


def test_a_ladder_of_three_halves_the_rows_tokens_and_doubles_their_number():
    assert shapes(PackConfig(rows=4, row_tokens=96, rungs=3)) == ((4, 96), (8, 48), (16, 24))


@pytest.mark.parametrize(
    "values, message",
    [
        ((4, 90, 3), "row_tokens is 90 and pack.rungs is 3: .* 1/4 .* Use 92 tokens"),
        ((4, 96, 0), "pack.rungs is 0: use at least 1"),
    ],
)
def test_rows_that_do_not_halve_are_refused_with_a_number_that_does(values, message):
    with pytest.raises(ValueError, match=message):
        PackConfig(*values)


def test_the_longest_goes_first_and_each_where_it_leaves_the_least_room():
    assert lay_out([3, 7, 2, 8, 2], PackConfig(2, 10, 1)) == [[[3, 2], [1, 0]], [[4], []]]


def test_short_sequences_leave_the_long_rows():
    """54 tokens need 3 micro-batches of 24; only the sequence of 10 needs a row of 12."""
    long, middle, short = lay_out([10] + [5] * 4 + [3] * 8, LADDER)
    assert long == [[0], []]
    assert middle == [[1], [2], [3], [4]]
    assert short == [[i] for i in range(5, 13)]


def test_an_unfilled_last_micro_batch_has_the_shortest_rows():
    assert lay_out([3], LADDER) == [[[0]] + [[]] * 7]


@given(LENGTHS, st.integers(0, 5), st.sampled_from([ROWS, LADDER]))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_nothing_overlaps(lengths, seed, config):
    examples = examples_of(lengths, seed)
    packed = pack(examples, config)
    taken = [np.zeros(batch.tokens.shape, int) for batch in packed.batches]
    for example, (b, r, c) in zip(examples, packed.places, strict=True):
        here = (r, slice(c, c + len(example.tokens)))
        taken[b][here] += 1
        for name in ("tokens", "weights", "old_logprobs", "ref_logprobs"):
            field = getattr(packed.batches[b], name)[here]
            np.testing.assert_array_equal(field, getattr(example, name))
        assert set(packed.batches[b].advantages[here]) == {np.float32(example.advantage)}
    for batch, count in zip(packed.batches, taken, strict=True):
        np.testing.assert_array_equal(count, batch.segments > 0)  # once where real, else never


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_each_segment_counts_its_own_positions_from_zero(lengths):
    for batch in pack(examples_of(lengths), LADDER).batches:
        for positions, segments in zip(batch.positions, batch.segments, strict=True):
            used = segments[segments > 0]
            assert np.all(np.isin(np.diff(used), [0, 1])) and used[:1].tolist() in ([], [1])
            for segment in np.unique(used):
                own = positions[segments == segment]
                np.testing.assert_array_equal(own, np.arange(len(own)))


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_padding_has_neither_weight_nor_segment(lengths):
    for batch in pack(examples_of(lengths), LADDER).batches:
        blank = batch.segments == 0
        for field in (batch.tokens, batch.positions, batch.weights, batch.advantages):
            assert not field[blank].any()


@given(LENGTHS, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_unpacking_is_the_inverse_of_packing(lengths, seed):
    examples = examples_of(lengths, seed)
    packed = pack(examples, LADDER)
    got = unpack(packed, [batch.old_logprobs for batch in packed.batches], lengths)
    for row, example in zip(got, examples, strict=True):
        np.testing.assert_array_equal(row, example.old_logprobs)


def test_the_same_examples_are_packed_the_same_way():
    first, second = (pack(examples_of([3, 9, 4, 4, 1, 7]), LADDER) for _ in range(2))
    assert first.places == second.places
    jax.tree.map(np.testing.assert_array_equal, first.batches, second.batches)


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_every_micro_batch_has_a_shape_of_the_ladder_and_something_in_it(lengths):
    for batch in pack(examples_of(lengths), LADDER).batches:
        assert batch.tokens.shape in shapes(LADDER) and batch.segments.any()


def test_a_blank_batch_compiles_what_a_packed_one_runs():
    compiled = jax.jit(lambda batch: batch.weights.sum())
    for shape in shapes(LADDER):
        assert compiled(blank_batch(shape)) == 0.0
    for batch in pack(examples_of([10, 5, 5, 5, 5] + [3] * 8), LADDER).batches:
        compiled(batch)
    assert compiled._cache_size() == 3


def test_the_fill_is_the_share_of_tokens_that_are_real():
    assert pack(examples_of([9, 9, 9, 9, 9]), ROWS).fill == pytest.approx(45 / 72)


def agentic_lengths(seed, count=256):
    """Long-tailed: a median of 3k tokens, a mean of 4.8k, and one in fifty cut at the context."""
    drawn = np.random.default_rng(seed).lognormal(np.log(3000), 1.0, count)
    return np.clip(drawn.astype(int), 1, 23_040).tolist()


AGENTIC = PackConfig(rows=4, row_tokens=23_040, rungs=3)


@pytest.mark.parametrize("seed", range(6))
def test_long_tailed_trajectories_fill_the_rows_in_the_fewest_micro_batches(seed):
    lengths = agentic_lengths(seed)
    micro_batches, size = lay_out(lengths, AGENTIC), 4 * 23_040
    assert sum(lengths) / (len(micro_batches) * size) >= 0.92
    assert len(micro_batches) == -(-sum(lengths) // size)  # no packing could do with fewer


@pytest.mark.parametrize("seed", range(6))
def test_the_ladder_spares_a_quarter_of_the_pairs_that_attention_looks_at(seed):
    def pairs(config):
        size = config.rows * config.row_tokens
        return sum(size**2 // len(rows) for rows in lay_out(agentic_lengths(seed), config))

    assert pairs(AGENTIC) < 0.75 * pairs(PackConfig(4, 23_040, 1))


def test_no_examples_make_one_blank_micro_batch():
    (batch,) = pack([], LADDER).batches
    assert not batch.segments.any() and batch.tokens.shape in shapes(LADDER)


def test_a_sequence_longer_than_a_row_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="a sequence has 13 tokens, more than a row's 12. Raise"):
        pack(examples_of([4, 13]), LADDER)


def test_float64_log_probs_stay_float64():
    example = Example(np.ones(2, np.int32), np.ones(2, np.float32), 1.0, np.full(2, 1 / 3))
    assert pack([example], LADDER).batches[0].old_logprobs[0, 0] == 1 / 3
