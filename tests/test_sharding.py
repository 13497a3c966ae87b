"""Eight virtual devices: what is spread over them trains like one, and restores like one."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest

from demyrl import checkpoint
from demyrl.learn.batch import Example, PackConfig, pack, token_weights
from demyrl.learn.learner import HeadConfig, Learner
from demyrl.learn.loss import LossConfig, grpo_loss
from demyrl.learn.optimizer import OptimizerConfig
from demyrl.learn.state import start_state
from demyrl.learn.update import MemoryConfig
from demyrl.model.mesh import AXES, TOKENS_SPREAD, MeshConfig, divisible, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.model.transformer import is_parameter, parameter_table
from tests.tiny import MODEL, compilations, drawn_params

SMALL = dataclasses.replace(MODEL, vocab=64, width=64, layers=1, heads=8, kv_heads=8)
OPTIMIZER = OptimizerConfig(1e-3, 0, 0, 1.0, 0.9, 0.95, 0.1, 1.0, 3)
PLAIN = MemoryConfig("none", "float32", "float32", False)
LADDER = (2, 2, 2)  # the mesh whose rows have two lengths
MESHES = [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)]


def loss(logprobs, batch):
    return grpo_loss(logprobs, batch, LossConfig(0.2, 0.28, 10.0, "token", 0.0, "k3"))


def examples(count, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 16 if count > 6 else 8, count)
    weights = token_weights([np.arange(n) >= 2 for n in lengths], "token")
    return [
        Example(rng.integers(0, SMALL.vocab, n).astype(np.int32), w, float(rng.normal()), -4.0)
        for n, w in zip(lengths, weights, strict=True)
    ]


class Run:
    """The training of one mesh, put together as train.py does."""

    def __init__(self, sizes, memory=PLAIN):
        self.mesh = make_mesh(MeshConfig(*sizes))
        shape = PackConfig(8, 16, 2 if sizes == LADDER else 1)  # each rung compiles
        self.learner = Learner(
            SMALL, self.mesh, OPTIMIZER, memory, shape, loss, HeadConfig(1.0, 16)
        )
        params = jax.device_put(drawn_params(SMALL), params_sharding(SMALL, self.mesh))
        self.state = start_state(params, self.learner.optimizer, memory.offload)

    def update(self, count=20, seed=0):
        packed = pack(examples(count, seed), self.learner.shape)
        self.state, numbers = self.learner.update(self.state, packed, 1e-4)
        return numbers

    def score(self, count=20):
        return self.learner.score(self.learner.working(self.state.params), examples(count))


@functools.cache
def trained(sizes, memory=PLAIN):
    """A run after a score, an update of one micro-batch and one of more, and a score, of which the
    last two should compile nothing."""
    run = Run(sizes, memory)
    run.scores = run.score(3).logprobs
    first = run.update(count=6)  # short ones, which with a ladder leave its longest rows alone
    with compilations() as run.compiled_late:
        run.numbers = [first, run.update(count=60, seed=1)]
        run.score(60)
    return run


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.parametrize("sizes", MESHES)
def test_scores_and_updates_on_a_mesh_equal_those_on_one_device(sizes):
    alone, spread = trained((1, 1, 1)), trained(sizes)
    assert_close(spread.scores, alone.scores)
    assert_close(jax.device_get(spread.state.params), jax.device_get(alone.state.params))
    assert_close(spread.numbers, alone.numbers)


@pytest.mark.parametrize("sizes", MESHES)
def test_each_device_still_holds_its_fraction_of_every_leaf_after_an_update(sizes):
    size_of, run = dict(zip(AXES, sizes, strict=True)), trained(sizes)
    rows = jax.tree.leaves(parameter_table(SMALL), is_leaf=is_parameter)
    params = jax.tree.leaves(run.state.params)
    moments = [m for m in jax.tree.leaves(run.state.opt_state) if m.ndim]
    assert len(moments) == 2 * len(params)
    for row, array in zip([*rows] * 3, [*params, *moments], strict=True):
        spread = [TOKENS_SPREAD[axis] for axis in row.axes]
        parts = math.prod(size_of[name] for names in spread for name in names)
        held = {shard.data.size for shard in array.addressable_shards}
        assert held == {array.size // parts}, (row.axes, array.sharding)


@pytest.mark.parametrize("sizes", MESHES)
def test_each_device_holds_its_fraction_of_a_batch(sizes):
    run = trained(sizes)
    data, _, sequence = sizes
    batch = run.learner.place(pack(examples(6), run.learner.shape))[0]
    for array in jax.tree.leaves(batch):
        held = {shard.data.size for shard in array.addressable_shards}
        assert held == {array.size // (data * sequence)}


@pytest.mark.parametrize("sizes", [(1, 1, 1), *MESHES])
def test_nothing_compiles_after_the_first_score_and_update(sizes):
    assert trained(sizes).compiled_late == []


PAIR = (2, 1, 1)
MOVED = dataclasses.replace(PLAIN, remat="full", offload=True)
NARROW = dataclasses.replace(PLAIN, remat="dots", moments="bfloat16", gradients="bfloat16")


def test_layers_computed_again_and_an_offloaded_state_change_no_number():
    plain, other = trained(PAIR), trained(PAIR, MOVED)
    assert_close(jax.device_get(other.state.params), jax.device_get(plain.state.params))
    assert other.compiled_late == []


def test_an_offloaded_state_lies_in_the_memory_of_the_host_after_an_update():
    state = trained(PAIR, MOVED).state
    arrays = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
    assert {x.sharding.memory_kind for x in arrays} == {"pinned_host"}


def test_moments_and_gradients_in_bfloat16_train_nearly_alike():
    plain, other = trained(PAIR), trained(PAIR, NARROW)
    kinds = {str(x.dtype) for x in jax.tree.leaves(other.state.opt_state) if x.ndim}
    assert kinds == {"bfloat16"}
    for name in ("loss/policy", "optim/grad_norm"):
        assert other.numbers[1][name] == pytest.approx(plain.numbers[1][name], rel=0.02)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"remat": "some"}, "memory.remat is 'some': use one of none, dots, full"),
        ({"moments": "int8"}, "memory.moments is 'int8': use one of float32, bfloat16"),
        ({"gradients": "float16"}, "memory.gradients is 'float16'"),
    ],
)
def test_a_lever_that_is_none_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **change)


def saved_and_gone_on(tmp_path, first, then):
    """Two updates on a mesh, and the second again on another mesh, from a checkpoint."""
    run, again = Run(first), Run(then)
    run.update()
    checkpoint.save(tmp_path, 1, run.state, {}, keep=1)
    again.state = checkpoint.restore(tmp_path, checkpoint.like(again.state)).state
    restored, before = jax.device_get((again.state, run.state))
    jax.tree.map(np.testing.assert_array_equal, restored, before)
    run.update(seed=2)
    again.learner = run.learner if first == then else again.learner  # which has compiled
    again.update(seed=2)
    return jax.device_get(run.state.params), jax.device_get(again.state.params)


def test_a_run_on_a_mesh_goes_on_from_its_checkpoint_bit_for_bit(tmp_path):
    want, got = saved_and_gone_on(tmp_path, (2, 2, 1), (2, 2, 1))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_run_goes_on_from_its_checkpoint_on_another_mesh(tmp_path):
    want, got = saved_and_gone_on(tmp_path, (1, 1, 2), (2, 1, 1))
    assert_close(got, want)


@pytest.mark.parametrize(
    "changes, mesh, counts, message",
    [
        ({"width": 30}, (4, 1, 1), {}, "model.width is 30, which mesh.data x mesh.sequence = 4"),
        ({}, (1, 8, 1), {}, "model.heads is 4, which mesh.tensor = 8 does not divide"),
        ({}, (1, 1, 4), {}, "model.kv_heads is 2, which mesh.tensor x mesh.sequence = 4 does not"),
        ({"vocab": 765}, (1, 2, 1), {}, "model.vocab is 765, which mesh.tensor = 2 does not"),
        ({"feed_forward": 47}, (1, 2, 1), {}, "model.feed_forward is 47, which mesh.tensor = 2"),
        ({}, (4, 1, 1), {"train.pack.rows": ("rows", 6)}, "train.pack.rows is 6, which mesh.data"),
        ({}, (1, 1, 2), {"row_tokens": ("tokens", 9)}, "row_tokens is 9, which mesh.sequence = 2"),
    ],
)
def test_what_does_not_divide_is_refused_by_key_size_and_axis(changes, mesh, counts, message):
    with pytest.raises(ValueError, match=message):
        divisible(dataclasses.replace(MODEL, **changes), MeshConfig(*mesh), counts)


@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 1, 8), (3, 1, 1), (5, 2, 1)])
def test_the_mesh_that_a_refusal_names_would_work(mesh):
    counts = {"train.pack.rows": ("rows", 8)}
    with pytest.raises(ValueError) as refused:
        divisible(MODEL, MeshConfig(*mesh), counts)
    sizes = re.search(
        r"would work: mesh.data is (\d+), mesh.tensor is (\d+), mesh.sequence is (\d+)",
        str(refused.value),
    ).groups()
    divisible(MODEL, MeshConfig(*map(int, sizes)), counts)


@pytest.mark.parametrize("mesh", [(8, 1, 1), (4, 2, 1), (4, 1, 2)])
def test_what_divides_is_accepted(mesh):
    counts = {"train.pack.rows": ("rows", 8), "rollout.slots": ("rows", 16)}
    divisible(MODEL, MeshConfig(*mesh), counts)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="takes 16 devices, but JAX sees 8"):
        make_mesh(MeshConfig(4, 4, 1))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (-1, 1, 1), (1, 1, 0)])
def test_an_axis_without_devices_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        MeshConfig(*sizes)


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    id: int


def test_the_devices_of_a_process_stand_next_to_each_other():
    devices = [Device(i % 2, i) for i in range(8)]
    mesh = make_mesh(MeshConfig(2, 1, 4), devices)
    owners = [{device.process_index for device in row.flat} for row in mesh.devices]
    assert owners == [{0}, {1}]


def test_devices_of_several_processes_must_all_be_used():
    with pytest.raises(ValueError, match="takes 4 of the 8 devices of 2 processes"):
        make_mesh(MeshConfig(4, 1, 1), [Device(i // 4, i) for i in range(8)])
