"""The weights of a Hugging Face checkpoint, streamed tensor by tensor onto their shards.

Headers are read first, and everything that they can tell is checked before any weight is. Then one
piece of a tensor at a time is read, sent to the devices and put in its place there, so that the
host never holds more than a few pieces, however large the model. `hf_names.py` says which tensor
goes where; writing is in `hf_save.py`.
"""

import functools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Shaped

from demyrl.model.config import ModelConfig
from demyrl.model.hf_names import TIED_HEAD, TOP_NAMES, Tensor, from_hf, tensors_of
from demyrl.model.transformer import Params, map_table

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
PIECE_BYTES = 8 * 2**20
IN_FLIGHT = 1  # pieces that the devices may still be working on when the next one is read
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUFFERS = ".rotary_emb.inv_freq"  # which old checkpoints hold although config.json implies them
LENGTH_BYTES = 8  # of the number that opens a safetensors file: the length of its header
LFS_POINTER = b"version "  # what a Git LFS pointer has in the place of that number
ANOTHER_MODEL = "Is the config.json beside it that of another model?"


class Stored(NamedTuple):
    """Where a tensor lies on the disk."""

    path: Path
    offset: int  # bytes before it in the file
    dtype: str  # in the words of safetensors, "BF16"
    shape: tuple[int, ...]


def load_params(folder: Path, model: ModelConfig, sharding: Params) -> Params:
    """The checkpoint's parameters in float32, each leaf on its sharding.

    Raises ValueError, naming the tensor or the file, when the weights are not all there, are not
    those of this model, or are not finite.
    """
    stored = stored_tensors(folder)
    tensors = list(tensors_of(model))
    check_tensors(stored, tensors, folder)
    if model.tied_embeddings and TIED_HEAD in stored:
        check_tie(stored)
    places = by_leaf(sharding)
    everywhere = NamedSharding(places["embedding"].mesh, PartitionSpec())
    params, broken = empty(model, len(tensors), sharding, everywhere)
    leaves, working = by_leaf(params), deque()
    for number in reading_order(tensors, stored):
        tensor = tensors[number]
        place = placing(unnamed(tensor), places[tensor.leaf], everywhere)
        for row, piece in pieces(stored[tensor.name], whole=tensor.layer is not None):
            where = np.array([number, row if tensor.layer is None else tensor.layer], np.int32)
            leaves[tensor.leaf], broken = place(leaves[tensor.leaf], broken, piece, where)
            working.append(broken)
            if len(working) > IN_FLIGHT:
                working.popleft().block_until_ready()
    check_finite(np.asarray(broken), tensors, stored)
    return {name: leaves[name] for name in params if name != "layers"} | {
        "layers": {name: leaves[name] for name in params["layers"]}
    }


def dtypes_of(folder: Path) -> dict[str, str]:
    """The dtype of every tensor in a checkpoint, "F32", "BF16" or "F16", from the headers alone.

    Raises ValueError as `load_params` does, where the files cannot be read or have other dtypes.
    """
    stored = stored_tensors(folder)
    for name, tensor in stored.items():
        check_dtype(name, tensor)
    return {name: tensor.dtype for name, tensor in stored.items()}


def by_leaf(tree: Params) -> dict[str, Any]:
    """The tree with its layers beside the rest."""
    return {name: leaf for name, leaf in tree.items() if name != "layers"} | tree["layers"]


def reading_order(tensors: list[Tensor], stored: dict[str, Stored]) -> list[int]:
    """Their numbers in the order in which they lie on the disk."""
    return sorted(range(len(tensors)), key=lambda number: stored[tensors[number].name][:2])


