"""Weights in Hugging Face format onto shards: every value in its place, or an error by name."""

import dataclasses
import itertools
import json
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from demyrl.model import hf_load
from demyrl.model.hf_load import dtypes_of, load_params, pieces, stored_tensors
from demyrl.model.hf_names import tensors_of
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from tests.tiny import MODEL, compilations, drawn_params

QWEN2 = dataclasses.replace(MODEL, qk_norm=False, attention_bias=True)
LLAMA = dataclasses.replace(MODEL, qk_norm=False, tied_embeddings=False)
WIDE = dataclasses.replace(MODEL, heads=8, kv_heads=2)  # for a mesh of 4 x 2
MODELS = {"qwen3": MODEL, "qwen2": QWEN2, "llama": LLAMA}
EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
BF16 = np.dtype(ml_dtypes.bfloat16)
WORDS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", BF16: "BF16"}


def sharding(model=MODEL, data=1, tensor=1):
    return params_sharding(model, make_mesh(MeshConfig(data, tensor, 1)))


def weights_of(model):
    """Every number different from every other, so that none can stand in another's place."""
    tree = drawn_params(model)
    leaves, structure = jax.tree.flatten(tree)
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
    counted = [
        (start + np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape)
        for start, leaf in zip(starts[:-1], leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, counted)


def tensors_for(model, dtype=np.float32, weights=None):
    """What a checkpoint of these weights holds, in its own layout."""
    weights = weights_of(model) if weights is None else weights
    parts = hf_load.by_leaf(weights)
    tensors = {}
    for tensor in tensors_of(model):
        part = parts[tensor.leaf]
        part = np.asarray(part if tensor.layer is None else part[tensor.layer])
        if tensor.leaf == "out":  # torch has the output first; here heads and channels go in
            part = part.reshape(-1, part.shape[-1]).T
        elif tensor.leaf.endswith("_bias"):
            part = part.reshape(-1)
        elif tensor.layer is not None and part.ndim > 1:
            part = part.reshape(len(part), -1).T
        tensors[tensor.name] = np.array(part, dtype, order="C")
    return tensors


def written(tensors, path):
    """A safetensors file made by hand, as its format says: length, header, bytes."""
    entries, blobs, place = {"__metadata__": {"format": "pt"}}, [], 0
    for name, array in tensors.items():
        end = place + array.nbytes
        shape = list(array.shape)
        entries[name] = {"dtype": WORDS[array.dtype], "shape": shape, "data_offsets": [place, end]}
        blobs.append(array.tobytes())
        place = end
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(blobs))


def sharded(tensors, folder):
    """The tensors in two files with an index; the first file holds every other one."""
    names = (f"model-0000{number}-of-00002.safetensors" for number in itertools.cycle((1, 2)))
    index = dict(zip(sorted(tensors), names, strict=False))
    for shard in set(index.values()):
        save_file({n: a for n, a in tensors.items() if index[n] == shard}, folder / shard)
    write_index(folder, index)
    return index


def write_index(folder, index):
    (folder / hf_load.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.fixture
def load(tmp_path):
    """The parameters of a folder that holds these tensors in one file."""

    def params(tensors, model=MODEL, places=None):
        save_file(tensors, tmp_path / hf_load.ONE_FILE)
        return load_params(tmp_path, model, places or sharding(model))

    return params


def assert_equal(params, weights):
    assert jax.tree.structure(params) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, params, weights)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_number_comes_to_its_place(model, load):
    assert_equal(load(tensors_for(model), model), weights_of(model))


def test_tensors_are_read_as_the_layout_of_torch_linear_layers_says(load):
    params, tensors = load(tensors_for(MODEL)), tensors_for(MODEL)
    query = tensors[QUERY]  # output, then input; an output is a head and a channel of it
    assert query.shape == (4 * 8, 32)
    np.testing.assert_array_equal(params["layers"]["query"][1][:, 2, 3], query[2 * 8 + 3])
    np.testing.assert_array_equal(params["layers"]["down"][0][7], tensors[DOWN][:, 7])


