"""Writes a checkpoint in Hugging Face format: tensor by tensor, and whole or not at all.

One tensor at a time is taken from the devices, cast there and appended to its file, so the host
never holds more than that. Tokenizer files are not weights: `demyrl.export` adds them.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from demyrl.model.config import ModelConfig
from demyrl.model.hf_config import config_of
from demyrl.model.hf_names import TIED_HEAD, TOP_NAMES, Tensor, tensors_of, to_hf
from demyrl.model.transformer import Params, parameter_count

SHARD_BYTES = 5_000_000_000
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours, and safetensors' words
_DTYPES = {code: jnp.dtype(name) for name, code in CODES.items()}
_CONFIG_KEYS = ("dtype", "torch_dtype")  # as releases of transformers from 5 on, and before, write


@dataclasses.dataclass(frozen=True)
class Written:
    """What a checkpoint came to."""

    parameters: int
    files: int  # that hold weights
    bytes: int  # of weights


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One tensor of a file: what it holds and as which type."""

    name: str
    tensor: Tensor
    code: str

    @property
    def bytes(self) -> int:
        return math.prod(self.tensor.shape) * _DTYPES[self.code].itemsize


def write_checkpoint(
    folder: Path,
    params: Params,
    model: ModelConfig,
    config: dict[str, Any] | None = None,
    dtypes: str | Mapping[str, str] = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Writes config.json and the weights into a folder that is there.

    `config` is that of a checkpoint these weights came from, None makes one for the model.
    `dtypes` is a type for all tensors, which config.json then names, or safetensors' code for each
    name, as the files of that checkpoint have them. Raises ValueError when the disk is too small,
    or a weight is not finite or would not be in its type.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"this is one of {jax.process_count()} processes, none of which has all the weights: "
            "export a run from one process of its own."
        )
    shards = _shards(_entries(model, dtypes), shard_bytes)
    total = sum(entry.bytes for shard in shards for entry in shard)
    _require_space(folder, total)
    content = _with_dtype(config_of(model) if config is None else config, dtypes)
    _write_json(folder / "config.json", content)
    names = _file_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        _write_safetensors(folder / name, shard, (_on_host(params, entry) for entry in shard))
    written = Written(parameter_count(model), len(shards), total)
    if len(shards) > 1:
        _write_index(folder, dict(zip(names, shards, strict=True)), written)
    return written


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when the block ends well and vanishes otherwise.

    What a killed process left of an earlier try is removed. Raises ValueError when `folder` has
    something in it, or another process is filling it.
    """
    target = folder.expanduser().resolve()
    _require_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    writing = target.with_name(f".writing-{target.name}")
    with _held(writing, target):
        try:
            yield writing
            _flush(writing)
            os.rename(writing, target)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        _sync(target.parent)


# What goes where


def _entries(model: ModelConfig, dtypes: str | Mapping[str, str]) -> list[_Entry]:
    """Every tensor to write, in the order of the table."""
    tensors = list(tensors_of(model))
    if isinstance(dtypes, str):
        if dtypes not in CODES:
            raise ValueError(f"dtype is {dtypes!r}: use one of {', '.join(CODES)}.")
        return [_Entry(tensor.name, tensor, CODES[dtypes]) for tensor in tensors]
    entries = [_Entry(tensor.name, tensor, dtypes[tensor.name]) for tensor in tensors]
    if model.tied_embeddings and TIED_HEAD in dtypes:
        embedding = next(tensor for tensor in tensors if tensor.name == TOP_NAMES["embedding"])
        entries.append(_Entry(TIED_HEAD, embedding, dtypes[TIED_HEAD]))
    return entries


def _shards(entries: list[_Entry], most: int) -> list[list[_Entry]]:
    """The entries of each file, at most `most` bytes unless a single one is larger.

    Wide types come first in a file: torch maps tensors in place, so each must begin at a multiple
    of its item size.
    """
    shards: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return [sorted(shard, key=lambda e: -_DTYPES[e.code].itemsize) for shard in shards]


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _with_dtype(config: dict[str, Any], dtypes: str | Mapping[str, str]) -> dict[str, Any]:
    """config.json's content, naming the type where there is one for all tensors."""
    if not isinstance(dtypes, str):
        return config
    keys = [key for key in _CONFIG_KEYS if key in config] or [_CONFIG_KEYS[-1]]
    return config | dict.fromkeys(keys, dtypes)


