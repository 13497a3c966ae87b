"""Eight virtual devices: what is spread over them trains like one, and restores like one."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from demyrl import checkpoint
from demyrl.learn.batch import Example, PackConfig, pack, token_weights
from demyrl.learn.loss import LossConfig, grpo_loss
from demyrl.learn.update import (
    OptimizerConfig,
    make_optimizer,
    make_programs,
    start_state,
    update,
)
from demyrl.model.sharding import (
    RULES,
    MeshConfig,
    divisible,
    make_mesh,
    params_sharding,
    rows_sharding,
)
from demyrl.model.transformer import is_parameter, parameter_table
from tests.tiny import MODEL, compilations, drawn_params

SMALL = dataclasses.replace(MODEL, vocab=64, layers=1)
OPTIMIZER = OptimizerConfig(1e-3, 0, 0, 1.0, 0.9, 0.95, 0.1, 1.0)
MESHES = [(2, 2), (8, 1), (1, 2)]


def loss(logprobs, batch):
    return grpo_loss(logprobs, batch, LossConfig(0.2, 0.28, 10.0))


class Run:
    """The training of one mesh, put together as train.py does."""

    def __init__(self, data, tensor):
        self.mesh = make_mesh(MeshConfig(data, tensor))
        self.sharding = params_sharding(SMALL, self.mesh)
        optimizer = make_optimizer(OPTIMIZER, SMALL)
        self.programs = make_programs(SMALL, optimizer, loss, 1.0, chunk=16)
        self.state = start_state(jax.device_put(drawn_params(SMALL), self.sharding), optimizer)

    def update(self, count=20, seed=0):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(3, 12, count)
        weights = token_weights([np.ones(n, bool) for n in lengths], "token")
        examples = [
            Example(rng.integers(0, SMALL.vocab, n).astype(np.int32), w, float(rng.normal()), -4.0)
            for n, w in zip(lengths, weights, strict=True)
        ]
        packed = pack(examples, PackConfig(8, 12))
        batches = jax.device_put(packed.batches, rows_sharding(self.mesh))
        self.state, numbers = update(self.programs, loss, self.state, batches, 1e-4)
        return jax.device_get(numbers)


@functools.cache
def trained(data, tensor):
    """A run after an update of one micro-batch and one of three, which should compile nothing."""
    run = Run(data, tensor)
    first = run.update(count=6)
    with compilations() as run.compiled_late:
        run.numbers = [first, run.update(count=20, seed=1)]
    return run


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.parametrize("data, tensor", MESHES)
def test_updates_on_a_mesh_equal_those_on_one_device(data, tensor):
    alone, spread = trained(1, 1), trained(data, tensor)
    assert_close(jax.device_get(spread.state.params), jax.device_get(alone.state.params))
    assert_close(spread.numbers, alone.numbers)


@pytest.mark.parametrize("data, tensor", MESHES)
def test_each_device_still_holds_its_fraction_of_every_leaf_after_an_update(data, tensor):
    sizes, run = {"data": data, "tensor": tensor}, trained(data, tensor)
    rows = jax.tree.leaves(parameter_table(SMALL), is_leaf=is_parameter)
    params = jax.tree.leaves(run.state.params)
    moments = [m for m in jax.tree.leaves(run.state.opt_state) if m.ndim]
    assert len(moments) == 2 * len(params)
    for row, array in zip([*rows] * 3, [*params, *moments], strict=True):
        parts = math.prod(sizes.get(RULES[axis], 1) for axis in row.axes)
        held = {shard.data.size for shard in array.addressable_shards}
        assert held == {array.size // parts}, (row.axes, array.sharding)


@pytest.mark.parametrize("data, tensor", [(1, 1), *MESHES])
def test_nothing_compiles_after_the_first_update(data, tensor):
    assert trained(data, tensor).compiled_late == []


def test_a_run_on_a_mesh_goes_on_from_its_checkpoint(tmp_path):
    run, again = trained(2, 2), Run(2, 2)
    checkpoint.save(tmp_path, 2, run.state, {}, keep=1)
    again.state = checkpoint.restore(tmp_path, checkpoint.like(again.state)).state
    again.programs = run.programs
    run.update(seed=2)
    again.update(seed=2)
    jax.tree.map(np.testing.assert_array_equal, again.state, run.state)


@pytest.mark.parametrize(
    "changes, mesh, rows, message",
    [
        ({"width": 30}, (4, 1), {}, "model.width is 30, which mesh.data = 4 does not divide"),
        ({}, (1, 8), {}, "model.heads is 4, which mesh.tensor = 8 does not divide"),
        ({}, (1, 4), {}, "model.kv_heads is 2, which mesh.tensor = 4 does not divide"),
        ({"vocab": 765}, (1, 2), {}, "model.vocab is 765, which mesh.tensor = 2 does not divide"),
        ({"feed_forward": 47}, (1, 2), {}, "model.feed_forward is 47, which mesh.tensor = 2"),
        ({}, (4, 1), {"train.pack.rows": 6}, "train.pack.rows is 6, which mesh.data = 4"),
    ],
)
def test_what_does_not_divide_is_refused_by_key_size_and_axis(changes, mesh, rows, message):
    with pytest.raises(ValueError, match=message):
        divisible(dataclasses.replace(MODEL, **changes), MeshConfig(*mesh), rows)


@pytest.mark.parametrize("mesh", MESHES)
def test_what_divides_is_accepted(mesh):
    divisible(MODEL, MeshConfig(*mesh), {"train.pack.rows": 8, "rollout.slots": 16})


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="is 4 x 4 = 16, but JAX sees 8 device"):
        make_mesh(MeshConfig(4, 4))


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 1)])
def test_an_axis_without_devices_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        MeshConfig(*sizes)