# What the headers say


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name, whether it is one file or shards with an index.

    Raises ValueError when files are missing, damaged or contradict each other.
    """
    if (folder / ONE_FILE).is_file():
        return header(folder / ONE_FILE)
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} has neither {ONE_FILE} nor {INDEX}. {instead(folder)}")
    index = weight_map(folder / INDEX)
    stored: dict[str, Stored] = {}
    for shard in sorted(set(index.values())):
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / INDEX} names {shard}, which is not there. Get it too.")
        found = header(folder / shard)
        for name in found.keys() & stored.keys():
            raise ValueError(
                f"{name} is in {stored[name].path.name} and in {shard} of {folder}: which one is "
                "true? Remove the file that does not belong."
            )
        stored |= found
    for name, shard in index.items():
        if name not in stored or stored[name].path.name != shard:
            raise ValueError(
                f"{folder / INDEX} says that {name} is in {shard}, but it is not: the files are "
                "of different downloads. Get the checkpoint again."
            )
    return stored


def instead(folder: Path) -> str:
    """What to do about a folder without weights, by what is there instead."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for ending, remedy in {
        ".gguf": "take the original checkpoint: a GGUF file is quantized.",
        ".bin": "convert it: load it with transformers and call save_pretrained.",
        ".pth": "convert it: load it with transformers and call save_pretrained.",
        "adapter_model.safetensors": "merge this adapter into its base model first.",
        "-of-00001.safetensors": f"rename it to {ONE_FILE}.",
        ".safetensors": f"get {INDEX}, which says what is in which file.",
    }.items():
        for name in names:
            if name.endswith(ending) and "training_args" not in name:
                return f"There is {name}; {remedy}"
    return "Give a folder with the weights of a checkpoint."


