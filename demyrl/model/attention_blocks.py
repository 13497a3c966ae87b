"""Causal attention within segments by tiles of queries and keys, in plain JAX.

Scores exist for one tile at a time, forward and backward (the online softmax of FlashAttention,
arXiv 2205.14135): memory grows with the length of a row, not with its square. Tiles that share no
segment are never visited: work grows with the squares of the segments, not of the row.

Letters beside those of architecture.md: M tiles of a row, C tokens of a tile, Q = R x C queries
of a tile that share a key/value head.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

TILE = 64  # tokens; wider tiles visit more of what is masked and took more CPU time at any length
NEVER = -1e30  # a score that softmax turns into exactly 0
ATTENDED = "attended"  # what a remat policy calls the results that spare it a second forward pass


def attend_in_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Causal attention within each segment; exactly 0 for tiles of only padding (segment 0)."""
    rows, length, kv_heads = *q.shape[:2], k.shape[2]
    q, k, v, segments = (pad_tokens(x, TILE) for x in (q, k, v, segments))
    tiles = (split_tiles(x, kv_heads) for x in (q, k, v))
    out_BMKQH = attend_tiles(*tiles, segments.reshape(rows, -1, TILE))
    return join_tiles(out_BMKQH)[:, :length]


def pad_tokens(x: Array, multiple: int) -> Array:
    """The rows with zeros at their end, so that their length is a multiple."""
    extra = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2))


