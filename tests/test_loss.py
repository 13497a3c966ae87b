"""The losses: clip sides by hand, a float64 reference, and nothing from what is not trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.arrays import Batch
from demyrl.learn.loss import LossConfig, grpo_loss, sft_loss

CONFIG = LossConfig(0.2, 0.28, dual_clip=10.0, ratio="token", kl=0.0, kl_estimator="k3")
LOSS = jax.jit(grpo_loss, static_argnums=2)
RUN = jax.jit(jax.value_and_grad(grpo_loss, has_aux=True), static_argnums=2)
SHARES = ("loss/clipped_low", "loss/clipped_high", "loss/dual_clipped")


def batch_of(weights, advantages, old_logprobs=0.0, ref_logprobs=0.0, segments=1):
    """One row with these values; what the loss does not read is zero."""
    weights = np.atleast_2d(np.asarray(weights, np.float32))
    blank = np.zeros(weights.shape, np.int32)
    old, advantages, ref = (
        np.broadcast_to(np.float32(values), weights.shape)
        for values in (old_logprobs, advantages, ref_logprobs)
    )
    segments = np.broadcast_to(np.int32(segments), weights.shape)
    return jax.tree.map(jnp.asarray, Batch(blank, blank, segments, weights, old, advantages, ref))


def loss_of(logprobs, batch, config=CONFIG):
    return LOSS(jnp.atleast_2d(jnp.asarray(logprobs, jnp.float32)), batch, config)


def token_loss(ratio, advantage, config=CONFIG):
    """Loss and numbers of a single token with this ratio."""
    return loss_of([np.log(ratio)], batch_of([1.0], advantage), config)


@pytest.mark.parametrize(
    "advantage, ratio, gain, stopped",
    [
        (1, 1.25, 1.25, None),  # within 1.28
        (1, 1.30, 1.28, "loss/clipped_high"),
        (1, 0.70, 0.70, None),  # the lower side does not stop a positive advantage
        (-1, 0.70, -0.80, "loss/clipped_low"),
        (-1, 1.50, -1.50, None),  # nor the upper side a negative one
        (-1, 0.85, -0.85, None),
        (2, 1.30, 2.56, "loss/clipped_high"),
        (0, 1.50, 0, None),
        (0, 0.50, 0, None),
    ],
)
def test_each_side_of_the_clip_stops_one_sign(advantage, ratio, gain, stopped):
    loss, numbers = token_loss(ratio, advantage)
    assert float(loss) == pytest.approx(-gain, abs=1e-6)
    assert {name for name in SHARES if numbers[name]} == ({stopped} if stopped else set())


@pytest.mark.parametrize(
    "advantage, ratio, gain, stopped",
    [(-1, 4, -3, 1.0), (-1, 2.9, -2.9, 0.0), (-2, 4, -6, 1.0), (1, 4, 1.28, 0.0), (0, 4, 0, 0.0)],
)
def test_a_dual_clip_of_three_bounds_only_negative_advantages(advantage, ratio, gain, stopped):
    loss, numbers = token_loss(ratio, advantage, dataclasses.replace(CONFIG, dual_clip=3.0))
    assert float(loss) == pytest.approx(-gain, abs=1e-5)
    assert float(numbers["loss/dual_clipped"]) == stopped


def test_without_a_dual_clip_a_negative_advantage_has_no_bound():
    loss, numbers = token_loss(40, -1, dataclasses.replace(CONFIG, dual_clip=0.0))
    assert float(loss) == pytest.approx(40) and float(numbers["loss/dual_clipped"]) == 0.0


def test_the_gradient_at_ratio_one_is_minus_weight_times_advantage():
    batch = batch_of([0.1, 0.2, 0.3, 0.4], [1.0, -1.0, 0.5, 0.0], -1.5)
    grad = jax.grad(lambda x: loss_of(x, batch)[0])(np.full((1, 4), -1.5, np.float32))
    np.testing.assert_allclose(grad, [[-0.1, 0.2, -0.15, 0.0]], atol=1e-7)


def test_the_loss_of_the_policy_that_sampled_is_minus_the_mean_advantage():
    loss, numbers = loss_of([-1.0, -2.0], batch_of([0.5, 0.5], [1.0, -3.0], [-1.0, -2.0]))
    assert float(loss) == pytest.approx(1.0)
    assert float(numbers["loss/kl_to_old"]) == 0.0


@pytest.mark.parametrize("ratio, advantage", [(1.3, 1), (0.7, -1), (11, -1)])
def test_a_clipped_token_has_no_gradient(ratio, advantage):
    batch = batch_of([1.0], advantage)
    grad = jax.grad(lambda x: loss_of(x, batch)[0])(np.log([[ratio]], dtype=np.float32))
    assert float(grad[0, 0]) == 0.0


def test_the_kl_estimate_of_half_a_probability_is_worked_out_by_hand():
    _, numbers = token_loss(2.0, 1.0)  # the ratio of the trained to the old policy is 2
    assert float(numbers["loss/kl_to_old"]) == pytest.approx(2 - 1 - np.log(2), abs=1e-6)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("difference", [200.0, -200.0, 1e4, -1e4, 1e30, -1e30, np.inf, -np.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(difference, advantage, ratio):
    batch = batch_of([0.5, 0.5], advantage)
    config = dataclasses.replace(CONFIG, dual_clip=0.0, ratio=ratio, kl=0.1)
    (loss, numbers), grad = RUN(np.float32([[difference, 0.1]]), batch, config)
    assert np.isfinite([float(loss), *grad[0], *map(float, numbers.values())]).all()


def test_a_nan_log_prob_of_a_trained_token_is_not_hidden():
    assert np.isnan(float(loss_of([np.nan], batch_of([1.0], 1.0))[0]))


HOSTILE = [np.nan, np.inf, -np.inf, 1e30]


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("junk", HOSTILE)
def test_what_stands_at_masked_positions_reaches_neither_loss_nor_gradient_nor_numbers(junk, ratio):
    weights = [0.0, 0.5, 0.0, 0.5]
    clean = batch_of(weights, [0, 1.0, 0, -1.0], [0, -1.0, 0, -0.5], -1.0)
    dirty = batch_of(
        weights, [junk, 1.0, junk, -1.0], [-junk, -1.0, junk, -0.5], [junk, -1.0, -junk, -1.0]
    )
    config = dataclasses.replace(CONFIG, dual_clip=0.0, ratio=ratio, kl=0.1)
    want = RUN(np.float32([[0, -0.9, 0, -0.4]]), clean, config)
    got = RUN(np.float32([[junk, -0.9, junk, -0.4]]), dirty, config)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got[1].tolist()[0][0] == 0.0


def test_a_batch_without_trained_tokens_gives_zeros():
    batch = batch_of([0.0, 0.0], [1.0, -1.0])
    (loss, numbers), grad = RUN(np.float32([[-1.0, np.nan]]), batch, CONFIG)
    assert float(loss) == 0.0 and not grad.any()
    assert {float(x) for x in numbers.values()} == {0.0}


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_every_share_lies_between_zero_and_one(seed):
    rng = np.random.default_rng(seed)
    weights = rng.random((3, 7)) * (rng.random((3, 7)) < 0.6)
    batch = batch_of(weights / max(weights.sum(), 1e-9), rng.normal(size=(3, 7)))
    _, numbers = LOSS(np.float32(5 * rng.normal(size=(3, 7))), batch, CONFIG)
    assert all(0 <= float(numbers[name]) <= 1 + 1e-6 for name in SHARES)
    assert float(numbers["loss/kl_to_old"]) >= 0


def test_sft_is_the_weighted_negative_log_likelihood():
    loss, numbers = sft_loss(jnp.float32([[-1.0, -2.0, -9.0]]), batch_of([0.25, 0.75, 0.0], 0.0))
    assert float(loss) == pytest.approx(0.25 + 1.5)
    assert float(numbers["sft/loss"]) == float(loss)


@pytest.mark.parametrize("junk", HOSTILE)
def test_what_the_teacher_did_not_write_has_no_gradient_in_sft(junk):
    batch = batch_of([0.0, 0.5, 0.5], 0.0)
    grad = jax.grad(lambda x: sft_loss(x, batch)[0])(np.float32([[junk, -1.0, -2.0]]))
    np.testing.assert_array_equal(grad, [[0.0, -0.5, -0.5]])


GSPO = LossConfig(0.0003, 0.0004, dual_clip=0.0, ratio="sequence", kl=0.0, kl_estimator="k3")
WIDE = dataclasses.replace(GSPO, clip_low=0.4, clip_high=0.4)


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_own_tokens():
    """Ratios 2 and 1/2 cancel in the first sequence; the second one's are 1.1 and 1.3."""
    batch = batch_of([0.25] * 4, [1, 1, -1, -1], segments=[1, 1, 2, 2])
    loss, _ = loss_of(np.log([2, 0.5, 1.1, 1.3]), batch, WIDE)
    assert float(loss) == pytest.approx(-0.5 * 1 + 0.5 * (1.1 * 1.3) ** 0.5, abs=1e-6)


