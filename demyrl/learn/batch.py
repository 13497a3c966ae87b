"""Packing: sequences of any length into rows of a few shapes, and what each token counts for."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from demyrl.arrays import Batch

AGGREGATIONS = ("token", "sequence", "constant", "micro_batch")

Shape = tuple[int, int]  # rows, tokens of a row


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """A short ladder of micro-batch shapes, so that training compiles once for each.

    All hold rows * row_tokens tokens; each rung has twice the rows of the one before, half as long.
    """

    rows: int  # rows of a micro-batch of the longest rows
    row_tokens: int  # tokens of such a row, at least those of the longest sequence
    rungs: int  # shapes in the ladder; 1 packs everything into the longest rows

    def __post_init__(self) -> None:
        if self.rungs < 1:
            raise ValueError(f"pack.rungs is {self.rungs}: use at least 1.")
        parts = 2 ** (self.rungs - 1)
        if self.row_tokens % parts:
            raise ValueError(
                f"pack.row_tokens is {self.row_tokens} and pack.rungs is {self.rungs}: the "
                f"shortest rows have 1/{parts} of the tokens, which does not divide. Use "
                f"{-(-self.row_tokens // parts) * parts} tokens, or fewer rungs."
            )


@dataclasses.dataclass(frozen=True)
class Example:
    """One sequence to train on: an episode with its advantage, or a demonstration."""

    tokens: Int[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]
    advantage: float = 0.0
    old_logprobs: Float[np.ndarray, " n"] | float = 0.0
    ref_logprobs: Float[np.ndarray, " n"] | float = 0.0


@dataclasses.dataclass(frozen=True)
class Packed:
    """Micro-batches, those of the longest rows first, and where each example went."""

    batches: tuple[Batch, ...]
    places: tuple[tuple[int, int, int], ...]  # micro-batch, row, first column of each example
    fill: float  # share of the rows' tokens that are not padding


def token_weights(
    sampled: Sequence[Bool[np.ndarray, " _"]], aggregation: str, constant: int = 0
) -> list[Float[np.ndarray, " _"]]:
    """What each token's loss counts for; over all sequences they sum to 1, but for "constant".

    "token": every sampled token counts the same, whichever sequence it is in (token-level loss).
    "sequence": every sequence counts the same, its tokens share that (GRPO's original mean of
    means). "constant": every sampled token counts 1 / (sequences * constant), however many there
    are (Dr. GRPO). "micro_batch": as "token", for `weigh_by_micro_batch` to change after packing.
    Raises ValueError for another name, or a constant that is not above 0 where one is needed.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}: use one of {', '.join(AGGREGATIONS)}.")
    counts = np.array([mask.sum() for mask in sampled], np.float64)
    sequences = max((counts > 0).sum(), 1)
    if aggregation == "sequence":
        scale = 1 / (np.maximum(counts, 1) * sequences)
    elif aggregation == "constant":
        if not constant > 0:
            raise ValueError(
                f"constant is {constant} with aggregation 'constant': it divides the sum over a "
                "sequence, so it must be above 0. Use the tokens of the longest response."
            )
        scale = np.full(len(counts), 1 / (sequences * constant))
    else:
        scale = np.full(len(counts), 1 / max(counts.sum(), 1))
    return [(mask * s).astype(np.float32) for mask, s in zip(sampled, scale, strict=True)]


def weigh_by_micro_batch(packed: Packed) -> Packed:
    """The token mean of each micro-batch, weighed by its share of the sequences.

    This is what the paper's code does, unlike its section 2.1: a token counts less where its
    micro-batch has more tokens for each sequence, so the update depends on the packing. Every
    sequence of the update must be in `packed`, also those of advantage 0.
    """
    sequences = np.bincount([b for b, _, _ in packed.places], minlength=len(packed.batches))
    shares = sequences / max(len(packed.places), 1)
    batches = []
    for batch, share in zip(packed.batches, shares, strict=True):
        trained = batch.weights > 0
        weights = trained * (share / (trained.sum() + 1e-8))
        batches.append(batch.replace(weights=weights.astype(batch.weights.dtype)))
    return dataclasses.replace(packed, batches=tuple(batches))


def shapes(config: PackConfig) -> tuple[Shape, ...]:
    """Rows and tokens of a row of every micro-batch that `pack` may make, longest rows first."""
    return tuple((config.rows << r, config.row_tokens >> r) for r in range(config.rungs))


def best_fit(
    lengths: Sequence[int], order: Sequence[int], spaces: Sequence[int]
) -> list[list[int]] | None:
    """Indices of the sequences in each row, or None when one finds no room.

    In the given order, each goes where it leaves the least space, and to the first of equals.
    """
    members: list[list[int]] = [[] for _ in spaces]
    left = sorted((space, row) for row, space in enumerate(spaces))
    for i in order:
        at = bisect.bisect_left(left, (lengths[i], 0))
        if at == len(left):
            return None
        space, row = left.pop(at)
        bisect.insort(left, (space - lengths[i], row))
        members[row].append(i)
    return members


