"""AdamW and its learning rate, with moments kept in float32 or bfloat16."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree, UInt32

from demyrl.model.config import ModelConfig
from demyrl.model.transformer import map_table

MOMENTS = ("float32", "bfloat16")


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
    skips: int  # updates in a row with a non-finite gradient that stop the run

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
        if self.skips < 1:
            raise ValueError(f"skips is {self.skips}: at least 1 skipped update stops a run.")


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


def make_optimizer(
    config: OptimizerConfig, model: ModelConfig, moments: str = "float32"
) -> optax.GradientTransformation:
    """Clip and AdamW up to the learning rate, which `apply` multiplies; norms do not decay."""
    decays = map_table(lambda row: bool(row.scale), model)
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        adam if moments == "float32" else stored(adam, moments),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def stored(adam: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """Adam whose moments are float32 while they are updated, and `dtype` in between.

    They are rounded up or down at random, in proportion: to the nearest, a second moment that
    changes by a thousandth at a time (beta2 = 0.999) would never change at all.
    """

    def narrow(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        key = jax.random.fold_in(jax.random.key(0), state.count)
        mu_key, nu_key = jax.random.split(key)
        return state._replace(
            mu=rounded(state.mu, mu_key, dtype), nu=rounded(state.nu, nu_key, dtype)
        )

    def wide(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        mu, nu = optax.tree.cast((state.mu, state.nu), jnp.float32)
        return state._replace(mu=mu, nu=nu)

    def init(params: PyTree) -> optax.ScaleByAdamState:
        state = adam.init(params)
        mu, nu = optax.tree.cast((state.mu, state.nu), dtype)
        return state._replace(mu=mu, nu=nu)

    def update(grads, state, params=None):
        changes, state = adam.update(grads, wide(state), params)
        return changes, narrow(state)

    return optax.GradientTransformation(init, update)


def rounded(tree: PyTree, key: Array, dtype: str) -> PyTree:
    """The tree in bfloat16, each number rounded up with the probability of what is cut off."""
    leaves, shape = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        shape, [round_at_random(x, k).astype(dtype) for x, k in zip(leaves, keys, strict=True)]
    )


def round_at_random(x: Float[Array, "*shape"], key: Array) -> Float[Array, "*shape"]:
    """Float32 numbers of which the lower 16 bits are 0, unbiased."""
    bits: UInt32[Array, "*shape"] = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
