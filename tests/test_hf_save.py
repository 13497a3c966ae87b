"""Written checkpoints: what libraries of others read in them, and what is there after a kill."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from demyrl.model import hf_save
from demyrl.model.hf_names import tensors_of
from demyrl.model.hf_save import whole_folder, write_checkpoint
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.model.transformer import hidden_states, map_table, output_embedding
from tests.tiny import MODEL, compilations, drawn_params

QWEN2 = dataclasses.replace(MODEL, qk_norm=False, attention_bias=True)
LLAMA = dataclasses.replace(MODEL, qk_norm=False)
KINDS = {"qwen3": MODEL, "qwen2": QWEN2, "llama": LLAMA}
QUERY = "model.layers.1.self_attn.q_proj.weight"
TOKENS = np.array([[5, 9, 300, 7, 7, 650, 1]])


def save_checkpoint(folder, *arguments, **options):
    """A whole folder with nothing but a checkpoint in it."""
    with whole_folder(folder) as writing:
        return write_checkpoint(writing, *arguments, **options)


def weights_of(model):
    """Random weights in which norms and biases are not at their neutral start."""
    rng = np.random.default_rng(1)
    noise = map_table(lambda row: jnp.asarray(rng.normal(size=row.shape) / 4, jnp.float32), model)
    return jax.tree.map(jnp.add, drawn_params(model), noise)


def with_weight(value):
    """Weights of MODEL in which one of layer 1's queries is `value`."""
    weights = weights_of(MODEL)
    query = weights["layers"]["query"].at[1, 0, 0, 0].set(value)
    return weights | {"layers": weights["layers"] | {"query": query}}


def header_of(path):
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


# What others read


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_our_logits(kind, tied, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not a dependency; nothing to compare")
    from transformers import AutoModelForCausalLM

    model = dataclasses.replace(KINDS[kind], tied_embeddings=tied)
    weights = weights_of(model)
    save_checkpoint(tmp_path / "out", weights, model, shard_bytes=30_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)).logits.numpy()
    blank = jnp.zeros_like(TOKENS)
    places = blank + jnp.arange(TOKENS.shape[1])
    hidden = hidden_states(weights, jnp.asarray(TOKENS), places, blank + 1, model)
    np.testing.assert_allclose(hidden @ output_embedding(weights).T, want, atol=1e-4)


def test_tensors_have_the_names_and_shapes_of_torch_linear_layers(tmp_path):
    save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    shapes = {name: array.shape for name, array in tensors.items()}
    layer = "model.layers.1"
    assert shapes[f"{layer}.self_attn.k_proj.weight"] == (16, 32)  # output, then input
    assert shapes[f"{layer}.self_attn.q_norm.weight"] == (8,)
    assert shapes[f"{layer}.mlp.down_proj.weight"] == (32, 48)
    assert shapes["model.embed_tokens.weight"] == (768, 32)
    assert len(shapes) == 2 + 2 * 11 and "lm_head.weight" not in shapes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_tensor_is_our_layer_transposed_and_rounded_to_nearest(dtype, tmp_path):
    weights = weights_of(MODEL)
    save_checkpoint(tmp_path / "out", weights, MODEL, dtypes=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")[QUERY]
    want = np.asarray(weights["layers"]["query"])[1].reshape(32, 32).T
    np.testing.assert_array_equal(found, want.astype(jnp.dtype(dtype)))
    assert found.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_below_the_smallest_normal_number_are_kept(dtype, tmp_path):
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    save_checkpoint(tmp_path / "out", with_weight(-3 * smallest), MODEL, dtypes=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")[QUERY]
    assert float(found[0, 0]) == -3 * smallest


def test_the_file_says_that_it_is_for_torch(tmp_path):
    save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_tensor_of_a_mixed_file_begins_at_a_multiple_of_its_item_size(tmp_path):
    odd = dataclasses.replace(LLAMA, width=31)
    codes = {t.name: "BF16" if "norm" in t.name else "F32" for t in tensors_of(odd)}
    save_checkpoint(tmp_path / "out", weights_of(odd), odd, dtypes=codes)
    header, start = header_of(tmp_path / "out" / "model.safetensors")
    del header["__metadata__"]
    assert {name: entry["dtype"] for name, entry in header.items()} == codes
    size = {"F32": 4, "BF16": 2}
    for entry in header.values():
        assert (start + entry["data_offsets"][0]) % size[entry["dtype"]] == 0


def test_a_tied_head_is_written_where_the_original_file_had_one(tmp_path):
    codes = {tensor.name: "F32" for tensor in tensors_of(MODEL)} | {"lm_head.weight": "BF16"}
    save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL, dtypes=codes)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(tensors["lm_head.weight"], embedding.astype(jnp.bfloat16))


# Shards


def test_shards_stay_below_the_limit_and_the_index_finds_every_tensor(tmp_path):
    weights = weights_of(MODEL)
    written = save_checkpoint(tmp_path / "out", weights, MODEL, shard_bytes=20_000)
    save_checkpoint(tmp_path / "whole", weights, MODEL)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    shards = [load_file(tmp_path / "out" / file) for file in files]
    sizes = [sum(array.nbytes for array in shard.values()) for shard in shards]
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) == written.files > 2
    assert all(size <= 20_000 or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
    assert index["metadata"]["total_size"] == sum(sizes) == written.bytes
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    assert index["weight_map"] == places
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for name, file in places.items():
        found = shards[files.index(file)][name]
        np.testing.assert_array_equal(found, whole.pop(name))
    assert not whole


def test_one_shard_has_no_index(tmp_path):
    save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors"}


# config.json


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_given_is_kept_but_for_the_dtype(key, tmp_path):
    config = {"model_type": "qwen3", key: "float16", "note": "hält"}
    save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL, config, "bfloat16")
    found = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert found == config | {key: "bfloat16"}


