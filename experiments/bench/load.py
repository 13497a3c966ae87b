"""How long a checkpoint takes to load, and how much host memory it takes besides the weights.

    python -m experiments.bench.load --source=/path/to/checkpoint [--mesh=4,2]
    python -m experiments.bench.load --make=qwen2.5_7b:2

`--make=SIZE:LAYERS` loads random bf16 weights of a published size, cut to so many layers, from a
temporary folder. Files that were read or written before may come from the page cache.

Keys:

  source, mesh       what was loaded; the devices of each axis of the mesh
  parameters         numbers in the tree
  first_s            seconds of the first load, compilation included
  seconds            of a second load, its programs compiled
  file_mb_per_s      what the second load read, by its seconds
  file_bytes         of all weights on the disk
  device_bytes       of all shards on this process's devices
  largest_tensor_bytes   of the largest tensor, in float32
  peak_host_bytes    host memory at the highest point of the first load above that before; on a CPU
                     less device_bytes, which are host memory there. Compiler included: some 80 MB
  warm_peak_host_bytes   the same of the second load
  ratio              peak_host_bytes / largest_tensor_bytes: streaming keeps it below 1.3
"""

import argparse
import contextlib
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from demyrl.model.config import ModelConfig
from demyrl.model.hf_config import config_of, read_config
from demyrl.model.hf_load import load_params, stored_tensors
from demyrl.model.hf_names import tensors_of
from demyrl.model.mesh import AXES, MeshConfig, divisible, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.model.sizes import size
from demyrl.model.transformer import parameter_count
from experiments.bench.measure import machine, rounded

BLOCK = 2**22  # random numbers that are written over and over


def make(folder: Path, model: ModelConfig) -> None:
    """Writes a checkpoint of random bf16 weights, block by block."""
    (folder / "config.json").write_text(json.dumps(config_of(model)))
    entries, place = {}, 0
    for tensor in tensors_of(model):
        end = place + 2 * math.prod(tensor.shape)
        shape = list(tensor.shape)
        entries[tensor.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries).encode()
    block = np.random.default_rng(0).standard_normal(BLOCK, np.float32).astype(ml_dtypes.bfloat16)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for first in range(0, place, block.nbytes):
            file.write(block.tobytes()[: place - first])


@contextlib.contextmanager
def checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """The folder to load, made for the while when `--make` asks for it."""
    if options.source:
        yield Path(options.source)
        return
    name, _, layers = options.make.partition(":")
    if not layers.isdecimal() or int(layers) < 1:
        raise ValueError(f"--make is {options.make!r}: use SIZE:LAYERS, as in qwen2.5_7b:2.")
    model = dataclasses.replace(size(name, "float32"), layers=int(layers))
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), model)
        yield Path(folder)


def mesh_of(text: str) -> MeshConfig:
    """Sizes of the axes data, tensor and sequence; those that are not given are 1."""
    sizes = [int(size) for size in text.split(",")]
    return MeshConfig(*sizes, *[1] * (len(AXES) - len(sizes)))


def memory(field: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at the highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Sets VmHWM back to VmRSS, where the kernel lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Load(NamedTuple):
    seconds: float
    device_bytes: int  # of the shards on this process's devices
    peak_host_bytes: int  # without device_bytes where those are host memory


def measured_load(folder: Path, model: ModelConfig, mesh: jax.sharding.Mesh) -> Load:
    """One load, its weights dropped at the end."""
    forget_peak()
    before, start = memory("VmRSS"), time.perf_counter()
    params = jax.block_until_ready(load_params(folder, model, params_sharding(model, mesh)))
    seconds, peak = time.perf_counter() - start, memory("VmHWM") - before
    shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    device_bytes = sum(shard.data.nbytes for shard in shards)
    on_host = device_bytes if jax.default_backend() == "cpu" else 0
    return Load(seconds, device_bytes, peak - on_host)


def measure(folder: Path, mesh_config: MeshConfig) -> dict[str, Any]:
    """Every number of the line but what was asked for."""
    model = read_config(folder, "float32")
    divisible(model, mesh_config, {})
    mesh = make_mesh(mesh_config)
    largest = 4 * max(math.prod(tensor.shape) for tensor in tensors_of(model))
    files = {tensor.path for tensor in stored_tensors(folder).values()}
    file_bytes = sum(path.stat().st_size for path in files)
    first, second = (measured_load(folder, model, mesh) for _ in range(2))
    return {
        "parameters": parameter_count(model),
        "first_s": first.seconds,
        "seconds": second.seconds,
        "file_mb_per_s": file_bytes / second.seconds / 1e6,
        "file_bytes": file_bytes,
        "device_bytes": first.device_bytes,
        "largest_tensor_bytes": largest,
        "peak_host_bytes": first.peak_host_bytes,
        "warm_peak_host_bytes": second.peak_host_bytes,
        "ratio": first.peak_host_bytes / largest,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--source", help="a checkpoint folder")
    what.add_argument("--make", metavar="SIZE:LAYERS", help="load made weights of this shape")
    parser.add_argument("--mesh", type=mesh_of, default="1,1", metavar="DATA,TENSOR")
    options = parser.parse_args(argv)
    try:
        with checkpoint(options) as folder:
            numbers = measure(folder, options.mesh)
    except ValueError as error:
        parser.error(str(error))
    source, mesh = options.source or options.make, dataclasses.asdict(options.mesh)
    line = {"bench": "load", "source": source, "mesh": mesh, **machine(), **numbers}
    print(json.dumps(rounded(line), sort_keys=True))


if __name__ == "__main__":
    main()
