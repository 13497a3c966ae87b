"""How fast training is, and how much memory it needs.

    python -m experiments.bench.train_step --seconds 5

One update on made-up sequences of a quarter to all of a row, whose last three quarters are trained:
as many as an update of the config has. Packing them is not timed. Keys:

  sft, rl   an update; score: the old log-probs of the rl sequences. In each:
    tokens_per_s         tokens of the sequences, padding left out
    padded_tokens_per_s  tokens that went through the model, padding included
    fill                 the share of the second that is the first
    sequences, micro_batches, rows, row_tokens   the shapes
    compile_s            seconds to trace and compile each program, by name
    temporary_bytes      what each program needs besides its arguments and results, by name
  peak_rss_bytes     most memory the process ever had
  peak_device_bytes  most memory of the accelerator; null on a CPU
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from demyrl import recipe
from demyrl.learn.batch import Example, PackConfig, Packed, pack
from demyrl.learn.loss import grpo_loss, sft_loss
from demyrl.learn.update import (
    Loss,
    OptimizerConfig,
    make_optimizer,
    make_programs,
    start_state,
    update,
    zero_total,
)
from demyrl.model.sharding import make_mesh, rows_sharding
from demyrl.weights import starting_params
from experiments.bench.measure import (
    compile_program,
    options_of,
    peak_device_bytes,
    peak_rss_bytes,
    print_line,
    repeat,
    temporary_bytes,
)

SHORTEST = 0.25  # of a row
RATE = 1e-6


def sequences(count: int, longest: int, vocab: int) -> list[Example]:
    """Random tokens; advantages of both signs; old log-probs near those of random weights."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(int(SHORTEST * longest), longest, count, endpoint=True)
    trained = [np.arange(n) >= n // 4 for n in lengths]
    total = sum(int(mask.sum()) for mask in trained)
    return [
        Example(
            rng.integers(0, vocab, n).astype(np.int32),
            (mask / total).astype(np.float32),
            float(rng.choice([-1.0, 1.0])),
            np.full(n, -np.log(vocab), np.float32),
        )
        for n, mask in zip(lengths, trained, strict=True)
    ]


class Trainee:
    """Programs, state and packed sequences of one kind of update."""

    def __init__(
        self,
        settings: recipe.Recipe,
        optimizer: OptimizerConfig,
        shape: PackConfig,
        loss: Loss,
        count: int,
    ):
        mesh, model = make_mesh(settings.mesh), settings.model
        self.shape, self.loss = shape, loss
        self.examples = sequences(count, shape.row_tokens, model.vocab)
        self.packed: Packed = pack(self.examples, shape)
        self.batches = jax.device_put(self.packed.batches, rows_sharding(mesh))
        rule = make_optimizer(optimizer, model)
        temperature = settings.rollout.sampler.temperature
        self.programs = make_programs(model, rule, loss, temperature, settings.head_chunk)
        self.state = start_state(starting_params("", model, mesh, 0), rule)

    def update(self) -> None:
        self.state, numbers = update(self.programs, self.loss, self.state, self.batches, RATE)
        jax.block_until_ready((self.state, numbers))

    def score(self) -> None:
        jax.block_until_ready([self.programs.score(self.state.params, b) for b in self.batches])

    def update_numbers(self, seconds: float) -> dict[str, Any]:
        total = zero_total(self.state.params, self.batches[0], self.loss)
        both = {
            "accumulate": compile_program(
                self.programs.accumulate, self.state.params, total, self.batches[0]
            ),
            "apply": compile_program(self.programs.apply, self.state, total, np.float32(RATE)),
        }
        self.update()  # the first may change where the state lies, and so compile once more
        return self.rates(self.update, seconds) | costs(both)

    def score_numbers(self, seconds: float) -> dict[str, Any]:
        score = compile_program(self.programs.score, self.state.params, self.batches[0])
        return self.rates(self.score, seconds) | costs({"score": score})

    def rates(self, work: Callable[[], None], seconds: float) -> dict[str, Any]:
        done, elapsed = repeat(work, seconds)
        padded = len(self.batches) * self.shape.rows * self.shape.row_tokens * len(done) / elapsed
        return {
            "tokens_per_s": padded * self.packed.fill,
            "padded_tokens_per_s": padded,
            "fill": self.packed.fill,
            "sequences": len(self.examples),
            "micro_batches": len(self.batches),
            "rows": self.shape.rows,
            "row_tokens": self.shape.row_tokens,
        }


def costs(programs: dict[str, tuple[Any, float]]) -> dict[str, dict[str, Any]]:
    return {
        "compile_s": {name: seconds for name, (_, seconds) in programs.items()},
        "temporary_bytes": {name: temporary_bytes(c) for name, (c, _) in programs.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    options, config = options_of(__doc__, argv)
    settings = recipe.on_device(recipe.read(config))
    part = settings.train
    sft = Trainee(
        settings, settings.sft_optimizer, settings.sft_pack, sft_loss, settings.sft.rows_per_step
    )
    rl = Trainee(
        settings,
        settings.optimizer,
        settings.pack,
        lambda logprobs, batch: grpo_loss(logprobs, batch, settings.loss),
        part.problems // part.updates * part.samples,
    )
    numbers = {
        "sft": sft.update_numbers(options.seconds),
        "rl": rl.update_numbers(options.seconds),
        "score": rl.score_numbers(options.seconds),
    }
    memory = {"peak_rss_bytes": peak_rss_bytes(), "peak_device_bytes": peak_device_bytes()}
    print_line("train_step", options, **numbers, **memory)


if __name__ == "__main__":
    main()