def lay_out(lengths: Sequence[int], config: PackConfig) -> list[list[list[int]]]:
    """Indices of the sequences in each row of each micro-batch, longest rows first.

    As few micro-batches as best fit decreasing finds, since all cost the same tokens. Then as few
    of them as possible keep the longest rows, of the others as few as possible the next, and so on,
    since attention costs a token more in a longer row.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ladder = shapes(config)

    def rows(counts: Sequence[int]) -> list[list[int]] | None:
        each = zip(counts, ladder, strict=False)  # the shorter rungs are not in use yet
        return best_fit(lengths, order, [n for count, (b, n) in each for _ in range(count * b)])

    alone = best_fit(lengths, order, [config.row_tokens] * len(lengths))
    counts = [-(-sum(map(bool, alone)) // config.rows)]
    while len(counts) < config.rungs:
        *fixed, rest = counts
        splits = [[*fixed, kept, rest - kept] for kept in range(rest + 1)]  # the last one fits
        counts = splits[bisect.bisect_left(splits, True, key=lambda s: rows(s) is not None)]
    each = iter(rows(counts))
    made = [
        list(itertools.islice(each, b))
        for count, (b, _) in zip(counts, ladder, strict=True)
        for _ in range(count)
    ]
    return [micro_batch for micro_batch in made if any(micro_batch)]


def pack(examples: Sequence[Example], config: PackConfig) -> Packed:
    """All examples in as few micro-batches as `lay_out` finds; without any, one of padding.

    Raises ValueError when one is longer than the longest rows.
    """
    lengths = [len(example.tokens) for example in examples]
    if max(lengths, default=0) > config.row_tokens:
        raise ValueError(
            f"a sequence has {max(lengths)} tokens, more than a row's {config.row_tokens}. Raise "
            "pack.row_tokens to at least the context, or leave long sequences out."
        )
    size, kind = config.rows * config.row_tokens, float_kind(examples)
    batches, places = [], [(0, 0, 0)] * len(examples)
    for b, rows in enumerate(lay_out(lengths, config) or [[[]] * shapes(config)[-1][0]]):
        fields = blank_fields((len(rows), size // len(rows)), kind)
        for r, members in enumerate(rows):
            column = 0
            for segment, i in enumerate(members, start=1):
                place(fields, r, column, segment, examples[i])
                places[i] = (b, r, column)
                column += lengths[i]
        batches.append(Batch(**fields))
    return Packed(tuple(batches), tuple(places), sum(lengths) / (size * len(batches)))


WHOLE = ("tokens", "positions", "segments")
REAL = ("weights", "old_logprobs", "ref_logprobs", "advantages")


def float_kind(examples: Sequence[Example]) -> np.dtype:
    """float32, or float64 where the examples bring it."""
    arrays = [a for e in examples for a in (e.weights, e.old_logprobs, e.ref_logprobs)]
    return np.result_type(np.float32, *{a.dtype for a in arrays if isinstance(a, np.ndarray)})


def blank_fields(shape: Shape, kind: np.dtype) -> dict[str, np.ndarray]:
    """The fields of a micro-batch that holds nothing yet."""
    kinds = dict.fromkeys(WHOLE, np.int32) | dict.fromkeys(REAL, kind)
    return {name: np.zeros(shape, kind) for name, kind in kinds.items()}


def blank_batch(shape: Shape) -> Batch:
    """A micro-batch of padding: what it trains is nothing, but its shape gets compiled."""
    return Batch(**blank_fields(shape, np.dtype(np.float32)))


def place(
    fields: dict[str, np.ndarray], row: int, column: int, segment: int, example: Example
) -> None:
    """Writes one example into its place of the rows."""
    here = (row, slice(column, column + len(example.tokens)))
    fields["tokens"][here] = example.tokens
    fields["positions"][here] = np.arange(len(example.tokens))
    fields["segments"][here] = segment
    fields["weights"][here] = example.weights
    fields["advantages"][here] = example.advantage
    fields["old_logprobs"][here] = example.old_logprobs
    fields["ref_logprobs"][here] = example.ref_logprobs


def unpack(
    packed: Packed, arrays: Sequence[Float[np.ndarray, "_ _"]], lengths: Sequence[int]
) -> list[Float[np.ndarray, " _"]]:
    """What `arrays`, one for each micro-batch, hold at the place of each example."""
    return [
        np.asarray(arrays[b])[r, c : c + n]
        for (b, r, c), n in zip(packed.places, lengths, strict=True)
    ]
