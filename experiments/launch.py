"""Runs an experiment: every variant with every seed, then a summary, a table and figures.

    python -m experiments.launch recipe_ladder                    # shows what it would do
    python -m experiments.launch recipe_ladder --run --seeds 3    # does it

An experiment is a file in this folder with BASE, a config, and VARIANTS, the keys that each of them
changes. All runs start from the SFT model and the problems that a quickstart left. They go one
after another and share compiled programs; the same command again goes on where it was stopped.
Leaves `VARIANT/seed0` (training), `VARIANT/seed0_eval`, `summary.json` and figures in the workdir.
"""

import argparse
import dataclasses
import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from demyrl import command
from demyrl.analysis.figures import compare
from demyrl.logs import read_rows
from experiments.quickstart import run_child

FIGURES = {
    "reward/avg_at_g": "Right answers in training",
    "policy/entropy": "Entropy of the policy, nats",
    "rollout/response_tokens": "Length of the responses, tokens",
}
LAST_STEPS = 5  # a step is a small sample: the end of training is the mean over as many

Command = list[str]
Runner = Callable[[Command], int]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One question: what is compared, and with what in common."""

    name: str
    about: str
    base: str
    variants: Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One variant with one seed: how it is trained and then evaluated."""

    variant: str
    workdir: Path
    train: Command
    evaluate: Command

    @property
    def evaluation(self) -> Path:
        return beside(self.workdir)


def beside(workdir: Path) -> Path:
    """Where the model of a training workdir is evaluated."""
    return workdir.with_name(f"{workdir.name}_eval")


