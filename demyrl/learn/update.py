"""The compiled programs of training: score, accumulate, apply.

An update is any number of `accumulate` calls on micro-batches of one shape, whose gradients simply
add up because the weights of a whole update sum to 1, and one `apply`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from demyrl.arrays import Batch, TrainState
from demyrl.learn.head import token_logprobs
from demyrl.learn.loss import Numbers
from demyrl.model.config import ModelConfig
from demyrl.model.sharding import replicated
from demyrl.model.transformer import Params, hidden_states, map_table


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up and a cosine decay to `final_share` of the peak."""

    learning_rate: float
    warmup_updates: int
    decay_updates: int  # updates until the decay ends; 0 keeps the rate constant
    final_share: float
    beta1: float
    beta2: float
    weight_decay: float
    clip_norm: float  # of the whole gradient

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.clip_norm <= 0:
            raise ValueError(
                f"learning_rate is {self.learning_rate} and clip_norm is {self.clip_norm}: both "
                "must be above 0, or no update changes anything."
            )
        if self.warmup_updates < 0 or self.decay_updates < 0:
            raise ValueError(
                f"warmup_updates is {self.warmup_updates} and decay_updates is "
                f"{self.decay_updates}: neither can be negative."
            )


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """The rate of update 0, 1, ...: linear warm-up, then a cosine to the final share."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if not config.decay_updates:
        return config.learning_rate
    span = max(config.decay_updates - config.warmup_updates, 1)
    done = min((update - config.warmup_updates) / span, 1.0)
    share = config.final_share + (1 - config.final_share) * (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * share


def make_optimizer(config: OptimizerConfig, model: ModelConfig) -> optax.GradientTransformation:
    """Clip and AdamW up to the learning rate, which `apply` multiplies; norms do not decay."""
    decays = map_table(lambda row: bool(row.scale), model)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


class Scores(NamedTuple):
    """What the training graph says about a micro-batch before any update."""

    logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"]


class Programs(NamedTuple):
    """The jitted functions of one training run; each compiles once for one micro-batch shape."""

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
) -> Programs:
    """Compiles nothing yet; the first call of each program does."""

    def scores(params: Params, batch: Batch) -> Scores:
        hidden = hidden_states(params, batch.tokens, batch.positions, batch.segments, model)
        return Scores(*token_logprobs(params, hidden, batch.tokens, temperature, chunk))

    def loss_of(params: Params, batch: Batch):
        return loss(scores(params, batch).logprobs, batch)

    @functools.partial(jax.jit, donate_argnums=1)
    def accumulate(params: Params, total: Any, batch: Batch) -> Any:
        grads, numbers = jax.grad(loss_of, has_aux=True)(params, batch)
        return jax.tree.map(jnp.add, total, (grads, numbers))

    @functools.partial(jax.jit, donate_argnums=0)
    def apply(state: TrainState, total: Any, rate: Array) -> tuple[TrainState, Numbers]:
        grads, numbers = total
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

    return Programs(jax.jit(scores), accumulate, apply)


def zero_total(params: Params, batch: Batch, loss: Loss) -> Any:
    """Gradients and numbers that have seen no micro-batch yet, placed like those that have."""
    _, numbers = jax.eval_shape(loss, batch.old_logprobs, batch)
    everywhere = replicated_beside(params)
    return (
        jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype, device=p.sharding), params),
        jax.tree.map(lambda n: jnp.zeros(n.shape, n.dtype, device=everywhere), numbers),
    )


def replicated_beside(params: Params) -> jax.sharding.Sharding:
    """A copy on every device that the parameters lie on."""
    place = jax.tree.leaves(params)[0].sharding
    return replicated(place.mesh) if isinstance(place, jax.sharding.NamedSharding) else place


def update(
    programs: Programs, loss: Loss, state: TrainState, batches: Sequence[Batch], rate: float
) -> tuple[TrainState, Numbers]:
    """One optimizer application over all micro-batches. The state that went in is donated."""
    total = zero_total(state.params, batches[0], loss)
    for batch in batches:
        total = programs.accumulate(state.params, total, batch)
    return programs.apply(state, total, jnp.float32(rate))


def start_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Step 0: the given parameters and a fresh optimizer, placed like after an update.

    Arrays that JAX may move, as it may a new one, would make the second update compile again.
    """
    everywhere = replicated_beside(params)
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), state)


def abstract_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The shapes and places of `start_state`, from those of the parameters, without its arrays."""
    everywhere = replicated_beside(params)

    def beside(leaf, param):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding)

    def alone(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    moments = jax.eval_shape(optimizer.init, params)
    moments = optax.tree.map_params(optimizer, beside, moments, params, transform_non_params=alone)
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere), params, moments)
