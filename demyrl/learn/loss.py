"""The losses, each a weighted sum over tokens, so that micro-batches and devices simply add up."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from demyrl.arrays import Batch

RATIOS = ("token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")
LOG_RATIO_CAP = 20.0  # keeps exp finite; far beyond any clip
SEQUENCE_CAP = 10.0  # of a sequence's mean log-ratio, from above
K3_CAP = 10.0  # of the k3 estimate, as in the reference code
LARGE = 1e30  # stands for an infinite log-ratio where many are averaged

# Numbers that do not add up over micro-batches, and what combines them; all begin at 0.
EXTREMES = {"loss/log_ratio_max": jnp.maximum, "loss/log_ratio_min": jnp.minimum}

Numbers = dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The policy loss of GRPO-TCR, whose options also give GRPO-T and GRPO-SCR (paper, 4.1)."""

    clip_low: float  # the ratio may fall to 1 - clip_low before its gradient stops
    clip_high: float  # ... and rise to 1 + clip_high; the wider side keeps rare tokens alive
    dual_clip: float  # bounds the loss at dual_clip * |advantage| where that is negative; 0: off
    ratio: str  # of each "token", or of its whole "sequence" (GSPO)
    kl: float  # coefficient of the KL to the reference policy in the loss; 0: off
    kl_estimator: str  # "k1", "k2" or "k3"; the gradient of k1 itself averages to 0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"loss.clip_low is {self.clip_low}: it must lie between 0 and 1.")
        if not 0 < self.clip_high < math.inf:
            raise ValueError(f"loss.clip_high is {self.clip_high}: it must be above 0.")
        if self.ratio not in RATIOS:
            raise ValueError(f"loss.ratio is {self.ratio!r}: use one of {', '.join(RATIOS)}.")
        if not 0 <= self.kl < math.inf:
            raise ValueError(f"loss.kl is {self.kl}: use 0 for no KL term, or more (0.001).")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(
                f"loss.kl_estimator is {self.kl_estimator!r}: use one of "
                f"{', '.join(KL_ESTIMATORS)}."
            )
        self.check_dual_clip()

    def check_dual_clip(self) -> None:
        """Raises ValueError for a bound that would undo the clip, or that the ratio has not."""
        if self.dual_clip == 0:
            return
        if not self.dual_clip > 1 + self.clip_high:
            raise ValueError(
                f"loss.dual_clip is {self.dual_clip}: it must lie above 1 + clip_high = "
                f"{1 + self.clip_high}, or it would undo the upper clip. The paper's code uses "
                "10; 0 turns it off."
            )
        if self.ratio == "sequence":
            raise ValueError(
                f"loss.dual_clip is {self.dual_clip} with loss.ratio 'sequence', which has no dual "
                "clip: set loss.dual_clip=0."
            )


def grpo_loss(
    logprobs: Float[Array, "B T"], batch: Batch, config: LossConfig
) -> tuple[Float[Array, ""], Numbers]:
    """Clipped policy loss of one micro-batch plus its KL term, and the numbers that explain it.

    batch.weights are shared out over the whole update, so losses, gradients and metrics of its
    micro-batches add up, however it was split; only EXTREMES combine in another way. What stands at
    positions of weight 0 is never used, not even a NaN.
    """
    trained = batch.weights > 0
    advantages = jnp.where(trained, batch.advantages, 0.0)
    moved = jnp.where(trained, logprobs - batch.old_logprobs, 0.0)
    log_ratio = jnp.clip(moved, -LOG_RATIO_CAP, LOG_RATIO_CAP)
    if config.ratio == "sequence":
        ratio = jnp.exp(sequence_log_ratio(moved, trained, batch.segments))
    else:
        ratio = jnp.exp(log_ratio)
    gain, numbers = clipped_gain(ratio, advantages, batch.weights, config)
    loss = -jnp.sum(batch.weights * gain)
    numbers |= {
        "loss/policy": loss,
        "loss/kl_to_old": jnp.sum(batch.weights * (jnp.exp(log_ratio) - 1 - log_ratio)),
        "loss/log_ratio_max": jnp.max(log_ratio, initial=0.0),
        "loss/log_ratio_min": jnp.min(log_ratio, initial=0.0),
    }
    if config.kl:
        ahead = jnp.where(trained, batch.ref_logprobs - logprobs, 0.0)
        kl = jnp.sum(batch.weights * kl_estimate(ahead, config.kl_estimator))
        loss, numbers = loss + config.kl * kl, numbers | {"loss/kl_to_reference": kl}
    return loss, numbers


def clipped_gain(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    config: LossConfig,
) -> tuple[Float[Array, "B T"], Numbers]:
    """What each token gains, minus its loss, and the shares of the weight that a clip stops."""
    falls, rises = advantages < 0, advantages > 0
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    stopped = {
        "loss/clipped_low": falls & (ratio < 1 - config.clip_low),
        "loss/clipped_high": rises & (ratio > 1 + config.clip_high),
        "loss/dual_clipped": jnp.zeros_like(falls),
    }
    if config.dual_clip:
        gain = jnp.where(falls, jnp.maximum(gain, config.dual_clip * advantages), gain)
        stopped["loss/dual_clipped"] = falls & (ratio > config.dual_clip)
    return gain, {name: jnp.sum(jnp.where(at, weights, 0.0)) for name, at in stopped.items()}


def sequence_log_ratio(
    moved: Float[Array, "B T"], trained: Bool[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """At each token the mean log-ratio of its sequence's trained tokens (GSPO).

    A token's gradient is that of its own log-prob alone, not of the mean (GSPO). A
    sequence lies in one row, told apart from the others there by its segment.
    """
    finite = jnp.clip(moved, -LARGE, LARGE)

    def totals(values: Float[Array, " T"], own: Int[Array, " T"]) -> Float[Array, " T"]:
        return jax.ops.segment_sum(values, own, num_segments=len(own) + 1)[own]

    count = jax.vmap(totals)(trained.astype(finite.dtype), segments)
    mean = jax.vmap(totals)(finite, segments) / jnp.maximum(count, 1)
    own = finite - jax.lax.stop_gradient(finite)  # 0, with the gradient of the token
    return jnp.minimum(jax.lax.stop_gradient(mean) + own, SEQUENCE_CAP)


def kl_estimate(ahead: Float[Array, "B T"], estimator: str) -> Float[Array, "B T"]:
    """Estimates of the KL from the policy to the reference, given reference - policy log-probs."""
    ahead = jnp.clip(ahead, -LOG_RATIO_CAP, LOG_RATIO_CAP)
    if estimator == "k1":
        return -ahead
    if estimator == "k2":
        return ahead**2 / 2
    return jnp.minimum(jnp.exp(ahead) - ahead - 1, K3_CAP)


def sft_loss(logprobs: Float[Array, "B T"], batch: Batch) -> tuple[Float[Array, ""], Numbers]:
    """Weighted negative log-likelihood of the teacher's tokens, in nats."""
    trained = batch.weights > 0
    loss = -jnp.sum(batch.weights * jnp.where(trained, logprobs, 0.0))
    return loss, {"sft/loss": jax.lax.stop_gradient(loss)}
