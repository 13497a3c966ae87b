"""Through the command line: a run that is killed and started again equals one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from demyrl import checkpoint
from demyrl.collect import collect_stage
from demyrl.learn.optimizer import make_optimizer
from demyrl.learn.state import start_state
from demyrl.recipe import read
from tests.tiny import SHRUNK, drawn_params, shrunk_config

ROOT = Path(__file__).parents[1]
STEPS = 8
VARIES = ("time/", "throughput/", "policy/sampler_gap", "tools/seconds", "rollout/slot_use")
VARIES += ("rollout/decode_steps", "rollout/prefills")  # how slots were used, not what came out
PATIENCE_S = 120


class Stage:
    """The command line of a stage in one workdir, to be run to its end or killed on the way."""

    def __init__(self, module, workdir, **changes):
        settings = SHRUNK | {name.replace("__", "."): value for name, value in changes.items()}
        flags = [f"--config.{key}={value}".replace(" ", "") for key, value in settings.items()]
        self.command = [sys.executable, "-m", f"demyrl.{module}", *flags, f"--workdir={workdir}"]
        self.environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self.environment.pop("XLA_FLAGS", None)
        self.workdir = workdir

    def start(self):
        return subprocess.Popen(
            self.command, cwd=ROOT, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self):
        """Runs to the end; what it printed."""
        process = self.start()
        printed, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, printed
        return printed

    def kill_when(self, moment, seconds=0.0):
        """Starts, waits for `moment()` to be true and then so long, and kills the process."""
        process = self.start()
        deadline = time.monotonic() + PATIENCE_S
        while not moment() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        printed, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"ended before it was killed:\n{printed}"

    def has_logged(self, step):
        path = self.workdir / "metrics.jsonl"
        return path.is_file() and path.read_bytes().count(b"\n") > step

    def is_saving(self):
        return any((self.workdir / "checkpoints").glob("writing_0*"))

    def kill_after(self, step, seconds):
        """Kills the run this long after the numbers of `step` were written."""
        self.kill_when(lambda: self.has_logged(step), seconds)

    def kill_while_saving(self, step):
        """Kills the run while it writes a checkpoint, after the numbers of `step`."""
        for _ in range(3):  # a save may end between being seen and the kill
            self.kill_when(lambda: self.has_logged(step) and self.is_saving())
            if self.is_saving():
                return
        raise AssertionError("no kill fell into a save")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where the runs of this file live, beside their demonstrations."""
    root = tmp_path_factory.mktemp("resume")
    collect_stage(shrunk_config(), root / "collect")
    return root


def sft_stage(root, name):
    demonstrations = root / "collect" / "real.jsonl"
    lengths = {"sft__max_steps": 60, "sft__cooldown_steps": 10, "sft__save_every": 10}
    return Stage("train_sft", root / name, sft__demonstrations=demonstrations, **lengths)


def rl_stage(root, name):
    """A gentle rate keeps what SFT taught, so that the episodes call the tool."""
    return Stage(
        "train", root / name,
        model__source=root / "sft", train__steps=STEPS, optimizer__learning_rate=1e-4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sft(root):
    """The workdir of an SFT run that was never stopped."""
    sft_stage(root, "sft").finish()
    return root / "sft"


@pytest.fixture(scope="module")
def rl(root, sft):
    """The workdirs of two RL runs: one never stopped, one killed at three moments."""
    rl_stage(root, "rl").finish()
    killed, moments = rl_stage(root, "rl_killed"), random.Random(0)
    killed.kill_while_saving(step=moments.randrange(0, 2))
    killed.kill_after(moments.randrange(2, 4), seconds=moments.random() / 4)
    killed.kill_after(moments.randrange(4, 6), seconds=moments.random() / 4)
    killed.finish()
    return root / "rl", root / "rl_killed"


def final_state(workdir, optimizer_of, step):
    """Parameters and optimizer of the last checkpoint, which is that of `step`."""
    settings = read(shrunk_config())
    optimizer = make_optimizer(optimizer_of(settings), settings.model)
    shape = start_state(drawn_params(settings.model), optimizer)
    restored = checkpoint.restore(workdir, checkpoint.like(shape))
    assert restored.step == step
    return restored.state


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(workdir):
    """The lines of metrics.jsonl without what the clock and the tools' timing decide."""
    return [
        {name: value for name, value in line.items() if not name.startswith(VARIES)}
        for line in lines(workdir / "metrics.jsonl")
    ]


def assert_same_bits(got, want):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_killed_rl_run_ends_with_the_same_bits(rl):
    whole, killed = (final_state(workdir, lambda s: s.optimizer, STEPS) for workdir in rl)
    assert_same_bits(killed, whole)


def test_a_killed_rl_run_repeats_the_numbers_of_every_step_once(rl):
    whole, killed = map(numbers, rl)
    assert [line["step"] for line in killed] == list(range(STEPS))
    assert killed == whole


def test_a_killed_rl_run_samples_the_same_tokens(rl):
    whole, killed = (sorted((workdir / "rollouts").iterdir()) for workdir in rl)
    assert [file.name for file in killed] == [file.name for file in whole]
    for a, b in zip(killed, whole, strict=True):
        assert [row["tokens"] for row in lines(a)] == [row["tokens"] for row in lines(b)]


def test_the_runs_compared_did_train_and_did_run_tools(rl):
    whole = numbers(rl[0])
    assert sum(line["optim/trained_tokens"] for line in whole) > 0
    assert sum(line["tools/ok"] + line["tools/error"] for line in whole) > 0


def test_the_killed_run_was_started_four_times_or_more(rl):
    starts = json.loads((rl[1] / "environment.json").read_text())
    assert len(starts) >= 4 and len(json.loads((rl[0] / "environment.json").read_text())) == 1


def test_a_killed_run_leaves_nothing_half_written(rl):
    there = [path.name for path in rl[1].rglob("*")]
    assert [name for name in there if name.startswith("writing_") or name.endswith(".part")] == []


def test_a_killed_sft_run_ends_with_the_same_bits_and_numbers(root, sft):
    killed = sft_stage(root, "sft_killed")
    killed.kill_after(random.Random(1).randrange(15, 35), seconds=0.02)
    killed.finish()
    assert numbers(root / "sft_killed") == numbers(sft)
    last = numbers(sft)[-1]["step"] + 1
    states = (final_state(w, lambda s: s.sft_optimizer, last) for w in (root / "sft_killed", sft))
    assert_same_bits(*states)
