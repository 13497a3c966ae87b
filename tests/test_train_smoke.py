"""The stages one after another, with the real sandbox, at the smallest size: files and numbers."""

import json

import jax
import numpy as np
import pytest

from demyrl import checkpoint, logs
from demyrl.collect import collect_stage
from demyrl.model.hf_load import load_params
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.recipe import read
from demyrl.train import train
from demyrl.train_sft import train_sft
from demyrl.weights import builtin_folder
from tests.tiny import shrunk_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of collect, eight SFT steps and three RL steps, each in its own workdir."""
    root = tmp_path_factory.mktemp("run")
    collect_stage(shrunk_config(), root / "collect")
    demonstrations = str(root / "collect" / "real.jsonl")
    train_sft(shrunk_config(sft__demonstrations=demonstrations), root / "sft")
    train(shrunk_config(model__source=str(root / "sft")), root / "rl")
    return root


def params_in(workdir):
    """The parameters of the newest checkpoint."""
    model = read(shrunk_config()).model
    sharding = params_sharding(model, make_mesh(MeshConfig(1, 1, 1)))
    base = load_params(builtin_folder("builtin:tiny"), model, sharding)
    restored = checkpoint.restore_params(workdir, checkpoint.like(base))
    return base, restored.state


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("stage, steps", [("sft", 8), ("rl", 3)])
def test_every_step_leaves_its_numbers(run, stage, steps):
    assert [line["step"] for line in lines(run / stage / "metrics.jsonl")] == list(range(steps))


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_every_number_is_documented_and_finite(run, stage):
    numbers = {name: x for line in lines(run / stage / "metrics.jsonl") for name, x in line.items()}
    del numbers["step"]
    assert [name for name in numbers if logs.documented_as(name) is None] == []
    assert [name for name, x in numbers.items() if x is None] == []


@pytest.mark.parametrize("stage, step", [("sft", 8), ("rl", 3)])
def test_the_last_checkpoint_is_that_of_the_last_step(run, stage, step):
    assert checkpoint.latest_step(run / stage) == step


def test_sft_moves_the_weights_and_lowers_the_loss(run):
    base, after = params_in(run / "sft")
    assert not np.array_equal(base["embedding"], after["embedding"])
    losses = [line["sft/loss"] for line in lines(run / "sft" / "metrics.jsonl")]
    assert losses[-1] < losses[0]


def test_rl_starts_from_the_weights_of_sft_and_moves_them(run):
    (_, sft), (_, rl) = params_in(run / "sft"), params_in(run / "rl")
    moved = max(
        float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (sft, rl)), strict=True)
    )
    assert 0 < moved < 0.1
    assert sum(line["optim/trained_tokens"] for line in lines(run / "rl" / "metrics.jsonl")) > 0


def test_the_rollouts_of_every_step_are_kept(run):
    files = sorted((run / "rl" / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step_{step:06d}.jsonl" for step in range(3)]
    rows = lines(files[1])
    assert len(rows) == 16 and {row["isolation"] for row in rows} == {"bwrap"}
    assert all(row["step"] == 1 and len(row["tokens"]) <= 160 for row in rows)


def test_config_environment_and_events_are_kept(run):
    there = {path.name for path in (run / "rl").iterdir()}
    assert {"config.json", "environment.json", "tensorboard", "checkpoints"} <= there


def test_the_sampler_and_the_trainer_agree_on_what_was_sampled(run):
    gaps = [line["policy/sampler_gap"] for line in lines(run / "rl" / "metrics.jsonl")]
    assert max(gaps) < 1e-4
