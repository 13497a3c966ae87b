"""One token a row from the logits of a decode step, and the key that decides it."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from demyrl.model.mesh import constrain

DRAW_BLOCK = 128  # tokens


@jax.jit
def episode_keys(
    root: Array, step: Int[Array, ""], problems: UInt32[Array, " n"], samples: Int[Array, " n"]
) -> UInt32[Array, "n 2"]:
    """One key an episode, from what names it: root key, step, problem, sample."""
    at_step = jax.random.fold_in(root, step)

    def key(problem, sample):
        return jax.random.fold_in(jax.random.fold_in(at_step, problem), sample)

    return jax.random.key_data(jax.vmap(key)(problems, samples))


def sample_tokens(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    positions: Int[Array, " B"],
    temperature: float,
    mesh: Mesh | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One token a row and its log-prob; the draw depends only on the row's key and position.

    The rows are those of one data shard of the mesh, whose devices share the vocabulary.
    """
    exact = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    logprobs = jax.nn.log_softmax(exact / (temperature or 1.0))
    if temperature:
        tokens = draw_tokens(jnp.exp(logprobs), keys, positions, mesh)
    else:
        tokens = jnp.argmax(logprobs, axis=-1)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def shares_of(keys: UInt32[Array, "B 2"], positions: Int[Array, " B"]) -> Float[Array, " B"]:
    """A uniform number in [0, 1) for each row."""

    def uniform(key, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    return jax.vmap(uniform)(keys, positions)


def draw_tokens(
    probs: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    positions: Int[Array, " B"],
    mesh: Mesh | None = None,
) -> Int[Array, " B"]:
    """The token in whose share of [0, 1] one uniform number falls: first its block, then in it.

    Noise for every token of the vocabulary, as in the Gumbel trick, would take longer on a CPU than
    the head itself (see experiments/LOG.md). A token of probability 0 is never drawn. Blocks end
    where the part of a device does, and only their sums are gathered.
    """
    parts = mesh.size // mesh.shape["data"] if mesh else 1
    batch, part = probs.shape[0], probs.shape[1] // parts
    padded = part + -part % DRAW_BLOCK
    probs_BPU = jnp.pad(probs.reshape(batch, parts, part), ((0, 0), (0, 0), (0, padded - part)))
    blocks_BNC = probs_BPU.reshape(batch, -1, DRAW_BLOCK)
    shares_BN = constrain(blocks_BNC.sum(axis=-1), (None, None), mesh)
    edges_BN = jax.lax.cummax(jnp.cumsum(shares_BN, axis=-1), axis=1)
    left_B1 = shares_of(keys, positions)[:, None] * edges_BN[:, -1:]
    block_B1 = jnp.sum(edges_BN <= left_B1, axis=-1, keepdims=True)
    # Sums round differently in another order, so what is left may be a last digit below 0.
    left_B1 -= jnp.take_along_axis(edges_BN - shares_BN, block_B1, axis=-1)
    left_B1 = jnp.maximum(left_B1, 0.0)
    block_BC = jnp.take_along_axis(blocks_BNC, block_B1[..., None], axis=1)[:, 0]
    inside_B = jnp.sum(jnp.cumsum(block_BC, axis=-1) <= left_B1, axis=-1)
    rounded_B = inside_B == DRAW_BLOCK  # ... or a last digit above the block's sum
    inside_B = jnp.where(rounded_B, jnp.argmax(block_BC, axis=-1), inside_B)
    place_B = block_B1[:, 0] * DRAW_BLOCK + inside_B
    return place_B - place_B // padded * (padded - part)
