"""Logs: what a run leaves on disk, also when it is killed, resumed, or the disk is full."""

import errno
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from demyrl import display, logs
from demyrl.logs import Logs


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder):
    return [line["step"] for line in lines_of(folder)]


def write_steps(folder, steps, resume_step=None):
    with Logs(folder, steps=10, resume_step=resume_step) as record:
        for step in steps:
            record.numbers(step, {"reward/mean": step / 4})


class FullDisk(io.RawIOBase):
    """A file that takes `room` bytes and then fails, as a full disk does."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, content):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(content[: self.room])
        self.room -= written
        return written

    def tell(self):
        return self.file.tell()

    def truncate(self, size=None):
        return self.file.truncate(size)

    def close(self):
        self.file.close()


def fill_disk(monkeypatch, name, room):
    """Let only `room` more bytes go into the file called `name`."""

    def open_on_full_disk(path, mode="r", **options):
        if str(path).endswith(name) and "a" in mode:
            return FullDisk(open(path, mode, **options), room)
        return open(path, mode, **options)

    monkeypatch.setattr(logs, "open", open_on_full_disk, raising=False)


def test_a_step_is_one_line_with_its_numbers(tmp_path):
    write_steps(tmp_path, [0, 1])
    assert lines_of(tmp_path) == [
        {"step": 0, "reward/mean": 0.0},
        {"step": 1, "reward/mean": 0.25},
    ]


def test_a_line_is_on_disk_before_the_run_ends(tmp_path):
    with Logs(tmp_path, steps=2) as record:
        record.numbers(0, {"reward/mean": 1.0})
        assert steps_of(tmp_path) == [0]


def test_a_number_that_is_not_finite_becomes_null(tmp_path):
    with Logs(tmp_path, steps=1) as record:
        record.numbers(0, {"reward/mean": float("nan"), "optim/grad_norm": np.float32("inf")})
    assert lines_of(tmp_path) == [{"step": 0, "reward/mean": None, "optim/grad_norm": None}]


def test_a_float_reads_back_bit_for_bit(tmp_path):
    value = 0.1 + 0.2
    with Logs(tmp_path, steps=1) as record:
        record.numbers(0, {"loss/policy": value})
    assert lines_of(tmp_path)[0]["loss/policy"] == value


def test_timers_of_a_step_add_up_in_its_line_only(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 2.0, 10.0, 13.0, 20.0, 20.0])
    with Logs(tmp_path, steps=2) as record:
        monkeypatch.setattr(logs.time, "perf_counter", lambda: next(clock))
        next(clock)
        for _ in range(2):
            with record.timer("rollout"):
                pass
        monkeypatch.undo()
        record.numbers(0, {})
        record.numbers(1, {})
    assert lines_of(tmp_path) == [{"step": 0, "time/rollout_s": 5.0}, {"step": 1}]


def test_a_resumed_run_has_every_step_once(tmp_path):
    write_steps(tmp_path, range(6))
    write_steps(tmp_path, range(4, 8), resume_step=4)
    assert steps_of(tmp_path) == list(range(8))


def test_a_run_without_a_checkpoint_starts_its_record_again(tmp_path):
    write_steps(tmp_path, range(3))
    write_steps(tmp_path, range(2))
    assert steps_of(tmp_path) == [0, 1]


def test_a_torn_last_line_is_dropped_on_resume(tmp_path):
    write_steps(tmp_path, range(3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rewa')
    write_steps(tmp_path, [3], resume_step=3)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\noops\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        logs.read_rows(path)


def test_resuming_removes_later_rollouts_and_half_written_files(tmp_path):
    with Logs(tmp_path, steps=9) as record:
        for step in (1, 5):
            record.trajectories(step, [{"problem_id": "a"}])
    (tmp_path / "rollouts" / "step_000006.jsonl.part").write_text("{")
    with Logs(tmp_path, steps=9, resume_step=5):
        pass
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.jsonl"]


def test_trajectories_read_back_with_numpy_values_and_markup(tmp_path):
    row = {"tokens": np.arange(3), "logprobs": np.float32([0.5, np.nan]), "reply": "<b>é</b>\n"}
    with Logs(tmp_path, steps=1) as record:
        path = record.trajectories(12, [row])
    assert path.name == "step_000012.jsonl"
    expected = {"tokens": [0, 1, 2], "logprobs": [0.5, None], "reply": "<b>é</b>\n"}
    assert logs.read_rows(path) == [expected]


def test_trajectories_that_fail_midway_leave_no_file(tmp_path):
    def rows():
        yield {"problem_id": "a"}
        raise RuntimeError("a bug")

    with Logs(tmp_path, steps=1) as record, pytest.raises(RuntimeError):
        record.trajectories(0, rows())
    assert list((tmp_path / "rollouts").iterdir()) == []


@pytest.mark.parametrize("room", [0, 7])
def test_a_full_disk_leaves_the_earlier_lines_whole(tmp_path, monkeypatch, room):
    with Logs(tmp_path, steps=3) as record:
        record.numbers(0, {"reward/mean": 1.0})
        fill_disk(monkeypatch, "metrics.jsonl", room)
        with pytest.raises(OSError, match="disk is full"):
            record.numbers(1, {"reward/mean": 2.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "reward/mean": 1.0}\n'


def test_other_write_errors_keep_their_own_message(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with Logs(tmp_path, steps=1) as record:
        monkeypatch.setattr(logs, "open", refuse, raising=False)
        with pytest.raises(PermissionError, match="Permission denied"):
            record.numbers(0, {})


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    write_steps(tmp_path, [3])
    (path,) = (tmp_path / "tensorboard").iterdir()
    content, events = path.read_bytes(), []
    while content:  # a record: length (8 bytes), checksum (4), the event, checksum (4)
        size = int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    (value,) = events[-1].summary.value
    assert (events[-1].step, value.tag, value.simple_value) == (3, "reward/mean", 0.75)


def test_a_config_is_saved_as_it_is(tmp_path):
    logs.record_run(tmp_path, '{"loss": {"clip_high": 0.28}}', {})
    assert json.loads((tmp_path / "config.json").read_text()) == {"loss": {"clip_high": 0.28}}


def test_another_config_is_refused_with_each_key_that_differs(tmp_path):
    logs.record_run(tmp_path, '{"loss": {"clip_high": 0.28, "clip_low": 0.2}}', {})
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError) as error:
        logs.record_run(tmp_path, '{"loss": {"clip_high": 0.3, "clip_low": 0.2}, "seed": 1}', {})
    message = str(error.value)
    assert "loss.clip_high is 0.28 there, 0.3 here" in message
    assert "seed is absent there, 1 here" in message
    assert "clip_low" not in message


def test_a_start_that_left_no_work_binds_nobody(tmp_path):
    logs.record_run(tmp_path, '{"isolation": "bwrap"}', {})
    logs.record_run(tmp_path, '{"isolation": "unsafe"}', {})
    assert json.loads((tmp_path / "config.json").read_text()) == {"isolation": "unsafe"}


def test_an_ignored_key_may_change_and_is_saved(tmp_path):
    logs.record_run(tmp_path, '{"steps": 10}', {})
    logs.record_run(tmp_path, '{"steps": 20}', {}, ignore=("steps",))
    assert json.loads((tmp_path / "config.json").read_text()) == {"steps": 20}


def test_every_start_adds_its_environment(tmp_path):
    logs.record_run(tmp_path, "{}", {"python": "3.11"})
    logs.record_run(tmp_path, "{}", {"python": "3.12"})
    starts = json.loads((tmp_path / "environment.json").read_text())
    assert [start["python"] for start in starts] == ["3.11", "3.12"]


def test_the_environment_names_packages_but_not_the_machine():
    found = logs.environment()
    assert found["packages"]["numpy"] == np.__version__
    assert logs.platform.node() not in json.dumps({**found, "command": []})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("reward/mean", "reward/mean"),
        ("eval/math/avg_at_8", "eval/<domain>/avg_at_k"),
        ("eval/all/call_share", "eval/<domain>/call_share"),
        ("reward/meen", None),
    ],
)
def test_a_name_is_found_in_the_documentation(name, key):
    assert logs.documented_as(name) == key


def test_away_from_a_terminal_lines_are_at_least_the_quiet_time_apart(monkeypatch):
    clock = iter(np.arange(0.0, 100.0, 0.5))
    monkeypatch.setattr(display.time, "perf_counter", lambda: float(next(clock)))
    screen = io.StringIO()
    shown = display.Display(steps=9, console=Console(file=screen))
    with shown.phase("rollout", total=20, step=2) as advance:
        for _ in range(20):
            advance(1)
    lines = screen.getvalue().splitlines()
    assert 2 <= len(lines) <= 4 and all(line.startswith("step 3/9  rollout ") for line in lines)


def test_the_last_step_is_shown_however_soon_it_comes():
    screen = io.StringIO()
    shown = display.Display(steps=3, console=Console(file=screen))
    for step in range(3):
        shown.numbers(step, {"step": step, "reward/avg_at_g": 0.5})
    assert "step 3/3  avg_at_g 0.5" in screen.getvalue()


def test_on_a_terminal_a_phase_and_a_note_are_shown_together():
    screen = io.StringIO()
    shown = display.Display(steps=3, console=Console(file=screen, force_terminal=True, width=80))
    shown.start()
    with shown.phase("rollout", total=4) as advance:
        advance(4)
        shown.note("a [bold] note")
    shown.stop()
    assert "a [bold] note" in screen.getvalue() and "rollout" in screen.getvalue()


def test_logs_does_not_load_jax_or_tensorboard():
    code = "import sys, demyrl.logs; print({'jax', 'tensorboardX'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
