"""Rotary positions and grouped-query attention: over packed rows, and over a cache.

Packed rows have a kernel for each kind of device: splash attention on TPUs, cuDNN's on GPUs, and
tiles in plain JAX elsewhere. All give the same values; on a mesh each device runs its own on its
rows and heads.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from demyrl.model.attention_blocks import NEVER, TILE, attend_in_blocks, pad_tokens
from demyrl.model.attention_splash import attend_splash
from demyrl.model.mesh import HEADS_SPREAD, constrain, spec

EXTEND_BLOCK = 128  # new tokens whose scores over a cache exist at one time
MOST_SCORES = 2**26  # ... once the scores of all of them are more numbers than this
CUDNN_BLOCK = 1024  # tokens, at least
CUDNN_BLOCKS = 16  # of a row, at most


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
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(
    q: Float[Array, "B C N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    visible: Bool[Array, "B C S"],
) -> Float[Array, "B C N H"]:
    """Grouped-query attention of C new tokens over S slots; softmax in float32 or wider.

    Many tokens over a long cache go a block at a time, so that their scores never exist together.
    """
    rows, length, heads, _ = q.shape
    if length <= EXTEND_BLOCK or rows * length * heads * k.shape[2] <= MOST_SCORES:
        return attend_at_once(q, k, v, visible)

    def blocks_first(x):
        x = pad_tokens(x, EXTEND_BLOCK)
        return x.reshape(rows, -1, EXTEND_BLOCK, *x.shape[2:]).swapaxes(0, 1)

    def one_block(block):
        return attend_at_once(block[0], k, v, block[1])

    out = jax.lax.map(one_block, (blocks_first(q), blocks_first(visible)))
    return out.swapaxes(0, 1).reshape(rows, -1, *q.shape[2:])[:, :length]


def attend_at_once(
    q: Float[Array, "B C N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    visible: Bool[Array, "B C S"],
) -> Float[Array, "B C N H"]:
    """`attend`, with all scores in memory."""
    kind = jnp.promote_types(q.dtype, jnp.float32)
    q_BCKRH = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    scores_BKRCS = jnp.einsum("bckrh,bksh->bkrcs", q_BCKRH, k, preferred_element_type=kind)
    scores_BKRCS = jnp.where(visible[:, None, None], scores_BKRCS, NEVER)
    probs_BKRCS = jax.nn.softmax(scores_BKRCS, axis=-1).astype(v.dtype)
    return jnp.einsum("bkrcs,bksh->bckrh", probs_BKRCS, v).reshape(q.shape)


def attend_segments(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    mesh: Mesh | None = None,
    kernel: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention within each segment of packed rows; softmax in float32 or wider.

    A segment is contiguous. Segment 0 is padding, whose results are finite and mean nothing.
    `kernel` is "splash", "cudnn" or "blocks"; None takes what suits the devices of the mesh.
    On a mesh, tokens are gathered and heads spread for the kernel, then the other way round.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    attend_rows = KERNELS[kernel or suited_kernel(platform, q)](platform)
    if mesh is None or mesh.size == 1:
        return attend_rows(q, k, v, segments)
    queries, keys, rows = (
        spec(axes, HEADS_SPREAD)
        for axes in (("rows", "tokens", "heads"), ("rows", "tokens", "kv_heads"), ("rows",))
    )
    attend_shards = jax.shard_map(
        attend_rows,
        mesh=mesh,
        in_specs=(queries, keys, keys, rows),
        out_specs=queries,
        check_vma=False,  # pallas_call does not say over which axes its results vary
    )
    return constrain(attend_shards(q, k, v, segments), ("rows", "tokens", "heads", None), mesh)


def suited_kernel(platform: str, q: Float[Array, "B T N H"]) -> str:
    """The fastest kernel of a platform that takes the dtype and the head size.

    cuDNN computes in 16 bits only, and wants a head size of at most 128 that 8 divides.
    """
    if platform == "tpu" and q.dtype in (jnp.bfloat16, jnp.float32):
        return "splash"
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    if platform in ("gpu", "cuda") and half and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0:
        return "cudnn"
    return "blocks"


def attend_tiles_or_whole(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """`attend_in_blocks`, or all scores of rows of one tile: as fast, and quicker to compile."""
    length = q.shape[1]
    if length > TILE:
        return attend_in_blocks(q, k, v, segments)
    visible = visible_keys(segments, 0, length)
    return attend_at_once(q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible)


def visible_keys(segments: Int[Array, "B T"], start: int, end: int) -> Bool[Array, "B C S"]:
    """Which keys before `end` the queries from `start` on see."""
    order = jnp.arange(end)
    same = segments[:, start:end, None] == segments[:, None, :end]
    return same & (order[start:, None] >= order)


def attend_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    implementation: str = "cudnn",
) -> Float[Array, "B T N H"]:
    """Causal attention within each segment by cuDNN, a block of queries at a time.

    cuDNN takes segments as a mask only: JAX's public interface to it has no packed layout. A block
    is compared with the keys up to its end, and its mask is made again in the backward pass, so
    that the masks of a row never exist together. cuDNN wants even lengths.
    """
    length = q.shape[1]
    q, k, v, segments = (pad_tokens(x, 2) for x in (q, k, v, segments))
    size = max(CUDNN_BLOCK, -(-q.shape[1] // CUDNN_BLOCKS))
    size += size % 2

    @functools.partial(jax.checkpoint, static_argnums=(4, 5))
    def one_block(q, k, v, segments, start, end):
        mask = visible_keys(segments, start, end)[:, None]
        queries, keys, values = q[:, start:end], k[:, :end], v[:, :end]
        return jax.nn.dot_product_attention(
            queries, keys, values, mask=mask, implementation=implementation
        )

    starts = range(0, q.shape[1], size)
    ends = [min(start + size, q.shape[1]) for start in starts]
    blocks = [one_block(q, k, v, segments, *span) for span in zip(starts, ends, strict=True)]
    return jnp.concatenate(blocks, axis=1)[:, :length]


# By name: the kernel as it runs on a platform. On others than their own, for tests, splash
# attention is interpreted and cuDNN's call goes to XLA.
KERNELS: dict[str, Callable[[str], Callable[..., Array]]] = {
    "splash": lambda platform: functools.partial(attend_splash, interpret=platform != "tpu"),
    "cudnn": lambda platform: functools.partial(
        attend_cudnn, implementation="xla" if platform == "cpu" else "cudnn"
    ),
    "blocks": lambda platform: attend_tiles_or_whole,
}
