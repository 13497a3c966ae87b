"""The programs of sampling, each compiled once for a shape: weights, extend, decode, copy.

A row of the cache holds every token of its trajectory but the last, which is what the next decode
step feeds. So neither a prompt nor a tool result needs the head, and both enter through `extend`.
Layers are unrolled and the cache is donated: inside a scan a stacked cache would be copied at every
step. The log-prob recorded for a token is log-softmax of logits / temperature in float32 over the
whole vocabulary, which is what the loss computes as well.

On a mesh, each data shard runs over its own rows of the cache and no other, so an index of a row is
one within the shard. Heads, feed forward and vocabulary are spread over the other two axes, by the
compiler.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from demyrl.arrays import Chunk, KVCache
from demyrl.model.attention import attend
from demyrl.model.config import ModelConfig
from demyrl.model.kvcache import CACHE_AXES, copy_rows, empty_cache, write
from demyrl.model.mesh import HEADS_SPREAD, constrain, spec
from demyrl.model.transformer import (
    Params,
    close_block,
    embed,
    output_embedding,
    parameter_table,
    qkv,
    rms_norm,
)
from demyrl.rollout.draw import sample_tokens

ROWS, ALL = PartitionSpec("data"), PartitionSpec()
# Between training and sampling: what is spread over `sequence` has moved from width to heads, so
# that what remains is one gather over `data`.
HALFWAY = HEADS_SPREAD | {"width": ("data",)}


def by_shard(function: Callable, mesh: Mesh, ins: Any, outs: Any) -> Callable:
    """The function, run by each data shard on its part of what is spread by ROWS."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=ins, out_specs=outs, axis_names={"data"}, check_vma=False
    )


def placed(cache: KVCache, mesh: Mesh) -> KVCache:
    """The cache, where it must lie for the next program to take it over."""
    return jax.lax.with_sharding_constraint(
        cache, NamedSharding(mesh, spec(CACHE_AXES, HEADS_SPREAD))
    )


@functools.partial(jax.jit, static_argnames=("config", "rows", "slots", "mesh"))
def new_cache(*, config: ModelConfig, rows: int, slots: int, mesh: Mesh) -> KVCache:
    """An empty cache on the mesh, as the other programs leave one behind.

    A place of the same meaning, but written otherwise, would make their second call compile again.
    """
    return placed(empty_cache(config, rows, slots), mesh)


def for_sampling(params: Params, config: ModelConfig, mesh: Mesh) -> Params:
    """The sampler's copy of the weights: compute dtype, one dict a layer instead of stacks.

    A layer at a time, so that only one is in between two places.
    """
    outside = {name: weight for name, weight in params.items() if name != "layers"}
    layers = [
        layer_for_sampling(params["layers"], np.int32(i), config=config, mesh=mesh)
        for i in range(config.layers)
    ]
    return rest_for_sampling(outside, config=config, mesh=mesh) | {"layers": layers}


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def layer_for_sampling(
    stacks: Params, layer: Int[Array, ""], *, config: ModelConfig, mesh: Mesh
) -> Params:
    """One layer's weights out of the stacks of all."""
    table = parameter_table(config)["layers"]
    slices = {n: jax.lax.dynamic_index_in_dim(p, layer, keepdims=False) for n, p in stacks.items()}
    return {n: moved(w, table[n].axes[1:], config, mesh) for n, w in slices.items()}


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def rest_for_sampling(outside: Params, *, config: ModelConfig, mesh: Mesh) -> Params:
    """The weights that are outside of layers."""
    table = parameter_table(config)
    return {name: moved(w, table[name].axes, config, mesh) for name, w in outside.items()}


def moved(weight: Array, axes: tuple[str | None, ...], config: ModelConfig, mesh: Mesh) -> Array:
    """A weight from where it is trained to where it samples.

    It is cast where it lies, so nothing travels in a higher precision.
    """
    weight = constrain(weight.astype(config.dtype), axes, mesh)
    weight = constrain(weight, axes, mesh, HALFWAY)
    return constrain(weight, axes, mesh, HEADS_SPREAD)


def forward_cached(
    weights: Params,
    cache: KVCache,
    rows: Int[Array, " R"] | None,
    tokens: Int[Array, "R C"],
    starts: Int[Array, " R"],
    counts: Int[Array, " R"],
    config: ModelConfig,
) -> tuple[KVCache, Float[Array, "R C D"]]:
    """One pass of new tokens in R rows: the cache with the first counts[r] of them in it, and the
    hidden states of all.

    Without `rows` these are all rows of the cache in order, which need not be gathered then.
    """
    whole, rows = rows is None, jnp.arange(tokens.shape[0]) if rows is None else rows
    positions_RC = starts[:, None] + jnp.arange(tokens.shape[1])
    visible_RCS = jnp.arange(cache.keys[0].shape[2]) <= positions_RC[..., None]
    x_RCD = embed(weights, tokens, config)
    layers = []
    for layer, *cached in zip(weights["layers"], cache.keys, cache.values, strict=True):
        q, k, v = qkv(layer, x_RCD, positions_RC, config)
        layers.append(write(tuple(cached), (k, v), rows, starts, counts))
        seen_k, seen_v = layers[-1] if whole else (of_rows(x, rows) for x in layers[-1])
        x_RCD = close_block(layer, x_RCD, attend(q, seen_k, seen_v, visible_RCS), config)
    keys, values = zip(*layers, strict=True)
    return KVCache(keys, values), rms_norm(x_RCD, weights["final_norm"], config.norm_eps)