def test_tool_tokens_and_padding_are_not_in_a_sequences_ratio():
    batch = batch_of([0.5, 0, 0.5, 0], 1.0, segments=[1, 1, 1, 0])
    loss, _ = loss_of([np.log(1.2), np.nan, np.log(1.2), np.inf], batch, WIDE)
    assert float(loss) == pytest.approx(-1.2, abs=1e-6)


def test_a_tokens_gradient_in_a_sequence_is_its_weight_times_the_sequences_ratio():
    batch = batch_of([0.1, 0.6], 1.0)
    grad = jax.grad(lambda x: loss_of(x, batch, WIDE)[0])(np.log(np.float32([[1.2, 1.2]])))
    np.testing.assert_allclose(grad, [[-0.12, -0.72]], rtol=1e-5)


@pytest.mark.parametrize("advantage, moved, stopped", [(1, 0.0005, "high"), (-1, -0.0005, "low")])
def test_the_clips_of_a_sequence_stop_all_of_its_tokens(advantage, moved, stopped):
    batch = batch_of([0.5, 0.5], advantage)
    (_, numbers), grad = RUN(
        np.float32([[3 * moved, -moved]]), batch, GSPO
    )  # the mean has moved far enough
    assert float(numbers[f"loss/clipped_{stopped}"]) == 1.0 and not grad.any()


