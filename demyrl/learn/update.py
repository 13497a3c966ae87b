"""The compiled programs of training: working, score, accumulate, apply.

An update is any number of `accumulate` calls on micro-batches, whose gradients simply add up
because the weights of a whole update sum to 1, and one `apply`. Gradients are taken with respect to
a working copy of the parameters in the compute dtype, made once an update.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from demyrl.arrays import Batch, TrainState
from demyrl.learn.head import token_logprobs
from demyrl.learn.loss import EXTREMES, Numbers
from demyrl.learn.optimizer import MOMENTS
from demyrl.learn.state import abstract_state, replicated_beside
from demyrl.model.config import ModelConfig
from demyrl.model.mesh import constrain
from demyrl.model.sharding import abstract_params, params_sharding
from demyrl.model.transformer import ALONE, REMAT, Layout, Params, hidden_states


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """What is kept, where and how exactly: each takes less memory for some time or precision."""

    remat: str  # what a layer keeps for the way back: "none" (all), "dots", "full" (its input)
    moments: str  # data type of the optimizer's moments: "float32" or "bfloat16"
    gradients: str  # ... of the sum of micro-batches' gradients, each of which is in model.dtype
    offload: bool  # float32 parameters and moments lie in the host's memory between updates

    def __post_init__(self) -> None:
        for key, known in (("remat", REMAT), ("moments", MOMENTS), ("gradients", MOMENTS)):
            if getattr(self, key) not in known:
                raise ValueError(
                    f"memory.{key} is {getattr(self, key)!r}: use one of {', '.join(known)}."
                )


class Scores(NamedTuple):
    """What the training graph says about a micro-batch before any update; 0 at weight 0."""

    logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"]


class Programs(NamedTuple):
    """The jitted functions of one training run; each compiles once for a micro-batch shape."""

    working: Callable[[Params], Params]
    score: Callable[[Params, Batch], Scores]
    accumulate: Callable[[Params, Any, Batch], Any]
    apply: Callable[[TrainState, Any, float], tuple[TrainState, Numbers]]


Loss = Callable[[Float[Array, "B T"], Batch], tuple[Float[Array, ""], Numbers]]


def make_programs(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    temperature: float,
    chunk: int,
    layout: Layout = ALONE,
    offload: bool = False,
) -> Programs:
    """Compiles nothing yet; the first call of each program does."""
    mesh = layout.mesh

    def scores(params: Params, batch: Batch) -> Scores:
        hidden = hidden_states(params, batch.tokens, batch.positions, batch.segments, model, layout)
        needed = (batch.weights != 0) & (batch.positions > 0)  # nothing predicts a first token
        return Scores(
            *token_logprobs(params, hidden, batch.tokens, needed, temperature, chunk, mesh)
        )

    @jax.jit
    def score(params: Params, batch: Batch) -> Scores:
        return jax.tree.map(lambda x: constrain(x, (None, None), mesh), scores(params, batch))

    def loss_of(params: Params, batch: Batch):
        return loss(scores(params, batch).logprobs, batch)

    @functools.partial(jax.jit, donate_argnums=1)
    def accumulate(params: Params, total: Any, batch: Batch) -> Any:
        grads, numbers = jax.grad(loss_of, has_aux=True)(params, batch)
        if mesh is not None:
            grads = jax.lax.with_sharding_constraint(grads, params_sharding(model, mesh))
        so_far, earlier = total
        combined = {n: EXTREMES.get(n, added)(x, numbers[n]) for n, x in earlier.items()}
        return jax.tree.map(added, so_far, grads), combined

    applied = functools.partial(applying, optimizer)
    if offload:
        applied = offloaded(applied, optimizer, model, mesh)
    return Programs(
        working_copy(model, mesh, offload),
        score,
        accumulate,
        jax.jit(applied, donate_argnums=0),
    )


def added(total: Array, more: Array) -> Array:
    """The sum, rounded to the total's data type once."""
    exact = jnp.promote_types(jnp.promote_types(total.dtype, more.dtype), jnp.float32)
    return (total.astype(exact) + more.astype(exact)).astype(total.dtype)


def working_copy(
    model: ModelConfig, mesh: Mesh | None, offload: bool
) -> Callable[[Params], Params]:
    """The function from master weights to what forward passes use: themselves in float32."""
    if model.dtype == "float32" and not offload:
        return lambda params: params

    def cast(params: Params) -> Params:
        if offload:
            params = jax.device_put(params, params_sharding(model, mesh))
        return jax.tree.map(lambda p: p.astype(model.dtype), params)

    places = params_sharding(model, mesh) if mesh is not None else None
    return jax.jit(cast, out_shardings=places)


def applying(
    optimizer: optax.GradientTransformation, state: TrainState, total: Any, rate: Array
) -> tuple[TrainState, Numbers]:
    """The state after one optimizer application; as it was when the gradient is not finite."""
    grads, numbers = total
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm)
    changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, change: p - rate * change, state.params, changes)
    kept = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    state = TrainState(state.step + finite, *kept)
    return state, numbers | {"optim/grad_norm": norm, "optim/skipped": 1.0 - finite}


def offloaded(
    applied: Callable, optimizer: optax.GradientTransformation, model: ModelConfig, mesh: Mesh
) -> Callable:
    """`applied`, with a state that comes from the host's memory and goes back to it."""
    params = abstract_params(model, mesh)
    near, far = (
        jax.tree.map(lambda leaf: leaf.sharding, abstract_state(params, optimizer, offload))
        for offload in (False, True)
    )

    def around(state: TrainState, total: Any, rate: Array) -> tuple[TrainState, Numbers]:
        state, numbers = applied(jax.device_put(state, near), total, rate)
        return jax.device_put(state, far), numbers

    return around


def zero_total(working: Params, batch: Batch, loss: Loss, gradients: str = "float32") -> Any:
    """Gradients and numbers that have seen no micro-batch yet, placed like those that have."""
    _, numbers = jax.eval_shape(loss, batch.old_logprobs, batch)
    everywhere = replicated_beside(working)
    return (
        jax.tree.map(lambda p: jnp.zeros(p.shape, gradients, device=p.sharding), working),
        jax.tree.map(lambda n: jnp.zeros(n.shape, n.dtype, device=everywhere), numbers),
    )


def update(
    programs: Programs,
    loss: Loss,
    state: TrainState,
    batches: Sequence[Batch],
    rate: float,
    gradients: str = "float32",
) -> tuple[TrainState, Numbers]:
    """One optimizer application over all micro-batches. The state that went in is donated."""
    working = programs.working(state.params)
    total = zero_total(working, batches[0], loss, gradients)
    for batch in batches:
        total = programs.accumulate(working, total, batch)
    del working
    return programs.apply(state, total, jnp.float32(rate))
