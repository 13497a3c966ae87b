"""How fast the sampler makes tokens, and takes in those that it did not make.

    python -m experiments.bench.decode --seconds 5
    python -m experiments.bench.decode --source=/path/to/checkpoint --batches=1,8,32,64

Without a source the weights are random and the shapes those of the config: its slots, its chunks,
its turns at the end of its context. With one, prompts of 128 tokens enter in one chunk, and up to
64 tokens come after them. Twice as many rows as slots are decoded, without tools: a row that has
its tokens makes room for the next. Keys:

  batches   by the number of slots, --batches:
    tokens_per_s     decoded; "uniform": every row gets turn_tokens; "ragged": 1 to turn_tokens,
                     drawn evenly
    slot_use         share of slot-steps of the decode loop that made a token, for both
    step_ms          milliseconds of a decode step, host included, for both
    extend_tokens_per_s   fed to every slot in full chunks (prompts, tool results), by chunk length
    compile_s        seconds to trace and compile each program, by name: what its first call took
                     more than its second
    extend_rows      rows that go through the model together in an extend
  load_s             seconds to load the weights, compilation included; null when they are random
  load_peak_host_bytes   host memory at the highest point of that above what it was before; on a CPU
                     less the weights, which are host memory there
  peak_rss_bytes     most memory of the process
  peak_device_bytes  most memory of the accelerator; null on a CPU
  source, parameters, dtype   the weights, and the data type of computations and cache
  context, decode_steps, turn_tokens   shapes that all batches share; a prompt is the context less
                     turn_tokens long
"""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

if not __package__:  # run as a file: its neighbours are found from the root of the repository
    sys.path.insert(0, str(Path(__file__).parents[2]))

from demyrl import recipe
from demyrl.model.mesh import divisible, make_mesh
from demyrl.model.transformer import Params, parameter_count
from demyrl.rollout.sampler import Feed, Sampler, SamplerConfig
from demyrl.weights import starting_params
from experiments.bench.load import forget_peak, memory
from experiments.bench.measure import (
    config_of,
    first_call_seconds,
    parser_of,
    peak_device_bytes,
    peak_rss_bytes,
    print_line,
    repeat,
)

NEVER = (-1,)  # an end token that is not in the vocabulary
# Nothing is tokenized, but no config is read without a tokenizer.
RANDOM_WEIGHTS = ("--config.model.source=", "--config.tokenizer=builtin:tiny")
BATCHES, PROMPT, TOKENS = (1, 8, 32, 64), 128, 64  # with a source


@dataclasses.dataclass(frozen=True)
class Played:
    """What came of some rows."""

    tokens: int
    steps: int


def play(sampler: Sampler, wanted: Sequence[int], start: int, early_return: float) -> Played:
    """Decodes wanted[i] tokens after a prompt of `start` tokens for each i, in the slots."""
    slots, waiting = sampler.config.slots, list(wanted)
    left, lengths, last = np.zeros((3, slots), np.int32)
    keys = np.arange(2 * slots, dtype=np.uint32).reshape(slots, 2)
    tokens = steps = 0
    while waiting or left.any():
        for row in np.flatnonzero(left == 0)[: len(waiting)]:
            left[row], lengths[row] = waiting.pop(), start
        share = early_return if waiting else 0.0
        enough = max(1, int(share * np.count_nonzero(left)))
        chunk = sampler.decode(last, lengths, left, keys, enough)
        left, lengths = left - chunk.counts, lengths + chunk.counts
        tokens += int(chunk.counts.sum())
        steps += int(chunk.steps)
    return Played(tokens, steps)


def decode_numbers(
    sampler: Sampler, wanted: Sequence[int], start: int, early_return: float, seconds: float
) -> dict[str, float]:
    played, elapsed = repeat(lambda: play(sampler, wanted, start, early_return), seconds)
    tokens, steps = sum(p.tokens for p in played), sum(p.steps for p in played)
    return {
        "tokens_per_s": tokens / elapsed,
        "slot_use": tokens / (steps * sampler.config.slots),
        "step_ms": 1000 * elapsed / steps,
    }


def extend_slots(sampler: Sampler, length: int) -> int:
    """A full chunk for every slot: the tokens that were fed."""
    slots = sampler.config.slots
    sampler.extend([Feed(row, 0, [row % 7] * length) for row in range(slots)])
    jax.block_until_ready(sampler.cache)
    return slots * length


def extend_rate(sampler: Sampler, length: int, seconds: float) -> float:
    """Tokens a second when every slot gets a full chunk."""
    done, elapsed = repeat(lambda: extend_slots(sampler, length), seconds)
    return sum(done) / elapsed


