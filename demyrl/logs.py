"""What a run leaves behind and shows while it works.

In a workdir: `metrics.jsonl` (numbers, one JSON object a line), `rollouts/step_000012.jsonl`
(trajectories as text), `tensorboard/` (the same numbers), `config.json` and `environment.json`.
On the console: a live display on a terminal, plain lines elsewhere. Readers of these files stand
here too, so that the formats have one home. Weights are not here: see `checkpoint.py`. The workdir
may lie in a bucket (`storage.py`); a file that grows is then written again as a whole. No JAX.
"""

import contextlib
import errno
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from demyrl import storage
from demyrl.display import Display
from demyrl.storage import Place

METRICS: dict[str, str] = {
    "reward/mean": "mean total reward of the graded trajectories",
    "reward/std": "standard deviation of the total reward over the graded trajectories",
    "reward/correct": "share of graded trajectories with a right answer",
    "reward/avg_at_g": "mean over problems of the share of their G samples that are right",
    "reward/pass_at_g": "share of problems with at least one right sample among G",
    "reward/equal_groups": "share of groups whose rewards are all equal: they teach nothing",
    "reward/solved_none": "share of groups without a right sample",
    "reward/solved_all": "share of groups with only right samples",
    "reward/ungraded": "trajectories that could not be graded",
    "reward/overlong": "mean penalty for long responses, 0 or less",
    "policy/entropy": "mean entropy of the sampled tokens' distributions, nats",
    "policy/sampler_gap": "mean |sampler - trainer| log-prob of sampled tokens, nats",
    "policy/sampler_gap_max": "largest |sampler - trainer| log-prob of a sampled token, nats",
    "loss/policy": "clipped policy loss",
    "loss/clipped_low": "share of trained weight stopped by the lower clip",
    "loss/clipped_high": "share of trained weight stopped by the upper clip",
    "loss/dual_clipped": "share of trained weight stopped by the dual clip (negative advantages)",
    "loss/kl_to_reference": "KL estimate from the policy to the weights it began with, nats",
    "loss/log_ratio_max": "largest log-prob change of a trained token since it was sampled, nats",
    "loss/log_ratio_min": "smallest log-prob change of a trained token, 0 or less, nats",
    "loss/kl_to_old": "KL estimate from the policy that sampled to the one being trained, nats",
    "optim/grad_norm": "global gradient norm before clipping",
    "optim/learning_rate": "mean learning rate of the step's updates",
    "optim/updates": "optimizer applications since the start of the run",
    "optim/skipped": "share of the step's updates skipped for a non-finite gradient",
    "optim/trained_tokens": "tokens with a loss in the step",
    "rollout/response_tokens": "mean tokens after the prompt, tool output included",
    "rollout/sampled_tokens": "mean tokens of a trajectory that the policy chose",
    "rollout/turns": "mean assistant turns of a trajectory",
    "rollout/calls": "mean tool calls of a trajectory",
    "rollout/call_share": "share of trajectories with at least one call",
    "rollout/truncated": "share of trajectories cut by the context, turn or call limit",
    "rollout/prefills": "prompts run through the model",
    "rollout/decode_steps": "decode steps of the sampler",
    "rollout/slot_use": "share of slot-steps of the decode loop that made a token",
    "tools/ok": "share of calls whose program ran to its end",
    "tools/error": "share of calls whose program raised or exited with an error",
    "tools/timeout": "share of calls stopped by the time limit",
    "tools/malformed": "share of calls that could not be parsed",
    "tools/output_limit": "share of calls stopped for writing too much",
    "tools/not_executed": "share of valid calls that a limit, or a disabled tool, did not let run",
    "tools/sandbox_errors": "calls that failed through a fault of the sandbox, not of the policy",
    "tools/seconds": "mean seconds of a call",
    "time/step_s": "seconds of the whole step",
    "time/rollout_s": "seconds spent sampling, tools included",
    "time/score_s": "seconds spent on the old log-probs",
    "time/update_s": "seconds spent on the updates",
    "time/tools_wait_s": "seconds in which every slot waited for a tool",
    "throughput/trained_tokens_per_s": "tokens with a loss, over the seconds of the updates",
    "throughput/sampled_tokens_per_s": "tokens the policy chose, over the seconds of the rollout",
    "sft/loss": "mean cross-entropy of the trained tokens, nats",
    "sft/probe_copy": "share of held-out episodes whose every copied digit is likelier than not",
    "eval/<domain>/avg_at_k": "mean over problems of the share of right samples",
    "eval/<domain>/pass_at_k": "mean over problems of the chance that one of k samples is right",
    "eval/<domain>/maj_at_k": "mean over problems of whether the commonest answer is right",
    "eval/<domain>/call_share": "share of evaluation trajectories with at least one call",
}
BEFORE_WORK = {"config.json", "environment.json", "tensorboard", "stage.json"}


