"""The losses, each a weighted sum over tokens, so that micro-batches and devices simply add up."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from demyrl.arrays import Batch

LOG_RATIO_CAP = 20.0  # keeps exp finite; far beyond any clip

Numbers = dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The policy loss of GRPO-TCR (paper, section 2 and 4.1)."""

    clip_low: float  # the ratio may fall to 1 - clip_low before its gradient stops
    clip_high: float  # ... and rise to 1 + clip_high; the wider side keeps rare tokens alive
    dual_clip: float  # bounds the loss at dual_clip * |advantage| where the advantage is negative

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"loss.clip_low is {self.clip_low}: it must lie between 0 and 1.")
        if self.clip_high <= 0:
            raise ValueError(f"loss.clip_high is {self.clip_high}: it must be above 0.")
        if self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"loss.dual_clip is {self.dual_clip}: it must lie above 1 + clip_high = "
                f"{1 + self.clip_high}, or it would undo the upper clip. The paper's code uses 10."
            )


def grpo_loss(
    logprobs: Float[Array, "B T"], batch: Batch, config: LossConfig
) -> tuple[Float[Array, ""], Numbers]:
    """Clipped policy loss of one micro-batch, and the numbers that explain it.

    batch.weights sum to 1 over the whole update, so losses, gradients and metrics of its
    micro-batches add up, however it was split. What stands at positions of weight 0 is never used,
    not even a NaN.
    """
    trained = batch.weights > 0
    advantages = jnp.where(trained, batch.advantages, 0.0)
    log_ratio = jnp.where(trained, logprobs - batch.old_logprobs, 0.0)
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_CAP, LOG_RATIO_CAP)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    floored = jnp.where(advantages < 0, jnp.maximum(gain, config.dual_clip * advantages), gain)
    loss = -jnp.sum(batch.weights * floored)

    def share(where) -> Float[Array, ""]:
        return jnp.sum(jnp.where(where & trained, batch.weights, 0.0))

    return loss, {
        "loss/policy": loss,
        "loss/clipped_low": share((advantages < 0) & (ratio < 1 - config.clip_low)),
        "loss/clipped_high": share((advantages > 0) & (ratio > 1 + config.clip_high)),
        "loss/dual_clipped": share((advantages < 0) & (ratio > config.dual_clip)),
        "loss/kl_to_old": jnp.sum(batch.weights * (ratio - 1 - log_ratio)),
    }


def sft_loss(logprobs: Float[Array, "B T"], batch: Batch) -> tuple[Float[Array, ""], Numbers]:
    """Weighted negative log-likelihood of the teacher's tokens, in nats."""
    trained = batch.weights > 0
    loss = -jnp.sum(batch.weights * jnp.where(trained, logprobs, 0.0))
    return loss, {"sft/loss": jax.lax.stop_gradient(loss)}
