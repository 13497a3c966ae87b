"""How fast training is, against the machine's products of matrices, and how much memory it needs.

    python -m experiments.bench.train_step
    python -m experiments.bench.train_step --measure=head --vocab=151936
    python -m experiments.bench.train_step --measure=config --config=configs/grpo_tcr.py:tiny

Three parts, --measure. `ragged`: an RL update of made-up sequences whose lengths have a long tail,
packed, and again with one sequence a row, for a model of --width, --layers and each --vocab.
`head`: log-probs and their gradients at that width by learn/head.py, and by the plain formula, for
--head-rows of --head-tokens, whose last three quarters are needed. `config`: updates and scores in
the shapes of --config, of sequences of a quarter to all of a row. Of all sequences the last three
quarters are trained. What is compared is run in turn. Keys:

  ragged    by vocabulary, an update:
    padded           the same update, padded to the longest sequence, through the same programs
    over_padded      useful tokens a second over those of `padded`
    peak_host_bytes  most host memory while this was measured
  head      by vocabulary:
    seconds, plain_seconds       of a value and gradient, at timed_rows
    timed_rows                   as many as the plain formula has room for in half of what is free
    over_plain                   times as fast as the plain formula
    temporary_bytes, plain_temporary_bytes   besides arguments and results, for all rows
    share_of_plain_memory        the first of the two over the second
  sft, rl   an update in the config's shapes; score: the old log-probs of the rl sequences
  peak_rss_bytes     most memory the process ever had
  peak_device_bytes  most memory of the accelerator; null on a CPU

In each of ragged, sft, rl and score, and but for the last two in padded:

  tokens_per_s         tokens of the sequences, padding left out
  all_tokens_per_s     tokens that went through the model, padding included
  fill                 the share of the second that is the first
  flops_per_s          of the products that those tokens need, whatever is computed besides: layers
                       of all tokens, attention of the pairs that see each other, the head where
                       tokens are trained; a gradient counts twice
  matmul_flops_per_s   of products of 2048 x 2048 in the same data type, between the updates
  matmul_share         flops_per_s over that, and over the devices of the mesh
  sequences, micro_batches, rows, row_tokens   the shapes
  rounds               calls that the medians are of
  compile_s            seconds to trace and compile each program, by name
  temporary_bytes      what each program needs besides its arguments and results, by name

matmul_share, over_padded and over_plain are medians of the ratio in each round: "wall" by the
clock, and "cpu" by the CPU time of the process, which other programs on the machine disturb less
and which does not see cores that idle; null on an accelerator.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from demyrl import recipe
from demyrl.arrays import Batch
from demyrl.learn.batch import Example, PackConfig, Packed, blank_fields, pack, place
from demyrl.learn.learner import HeadConfig, Learner
from demyrl.learn.loss import grpo_loss, sft_loss
from demyrl.learn.optimizer import OptimizerConfig
from demyrl.learn.state import start_state
from demyrl.learn.update import Loss, zero_total
from demyrl.model.config import ModelConfig
from demyrl.model.mesh import make_mesh
from demyrl.planning import flops
from demyrl.weights import starting_params
from experiments.bench.decode import count, counts
from experiments.bench.head import head_numbers
from experiments.bench.load import forget_peak, memory
from experiments.bench.measure import (
    MATMUL_FLOPS,
    Taken,
    compile_program,
    config_of,
    in_turns,
    matmul,
    parser_of,
    peak_device_bytes,
    peak_rss_bytes,
    print_line,
    temporary_bytes,
    times_faster,
)

PARTS = ("ragged", "head", "config")
RATE = 1e-6
PROMPT = 0.25  # of a sequence is not trained
SHORTEST = 0.25  # of a row, in the config's shapes
MEDIAN, SPREAD = 0.25, 0.8  # of ragged lengths: a log-normal, in parts of the longest; its sigma
HEAD_DIM = 64
Work = Callable[[], None]


def even_lengths(number: int, longest: int) -> list[int]:
    rng = np.random.default_rng(0)
    return rng.integers(int(SHORTEST * longest), longest, number, endpoint=True).tolist()


def ragged_lengths(number: int, longest: int) -> list[int]:
    """Quantiles of a log-normal that is cut at the longest; one is always as long as that."""
    normal = statistics.NormalDist(np.log(MEDIAN * longest), SPREAD)
    drawn = [np.exp(normal.inv_cdf((i + 0.5) / number)) for i in range(number)]
    return [int(np.clip(n, 4, longest)) for n in drawn[:-1]] + [longest]


def sequences(lengths: Sequence[int], vocab: int) -> list[Example]:
    """Random tokens; advantages of both signs; old log-probs near those of random weights."""
    rng = np.random.default_rng(0)
    trained = [np.arange(n) >= PROMPT * n for n in lengths]
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


def one_a_row(examples: Sequence[Example], shape: PackConfig) -> Packed:
    """The examples as they are without packing, in micro-batches of the same shape."""
    batches, places = [], []
    for first in range(0, len(examples), shape.rows):
        fields = blank_fields((shape.rows, shape.row_tokens), np.dtype(np.float32))
        for row, example in enumerate(examples[first : first + shape.rows]):
            place(fields, row, 0, 1, example)
            places.append((len(batches), row, 0))
        batches.append(Batch(**fields))
    tokens = sum(len(example.tokens) for example in examples)
    fill = tokens / (len(batches) * shape.rows * shape.row_tokens)
    return Packed(tuple(batches), tuple(places), fill)


class Trainee:
    """A learner, its state, and the sequences of one kind of update."""

    def __init__(
        self,
        settings: recipe.Recipe,
        optimizer: OptimizerConfig,
        shape: PackConfig,
        loss: Loss,
        lengths: Sequence[int],
    ):
        mesh, model, part = make_mesh(settings.mesh), settings.model, settings.memory
        head = HeadConfig(settings.rollout.sampler.temperature, settings.head_chunk)
        self.model, self.devices, self.shape = model, mesh.size, shape
        self.learner = Learner(model, mesh, optimizer, part, shape, loss, head)
        params = starting_params("", model, mesh, 0)
        self.state = start_state(params, self.learner.optimizer, part.offload)
        self.examples = sequences(lengths, model.vocab)
        self.packed = pack(self.examples, shape)

    def update(self, packed: Packed) -> None:
        self.state, _ = self.learner.update(self.state, packed, RATE)
        jax.block_until_ready(self.state)

    def score(self) -> None:
        self.learner.score(self.learner.working(self.state.params), self.examples)

    def forward_flops(self) -> float:
        lengths = [len(example.tokens) for example in self.examples]
        needed = sum(np.count_nonzero(example.weights[1:]) for example in self.examples)
        return flops.forward(self.model, lengths, float(needed))

    def rates(self, packed: Packed, taken: Taken, pace: Taken, share: float) -> dict[str, Any]:
        """Numbers of calls whose products are `share` of those of the calls beside them."""
        seconds = float(np.median(taken.seconds))
        tokens = len(packed.batches) * self.shape.rows * self.shape.row_tokens
        faster = times_faster(taken, pace)
        return {
            "tokens_per_s": tokens * packed.fill / seconds,
            "all_tokens_per_s": tokens / seconds,
            "fill": packed.fill,
            "flops_per_s": share * MATMUL_FLOPS / seconds,
            "matmul_flops_per_s": MATMUL_FLOPS / float(np.median(pace.seconds)),
            "matmul_share": {clock: x and share * x / self.devices for clock, x in faster.items()},
            "sequences": len(self.examples),
            "micro_batches": len(packed.batches),
            "rows": self.shape.rows,
            "row_tokens": self.shape.row_tokens,
            "rounds": len(taken.seconds),
        }

    def costs(self, *names: str) -> dict[str, dict[str, Any]]:
        """What the programs take to compile, and need, for the first micro-batch."""
        learner, batch = self.learner, self.learner.place(self.packed)[0]
        working = learner.working(self.state.params)
        total = zero_total(working, batch, learner.loss, learner.memory.gradients)
        arguments = {
            "accumulate": (working, total, batch),
            "apply": (self.state, total, np.float32(RATE)),
            "score": (working, batch),
        }
        made = {n: compile_program(getattr(learner.programs, n), *arguments[n]) for n in names}
        return {
            "compile_s": {name: seconds for name, (_, seconds) in made.items()},
            "temporary_bytes": {name: temporary_bytes(made[name][0]) for name in made},
        }


def update_numbers(trainee: Trainee, seconds: float) -> dict[str, Any]:
    costs, packed = trainee.costs("accumulate", "apply"), trainee.packed
    pace = matmul(trainee.model.dtype)
    taken = in_turns({"matmul": pace, "update": lambda: trainee.update(packed)}, seconds)
    share = 3 * trainee.forward_flops() / MATMUL_FLOPS
    return trainee.rates(packed, taken["update"], taken["matmul"], share) | costs


def score_numbers(trainee: Trainee, seconds: float) -> dict[str, Any]:
    costs, pace = trainee.costs("score"), matmul(trainee.model.dtype)
    taken = in_turns({"matmul": pace, "score": trainee.score}, seconds)
    share = trainee.forward_flops() / MATMUL_FLOPS
    return trainee.rates(trainee.packed, taken["score"], taken["matmul"], share) | costs


def ragged_numbers(settings: recipe.Recipe, seconds: float, number: int) -> dict[str, Any]:
    """An update of ragged sequences, packed and padded in turn."""
    forget_peak()
    loss = functools.partial(grpo_loss, config=settings.loss)
    lengths = ragged_lengths(number, settings.pack.row_tokens)
    trainee = Trainee(settings, settings.optimizer, settings.pack, loss, lengths)
    costs, share = trainee.costs("accumulate", "apply"), 3 * trainee.forward_flops() / MATMUL_FLOPS
    packed, padded = trainee.packed, one_a_row(trainee.examples, settings.pack)
    works: dict[str, Work] = {
        "matmul": matmul(settings.model.dtype),
        "packed": lambda: trainee.update(packed),
        "padded": lambda: trainee.update(padded),
    }
    taken = in_turns(works, seconds)
    return {
        **trainee.rates(packed, taken["packed"], taken["matmul"], share),
        **costs,
        "padded": trainee.rates(padded, taken["padded"], taken["matmul"], share),
        "over_padded": times_faster(taken["packed"], taken["padded"]),
        "peak_host_bytes": memory("VmHWM"),
    }


def config_numbers(settings: recipe.Recipe, seconds: float) -> dict[str, Any]:
    part, rl_pack, sft_pack = settings.train, settings.pack, settings.sft_pack
    lengths = even_lengths(settings.sft.rows_per_step, sft_pack.row_tokens)
    sft = Trainee(settings, settings.sft_optimizer, sft_pack, sft_loss, lengths)
    lengths = even_lengths(part.problems // part.updates * part.samples, rl_pack.row_tokens)
    loss = functools.partial(grpo_loss, config=settings.loss)
    rl = Trainee(settings, settings.optimizer, rl_pack, loss, lengths)
    return {
        "sft": update_numbers(sft, seconds),
        "rl": update_numbers(rl, seconds),
        "score": score_numbers(rl, seconds),
    }


def of_size(settings: recipe.Recipe, options: argparse.Namespace, vocab: int) -> recipe.Recipe:
    """The settings with a model in the shape of a small Qwen3, and rows of the options."""
    heads = options.width // HEAD_DIM
    model = ModelConfig(
        vocab=vocab,
        width=options.width,
        layers=options.layers,
        heads=heads,
        kv_heads=heads // 2,
        head_dim=HEAD_DIM,
        feed_forward=3 * options.width,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=True,
        attention_bias=False,
        tied_embeddings=True,
        max_positions=0,
        dtype=settings.model.dtype,
    )
    pack = PackConfig(options.rows, options.row_tokens, 1)
    return dataclasses.replace(settings, model=model, pack=pack)


def parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PARTS)}")
    return names


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, recipe.Recipe]:
    parser = parser_of(__doc__)
    parser.add_argument("--measure", type=parts, default="ragged,head", help=", ".join(PARTS))
    parser.add_argument("--width", type=count, default=512, help="of the model")
    parser.add_argument("--layers", type=count, default=8)
    parser.add_argument("--vocab", type=counts, default=(4_096, 151_936))
    parser.add_argument("--sequences", type=count, default=24, help="of an update")
    parser.add_argument("--rows", type=count, default=2, help="of a micro-batch")
    parser.add_argument("--row-tokens", type=count, default=1_024, help="of the longest sequence")
    parser.add_argument("--head-rows", type=count, default=16)
    parser.add_argument("--head-tokens", type=count, default=512, help="of such a row")
    options, rest = parser.parse_known_args(argv)
    if options.width % (2 * HEAD_DIM):
        parser.error(f"--width is {options.width}: use a multiple of {2 * HEAD_DIM}")
    return options, recipe.on_device(recipe.read(config_of(parser, options, rest)))


def main(argv: Sequence[str] | None = None) -> None:
    options, settings = read(argv)
    numbers: dict[str, Any] = {}
    sizes = {str(vocab): of_size(settings, options, vocab) for vocab in options.vocab}
    if "ragged" in options.measure:
        numbers["ragged"] = {
            vocab: ragged_numbers(each, options.seconds, options.sequences)
            for vocab, each in sizes.items()
        }
    if "head" in options.measure:
        shape = (options.head_rows, options.head_tokens)
        numbers["head"] = {
            vocab: head_numbers(each.model, shape, each.head_chunk, options.seconds)
            for vocab, each in sizes.items()
        }
    if "config" in options.measure:
        numbers |= config_numbers(settings, options.seconds)
    peaks = {"peak_rss_bytes": peak_rss_bytes(), "peak_device_bytes": peak_device_bytes()}
    print_line("train_step", options, **numbers, **peaks)


if __name__ == "__main__":
    main()