@pytest.mark.parametrize(
    "estimator, estimate, gradient",
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", np.exp(0.5) - 1.5, 1 - np.exp(0.5))],
)
def test_half_a_nat_below_the_reference(estimator, estimate, gradient):
    batch = batch_of([1.0], 0.0, -1.5, ref_logprobs=-1.0)
    config = dataclasses.replace(CONFIG, kl=0.1, kl_estimator=estimator)
    (loss, numbers), grad = RUN(np.float32([[-1.5]]), batch, config)
    assert float(numbers["loss/kl_to_reference"]) == pytest.approx(estimate, abs=1e-6)
    assert float(loss) == pytest.approx(0.1 * estimate, abs=1e-6)
    assert float(grad[0, 0]) == pytest.approx(0.1 * gradient, abs=1e-6)
    assert float(numbers["loss/policy"]) == 0.0


@pytest.mark.parametrize("estimator, most", [("k1", 20.0), ("k2", 200.0), ("k3", 10.0)])
@pytest.mark.parametrize("ahead", [1e4, -1e4, np.inf, -np.inf])
def test_a_reference_far_away_gives_a_bounded_kl_without_gradient(estimator, most, ahead):
    batch = batch_of([1.0], 0.0, ref_logprobs=ahead)
    config = dataclasses.replace(CONFIG, kl=1.0, kl_estimator=estimator)
    (loss, _), grad = RUN(np.float32([[0.0]]), batch, config)
    assert abs(float(loss)) == most and float(grad[0, 0]) == 0.0


def test_the_largest_moves_of_a_log_prob_either_way_are_told():
    _, numbers = loss_of([-1.0, 0.0, 9.0], batch_of([0.5, 0.5, 0.0], 1.0, [-0.7, -0.1, 0.0]))
    assert float(numbers["loss/log_ratio_max"]) == pytest.approx(0.1)
    assert float(numbers["loss/log_ratio_min"]) == pytest.approx(-0.3)


VALUES = dataclasses.asdict(CONFIG)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"clip_low": 0.0}, "loss.clip_low is 0.0: it must lie between 0 and 1"),
        ({"clip_low": 1.0}, "loss.clip_low is 1.0"),
        ({"clip_high": 0.0}, "loss.clip_high is 0.0: it must be above 0"),
        (
            {"dual_clip": 1.2},
            "loss.dual_clip is 1.2: it must lie above 1 \\+ clip_high = 1.28.* 0 turns it off",
        ),
        ({"dual_clip": -1.0}, "loss.dual_clip is -1.0"),
        ({"dual_clip": float("nan")}, "loss.dual_clip is nan"),
        ({"ratio": "seq"}, "loss.ratio is 'seq': use one of token, sequence"),
        ({"ratio": "sequence"}, "loss.dual_clip is 10.0 with loss.ratio 'sequence', .*dual_clip=0"),
        ({"kl": -0.1}, "loss.kl is -0.1: use 0 for no KL term"),
        ({"kl_estimator": "k4"}, "loss.kl_estimator is 'k4': use one of k1, k2, k3"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**(VALUES | changes))
