"""The policy loss with every option against NumPy in float64, and whatever way it is packed."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from demyrl.arrays import Batch
from demyrl.learn.batch import (
    Example,
    PackConfig,
    pack,
    token_weights,
    unpack,
    weigh_by_micro_batch,
)
from demyrl.learn.loss import EXTREMES, LossConfig, grpo_loss

TCR = LossConfig(0.2, 0.28, dual_clip=3.0, ratio="token", kl=0.0, kl_estimator="k3")
SCR = dataclasses.replace(TCR, dual_clip=0.0, ratio="sequence", clip_low=0.03, clip_high=0.04)
OPTIONS = {
    "GRPO-TCR": TCR,
    "no dual clip": dataclasses.replace(TCR, dual_clip=0.0),
    "GRPO-SCR": SCR,
    "GRPO-SCR with KL": dataclasses.replace(SCR, kl=0.2),
} | {f"GRPO-T, {k}": dataclasses.replace(TCR, kl=0.3, kl_estimator=k) for k in ("k1", "k2", "k3")}

RUN = jax.jit(jax.value_and_grad(grpo_loss, has_aux=True), static_argnums=2)


def random_batch(seed, noise):
    """Three rows of sequences and padding, with junk where the weight is 0; and log-probs."""
    rng = np.random.default_rng(seed)
    shape = (3, 16)
    segments = np.cumsum(rng.random(shape) < 0.25, axis=1) + 1
    segments[np.arange(16) >= rng.integers(8, 17, 3)[:, None]] = 0
    weights = rng.random(shape) * (rng.random(shape) < 0.6) * (segments > 0)
    weights /= max(weights.sum(), 1e-9)
    advantages = rng.normal(size=(3, 17))[np.arange(3)[:, None], segments]
    old, ref = -3 * rng.random(shape), -3 * rng.random(shape)
    logprobs = old + noise * rng.normal(size=shape)
    for values in (old, ref, logprobs, advantages):
        values[weights == 0] = rng.choice([np.nan, np.inf, -np.inf, 1e300, 0.0])
    blank = np.zeros(shape, np.int32)
    segments = segments.astype(np.int32)
    return Batch(blank, blank, segments, weights, old, advantages, ref), logprobs


def sequences_of(batch):
    """The places of each sequence's trained tokens."""
    for row, segment in itertools.product(range(len(batch.segments)), range(1, 17)):
        columns = np.nonzero((batch.segments[row] == segment) & (batch.weights[row] > 0))[0]
        if len(columns):
            yield row, columns


def policy(log_ratio, advantage, weight, bounds, config):
    """Loss of a token in the paper's cases, and its slope along the log-ratio."""
    ratio = np.exp(np.clip(log_ratio, *bounds))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if advantage >= 0:
        used, moves = min(ratio, high), ratio <= high
    else:
        most = config.dual_clip or np.inf
        used, moves = min(max(ratio, low), most), low <= ratio <= most
    slope = -advantage * ratio * (moves and bounds[0] < log_ratio < bounds[1])
    return np.array([-advantage * used, slope]) * weight


def to_reference(ahead, weight, config):
    """KL estimate of a token, and its slope along the policy's log-prob."""
    bounded, moves = np.clip(ahead, -20, 20), abs(ahead) < 20
    if config.kl_estimator == "k1":
        value, slope = -bounded, 1.0
    elif config.kl_estimator == "k2":
        value, slope = bounded**2 / 2, -bounded
    else:
        value, slope = np.exp(bounded) - bounded - 1, 1 - np.exp(bounded)
        value, moves = min(value, 10), moves and value < 10
    return np.array([value, slope * moves]) * weight


