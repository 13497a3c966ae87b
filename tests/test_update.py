"""One optimizer application: the same for any split, skipped when not finite, compiled once."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from demyrl.learn.batch import Example, PackConfig, pack, token_weights
from demyrl.learn.loss import LossConfig, grpo_loss
from demyrl.learn.optimizer import OptimizerConfig, make_optimizer
from demyrl.learn.state import start_state
from demyrl.learn.update import make_programs, update
from tests.tiny import MODEL, compilations, drawn_params

SMALL = dataclasses.replace(MODEL, vocab=32, width=16, layers=2, feed_forward=16)
RATE = 2e-4
OPTIMIZER = OptimizerConfig(
    learning_rate=RATE,
    warmup_updates=0,
    decay_updates=0,
    final_share=0.1,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.1,
    clip_norm=1.0,
    skips=3,
)
CLIP = LossConfig(0.2, 0.28, 10.0, "token", 0.0, "k3")


def loss(logprobs, batch):
    return grpo_loss(logprobs, batch, CLIP)


@functools.cache
def programs():
    return make_programs(SMALL, make_optimizer(OPTIMIZER, SMALL), loss, 1.0, chunk=16)


def fresh_state():
    """A state of its own for each update, which donates it."""
    params = jax.device_put(drawn_params(SMALL), jax.devices()[0])
    return start_state(params, make_optimizer(OPTIMIZER, SMALL))


def episodes(count=6, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 15, count)
    weights = token_weights([np.arange(n) >= 2 for n in lengths], "token")
    return [
        Example(
            tokens=rng.integers(0, SMALL.vocab, n).astype(np.int32),
            weights=w,
            advantage=float(rng.normal()),
            old_logprobs=np.full(n, -3.4, np.float32),
        )
        for n, w in zip(lengths, weights, strict=True)
    ]


def updated(examples, rows=2, row_tokens=16, state=None):
    batches = jax.device_put(pack(examples, PackConfig(rows, row_tokens, 1)).batches)
    return update(programs(), loss, state or fresh_state(), batches, RATE)


def assert_close(got, want, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), got, want)


@functools.cache
def reference():
    return updated(episodes())


def test_an_update_moves_every_parameter():
    moved = jax.tree.map(
        lambda a, b: bool(np.any(np.asarray(a) != b)), reference()[0].params, fresh_state().params
    )
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("rows, row_tokens", [(1, 16), (1, 70), (8, 14)])
def test_the_update_does_not_depend_on_the_shape_of_a_micro_batch(rows, row_tokens):
    state, numbers = updated(episodes(), rows, row_tokens)
    assert_close(state.params, reference()[0].params, 1e-6)
    assert_close(numbers, reference()[1], 1e-5)


def test_the_update_does_not_depend_on_the_order_of_the_trajectories():
    state, _ = updated(episodes()[::-1])
    assert_close(state.params, reference()[0].params, 1e-6)


def test_trajectories_without_advantage_change_nothing_but_the_weights():
    """What train.py leaves out of the batches would have had no gradient."""
    examples = episodes()
    examples[1::2] = [dataclasses.replace(e, advantage=0.0) for e in examples[1::2]]
    state, _ = updated(examples)
    without, _ = updated(examples[::2])
    assert_close(state.params, without.params, 1e-6)


def test_what_masked_positions_hold_does_not_reach_the_update():
    def spoiled(example):
        junk = np.where(example.weights > 0, example.old_logprobs, np.float32(np.nan))
        return dataclasses.replace(example, old_logprobs=junk)

    state, numbers = updated([spoiled(e) for e in episodes()])
    assert_close(state.params, reference()[0].params, 0)
    assert float(numbers["optim/skipped"]) == 0


def broken_episodes():
    """The first has no usable old log-prob, so the whole gradient is NaN."""
    first, *others = episodes()
    nans = np.full(len(first.tokens), np.nan, np.float32)
    return [dataclasses.replace(first, old_logprobs=nans), *others]


def test_an_update_with_a_gradient_that_is_not_finite_is_skipped():
    state, numbers = updated(broken_episodes())
    assert float(numbers["optim/skipped"]) == 1
    before = fresh_state()
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, before.opt_state)
    assert int(state.step) == 0


def test_training_goes_on_after_a_skipped_update():
    skipped, _ = updated(broken_episodes())
    state, numbers = updated(episodes(), state=skipped)
    assert_close(state.params, reference()[0].params, 0)
    assert float(numbers["optim/skipped"]) == 0 and int(state.step) == 1


def test_only_equal_rewards_leave_the_gradient_at_exactly_zero():
    _, numbers = updated([dataclasses.replace(e, advantage=0.0) for e in episodes()])
    assert float(numbers["optim/grad_norm"]) == 0.0


def test_the_gradient_norm_is_reported_before_clipping():
    scaled = [dataclasses.replace(e, advantage=100 * e.advantage) for e in episodes()]
    _, numbers = updated(scaled)
    _, small = reference()
    assert float(numbers["optim/grad_norm"]) == pytest.approx(
        100 * float(small["optim/grad_norm"]), rel=1e-4
    )


def test_nothing_compiles_after_the_first_update_for_any_number_of_micro_batches():
    state, _ = updated(episodes())
    with compilations() as found:
        for count in (1, 3, 9, 6):
            state, _ = updated(episodes(count, seed=count), state=state)
    assert found == []


def test_a_compilation_is_seen_by_name():
    with compilations() as found:
        jax.jit(lambda x: x * 3 + 1)(np.float32(1))
    assert found == ["<lambda>"]
