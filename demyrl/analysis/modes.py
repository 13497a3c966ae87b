"""How a policy uses its tool: much thought and few calls, or little thought and many.

The paper (section 5.1) calls the first deliberative and the second reactive, and finds its best
runs deliberative, with most calls running without an error. Everything here is read from the rows
of `rollouts/*.jsonl`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

CALL_MARK = "<tool_call>"  # what opens a call in the text of an assistant turn

Mode = Literal["no call", "deliberative", "reactive", "mixed"]


@dataclasses.dataclass(frozen=True)
class Habit:
    """What one trajectory did with its tool."""

    think_tokens: float  # sampled before the first call; the whole response without one
    calls: int
    ok_calls: int  # calls whose program ran to its end
    correct: bool


@dataclasses.dataclass(frozen=True)
class Borders:
    """Where little thought ends and many calls begin."""

    think_tokens: float
    calls: float


def habit(row: Mapping[str, Any]) -> Habit:
    """What one row of a rollouts file did.

    A row counts the sampled tokens of the whole trajectory; how many of them precede the first call
    is estimated from the share of its sampled characters that do.
    """
    statuses = [result["status"] for result in row.get("results") or []]
    return Habit(
        think_tokens=row.get("sampled_len", 0) * _share_before_call(row),
        calls=len(row.get("calls") or []),
        ok_calls=statuses.count("ok"),
        correct=bool(row.get("correct")),
    )


def _share_before_call(row: Mapping[str, Any]) -> float:
    turns = [p["text"] for p in row.get("pieces") or [] if p["kind"] == "sampled"]
    text = "".join(turns)
    if not text or not row.get("calls"):
        return 1.0
    mark = text.find(CALL_MARK)
    return (mark if mark >= 0 else len(turns[0])) / len(text)


def borders(habits: Sequence[Habit]) -> Borders:
    """The medians over trajectories with a call: take them from one reference, such as the first
    step of a run, so that a shift of the others shows."""
    calling = [h for h in habits if h.calls] or list(habits)
    if not calling:
        raise ValueError("there are no trajectories to take the borders from.")
    return Borders(
        think_tokens=float(np.median([h.think_tokens for h in calling])),
        calls=float(np.median([h.calls for h in calling])),
    )


def mode(one: Habit, at: Borders) -> Mode:
    """Which way of working a trajectory shows; "mixed" when it thinks much and calls much, or
    neither."""
    if one.calls == 0:
        return "no call"
    thinks, calls_often = one.think_tokens >= at.think_tokens, one.calls > at.calls
    if thinks and not calls_often:
        return "deliberative"
    if calls_often and not thinks:
        return "reactive"
    return "mixed"


def summarize(rows: Sequence[Mapping[str, Any]], at: Borders | None = None) -> dict[str, Any]:
    """The habits of the rows in figures; `at` defaults to the rows' own medians.

    `call_ok` is the share of calls that ran to their end (None without a call), `causes` counts
    calls by status, `by_calls` and `modes` give for each class its share of the trajectories and
    how many of them are right.
    """
    habits = [habit(row) for row in rows]
    if not habits:
        raise ValueError("there are no trajectories to summarize.")
    at = at or borders(habits)
    calls = sum(h.calls for h in habits)
    calling = [h.think_tokens for h in habits if h.calls]
    return {
        "trajectories": len(habits),
        "correct": _mean([h.correct for h in habits]),
        "call_share": len(calling) / len(habits),
        "calls": calls / len(habits),
        "think_tokens": _mean(calling),
        "call_ok": sum(h.ok_calls for h in habits) / calls if calls else None,
        "causes": causes(rows),
        "by_calls": _classes(habits, [_calls_class(h.calls) for h in habits]),
        "modes": _classes(habits, [mode(h, at) for h in habits]),
        "borders": dataclasses.asdict(at),
    }


def causes(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many calls ended with each status, the commonest first."""
    statuses = Counter(r["status"] for row in rows for r in row.get("results") or [])
    return dict(statuses.most_common())


def _calls_class(calls: int) -> str:
    return str(calls) if calls < 3 else "3 or more"


def _classes(habits: Sequence[Habit], names: Sequence[str]) -> dict[str, dict[str, float]]:
    found = {}
    for name in sorted(set(names)):
        right = [h.correct for h, of in zip(habits, names, strict=True) if of == name]
        found[name] = {"share": len(right) / len(habits), "correct": _mean(right)}
    return found


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
