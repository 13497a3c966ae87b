"""Rotary positions and grouped-query attention: over packed rows, and over a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NEVER = -1e30  # a score that softmax turns into exactly 0 without making a row of only these NaN


def rotate(
    x: Float[Array, "B C N H"], positions: Int[Array, "B C"], theta: float
) -> Float[Array, "B C N H"]:
    """Channels i and i + H/2 turned by position * theta^(-2i/H), as Qwen's weights expect."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(
    q: Float[Array, "B C N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visible: Bool[Array, "B C S"],
) -> Float[Array, "B C N H"]:
    """Grouped-query attention of C new tokens over S slots; softmax in float32."""
    q_BCKRH = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    scores_BKRCS = jnp.einsum("bckrh,bskh->bkrcs", q_BCKRH, k).astype(jnp.float32)
    scores_BKRCS = jnp.where(visible[:, None, None], scores_BKRCS, NEVER)
    probs_BKRCS = jax.nn.softmax(scores_BKRCS, axis=-1).astype(v.dtype)
    return jnp.einsum("bkrcs,bskh->bckrh", probs_BKRCS, v).reshape(q.shape)


def attend_segments(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Causal attention within each segment of packed rows."""
    order = jnp.arange(q.shape[1])
    visible = segments[:, :, None] == segments[:, None, :]
    return attend(q, k, v, visible & (order[:, None] >= order[None, :]))
