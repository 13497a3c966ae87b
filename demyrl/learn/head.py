"""The only path from hidden states to log-probs and entropy, for SFT, RL and evaluation.

Only positions whose token is needed enter the head, a chunk of them at a time, in a loop that turns
as often as there are chunks to do: one compiled program works in proportion to the tokens that
count. The logits of a chunk are made again on the way back, so that no array of all logits exists:
one row of 32k tokens in float32 logits at Qwen's vocabulary would be 20 GB.

Over a mesh, devices of the tensor and sequence axes share a vocabulary, not tokens: each holds
the logits of its own part of it for all rows of its place on the data axis, so that all have the
same number of chunks however unevenly the needed tokens lie in the rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from demyrl.model.embedding import (
    MATRIX,
    STATES,
    WHOLE_ROWS,
    by_tokens,
    laid_to_rest,
    part_of_device,
)
from demyrl.model.mesh import AXES, HEADS_SPREAD
from demyrl.model.transformer import Params, output_embedding


def token_logprobs(
    params: Params,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    needed: Bool[Array, "B T"],
    temperature: float,
    chunk: int,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of each needed token, and entropy of the distribution it was drawn from, in nats.

    Index t describes tokens[:, t], predicted by hidden[:, t - 1]: the shift happens here and
    nowhere else. Zeros stand where a token is not needed, and at index 0, which nothing predicts.
    What `hidden` holds before such tokens does not matter. `chunk` is how many tokens' logits
    exist at a time, on each device. No gradient flows through the entropy.
    """
    plan = Plan(temperature, chunk, None if mesh and mesh.size == 1 else mesh)
    target = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    wanted = jnp.pad(needed[:, 1:], ((0, 0), (0, 1)))
    logprobs, entropy = next_tokens(plan, output_embedding(params), hidden, target, wanted)

    def moved(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))

    return moved(logprobs), moved(entropy)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when the head is compiled."""

    temperature: float
    chunk: int
    mesh: Mesh | None

    @property
    def sharing(self) -> tuple[str, ...]:
        """The mesh axes whose devices hold parts of one vocabulary; none on one device."""
        vocab = HEADS_SPREAD["vocab"] if self.mesh else ()
        return tuple(axis for axis in vocab if self.mesh.shape[axis] > 1)

    def over_devices(self, function: Callable[..., Any], taken: Any, given: Any) -> Callable:
        """The function run by every device on its parts of the arrays; itself without a mesh."""
        if self.mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=taken, out_specs=given, check_vma=False
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def next_tokens(
    plan: Plan,
    matrix: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    target: Int[Array, "B T"],
    wanted: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of the target that follows each hidden state, and the entropy there.

    `backward` lets no gradient through the entropy.
    """
    return forward(plan, matrix, hidden, target, wanted)[0]


def forward(plan: Plan, matrix: Array, hidden: Array, target: Array, wanted: Array) -> Any:
    """The values, and what `backward` needs: the inputs and the log-sum-exp of the logits."""
    taken = (MATRIX, WHOLE_ROWS, WHOLE_ROWS, WHOLE_ROWS)
    run = plan.over_devices(functools.partial(values, plan), taken, WHOLE_ROWS)
    logprobs, entropy, log_z = run(matrix, hidden, target, wanted)
    return (logprobs, entropy), (matrix, hidden, target, wanted, log_z)


def backward(plan: Plan, saved: Any, above: tuple[Array, Array]) -> Any:
    """Gradients of the matrix and the hidden states."""
    taken = (MATRIX, WHOLE_ROWS, WHOLE_ROWS, WHOLE_ROWS, WHOLE_ROWS, WHOLE_ROWS)
    run = plan.over_devices(functools.partial(gradients, plan), taken, (MATRIX, STATES))
    return (*run(*saved, above[0]), None, None)


next_tokens.defvjp(forward, backward)


class Chunks(NamedTuple):
    """The wanted positions of a device, in order, and how many chunks they fill."""

    places: Int[Array, "I C"]  # flat; one past the last position where there are no more
    count: Int[Array, ""]


