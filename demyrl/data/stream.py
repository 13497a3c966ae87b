"""Which problems, or rows, a step trains on: an order that can be resumed exactly.

The order of an epoch is a pure function of (seed, epoch), shuffled by grain, so a position is one
number and no random state is ever saved. Nothing is read ahead. Loading files and mixing sources
happen elsewhere.
"""

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from demyrl.types import Problem


class RowStream:
    """Endless groups of `per_step` distinct row numbers; each epoch uses every row exactly once.

    A group may hold the last rows of an epoch and the first of the next: what an epoch leaves
    over is not dropped. The new epoch then starts with rows that are not among those left over, so
    that a group never holds a row twice.
    """

    def __init__(self, count: int, per_step: int, seed: int):
        """Raises ValueError when a group would need more rows than there are."""
        if not 1 <= per_step <= count:
            raise ValueError(
                f"a step takes {per_step} different rows, but there are {count}: "
                f"use between 1 and {count} per step, or provide more rows."
            )
        if seed < 0:
            raise ValueError(f"the seed of the order is {seed}: use 0 or more.")
        self._count = count
        self._per_step = per_step
        self._seed = seed
        self._shuffled = _shuffler(count, seed)
        self._position = 0  # rows handed out since the start, over all epochs
        self._epoch = 0
        self._order = self._shuffled(0)

    def next(self) -> Int[np.ndarray, " per_step"]:
        """The rows of the next step."""
        start = self._position % self._count
        rows = self._order[start : start + self._per_step]
        self._position += self._per_step
        if self._position // self._count > self._epoch:
            self._epoch += 1
            self._order = self._following(self._order, self._epoch)
            rows = np.concatenate([rows, self._order[: self._per_step - len(rows)]])
        return rows

    def state(self) -> dict[str, int]:
        """The position as JSON values: all that `restore` needs."""
        return {
            "position": self._position,
            "count": self._count,
            "per_step": self._per_step,
            "seed": self._seed,
        }

    def restore(self, state: dict[str, int]) -> None:
        """Goes on where `state` was taken.

        Raises ValueError when the state belongs to another number of rows, group size or seed.
        """
        for name, mine in self.state().items():
            if name != "position" and state[name] != mine:
                raise ValueError(
                    f"the saved position is for {name} {state[name]}, this run has {name} {mine}: "
                    "the order would differ. Use the same settings, or a new workdir."
                )
        self._position = state["position"]
        self._epoch = self._position // self._count
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> Int[np.ndarray, " count"]:
        # What an epoch leaves over depends on how it began only when its two ends can touch.
        ends_touch = self._count < 2 * self._per_step
        first = 0 if ends_touch else max(0, epoch - 1)
        order = self._shuffled(first)
        for later in range(first + 1, epoch + 1):
            order = self._following(order, later)
        return order

    def _following(self, order: np.ndarray, epoch: int) -> Int[np.ndarray, " count"]:
        """The order of `epoch`, given that of the epoch before."""
        shuffled = self._shuffled(epoch)
        left_over = (epoch * self._count) % self._per_step
        if not left_over:
            return shuffled
        used = np.isin(shuffled, order[-left_over:])
        room = self._per_step - left_over
        head = shuffled[~used][:room]
        return np.concatenate([head, shuffled[~np.isin(shuffled, head)]])


class ProblemStream:
    """Endless steps of `per_step` distinct problems, in the order of a `RowStream`."""

    def __init__(self, problems: Sequence[Problem], per_step: int, seed: int):
        """Raises ValueError when there are fewer problems than a step takes."""
        if len(problems) < per_step:
            raise ValueError(
                f"a step takes {per_step} different problems, but there are {len(problems)}: "
                "lower the problems per step, or provide more problems."
            )
        self._problems = problems
        self._rows = RowStream(len(problems), per_step, seed)
        self._fingerprint = _fingerprint(problems)

    def next(self) -> list[Problem]:
        """The problems of the next step."""
        return [self._problems[row] for row in self._rows.next()]

    def state(self) -> dict[str, int | str]:
        """The position as JSON values, with a fingerprint of the problems it counts."""
        return {**self._rows.state(), "fingerprint": self._fingerprint}

    def restore(self, state: dict[str, int | str]) -> None:
        """Goes on where `state` was taken.

        Raises ValueError when the state belongs to other problems or settings.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the saved position is for {state['count']} problems with fingerprint "
                f"{state['fingerprint']}, this run has {len(self._problems)} with "
                f"{self._fingerprint}: the problems, or their order, have changed. "
                "Restore them, or use a new workdir."
            )
        self._rows.restore(state)


def _shuffler(count: int, seed: int) -> Callable[[int], np.ndarray]:
    """The function from an epoch to its permutation of `count` rows."""
    import grain  # here, so that reading problems does not wait for it

    # The seed goes in by .seed(): given to shuffle() itself, epoch 1 of seed 0 would be epoch 0
    # of seed 1.
    endless = grain.MapDataset.range(count).seed(seed).shuffle().repeat()

    def shuffled(epoch: int) -> np.ndarray:
        start = epoch * count
        return np.fromiter((endless[start + i] for i in range(count)), np.int64, count)

    return shuffled


def _fingerprint(problems: Sequence[Problem]) -> str:
    """A short digest of what the problems ask and in which order they stand."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(json.dumps([problem.id, problem.prompt, problem.answer]).encode())
    return digest.hexdigest()[:16]