def reference(logprobs, batch, config):
    """Loss, gradient and KL to the reference, one token after the other."""
    loss, kl, grad = 0.0, 0.0, np.zeros(logprobs.shape)
    for row, columns in sequences_of(batch):
        mean = np.mean([logprobs[row, c] - batch.old_logprobs[row, c] for c in columns])
        for at in ((row, c) for c in columns):
            own = logprobs[at] - batch.old_logprobs[at]
            whole = config.ratio == "sequence"
            moved, bounds = (mean, (-np.inf, 10)) if whole else (own, (-20, 20))
            value, slope = policy(moved, batch.advantages[at], batch.weights[at], bounds, config)
            apart = to_reference(batch.ref_logprobs[at] - logprobs[at], batch.weights[at], config)
            loss += value + config.kl * apart[0]
            grad[at] = slope + config.kl * apart[1]
            kl += apart[0]
    return loss, grad, kl


@pytest.mark.parametrize("option", OPTIONS)
@given(st.integers(0, 10_000), st.sampled_from([0.03, 0.5, 3.0, 30.0]))
@settings(max_examples=25, deadline=None)
def test_loss_and_gradient_agree_with_numpy(option, seed, noise):
    config, (batch, logprobs) = OPTIONS[option], random_batch(seed, noise)
    want, want_grad, want_kl = reference(logprobs, batch, config)
    with jax.enable_x64(True):
        (loss, numbers), grad = RUN(logprobs, batch, config)
        assert grad.dtype == loss.dtype == np.float64
        np.testing.assert_allclose(float(loss), want, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(np.asarray(grad), want_grad, rtol=1e-9, atol=1e-11)
        if config.kl:
            kl = float(numbers["loss/kl_to_reference"])
            np.testing.assert_allclose(kl, want_kl, rtol=1e-9, atol=1e-11)


LENGTHS = [1, 9, 4, 3, 10, 2, 2, 6]
SHAPES = [PackConfig(1, 12, 1), PackConfig(3, 10, 1), PackConfig(2, 12, 2)]


def trajectories(aggregation, kind):
    """Episodes with gaps of tool output, and the log-probs that the policy now has."""
    rng = np.random.default_rng(1)
    masks = [rng.random(n) < 0.8 for n in LENGTHS]
    weights = token_weights(masks, aggregation, 10)
    old, now, ref = ([-rng.random(n).astype(kind) for n in LENGTHS] for _ in range(3))
    advantages = rng.normal(size=len(LENGTHS)).tolist()
    return [
        Example(np.ones(n, np.int32), *rest)
        for n, *rest in zip(LENGTHS, weights, advantages, old, ref, strict=True)
    ], now


def laid_out(values, packed):
    """Values of the examples' tokens as one array for each micro-batch, 0 elsewhere."""
    arrays = [np.zeros(batch.tokens.shape, values[0].dtype) for batch in packed.batches]
    for value, (b, r, c) in zip(values, packed.places, strict=True):
        arrays[b][r, c : c + len(value)] = value
    return arrays


def combined(numbers):
    """Numbers of all micro-batches as `update` combines them."""
    return {
        name: float(functools.reduce(EXTREMES.get(name, np.add), [each[name] for each in numbers]))
        for name in numbers[0]
    }


def update_of(examples, now, order, shape, config):
    """Gradient of every token, in the order of the examples, and the numbers of the update."""
    packed = pack([examples[i] for i in order], shape)
    held = laid_out([now[i] for i in order], packed)
    runs = [RUN(x, batch, config) for x, batch in zip(held, packed.batches, strict=True)]
    grads = [np.asarray(grad) for _, grad in runs]
    each = unpack(packed, grads, [LENGTHS[i] for i in order])
    numbers = combined([numbers for (_, numbers), _ in runs])
    loss = sum(float(loss) for (loss, _), _ in runs)
    return np.concatenate([each[i] for i in np.argsort(order)]), numbers | {"loss": loss}


def assert_one_update(aggregation, config, kind, tolerance):
    """The same gradient and numbers for every shape of the rows and order of the examples."""
    examples, now = trajectories(aggregation, kind)
    orders = [np.random.default_rng(seed).permutation(len(LENGTHS)) for seed in range(4)]
    first, *others = [
        update_of(examples, now, order, shape, config) for order in orders for shape in SHAPES
    ]
    assert first[0].dtype == kind and np.abs(first[0]).max() > 1e-3
    for grad, numbers in others:
        np.testing.assert_allclose(grad, first[0], atol=tolerance, rtol=0)
        assert numbers == pytest.approx(first[1], abs=tolerance, rel=0)


@pytest.mark.parametrize("ratio", ["GRPO-T, k3", "GRPO-SCR with KL"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_any_packing_of_any_order_gives_one_update_in_float64(aggregation, ratio):
    with jax.enable_x64(True):
        assert_one_update(aggregation, OPTIONS[ratio], np.float64, 1e-10)


@pytest.mark.parametrize("ratio", ["GRPO-T, k3", "GRPO-SCR with KL"])
def test_any_packing_of_any_order_gives_one_update_in_float32(ratio):
    assert_one_update("token", OPTIONS[ratio], np.float32, 1e-6)


def test_the_paper_codes_token_mean_depends_on_the_micro_batches():
    """Losses 1 and 0 of 9 tokens and 1: the mean over all is 0.9, that of two means 0.5."""
    weights = token_weights([np.ones(9, bool), np.ones(1, bool)], "micro_batch")
    examples = [
        Example(np.ones(len(w), np.int32), w, advantage)
        for w, advantage in zip(weights, [-1.0, 0.0], strict=True)
    ]
    losses = []
    for rows in (1, 2):
        packed = weigh_by_micro_batch(pack(examples, PackConfig(rows, 9, 1)))
        zeros = laid_out([np.zeros(9, np.float32), np.zeros(1, np.float32)], packed)
        runs = [RUN(x, batch, TCR) for x, batch in zip(zeros, packed.batches, strict=True)]
        losses.append(sum(float(loss) for (loss, _), _ in runs))
    assert losses == pytest.approx([0.5, 0.9])


def test_with_sequence_weights_the_gradient_is_that_of_the_ratios_of_whole_sequences():
    """GSPO's objective by central differences: mean over sequences of the clipped s * A."""
    examples, now = trajectories("sequence", np.float64)
    wide = dataclasses.replace(SCR, clip_low=0.1, clip_high=0.1)

    def objective(flat):
        total, each = 0.0, np.split(flat, np.cumsum(LENGTHS)[:-1])
        for example, logprobs in zip(examples, each, strict=True):
            at = example.weights > 0
            s = np.exp(np.mean((logprobs - example.old_logprobs)[at]))
            total -= min(s * example.advantage, np.clip(s, 0.9, 1.1) * example.advantage)
        return total / len(examples)

    with jax.enable_x64(True):
        grad, numbers = update_of(examples, now, range(8), SHAPES[0], wide)
    flat, eps = np.concatenate(now), 1e-6
    steps = eps * np.eye(len(flat))
    want = [(objective(flat + step) - objective(flat - step)) / (2 * eps) for step in steps]
    assert numbers["loss/clipped_low"] > 0 and numbers["loss/clipped_high"] > 0
    np.testing.assert_allclose(grad, want, atol=1e-7)  # the weights are float32
    assert numbers["loss"] == pytest.approx(objective(flat), abs=1e-6)


@pytest.mark.parametrize("option", ["GRPO-TCR", "GRPO-SCR with KL"])
def test_tokens_spread_over_eight_devices_give_the_same_loss_and_gradient(option):
    batch, logprobs = random_batch(3, 0.5)
    batch, logprobs = jax.tree.map(
        lambda x: np.concatenate([x, x[:1]]).astype(np.float32 if x.dtype == float else x.dtype),
        (batch, logprobs),
    )
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    spread = jax.device_put((logprobs, batch), NamedSharding(mesh, P("data", "sequence")))
    (loss, _), grad = RUN(logprobs, batch, OPTIONS[option])
    (other, _), other_grad = RUN(*spread, OPTIONS[option])
    assert len(other_grad.sharding.device_set) == 8
    assert float(other) == pytest.approx(float(loss), abs=1e-6)
    np.testing.assert_allclose(other_grad, grad, atol=1e-6)
