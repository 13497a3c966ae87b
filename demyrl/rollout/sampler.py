"""Sampling on the device: `extend` feeds tokens to a cache row, `decode` samples many rows at once.

A row of the cache holds every token of its trajectory but the last, which is what the next decode
step feeds. So neither a prompt nor a tool result needs the head, and both enter through `extend`.
Layers are unrolled and the cache is donated: inside a scan a stacked cache would be copied at every
step. The log-prob recorded for a token is log-softmax of logits / temperature in float32 over the
whole vocabulary, which is what the loss computes as well.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from demyrl.arrays import Chunk, KVCache
from demyrl.model.attention import attend
from demyrl.model.config import ModelConfig
from demyrl.model.kvcache import copy_rows, empty_cache, write
from demyrl.model.sharding import rows_sharding
from demyrl.model.transformer import (
    Params,
    close_block,
    embed,
    output_embedding,
    qkv,
    rms_norm,
)

DRAW_BLOCK = 128  # tokens


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Shapes of the sampler's two programs; each combination compiles once."""

    slots: int  # cache rows, each one trajectory in progress
    context: int  # tokens a row can hold
    decode_steps: int  # most tokens a row gets in one visit to the device
    extend_rows: int  # rows that one extend feeds
    extend_lengths: tuple[int, ...]  # ladder of chunk lengths, ascending
    temperature: float  # 0 is greedy: for evaluation only

    def __post_init__(self) -> None:
        if list(self.extend_lengths) != sorted(set(self.extend_lengths)) or not self.extend_lengths:
            raise ValueError(
                f"rollout.extend_lengths is {self.extend_lengths}: give at least one length, in "
                "ascending order."
            )
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: it can't be negative.")


@dataclasses.dataclass(frozen=True)
class Feed:
    """Tokens to append to one row of the cache, from slot `start` on."""

    row: int
    start: int
    tokens: Sequence[int]


@functools.partial(jax.jit, static_argnames="config")
def for_sampling(params: Params, config: ModelConfig) -> Params:
    """The sampler's copy of the weights: compute dtype, one dict a layer instead of stacks."""
    cast = jax.tree.map(lambda p: p.astype(config.dtype), params)
    layers = [jax.tree.map(lambda p, i=i: p[i], cast["layers"]) for i in range(config.layers)]
    return {**cast, "layers": layers}


def forward_cached(
    weights: Params,
    cache: KVCache,
    rows: Int[Array, " R"] | None,
    tokens: Int[Array, "R C"],
    positions: Int[Array, "R C"],
    real: Bool[Array, "R C"],
    config: ModelConfig,
) -> tuple[KVCache, Float[Array, "R C D"]]:
    """One pass of C new tokens in R rows: the cache with them in it, and their hidden states.

    Without `rows` these are all rows of the cache in order, which need not be gathered then.
    """
    capacity = cache.keys[0].shape[2]
    whole, rows = rows is None, jnp.arange(tokens.shape[0]) if rows is None else rows
    slots_RC = jnp.where(real, positions, capacity)  # out of range: the write is dropped
    visible_RCS = jnp.arange(capacity) <= positions[..., None]
    x_RCD = embed(weights, tokens, config)
    keys, values = [], []
    for i, layer in enumerate(weights["layers"]):
        q, k, v = qkv(layer, x_RCD, positions, config)
        keys.append(write(cache.keys[i], k, rows, slots_RC))
        values.append(write(cache.values[i], v, rows, slots_RC))
        seen_k, seen_v = (keys[i], values[i]) if whole else (keys[i][rows], values[i][rows])
        x_RCD = close_block(layer, x_RCD, attend(q, seen_k, seen_v, visible_RCS), config)
    hidden = rms_norm(x_RCD, weights["final_norm"], config.norm_eps)
    return KVCache(keys=tuple(keys), values=tuple(values)), hidden


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def extend(
    weights: Params,
    cache: KVCache,
    rows: Int[Array, " R"],
    tokens: Int[Array, "R C"],
    starts: Int[Array, " R"],
    counts: Int[Array, " R"],
    config: ModelConfig,
) -> KVCache:
    """The cache with tokens[r, :counts[r]] appended to row rows[r] from slot starts[r] on."""
    steps = jnp.arange(tokens.shape[1])
    positions = starts[:, None] + steps
    real = steps < counts[:, None]
    return forward_cached(weights, cache, rows, tokens, positions, real, config)[0]


