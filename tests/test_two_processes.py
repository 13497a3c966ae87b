"""Two processes of four devices train as one process does, and end and go on together.

The processes are real, and so is the sandbox. What they do is in two_stages.py: they begin a run,
one of them is killed in the middle of an RL step, and the same command goes on. Meanwhile one
process makes the same run on one device, and then goes on, on eight, from what the two had saved
when they ended.
"""

import concurrent.futures
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from demyrl import checkpoint, liveness
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import abstract_params
from tests import tiny_run
from tests.test_processes import free_address
from tests.two_stages import DIES

ROOT = Path(__file__).parents[1]
SILENCE_S = 15
PATIENCE_S = 600  # for a loaded machine to compile everything twice
ONE, EIGHT = (1, 1, 1), (1, 8, 1)  # meshes of one process
VARIES = ("time/", "throughput/", "tools/seconds", "policy/sampler_gap", "rollout/slot_use")
VARIES += ("rollout/decode_steps", "rollout/prefills")  # how slots were used, not what came out
SAVED = DIES[1]  # the step of the last checkpoint before the kill


@dataclasses.dataclass
class Ended:
    code: int
    printed: str
    errors: str
    at: float

    @property
    def found(self):
        return json.loads(self.printed.partition("FOUND ")[2].splitlines()[0])

    @property
    def shown(self):
        """What was printed, but for what the CPU's collectives tell of their connections."""
        lines = [line for line in self.printed.splitlines() if line]
        return [line for line in lines if "[Gloo]" not in line and "peer ranks" not in line]


def start(part, folder, address, index):
    environment = {name: text for name, text in os.environ.items() if "JAX" not in name}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(index),
        "DEMYRL_SILENCE_S": str(SILENCE_S),
    }
    script = ROOT / "tests" / "two_stages.py"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), part, str(folder)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process):
    printed, errors = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, printed, errors, time.monotonic())


def pair(part, folder):
    """How both processes ended."""
    address = free_address()
    both = [start(part, folder, address, index) for index in (0, 1)]
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(end, both))
    finally:
        for process in both:
            process.kill()


