"""Rotary positions and grouped-query attention: over packed rows, and over a cache."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

QUERY_BLOCK = 128  # tokens, at least
MOST_BLOCKS = 16
NEVER = -1e30  # a score that softmax turns into exactly 0 without making a row of only these NaN


def frequencies(head_dim: int, theta: float) -> Float[np.ndarray, " half"]:
    """How far one position turns each pair of channels, in radians: theta^(-2i/H).

    Exponent, power and inverse are rounded to float32 one by one, as in transformers. Rounded
    otherwise they differ in the last digit, of which position 32,767 makes 2e-3 radians.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


def rotate(
    x: Float[Array, "B C N H"], positions: Int[Array, "B C"], theta: float
) -> Float[Array, "B C N H"]:
    """Channels i and i + H/2 turned by position * theta^(-2i/H), as Qwen's weights expect."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(x.shape[-1], theta)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(
    q: Float[Array, "B C N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    visible: Bool[Array, "B C S"],
) -> Float[Array, "B C N H"]:
    """Grouped-query attention of C new tokens over S slots; softmax in float32."""
    q_BCKRH = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    scores_BKRCS = jnp.einsum("bckrh,bksh->bkrcs", q_BCKRH, k).astype(jnp.float32)
    scores_BKRCS = jnp.where(visible[:, None, None], scores_BKRCS, NEVER)
    probs_BKRCS = jax.nn.softmax(scores_BKRCS, axis=-1).astype(v.dtype)
    return jnp.einsum("bkrcs,bksh->bckrh", probs_BKRCS, v).reshape(q.shape)


def attend_segments(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Causal attention within each segment of packed rows, a block of queries at a time.

    A block is compared with the keys up to its end only, which halves the work of long rows.
    """
    k_BKTH, v_BKTH = k.swapaxes(1, 2), v.swapaxes(1, 2)
    length = q.shape[1]
    order, blocks = jnp.arange(length), []
    block = max(QUERY_BLOCK, math.ceil(length / MOST_BLOCKS))
    for start in range(0, length, block):
        end = min(start + block, length)
        visible = segments[:, start:end, None] == segments[:, None, :end]
        visible &= order[start:end, None] >= order[None, :end]
        blocks.append(attend(q[:, start:end], k_BKTH[:, :, :end], v_BKTH[:, :, :end], visible))
    return jnp.concatenate(blocks, axis=1)
