"""Exports: an import comes out as it went in, a run as a server needs it."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from demyrl import checkpoint, export
from demyrl.model.hf_config import config_of, read_config
from demyrl.model.hf_load import load_params
from demyrl.model.hf_names import tensors_of
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.text.tokenizer import load_tokenizer
from demyrl.weights import builtin_folder, keep_source
from tests.tiny import MODEL, drawn_params

QWEN2 = dataclasses.replace(MODEL, qk_norm=False, attention_bias=True)
UNTIED = dataclasses.replace(MODEL, qk_norm=False, tied_embeddings=False)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CASES = {
    "bfloat16": (QWEN2, ["bfloat16"]),
    "float16": (UNTIED, ["float16"]),
    "float32": (MODEL, ["float32"]),
    "mixed": (UNTIED, ["bfloat16", "float32", "float16"]),
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """All but one of the tests leave the weights on one device, which compiles faster."""
    mesh = make_mesh(MeshConfig(1, 1, 1))
    monkeypatch.setattr(export, "wide_mesh", lambda model: mesh)


@pytest.fixture
def run(monkeypatch):
    """Exports with these words on the command line."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
        export.main()

    return run


def stored(model, dtypes):
    """Random tensors as a file could have them, subnormal numbers and zeros of both signs too."""
    rng = np.random.default_rng(3)
    tensors = {}
    for number, tensor in enumerate(tensors_of(model)):
        dtype = jnp.dtype(dtypes[number % len(dtypes)])
        values = rng.normal(size=tensor.shape).astype(dtype)
        values.flat[:3] = [0.0, -0.0, 5 * float(jnp.finfo(dtype).smallest_subnormal)]
        tensors[tensor.name] = values
    return tensors