# From the devices to the host


def _on_host(params: Params, entry: _Entry) -> np.ndarray:
    """One tensor in its type and layout; ValueError names one that its type cannot hold."""
    tensor, dtype = entry.tensor, _DTYPES[entry.code]
    leaf = params[tensor.leaf] if tensor.layer is None else params["layers"][tensor.leaf]
    # One program serves all layers, and stacks of the same shape: it must not see which it is for.
    place = tensor._replace(name="", leaf="", layer=None if tensor.layer is None else 0)
    array, largest = jax.device_get(_laid_out(leaf, tensor.layer or 0, place, dtype))
    if not np.isfinite(largest):
        raise ValueError(
            f"{entry.name} has a weight that is not finite, so the checkpoint would be of no use. "
            "Export an earlier step of the run."
        )
    with np.errstate(over="ignore"):
        rounded = largest.astype(dtype)
    if not np.isfinite(rounded):
        raise ValueError(
            f"{entry.name} has a weight of size {largest:.6g}, and {dtype} ends at "
            f"{float(jnp.finfo(dtype).max):.6g}: use "
            f"{'bfloat16' if dtype == jnp.float16 else 'float32'}."
        )
    return array


@functools.partial(jax.jit, static_argnames=("place", "dtype"))
def _laid_out(
    leaf: Float[Array, "..."], layer: Int[Array, ""], place: Tensor, dtype: np.dtype
) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """A tensor as the file has it, and its largest magnitude before the cast."""
    if place.layer is not None:
        leaf = jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    return to_hf(place, leaf).astype(dtype), jnp.max(jnp.abs(leaf))


# Files


def _write_safetensors(path: Path, entries: list[_Entry], arrays: Iterable[np.ndarray]) -> None:
    """One safetensors file, written as its tensors come.

    The safetensors library wants all tensors of a file at once, which for a shard of 5 GB is more
    host memory than the rest of the export together; the format is simple: the header's length,
    the header, and the tensors without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        shape = list(entry.tensor.shape)
        header[entry.name] = {"dtype": entry.code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            del array  # before the next one is made


def _write_index(folder: Path, shards: dict[str, list[_Entry]], written: Written) -> None:
    """Which file holds which tensor, as transformers writes it."""
    places = {entry.name: name for name, shard in shards.items() for entry in shard}
    totals = {"total_parameters": written.parameters, "total_size": written.bytes}
    content = {"metadata": totals, "weight_map": dict(sorted(places.items()))}
    _write_json(folder / "model.safetensors.index.json", content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Folders


def _require_free(target: Path) -> None:
    files = [parent for parent in target.parents if parent.is_file()]
    if files:
        raise ValueError(f"{target} can't be made: {files[0]} is a file. Name another folder.")
    if target.is_dir():
        if any(target.iterdir()):
            raise ValueError(f"{target} is not empty: name another folder, or delete it first.")
        if target.is_mount():
            raise ValueError(
                f"{target} is a mount point, which no finished folder can take the place of: name "
                "a folder inside it."
            )
    elif target.exists():
        raise ValueError(f"{target} is a file: name a folder that is not there yet.")


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"the weights take {needed / 1e6:.1f} MB and the disk of {folder.parent} has "
            f"{free / 1e6:.1f} MB free. Free some space, use another disk, or a smaller dtype."
        )


@contextlib.contextmanager
def _held(writing: Path, target: Path) -> Iterator[None]:
    """Keeps an empty folder to this process, until the block or the process ends."""
    writing.mkdir(exist_ok=True)
    descriptor = os.open(writing, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing {target}: wait for it, or name another folder."
            ) from None
        for left in writing.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        os.close(descriptor)


def _flush(root: Path) -> None:
    """Sends every file and folder under `root` to the disk."""
    for folder, _, names in os.walk(root):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
