"""One mesh of devices, and one table from logical axes to its axes.

The mesh has three axes. `data` spreads rows, and with them the parameters (FSDP). `tensor` spreads
heads, feed forward and vocabulary. `sequence` spreads the tokens of training rows; where tokens
must meet, in attention and in the sampler, it spreads the heads instead, so that no device holds a
long row whole outside attention, and none needs another's keys in it. Only what runs device by
device names an axis: `model/embedding.py`, `learn/head.py`, `rollout/programs.py` and `draw.py`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from demyrl.model.config import ModelConfig

AXES = ("data", "tensor", "sequence")

Rules = dict[str | None, tuple[str, ...]]

# Each logical axis: what it is spread over where tokens are spread, and where heads are.
TABLE: dict[str | None, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rows": (("data",), ("data",)),  # of batches and of the cache
    "tokens": (("sequence",), ()),  # of a row
    "width": (("data", "sequence"), ()),  # of parameters: spread where they lie, whole where used
    "heads": (("tensor",), ("tensor", "sequence")),
    "kv_heads": (("tensor",), ("tensor", "sequence")),
    "feed_forward": (("tensor",), ("tensor", "sequence")),
    "vocab": (("tensor",), ("tensor", "sequence")),
    "layers": ((), ()),
    "head_dim": ((), ()),
    None: ((), ()),
}
TOKENS_SPREAD: Rules = {axis: spread for axis, (spread, _) in TABLE.items()}  # training
HEADS_SPREAD: Rules = {axis: spread for axis, (_, spread) in TABLE.items()}  # attention, sampler


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has; their product is the number of devices used."""

    data: int
    tensor: int
    sequence: int

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ValueError(f"{self}: an axis has at least 1 device.")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return ", ".join(f"mesh.{axis} is {getattr(self, axis)}" for axis in AXES)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over the first devices, in which those of a process stand next to each other.

    Raises ValueError when there are fewer devices than that, or when some process would have none
    of them.
    """
    devices = jax.devices() if devices is None else devices
    wanted, found = config.devices, len(devices)
    processes = len({device.process_index for device in devices})
    if wanted > found:
        raise ValueError(
            f"{config}: that takes {wanted} devices, but JAX sees {found}. Make the product of "
            f"the three at most {found}."
        )
    if processes > 1 and wanted < found:
        raise ValueError(
            f"{config}: that takes {wanted} of the {found} devices of {processes} processes. Make "
            f"the product of the three {found}, so that each process has its part."
        )
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.array(ordered[:wanted], object).reshape(config.sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(axes: Sequence[str | None], rules: Rules = TOKENS_SPREAD) -> PartitionSpec:
    """Logical axes as a partition of the mesh."""
    return PartitionSpec(*(rules[axis] or None for axis in axes))


def constrain(
    x: Array, axes: Sequence[str | None], mesh: Mesh | None, rules: Rules = TOKENS_SPREAD
) -> Array:
    """The array, spread over the mesh by its logical axes; itself without a mesh."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, rules)))


Counts = dict[str, tuple[str, int]]  # config key: what it counts (a logical axis), and how many


def divisible(model: ModelConfig, mesh: MeshConfig, counts: Counts) -> None:
    """Raises ValueError, naming a mesh that would work, unless every spread size divides."""
    sizes = {f"model.{n}": (n, getattr(model, n)) for n in TABLE if hasattr(model, str(n))}
    counts = sizes | counts
    wrong = undivided(mesh, counts)
    if not wrong:
        return
    key, axes, parts = wrong
    size = counts[key][1]
    product = " x ".join(f"mesh.{axis}" for axis in axes)
    raise ValueError(
        f"{key} is {size}, which {product} = {parts} does not divide. {instead(mesh, counts)} Or "
        f"choose another {key}."
    )


def undivided(mesh: MeshConfig, counts: Counts) -> tuple[str, tuple[str, ...], int] | None:
    """The first key whose size the mesh does not divide, with the axes and their product."""
    for key, (logical, size) in counts.items():
        for axes in TABLE[logical]:
            parts = math.prod(getattr(mesh, axis) for axis in axes)
            if size % parts:
                return key, axes, parts
    return None


def instead(mesh: MeshConfig, counts: Counts) -> str:
    """The nearest mesh that divides everything, of as many of the devices as possible."""
    for total in range(mesh.devices, 0, -1):
        fitting = [
            MeshConfig(data, tensor, total // data // tensor)
            for data in range(1, total + 1)
            for tensor in range(1, total // data + 1)
            if total % (data * tensor) == 0
        ]
        fitting = [each for each in fitting if not undivided(each, counts)]
        if fitting:
            best = min(fitting, key=lambda each: distance(each, mesh))
            return f"A mesh of {total} device(s) that would work: {best}."
    return "No mesh would work."


def distance(one: MeshConfig, other: MeshConfig) -> float:
    """How much the axes of two meshes differ."""
    return sum(abs(math.log(a / b)) for a, b in zip(one.sizes, other.sizes, strict=True))
