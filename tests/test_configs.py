"""Every size of every config is locked, reads, and fits together."""

import importlib
from pathlib import Path

import pytest

from demyrl import command, recipe
from demyrl.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
FILES = sorted(path.stem for path in (ROOT / "configs").glob("[a-z]*.py"))
SIZES = [
    (name, size) for name in FILES for size in importlib.import_module(f"configs.{name}").SIZES
]


def config_of(name, size):
    return command.load_config(f"{ROOT / 'configs' / name}.py:{size}")


def without_weights(name, size):
    """The config with random weights in place of a checkpoint that has to be fetched."""
    config = config_of(name, size)
    if not config.model.source.startswith("builtin:"):
        config.model.source, config.tokenizer = "", "builtin:tiny"
    return config


@pytest.mark.parametrize("name, size", SIZES)
def test_the_config_reads(name, size):
    config = without_weights(name, size)
    assert config.is_locked
    settings = recipe.read(config)
    assert settings.train.samples == config.train.samples


@pytest.mark.parametrize("name, size", SIZES)
def test_the_same_size_is_the_same_config(name, size):
    assert command.config_json(config_of(name, size)) == command.config_json(config_of(name, size))


@pytest.mark.parametrize("name, size", SIZES)
def test_every_token_has_an_embedding(name, size):
    settings = recipe.read(without_weights(name, size))
    assert load_tokenizer(settings.tokenizer).vocab_size <= settings.model.vocab


@pytest.mark.parametrize("name, size", SIZES)
def test_the_loss_is_the_papers(name, size):
    loss = config_of(name, size).loss
    assert (loss.clip_low, loss.clip_high, loss.dual_clip) == (0.2, 0.28, 10.0)
    assert loss.aggregation == "token"


def test_an_unknown_size_is_refused_with_the_sizes():
    with pytest.raises(
        ValueError, match="no size 'huge' in grpo_tcr.py: use tiny or small or smollm2"
    ):
        config_of("grpo_tcr", "huge")


def test_the_weights_of_a_published_model_are_named_and_have_to_be_fetched():
    with pytest.raises(ValueError, match="'HuggingFaceTB/SmolLM2-135M-Instruct'.*hf download"):
        recipe.read(config_of("grpo_tcr", "smollm2"))
