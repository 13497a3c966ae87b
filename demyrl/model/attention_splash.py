"""Splash attention, JAX's attention kernel for TPUs, over packed rows.

The kernel masks by segment, but its plan of which blocks to visit follows from the causal mask
alone. Here each row gets a plan of its own, without the blocks that share no segment, so that work
grows with the squares of the segments and not of the row.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Float, Int

from demyrl.model.attention_blocks import ATTENDED, pad_tokens, tile_ranges

LANES = 128  # a block's side is a multiple of these
BLOCK = 512  # tokens; twice that where it divides the row, which fits the VMEM of v5e, v5p and v6e


def attend_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal attention within each segment, for heads of any size.

    `interpret` runs the kernel as ordinary operations where there is no TPU: slow, for tests.
    """
    length, heads, size = q.shape[1:]
    block = block_size(length)
    q = (q.astype(jnp.float32) * size**-0.5).astype(q.dtype)
    padded = [pad_tokens(x, block) for x in (q, k, v, segments)]
    kernel = causal_kernel(padded[0].shape[1], heads, block, interpret)

    def attend_row(q_TNH, k_TKH, v_TKH, segments):
        heads_first = (x.swapaxes(0, 1) for x in (q_TNH, k_TKH, v_TKH))
        ids = splash.SegmentIds(q=segments, kv=segments)
        out_NTH = without_strangers(kernel, segments, block)(*heads_first, segment_ids=ids)
        return out_NTH.swapaxes(0, 1)

    return jax.vmap(attend_row)(*padded)[:, :length]


def block_size(length: int) -> int:
    """Tokens of a block for rows of a length, which are then padded to a multiple of it.

    Wide blocks read keys less often; narrow ones pad less and skip more.
    """
    if length <= BLOCK:
        return length + -length % LANES
    return BLOCK if length % (2 * BLOCK) else 2 * BLOCK


def causal_kernel(length: int, heads: int, block: int, interpret: bool) -> SplashAttentionKernel:
    """The kernel for one row, in which the heads of a group share their keys and values.

    Its three passes use the same blocks: what one visits, the others visit.
    """
    passes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    return splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(passes, block)),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )


def without_strangers(
    kernel: SplashAttentionKernel, segments: Int[Array, " T"], block: int
) -> SplashAttentionKernel:
    """The kernel with a plan that leaves out the blocks of which no query sees a key.

    The blocks on the diagonal stay: without any key, the softmax of padding would not be finite.
    """
    looks_M2 = tile_ranges(segments.reshape(1, -1, block))[0][0]
    queries, keys = jnp.arange(len(looks_M2))[:, None], jnp.arange(len(looks_M2))
    met_MM = (looks_M2[:, :1] <= keys) & (keys <= queries) | (keys == queries)
    return SplashAttentionKernel(
        visiting(kernel.fwd_mask_info, met_MM, axis=1),
        visiting(kernel.dq_mask_info, met_MM, axis=1),
        visiting(kernel.dkv_mask_info, met_MM, axis=0),
        **kernel.kwargs,
    )


def visiting(plan: MaskInfo, met: Bool[Array, "M M"], axis: int) -> MaskInfo:
    """The plan with only these blocks of (queries, keys); `axis` is the one a pass runs along.

    While a pass skips blocks, the next one to load is the nearest that it will not skip: a block
    that is already there is not loaded again.
    """
    first = jnp.argmax(met, axis, keepdims=True)
    last = len(met) - 1 - jnp.argmax(jnp.flip(met, axis), axis, keepdims=True)
    order = jnp.arange(len(met)).reshape((-1, 1) if axis == 0 else (1, -1))
    wanted = jnp.clip(order, first, last)[None]
    return plan._replace(
        data_next=wanted.astype(plan.data_next.dtype),
        block_mask=jnp.where(met, plan.block_mask, 0),
    )