def checkpoint_folder(folder, model, tensors):
    """A checkpoint with a tokenizer, whose config.json has a key that only its maker knows."""
    shutil.copytree(builtin_folder("builtin:tiny"), folder)
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    config = config_of(model) | {"torch_dtype": "bfloat16", "made_by": "hand"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    save_file(tensors, folder / "model.safetensors")


def all_tensors(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name


@pytest.fixture
def workdir(tmp_path):
    """A run of two saved steps, whose weights are drawn with the step as the seed."""
    source, folder = tmp_path / "source", tmp_path / "run"
    checkpoint_folder(source, MODEL, stored(MODEL, ["bfloat16"]))
    for step in (1, 2):
        checkpoint.save(folder, step, {"params": drawn_params(MODEL, step)}, {}, keep=2)
    model = dataclasses.asdict(MODEL) | {"source": str(source), "dtype": "auto"}
    (folder / "config.json").write_text(json.dumps({"model": model}))
    keep_source(folder, str(source), str(source), TEMPLATE)
    shutil.rmtree(source)
    return folder


# Of a source


@pytest.mark.parametrize("model, dtypes", CASES.values(), ids=CASES)
def test_an_unmodified_import_comes_out_bit_for_bit(model, dtypes, tmp_path, run):
    tensors = stored(model, dtypes)
    checkpoint_folder(tmp_path / "source", model, tensors)
    run(f"--source={tmp_path / 'source'}", f"--out={tmp_path / 'out'}")
    assert_same_bits(all_tensors(tmp_path / "out"), tensors)


def test_a_tied_head_that_the_source_holds_comes_out_too(tmp_path, run):
    tensors = stored(MODEL, ["bfloat16"])
    checkpoint_folder(tmp_path / "source", MODEL, tensors | {HEAD: tensors[EMBEDDING].copy()})
    run("--source", tmp_path / "source", "--out", tmp_path / "out")
    assert_same_bits(all_tensors(tmp_path / "out"), tensors | {HEAD: tensors[EMBEDDING]})


def test_a_source_in_shards_comes_out_bit_for_bit(tmp_path, run):
    tensors = stored(UNTIED, ["bfloat16"])
    checkpoint_folder(tmp_path / "source", UNTIED, tensors)
    (tmp_path / "source" / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + len(name) % 2}-of-00002.safetensors" for name in tensors}
    for file in set(places.values()):
        part = {name: tensors[name] for name, place in places.items() if place == file}
        save_file(part, tmp_path / "source" / file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (tmp_path / "source" / "model.safetensors.index.json").write_text(index)
    run("--source", tmp_path / "source", "--out", tmp_path / "out")
    assert_same_bits(all_tensors(tmp_path / "out"), tensors)


def test_everything_but_the_weights_comes_out_as_it_was(tmp_path, run):
    source, out = tmp_path / "source", tmp_path / "out"
    checkpoint_folder(source, MODEL, stored(MODEL, ["float16"]))
    (source / "chat_templates").mkdir()
    (source / "chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "optimizer.bin").touch()
    run("--source", source, "--out", out)
    config, found = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert found == config
    files = {p.relative_to(source): p for p in source.rglob("*") if p.suffix in (".json", ".jinja")}
    assert len(files) == 6
    for name, path in files.items():
        assert name.name == "config.json" or (out / name).read_bytes() == path.read_bytes()
    assert not (out / "optimizer.bin").exists()


def test_another_dtype_is_written_and_named_in_config_json(tmp_path, run, capsys):
    checkpoint_folder(tmp_path / "source", MODEL, stored(MODEL, ["float32"]))
    run("--source", tmp_path / "source", "--out", tmp_path / "out", "--dtype", "float16")
    dtypes = {str(array.dtype) for array in all_tensors(tmp_path / "out").values()}
    assert dtypes == {"float16"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "float16" and config["made_by"] == "hand"
    said = capsys.readouterr().out
    assert "out: 40,128 parameters in float16, 1 file of weights, 80,256 bytes" in said


def test_the_builtin_checkpoint_is_a_source(tmp_path, run):
    run("--source=builtin:tiny", "--out", tmp_path / "out")
    assert_same_bits(all_tensors(tmp_path / "out"), all_tensors(builtin_folder("builtin:tiny")))


# Of a run


def weights_in(folder):
    model = read_config(folder, "float32")
    return load_params(folder, model, params_sharding(model, make_mesh(MeshConfig(1, 1, 1))))


@pytest.mark.parametrize("words, step", [([], 2), (["--step=1"], 1)], ids=["newest", "asked"])
def test_a_run_comes_out_with_the_weights_of_the_step(words, step, workdir, tmp_path, run):
    run("--workdir", workdir, "--out", tmp_path / "out", *words)
    wanted = drawn_params(MODEL, step)
    jax.tree.map(np.testing.assert_array_equal, weights_in(tmp_path / "out"), wanted)


def test_the_config_of_a_run_is_its_sources_with_the_dtype_written(workdir, tmp_path, run):
    run("--workdir", workdir, "--out", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["made_by"] == "hand" and config["torch_dtype"] == "float32"
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": 1}'


def test_a_run_from_random_weights_gets_a_config_of_its_own(workdir, tmp_path, run):
    (workdir / "source" / "config.json").unlink()
    run("--workdir", workdir, "--out", tmp_path / "out")
    assert read_config(tmp_path / "out", "float32") == MODEL


def test_the_template_of_the_run_is_the_only_one_in_its_export(workdir, tmp_path, run):
    path = workdir / "source" / "tokenizer_config.json"
    named = [{"name": "default", "template": "other"}, {"name": "tool_use", "template": "third"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    run("--workdir", workdir, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE and config["eos_token"] == "<|im_end|>"


def test_transformers_renders_and_encodes_what_the_run_was_trained_on(workdir, tmp_path, run):
    transformers = pytest.importorskip("transformers", reason="not a dependency of demyrl")
    run("--workdir", workdir, "--out", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(str(workdir / "source"))
    chat = [{"role": "user", "content": "3 + 4 = é"}]
    text = theirs.apply_chat_template(chat, tokenize=False)
    assert text == ours.render(chat, None, False) == "<|im_start|>3 + 4 = é<|im_end|>"
    assert theirs(text)["input_ids"] == ours.encode_markup(text)


def test_an_interrupted_export_leaves_nothing_and_a_second_one_succeeds(
    workdir, tmp_path, run, monkeypatch
):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export, "copy_files", interrupted)
        run("--workdir", workdir, "--out", tmp_path / "exports" / "out")
    assert list((tmp_path / "exports").iterdir()) == []
    run("--workdir", workdir, "--out", tmp_path / "exports" / "out")
    assert (tmp_path / "exports" / "out" / "tokenizer.json").is_file()


def test_sharding_over_the_devices_does_not_change_an_export(tmp_path, monkeypatch):
    tensors = stored(MODEL, ["bfloat16"])
    checkpoint_folder(tmp_path / "source", MODEL, tensors)
    monkeypatch.undo()
    places = jax.tree.leaves(params_sharding(MODEL, export.wide_mesh(MODEL)))
    assert max(len(each.device_set) for each in places) == len(jax.devices()) == 8
    export.export_source(str(tmp_path / "source"), tmp_path / "out", None)
    assert_same_bits(all_tensors(tmp_path / "out"), tensors)


# What is refused


@pytest.mark.parametrize(
    "words, message",
    [
        (["--workdir={run}", "--step=7"], "no intact checkpoint of step 7.*1, 2"),
        (["--workdir={tmp}"], "is not the folder of a run with checkpoints. Use --source"),
        (["--source={run}"], "is the folder of a run: use --workdir"),
        (["--source=Qwen/Qwen3-4B"], "looks like the name of a model on a hub"),
        (["--source=builtin:tiny", "--out={run}"], "run is not empty: name another folder"),
    ],
)
def test_a_wrong_origin_or_target_is_refused_with_what_to_do(
    words, message, workdir, tmp_path, run
):
    words = [word.format(run=workdir, tmp=tmp_path) for word in words]
    with pytest.raises(ValueError, match=message):
        run("--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "one of the arguments --workdir --source is required"),
        (["--workdir=x", "--source=y"], "--source: not allowed with argument --workdir"),
        (["--source=y", "--step=3"], "it goes with --workdir"),
        (["--source=y", "--dtype=int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_wrong_command_line_ends_with_exit_code_2(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        export.parse(["--out=z", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_full_folder_ends_the_command_with_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "mine.txt").touch()
    done = subprocess.run(
        [sys.executable, "-m", "demyrl.export", "--source=builtin:tiny", f"--out={tmp_path}"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "DEMYRL_TRACEBACK": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"{tmp_path} is not empty" in done.stderr and "Traceback" not in done.stderr
