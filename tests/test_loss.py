"""The losses: clip sides by hand, a float64 reference, and nothing from what is not trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.arrays import Batch
from demyrl.learn.loss import LossConfig, grpo_loss, sft_loss

CONFIG = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=10.0)
SHARES = ("loss/clipped_low", "loss/clipped_high", "loss/dual_clipped")


def batch_of(weights, advantages, old_logprobs=0.0):
    """One row with these values; what the loss does not read is zero."""
    weights = np.atleast_2d(np.asarray(weights, np.float32))
    blank = np.zeros(weights.shape, np.int32)
    advantages, old = (
        np.broadcast_to(np.float32(values), weights.shape) for values in (advantages, old_logprobs)
    )
    return Batch(blank, blank, blank, weights, old, advantages)


def loss_of(logprobs, batch, config=CONFIG):
    return grpo_loss(jnp.atleast_2d(jnp.asarray(logprobs, jnp.float32)), batch, config)


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
    loss, numbers = token_loss(ratio, advantage, LossConfig(0.2, 0.28, dual_clip=3.0))
    assert float(loss) == pytest.approx(-gain, abs=1e-5)
    assert float(numbers["loss/dual_clipped"]) == stopped


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


@pytest.mark.parametrize("difference", [200.0, -200.0, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(difference, advantage):
    batch = batch_of([1.0], advantage)

    def of(logprobs):
        return loss_of(logprobs, batch)

    (loss, numbers), grad = jax.value_and_grad(of, has_aux=True)(np.float32([[difference]]))
    assert np.isfinite([float(loss), float(grad[0, 0]), *map(float, numbers.values())]).all()


def test_a_nan_log_prob_of_a_trained_token_is_not_hidden():
    assert np.isnan(float(loss_of([np.nan], batch_of([1.0], 1.0))[0]))


HOSTILE = [np.nan, np.inf, -np.inf, 1e30]


@pytest.mark.parametrize("junk", HOSTILE)
def test_what_stands_at_masked_positions_reaches_neither_loss_nor_gradient_nor_numbers(junk):
    weights = [0.0, 0.5, 0.0, 0.5]
    clean = batch_of(weights, [0, 1.0, 0, -1.0], [0, -1.0, 0, -0.5])
    dirty = batch_of(weights, [junk, 1.0, junk, -1.0], [-junk, -1.0, junk, -0.5])
    run = jax.value_and_grad(lambda x, batch: loss_of(x, batch), has_aux=True)
    want = run(np.float32([[0, -0.9, 0, -0.4]]), clean)
    got = run(np.float32([[junk, -0.9, junk, -0.4]]), dirty)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got[1].tolist()[0][0] == 0.0


def test_a_batch_without_trained_tokens_gives_zeros():
    batch = batch_of([0.0, 0.0], [1.0, -1.0])
    (loss, numbers), grad = jax.value_and_grad(lambda x: loss_of(x, batch), has_aux=True)(
        np.float32([[-1.0, np.nan]])
    )
    assert float(loss) == 0.0 and not grad.any()
    assert {float(x) for x in numbers.values()} == {0.0}


def reference(logprobs, batch, config):
    """The paper's loss, token by token in float64, without any of the traps of masking."""
    loss, shares, kl = 0.0, dict.fromkeys(SHARES, 0.0), 0.0
    for at in zip(*np.nonzero(batch.weights), strict=True):
        weight, adv = float(batch.weights[at]), float(batch.advantages[at])
        log_ratio = np.clip(float(logprobs[at]) - float(batch.old_logprobs[at]), -20, 20)
        ratio = np.exp(log_ratio)
        worst = max(-adv * ratio, -adv * np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high))
        loss += weight * (worst if adv >= 0 else min(worst, -adv * config.dual_clip))
        kl += weight * (ratio - 1 - log_ratio)
        shares["loss/clipped_low"] += weight * (adv < 0 and ratio < 1 - config.clip_low)
        shares["loss/clipped_high"] += weight * (adv > 0 and ratio > 1 + config.clip_high)
        shares["loss/dual_clipped"] += weight * (adv < 0 and ratio > config.dual_clip)
    return {"loss/policy": loss, "loss/kl_to_old": kl} | shares


LOSS = jax.jit(grpo_loss, static_argnums=2)


@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.5, 3.0]))
@settings(max_examples=30, deadline=None)
def test_random_batches_agree_with_a_float64_reference(seed, noise):
    rng = np.random.default_rng(seed)
    weights = rng.random((3, 7)) * (rng.random((3, 7)) < 0.6)
    weights = weights / max(weights.sum(), 1e-9)
    old = -3 * rng.random((3, 7))
    batch = batch_of(weights, rng.normal(size=(3, 7)), old)
    logprobs = np.float32(old + noise * rng.normal(size=(3, 7)))
    _, numbers = LOSS(logprobs, batch, CONFIG)
    want = reference(logprobs, batch, CONFIG)
    for name, value in numbers.items():
        np.testing.assert_allclose(float(value), want[name], rtol=2e-5, atol=2e-6, err_msg=name)


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


@pytest.mark.parametrize(
    "values, message",
    [
        ((0.0, 0.28, 10.0), "clip_low is 0.0: it must lie between 0 and 1"),
        ((1.0, 0.28, 10.0), "clip_low is 1.0"),
        ((0.2, 0.0, 10.0), "clip_high is 0.0: it must be above 0"),
        ((0.2, 0.28, 1.2), "dual_clip is 1.2: it must lie above 1 \\+ clip_high = 1.28"),
    ],
)
def test_a_clip_that_makes_no_sense_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(*values)
