"""The least that a program can take: operations and bytes of one chip, and the seconds of both.

Bytes are those that must pass between a chip and its HBM at least: every argument once, every
result once. Real programs also read weights again on the way back and move activations.
"""

from typing import NamedTuple

from demyrl.planning.chips import Chip


class Work(NamedTuple):
    """What one chip does in a program."""

    flops: float
    bytes: float

    def times(self, count: float) -> "Work":
        return Work(self.flops * count, self.bytes * count)

    def plus(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """Operations for each byte; what a chip needs to be busy is its peak over its bandwidth."""
        return self.flops / self.bytes if self.bytes else 0.0


def least_seconds(work: Work, chip: Chip) -> float:
    """No chip can do it faster: the slower of computing and of moving bytes."""
    return max(work.flops / chip.flops, work.bytes / chip.bandwidth)