def documented_as(name: str) -> str | None:
    """The key of METRICS that explains `name`, or None: `eval/math/avg_at_8` is under
    `eval/<domain>/avg_at_k`."""
    if name in METRICS:
        return name
    general = re.sub(r"_at_\d+$", "_at_k", re.sub(r"^eval/[^/]+/", "eval/<domain>/", name))
    return general if general in METRICS else None


class Logs:
    """The record of one run; a context manager.

    `steps` is the length of the run. `resume_step`, None for 0, is the first step that is run now:
    what an earlier process left from there on is dropped, so that no step is there twice. Of
    several processes one `writes`; the others keep time, and no record.
    """

    def __init__(
        self, workdir: str | Place, steps: int, resume_step: int | None = None, writes: bool = True
    ):
        self.workdir, self.writes = storage.path(workdir), writes
        first = resume_step or 0
        console = None if writes else Console(quiet=True, force_terminal=False)
        self._display = Display(steps, first, console)
        self._seconds: dict[str, float] = {}
        if writes:
            storage.make_folder(self.workdir)
            drop_from(self.workdir, first)
            self._events = _EventFile(self.workdir / "tensorboard", first)

    def __enter__(self) -> "Logs":
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()
        if self.writes:
            self._events.close()

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append one line, with the seconds of the timers that ended since the last one.

        A value that is NaN or infinite is written as null. Raises OSError when the disk is full;
        the file then ends with the last whole line.
        """
        numbers = {f"time/{name}_s": x for name, x in self._seconds.items()} | {**numbers}
        self._seconds = {}
        if not self.writes:
            return
        finite = {n: float(x) if math.isfinite(x) else None for n, x in numbers.items()}
        line = {"step": int(step), **finite}
        _append(self.workdir / "metrics.jsonl", json.dumps(line, allow_nan=False) + "\n")
        self._events.write(step, line)
        self._display.numbers(step, line)

    def trajectories(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Place:
        """The file the rows are in. It appears whole or not at all."""
        path = rollouts_path(self.workdir, step)
        if self.writes:
            storage.make_folder(path.parent)
            write_rows(path, rows)
        return path

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `time/<name>_s` of the next `numbers`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self, name: str) -> float:
        """What the timer has counted since the last `numbers`."""
        return self._seconds.get(name, 0.0)

    @contextlib.contextmanager
    def phase(
        self, name: str, total: int | None = None, step: int | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Show progress while the block runs; it gets a function to call with what got done."""
        with self._display.phase(name, total, step) as advance:
            yield advance

    def note(self, text: str) -> None:
        """Print a line without breaking the display."""
        self._display.note(text)