def sample_tokens(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    positions: Int[Array, " B"],
    temperature: float,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One token a row and its log-prob; the draw depends only on the row's key and position."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32) / (temperature or 1.0))
    if temperature:
        tokens = draw_tokens(jnp.exp(logprobs), keys, positions)
    else:
        tokens = jnp.argmax(logprobs, axis=-1)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def shares_of(keys: UInt32[Array, "B 2"], positions: Int[Array, " B"]) -> Float[Array, " B"]:
    """A uniform number in [0, 1) for each row."""

    def uniform(key, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    return jax.vmap(uniform)(keys, positions)


def draw_tokens(
    probs: Float[Array, "B V"], keys: UInt32[Array, "B 2"], positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The token in whose share of [0, 1] one uniform number falls: first its block, then in it.

    Noise for every token of the vocabulary, as in the Gumbel trick, would take longer on a CPU than
    the head itself (see experiments/LOG.md). A token of probability 0 is never drawn.
    """
    blocks_BNC = jnp.pad(probs, ((0, 0), (0, -probs.shape[1] % DRAW_BLOCK))).reshape(
        probs.shape[0], -1, DRAW_BLOCK
    )
    shares_BN = blocks_BNC.sum(axis=-1)
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
    return block_B1[:, 0] * DRAW_BLOCK + inside_B


@functools.partial(
    jax.jit,
    static_argnames=("config", "steps", "end_tokens", "temperature"),
    donate_argnames="cache",
)
def decode(
    weights: Params,
    cache: KVCache,
    last: Int[Array, " B"],
    lengths: Int[Array, " B"],
    budgets: Int[Array, " B"],
    keys: UInt32[Array, "B 2"],
    enough: Int[Array, ""],
    *,
    config: ModelConfig,
    steps: int,
    end_tokens: tuple[int, ...],
    temperature: float,
) -> tuple[KVCache, Chunk]:
    """Up to min(steps, budgets[b]) tokens for each row, sampled after `last[b]` at slot lengths[b].

    A row stops after an end token; the loop returns when fewer than `enough` rows are still going.
    Rows with budget 0 are left as they are.
    """
    batch, rows = last.shape[0], jnp.arange(last.shape[0])
    ends = jnp.asarray(end_tokens)
    head = output_embedding(weights).astype(config.dtype)

    def going(chunk: Chunk) -> Bool[Array, " B"]:
        return (chunk.counts < budgets) & ~chunk.ended

    def proceed(carry):
        _, _, chunk = carry
        return (chunk.steps < steps) & (jnp.sum(going(chunk)) >= enough)

    def step(carry):
        cache, last, chunk = carry
        active = going(chunk)
        positions = lengths + chunk.counts
        cache, hidden = forward_cached(
            weights, cache, None, last[:, None], positions[:, None], active[:, None], config
        )
        logits = jnp.einsum("bd,vd->bv", hidden[:, 0], head, preferred_element_type=jnp.float32)
        tokens, logprobs = sample_tokens(logits, keys, positions, temperature)
        column = jnp.where(active, chunk.counts, steps)
        chunk = Chunk(
            tokens=chunk.tokens.at[rows, column].set(tokens, mode="drop"),
            logprobs=chunk.logprobs.at[rows, column].set(logprobs, mode="drop"),
            counts=chunk.counts + active,
            ended=chunk.ended | (active & jnp.isin(tokens, ends)),
            steps=chunk.steps + 1,
        )
        return cache, jnp.where(active, tokens, last), chunk

    chunk = Chunk(
        tokens=jnp.zeros((batch, steps), jnp.int32),
        logprobs=jnp.zeros((batch, steps), jnp.float32),
        counts=jnp.zeros(batch, jnp.int32),
        ended=jnp.zeros(batch, bool),
        steps=jnp.int32(0),
    )
    cache, _, chunk = jax.lax.while_loop(proceed, step, (cache, last, chunk))
    return cache, chunk


@jax.jit
def episode_keys(
    root: Array, step: Int[Array, ""], problems: UInt32[Array, " n"], samples: Int[Array, " n"]
) -> UInt32[Array, "n 2"]:
    """One key an episode, from what names it: root key, step, problem, sample."""
    at_step = jax.random.fold_in(root, step)

    def key(problem, sample):
        return jax.random.fold_in(jax.random.fold_in(at_step, problem), sample)

    return jax.random.key_data(jax.vmap(key)(problems, samples))


copy_cache_rows = jax.jit(copy_rows, donate_argnames="cache")


class Sampler:
    """A cache, the weights that fill it, and the programs that run over both.

    The only state is the cache: what its rows hold is the caller's bookkeeping.
    """

    def __init__(self, model: ModelConfig, config: SamplerConfig, end_tokens: tuple[int, ...]):
        self.model, self.config, self.end_tokens = model, config, end_tokens
        self.cache = empty_cache(model, config.slots, config.context)
        self.weights: Params | None = None

    def load(self, params: Params) -> None:
        """Samples with these weights from now on; what the cache held is void.

        The first weights say where the cache lives: its rows are spread over their mesh. An array
        that JAX may move, as it may a new one, would make the second call compile again.
        """
        if self.weights is None:
            place = params["embedding"].sharding
            spread = isinstance(place, jax.sharding.NamedSharding)
            self.cache = jax.device_put(self.cache, rows_sharding(place.mesh) if spread else place)
        self.weights = for_sampling(params, self.model)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies row `source` over row `target` for each pair, in order."""
        for some in batched(pairs, self.config.slots):
            sources, targets = np.zeros((2, self.config.slots), np.int32)
            sources[: len(some)], targets[: len(some)] = zip(*some, strict=True)
            self.cache = copy_cache_rows(self.cache, sources, targets, np.int32(len(some)))

    def extend(self, feeds: Sequence[Feed]) -> None:
        """Appends each feed's tokens to its row.

        Raises ValueError when a feed does not fit: a write past the end would be lost silently.
        """
        longest = self.config.extend_lengths[-1]
        for feed in feeds:
            if feed.start + len(feed.tokens) > self.config.context:
                raise ValueError(
                    f"row {feed.row} holds {feed.start} tokens and is fed {len(feed.tokens)} more, "
                    f"but has {self.config.context} slots."
                )
        while feeds:
            heads = [Feed(f.row, f.start, f.tokens[:longest]) for f in feeds]
            heads.sort(key=lambda feed: len(feed.tokens))
            for some in batched(heads, self.config.extend_rows):
                self._extend(some)
            rest = [Feed(f.row, f.start + longest, f.tokens[longest:]) for f in feeds]
            feeds = [feed for feed in rest if feed.tokens]

    def _extend(self, feeds: Sequence[Feed]) -> None:
        wanted = max(len(feed.tokens) for feed in feeds)
        length = next(c for c in self.config.extend_lengths if c >= wanted)
        tokens = np.zeros((self.config.extend_rows, length), np.int32)
        starts, counts = np.zeros((2, self.config.extend_rows), np.int32)
        rows = np.full(self.config.extend_rows, self.config.slots, np.int32)
        for i, feed in enumerate(feeds):
            rows[i], starts[i], counts[i] = feed.row, feed.start, len(feed.tokens)
            tokens[i, : counts[i]] = feed.tokens
        self.cache = extend(
            self.weights, self.cache, rows, tokens, starts, counts, config=self.model
        )

    def decode(
        self,
        last: Int[np.ndarray, " B"],
        lengths: Int[np.ndarray, " B"],
        budgets: Int[np.ndarray, " B"],
        keys: UInt32[np.ndarray, "B 2"],
        enough: int,
    ) -> Chunk:
        """The next tokens of every row with a budget, on the host."""
        assert np.all(lengths + budgets <= self.config.context), "a budget leads past the cache"
        self.cache, chunk = decode(
            self.weights, self.cache, last, lengths, budgets, keys, np.int32(enough),
            config=self.model, steps=self.config.decode_steps, end_tokens=self.end_tokens,
            temperature=self.config.temperature,
        )  # fmt: skip
        return jax.device_get(chunk)


def batched(items: Sequence, size: int) -> list[Sequence]:
    """Consecutive pieces of up to `size` items."""
    return [items[i : i + size] for i in range(0, len(items), size)]