@dataclasses.dataclass
class Runs:
    folder: Path
    begun: list[Ended]
    gone_on: list[Ended]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of a run in miniature: of the `pair`, of `one` device, and RL that `moved`."""
    folder = tmp_path_factory.mktemp("two")
    tiny_run.prepare(folder)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(pair, "begin", folder)
        tiny_run.sft(folder, folder / "one" / "sft", ONE)
        tiny_run.rl(folder, folder / "one" / "rl", ONE, model__source=str(folder / "one" / "sft"))
        tiny_run.evaluation(folder, folder / "one" / "eval", ONE, folder / "one" / "rl")
        begun = beginning.result()
        shutil.copytree(folder / "pair" / "rl", folder / "moved" / "rl")
        going_on = pool.submit(pair, "go on", folder)
        source = str(folder / "pair" / "sft")  # as it was when two processes began
        tiny_run.rl(folder, folder / "moved" / "rl", EIGHT, model__source=source)
        yield Runs(folder, begun, going_on.result())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(workdir):
    """The numbers of each step, without what the clock and the places of slots decide."""
    return [
        {name: x for name, x in line.items() if not name.startswith(VARIES)}
        for line in lines(workdir / "metrics.jsonl")
    ]


def rows(workdir):
    """The trajectories of all steps, in their order."""
    return [row for file in sorted((workdir / "rollouts").iterdir()) for row in lines(file)]


def params(workdir, step):
    mesh = make_mesh(MeshConfig(*ONE))
    restored = checkpoint.restore_params(workdir, abstract_params(tiny_run.SHAPE, mesh), step)
    return restored.state


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


# The run of two processes, and those of one


def test_sft_in_two_processes_gives_the_numbers_and_the_weights_of_one(runs):
    workdirs = runs.folder / "pair" / "sft", runs.folder / "one" / "sft"
    assert_close(*map(numbers, workdirs))
    assert_close(*(params(workdir, 4) for workdir in workdirs))


@pytest.mark.parametrize("name", ["pair", "moved"])
def test_rl_in_two_processes_samples_the_tokens_of_one(runs, name):
    got, want = rows(runs.folder / name / "rl"), rows(runs.folder / "one" / "rl")
    assert [row["tokens"] for row in got] == [row["tokens"] for row in want]
    assert len(want) == tiny_run.STEPS * 16
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)


@pytest.mark.parametrize("name", ["pair", "moved"])
def test_rl_in_two_processes_gives_the_numbers_and_the_weights_of_one(runs, name):
    workdirs = runs.folder / name / "rl", runs.folder / "one" / "rl"
    assert_close(*map(numbers, workdirs))
    assert_close(*(params(workdir, tiny_run.STEPS) for workdir in workdirs))


def test_an_evaluation_by_two_processes_counts_what_one_counts(runs):
    got, want = (runs.folder / name / "eval" for name in ("pair", "one"))
    content = [json.loads((at / "evaluation.json").read_text()) for at in (got, want)]
    assert content[0] == content[1]
    assert len(content[0]["rows"]) == 12 and all(row["calls"] for row in content[0]["rows"][:4])
    assert [row["tokens"] for row in rows(got)] == [row["tokens"] for row in rows(want)]


def test_the_runs_compared_did_learn(runs):
    first, last = (params(runs.folder / "one" / "rl", step) for step in (1, tiny_run.STEPS))
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), first, last)
    assert min(jax.tree.leaves(moved)) > 1e-5
    assert all(line["optim/trained_tokens"] > 50 for line in numbers(runs.folder / "one" / "rl"))


def test_the_tools_of_both_processes_ran(runs):
    statuses = {
        (index // 4 % 2, result["status"], result["output"])
        for index, row in enumerate(rows(runs.folder / "pair" / "rl"))
        for result in row["results"]
    }
    assert {(0, "ok", "42\n"), (1, "ok", "42\n")} <= statuses
    assert {row["isolation"] for row in rows(runs.folder / "pair" / "rl")} == {"bwrap"}


# The end of one process, and the way on


def test_a_process_killed_in_a_step_ends_the_other_with_a_clear_message(runs):
    alive, killed = runs.begun
    assert killed.code == -signal.SIGKILL and alive.code == liveness.ENDED
    assert alive.at - killed.at < 60
    assert "Process 1 of 2" in alive.errors and "has not been heard of" in alive.errors
    assert alive.errors.endswith(f"{liveness.GO_ON}\n") and "Traceback" not in alive.errors


def test_the_same_command_goes_on_from_the_last_checkpoint(runs):
    assert [ended.code for ended in runs.gone_on] == [0, 0], runs.gone_on[0].errors
    starts = json.loads((runs.folder / "pair" / "rl" / "environment.json").read_text())
    assert len(starts) == 2
    steps = [line["step"] for line in lines(runs.folder / "pair" / "rl" / "metrics.jsonl")]
    assert steps == list(range(tiny_run.STEPS))
    made_again = [row["step"] for row in rows(runs.folder / "pair" / "rl")]
    assert made_again == sorted(made_again)
    steps_shown = [line for line in runs.gone_on[0].shown if line.startswith("step ")]
    assert steps_shown[0].startswith(f"step {SAVED + 1}/{tiny_run.STEPS}")


def test_only_the_first_process_shows_anything(runs):
    assert runs.gone_on[0].shown != []
    assert (runs.gone_on[1].shown, runs.gone_on[1].errors) == ([], "")


# What all processes must have in common


@pytest.mark.parametrize(
    "what, message",
    [
        ("config", "seed is 0 there, 1 here"),
        ("files", "process 1 has other conversations or tokens than process 0"),
        ("workdir", "process 1 does not see"),
        ("mesh", "mesh.data is 1, which does not give each of 2 processes"),
        ("export", "export writes the whole model from one process"),
        ("weights", "this is one of 2 processes, none of which has all the weights"),
    ],
)
def test_what_cannot_be_is_refused_in_both_processes(runs, what, message):
    for ended in runs.begun:
        assert ended.found[what].startswith("ValueError: ")
        assert message in ended.found[what]


def test_a_save_that_fails_in_one_process_fails_in_both_and_leaves_nothing(runs):
    for ended in runs.begun:
        assert ended.found["failed"].startswith("CheckpointNotSaved: the checkpoint of step 3")
        assert ended.found["left"] == ["step_00000001", "step_00000002"]


def test_both_processes_restore_the_checkpoint_that_the_first_found_intact(runs):
    for index, ended in enumerate(runs.begun):
        own = [[10.0 + index] * 4] * 2
        assert ended.found["restored"] == [1, {"position": 1}, own]


def test_each_process_loads_its_shards_of_published_weights(runs):
    assert [ended.found["loads"] for ended in runs.begun] == [True, True]