class _EventFile:
    """The numbers again, for TensorBoard; written in this thread, so a full disk is noticed.

    The file of a bucket is written on this machine and copied there after each step.
    """

    def __init__(self, folder: Place, first: int):
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter

        self._proto = event_pb2
        self._away = tempfile.TemporaryDirectory() if storage.is_remote(folder) else None
        here = Path(self._away.name) if self._away else folder
        storage.make_folder(here)
        self._path = here / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._target = folder / self._path.name
        with _disk_full_explained(self._path):
            self._writer = RecordWriter(str(self._path))
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(file_version="brain.Event:2"))
        # TensorBoard hides earlier points from this step on: a resumed run makes them again.
        self._write(event_pb2.Event(step=first, session_log=session))

    def write(self, step: int, line: Mapping[str, float | None]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        named = [(name, x) for name, x in line.items() if name != "step" and x is not None]
        values = [Summary.Value(tag=name, simple_value=x) for name, x in named]
        self._write(self._proto.Event(step=step, summary=Summary(value=values)))
        if self._away:
            storage.copy(self._path, self._target)

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with _disk_full_explained(self._path):
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # every event was flushed when written
            self._writer.close()
        if self._away:
            self._away.cleanup()


def rollouts_path(workdir: str | Place, step: int) -> Place:
    return storage.path(workdir) / "rollouts" / f"step_{step:06d}.jsonl"


def drop_from(workdir: Place, step: int) -> None:
    """Remove what the files hold of `step` and later, and files left half-written."""
    path = workdir / "metrics.jsonl"
    if path.exists():
        kept = [json.dumps(line) for line in read_rows(path) if line["step"] < step]
        _replace(path, "".join(f"{line}\n" for line in kept))
    rollouts = workdir / "rollouts"
    for path in [at / name for at in (workdir, rollouts) for name in storage.names(at)]:
        of_step = path.parent == rollouts and re.fullmatch(r"step_(\d+)\.jsonl", path.name)
        if path.name.endswith(".part") or (of_step and int(of_step[1]) >= step):
            path.unlink()


def read_rows(path: str | Place) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file. A torn last line (the process was killed) is left out.

    Raises ValueError with the line's number when another line is not JSON.
    """
    lines = storage.path(path).read_bytes().decode("utf-8", "replace").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return rows


def write_rows(path: Place, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file; it appears whole or not at all. NaN becomes null."""
    _replace(path, "".join(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows))


def write_json(path: Place, content: Any) -> None:
    """Write a JSON file; it appears whole or not at all. NaN becomes null."""
    _replace(path, json.dumps(_plain(content), allow_nan=False, indent=1) + "\n")


def record_run(
    workdir: str | Place,
    config_json: str,
    environment: Mapping[str, Any],
    ignore: tuple[str, ...] = (),
) -> None:
    """Save the config, and append the environment of this start to `environment.json`.

    Raises ValueError when the workdir holds work of another config, with each key that differs;
    keys in `ignore` (dotted) may change between two starts. A start without work binds nobody.
    """
    workdir = storage.path(workdir)
    storage.make_folder(workdir)
    path = workdir / "config.json"
    config = json.loads(config_json)
    begun = path.exists() and {*storage.names(workdir)} - BEFORE_WORK
    said = differences(json.loads(path.read_text()), config, ignore) if begun else ""
    if said:
        raise ValueError(
            f"{workdir} belongs to another config:\n{said}\n"
            "Use another --workdir, or delete this one to start again."
        )
    _replace(path, json.dumps(config, indent=2) + "\n")
    path = workdir / "environment.json"
    starts = json.loads(path.read_text()) if path.exists() else []
    _replace(path, json.dumps([*starts, _plain(environment)], indent=2) + "\n")


def differences(there: dict, here: dict, ignore: tuple[str, ...] = ()) -> str:
    """A line for each key in which two configs differ, but for those to `ignore`."""
    there, here = ({k: json.dumps(x) for k, x in flatten(c).items()} for c in (there, here))
    return "\n".join(
        f"  {key} is {there.get(key, 'absent')} there, {here.get(key, 'absent')} here"
        for key in sorted({*there, *here} - set(ignore))
        if there.get(key) != here.get(key)
    )


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def environment() -> dict[str, Any]:
    """What a run depends on besides its config: versions, commit, command, platform."""
    packages = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": _git_state(Path(__file__).resolve().parent.parent),
        "packages": dict(sorted(packages.items(), key=lambda pair: str(pair[0]).lower())),
    }


def _git_state(root: Path) -> dict[str, Any] | None:
    """The commit of the sources and whether they were changed since; None outside a repository."""
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


@contextlib.contextmanager
def _disk_full_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            "the disk is full. What was written before is whole. Free some space and run the same "
            "command again: it goes on from the last checkpoint",
            str(path),
        ) from error


def _append(path: Place, text: str) -> None:
    """Add `text` at the end, or leave the file as it was."""
    if storage.is_remote(path):
        before = path.read_bytes() if path.exists() else b""
        path.write_bytes(before + text.encode())
        return
    with _disk_full_explained(path), open(path, "ab", buffering=0) as file:
        before, rest = file.tell(), text.encode()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(before)
            raise


def _replace(path: Place, text: str) -> None:
    """Make `text` the content of the file; a reader sees the old or the new, never a part."""
    with _disk_full_explained(path):
        storage.write_text(path, text)


def _plain(value: Any) -> Any:
    """The value with what JSON cannot hold replaced: NaN by null, NumPy by Python."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
