"""One mesh, and one table from logical axes to mesh axes.

Parameters, optimizer moments and batches get their sharding from `RULES`; nothing else in the
code names a mesh axis.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from demyrl.model.config import ModelConfig
from demyrl.model.transformer import Parameter, map_table

AXES = ("data", "tensor")

RULES: dict[str | None, str | None] = {
    "rows": "data",  # of batches and caches
    "width": "data",  # parameters are spread over the data axis too (FSDP)
    "heads": "tensor",
    "kv_heads": "tensor",
    "feed_forward": "tensor",
    "vocab": "tensor",
    "layers": None,
    "head_dim": None,
    None: None,
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has; their product is the number of devices used."""

    data: int
    tensor: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.tensor < 1:
            raise ValueError(
                f"mesh.data is {self.data} and mesh.tensor is {self.tensor}: an axis has at least "
                "1 device."
            )


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over the first data * tensor devices.

    Raises ValueError when there are fewer devices than that.
    """
    wanted, found = config.data * config.tensor, jax.device_count()
    if wanted > found:
        raise ValueError(
            f"mesh.data x mesh.tensor is {config.data} x {config.tensor} = {wanted}, but JAX sees "
            f"{found} device(s). Make the product at most {found}."
        )
    return jax.make_mesh(
        (config.data, config.tensor),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=jax.devices()[:wanted],
    )


def divisible(model: ModelConfig, mesh: MeshConfig, rows: dict[str, int]) -> None:
    """Raises ValueError unless every sharded size divides by its mesh axis.

    `rows` maps the config key of a row count to its value.
    """
    sizes = {"tensor": mesh.tensor, "data": mesh.data}
    wanted = {f"model.{n}": (n, getattr(model, n)) for n in RULES if hasattr(model, str(n))}
    wanted |= {key: ("rows", size) for key, size in rows.items()}
    for key, (logical, size) in wanted.items():
        axis = RULES[logical]
        if axis and size % sizes[axis]:
            raise ValueError(
                f"{key} is {size}, which mesh.{axis} = {sizes[axis]} does not divide. Choose a "
                f"divisor of {size} for mesh.{axis}, or another {key}."
            )


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Logical axes as a partition of the mesh."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def params_sharding(config: ModelConfig, mesh: Mesh) -> Any:
    """The parameter tree with a NamedSharding at every leaf."""

    def sharding(row: Parameter) -> NamedSharding:
        return NamedSharding(mesh, spec(row.axes))

    return map_table(sharding, config)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is rows of a batch or a cache."""
    return NamedSharding(mesh, spec(("rows",)))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())
