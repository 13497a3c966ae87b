"""Runs, checkpoints and problems in a bucket, with a stand-in for Google Cloud Storage."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bucket import buckets

from demyrl import checkpoint, logs, storage
from demyrl.data.problems import read_problems, read_verl, write_problems
from demyrl.types import Problem

RUN = "gs://my-bucket/runs/one"
STEP = "my-bucket/runs/one/checkpoints/step_"


@pytest.fixture
def objects(monkeypatch):
    with buckets(monkeypatch) as found:
        yield found


def state_of(step):
    params = {"embed": np.full((8, 4), step, np.float32), "bias": jnp.arange(3.0) + step}
    return {"params": jax.tree.map(jnp.asarray, params), "step": jnp.int32(step)}


def abstract(state):
    return jax.eval_shape(lambda: state)


def save(step, keep=3):
    checkpoint.save(RUN, step, state_of(step), {"position": step * 10}, keep)


def under(objects, prefix):
    return [name for name in objects if name.startswith(prefix)]


# Paths


def test_a_bucket_keeps_both_slashes_of_its_name(objects):
    assert str(storage.path(RUN) / "metrics.jsonl") == "gs://my-bucket/runs/one/metrics.jsonl"


def test_a_local_folder_is_a_plain_path(tmp_path):
    assert storage.path(str(tmp_path)) == tmp_path
    assert type(storage.path(str(tmp_path))) is type(tmp_path)


def test_a_url_without_a_bucket_is_refused(objects):
    with pytest.raises(ValueError, match="gs:// names no bucket: write gs://BUCKET/FOLDER"):
        storage.path("gs://")


def test_an_unknown_scheme_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="http:// is unknown, use a folder or gs://"):
        storage.path("http://host/file")


def test_a_missing_client_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(storage.CLIENTS, "s3://", "no_such_client")
    with pytest.raises(ValueError, match="pip install no_such_client"):
        storage.path("s3://bucket/run")


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path):
    file = tmp_path / "text"
    storage.write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        storage.write_text(file, "\ud800")
    assert file.read_text() == "old"


def test_the_files_of_a_bucket_but_not_its_weights_are_copied_here(objects):
    for name in ("tokenizer.json", "model.safetensors", "deeper/config.json"):
        objects[f"my-bucket/model/{name}"] = name.encode()
    folder = storage.local_folder(storage.path("gs://my-bucket/model"))
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"


# Logs


def run_steps(steps, resume_step=None):
    with logs.Logs(RUN, steps=10, resume_step=resume_step) as log:
        for step in steps:
            log.trajectories(step, [{"step": step, "reward": float("nan")}])
            log.numbers(step, {"reward/mean": step / 4})


def test_the_lines_of_all_steps_are_in_the_bucket(objects):
    run_steps([0, 1, 2])
    lines = objects["my-bucket/runs/one/metrics.jsonl"].decode().splitlines()
    assert [json.loads(line)["reward/mean"] for line in lines] == [0.0, 0.25, 0.5]


def test_a_step_is_in_the_bucket_before_the_next_one(objects):
    with logs.Logs(RUN, steps=2) as log:
        log.numbers(0, {"reward/mean": 1.0})
        assert logs.read_rows(f"{RUN}/metrics.jsonl") == [{"step": 0, "reward/mean": 1.0}]


def test_trajectories_are_read_back_from_the_bucket(objects):
    run_steps([3])
    assert logs.read_rows(logs.rollouts_path(RUN, 3)) == [{"step": 3, "reward": None}]


def test_a_resumed_run_has_every_step_once(objects):
    run_steps([0, 1, 2, 3])
    run_steps([2, 3], resume_step=2)
    assert [row["step"] for row in logs.read_rows(f"{RUN}/metrics.jsonl")] == [0, 1, 2, 3]


def test_a_resumed_run_drops_the_trajectories_it_makes_again(objects):
    run_steps([0, 1, 2])
    run_steps([], resume_step=1)
    assert storage.names(storage.path(RUN) / "rollouts") == ["step_000000.jsonl"]


def test_the_events_of_tensorboard_are_in_the_bucket_after_a_step(objects):
    with logs.Logs(RUN, steps=2) as log:
        log.numbers(0, {"reward/mean": 1.0})
        (events,) = under(objects, "my-bucket/runs/one/tensorboard/")
        assert b"reward/mean" in objects[events]


def test_a_workdir_in_a_bucket_refuses_another_config(objects):
    logs.record_run(RUN, '{"seed": 1}', {})
    run_steps([0])
    with pytest.raises(ValueError, match="seed is 1 there, 2 here"):
        logs.record_run(RUN, '{"seed": 2}', {})


def test_each_start_is_recorded_in_the_bucket(objects):
    for cpus in (1, 2):
        logs.record_run(RUN, '{"seed": 1}', {"cpus": cpus})
    starts = json.loads(objects["my-bucket/runs/one/environment.json"])
    assert starts == [{"cpus": 1}, {"cpus": 2}]


# Checkpoints


def test_a_state_comes_back_from_a_bucket(objects):
    save(7)
    restored = checkpoint.restore(RUN, abstract(state_of(0)))
    assert (restored.step, restored.extra) == (7, {"position": 70})
    jax.tree.map(np.testing.assert_array_equal, restored.state, state_of(7))


def test_parameters_alone_come_back_from_a_bucket(objects):
    save(4)
    save(8)
    restored = checkpoint.restore_params(RUN, abstract(state_of(0)["params"]), step=4)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state_of(4)["params"])


def test_the_mark_of_a_checkpoint_is_the_last_object_written(objects):
    save(7)
    assert list(objects)[-1] == f"{STEP}00000007/checkpoint.json"


def test_only_the_newest_are_kept_in_a_bucket(objects):
    for step in (1, 2, 3):
        save(step, keep=2)
    assert checkpoint.steps(RUN) == [2, 3]
    assert under(objects, f"{STEP}00000001") == []


def test_a_checkpoint_without_its_mark_is_passed_over(objects, capsys):
    save(4)
    save(8)
    del objects[f"{STEP}00000008/checkpoint.json"]
    assert checkpoint.latest_step(RUN) == 4
    assert checkpoint.restore(RUN, abstract(state_of(0))).step == 4
    assert "no checkpoint.json" in capsys.readouterr().err


def test_the_next_save_removes_a_checkpoint_without_its_mark(objects):
    save(8)
    del objects[f"{STEP}00000008/checkpoint.json"]
    save(12)
    assert under(objects, f"{STEP}00000008") == []


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_object_falls_back_to_the_checkpoint_before(objects, damage, capsys):
    save(4)
    save(8)
    largest = max(under(objects, f"{STEP}00000008/state"), key=lambda name: len(objects[name]))
    content = objects.pop(largest)
    if damage == "cut":
        objects[largest] = content[:-1]
    assert checkpoint.restore(RUN, abstract(state_of(0))).step == 4
    assert f"{len(content)} were saved" in capsys.readouterr().err


def test_a_step_saved_again_replaces_the_earlier_one(objects):
    checkpoint.save(RUN, 4, state_of(4), {"try": 1}, keep=1)
    before = under(objects, f"{STEP}00000004")
    checkpoint.save(RUN, 4, state_of(4), {"try": 2}, keep=1)
    assert checkpoint.restore(RUN, abstract(state_of(0))).extra == {"try": 2}
    assert len(under(objects, f"{STEP}00000004")) == len(before)


@pytest.mark.parametrize("to_bucket", [True, False])
def test_a_checkpoint_that_was_copied_comes_back(objects, tmp_path, to_bucket):
    places = [tmp_path, storage.path(RUN)]
    saved_at, copied_to = places if to_bucket else places[::-1]
    checkpoint.save(saved_at, 4, state_of(4), {}, keep=1)
    for name in storage.sizes(saved_at):
        storage.make_folder((copied_to / name).parent)
        storage.copy(saved_at / name, copied_to / name)
    restored = checkpoint.restore(copied_to, abstract(state_of(0)))
    jax.tree.map(np.testing.assert_array_equal, restored.state, state_of(4))


# Problems


def problem(number):
    return Problem(f"p{number}", "made", "math", f"What is {number}?", str(number), "number")


def test_problems_in_a_bucket_come_back_as_written(objects):
    problems = [problem(1), problem(2)]
    write_problems("gs://my-bucket/pool.jsonl", problems)
    assert read_problems("gs://my-bucket/pool.jsonl") == problems


def test_a_missing_file_of_a_bucket_is_named(objects):
    with pytest.raises(ValueError, match="gs://my-bucket/none.jsonl cannot be read"):
        read_problems("gs://my-bucket/none.jsonl")


def test_published_problems_are_read_from_a_bucket(objects):
    row = {
        "data_source": "set",
        "prompt": [{"role": "user", "content": "What is 3?"}],
        "ability": "math",
        "reward_model": {"ground_truth": "3"},
        "extra_info": {"index": 5},
    }
    objects["my-bucket/verl.jsonl"] = json.dumps(row).encode()
    (found,) = read_verl("gs://my-bucket/verl.jsonl", "number")
    assert (found.id, found.answer) == ("set-5", "3")
