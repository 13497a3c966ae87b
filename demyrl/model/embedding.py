"""The embedding of packed rows over a mesh: each device looks up its own part of the vocabulary.

Left to the compiler, the gradient of a spread matrix is made from the gradients of all tokens on
every device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from demyrl.model.mesh import HEADS_SPREAD, spec

MATRIX = spec(("vocab", "width"))  # where it lies between updates
WHOLE_ROWS = spec(("rows", "tokens"), HEADS_SPREAD)
STATES = spec(("rows", "tokens", None))


def lookup(
    matrix: Float[Array, "V D"], tokens: Int[Array, "B T"], mesh: Mesh
) -> Float[Array, "B T D"]:
    """The matrix's rows of the tokens; its gradient is summed in float32 at least."""
    vocab, dtype = matrix.shape[0], matrix.dtype

    def over_devices(function, taken, given):
        return jax.shard_map(function, mesh=mesh, in_specs=taken, out_specs=given, check_vma=False)

    @jax.custom_vjp
    def rows(matrix, tokens):
        return over_devices(rows_of_device, (MATRIX, WHOLE_ROWS), STATES)(matrix, tokens)

    def back(tokens, above):
        gradient = functools.partial(gradient_of_device, vocab=vocab, dtype=dtype, mesh=mesh)
        return over_devices(gradient, (WHOLE_ROWS, STATES), MATRIX)(tokens, above), None

    rows.defvjp(lambda matrix, tokens: (rows(matrix, tokens), tokens), back)
    return rows(matrix, tokens)


def rows_of_device(matrix: Float[Array, "_ _"], tokens: Int[Array, "B T"]) -> Float[Array, "B _ D"]:
    """The device's tokens, each found by the one that has its part of the vocabulary."""
    matrix = part_of_device(matrix)
    own = own_vocabulary(tokens, matrix.shape[0])
    return by_tokens(matrix.at[own].get(mode="fill", fill_value=0))


def gradient_of_device(
    tokens: Int[Array, "B T"], above: Float[Array, "B _ D"], vocab: int, dtype: Any, mesh: Mesh
) -> Float[Array, "_ _"]:
    """The device's part of the matrix's gradient, laid out as the matrix lies at rest."""
    above = lax.all_gather(above, "sequence", axis=1, tiled=True)
    size = vocab // (mesh.shape["tensor"] * mesh.shape["sequence"])
    sums = jnp.zeros((size, above.shape[-1]), jnp.promote_types(dtype, jnp.float32))
    sums = sums.at[own_vocabulary(tokens, size)].add(above.astype(sums.dtype), mode="drop")
    return laid_to_rest(sums, dtype)


def own_vocabulary(tokens: Int[Array, "B T"], size: int) -> Int[Array, "B T"]:
    """Tokens counted from the first of this device's part; `size`, out of range, in others'."""
    own = tokens - lax.axis_index(HEADS_SPREAD["vocab"]) * size
    return jnp.where((own >= 0) & (own < size), own, size)


def part_of_device(matrix: Float[Array, "_ _"]) -> Float[Array, "V D"]:
    """The device's part of the vocabulary, whole in width, from how the matrix lies at rest."""
    matrix = lax.all_to_all(matrix, "sequence", split_axis=0, concat_axis=1, tiled=True)
    return lax.all_gather(matrix, "data", axis=1, tiled=True)


def laid_to_rest(sums: Float[Array, "V D"], dtype: Any) -> Float[Array, "_ _"]:
    """The sum over the rows of all devices, laid out as the matrix lies at rest."""
    # turned over: TPUs scatter a sum along rows, but sum up all of it to cut columns
    part = lax.psum_scatter(sums.T, "data", scatter_dimension=0, tiled=True).T.astype(dtype)
    return lax.all_to_all(part, "sequence", split_axis=1, concat_axis=0, tiled=True)


def by_tokens(states: Float[Array, "B T D"]) -> Float[Array, "B _ D"]:
    """The sum over the parts of the vocabulary, of the device's share of the tokens."""
    states = lax.psum(states, "tensor")
    return lax.psum_scatter(states, "sequence", scatter_dimension=1, tiled=True)
