"""Demonstrations for the cold start: a teacher solves problems end to end with the real tool.

Writes `real.jsonl`, episodes whose answer comes from what the tool said, `stitched.jsonl`, episodes
of the same problems with the result stated first, and `summary.json`. Rows have the columns of
Open-AgentRL's SFT set (messages, tools) and the problem's id. The same settings give the same
bytes.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from demyrl import command, logs, recipe, storage
from demyrl.data.demonstrations import Episode, Habits, demonstrate, stitch
from demyrl.data.generators import ProblemConfig, Task, digest, tasks
from demyrl.data.problems import write_rows
from demyrl.rewards.grade import judge
from demyrl.storage import Place
from demyrl.text.chat import row_of
from demyrl.text.prompts import question
from demyrl.tools.toolbox import ToolBox
from demyrl.types import Message, ToolCall, ToolResult

MOST_LOST = 0.05  # share of episodes the sandbox may fail before collecting makes no sense

SCRIPTS: dict[str, Callable[[Task, random.Random, Habits], Episode]] = {
    "real": demonstrate,
    "stitched": stitch,
}


class Runner(Protocol):
    """What collecting needs of a tool box."""

    schemas: Sequence[dict[str, Any]]

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]: ...


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    problems: ProblemConfig
    habits: Habits
    count: int  # problems, each with one real and one stitched episode
    seed: int
    in_flight: int  # episodes that run together
    prompts: str  # what is said around a problem, see text/prompts.py


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A finished episode of a task."""

    task: Task
    messages: list[Message]

    @property
    def correct(self) -> bool:
        return judge(self.task.problem, self.messages[-1].text) == "correct"

    @property
    def calls(self) -> int:
        return sum(len(message.calls) for message in self.messages)


def collect(
    config: CollectConfig,
    tools: Runner,
    workdir: Place | str,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, Any]:
    """Writes the two files of rows and the summary, which it returns.

    `progress` hears the name of the file and the episodes done of all. Raises ValueError for
    settings out of range and RuntimeError when the sandbox fails too often.
    """
    if config.in_flight < 1:
        raise ValueError(f"in_flight is {config.in_flight}: at least one episode must run.")
    workdir = storage.path(workdir)
    storage.make_folder(workdir)
    problems = tasks(config.problems, "train", config.count, config.seed)
    summary: dict[str, Any] = {"seed": config.seed, "habits": dataclasses.asdict(config.habits)}
    for name in SCRIPTS:
        finished = []
        for batch in play(name, problems, config, tools):
            finished += batch
            progress(name, len(finished), len(problems))
        kept = [each for each in finished if each is not None]
        check_losses(len(finished) - len(kept), len(finished))
        rows = (row(each, tools, config.prompts) for each in kept)
        write_rows(workdir / f"{name}.jsonl", rows)
        summary[name] = numbers(kept) | {"lost": len(finished) - len(kept)}
    write_rows(workdir / "summary.json", [summary])
    return summary


def play(
    name: str, problems: Sequence[Task], config: CollectConfig, tools: Runner
) -> Iterator[list[Demonstration | None]]:
    """Batches of finished episodes in the order of the problems; None where the sandbox failed."""
    for start in range(0, len(problems), config.in_flight):
        batch = problems[start : start + config.in_flight]
        episodes = [
            SCRIPTS[name](task, seeded(config.seed, name, task), config.habits) for task in batch
        ]
        conversations = run_episodes(episodes, tools)
        yield [
            None if messages is None else Demonstration(task, messages)
            for task, messages in zip(batch, conversations, strict=True)
        ]


def seeded(seed: int, name: str, task: Task) -> random.Random:
    """The teacher's chances in one episode, whatever the order and number of the others."""
    return random.Random(digest(f"{seed}|{name}|{task.problem.id}"))


def run_episodes(episodes: Sequence[Episode], tools: Runner) -> list[list[Message] | None]:
    """The conversation of each episode, None where the sandbox failed; calls run in batches."""
    conversations: list[list[Message] | None] = [None] * len(episodes)
    answers: dict[int, ToolResult | None] = dict.fromkeys(range(len(episodes)))
    while answers:
        waiting: dict[int, ToolCall] = {}
        for index, answer in answers.items():
            try:
                waiting[index] = episodes[index].send(answer)
            except StopIteration as finished:
                conversations[index] = finished.value
        results = tools.run(list(waiting.values())) if waiting else []
        arrived = zip(waiting, results, strict=True)
        answers = {index: result for index, result in arrived if result.status != "sandbox_error"}
    return conversations


def check_losses(lost: int, total: int) -> None:
    """Raises RuntimeError when too many episodes fell to failures of the sandbox."""
    if lost > MOST_LOST * total:
        raise RuntimeError(
            f"The sandbox failed in {lost} of {total} episodes, more than {MOST_LOST:.0%}: "
            "demonstrations of what is left would be skewed. Make the sandbox run first."
        )


def row(demonstration: Demonstration, tools: Runner, prompts: str) -> dict[str, Any]:
    """An SFT row with the id of its problem, which is asked as a rollout will ask it."""
    problem, (_, *rest) = demonstration.task.problem, demonstration.messages
    columns = row_of([Message("user", question(problem, prompts)), *rest], tools.schemas)
    return columns | {"problem_id": problem.id}


def numbers(demonstrations: Sequence[Demonstration]) -> dict[str, Any]:
    """Accuracy over all and per family, calls per episode, and the share without a call."""
    by_family = collections.defaultdict(list)
    for each in demonstrations:
        by_family[each.task.problem.source].append(each.correct)
    return {
        "episodes": len(demonstrations),
        "correct": mean([each.correct for each in demonstrations]),
        "calls": mean([each.calls for each in demonstrations]),
        "without_call": mean([each.calls == 0 for each in demonstrations]),
        "families": {name: mean(graded) for name, graded in sorted(by_family.items())},
    }


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def collect_stage(config: Any, workdir: Place) -> None:
    """The stage: demonstrations of both kinds in the workdir."""
    settings = recipe.read(config)
    logs.record_run(workdir, settings.config_json, logs.environment())
    part = CollectConfig(
        settings.problems,
        settings.habits,
        settings.collect.count,
        settings.seed,
        settings.collect.in_flight,
        settings.chat.prompts,
    )
    with ToolBox(settings.tools) as tools, logs.Logs(workdir, 1) as log:
        seen = dict.fromkeys(SCRIPTS, 0)
        with log.phase("collect", len(SCRIPTS) * part.count, 0) as advance:

            def progress(name: str, done: int, total: int) -> None:
                advance(done - seen[name])
                seen[name] = done

            summary = collect(part, tools, workdir, progress)
        for name in SCRIPTS:
            log.note(f"{name}: {summary[name]}")


if __name__ == "__main__":
    command.run(collect_stage, "configs/grpo_tcr.py:tiny")
