"""Where the arrays of a run lie on the mesh: parameters, rows, and what every device has."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from demyrl.model.config import ModelConfig
from demyrl.model.mesh import TOKENS_SPREAD, Rules, spec
from demyrl.model.transformer import Parameter, Params, map_table


def params_sharding(config: ModelConfig, mesh: Mesh, rules: Rules = TOKENS_SPREAD) -> Any:
    """The parameter tree with a NamedSharding at every leaf."""

    def sharding(row: Parameter) -> NamedSharding:
        return NamedSharding(mesh, spec(row.axes, rules))

    return map_table(sharding, config)


def abstract_params(config: ModelConfig, mesh: Mesh) -> Params:
    """The shapes and places of the float32 parameters, without the parameters."""

    def leaf(row: Parameter) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, spec(row.axes))
        return jax.ShapeDtypeStruct(row.shape, "float32", sharding=place)

    return map_table(leaf, config)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is rows of the cache, or what belongs to them."""
    return NamedSharding(mesh, spec(("rows",)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For the [B T] arrays of a batch."""
    return NamedSharding(mesh, spec(("rows", "tokens")))


def spread(arrays: Any, place: NamedSharding) -> Any:
    """A tree of host arrays, the same in every process, on the devices."""
    if jax.process_count() == 1:
        return jax.device_put(arrays, place)

    def one(array: Any) -> jax.Array:
        return jax.make_array_from_callback(array.shape, place, lambda part: array[part])

    return jax.tree.map(one, arrays)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())