def compile_seconds(sampler: Sampler) -> dict[str, float]:
    """Seconds for the decode program, and for an extend of each length."""
    none = np.zeros(sampler.config.slots, np.int32)
    keys = np.zeros((sampler.config.slots, 2), np.uint32)
    found = {"decode": first_call_seconds(lambda: sampler.decode(none, none, none, keys, 1))}
    for length in sampler.config.extend_lengths:
        found[f"extend_{length}"] = first_call_seconds(partial(extend_slots, sampler, length))
    return found


def batch_numbers(
    settings: recipe.Recipe,
    shapes: SamplerConfig,
    params: Params,
    mesh: Mesh,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The numbers of one batch size; prompts first, so that decoding finds them in the cache."""
    sampler = Sampler(settings.model, shapes, NEVER, mesh)
    sampler.load(params)
    compiled = compile_seconds(sampler)
    extended = {str(n): extend_rate(sampler, n, options.seconds) for n in shapes.extend_lengths}
    most, rows = options.tokens, 2 * shapes.slots
    ragged = np.random.default_rng(0).integers(1, most, rows, endpoint=True).tolist()
    start, early_return = shapes.context - most, settings.rollout.early_return
    found = {
        use: decode_numbers(sampler, wanted, start, early_return, options.seconds)
        for use, wanted in {"uniform": [most] * rows, "ragged": ragged}.items()
    }
    return {
        **{key: {use: found[use][key] for use in found} for key in found["uniform"]},
        "extend_tokens_per_s": extended,
        "compile_s": compiled,
        "extend_rows": shapes.extend_rows,
    }


def loaded(settings: recipe.Recipe, mesh: Mesh) -> tuple[Params, dict[str, Any]]:
    """The weights, and what it cost to load them."""
    numbers: dict[str, Any] = {"load_s": None, "load_peak_host_bytes": None}
    if not settings.source:
        return starting_params("", settings.model, mesh, settings.seed), numbers
    forget_peak()
    before, start = memory("VmRSS"), time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # where a run's step is told
        params = starting_params(settings.source, settings.model, mesh, settings.seed)
    jax.block_until_ready(params)
    numbers["load_s"] = time.perf_counter() - start
    on_host = jax.tree.leaves(params) if jax.default_backend() == "cpu" else []
    weights = sum(shard.data.nbytes for leaf in on_host for shard in leaf.addressable_shards)
    numbers["load_peak_host_bytes"] = memory("VmHWM") - before - weights
    return params, numbers


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, recipe.Recipe]:
    """The options, with what was not given filled in, and the settings."""
    parser = parser_of(__doc__)
    parser.add_argument("--source", default="", help="a checkpoint folder, workdir or builtin:tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the computations")
    parser.add_argument("--batches", type=counts, help="rows decoded at a time, as 1,8,32")
    parser.add_argument("--prompt", type=count, help="tokens of a prompt, fed in one chunk")
    parser.add_argument("--tokens", type=count, help="most tokens made after it")
    options, rest = parser.parse_known_args(argv)
    words = [f"--config.model.source={options.source}"] if options.source else RANDOM_WEIGHTS
    words = [*words, *([f"--config.model.dtype={options.dtype}"] if options.dtype else []), *rest]
    settings = recipe.on_device(recipe.read(config_of(parser, options, words)))
    slots, turn = settings.rollout.sampler.slots, settings.rollout.episode.turn_tokens
    real = bool(settings.source)
    options.batches = options.batches or (BATCHES if real else (slots,))
    options.prompt = options.prompt or (PROMPT if real else None)
    options.tokens = options.tokens or (TOKENS if real else turn)
    try:
        for batch in options.batches:
            divisible(settings.model, settings.mesh, {"--batches": ("rows", batch)})
    except ValueError as error:
        parser.error(str(error))
    return options, settings


def shapes_of(options: argparse.Namespace, settings: recipe.Recipe) -> list[SamplerConfig]:
    """One sampler a batch size; without a prompt length, the config's context and chunks."""
    base, episode = settings.rollout.sampler, settings.rollout.episode
    prompt = options.prompt or episode.context - episode.turn_tokens
    return [
        dataclasses.replace(
            base,
            slots=batch,
            context=prompt + options.tokens,
            extend_rows=min(batch, base.extend_rows),
            extend_lengths=(prompt,) if options.prompt else base.extend_lengths,
        )
        for batch in options.batches
    ]


def main(argv: Sequence[str] | None = None) -> None:
    options, settings = read(argv)
    shapes = shapes_of(options, settings)
    mesh = make_mesh(settings.mesh)
    params, loading = loaded(settings, mesh)
    batches = {str(s.slots): batch_numbers(settings, s, params, mesh, options) for s in shapes}
    print_line(
        "decode",
        options,
        batches=batches,
        **loading,
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=peak_device_bytes(),
        source=settings.source and Path(settings.source).expanduser().absolute().name,
        parameters=parameter_count(settings.model),
        dtype=settings.model.dtype,
        context=shapes[0].context,
        decode_steps=shapes[0].decode_steps,
        turn_tokens=options.tokens,
    )


if __name__ == "__main__":
    main()
