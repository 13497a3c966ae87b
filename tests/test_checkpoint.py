"""A checkpoint comes back bit for bit, or not at all."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from demyrl import checkpoint

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def state_of(step, width=4):
    """A small state with the structure of a real one, and other numbers for each step."""
    numbers = np.random.default_rng(step)

    def filled(leaf):
        return jnp.asarray(numbers.normal(size=leaf.shape), leaf.dtype)

    params = {
        "embed": np.zeros((8, width), np.float32),
        "layers": {"q": np.zeros((2, width, width), jnp.bfloat16)},
    }
    state = {"params": params, "opt_state": jax.eval_shape(OPTIMIZER.init, params)}
    return jax.tree.map(filled, state) | {"step": jnp.int32(step)}


def abstract(state):
    return jax.eval_shape(lambda: state)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def step_folder(workdir, step):
    return Path(workdir) / "checkpoints" / f"step_{step:08d}"


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=os.path.getsize)


@pytest.fixture
def two_saved(tmp_path):
    """A workdir with checkpoints of step 4 and step 8."""
    for step in (4, 8):
        checkpoint.save(tmp_path, step, state_of(step), {"position": step * 10}, keep=3)
    return tmp_path


def assert_falls_back_to_4(workdir, capsys):
    restored = checkpoint.restore(workdir, abstract(state_of(0)))
    warning = capsys.readouterr().err
    assert (restored.step, restored.extra) == (4, {"position": 40})
    assert_same_bits(restored.state, state_of(4))
    assert "step_00000008" in warning and "using" in warning and "step_00000004" in warning


# Round trips


def test_a_state_with_its_optimizer_comes_back_bit_for_bit(tmp_path):
    checkpoint.save(tmp_path, 7, state_of(7), {}, keep=1)
    restored = checkpoint.restore(tmp_path, abstract(state_of(0)))
    assert_same_bits(restored.state, state_of(7))


def test_what_the_caller_wants_back_comes_back(tmp_path):
    extra = {"stream": {"position": 3, "fingerprint": "ab"}, "digest": "c", "losses": [0.1, None]}
    checkpoint.save(tmp_path, 7, state_of(7), extra, keep=1)
    assert checkpoint.restore(tmp_path, abstract(state_of(0))).extra == extra


def test_values_that_are_not_finite_come_back_bit_for_bit(tmp_path):
    state = {"x": jnp.array([np.nan, -np.inf, -0.0, 1e-45], jnp.float32)}
    checkpoint.save(tmp_path, 0, state, {}, keep=1)
    assert_same_bits(checkpoint.restore(tmp_path, abstract(state)).state, state)


def test_restored_arrays_lie_where_the_abstract_state_says(tmp_path):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state = {"x": jnp.arange(jax.device_count() * 2.0)}
    checkpoint.save(tmp_path, 0, state, {}, keep=1)
    wanted = {"x": jax.ShapeDtypeStruct(state["x"].shape, jnp.float32, sharding=sharded)}
    assert checkpoint.restore(tmp_path, wanted).state["x"].sharding == sharded


def test_parameters_can_be_read_without_knowing_the_optimizer(two_saved):
    restored = checkpoint.restore_params(two_saved, abstract(state_of(0)["params"]))
    assert_same_bits(restored.state, state_of(8)["params"])


def test_a_workdir_without_checkpoints_gives_none(tmp_path):
    assert checkpoint.restore(tmp_path, abstract(state_of(0))) is None


def test_the_latest_step_is_that_of_the_newest_checkpoint(two_saved):
    assert checkpoint.latest_step(two_saved) == 8


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, {"x": jnp.zeros(2)}, {}, keep=2)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step_00000003", "step_00000004"]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep at least 1"):
        checkpoint.save(tmp_path, 1, state_of(1), {}, keep=0)


# Damage


def test_a_truncated_file_falls_back_to_the_checkpoint_before(two_saved, capsys):
    path = largest_file(step_folder(two_saved, 8))
    path.write_bytes(path.read_bytes()[:-7])
    assert_falls_back_to_4(two_saved, capsys)


def test_one_changed_bit_falls_back_to_the_checkpoint_before(two_saved, capsys):
    path = largest_file(step_folder(two_saved, 8) / "state")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert_falls_back_to_4(two_saved, capsys)


def test_a_missing_file_falls_back_to_the_checkpoint_before(two_saved, capsys):
    largest_file(step_folder(two_saved, 8) / "state").unlink()
    assert_falls_back_to_4(two_saved, capsys)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"content": "{}", "sha256": "0"}'])
def test_an_unreadable_manifest_falls_back_to_the_checkpoint_before(two_saved, capsys, content):
    (step_folder(two_saved, 8) / "checkpoint.json").write_text(content)
    assert_falls_back_to_4(two_saved, capsys)


def test_a_changed_stream_position_falls_back_to_the_checkpoint_before(two_saved, capsys):
    path = step_folder(two_saved, 8) / "checkpoint.json"
    path.write_text(path.read_text().replace("80", "90"))
    assert_falls_back_to_4(two_saved, capsys)


def test_a_missing_manifest_falls_back_to_the_checkpoint_before(two_saved, capsys):
    (step_folder(two_saved, 8) / "checkpoint.json").unlink()
    assert_falls_back_to_4(two_saved, capsys)


def test_a_checkpoint_still_being_written_is_not_seen(two_saved):
    shutil.copytree(
        step_folder(two_saved, 8), step_folder(two_saved, 8).with_name("writing_00000012")
    )
    assert checkpoint.restore(two_saved, abstract(state_of(0))).step == 8


def test_what_a_killed_save_left_is_removed_by_the_next(two_saved):
    left = step_folder(two_saved, 8).with_name("writing_00000012")
    left.mkdir()
    checkpoint.save(two_saved, 12, state_of(12), {}, keep=3)
    assert not left.exists()


def test_damage_everywhere_gives_none_and_says_so(two_saved, capsys):
    for step in (4, 8):
        (step_folder(two_saved, step) / "checkpoint.json").unlink()
    assert checkpoint.restore(two_saved, abstract(state_of(0))) is None
    assert "none is intact" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(two_saved):
    largest_file(step_folder(two_saved, 8)).unlink()
    checkpoint.save(two_saved, 8, state_of(8), {"position": 80}, keep=3)
    assert checkpoint.restore(two_saved, abstract(state_of(0))).step == 8


def test_a_damaged_later_checkpoint_does_not_count_among_those_kept(two_saved):
    largest_file(step_folder(two_saved, 8)).unlink()
    checkpoint.save(two_saved, 6, state_of(6), {}, keep=1)
    assert checkpoint.restore(two_saved, abstract(state_of(0))).step == 6


def test_a_full_disk_leaves_the_earlier_checkpoints_and_says_so(two_saved, monkeypatch):
    def full(folder, state):
        folder.mkdir(parents=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_arrays", full)
        with pytest.raises(checkpoint.CheckpointNotSaved, match="the one of step 8 is intact"):
            checkpoint.save(two_saved, 12, state_of(12), {}, keep=1)
    assert checkpoint.restore(two_saved, abstract(state_of(0))).step == 8


# Checkpoints of something else


def test_another_model_size_is_refused_by_the_name_of_the_leaf(two_saved):
    with pytest.raises(ValueError, match=r"has params/embed of \(8,4\) float32, this config needs"):
        checkpoint.restore_params(two_saved, abstract(state_of(0, width=6)["params"]))


def test_another_dtype_is_refused(two_saved):
    wanted = {"embed": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"needs \(8,4\) bfloat16"):
        checkpoint.restore_params(two_saved, wanted)


def test_a_leaf_that_was_not_saved_is_refused_by_name(two_saved):
    wanted = abstract(state_of(0))
    wanted["params"]["head"] = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    with pytest.raises(ValueError, match="has no params/head"):
        checkpoint.restore(two_saved, wanted)


def test_a_saved_leaf_that_has_no_place_is_refused_by_name(two_saved):
    wanted = abstract(state_of(0))
    del wanted["params"]["embed"]
    with pytest.raises(ValueError, match="has params/embed, which this config does not"):
        checkpoint.restore(two_saved, wanted)


def test_another_format_is_refused_with_what_to_do(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 99)
        checkpoint.save(tmp_path, 1, state_of(1), {}, keep=1)
    with pytest.raises(ValueError, match="checkpoint format 99"):
        checkpoint.restore(tmp_path, abstract(state_of(0)))


# Killed


SAVE_FOREVER = """
import itertools, sys
import jax.numpy as jnp
from demyrl import checkpoint
for step in itertools.count():
    state = {"a": jnp.full((64, 64), step, jnp.float32), "b": jnp.full(9, step)}
    checkpoint.save(sys.argv[1], step, state, {"step": step}, keep=1)
"""


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    root = Path(__file__).parents[1]
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], cwd=root, stderr=subprocess.DEVNULL
    )
    while checkpoint.latest_step(tmp_path) is None and saver.poll() is None:
        time.sleep(0.01)
    time.sleep(0.137)
    saver.kill()
    saver.wait()
    wanted = {
        "a": jax.ShapeDtypeStruct((64, 64), jnp.float32),
        "b": jax.ShapeDtypeStruct((9,), jnp.int32),
    }
    restored = checkpoint.restore(tmp_path, wanted)
    values = {int(value) for leaf in jax.tree.leaves(restored.state) for value in np.ravel(leaf)}
    assert values == {restored.step} == {restored.extra["step"]}
