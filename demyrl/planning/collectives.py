"""What a compiled program sends between chips, read from its text: operations by kind, and bytes.

The bytes of an operation are those of its operands or its result on one chip, whichever are more.
The body of a loop counts as often as the loop turns, where the text says so; where that is known
only at run time (a decode, the chunks of the head) the caller says how often that is at most.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SCATTER = "all-reduce-scatter"  # how the TPU's compiler names a fusion that is a reduce-scatter
STARTS = ("all-gather-start", "collective-permute-start")  # give their operands, then results
BITS = {"pred": 8, "token": 0, "opaque": 0}
HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
LINE = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = "
    r"(?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$"
)
ARRAY = re.compile(r"(?P<kind>[a-z]+(?P<bits>\d*)[a-z0-9]*)\[(?P<sides>[0-9,]*)\]")
OPERAND = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CONDITION = re.compile(r"condition=%?([\w.\-]+)")
CHANNEL = re.compile(r"channel_id=(\d+)")


class Sent(NamedTuple):
    """How often a kind of operation runs, and the bytes of all these times on one chip."""

    count: int
    bytes: int


class Line(NamedTuple):
    """One operation of a computation."""

    root: bool
    type: str
    op: str
    rest: str


Computation = dict[str, Line]  # by the name of the result


def collectives(text: str, unknown_turns: int = 1) -> dict[str, Sent]:
    """By kind, what one run of the compiled program sends."""
    computations, entry = read(text)
    found = dict.fromkeys(KINDS, Sent(0, 0))
    seen: set[tuple[str, str]] = set()

    def visit(name: str, place: str, times: int) -> None:
        for line in computations.get(name, {}).values():
            kind = line.op.removesuffix("-start")
            channel = CHANNEL.search(line.rest)
            once = (place, channel[1]) if channel else (place, line.rest)
            if kind in KINDS and once not in seen:
                seen.add(once)
                kind = "reduce-scatter" if name.startswith(SCATTER) else kind
                size = moved_bytes(line, computations[name])
                count, total = found[kind]
                found[kind] = Sent(count + times, total + times * size)
            for called in called_by(line):
                turns = times * loop_turns(line, computations, unknown_turns)
                visit(called, called if line.op == "while" else place, turns)

    visit(entry, entry, 1)
    return {kind: sent for kind, sent in found.items() if sent.count}


def read(text: str) -> tuple[dict[str, Computation], str]:
    """The operations of each computation, and the name of the one that runs first."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for row in text.splitlines():
        if header := HEADER.match(row):
            current = computations[header["name"]] = {}
            entry = header["name"] if header["entry"] else entry
        elif found := LINE.match(row):
            current[found["name"]] = Line(
                bool(found["root"]), found["type"], found["op"], found["rest"]
            )
    return computations, entry


def called_by(line: Line) -> Iterator[str]:
    """The computations that an operation runs; of branches all, though only one will."""
    yield from CALLED.findall(line.rest)
    for names in BRANCHES.findall(line.rest):
        yield from (name.strip().lstrip("%") for name in names.split(","))


def loop_turns(line: Line, computations: dict[str, Computation], unknown: int) -> int:
    """How often what the operation calls runs."""
    if line.op != "while":
        return 1
    if known := TURNS.search(line.rest):
        return int(known[1])
    condition = computations[CONDITION.search(line.rest)[1]]
    root = next(each for each in condition.values() if each.root)
    if root.op == "compare" and "direction=LT" in root.rest:
        limit = condition.get(OPERAND.findall(root.rest)[1])
        if limit and limit.op == "constant":
            return int(limit.rest.split(")")[0])
    return unknown


def moved_bytes(line: Line, computation: Computation) -> int:
    """Bytes of a collective's operands or of its result, whichever are more."""
    inputs = line.rest.split("), ")[0]
    operands = [computation[n].type for n in OPERAND.findall(inputs) if n in computation]
    before = sum(map(array_bytes, operands))
    if line.op in STARTS:
        return max(before, array_bytes(line.type) - before)
    return max(before, array_bytes(line.type))


def array_bytes(kind: str) -> int:
    """Bytes of the arrays in a type, such as "bf16[4,128]" or a tuple of such."""
    total = 0
    for each in ARRAY.finditer(kind):
        bits = BITS.get(each["kind"], int(each["bits"] or 8))
        total += math.prod(int(n) for n in each["sides"].split(",") if n) * bits // 8
    return total