@pytest.mark.parametrize("dtype", WORDS, ids=WORDS.values())
def test_each_dtype_is_read_exactly_subnormal_numbers_included(dtype, tmp_path):
    tensors = tensors_for(MODEL, dtype, drawn_params(MODEL))
    smallest = ml_dtypes.finfo(dtype).smallest_subnormal
    for name in (EMBEDDING, QUERY):
        tensors[name][0, :3] = smallest, -smallest, -0.0
    written(tensors, tmp_path / hf_load.ONE_FILE)
    params = load_params(tmp_path, MODEL, sharding())
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    back = tensors_for(MODEL, weights=jax.tree.map(np.asarray, params))
    for name, array in tensors.items():
        bits = array.astype(np.float32).view(np.uint32)
        np.testing.assert_array_equal(back[name].view(np.uint32), bits, err_msg=name)


def test_a_file_of_several_dtypes_is_read(load):
    tensors = tensors_for(MODEL, np.float32, drawn_params(MODEL))
    tensors[QUERY] = tensors[QUERY].astype(np.float16)
    params = load(tensors)
    np.testing.assert_array_equal(
        params["layers"]["query"][1].reshape(32, -1).T, tensors[QUERY].astype(np.float32)
    )


def test_a_checkpoint_in_shards_is_the_one_in_a_single_file(tmp_path):
    sharded(tensors_for(MODEL), tmp_path)
    assert_equal(load_params(tmp_path, MODEL, sharding()), weights_of(MODEL))


@pytest.mark.parametrize("model", [WIDE, dataclasses.replace(WIDE, tied_embeddings=False)])
def test_any_mesh_gets_the_same_numbers_each_leaf_on_its_sharding(model, load, monkeypatch):
    monkeypatch.setattr(hf_load, "PIECE_BYTES", 20_000)  # 5 pieces, across the shards of rows
    places = sharding(model, 4, 2)
    params = load(tensors_for(model), model, places)
    assert_equal(params, weights_of(model))
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == places


