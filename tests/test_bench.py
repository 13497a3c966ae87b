"""Each benchmark prints one line of JSON with what its header says. Nothing is timed here."""

import importlib
import json
import re

import jax
import pytest

from demyrl import command
from experiments.bench import start
from experiments.bench.measure import repeat

SMALL = (
    "--seconds=0",
    "--config.model.source=",
    "--config.model.width=16",
    "--config.model.layers=1",
    "--config.model.feed_forward=16",
    "--config.rollout.slots=4",
    "--config.rollout.context=128",
    "--config.rollout.turn_tokens=8",
    "--config.rollout.output_tokens=8",
    "--config.rollout.extend_rows=2",
    "--config.rollout.extend_lengths=(96,)",
    "--config.reward.max_len=64",
    "--config.train.problems=1",
    "--config.train.samples=2",
    "--config.train.updates=1",
    "--config.train.pack.rows=2",
    "--config.train.pack.row_tokens=128",
    "--config.sft.rows_per_step=2",
    "--config.sft.pack.rows=2",
    "--config.sft.pack.row_tokens=32",
)
MACHINE = {"bench", "config", "cpus", "device", "jax", "platform"}
KEYS = {
    "decode": {
        "tokens_per_s", "slot_use", "step_ms", "extend_tokens_per_s", "compile_s", "slots",
        "context", "decode_steps", "extend_rows", "turn_tokens", "rows", "parameters",
    },
    "train_step": {"sft", "rl", "score", "peak_rss_bytes", "peak_device_bytes"},
    "rollout": {
        "trajectories_per_s", "calls_per_s", "sampled_tokens_per_s", "device_share",
        "tools_wait_share", "host_share", "slot_use", "call_share", "tool_ms", "first_rollout_s",
        "source", "isolation", "workers", "slots", "problems", "samples", "rollouts", "rollouts_s",
    },
    "start": {"import_s", "help_s", "first_step_s", "one_step_run_s", "problems", "samples",
              "source"},
}  # fmt: skip

FAKE_STAGE = """
import pathlib, sys
workdir = sys.argv[-1].partition("--workdir=")[2]
if workdir:
    pathlib.Path(workdir).mkdir()
    pathlib.Path(workdir, "metrics.jsonl").write_text("one line")
    print("no sandbox")
    sys.exit({exit_code})
"""


@pytest.fixture(scope="module", autouse=True)
def compile_fast(tmp_path_factory):
    """Nothing is timed, so most of the compiler's work is left out; what is compiled is kept apart
    from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEMYRL_CACHE", str(tmp_path_factory.mktemp("xla")))
        command.enable_compilation_cache()
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def line_of(capsys):
    """The object that a benchmark prints."""

    def run(name, *words):
        importlib.import_module(f"experiments.bench.{name}").main([*SMALL, *words])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        return json.loads(lines[0])

    return run


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Puts FAKE_STAGE in the place of training; it ends with the exit code that is given."""

    def put(exit_code):
        (tmp_path / "fake_stage.py").write_text(FAKE_STAGE.format(exit_code=exit_code))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(start, "STAGE", "fake_stage")

    return put


@pytest.mark.parametrize("name", KEYS)
def test_a_benchmark_prints_one_line_with_its_keys(name, line_of, stage):
    stage(exit_code=0)
    assert line_of(name).keys() == KEYS[name] | MACHINE


def test_a_run_that_fails_has_no_seconds_to_its_first_step(line_of, stage):
    stage(exit_code=3)
    with pytest.raises(RuntimeError, match="exit code 3:\nno sandbox"):
        line_of("start")


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_in_the_header(name):
    header = importlib.import_module(f"experiments.bench.{name}").__doc__
    assert {key for key in KEYS[name] if not re.search(rf"\b{key}\b", header)} == set()


def test_a_setting_that_does_not_exist_is_refused(line_of, capsys):
    with pytest.raises(SystemExit):
        line_of("decode", "--config.rollout.slot=4")
    assert "Did you mean rollout.slots?" in capsys.readouterr().err


def test_the_first_call_is_not_counted():
    calls = []
    results, _ = repeat(lambda: calls.append(0) or len(calls), 0.0)
    assert results == [2]
