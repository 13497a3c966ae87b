"""The whole chain at the size of a laptop, and a table of what it achieved.

    python -m experiments.quickstart --seed 0 --workdir runs/quickstart

Each stage is its own command, printed before it runs; running this again goes on where it stopped.
Leaves `summary.json` and `report.html` in the workdir.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demyrl.logs import write_json

CONFIG = "configs/grpo_tcr.py:tiny"


def stages(root: Path, seed: int, changes: list[str]) -> dict[str, list[str]]:
    """Stage name to its command line, in order; `changes` are KEY=VALUE for every stage."""

    def stage(module: str, name: str, **settings: Any) -> list[str]:
        pairs = [f"{key}={value}" for key, value in settings.items()] + changes
        flags = [f"--config.{pair}" for pair in pairs]
        flags += [f"--config.seed={seed}", f"--workdir={root / name}"]
        return ["-m", f"demyrl.{module}", f"--config={CONFIG}", *flags]

    sft, rl = {"model.source": root / "sft"}, {"model.source": root / "rl"}
    real, pool = root / "collect" / "real.jsonl", root / "select" / "pool.jsonl"
    return {
        "collect": stage("collect", "collect"),
        "sft": stage("train_sft", "sft", **{"sft.demonstrations": real}),
        "eval_sft": stage("evaluate", "eval_sft", **sft),
        "select": stage("select_problems", "select", **sft),
        "rl": stage("train", "rl", **sft, **{"train.pool": pool}),
        "eval_rl": stage("evaluate", "eval_rl", **rl),
        "eval_rl_no_tool": stage("evaluate", "eval_rl_no_tool", **rl, **{"tools.enabled": False}),
    }


def run_child(words: list[str]) -> int:
    """The exit code of a Python process; Ctrl-C reaches it too, and it is given time to stop."""
    child = subprocess.Popen([sys.executable, *words])
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def run_stage(name: str, words: list[str], root: Path) -> float:
    """Runs a stage unless the same command has finished before; its seconds over all starts."""
    mark = root / name / "stage.json"
    before = json.loads(mark.read_text()) if mark.is_file() else {}
    if before.get("finished") and before["command"] == words:
        return before["seconds"]
    mark.parent.mkdir(parents=True, exist_ok=True)
    print(f"\n$ python {' '.join(words)}", flush=True)
    started = time.perf_counter()
    code = run_child(words)
    spent = 0.0 if before.get("finished") else before.get("seconds", 0.0)
    seconds = round(spent + time.perf_counter() - started, 1)
    write_json(mark, {"command": words, "seconds": seconds, "finished": not code})
    if code:
        print(
            f"\nStopped in stage {name} (exit code {code}). The same command again goes on there."
        )
        sys.exit(code)
    return seconds


def overall(root: Path, name: str) -> dict[str, float]:
    """The four numbers of one evaluation over all domains."""
    content = json.loads((root / name / "evaluation.json").read_text())
    k, numbers = content["k"], content["domains"]["all"]
    named = {f"{each}@{k}": numbers[f"{each}_at_k"]["value"] for each in ("avg", "pass", "maj")}
    return {**named, "call_share": numbers["call_share"]["value"]}


def print_table(summary: dict[str, Any]) -> None:
    names = {"sft": "after SFT", "rl": "after GRPO-TCR", "rl_no_tool": "... with the tool off"}
    table = Table(title="Held-out problems")
    table.add_column("model")
    for column in summary["sft"]:
        table.add_column(column, justify="right")
    for name, title in names.items():
        table.add_row(title, *(f"{value:.3f}" for value in summary[name].values()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    root = options.workdir
    make_room(root, options.seed)
    commands = stages(root, options.seed, options.set)
    seconds = {name: run_stage(name, command, root) for name, command in commands.items()}
    evaluations = {"sft": "eval_sft", "rl": "eval_rl", "rl_no_tool": "eval_rl_no_tool"}
    numbers = {name: overall(root, folder) for name, folder in evaluations.items()}
    summary = {"seed": options.seed, **numbers, "seconds": seconds}
    write_json(root / "summary.json", summary)
    report = ["-m", "demyrl.analysis.report", "--workdir", str(root)]
    seconds["report"] = run_stage("report", report, root)
    write_json(root / "summary.json", summary)
    print_table(summary)
    print(f"All stages took {sum(seconds.values()) / 60:.1f} minutes. Report: {root}/report.html")


def make_room(root: Path, seed: int) -> None:
    """Moves the run of another seed out of the way; nothing is deleted."""
    mark = root / "seed.json"
    if mark.is_file() and (other := json.loads(mark.read_text())) != seed:
        aside = root.with_name(f"{root.name}_seed{other}_{int(mark.stat().st_mtime)}")
        root.rename(aside)
        print(f"{root} held the quickstart of seed {other}: it is now {aside}.")
    root.mkdir(parents=True, exist_ok=True)
    if not mark.is_file():
        write_json(mark, seed)


if __name__ == "__main__":
    main()