def names_there() -> list[str]:
    """Every experiment in this folder."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if re.search(r"^VARIANTS = ", file.read_text(), re.M)]


def load(name: str) -> Experiment:
    """The experiment of a file; raises ValueError, with the names there are, for any other."""
    there = names_there()
    if name not in there:
        raise ValueError(f"there is no experiment {name!r}: there are {', '.join(there)}.")
    module = importlib.import_module(f"experiments.{name}")
    return Experiment(name, module.__doc__.strip(), module.BASE, module.VARIANTS)


def flags(settings: Mapping[str, Any]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in settings.items()]


def runs_of(
    experiment: Experiment, workdir: Path, seeds: Sequence[int], common: Mapping[str, Any]
) -> list[Run]:
    """Every run, seed by seed, so that the first comparison is there early.

    `common` are settings of all runs. Raises ValueError for a setting that the base config does not
    have, that has another type there, or that the experiment varies.
    """
    check_common(experiment, common)
    runs = []
    for seed in seeds:
        for variant, changes in experiment.variants.items():
            settings = {**common, **changes, "seed": seed}
            run = run_of(experiment.base, variant, workdir / variant / f"seed{seed}", settings)
            command.parse(["demyrl.train", *run.train[2:]])
            runs.append(run)
    return runs


def run_of(base: str, variant: str, workdir: Path, settings: Mapping[str, Any]) -> Run:
    trained = {**settings, "model.source": workdir}
    begin = f"--config={base}"
    train = ["-m", "demyrl.train", begin, *flags(settings), f"--workdir={workdir}"]
    to = f"--workdir={beside(workdir)}"
    return Run(variant, workdir, train, ["-m", "demyrl.evaluate", begin, *flags(trained), to])


def check_common(experiment: Experiment, common: Mapping[str, Any]) -> None:
    varied = {key for changes in experiment.variants.values() for key in changes}
    varied.add("seed")
    for key in common:
        if key in varied:
            raise ValueError(
                f"{key} can't be the same in all runs: it is what {experiment.name} varies."
            )


def check_start(common: Mapping[str, Any]) -> None:
    """Raises ValueError when the model or the problems that runs start from are missing."""
    for key in ("model.source", "train.pool"):
        place = str(common[key])
        if place and not place.startswith("builtin:") and not Path(place).exists():
            raise ValueError(
                f"{key} is {place}, which is not there: run `make quickstart` first, give the "
                f"workdir of a finished quickstart as --base-run, or say --set {key}=..."
            )


def run_stage(words: Command, workdir: Path, runner: Runner) -> None:
    """Runs a command unless it has finished in its workdir before.

    Raises RuntimeError when it ends with another exit code than 0.
    """
    mark = workdir / "finished.json"
    if mark.is_file() and json.loads(mark.read_text()) == words:
        return
    print(f"\n$ {shown(words)}", flush=True)
    code = runner(words)
    if code:
        raise RuntimeError(
            f"\n{workdir} ended with exit code {code}. Run the same command again to go on."
        )
    workdir.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(words))


def run_all(runs: Sequence[Run], runner: Runner = run_child, jobs: int = 1) -> None:
    """Trains and evaluates whatever has not finished yet, `jobs` runs at a time.

    The first failure ends the launch; runs in progress come to their end, others do not begin.
    """

    def run_one(run: Run) -> None:
        run_stage(run.train, run.workdir, runner)
        run_stage(run.evaluate, run.evaluation, runner)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(run_one, run) for run in runs]
        try:
            for future in as_completed(waiting):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def shown(words: Command) -> str:
    return shlex.join(["python", *words])


# What came out


def held_out(folder: Path) -> dict[str, float]:
    """Accuracy and share of trajectories with calls, over all domains of an evaluation."""
    content = json.loads((folder / "evaluation.json").read_text())
    overall, k = content["domains"]["all"], content["k"]
    accuracy = {f"{name}@{k}": overall[f"{name}_at_k"]["value"] for name in ("avg", "pass")}
    return {**accuracy, "call_share": overall["call_share"]["value"]}


def end_of_training(workdir: Path) -> dict[str, float]:
    """The metrics of FIGURES, each the mean over the last steps."""
    rows = read_rows(workdir / "metrics.jsonl")[-LAST_STEPS:]
    logged = {name: [row[name] for row in rows if row.get(name) is not None] for name in FIGURES}
    return {name: float(np.mean(values)) for name, values in logged.items() if values}


def summarize(experiment: Experiment, runs: Sequence[Run]) -> dict[str, Any]:
    """For each variant what it changes, and the mean, least and most over its seeds."""
    variants = {}
    for variant, changes in experiment.variants.items():
        mine = [run for run in runs if run.variant == variant]
        numbers = [held_out(run.evaluation) | end_of_training(run.workdir) for run in mine]
        spreads = {name: spread([each[name] for each in numbers]) for name in numbers[0]}
        variants[variant] = {"changes": dict(changes), **spreads}
    return {"experiment": experiment.name, "base": experiment.base, "variants": variants}


def spread(values: Sequence[float]) -> dict[str, Any]:
    mean = float(np.mean(values))
    return {"mean": mean, "min": min(values), "max": max(values), "seeds": list(values)}


def draw(runs: Sequence[Run], workdir: Path) -> list[Path]:
    """One figure for each metric of FIGURES, with a line for each variant."""
    folders: dict[str, list[Path]] = {}
    for run in runs:
        folders.setdefault(run.variant, []).append(run.workdir)
    return [
        compare(folders, metric, workdir / f"{metric.partition('/')[2]}.png", title=title)
        for metric, title in FIGURES.items()
    ]


# What is shown


def print_plan(experiment: Experiment, runs: Sequence[Run]) -> None:
    print(f"{experiment.about}\n")
    table = Table(title=f"{experiment.name}: changes to {experiment.base}", title_justify="left")
    table.add_column("variant")
    table.add_column("changes")
    for variant, changes in experiment.variants.items():
        said = "\n".join(f"{key} = {value}" for key, value in changes.items())
        table.add_row(variant, said or "nothing", end_section=True)
    Console().print(table)
    for run in runs:
        print(f"\n{shown(run.train)}\n{shown(run.evaluate)}")


def print_summary(summary: Mapping[str, Any]) -> None:
    title = f"{summary['experiment']}: mean over seeds, least to most"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("variant")
    rows = {name: dict(part) for name, part in summary["variants"].items()}
    for part in rows.values():
        part.pop("changes")
    for column in next(iter(rows.values())):
        table.add_column(column.rpartition("/")[2].replace("_", " "), justify="right")
    for name, part in rows.items():
        table.add_row(name, *map(cell, part.values()))
    if "start" in summary:
        table.add_row("(start)", *(f"{value:.3f}" for value in summary["start"].values()))
    Console().print(table)


def cell(values: Mapping[str, Any]) -> str:
    digits = 3 if values["max"] < 10 else 0
    low, high = (f"{values[end]:.{max(digits - 1, 0)}f}" for end in ("min", "max"))
    return f"{values['mean']:.{digits}f}\n{low}–{high}"


# The command line


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"one of {', '.join(names_there())}")
    parser.add_argument("--run", action="store_true", help="run it; without, only show it")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--steps", type=int, help="training steps of each run")
    parser.add_argument("--workdir", type=Path, help="runs/NAME unless given")
    parser.add_argument("--base-run", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args(argv)


def common_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all runs have in common: where they start, and what the command line sets."""
    common = {
        "model.source": options.base_run / "sft",
        "train.pool": options.base_run / "select" / "pool.jsonl",
    }
    if options.steps:
        common["train.steps"] = options.steps
    for word in options.set:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--set {word} has no '=': write --set KEY=VALUE.")
        common[key] = value
    return common


def launch(options: argparse.Namespace, runner: Runner = run_child) -> None:
    """Shows the experiment, or runs it; raises ValueError for what the user got wrong."""
    experiment = load(options.name)
    workdir = options.workdir or Path("runs") / experiment.name
    common = common_settings(options)
    if options.seeds < 1 or options.jobs < 1:
        raise ValueError(
            f"--seeds is {options.seeds} and --jobs is {options.jobs}: use at least 1 of each."
        )
    runs = runs_of(experiment, workdir, range(options.seeds), common)
    if not options.run:
        print_plan(experiment, runs)
        return
    check_start(common)
    run_all(runs, runner, options.jobs)
    summary = summarize(experiment, runs)
    if (options.base_run / "eval_sft" / "evaluation.json").is_file():
        summary["start"] = held_out(options.base_run / "eval_sft")
    (workdir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    figures = draw(runs, workdir)
    print_summary(summary)
    print(f"{workdir}/summary.json, {', '.join(map(str, figures))}")


def main(argv: Sequence[str] | None = None) -> None:
    try:
        launch(options_of(argv))
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        sys.exit(command.MISUSE)
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to go on.", file=sys.stderr)
        sys.exit(command.INTERRUPTED)


if __name__ == "__main__":
    main()
