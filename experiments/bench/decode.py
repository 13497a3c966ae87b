"""How fast the sampler makes tokens, and takes in those that it did not make.

    python -m experiments.bench.decode --seconds 5

As many rows as a training step samples go through the slots, without tools and with random weights:
a row that has its tokens makes room for the next. Keys:

  tokens_per_s     "uniform": every row gets turn_tokens; "ragged": 1 to turn_tokens, drawn evenly
  slot_use         share of slot-steps of the decode loop that made a token, for both
  step_ms          milliseconds of a decode step, host included, for both
  extend_tokens_per_s   tokens fed to full extends (prompts, tool results), by chunk length
  compile_s        seconds to trace and compile each program, by name
  slots, context, decode_steps, extend_rows, turn_tokens, rows, parameters   the shapes
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from demyrl import recipe
from demyrl.model.sharding import make_mesh
from demyrl.rollout import sampler as programs
from demyrl.rollout.sampler import Feed, Sampler
from demyrl.weights import starting_params
from experiments.bench.measure import compile_program, options_of, print_line, repeat

NEVER = (-1,)  # an end token that is not in the vocabulary


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
    sampler: Sampler, wanted: Sequence[int], settings: recipe.Recipe, seconds: float
) -> dict[str, float]:
    start = settings.rollout.episode.context - settings.rollout.episode.turn_tokens
    played, elapsed = repeat(
        lambda: play(sampler, wanted, start, settings.rollout.early_return), seconds
    )
    tokens, steps = sum(p.tokens for p in played), sum(p.steps for p in played)
    return {
        "tokens_per_s": tokens / elapsed,
        "slot_use": tokens / (steps * sampler.config.slots),
        "step_ms": 1000 * elapsed / steps,
    }


def extend_rate(sampler: Sampler, length: int, seconds: float) -> float:
    """Tokens a second when every row of an extend has a full chunk."""
    count = min(sampler.config.extend_rows, sampler.config.slots)
    feeds = [Feed(row, 0, [row % 7] * length) for row in range(count)]

    def work() -> int:
        sampler.extend(feeds)
        jax.block_until_ready(sampler.cache)
        return count * length

    done, elapsed = repeat(work, seconds)
    return sum(done) / elapsed


def compile_seconds(sampler: Sampler) -> dict[str, float]:
    """Seconds for the decode program, and for an extend of each length."""
    shapes, model = sampler.config, sampler.model
    ints = np.zeros(shapes.slots, np.int32)
    keys = np.zeros((shapes.slots, 2), np.uint32)
    found = {
        "decode": compile_program(
            programs.decode, sampler.weights, sampler.cache, ints, ints, ints, keys, np.int32(1),
            config=model, steps=shapes.decode_steps, end_tokens=NEVER,
            temperature=shapes.temperature,
        )[1]
    }  # fmt: skip
    row = np.zeros(shapes.extend_rows, np.int32)
    for length in shapes.extend_lengths:
        tokens = np.zeros((shapes.extend_rows, length), np.int32)
        found[f"extend_{length}"] = compile_program(
            programs.extend, sampler.weights, sampler.cache, row, tokens, row, row, config=model
        )[1]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options, config = options_of(__doc__, argv)
    settings = recipe.read(config)
    shapes, turn = settings.rollout.sampler, settings.rollout.episode.turn_tokens
    rows = settings.train.problems * settings.train.samples
    params = starting_params("", settings.model, make_mesh(settings.mesh), 0)
    sampler = Sampler(settings.model, shapes, NEVER)
    sampler.load(params)
    ragged = np.random.default_rng(0).integers(1, turn, rows, endpoint=True).tolist()
    compiled = compile_seconds(sampler)
    uses = {"uniform": [turn] * rows, "ragged": ragged}
    found: dict[str, dict[str, Any]] = {
        use: decode_numbers(sampler, wanted, settings, options.seconds)
        for use, wanted in uses.items()
    }
    print_line(
        "decode",
        options,
        **{key: {use: found[use][key] for use in uses} for key in found["uniform"]},
        extend_tokens_per_s={
            str(n): extend_rate(sampler, n, options.seconds) for n in shapes.extend_lengths
        },
        compile_s=compiled,
        slots=shapes.slots,
        context=shapes.context,
        decode_steps=shapes.decode_steps,
        extend_rows=shapes.extend_rows,
        turn_tokens=turn,
        rows=rows,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    )


if __name__ == "__main__":
    main()
