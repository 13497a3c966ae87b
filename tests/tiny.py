"""Small real parts and fakes that several tests share."""

import contextlib
import functools
import logging
import random
import re
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from configs.grpo_tcr import get_config
from demyrl.model.config import ModelConfig
from demyrl.model.transformer import map_table
from demyrl.rollout.agent import Agent, AgentConfig
from demyrl.rollout.episode import EpisodeConfig
from demyrl.rollout.sampler import Sampler, SamplerConfig
from demyrl.text.chat import Chat
from demyrl.text.tokenizer import load_tokenizer
from demyrl.tools.interpreter import SCHEMA
from demyrl.types import Problem, ToolResult

MODEL = ModelConfig(
    vocab=768,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    feed_forward=48,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    tied_embeddings=True,
    max_positions=0,
    dtype="float32",
)


@functools.cache
def chat() -> Chat:
    return Chat(load_tokenizer("builtin:tiny"), [SCHEMA])


def drawn_params(model: ModelConfig, seed: int = 0):
    """Weights at the scales of the table, drawn without compiling anything."""
    rng = np.random.default_rng(seed)

    def draw(row):
        noise = np.ones(row.shape) if row.scale is None else row.scale * rng.normal(size=row.shape)
        return jnp.asarray(noise, jnp.float32)

    return map_table(draw, model)


@functools.cache
def params(seed: int = 0):
    return drawn_params(MODEL, seed)


@contextlib.contextmanager
def compilations():
    """The list of programs that JAX compiles in the block, by name."""
    found, handler = [], logging.Handler()

    def note(record):
        found.extend(re.findall(r"Compiling jit\(([^)]*)\)", record.getMessage()))

    handler.emit = note
    logging.getLogger("jax").addHandler(handler)
    try:
        with jax.log_compiles():
            yield found
    finally:
        logging.getLogger("jax").removeHandler(handler)


class FakeTools:
    """Answers every call with its own code reversed, `slow_s` later at random."""

    schemas = (SCHEMA,)
    isolation = "fake"

    def __init__(self, slow_s: float = 0.0, seed: int = 0, status: str = "ok"):
        self.slow_s, self.random, self.status = slow_s, random.Random(seed), status
        self.calls = []

    def submit(self, call):
        self.calls.append(call)
        future: Future = Future()
        result = ToolResult(self.status, str(call.arguments.get("code"))[::-1], 0.0)
        if not self.slow_s:
            future.set_result(result)
        else:
            wait_s = self.random.random() * self.slow_s
            threading.Timer(wait_s, future.set_result, [result]).start()
        return future


def problem(number: int, domain: str = "math") -> Problem:
    return Problem(f"p{number}", "made", domain, f"What is {number}+{number}?", "4", "number")


LIMITS = EpisodeConfig(context=128, turn_tokens=24, turns=3, calls=3, output_tokens=16)


def make_agent(
    slots=4,
    decode_steps=4,
    samples=3,
    early_return=0.75,
    tools=None,
    limits=LIMITS,
    weights=None,
    temperature=1.0,
    sampler_class=Sampler,
    model=MODEL,
    mesh=None,
) -> Agent:
    shapes = SamplerConfig(
        slots=slots,
        context=limits.context,
        decode_steps=decode_steps,
        extend_rows=4,
        extend_lengths=(16, 64),
        temperature=temperature,
    )
    sampler = sampler_class(model, shapes, chat().end_tokens, mesh)
    sampler.load(params() if weights is None else weights)
    return Agent(sampler, chat(), tools or FakeTools(), AgentConfig(samples, early_return), limits)


class ScriptedSampler(Sampler):
    """A sampler whose policy says what `script` tells it: a text for each turn of a row.

    The model still fills the cache; only the sampled tokens are replaced, so that calls happen
    with random weights. `script(keys, turn)` gives the tokens of a turn, its end token included.
    """

    def __init__(self, model, config, end_tokens, mesh=None):
        super().__init__(model, config, end_tokens, mesh)
        self.fed: dict[int, list[int]] = {}
        self.said: dict[tuple, int] = {}

    script = staticmethod(lambda key, turn: [])

    def load(self, params):
        super().load(params)
        self.fed, self.said = {}, {}

    def copy(self, pairs):
        super().copy(pairs)
        for source, target in pairs:
            self.fed[target] = list(self.fed[source])

    def extend(self, feeds, lengths=()):
        super().extend(feeds, lengths)
        for feed in feeds:
            self.fed[feed.row] = self.fed.get(feed.row, [])[: feed.start] + list(feed.tokens)

    def decode(self, last, lengths, budgets, keys, enough):
        chunk = super().decode(last, lengths, np.minimum(budgets, 0), keys, enough)
        counts, ended = np.zeros(len(last), np.int32), np.zeros(len(last), bool)
        tokens = np.zeros((len(last), self.config.decode_steps), np.int32)
        for row in np.flatnonzero(budgets):
            key = tuple(keys[row].tolist())
            turn, place = self.said.get(key, (0, 0))
            text = self.script(key, turn)[place:]
            n = min(len(text), budgets[row], self.config.decode_steps)
            tokens[row, :n] = text[:n]
            counts[row], ended[row] = n, n > 0 and text[n - 1] in self.end_tokens
            fed = self.fed.get(row, [])[: lengths[row]]
            self.fed[row] = fed + [int(last[row])] + [int(t) for t in text[: n - 1]]
            self.said[key] = (turn + 1, 0) if ended[row] else (turn, place + n)
        return chunk.replace(tokens=tokens, counts=counts, ended=ended)


SHRUNK = {  # of configs/grpo_tcr.py:tiny, to what runs every stage in seconds
    "collect.count": 64,
    "sft.rows_per_step": 8,
    "sft.max_steps": 8,
    "sft.cooldown_steps": 4,
    "sft.probe_every": 2,
    "sft.probe_count": 4,
    "sft.save_every": 2,
    "sft.pack.rows": 8,
    "rollout.slots": 8,
    "rollout.context": 160,
    "rollout.turn_tokens": 64,
    "rollout.output_tokens": 16,
    "rollout.decode_steps": 8,
    "rollout.extend_rows": 4,
    "rollout.extend_lengths": (32,),
    "reward.max_len": 96,
    "reward.cache_len": 96,  # so that lengths alone make rewards differ
    "train.steps": 3,
    "train.problems": 4,
    "train.samples": 4,
    "train.updates": 2,
    "train.save_every": 1,
    "train.pack.rows": 4,
    "train.pack.row_tokens": 160,
}


def shrunk_config(**changes):
    """The tiny config made smaller still; `changes` are dotted keys with `__` for the dot."""
    config = get_config("tiny")
    config.update_from_flattened_dict(SHRUNK)
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config