def in_chunks(wanted: Bool[Array, "B T"], plan: Plan) -> Chunks:
    """The chunks of one device: as many as of every device that it exchanges sums with."""
    chunk = min(plan.chunk, wanted.size)
    size = -(-wanted.size // chunk) * chunk
    places = jnp.flatnonzero(wanted, size=size, fill_value=wanted.size)
    count = -(-jnp.sum(wanted) // chunk)
    if plan.sharing:  # sums inside the loop: the whole mesh goes round it alike
        count = lax.pmax(count, AXES)
    return Chunks(places.reshape(-1, chunk), count)


def values(
    plan: Plan,
    matrix: Float[Array, "_ _"],
    hidden: Float[Array, "B T D"],
    target: Int[Array, "B T"],
    wanted: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob, entropy and log-sum-exp at the wanted positions of one device's rows."""
    matrix = gathered(matrix, hidden.dtype, plan)
    chunks = in_chunks(wanted, plan)

    def add_chunk(i: Int[Array, ""], found: tuple[Array, ...]) -> tuple[Array, ...]:
        places = chunks.places[i]
        logits = chunk_logits(at(places, hidden), matrix, plan.temperature)
        numbers = summary(logits, at(places, target), plan.sharing)
        return tuple(x.at[places].set(n, mode="drop") for x, n in zip(found, numbers, strict=True))

    blank = (jnp.zeros(target.size, accurate(hidden.dtype)),) * 3
    log_z, chosen, entropy = lax.fori_loop(0, chunks.count, add_chunk, blank)
    return tuple(x.reshape(target.shape) for x in (chosen - log_z, entropy, log_z))


def gradients(
    plan: Plan,
    matrix: Float[Array, "_ _"],
    hidden: Float[Array, "B T D"],
    target: Int[Array, "B T"],
    wanted: Bool[Array, "B T"],
    log_z: Float[Array, "B T"],
    above: Float[Array, "B T"],
) -> tuple[Float[Array, "_ _"], Float[Array, "B _ D"]]:
    """What the devices add up to: gradients of the matrix and of the hidden states."""
    kept, matrix = matrix.dtype, gathered(matrix, hidden.dtype, plan)
    chunks, wide = in_chunks(wanted, plan), accurate(hidden.dtype)

    def add_chunk(i: Int[Array, ""], total: tuple[Array, Array]) -> tuple[Array, Array]:
        places = chunks.places[i]
        inputs = at(places, hidden)
        logits = chunk_logits(inputs, matrix, plan.temperature)
        numbers = (at(places, x) for x in (target, log_z, above / plan.temperature))
        d_logits = logits_gradient(logits, *numbers, plan.sharing).astype(hidden.dtype)
        d_inputs = jnp.einsum("cv,vd->cd", d_logits, matrix, preferred_element_type=wide)
        d_matrix = jnp.einsum("cv,cd->vd", d_logits, inputs, preferred_element_type=wide)
        placed = total[1].at[places].set(d_inputs.astype(hidden.dtype), mode="drop")
        return total[0] + d_matrix, placed

    blank = (jnp.zeros(matrix.shape, wide), jnp.zeros_like(hidden.reshape(-1, matrix.shape[1])))
    d_matrix, d_hidden = lax.fori_loop(0, chunks.count, add_chunk, blank)
    d_hidden = d_hidden.reshape(hidden.shape)
    if plan.mesh is None:
        return d_matrix.astype(kept), d_hidden
    return laid_to_rest(d_matrix, kept), by_tokens(d_hidden)


def accurate(dtype: Any) -> Any:
    """The dtype of logits and of sums over them."""
    return jnp.promote_types(dtype, jnp.float32)


def at(places: Int[Array, " C"], x: Array) -> Array:
    """The entries at flat positions of an array over rows and tokens; zeros past its end."""
    return x.reshape(-1, *x.shape[2:]).at[places].get(mode="fill", fill_value=0)


def chunk_logits(
    hidden: Float[Array, "C D"], matrix: Float[Array, "V D"], temperature: float
) -> Float[Array, "C V"]:
    """Logits of a chunk over temperature, for as much of the vocabulary as the matrix has."""
    wide = accurate(hidden.dtype)
    logits = jnp.einsum("cd,vd->cv", hidden, matrix, preferred_element_type=wide)
    return logits * (1 / temperature)


def is_target(target: Int[Array, " C"], size: int, sharing: tuple[str, ...]) -> Bool[Array, "C V"]:
    """True at the target of each row, in this device's part of the vocabulary."""
    first = lax.axis_index(sharing) * size
    return target[:, None] == first + jnp.arange(size)


def summary(
    logits: Float[Array, "C V"], target: Int[Array, " C"], sharing: tuple[str, ...]
) -> tuple[Float[Array, " C"], Float[Array, " C"], Float[Array, " C"]]:
    """Log-sum-exp, the target's logit and the entropy, over the parts of all who share."""
    top = lax.pmax(jnp.max(logits, axis=-1), sharing)
    below = logits - top[:, None]
    exps = jnp.exp(below)
    hit = is_target(target, logits.shape[1], sharing)
    zero = jnp.zeros((), logits.dtype)
    terms = (exps, exps * below, jnp.where(hit, logits, zero))
    sums = lax.reduce(terms, (zero,) * 3, added, (1,))  # in one sweep over the logits
    total, mean, chosen = lax.psum(sums, sharing)
    log_total = jnp.log(total)
    return top + log_total, chosen, log_total - mean / total


def added(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    """Sums of two tuples of numbers."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def logits_gradient(
    logits: Float[Array, "C V"],
    target: Int[Array, " C"],
    log_z: Float[Array, " C"],
    above: Float[Array, " C"],
    sharing: tuple[str, ...],
) -> Float[Array, "C V"]:
    """Gradient of the targets' log-probs, times what lies above."""
    probs = jnp.exp(logits - log_z[:, None])
    return above[:, None] * (is_target(target, logits.shape[1], sharing) - probs)


def gathered(matrix: Float[Array, "_ _"], dtype: Any, plan: Plan) -> Float[Array, "V D"]:
    """What the device has of the vocabulary, cast before it travels."""
    matrix = matrix.astype(dtype)
    return part_of_device(matrix) if plan.mesh else matrix
