"""Where weights come from: what each kind of source brings with it, and what is refused."""

import json
import shutil

import jax
import numpy as np
import pytest

from demyrl import logs, recipe
from demyrl.learn.optimizer import make_optimizer
from demyrl.learn.state import start_state
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.text.chat import Chat
from demyrl.text.tokenizer import load_tokenizer
from demyrl.tools.interpreter import SCHEMA
from demyrl.train_sft import Conversation, Sft
from demyrl.weights import (
    builtin_folder,
    first_state,
    folder_of,
    is_workdir,
    keep_source,
    shape_of,
    starting_params,
    tokenizer_of,
)
from tests.tiny import shrunk_config


def copy_of_tiny(folder, **changes):
    """The checkpoint that ships, as a folder of its own with changed keys in its config.json."""
    folder.mkdir()
    for file in builtin_folder("builtin:tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run that was saved before its first step, whose source is gone; it had another template
    than its tokenizer's own."""
    folder = tmp_path_factory.mktemp("run")
    source = copy_of_tiny(tmp_path_factory.mktemp("gone") / "source")
    config = shrunk_config(model__source=str(source), chat__template="builtin:hermes")
    settings = recipe.on_device(recipe.read(config))
    logs.record_run(folder, settings.config_json, {})
    chat = Chat(load_tokenizer(settings.tokenizer, settings.chat.template), [SCHEMA])
    keep_source(folder, settings.source, settings.tokenizer, chat.tokenizer.template)
    whole = Conversation(np.arange(5, dtype=np.int32), np.ones(5, bool))
    run = Sft(settings, [whole] * 8, [])
    assert run.start(folder) == 0
    run.save(folder, 0, keep=1)
    shutil.rmtree(source)
    return folder, config


@pytest.fixture
def run_folder(workdir):
    return workdir[0]


def test_a_run_brings_the_shape_and_the_weights_it_began_with(run_folder):
    base = shape_of("builtin:tiny", "float32")
    assert shape_of(str(run_folder), "float32") == base
    mesh = make_mesh(MeshConfig(1, 1, 1))
    there = starting_params(str(run_folder), base, mesh, 0)
    here = starting_params("builtin:tiny", base, mesh, 0)
    jax.tree.map(np.testing.assert_array_equal, there, here)


def test_a_run_brings_its_tokenizer_with_the_template_it_used(run_folder):
    kept, hermes = load_tokenizer(tokenizer_of(str(run_folder))), "builtin:hermes"
    assert kept.template == load_tokenizer("builtin:tiny", hermes).template
    assert kept.template != load_tokenizer("builtin:tiny").template


def test_a_run_goes_on_when_its_source_is_gone(workdir):
    folder, config = workdir
    with pytest.raises(ValueError, match="there is no such folder"):
        recipe.read(config)
    settings = recipe.on_device(recipe.read(config, folder))
    assert settings.tokenizer == str(folder / "source")
    run = Sft(settings, [Conversation(np.arange(5, dtype=np.int32), np.ones(5, bool))] * 8, [])
    assert run.start(folder) == 0
    want = starting_params("builtin:tiny", settings.model, run.mesh, 0)
    jax.tree.map(np.testing.assert_array_equal, run.state.params, want)


def test_a_state_that_was_restored_is_placed_like_a_new_one(workdir):
    folder, config = workdir
    settings = recipe.on_device(recipe.read(config, folder))
    mesh = make_mesh(MeshConfig(4, 1, 1))
    optimizer = make_optimizer(settings.sft_optimizer, settings.model)
    state, _ = first_state(folder, "", settings.model, mesh, 0, optimizer)
    fresh = start_state(starting_params("builtin:tiny", settings.model, mesh, 0), optimizer)
    jax.tree.map(np.testing.assert_array_equal, state, fresh)
    jax.tree.map(lambda a, b: _same_place(a, b), state, fresh)


def _same_place(one, other):
    assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_random_weights_bring_no_tokenizer():
    with pytest.raises(ValueError, match="random weights bring no tokenizer. Name a folder"):
        recipe.read(shrunk_config(model__source=""))


def test_the_shape_of_a_source_takes_the_place_of_the_configs_numbers(capsys):
    settings = recipe.read(shrunk_config(model__width=128))
    assert settings.model.width == 64
    assert json.loads(settings.config_json)["model"]["width"] == 64
    assert "the model is that of builtin:tiny: width 64" in capsys.readouterr().err


def test_equal_numbers_are_not_told(capsys):
    recipe.read(shrunk_config())
    assert capsys.readouterr().err == ""


def test_the_data_type_is_float32_on_a_cpu():
    settings = recipe.read(shrunk_config())
    assert settings.model.dtype == "auto"
    assert recipe.on_device(settings).model.dtype == "float32"
    asked = recipe.read(shrunk_config(model__dtype="bfloat16"))
    assert recipe.on_device(asked).model.dtype == "bfloat16"


@pytest.mark.parametrize(
    "source, said",
    [
        ("Qwen/Qwen3-4B", "looks like the name of a model on a hub, and nothing is downloaded"),
        ("Qwen/Qwen3-4B", "`hf download Qwen/Qwen3-4B --local-dir Qwen3-4B` fetches it"),
        ("https://huggingface.co/Qwen/Qwen3-4B/", "`hf download Qwen/Qwen3-4B --local-dir"),
        ("/nowhere/at/all", "there is no such folder. Weights must be on disk"),
        ("builtin:huge", "there is no such folder"),
    ],
)
def test_a_source_that_is_none_is_refused_with_what_to_do(source, said):
    with pytest.raises(ValueError) as refused:
        folder_of(source)
    assert said in str(refused.value) and repr(source) in str(refused.value)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="with neither config.json nor checkpoints/"):
        folder_of(str(tmp_path))


def test_a_run_without_a_checkpoint_is_no_source(tmp_path):
    logs.record_run(tmp_path, recipe.read(shrunk_config()).config_json, {})
    with pytest.raises(ValueError, match="the folder of a run without a checkpoint"):
        folder_of(str(tmp_path))


def test_a_context_longer_than_the_weights_were_made_for_is_refused(tmp_path):
    source = copy_of_tiny(tmp_path / "source", max_position_embeddings=100)
    with pytest.raises(ValueError, match="rollout.context is 160, .* sequences of up to 100"):
        recipe.read(shrunk_config(model__source=str(source)))


def test_another_tokenizer_does_not_get_the_end_tokens_of_the_source(tmp_path):
    source = copy_of_tiny(tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    template = load_tokenizer("builtin:tiny").template
    keep_source(tmp_path / "same", str(source), str(source), template)
    keep_source(tmp_path / "other", str(source), "builtin:tiny", template)
    kept = {name: tmp_path / name / "source" for name in ("same", "other")}
    assert (kept["same"] / "generation_config.json").exists()
    assert not (kept["other"] / "generation_config.json").exists()
    assert (kept["other"] / "config.json").exists() and not is_workdir(tmp_path / "other")