@pytest.mark.parametrize("piece_bytes", [128, 20_000, 98_304, 2**20])
def test_the_pieces_of_a_tensor_have_one_shape_and_cover_its_rows(
    piece_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(hf_load, "PIECE_BYTES", piece_bytes)
    tensors = tensors_for(MODEL)
    save_file(tensors, tmp_path / hf_load.ONE_FILE)
    found = list(pieces(stored_tensors(tmp_path)[EMBEDDING], whole=False))
    assert len(found) == math.ceil(98_304 / piece_bytes)
    assert len({piece.shape for _, piece in found}) == 1
    assert all(piece.nbytes <= piece_bytes for _, piece in found)
    copy = np.full((768, 32), np.nan)
    for row, piece in found:
        copy[row : row + len(piece)] = piece
    np.testing.assert_array_equal(copy, tensors[EMBEDDING])


def test_layers_and_pieces_share_their_programs(load, monkeypatch):
    monkeypatch.setattr(hf_load, "PIECE_BYTES", 10_000)
    hf_load.placing.cache_clear()
    model = dataclasses.replace(MODEL, layers=3, feed_forward=24)
    tensors = tensors_for(model)
    with compilations() as programs:
        load(tensors, model)
    # One each of: embedding, final norm, norms of layers, of heads, query, key and value, out,
    # gate and up, down.
    assert programs.count("place") == 9


def compiled(model, name, place, shape, rows):
    """The program that puts `rows` rows of a tensor into a leaf of that shape."""
    tensor = next(tensor for tensor in tensors_of(model) if tensor.name == name)
    everywhere = NamedSharding(place.mesh, PartitionSpec())
    leaf = jax.ShapeDtypeStruct(shape, np.float32, sharding=place)
    broken = jax.ShapeDtypeStruct((3,), bool, sharding=everywhere)
    piece = np.zeros((rows, 32), np.float32)
    program = hf_load.placing(hf_load.unnamed(tensor), place, everywhere)
    return program.lower(leaf, broken, piece, np.zeros(2, np.int32)).compile()


def test_a_leaf_is_overwritten_not_copied():
    program = compiled(MODEL, QUERY, sharding()["layers"]["query"], (2, 32, 4, 8), 32)
    assert program.memory_analysis().alias_size_in_bytes == 2 * 32 * 32 * 4


def test_rows_of_a_sharded_embedding_are_placed_without_gathering_it():
    place = sharding(WIDE, 4, 2)["embedding"]
    text = compiled(WIDE, EMBEDDING, place, (768, 32), 16).as_text()
    assert "scatter" in text and "all-gather" not in text


def test_the_dtypes_of_a_checkpoint_are_those_of_its_headers(tmp_path):
    tensors = tensors_for(MODEL, BF16)
    tensors[QUERY] = tensors[QUERY].astype(np.float16)
    sharded(tensors, tmp_path)
    assert dtypes_of(tmp_path) == {name: WORDS[array.dtype] for name, array in tensors.items()}


# What is not as it must be


@pytest.mark.parametrize(
    "change, message",
    [
        ({QUERY: None}, f"has no tensor {QUERY}. Is the config.json"),
        ({"model.layers.2.mlp.up_proj.weight": (48, 32)}, "has a tensor model.layers.2.mlp.up_pr"),
        ({"lm_head.bias": (768,)}, "has a tensor lm_head.bias, for which"),
        ({QUERY: (32, 16)}, rf"{QUERY} has shape \(32, 16\) in .*, a model of this config \(32, 3"),
        ({EMBEDDING: (32, 768)}, rf"{EMBEDDING} has shape \(32, 768\)"),
    ],
)
def test_a_tensor_that_is_not_the_models_is_refused_by_name(change, message, load):
    changed = {name: shape and np.zeros(shape, np.float32) for name, shape in change.items()}
    tensors = {n: a for n, a in (tensors_for(MODEL) | changed).items() if a is not None}
    with pytest.raises(ValueError, match=message):
        load(tensors)


def test_headers_are_checked_before_any_weight_is_read(load, monkeypatch):
    monkeypatch.setattr(hf_load, "pieces", None)
    tensors = {name: a for name, a in tensors_for(MODEL).items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match="has no tensor model.norm.weight"):
        load(tensors)


@pytest.mark.parametrize("dtype, word", [(np.float64, "F64"), (np.int8, "I8"), (np.uint8, "U8")])
def test_another_dtype_is_refused_by_the_tensor(dtype, word, load, tmp_path):
    tensors = tensors_for(MODEL)
    tensors[DOWN] = tensors[DOWN].astype(dtype)
    with pytest.raises(ValueError, match=f"{DOWN} has dtype {word}.*F32, BF16, F16 are read"):
        load(tensors)
    with pytest.raises(ValueError, match=f"{DOWN} has dtype {word}"):
        dtypes_of(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused_by_the_first_tensor_with_one(value, load):
    tensors = tensors_for(MODEL)
    tensors[QUERY][31, 31] = tensors[DOWN][0, 0] = value
    with pytest.raises(ValueError, match=f"{DOWN} in .* holds a NaN or an infinity .2 of 24"):
        load(tensors)


def test_an_infinity_of_16_bits_in_the_last_piece_of_the_embedding_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_load, "PIECE_BYTES", 20_000)
    tensors = tensors_for(MODEL, BF16)
    tensors[EMBEDDING][-1, -1] = np.inf
    written(tensors, tmp_path / hf_load.ONE_FILE)
    with pytest.raises(ValueError, match=f"{EMBEDDING} in .* holds a NaN or an infinity"):
        load_params(tmp_path, MODEL, sharding())


def test_a_head_that_is_stored_though_it_is_tied_is_left_out(load):
    tensors = tensors_for(MODEL)
    params = load(tensors | {"lm_head.weight": tensors[EMBEDDING].copy()})
    assert_equal(params, weights_of(MODEL))


@pytest.mark.parametrize("head", [np.zeros((768, 32)), np.zeros((767, 32))])
def test_a_tied_head_that_is_another_matrix_is_refused(head, load):
    tensors = tensors_for(MODEL)
    with pytest.raises(ValueError, match="lm_head.weight that differs from model.embed_tokens.w"):
        load(tensors | {"lm_head.weight": head.astype(np.float32)})


def test_an_untied_model_needs_its_head(load):
    tensors = {name: a for name, a in tensors_for(LLAMA).items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match="has no tensor lm_head.weight"):
        load(tensors, LLAMA)


def test_buffers_of_old_checkpoints_are_left_out(load):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert_equal(load(tensors_for(MODEL) | buffer), weights_of(MODEL))


@pytest.fixture
def broken_shards(tmp_path):
    """The message of loading a sharded checkpoint to which `change(folder, index)` was done."""

    def message(change):
        index = sharded(tensors_for(MODEL), tmp_path)
        change(tmp_path, index)
        with pytest.raises(ValueError) as error:
            load_params(tmp_path, MODEL, sharding())
        return str(error.value)

    return message


def test_a_shard_that_is_not_there_is_named(broken_shards):
    def change(folder, index):
        (folder / index[QUERY]).unlink()

    assert "names model-0000" in (said := broken_shards(change)) and "which is not there" in said


def test_a_tensor_in_two_shards_is_named(broken_shards):
    def change(folder, index):
        (other,) = set(index.values()) - {index[QUERY]}
        tensors = tensors_for(MODEL)
        save_file(
            {n: a for n, a in tensors.items() if index[n] == other or n == QUERY}, folder / other
        )

    assert broken_shards(change).startswith(
        f"{QUERY} is in model-00001-of-00002.safetensors and in "
    )


def test_a_tensor_that_its_shard_lacks_is_named(broken_shards):
    def change(folder, index):
        write_index(folder, index | {"x": index[QUERY]})

    assert "says that x is in model-0000" in broken_shards(change)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_cannot_be_read_is_named(text, broken_shards):
    def change(folder, index):
        (folder / hf_load.INDEX).write_text(text)

    assert f"{hf_load.INDEX} cannot be read" in broken_shards(change)


def header_of(entries):
    text = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    return len(text).to_bytes(8, "little") + text


def one(**changes):
    return header_of({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes})


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "its header would take 0 of 0 bytes"),
        (b"\x10\0\0", "its header would take 16 of 3 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "its header would take 1000 of 10 bytes"),
        (header_of(b"{nonsense"), "its header is not that of safetensors"),
        (header_of(b"[1, 2]"), "its header is not that of safetensors"),
        (header_of({"x": 3}), "its header is not that of safetensors"),
        (header_of({"x": {"dtype": "F32"}}), "its header is not that of safetensors"),
        (one(shape="ab") + bytes(8), "its header is not that of safetensors"),
        (one(shape=[3]) + bytes(8), r"\[3\] of F32 in bytes 0 to 8"),
        (one(data_offsets=[-4, 4]) + bytes(8), r"\[2\] of F32 in bytes -4 to 4"),
        (one() + bytes(7), "its header tells of 77 bytes, but there are 76"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "run `git lfs pull`"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(content, message, tmp_path):
    (tmp_path / hf_load.ONE_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors is .*{message}"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("pytorch_model.bin", "There is pytorch_model.bin; convert it: load it with transformers"),
        ("consolidated.00.pth", "There is consolidated.00.pth; convert it"),
        ("model-q4.gguf", "There is model-q4.gguf; take the original checkpoint"),
        ("adapter_model.safetensors", "merge this adapter into its base model first"),
        ("model-00001-of-00001.safetensors", "rename it to model.safetensors"),
        ("model-00001-of-00002.safetensors", "get model.safetensors.index.json"),
        ("training_args.bin", "Give a folder with the weights"),
        ("README.md", "Give a folder with the weights"),
    ],
)
def test_a_folder_without_weights_is_told_by_what_it_has_instead(name, message, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"neither model.safetensors nor .*json. .*{message}"):
        stored_tensors(tmp_path)


def test_a_folder_that_is_not_there_has_no_weights(tmp_path):
    with pytest.raises(ValueError, match="Give a folder with the weights of a checkpoint"):
        stored_tensors(tmp_path / "missing")