def split_tiles(x: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B M K Q H"]:
    """Tokens in tiles; the heads of a group come one after the other within a tile."""
    rows, length, heads, size = x.shape
    x_BMCKRH = x.reshape(rows, length // TILE, TILE, kv_heads, heads // kv_heads, size)
    x_BMKRCH = x_BMCKRH.transpose(0, 1, 3, 4, 2, 5)
    return x_BMKRCH.reshape(rows, length // TILE, kv_heads, -1, size)


def join_tiles(x: Float[Array, "B M K Q H"]) -> Float[Array, "B T N H"]:
    """The inverse of `split_tiles`."""
    rows, tiles, kv_heads, queries, size = x.shape
    x_BMKRCH = x.reshape(rows, tiles, kv_heads, queries // TILE, TILE, size)
    x_BMCKRH = x_BMKRCH.transpose(0, 1, 4, 2, 3, 5)
    return x_BMCKRH.reshape(rows, tiles * TILE, -1, size)


def tile_ranges(
    segments: Int[Array, "B M C"],
) -> tuple[Int[Array, "B M 2"], Int[Array, "B M 2"]]:
    """Per tile, as (first, past the last): tiles its queries look at, and tiles that look at it.

    Both are empty where a tile is all padding.
    """
    rows, tiles, size = segments.shape
    flat, order = segments.reshape(rows, -1), jnp.arange(tiles * size)
    edge = flat[:, 1:] != flat[:, :-1]
    begins = jnp.pad(edge, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(edge, ((0, 0), (0, 1)), constant_values=True)
    start = jax.lax.cummax(jnp.where(begins, order, 0), axis=1)
    stop = jax.lax.cummin(jnp.where(ends, order, order.size), axis=1, reverse=True)
    own = jnp.arange(tiles)
    start = jnp.where(flat > 0, start, order.size).reshape(segments.shape).min(-1) // size
    stop = jnp.where(flat > 0, stop, -1).reshape(segments.shape).max(-1) // size
    empty = jnp.all(segments == 0, -1)
    looks = jnp.stack([start, jnp.where(empty, start, own + 1)], -1)
    seen = jnp.stack([jnp.where(empty, stop + 1, own), stop + 1], -1)
    return looks, seen


def tile_scores(
    q: Float[Array, "K Q H"],
    k: Float[Array, "K C H"],
    segments: Int[Array, "M C"],
    query_tile: Int[Array, ""],
    key_tile: Int[Array, ""],
) -> Float[Array, "K Q C"]:
    """Scaled scores of two tiles of one row, in float32 or wider; NEVER where not visible."""
    kind, size = jnp.promote_types(q.dtype, jnp.float32), segments.shape[1]
    scores = jnp.einsum("kqh,kch->kqc", q, k, preferred_element_type=kind) * q.shape[-1] ** -0.5
    order = jnp.arange(size)
    visible = segments[query_tile][:, None] == segments[key_tile]
    visible &= (query_tile - key_tile) * size + order[:, None] >= order
    return jnp.where(jnp.tile(visible, (q.shape[1] // size, 1)), scores, NEVER)


@jax.custom_vjp
def attend_tiles(
    q: Float[Array, "B M K Q H"],
    k: Float[Array, "B M K C H"],
    v: Float[Array, "B M K C H"],
    segments: Int[Array, "B M C"],
) -> Float[Array, "B M K Q H"]:
    """`attend_in_blocks` of rows that are cut into tiles."""
    return attend_forward(q, k, v, segments)[0]


def attend_forward(q, k, v, segments):
    """The result, and what the backward pass needs: inputs, result and log-sum-exp of scores."""
    kind = jnp.promote_types(q.dtype, jnp.float32)
    looks, _ = tile_ranges(segments)

    def one_tile(place):
        row, i = place
        q_KQH = q[row, i]

        def add(j, carry):
            top_KQ, sum_KQ, out_KQH = carry
            scores_KQC = tile_scores(q_KQH, k[row, j], segments[row], i, j)
            new_KQ = jnp.maximum(top_KQ, scores_KQC.max(-1))
            shrink_KQ = jnp.exp(top_KQ - new_KQ)
            probs_KQC = jnp.exp(scores_KQC - new_KQ[..., None])
            sum_KQ = sum_KQ * shrink_KQ + probs_KQC.sum(-1)
            return new_KQ, sum_KQ, out_KQH * shrink_KQ[..., None] + dot(probs_KQC, v[row, j])

        zeros = jnp.zeros(q_KQH.shape[:-1], kind)
        start = (zeros + NEVER, zeros, jnp.zeros(q_KQH.shape, kind))
        top_KQ, sum_KQ, out_KQH = jax.lax.fori_loop(*looks[row, i], add, start)
        sum_KQ = jnp.where(sum_KQ > 0, sum_KQ, 1)  # a tile of padding
        return (out_KQH / sum_KQ[..., None]).astype(q.dtype), top_KQ + jnp.log(sum_KQ)

    out, lse = jax.lax.map(one_tile, places(segments))
    out = checkpoint_name(out.reshape(q.shape), ATTENDED)
    lse = checkpoint_name(lse.reshape(q.shape[:-1]), ATTENDED)
    return out, (q, k, v, segments, out, lse)


def attend_backward(saved, d_out):
    """Gradients of q, k and v: a tile of keys at a time, over the tiles of queries that saw it."""
    q, k, v, segments, out, lse = saved
    _, seen = tile_ranges(segments)
    # What every score's gradient has subtracted: the mean of d_probs under the probabilities.
    mean = jnp.einsum("bmkqh,bmkqh->bmkq", out, d_out, preferred_element_type=lse.dtype)

    def one_tile(d_q, place):
        row, j = place
        k_KCH, v_KCH = k[row, j], v[row, j]

        def add(i, carry):
            d_q, d_k, d_v = carry
            scores_KQC = tile_scores(q[row, i], k_KCH, segments[row], i, j)
            probs_KQC = jnp.exp(scores_KQC - lse[row, i][..., None])
            d_probs_KQC = dot(d_out[row, i], v_KCH.mT)
            d_scores_KQC = probs_KQC * (d_probs_KQC - mean[row, i][..., None]) * q.shape[-1] ** -0.5
            d_q = d_q.at[row, i].add(dot(d_scores_KQC, k_KCH))
            return (
                d_q,
                d_k + dot(d_scores_KQC.mT, q[row, i]),
                d_v + dot(probs_KQC.mT, d_out[row, i]),
            )

        zeros = jnp.zeros(k_KCH.shape, lse.dtype)
        d_q, d_k, d_v = jax.lax.fori_loop(*seen[row, j], add, (d_q, zeros, zeros))
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    d_q, (d_k, d_v) = jax.lax.scan(one_tile, jnp.zeros(q.shape, lse.dtype), places(segments))
    return d_q.astype(q.dtype), d_k.reshape(k.shape), d_v.reshape(v.shape), None


attend_tiles.defvjp(attend_forward, attend_backward)


def places(segments: Int[Array, "B M C"]) -> tuple[Int[Array, " BM"], Int[Array, " BM"]]:
    """Row and tile, for every tile of every row."""
    rows, tiles, _ = segments.shape
    return jnp.divmod(jnp.arange(rows * tiles), tiles)


def dot(a: Float[Array, "K X Y"], b: Float[Array, "K Y Z"]) -> Float[Array, "K X Z"]:
    """A product per head in the dtype of the inputs, summed in float32 or wider."""
    kind = jnp.promote_types(b.dtype, jnp.float32)
    return jnp.matmul(a.astype(b.dtype), b, preferred_element_type=kind)
