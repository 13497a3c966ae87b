"""Model-aware selection: the problems that a model solves sometimes (paper, section 3.3).

    python -m demyrl.select_problems --config=configs/grpo_tcr.py:tiny \\
        --config.model.source=runs/x/sft --workdir=runs/x/select

Samples every candidate `select.samples` times and drops those with pass rate 0 and 1: a group in
which all samples fail, or all succeed, has no gradient. Writes `pool.jsonl` for
`train.pool`, and `pass_rates.json`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from demyrl import command, logs, processes, recipe, storage
from demyrl.data.generators import tasks
from demyrl.data.problems import read_problems, write_problems
from demyrl.evaluate import begin, check_prompts, judge_policy, loaded_agent
from demyrl.storage import Place
from demyrl.tools.toolbox import ToolBox
from demyrl.types import Problem

CANDIDATES = 17  # added to the seed: other training problems than those of the demonstrations


def candidates(settings: recipe.Recipe) -> list[Problem]:
    """The problems to choose from: those of the file, or freshly made training problems."""
    if settings.problems_path:
        return read_problems(settings.problems_path)
    count, seed = settings.select.problems, settings.seed + CANDIDATES
    return [task.problem for task in tasks(settings.problems, "train", count, seed)]


def pass_rates(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of right samples among the graded ones of each problem id."""
    right = defaultdict(list)
    for verdict in verdicts:
        if verdict["graded"]:
            right[verdict["problem_id"]].append(verdict["correct"])
    return {problem_id: sum(each) / len(each) for problem_id, each in right.items()}


def difficulty(rate: float) -> str:
    """The paper's classes, and the two that teach nothing."""
    if rate in (0.0, 1.0):
        return "never" if rate == 0 else "always"
    return "hard" if rate <= 0.25 else "medium" if rate < 0.75 else "easy"


def select_problems(config: Any, workdir: Place) -> None:
    """The stage: writes pool.jsonl and pass_rates.json."""
    settings = recipe.read(config)
    with ToolBox(settings.tools) as tools:
        command.enable_compilation_cache()
        settings = begin(settings, workdir)
        part = settings.select
        agent = loaded_agent(settings, tools, part.samples, settings.rollout.sampler.temperature)
        problems = candidates(settings)
        check_prompts(agent, problems)
        with logs.Logs(workdir, 1, writes=processes.is_first()) as log:
            with log.phase("select", len(problems) * part.samples, 0) as advance:
                result = judge_policy(settings, agent, problems, 1, advance)
            log.trajectories(0, result.rows)
            rates = pass_rates(result.verdicts)
            log.note(f"pass rates: {dict(Counter(map(difficulty, rates.values())))}")
    folder = storage.path(workdir)
    if processes.is_first():
        logs.write_json(folder / "pass_rates.json", rates)
    kept = [problem for problem in problems if 0 < rates.get(problem.id, 0) < 1]
    if len(kept) < settings.train.problems:
        raise ValueError(
            f"only {len(kept)} of {len(problems)} problems have a pass rate between 0 and 1, and a "
            f"step takes {settings.train.problems}. Raise select.problems, or start from a model "
            "that solves more of them (fewer, if it solves all)."
        )
    if processes.is_first():
        write_problems(folder / "pool.jsonl", kept)


if __name__ == "__main__":
    command.run(select_problems, "configs/grpo_tcr.py:tiny")
