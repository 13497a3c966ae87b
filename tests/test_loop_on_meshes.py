"""The whole RL step, from problems to updated weights: on a mesh as on one device.

Two meshes here, two more in test_two_processes. What the parts do on every mesh, [4, 2, 1] too, is
in test_sampler and test_sharding.
"""

import functools

import jax
import numpy as np
import pytest

from demyrl import logs, recipe
from demyrl.learn.state import start_state
from demyrl.model.sharding import params_sharding
from tests import tiny_run
from tests.tiny import FakeTools, compilations

ALONE = (1, 1, 1)
MESHES = [(8, 1, 1), (1, 1, 8)]
VARIES = ("throughput/", "policy/sampler_gap", "time/", "rollout/slot_use", "tools/seconds")
VARIES += ("rollout/decode_steps", "rollout/prefills")


class Run(tiny_run.Rl):
    """Two steps from the same weights, and what was sampled and compiled in them."""

    def __init__(self, sizes, folder):
        config = tiny_run.config(folder, sizes, model__source="")
        self.tools, self.sampled = FakeTools(), []
        super().__init__(recipe.read(config), self.tools)
        place = params_sharding(self.settings.model, self.mesh)
        params = jax.device_put(tiny_run.talkative_params(), place)
        self.state = start_state(params, self.learner.optimizer)
        with logs.Logs(folder, 2, writes=False) as log:
            numbers = [self.step(0, log)]
            with compilations() as self.compiled_late:
                numbers.append(self.step(1, log))
        self.numbers = [
            {name: x for name, x in each.items() if not name.startswith(VARIES)} for each in numbers
        ]

    def score(self, trajectories):
        self.sampled += trajectories
        return super().score(trajectories)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run of a mesh, made once."""
    return functools.cache(lambda sizes: Run(sizes, tmp_path_factory.mktemp("loop")))


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("sizes", MESHES)
def test_both_steps_sample_the_tokens_of_one_device(run, sizes):
    got, want = run(sizes).sampled, run(ALONE).sampled
    assert [t.tokens.tolist() for t in got] == [t.tokens.tolist() for t in want]
    assert_close([t.logprobs for t in got], [t.logprobs for t in want])


@pytest.mark.parametrize("sizes", MESHES)
def test_both_steps_give_the_numbers_and_the_weights_of_one_device(run, sizes):
    got, want = run(sizes), run(ALONE)
    assert_close(got.numbers, want.numbers)
    assert_close(jax.device_get(got.state.params), jax.device_get(want.state.params))


@pytest.mark.parametrize("sizes", [ALONE, *MESHES])
def test_the_second_step_compiles_nothing(run, sizes):
    assert run(sizes).compiled_late == []


def test_the_steps_compared_called_the_tool_and_moved_every_weight(run):
    alone = run(ALONE)
    assert len(alone.tools.calls) > 16 and len(alone.sampled) == 32
    first, last = tiny_run.talkative_params(), jax.device_get(alone.state.params)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), first, last)
    assert min(jax.tree.leaves(moved)) > 1e-5
