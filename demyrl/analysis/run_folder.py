"""What a folder that runs wrote holds: of a quickstart, or of a single training run."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demyrl.analysis import figures
from demyrl.logs import read_rows

Rows = list[dict[str, Any]]

MODELS = {  # evaluation folder -> name, key in summary.json
    "eval_sft": ("SFT", "sft"),
    "eval_rl": ("RL", "rl"),
    "eval_rl_no_tool": ("RL without tool", "rl_no_tool"),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What was found in a folder; empty where it holds nothing."""

    training: Rows
    cold_start: Rows
    evaluations: dict[str, dict[str, Any]]  # name of the model -> what `stats.summarize` gave
    rollouts: dict[str, Rows]  # where they are from -> trajectories
    summary: dict[str, Any]
    config: dict[str, Any]
    starts: list[dict[str, Any]]  # the environment at each start
    missing: list[str]


def load(workdir: str | Path) -> Run:
    """Everything a report can show of a folder.

    Raises FileNotFoundError when nothing in it was written by a run.
    """
    root, missing = Path(workdir), []
    chain = not (root / "metrics.jsonl").exists()
    rl = root / "rl" if chain else root
    training = _rows(rl / "metrics.jsonl", missing)
    cold_start = _rows(root / "sft" / "metrics.jsonl", missing) if chain else []
    summary = _json(root / "summary.json", missing, {}) if chain else {}
    evaluations, rollouts = _evaluations(root, summary, missing if chain else [])
    rollouts.update(_training_rollouts(rl, missing))
    if not (training or cold_start or evaluations or rollouts):
        raise FileNotFoundError(
            f"{root} holds no run: expected metrics.jsonl, or the folders of a quickstart "
            f"(sft, rl, {', '.join(MODELS)}). Give the folder a run wrote as --workdir."
        )
    config = _json(rl / "config.json", missing, {})
    starts = _json(rl / "environment.json", missing, [])
    return Run(training, cold_start, evaluations, rollouts, summary, config, starts, missing)


def _evaluations(
    root: Path, summary: Mapping[str, Any], missing: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Rows]]:
    evaluations, rollouts = {}, {}
    for folder, (name, key) in MODELS.items():
        found = _json(root / folder / "evaluation.json", missing, None)
        found = found or _without_intervals(summary.get(key))
        if found:
            evaluations[name] = found
        files = sorted((root / folder / "rollouts").glob("*.jsonl"))
        if files:
            rollouts[name] = _rows(files[-1], missing)
    return evaluations, rollouts


def _without_intervals(numbers: Mapping[str, float] | None) -> dict[str, Any] | None:
    """An evaluation made from the few numbers of summary.json, {"avg@8": 0.9, ...}."""
    if not numbers:
        return None
    found = {name.partition("@")[0]: value for name, value in numbers.items()}
    k = next((int(name.partition("@")[2]) for name in numbers if "@" in name), 0)
    overall = {f"{name}_at_k": {"value": found[name]} for name in ("avg", "pass", "maj")}
    overall["call_share"] = {"value": found["call_share"]}
    return {"k": k, "domains": {"all": overall}}


def _training_rollouts(workdir: Path, missing: list[str]) -> dict[str, Rows]:
    files = sorted((workdir / "rollouts").glob("step_*.jsonl"))
    if not files:
        missing.append(f"{workdir.name}/rollouts")
        return {}
    ends = dict.fromkeys([files[0], files[-1]])
    return {f"training, step {int(f.stem.removeprefix('step_'))}": _rows(f, missing) for f in ends}


def _rows(path: Path, missing: list[str]) -> Rows:
    if path.exists():
        return read_rows(path)
    missing.append(f"{path.parent.name}/{path.name}")
    return []


def _json(path: Path, missing: list[str], default: Any) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        missing.append(f"{path.parent.name}/{path.name}")
    except json.JSONDecodeError:
        missing.append(f"{path.parent.name}/{path.name} (not valid JSON)")
    return default


def concerns(run: Run) -> list[str]:
    """What makes the figures of a run doubtful, in sentences."""
    found = []

    def last(name: str) -> Any:
        return figures.series(run.training, name)[1]

    if len(last("rollout/truncated")) >= 3 and (last("rollout/truncated")[-3:] >= 0.9).all():
        found.append("Nine of ten trajectories are cut off: the length limit is below the answers.")
    if len(last("reward/equal_groups")) >= 3 and (last("reward/equal_groups")[-3:] == 1.0).all():
        found.append("All rewards in every group are equal: there is nothing left to learn from.")
    if len(last("policy/sampler_gap")) and last("policy/sampler_gap").max() > 0.01:
        found.append("Sampler and trainer disagree on the log-probs (policy/sampler_gap > 0.01).")
    if last("reward/ungraded").sum() > 0:
        found.append(f"{last('reward/ungraded').sum():.0f} trajectories could not be graded.")
    if last("tools/sandbox_errors").sum() > 0:
        found.append(f"{last('tools/sandbox_errors').sum():.0f} calls failed through the sandbox.")
    if any(row.get("isolation") == "unsafe" for rows in run.rollouts.values() for row in rows):
        found.append("The model's programs ran without isolation (tools.isolation = unsafe).")
    return found
