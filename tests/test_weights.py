"""Where weights come from: what each kind of source brings with it, and what is refused."""

import json

import jax
import numpy as np
import pytest

from demyrl import recipe
from demyrl.learn.update import make_optimizer, start_state
from demyrl.model.sharding import MeshConfig, make_mesh
from demyrl.text.chat import Chat
from demyrl.text.tokenizer import load_tokenizer
from demyrl.tools.interpreter import SCHEMA
from demyrl.train_sft import Sft
from demyrl.weights import (
    builtin_folder,
    folder_of,
    is_workdir,
    keep_source,
    shape_of,
    starting_params,
    tokenizer_of,
)
from tests.tiny import shrunk_config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run that was saved before its first step, with another template than its tokenizer's."""
    folder = tmp_path_factory.mktemp("run")
    settings = recipe.read(shrunk_config(chat__template="builtin:hermes"))
    (folder / "config.json").write_text(settings.config_json)
    chat = Chat(load_tokenizer(settings.tokenizer, settings.chat.template), [SCHEMA])
    keep_source(folder, settings.source, settings.tokenizer, chat.tokenizer.template)
    settings = recipe.on_device(settings)
    run = Sft.__new__(Sft)
    run.settings, run.cooling_from = settings, None
    params = starting_params(settings.source, settings.model, make_mesh(MeshConfig(1, 1)), 0)
    run.state = start_state(params, make_optimizer(settings.sft_optimizer, settings.model))
    run.stream = type("Stream", (), {"state": staticmethod(dict)})
    run.save(folder, 0, keep=1)
    return folder


def test_a_run_brings_the_shape_and_the_weights_it_began_with(workdir):
    base = shape_of("builtin:tiny", "float32")
    assert shape_of(str(workdir), "float32") == base
    mesh = make_mesh(MeshConfig(1, 1))
    there = starting_params(str(workdir), base, mesh, 0)
    here = starting_params("builtin:tiny", base, mesh, 0)
    jax.tree.map(np.testing.assert_array_equal, there, here)


def test_a_run_brings_its_tokenizer_with_the_template_it_used(workdir):
    kept, hermes = load_tokenizer(tokenizer_of(str(workdir))), "builtin:hermes"
    assert kept.template == load_tokenizer("builtin:tiny", hermes).template
    assert kept.template != load_tokenizer("builtin:tiny").template


def test_a_run_can_be_continued_when_its_source_is_gone(workdir):
    config = shrunk_config(model__source=str(workdir))
    settings = recipe.read(config)
    assert settings.tokenizer == str(workdir / "source")
    assert settings.model.vocab == 768


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


def test_a_context_longer_than_the_weights_were_made_for_is_refused(tmp_path):
    for file in builtin_folder("builtin:tiny").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    with pytest.raises(ValueError, match="rollout.context is 160, .* sequences of up to 100"):
        recipe.read(shrunk_config(model__source=str(tmp_path)))


def test_another_tokenizer_does_not_get_the_end_tokens_of_the_source(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in builtin_folder("builtin:tiny").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    template = load_tokenizer("builtin:tiny").template
    keep_source(tmp_path / "same", str(source), str(source), template)
    keep_source(tmp_path / "other", str(source), "builtin:tiny", template)
    kept = {name: tmp_path / name / "source" for name in ("same", "other")}
    assert (kept["same"] / "generation_config.json").exists()
    assert not (kept["other"] / "generation_config.json").exists()
    assert (kept["other"] / "config.json").exists() and not is_workdir(tmp_path / "other")
