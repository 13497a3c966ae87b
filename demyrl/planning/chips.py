"""What the chips of each TPU generation can do, and the names of the slices they come in.

Peaks are those of Google's pages of TPU specifications; usable memory is what XLA's compiler lets
a program have, found by asking it for more. A device here is a whole chip.
"""

import dataclasses
import math
import re

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip of a generation."""

    memory: int  # bytes of HBM
    usable: int  # bytes of it that programs and their arrays may fill
    flops: float  # of bfloat16 products, a second
    bandwidth: float  # bytes a second between HBM and the chip
    links: float  # bytes a second to other chips, over all of its links, in one direction
    slices: tuple[str, ...]  # shapes that are offered


FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")

CHIPS = {
    "v4": Chip(32 * GIB, int(30.75 * GIB), 275e12, 1228e9, 300e9, CUBES),
    "v5e": Chip(16 * GIB, int(15.75 * GIB), 197e12, 819e9, 200e9, FLAT),
    "v5p": Chip(96 * GIB, int(95.73 * GIB), 459e12, 2765e9, 600e9, ("1x1x1", *CUBES)),
    "v6e": Chip(32 * GIB, int(31.24 * GIB), 918e12, 1640e9, 400e9, FLAT),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are connected: what "v5e:4x4" names."""

    name: str
    chip: Chip
    devices: int


def slice_of(name: str) -> Slice:
    """The slice of that name; ValueError lists those that are offered."""
    read = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", name)
    if not read or read[1] not in CHIPS:
        raise ValueError(unknown(name))
    chip, sides = CHIPS[read[1]], [int(side) for side in read[2].split("x")]
    if len(sides) != chip.slices[0].count("x") + 1 or 0 in sides:
        raise ValueError(unknown(name))
    return Slice(name, chip, math.prod(sides))


def unknown(name: str) -> str:
    """What to say about a topology that there is not."""
    known = "; ".join(f"{gen}: {', '.join(chip.slices)}" for gen, chip in CHIPS.items())
    return (
        f"--topology={name}: no such slice of TPUs is known. Write GENERATION:SHAPE, such as "
        f"v5e:4x4. The shapes that are offered: {known}."
    )
