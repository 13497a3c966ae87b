"""The head against the plain formula, which makes all logits at once: a part of train_step."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from demyrl.learn.head import token_logprobs
from demyrl.model.config import ModelConfig
from experiments.bench.measure import compile_program, in_turns, temporary_bytes, times_faster

PROMPT = 0.25  # of a row is not needed

Params = dict[str, Float[Array, "V D"]]


def plain_logprobs(
    params: Params,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    needed: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """What `token_logprobs` gives at temperature 1, from the logits of all tokens."""
    logits = jnp.matmul(hidden[:, :-1], params["embedding"].T, preferred_element_type=jnp.float32)
    every = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(needed, jnp.pad(chosen, ((0, 0), (1, 0))), 0.0)


def inputs(model: ModelConfig, rows: int, length: int) -> tuple[Any, ...]:
    """Weights, hidden states, tokens, and which of them are needed."""
    keys = jax.random.split(jax.random.key(0), 3)
    size = (model.vocab, model.width)
    params = {"embedding": (jax.random.normal(keys[0], size) * model.width**-0.5)}
    hidden = jax.random.normal(keys[1], (rows, length, model.width))
    tokens = jax.random.randint(keys[2], (rows, length), 0, model.vocab)
    needed = jnp.broadcast_to(jnp.arange(length) >= PROMPT * length, (rows, length))
    return *jax.tree.map(lambda x: x.astype(model.dtype), (params, hidden)), tokens, needed


def both(model: ModelConfig, rows: int, length: int, chunk: int) -> dict[str, Any]:
    """The compiled value and gradient of the head and of the plain formula."""

    def ours(params, hidden, tokens, needed):
        return jnp.sum(token_logprobs(params, hidden, tokens, needed, 1.0, chunk)[0])

    def plain(params, hidden, tokens, needed):
        return jnp.sum(plain_logprobs(params, hidden, tokens, needed))

    given = jax.eval_shape(lambda: inputs(model, rows, length))
    return {
        each.__name__: compile_program(jax.jit(jax.value_and_grad(each, (0, 1))), *given)[0]
        for each in (ours, plain)
    }


def most_rows(rows: int, plain_bytes: int | None) -> int:
    """Rows, or as many of them as leave half of the free memory alone; at least one."""
    if not plain_bytes or jax.default_backend() != "cpu":
        return rows
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(rows, int(rows * free / 2 / plain_bytes)))


def head_numbers(
    model: ModelConfig, shape: tuple[int, int], chunk: int, seconds: float
) -> dict[str, Any]:
    """Memory for all rows, as compiled; seconds for as many as there is room for."""
    rows, length = shape
    programs = both(model, rows, length, chunk)
    needs = {name: temporary_bytes(program) for name, program in programs.items()}
    timed = most_rows(rows, needs["plain"])
    if timed < rows:
        programs = both(model, timed, length, chunk)
    given = inputs(model, timed, length)

    def call(program: Any) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(program(*given))

    taken = in_turns({name: call(program) for name, program in programs.items()}, seconds)
    return {
        "seconds": float(np.median(taken["ours"].seconds)),
        "plain_seconds": float(np.median(taken["plain"].seconds)),
        "over_plain": times_faster(taken["ours"], taken["plain"]),
        "timed_rows": timed,
        "temporary_bytes": needs["ours"],
        "plain_temporary_bytes": needs["plain"],
        "share_of_plain_memory": needs["ours"] and needs["ours"] / needs["plain"],
    }
