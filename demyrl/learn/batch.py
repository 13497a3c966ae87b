"""Packing: sequences of any length into rows of one shape, and what each token counts for."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from demyrl.arrays import Batch

AGGREGATIONS = ("token", "sequence")


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """The one shape of a micro-batch, so that training compiles once."""

    rows: int  # rows of a micro-batch
    row_tokens: int  # tokens of a row


@dataclasses.dataclass(frozen=True)
class Example:
    """One sequence to train on: an episode with its advantage, or a demonstration."""

    tokens: Int[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]
    advantage: float = 0.0
    old_logprobs: Float[np.ndarray, " n"] | float = 0.0


@dataclasses.dataclass(frozen=True)
class Packed:
    """Micro-batches, and where each example went."""

    batches: tuple[Batch, ...]
    places: tuple[tuple[int, int, int], ...]  # micro-batch, row, first column of each example
    fill: float  # share of the rows' tokens that are not padding


def token_weights(
    sampled: Sequence[Bool[np.ndarray, " _"]], aggregation: str
) -> list[Float[np.ndarray, " _"]]:
    """What each token's loss counts for; over all sequences they sum to 1.

    "token": every sampled token counts the same, whichever sequence it is in (token-level loss).
    "sequence": every sequence counts the same, its tokens share that (GRPO's original mean of
    means). Raises ValueError for another name.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}: use one of {', '.join(AGGREGATIONS)}.")
    counts = np.array([mask.sum() for mask in sampled], np.float64)
    if aggregation == "token":
        scale = np.full(len(counts), 1 / max(counts.sum(), 1))
    else:
        scale = 1 / (np.maximum(counts, 1) * max((counts > 0).sum(), 1))
    return [(mask * s).astype(np.float32) for mask, s in zip(sampled, scale, strict=True)]


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the sequences that share a row: longest first, each into the first row it fits."""
    rows: list[list[int]] = []
    space: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, left in enumerate(space) if left >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            space.append(capacity)
        rows[row].append(i)
        space[row] -= lengths[i]
    return rows


def pack(examples: Sequence[Example], config: PackConfig) -> Packed:
    """All examples in as few micro-batches of `rows` x `row_tokens` as first-fit decreasing finds.

    Raises ValueError when one is longer than a row.
    """
    lengths = [len(example.tokens) for example in examples]
    if max(lengths, default=0) > config.row_tokens:
        raise ValueError(
            f"a sequence has {max(lengths)} tokens, more than a row's {config.row_tokens}. Raise "
            "pack.row_tokens to at least the context, or leave long sequences out."
        )
    rows = first_fit_decreasing(lengths, config.row_tokens)
    blank = -(-max(len(rows), 1) // config.rows) * config.rows
    fields = {name: np.zeros((blank, config.row_tokens), kind) for name, kind in FIELDS.items()}
    places = [(0, 0, 0)] * len(examples)
    for r, members in enumerate(rows):
        column = 0
        for segment, i in enumerate(members, start=1):
            place(fields, r, column, segment, examples[i])
            places[i] = (r // config.rows, r % config.rows, column)
            column += lengths[i]
    batches = tuple(
        Batch(**{name: array[b : b + config.rows] for name, array in fields.items()})
        for b in range(0, blank, config.rows)
    )
    return Packed(batches, tuple(places), sum(lengths) / (blank * config.row_tokens))


FIELDS = {
    "tokens": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "weights": np.float32,
    "old_logprobs": np.float32,
    "advantages": np.float32,
}


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


def unpack(
    packed: Packed, arrays: Sequence[Float[np.ndarray, "B T"]], lengths: Sequence[int]
) -> list[Float[np.ndarray, " _"]]:
    """What `arrays`, one for each micro-batch, hold at the place of each example."""
    return [
        np.asarray(arrays[b])[r, c : c + n]
        for (b, r, c), n in zip(packed.places, lengths, strict=True)
    ]