def of_rows(cached: Float[Array, "B K S H"], rows: Int[Array, " R"]) -> Float[Array, "R K S H"]:
    """Some rows of the cache; the last one for an index past it."""
    return cached.at[rows].get(mode="clip")


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="cache")
def extend(
    weights: Params,
    cache: KVCache,
    rows: Int[Array, " R"],
    tokens: Int[Array, "R C"],
    starts: Int[Array, " R"],
    counts: Int[Array, " R"],
    *,
    config: ModelConfig,
    mesh: Mesh,
) -> KVCache:
    """The cache with tokens[r, :counts[r]] appended to row rows[r] from slot starts[r] on.

    What is fed is spread over the data shards, and so are rows: an index past the last of a shard's
    rows feeds none.
    """

    def own(weights, cache, rows, tokens, starts, counts):
        return forward_cached(weights, cache, rows, tokens, starts, counts, config)[0]

    run = by_shard(own, mesh, (ALL, ROWS, ROWS, ROWS, ROWS, ROWS), ROWS)
    return placed(run(weights, cache, rows, tokens, starts, counts), mesh)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="cache")
def copy_cache_rows(
    cache: KVCache,
    sources: Int[Array, " B"],
    targets: Int[Array, " B"],
    counts: Int[Array, " shards"],
    *,
    mesh: Mesh,
) -> KVCache:
    """The cache with rows copied within each data shard: the first counts[s] pairs of shard s."""

    def own(cache, sources, targets, counts):
        return copy_rows(cache, sources, targets, counts[0])

    run = by_shard(own, mesh, (ROWS, ROWS, ROWS, ROWS), ROWS)
    return placed(run(cache, sources, targets, counts), mesh)


@functools.partial(
    jax.jit,
    static_argnames=("config", "steps", "end_tokens", "temperature", "mesh"),
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
    mesh: Mesh,
) -> tuple[KVCache, Chunk]:
    """Up to min(steps, budgets[b]) tokens for each row, sampled after `last[b]` at slot lengths[b].

    A row stops after an end token; the loop returns when fewer than `enough` rows of all shards are
    still going. Rows with budget 0 are left as they are.
    """
    own = functools.partial(
        decode_own,
        config=config,
        steps=steps,
        ends=jnp.asarray(end_tokens),
        temperature=temperature,
        mesh=mesh,
    )
    chunk = Chunk(tokens=ROWS, logprobs=ROWS, counts=ROWS, ended=ROWS, steps=ALL)
    run = by_shard(own, mesh, (ALL, ROWS, ROWS, ROWS, ROWS, ROWS, ALL), (ROWS, chunk))
    cache, chunk = run(weights, cache, last, lengths, budgets, keys, enough)
    return placed(cache, mesh), chunk


def decode_own(
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
    ends: Int[Array, " ends"],
    temperature: float,
    mesh: Mesh,
) -> tuple[KVCache, Chunk]:
    """What `decode` does for the rows of one data shard, in step with the others."""
    rows = jnp.arange(last.shape[0])
    head = output_embedding(weights)
    exact = jnp.promote_types(head.dtype, jnp.float32)

    def going(chunk: Chunk) -> Bool[Array, " B"]:
        return (chunk.counts < budgets) & ~chunk.ended

    def everywhere(chunk: Chunk) -> Int[Array, ""]:
        return jax.lax.psum(jnp.sum(going(chunk)), "data")

    def proceed(carry):
        _, _, chunk, busy = carry
        return (chunk.steps < steps) & (busy >= enough)

    def step(carry):
        cache, last, chunk, _ = carry
        active = going(chunk)
        positions = lengths + chunk.counts
        cache, hidden = forward_cached(
            weights, cache, None, last[:, None], positions, active.astype(jnp.int32), config
        )
        logits = jnp.einsum("bd,vd->bv", hidden[:, 0], head, preferred_element_type=exact)
        tokens, logprobs = sample_tokens(logits, keys, positions, temperature, mesh)
        column = jnp.where(active, chunk.counts, steps)
        chunk = Chunk(
            tokens=chunk.tokens.at[rows, column].set(tokens, mode="drop"),
            logprobs=chunk.logprobs.at[rows, column].set(logprobs, mode="drop"),
            counts=chunk.counts + active,
            ended=chunk.ended | (active & jnp.isin(tokens, ends)),
            steps=chunk.steps + 1,
        )
        return cache, jnp.where(active, tokens, last), chunk, everywhere(chunk)

    chunk = empty_chunk(len(rows), steps)
    first = (cache, last, chunk, everywhere(chunk))
    cache, _, chunk, _ = jax.lax.while_loop(proceed, step, first)
    return cache, chunk


def empty_chunk(rows: int, steps: int) -> Chunk:
    """What has been sampled before the first step."""
    return Chunk(
        tokens=jnp.zeros((rows, steps), jnp.int32),
        logprobs=jnp.zeros((rows, steps), jnp.float32),
        counts=jnp.zeros(rows, jnp.int32),
        ended=jnp.zeros(rows, bool),
        steps=jnp.int32(0),
    )