def weight_map(path: Path) -> dict[str, str]:
    """Tensor to shard, as an index says."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if index and all(isinstance(shard, str) for shard in index.values()):
            return index
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise ValueError(
        f'{path} cannot be read: expected a JSON object whose "weight_map" gives the file of '
        "every tensor. Get it again."
    )


def header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file.

    Read here and not by the safetensors library because that maps the file into memory, where the
    pages that were read count as this process's own, and does not say where a tensor begins.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if first == LFS_POINTER:
            raise ValueError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`.")
        if not LENGTH_BYTES < length + LENGTH_BYTES <= size:
            raise damaged(path, f"its header would take {length} of {size} bytes")
        text = file.read(length)
    start = LENGTH_BYTES + length
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        stored = {name: entry(path, start, **values) for name, values in entries.items()}
        end = start + max([0, *(values["data_offsets"][1] for values in entries.values())])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(path, f"its header is not that of safetensors ({error})") from None
    if end > size:
        raise damaged(path, f"its header tells of {end} bytes, but there are {size}")
    return stored


def entry(path: Path, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Stored:
    """One tensor of a header. Raises ValueError when its size is not that of its shape."""
    first, end = data_offsets
    wanted = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else end - first
    if first < 0 or end - first != wanted:
        raise ValueError(f"{shape} of {dtype} in bytes {first} to {end}")
    return Stored(path, start + first, dtype, tuple(shape))


def damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} is damaged or cut short: {what}. Get it again, and compare its size with the "
        "original."
    )


def check_tensors(stored: dict[str, Stored], tensors: Iterable[Tensor], folder: Path) -> None:
    """Raises ValueError unless what is stored is what the model needs, and nothing else."""
    surplus = {name for name in stored if not name.endswith(BUFFERS)} - {TIED_HEAD}
    for tensor in tensors:
        if tensor.name not in stored:
            raise ValueError(f"{folder} has no tensor {tensor.name}. {ANOTHER_MODEL}")
        found = stored[tensor.name]
        check_dtype(tensor.name, found)
        if found.shape != tensor.shape:
            raise ValueError(
                f"{tensor.name} has shape {found.shape} in {found.path}, a model of this config "
                f"{tensor.shape}. {ANOTHER_MODEL}"
            )
        surplus.discard(tensor.name)
    if surplus:
        name = min(surplus)
        raise ValueError(
            f"{stored[name].path} has a tensor {name}, for which a model of this config has no "
            f"place. {ANOTHER_MODEL}"
        )


def check_dtype(name: str, tensor: Stored) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} has dtype {tensor.dtype} in {tensor.path}: weights in {', '.join(DTYPES)} are "
            "read. Take an unquantized version of the checkpoint, or convert it."
        )


# The weights themselves


def pieces(stored: Stored, whole: bool) -> Iterator[tuple[int, Shaped[np.ndarray, "..."]]]:
    """The tensor in equal parts of some rows each, with the number of the first row.

    The last part reaches back into the one before, so that all have one shape and one program.
    """
    rows, dtype = stored.shape[0], DTYPES[stored.dtype]
    row_items = math.prod(stored.shape[1:])
    parts = 1 if whole else math.ceil(rows * row_items * dtype.itemsize / PIECE_BYTES)
    part = math.ceil(rows / parts)
    for first in range(0, rows, part):
        row = min(first, rows - part)
        offset = stored.offset + row * row_items * dtype.itemsize
        # Read as bytes: numpy's file reading does not know the dtypes of ml_dtypes.
        items = np.fromfile(stored.path, np.uint8, part * row_items * dtype.itemsize, offset=offset)
        yield row, items.view(dtype).reshape(part, *stored.shape[1:])


def check_tie(stored: dict[str, Stored]) -> None:
    """Raises ValueError when a file holds a head of its own although it is tied."""
    head, embedding = stored[TIED_HEAD], stored[TOP_NAMES["embedding"]]
    same = head.dtype == embedding.dtype and head.shape == embedding.shape
    both = zip(pieces(head, whole=False), pieces(embedding, whole=False), strict=True)
    if not same or any(a.tobytes() != b.tobytes() for (_, a), (_, b) in both):
        raise ValueError(
            f"{head.path} has a {TIED_HEAD} that differs from {TOP_NAMES['embedding']}, although "
            "tie_word_embeddings is true. Set it to false in config.json if the head was trained "
            "on its own, or else remove the tensor."
        )


def check_finite(
    broken: Shaped[np.ndarray, " tensors"], tensors: list[Tensor], stored: dict[str, Stored]
) -> None:
    """Raises ValueError, naming the first, where a tensor is marked as broken."""
    if broken.any():
        name = tensors[int(broken.argmax())].name
        raise ValueError(
            f"{name} in {stored[name].path} holds a NaN or an infinity ({int(broken.sum())} of "
            f"{len(tensors)} tensors do). Get the checkpoint again; if it is the same, its weights "
            "overflowed when they were made."
        )


def empty(
    model: ModelConfig, tensors: int, sharding: Params, everywhere: NamedSharding
) -> tuple[Params, Any]:
    """A tree of zeros on its shardings, and for every tensor whether it is broken: none yet."""

    def zeros():
        params = map_table(lambda row: jnp.zeros(row.shape, jnp.float32), model)
        return params, jnp.zeros(tensors, bool)

    return jax.jit(zeros, out_shardings=(sharding, everywhere))()


def unnamed(tensor: Tensor) -> Tensor:
    """What a tensor shares with those that one program can place: all but its name and layer."""
    return tensor._replace(name="", leaf="", layer=None if tensor.layer is None else 0)


@functools.cache
def placing(tensor: Tensor, sharding: NamedSharding, everywhere: NamedSharding) -> Callable:
    """The program that puts a piece in its place in a leaf, in float32, and marks what is broken.

    It overwrites the leaf. The place is an argument, so one compilation serves all layers and
    rows. Along a sharded axis the rows are scattered: XLA would gather all shards to update a
    slice there, and scatters more slowly where it need not.
    """

    def place(leaf, broken, piece, where):
        number, first = where
        values = piece.astype(jnp.float32)
        if tensor.layer is not None:
            values = from_hf(tensor, values)[None]
        if sharding.shard_shape(leaf.shape)[0] == len(leaf):
            leaf = jax.lax.dynamic_update_slice_in_dim(leaf, values, first, 0)
        else:
            rows = first + jnp.arange(len(values))
            leaf = leaf.at[rows].set(values, unique_indices=True, indices_are_sorted=True)
        return leaf, broken.at[number].max(~jnp.isfinite(piece).all())

    return jax.jit(place, donate_argnums=0, out_shardings=(sharding, everywhere))
