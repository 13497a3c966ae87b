"""A plan as tables for a terminal, and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from demyrl.planning.advice import Advice
from demyrl.planning.chips import GIB, Slice
from demyrl.planning.outcome import Outcome, Phase, phase_row, program_row
from demyrl.planning.programs import Scene

UNKNOWN = "-"


def as_json(
    scene: Scene,
    place: Slice,
    outcomes: Sequence[Outcome],
    phases: Sequence[Phase],
    seconds: dict[str, float],
    advice: Advice | None,
) -> dict[str, Any]:
    """Everything that a plan found. Bytes, operations and seconds of programs are of one chip."""
    chip = place.chip
    return {
        "topology": place.name,
        "chips": place.devices,
        "mesh": dict(scene.mesh.shape),
        "chip": {
            "hbm_bytes": chip.memory,
            "usable_bytes": chip.usable,
            "flops_per_s": chip.flops,
            "hbm_bytes_per_s": chip.bandwidth,
            "link_bytes_per_s": chip.links,
        },
        "load": {"tokens": scene.load.tokens, "sampled": scene.load.sampled},
        "resident_bytes": scene.sizes,
        "programs": [program_row(each) for each in outcomes],
        "phases": [phase_row(each) for each in phases],
        "lower_bound_s": seconds,
        "decode_intensity": intensity(outcomes),
        "advice": advice
        and {"changes": advice.changes, "flags": advice.flags, "tried": list(advice.tried)},
    }


def intensity(outcomes: Sequence[Outcome]) -> float | None:
    """Operations for each byte of a decode step, when decode was planned."""
    works = [each.program.work for each in outcomes if each.program.name == "decode"]
    return works[0].intensity if works else None


def print_plan(console: Console, found: dict[str, Any]) -> None:
    """The tables, from what `as_json` gives."""
    console.print(programs_table(found), phases_table(found))
    if any(row["collectives"] for row in found["programs"]):
        console.print(collectives_table(found))
    for line in closing(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def programs_table(found: dict[str, Any]) -> Table:
    usable = found["chip"]["usable_bytes"]
    table = grid(
        f"{found['topology']}, GiB of one chip: {gib(found['chip']['hbm_bytes'])} of HBM, of which "
        f"programs may use {gib(usable)}",
        "program", "args", "temp", "results", "beside", "in use", "fits", "TFLOP", "least s",
        "compile s",
    )  # fmt: skip
    for row in found["programs"]:
        results = add(row["outputs_bytes"], row["code_bytes"])
        table.add_row(
            row["name"], gib(row["arguments_bytes"]), gib(row["temporaries_bytes"]), gib(results),
            gib(row["beside_bytes"]), gib(row["in_use_bytes"]), yes(row["fits"]),
            f"{row['flops'] / 1e12:.3g}", f"{row['lower_bound_s']:.3g}",
            number(row["compile_s"]),
        )  # fmt: skip
    return table


def phases_table(found: dict[str, Any]) -> Table:
    """What lies in HBM in each phase of a step, and the most with temporaries."""
    names = list(found["resident_bytes"])
    names = [n for n in names if any(n in row["held_bytes"] for row in found["phases"])]
    table = grid("GiB of one chip in each phase", "phase", *names, "most", "fits")
    for row in found["phases"]:
        held = [gib(row["held_bytes"].get(name)) for name in names]
        table.add_row(row["name"], *held, gib(row["most_bytes"]), yes(row["fits"]))
    return table


def collectives_table(found: dict[str, Any]) -> Table:
    """What each program sends: how often, and GiB of one chip."""
    rows = [row for row in found["programs"] if row["collectives"]]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["collectives"]))
    columns = [kind.replace("-", " ") for kind in kinds]  # which wraps
    table = grid("collectives: how many, GiB of one chip", "program", *columns, "s over links")
    for row in rows:
        sent = row["collectives"]
        cells = [
            f"{sent[k]['count']:,}, {gib(sent[k]['bytes'])}" if k in sent else "" for k in kinds
        ]
        total = sum(each["bytes"] for each in sent.values())
        table.add_row(row["name"], *cells, f"{total / found['chip']['link_bytes_per_s']:.3g}")
    return table


def closing(found: dict[str, Any]) -> list[str]:
    """What the tables do not say."""
    seconds, load, chip = found["lower_bound_s"], found["load"], found["chip"]
    parts = ", ".join(f"{name} {s:,.0f}" for name, s in seconds.items() if name != "step")
    lines = [
        f"An RL step takes at least {seconds['step']:,.0f} s ({parts}) when its trajectories have "
        f"{load['tokens']:,} tokens on average, {load['sampled']:.0%} of them sampled."
    ]
    if found["decode_intensity"] is not None:
        balance = chip["flops_per_s"] / chip["hbm_bytes_per_s"]
        lines.append(
            f"Decode does {found['decode_intensity']:.3g} operations for each byte; the chip is "
            f"busy from {balance:.3g} on."
        )
    return lines + refusals(found) + advised(found["advice"])


def refusals(found: dict[str, Any]) -> list[str]:
    return [
        f"{r['name']} did not compile:\n{r['refusal']}" for r in found["programs"] if r["refusal"]
    ]


def advised(advice: dict[str, Any] | None) -> list[str]:
    if advice is None:
        return []
    if advice["changes"] is None:
        return ["Nothing that was tried makes it fit: take more chips, or shorter rows."]
    return [f"It fits with {advice['flags']}"]


def grid(title: str, *columns: str) -> Table:
    """An empty table: the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    return table


def gib(size: int | None) -> str:
    return UNKNOWN if size is None else f"{size / GIB:.2f}"


def number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def yes(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: UNKNOWN}[value]


def add(*sizes: int | None) -> int | None:
    return None if None in sizes else sum(sizes)
