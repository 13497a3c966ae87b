"""The only path from hidden states to log-probs and entropy, for SFT, RL and evaluation.

Chunked over tokens and rematerialized, so that no `[B, T, V]` array exists, forward or backward:
one row of 32k tokens in float32 logits at Qwen's vocabulary would be 20 GB.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from demyrl.model.transformer import Params, output_embedding


def token_logprobs(
    params: Params,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    temperature: float,
    chunk: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of each token, and entropy of the distribution it was drawn from, in nats.

    Index t describes tokens[:, t], predicted by hidden[:, t - 1]: the shift happens here and
    nowhere else. Index 0, which nothing predicts, holds zeros. `chunk` is how many tokens'
    logits exist at a time. No gradient flows through the entropy.
    """
    batch, length, width = hidden.shape
    count = batch * (length - 1)
    chunk = min(chunk, count)
    pad = -count % chunk
    before = jnp.pad(hidden[:, :-1].reshape(count, width), ((0, pad), (0, 0)))
    target = jnp.pad(tokens[:, 1:].reshape(count), (0, pad))
    matrix = output_embedding(params).astype(hidden.dtype)

    @jax.checkpoint
    def of_chunk(pair):
        hidden_CD, tokens_C = pair
        logits_CV = jnp.einsum(
            "cd,vd->cv", hidden_CD, matrix, preferred_element_type=jnp.float32
        ) * (1 / temperature)
        log_z_C = jax.nn.logsumexp(logits_CV, axis=-1)
        chosen_C = jnp.take_along_axis(logits_CV, tokens_C[:, None], axis=-1)[:, 0]
        fixed_CV = jax.lax.stop_gradient(logits_CV - log_z_C[:, None])
        return chosen_C - log_z_C, -jnp.sum(jnp.exp(fixed_CV) * fixed_CV, axis=-1)

    pieces = (before.reshape(-1, chunk, width), target.reshape(-1, chunk))
    logprobs, entropy = jax.lax.map(of_chunk, pieces)

    def laid_out(flat: Float[Array, "I C"]) -> Float[Array, "B T"]:
        rows = flat.reshape(-1)[:count].reshape(batch, length - 1)
        return jnp.pad(rows, ((0, 0), (1, 0)))

    return laid_out(logprobs), laid_out(entropy)