def test_the_config_of_the_original_is_kept_whole_with_its_types(tmp_path):
    config = {"model_type": "qwen3", "torch_dtype": "bfloat16"}  # though the file has float32
    codes = {tensor.name: "F32" for tensor in tensors_of(MODEL)}
    save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL, config, codes)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


# Values that a type cannot hold


def test_the_largest_weight_that_rounds_into_float16_is_saved(tmp_path):
    save_checkpoint(tmp_path / "out", with_weight(65519.0), MODEL, dtypes="float16")
    assert load_file(tmp_path / "out" / "model.safetensors")[QUERY].max() == 65504


@pytest.mark.parametrize(
    "value, dtype, message",
    [
        (-65520.0, "float16", f"{QUERY} has a weight of size 65520, and float16.*use bfloat16"),
        (3.4e38, "bfloat16", f"{QUERY} has a weight of size 3.4e.38, and bfloat16.*use float32"),
        (np.nan, "float32", f"{QUERY} has a weight that is not finite"),
        (-np.inf, "bfloat16", f"{QUERY} has a weight that is not finite"),
        (1.0, "int8", "dtype is 'int8': use one of float32, bfloat16, float16"),
    ],
)
def test_a_weight_that_the_type_cannot_hold_is_refused_by_name(value, dtype, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path / "out", with_weight(value), MODEL, dtypes=dtype)
    assert list(tmp_path.iterdir()) == []


# From the devices


def test_sharded_weights_give_the_same_bytes(tmp_path):
    weights = weights_of(QWEN2)
    places = params_sharding(QWEN2, make_mesh(MeshConfig(4, 2, 1)))
    save_checkpoint(tmp_path / "one", weights, QWEN2, dtypes="bfloat16")
    save_checkpoint(tmp_path / "many", jax.device_put(weights, places), QWEN2, dtypes="bfloat16")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()


def test_layers_and_stacks_of_one_shape_share_a_program(tmp_path):
    deep = dataclasses.replace(LLAMA, layers=5, width=30)
    weights = weights_of(deep)
    with compilations() as found:
        save_checkpoint(tmp_path / "out", weights, deep)
    assert found.count("_laid_out") == 2 + 6


def test_a_tensor_is_let_go_before_the_next_is_fetched(tmp_path, monkeypatch):
    real, earlier, alive = hf_save._on_host, [], []

    def watched(params, entry):
        alive.extend(each for each in earlier if each() is not None)
        array = real(params, entry)
        earlier.append(weakref.ref(array))
        return array

    monkeypatch.setattr(hf_save, "_on_host", watched)
    save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)
    assert len(earlier) == 24 and not alive


# Whole or not at all

KILLED = """
import os, signal, sys
from pathlib import Path
from demyrl.model import hf_save
from tests.tiny import MODEL, drawn_params

real, asked = hf_save._on_host, []

def deadly(params, entry):
    asked.append(entry)
    if len(asked) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(params, entry)

hf_save._on_host = deadly
with hf_save.whole_folder(Path(sys.argv[1])) as writing:
    hf_save.write_checkpoint(writing, drawn_params(MODEL), MODEL, shard_bytes=20_000)
"""


def test_a_killed_save_leaves_no_folder_and_the_next_one_clears_up(tmp_path):
    out, left = tmp_path / "out", tmp_path / ".writing-out"
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(out)], cwd=root, env=environment)
    assert done.returncode == -signal.SIGKILL
    assert (left / "config.json").is_file() and not out.exists()
    (left / "of_an_older_version.bin").touch()
    save_checkpoint(out, weights_of(MODEL), MODEL)
    assert not left.exists()
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}


def test_a_block_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "out") as writing:
        (writing / "config.json").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_that_is_there_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with whole_folder(tmp_path / "out") as writing:
        (writing / "config.json").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="out is not empty: name another folder, or delete it"):
        save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="out is a file: name a folder"):
        save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: True)
    with pytest.raises(ValueError, match="out is a mount point.*a folder inside it"):
        save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)


def test_two_savers_of_one_folder_do_not_mix_their_files(tmp_path):
    with whole_folder(tmp_path / "out") as writing:
        with pytest.raises(ValueError, match="another process is writing"):
            save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)
        assert list(writing.iterdir()) == []
    assert (tmp_path / "out").is_dir()


def test_a_small_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match="weights take 0.2 MB and the disk .* has 0.1 MB free"):
        save_checkpoint(tmp_path / "out", weights_of(MODEL), MODEL)
    assert list(tmp_path.iterdir()) == []
