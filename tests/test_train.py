"""Parts of the RL loop that the smoke run does not show."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demyrl.evaluate import refuse_broken_sandbox
from demyrl.learn.batch import Example
from demyrl.learn.learner import NotLearning
from demyrl.recipe import read
from demyrl.tools.toolbox import ToolBox
from demyrl.train import Rl
from demyrl.types import Reward, ToolResult
from tests.tiny import shrunk_config


@pytest.fixture(scope="module")
def rl(tmp_path_factory):
    """A run with the tool off, its weights, and the trajectories of one step."""
    settings = read(shrunk_config(tools__enabled=False, train__problems=2, train__updates=1))
    with ToolBox(settings.tools) as tools:
        run = Rl(settings, tools)
        run.start(tmp_path_factory.mktemp("rl"))
        run.agent.sampler.load(run.state.params)
        rollout = run.agent.roll_out(run.stream.next(), run.root, 0, 0)
    return run, run.state, rollout.trajectories


class Note:
    """A log that keeps what it is told."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def trained(rl, trajectories, rewards, log=None):
    """The parameters after the updates of a step, from the same start."""
    run, start, _ = rl
    run.state = jax.tree.map(jnp.copy, start)
    examples = [
        Example(t.tokens, t.sampled.astype(np.float32), 0.0, t.logprobs) for t in trajectories
    ]
    run.updates(0, examples, rewards, lambda done: None, log or Note())
    return jax.device_get(run.state)


def some_rewards(count):
    return [Reward(1.0 if i % 3 else -1.0) for i in range(count)]


def test_an_ungraded_trajectory_changes_nothing(rl):
    trajectories = list(rl[2])
    rewards = some_rewards(len(trajectories))
    rewards[2] = Reward(None)
    want = trained(rl, trajectories, rewards)
    t = trajectories[2]
    cut = {n: getattr(t, n)[:-4] for n in ("tokens", "sampled", "logprobs", "turn")}
    trajectories[2] = dataclasses.replace(t, **cut)
    got = trained(rl, trajectories, rewards)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert want.step == 1


def test_a_step_of_equal_rewards_leaves_the_state_alone(rl):
    got = trained(rl, rl[2], [Reward(1.0)] * len(rl[2]))
    jax.tree.map(np.testing.assert_array_equal, got, jax.device_get(rl[1]))


def test_equal_groups_count_in_the_weights_of_the_others(rl):
    """Their tokens stand in the denominator, as in the reference: the gradient is smaller."""
    run, _, trajectories = rl
    half = some_rewards(4) + [Reward(1.0)] * 4
    examples = []
    run.update = lambda e, number: examples.append(e) or {"optim/skipped": 0.0}
    trained(rl, trajectories, half)
    del run.update
    weight = sum(float(e.weights.sum()) for e in examples[0])
    share = sum(t.sampled_len for t in trajectories[:4]) / sum(t.sampled_len for t in trajectories)
    assert weight == pytest.approx(share, abs=1e-6)


def without_numbers(trajectory):
    return dataclasses.replace(trajectory, logprobs=np.full_like(trajectory.logprobs, np.nan))


def test_a_gradient_that_is_not_finite_is_skipped_and_told_until_a_run_stops(rl):
    run, start, trajectories = rl
    spoiled, log = [without_numbers(t) for t in trajectories], Note()
    for _ in range(run.settings.optimizer.skips - 1):
        got = trained(rl, spoiled, some_rewards(len(spoiled)), log)
    jax.tree.map(np.testing.assert_array_equal, got, jax.device_get(start))
    assert len(log.notes) == 4 and "not finite (4 in a row; 5 stop the run)" in log.notes[-1]
    with pytest.raises(NotLearning, match="gradients of 5 updates in a row were not finite"):
        trained(rl, spoiled, some_rewards(len(spoiled)), log)
    run.learner.skipped = 0


def broken(trajectory):
    return dataclasses.replace(trajectory, results=(ToolResult("sandbox_error", "no more pids"),))


def test_a_few_sandbox_failures_do_not_stop_a_run(rl):
    refuse_broken_sandbox([broken(rl[2][0]), *rl[2][1:]])


def test_many_sandbox_failures_stop_a_run_and_say_why(rl):
    with pytest.raises(RuntimeError, match="failed in 8 of 8 .* no more pids"):
        refuse_broken_sandbox([broken(t) for t in rl[2]])
