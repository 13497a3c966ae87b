"""Single trajectories for reading: which ones to show, and how one looks turn by turn."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from demyrl.analysis.page import escape, fold, number

Row = Mapping[str, Any]

FULL_SURPRISE_NATS = 3.0  # where the shading of a token is at its strongest
LONGEST = 6000  # characters of a piece that are shown
SPEAKERS = {"prompt": "Prompt", "sampled": "Policy", "tool": "Tool output"}


def _failed_calls(row: Row) -> list[str]:
    return [r["status"] for r in row.get("results") or [] if r["status"] != "ok"]


EXAMPLES: dict[str, Callable[[Row], bool]] = {
    "Right, with one call": lambda row: (
        row["correct"] and len(row["calls"]) == 1 and not _failed_calls(row)
    ),
    "Right, after a failed call": lambda row: row["correct"] and bool(_failed_calls(row)),
    "Right, with several calls": lambda row: (
        row["correct"] and len(row["calls"]) > 1 and not _failed_calls(row)
    ),
    "Right without a call": lambda row: row["correct"] and not row["calls"],
    "Wrong, though its programs ran": lambda row: (
        not row["correct"] and bool(row["calls"]) and not _failed_calls(row)
    ),
    "Wrong, after a failed call": lambda row: not row["correct"] and bool(_failed_calls(row)),
    "Wrong without a call": lambda row: not row["correct"] and not row["calls"],
    "Cut off before an answer": lambda row: row["stop"] != "answered",
}


def examples(rows: Sequence[Row]) -> dict[str, Row]:
    """One row of each kind of EXAMPLES that there is, from different domains where possible."""
    chosen: dict[str, Row] = {}
    for title, fits in EXAMPLES.items():
        taken = [row["domain"] for row in chosen.values()]
        fitting = [row for row in rows if fits(row) and row not in chosen.values()]
        if fitting:
            chosen[title] = min(fitting, key=lambda row: taken.count(row["domain"]))
    return chosen


def transcript(title: str, row: Row, is_open: bool = False) -> str:
    """One trajectory as a foldable part of a page."""
    aside = f"{row['domain']}, {row['problem_id']}, sample {row['sample']}"
    turns = "".join(_piece(piece, row) for piece in row["pieces"])
    return fold(title, aside, f'{_verdict(row)}<div class="turns">{turns}</div>', is_open)


def _verdict(row: Row) -> str:
    given = row.get("answer_given")
    said = "no answer" if given is None else f"answered {given}"
    word, style = ("Right", "right") if row["correct"] else ("Wrong", "wrong")
    reward = {k: v for k, v in (row.get("reward") or {}).items() if v and k != "total"}
    parts = ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in reward.items())
    total = (row.get("reward") or {}).get("total")
    return (
        f'<p class="asked">{escape(_shortened(row["prompt"]))}</p>'
        f'<p class="verdict {style}">{word}: {escape(said)}, expected {escape(row["answer"])}</p>'
        f'<p class="who">Reward {number(total)} ({escape(parts or "could not be graded")}). '
        f"{row['sampled_len']} tokens written, {row['response_len']} with tool output. "
        f"Ended as {escape(str(row['stop']).replace('_', ' '))}.</p>"
    )


def _piece(piece: Mapping[str, Any], row: Row) -> str:
    kind = piece["kind"]
    said = [SPEAKERS[kind]]
    if kind == "sampled" and piece.get("mean_logprob") is not None:
        said.append(f"mean log-prob {number(piece['mean_logprob'], 3)}")
    result = _result_of(piece, row) if kind == "tool" else None
    if result:
        said.append(f"{result['status']}, {number(result['seconds'])} s")
    spans = piece.get("spans")
    text = "".join(_token(*span) for span in spans) if spans else escape(_shortened(piece["text"]))
    return f'<p class="who">{escape(", ".join(said))}</p><pre class="{kind}">{text}</pre>'


def _result_of(piece: Mapping[str, Any], row: Row) -> Mapping[str, Any] | None:
    """The result in a tool piece, when its turn made exactly one call."""
    results = row.get("results") or []
    tools = [p for p in row["pieces"] if p["kind"] == "tool"]
    return results[tools.index(piece)] if len(tools) == len(results) else None


def _token(text: str, logprob: float | None) -> str:
    """A token, with how much it surprised the policy that chose it: 0 for not at all, 1 for
    FULL_SURPRISE_NATS and more."""
    surprise = min(1.0, max(0.0, -(logprob or 0.0) / FULL_SURPRISE_NATS))
    if surprise < 0.01:
        return escape(text)
    title = f"log-prob {logprob:.3f}"
    return f'<span style="--surprise:{surprise:.2f}" title="{title}">{escape(text)}</span>'


def _shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - LONGEST} characters left out ...]\n{text[-half:]}"


def as_json(value: Any) -> str:
    """A block of indented JSON."""
    return f'<pre class="plain">{escape(json.dumps(value, indent=2))}</pre>'
