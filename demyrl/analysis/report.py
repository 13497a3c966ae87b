"""One HTML page about a run: did it get better, how, and what does the policy do?

    python -m demyrl.analysis.report --workdir runs/quickstart

reads a quickstart folder (sft/, rl/, eval_sft/, eval_rl/, eval_rl_no_tool/, summary.json) or the
workdir of a single training run, and writes `report.html`, which needs no other file, and the
figures as PNGs beside it. What is missing is left out and said. No network.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demyrl.analysis import figures, modes, page
from demyrl.analysis.charts import CHARTS
from demyrl.analysis.run_folder import Rows, Run, concerns, load
from demyrl.analysis.transcript import as_json, examples, transcript
from demyrl.logs import flatten

COLOURS = {"SFT": 0, "RL": 1, "RL without tool": 2}
STATUS_COLOURS = {
    "ok": 2,
    "error": 1,
    "malformed": 3,
    "timeout": 4,
    "output_limit": 0,
    "not_executed": 5,
    "sandbox_error": 5,
}
THEMES = {"": figures.LIGHT, "dark": figures.DARK}
MODE_COLOURS = {"deliberative": 0, "reactive": 1, "mixed": 5, "no call": 4}


def render(run: Run, folder: str | Path) -> str:
    """The page. Its figures are also written as PNGs to `folder`, for the dark theme below it."""
    folder = Path(folder)
    sections = {
        "results": _results(run, folder),
        "training": _training(run, folder),
        "tool": _tool(run),
        "reasoning": _reasoning(run),
        "examples": _examples(run),
        "cold start": _cold_start(run, folder),
        "setup": _setup(run),
    }
    links = "".join(
        f'<a href="#{name.replace(" ", "-")}">{name.capitalize()}</a>'
        for name, section in sections.items()
        if section
    )
    title = headline(run)
    header = (
        f'<header><div class="kicker">{page.escape(_kicker(run))}</div>'
        f"<h1>{page.escape(title)}</h1><p>{page.escape(_opening(run))}</p></header>"
    )
    worry = page.alert("Look at this first", concerns(run))
    absent = "Not in this folder, so left out: " + ", ".join(run.missing) + "."
    parts = [header, f"<nav>{links}</nav>", worry, *sections.values()]
    return page.page(title, "\n".join([*parts, page.note(absent) if run.missing else ""]))


def headline(run: Run) -> str:
    """What the run came to, in a few words."""
    averages = {
        name: e["domains"]["all"]["avg_at_k"]["value"] for name, e in run.evaluations.items()
    }
    if "SFT" in averages and "RL" in averages:
        return f"From {averages['SFT']:.0%} to {averages['RL']:.0%} right"
    if averages:
        name, value = next(iter(averages.items()))
        return f"{name}: {value:.0%} right"
    _, values = figures.series(run.training, "reward/avg_at_g")
    if len(values):
        few = max(1, len(values) // 10)
        return f"From {values[:few].mean():.0%} to {values[-few:].mean():.0%} right while training"
    return "A training run"


def _kicker(run: Run) -> str:
    seed = run.summary.get("seed", run.config.get("seed"))
    parts = ["demyrl report"]
    parts += [f"seed {seed}"] if seed is not None else []
    parts += [run.starts[-1]["started"][:10]] if run.starts and "started" in run.starts[-1] else []
    return ", ".join(parts)


def _opening(run: Run) -> str:
    found = run.evaluations.get("RL") or next(iter(run.evaluations.values()), None)
    if not found:
        return "Measured on its training problems, as each step sampled them."
    overall = found["domains"]["all"]
    held_out = (
        f"{overall['problems']} held-out problems" if "problems" in overall else "held-out problems"
    )
    text = f"Share of right answers on {held_out}, {found['k']} samples each"
    if "SFT" in run.evaluations and "RL" in run.evaluations:
        text += ", after the cold start (SFT) and after reinforcement learning (RL)"
    without = run.evaluations.get("RL without tool")
    if without:
        value = without["domains"]["all"]["avg_at_k"]["value"]
        text += f". Without its tool the trained model gets {page.percent(value)}"
    return text + "."


def _results(run: Run, folder: Path) -> str:
    if not run.evaluations:
        return ""
    k = next(iter(run.evaluations.values()))["k"]
    domains = dict.fromkeys(d for e in run.evaluations.values() for d in e["domains"])
    groups = {}
    for domain in domains:
        title = "All problems" if domain == "all" else domain.capitalize()
        measured = {
            n: e["domains"][domain] for n, e in run.evaluations.items() if domain in e["domains"]
        }
        cell = page.estimate if domain == "all" else page.short_estimate
        groups[title] = [_result_cells(name, found, cell) for name, found in measured.items()]
    heads = ("Model", f"avg@{k}", f"pass@{k}", f"maj@{k}", "with a call")
    drawn = [
        figures.before_after(run.evaluations, folder / shade / "before_after.png", theme)
        for shade, theme in THEMES.items()
    ]
    return page.section(
        "results",
        "Before and after",
        f"avg@{k}: a sample is right. pass@{k}: at least one of {k} is. maj@{k}: the commonest "
        "answer is. Small figures are 95% intervals over problems.",
        page.card(page.table(heads, groups)),
        page.picture(*drawn, "avg and pass by domain and model", "", wide=True),
    )


def _result_cells(
    name: str, numbers: Mapping[str, Any], cell: Callable[[Mapping[str, Any], int], str]
) -> list[str]:
    measures = ("avg_at_k", "pass_at_k", "maj_at_k", "call_share")
    colour = COLOURS[name]
    return [page.dot(name, colour), *(cell(numbers[measure], colour) for measure in measures)]


def _pictures(rows: Rows, folder: Path, cold_start: bool) -> str:
    """The charts of the cold start, or all others, in a grid."""
    charts = [chart for chart in CHARTS if chart.name.startswith("sft_") == cold_start]
    light, dark = (figures.draw(rows, folder / s, theme, charts) for s, theme in THEMES.items())
    shown = [
        page.picture(light[chart.name], dark[chart.name], chart.title, chart.reading)
        for chart in charts
        if chart.name in light
    ]
    return f'<div class="figures">{"".join(shown)}</div>' if shown else ""


def _training(run: Run, folder: Path) -> str:
    lead = "Thin lines are single steps, thick lines their running mean."
    return page.section("training", "Training", lead, _pictures(run.training, folder, False))


def _cold_start(run: Run, folder: Path) -> str:
    rows = run.cold_start or run.training
    lead = "Supervised training on demonstrations, before any reinforcement learning."
    return page.section("cold-start", "Cold start", lead, _pictures(rows, folder, True))


def _tool(run: Run) -> str:
    groups = []
    for name, rows in run.rollouts.items():
        counts = modes.causes(rows)
        total = sum(counts.values())
        if total:
            shares = {s: counts[s] / total for s in STATUS_COLOURS if s in counts}
            said = ", ".join(f"{s.replace('_', ' ')} {counts[s]}" for s in counts)
            bar = page.stack(shares, STATUS_COLOURS) + f"<small>{page.escape(said)}</small>"
            groups.append([page.escape(name), str(total), page.percent(shares.get("ok", 0.0)), bar])
    if not groups:
        return ""
    seen = {s for rows in run.rollouts.values() for s in modes.causes(rows)}
    legend = {s.replace("_", " "): c for s, c in STATUS_COLOURS.items() if s in seen}
    heads = ("Trajectories of", "calls", "ran", "how calls ended")
    lead = "A failed call is no fault of the run: the policy reads the message and may try again."
    table = page.table(heads, {"": groups})
    return page.section("tool", "Tool calls", lead, page.card(table, page.keys(legend)))


def _reasoning(run: Run) -> str:
    sources = {name: rows for name, rows in run.rollouts.items() if rows and "without" not in name}
    if not sources:
        return ""
    at = modes.borders([modes.habit(row) for row in next(iter(sources.values()))])
    found = {name: modes.summarize(rows, at) for name, rows in sources.items()}
    heads = ("Trajectories of", "think tokens", "calls", "calls that ran", "way of working")
    rows = [_reasoning_cells(name, numbers) for name, numbers in found.items()]
    calls = f"{at.calls:g} call" + ("" if at.calls == 1 else "s")
    lead = (
        f"Deliberative: at least {at.think_tokens:.0f} tokens before the first call and no more "
        f"than {calls}, the medians of {next(iter(found))}. "
        "Reactive: the reverse of both."
    )
    main_name = "RL" if "RL" in found else list(found)[-1]
    right = [
        [page.escape(count), page.percent(of["share"]), page.percent(of["correct"])]
        for count, of in found[main_name]["by_calls"].items()
    ]
    return page.section(
        "reasoning",
        "Reasoning mode",
        lead,
        page.card(page.table(heads, {"": rows}), page.keys(MODE_COLOURS)),
        page.card(page.table((f"Calls, {main_name}", "share", "right"), {"": right})),
    )


def _reasoning_cells(name: str, numbers: Mapping[str, Any]) -> list[str]:
    shares = {m: numbers["modes"][m]["share"] for m in MODE_COLOURS if m in numbers["modes"]}
    return [
        page.escape(name),
        page.number(numbers["think_tokens"], 0),
        page.number(numbers["calls"]),
        page.percent(numbers["call_ok"]),
        page.stack(shares, MODE_COLOURS),
    ]


def _examples(run: Run) -> str:
    name = "RL" if "RL" in run.rollouts else next(reversed(run.rollouts), None)
    if name is None:
        return ""
    chosen = examples(run.rollouts[name])
    shown = [
        transcript(title, row, index == 0) for index, (title, row) in enumerate(chosen.items())
    ]
    before = _before(run, chosen)
    shading = any("spans" in piece for row in chosen.values() for piece in row["pieces"])
    switch = (
        '<input type="checkbox" id="shade"><label class="switch" for="shade">'
        "Shade tokens by how unlikely they were</label>"
    )
    return page.section(
        "examples",
        "Trajectories",
        f"From {name}: one of each kind there is, word for word. Blue was written by the policy "
        "and is trained on, amber came from the tool, grey is the prompt.",
        (switch if shading else "") + f'<div class="transcripts">{before}{"".join(shown)}</div>',
    )


def _before(run: Run, chosen: Mapping[str, Any]) -> str:
    """A wrong answer of the SFT model to a problem of which the RL model's right one is shown."""
    solved = {row["problem_id"] for row in chosen.values() if row["correct"]}
    wrong = [
        r for r in run.rollouts.get("SFT", []) if not r["correct"] and r["problem_id"] in solved
    ]
    return transcript("Before RL, a problem solved below", wrong[0]) if wrong else ""


def _setup(run: Run) -> str:
    parts = []
    seconds = run.summary.get("seconds")
    if seconds:
        rows = [[page.escape(name), f"{value:.0f} s"] for name, value in seconds.items()]
        rows.append(["<b>in all</b>", f"<b>{sum(seconds.values()):.0f} s</b>"])
        parts.append(page.card(page.table(("Stage", "time"), {"": rows})))
    if run.config:
        settings = [
            [f"<code>{page.escape(key)}</code>", page.escape(json.dumps(value))]
            for key, value in flatten(run.config).items()
        ]
        body = page.table(("Setting", "value"), {"": settings})
        parts.append(page.fold("Config", f"{len(settings)} settings", body))
    if run.starts:
        parts.append(page.fold("Environment", "versions, commit, command", as_json(run.starts)))
    return page.section("setup", "Setup", "What made these figures.", *parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demyrl.analysis.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workdir", required=True, help="the folder a run wrote")
    parser.add_argument("--out", help="the page to write; by default report.html in the workdir")
    options = parser.parse_args(arguments)
    out = Path(options.out or Path(options.workdir) / "report.html")
    try:
        run = load(options.workdir)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(run, out.parent / "figures"), encoding="utf-8")
    print(f"report: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
