"""Collecting: rows that repeat byte for byte, real results in them, and a sandbox that fails."""

import dataclasses
import json
import random

import pytest

from demyrl.collect import CollectConfig, collect, run_episodes
from demyrl.data.demonstrations import Habits, demonstrate
from demyrl.data.generators import FAMILIES, ProblemConfig, tasks
from demyrl.text.prompts import question
from demyrl.types import ToolResult

CONFIG = CollectConfig(
    problems=ProblemConfig(tuple(FAMILIES), digits=2, terms=3),
    habits=Habits(head_guess=0.25, slip=0.25, recover=0.5, double_check=0.1),
    count=60,
    seed=0,
    in_flight=16,
    prompts="bare",
)


class EchoTool:
    """Answers each call with the length of its program; fails as a sandbox where told to."""

    schemas = ({"type": "function", "function": {"name": "code_interpreter"}},)

    def __init__(self, broken=()):
        self.broken, self.batches = broken, []

    def run(self, calls):
        self.batches.append(len(calls))
        return [self.result(call.arguments["code"]) for call in calls]

    def result(self, code: str) -> ToolResult:
        if any(part in code for part in self.broken):
            return ToolResult("sandbox_error", "")
        return ToolResult("ok", f"{len(code)}\n")


def rows_of(folder, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_settings_give_the_same_bytes_however_many_run_together(tmp_path):
    collect(CONFIG, EchoTool(), tmp_path / "a")
    collect(dataclasses.replace(CONFIG, in_flight=7), EchoTool(), tmp_path / "b")
    for name in ("real.jsonl", "stitched.jsonl", "summary.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_both_files_hold_the_same_problems(tmp_path):
    collect(CONFIG, EchoTool(), tmp_path)
    ids = [[row["problem_id"] for row in rows_of(tmp_path, n)] for n in ("real", "stitched")]
    assert ids[0] == ids[1] and len(set(ids[0])) == 60


def test_demonstrations_ask_each_problem_as_rollouts_will(tmp_path):
    collect(dataclasses.replace(CONFIG, prompts="agentic"), EchoTool(), tmp_path)
    problems = {t.problem.id: t.problem for t in tasks(CONFIG.problems, "train", 60, 0)}
    asked = {row["problem_id"]: row["messages"][0]["content"] for row in rows_of(tmp_path, "real")}
    assert asked == {name: question(each, "agentic") for name, each in problems.items()}
    assert len({text.split("\n")[0] for text in asked.values()}) == 3  # one a domain, in one file


def test_rows_have_the_columns_messages_tools_and_problem_id(tmp_path):
    collect(CONFIG, EchoTool(), tmp_path)
    assert set(rows_of(tmp_path, "real")[0]) == {"messages", "tools", "problem_id"}


def test_rows_hold_what_the_tool_said(tmp_path):
    collect(CONFIG, EchoTool(), tmp_path)
    for row in rows_of(tmp_path, "real"):
        for call, result in zip(row["messages"][1:], row["messages"][2:], strict=False):
            if call.get("tool_calls"):
                code = call["tool_calls"][0]["function"]["arguments"]["code"]
                assert result == {"role": "tool", "content": f"{len(code)}\n"}


def test_calls_of_many_episodes_run_in_one_batch():
    config = ProblemConfig(("lcm",), digits=2, terms=3)
    neat = Habits(head_guess=0, slip=0, recover=0, double_check=0)
    problems = tasks(config, "train", 10, seed=0)
    tools = EchoTool()
    run_episodes([demonstrate(task, random.Random(0), neat) for task in problems], tools)
    assert tools.batches == [10]


def test_episodes_that_the_sandbox_failed_are_left_out_and_counted(tmp_path):
    config = dataclasses.replace(CONFIG, count=300)
    summary = collect(config, EchoTool(broken=["3600+10*"]), tmp_path)["real"]
    assert summary["lost"] + summary["episodes"] == 300
    assert len(rows_of(tmp_path, "real")) == summary["episodes"]


def test_a_sandbox_that_fails_often_stops_collecting(tmp_path):
    with pytest.raises(RuntimeError, match=r"The sandbox failed in \d+ of 60 episodes"):
        collect(CONFIG, EchoTool(broken=["print"]), tmp_path)


def test_progress_hears_every_batch(tmp_path):
    heard = []
    collect(CONFIG, EchoTool(), tmp_path, lambda *update: heard.append(update))
    assert heard[:4] == [("real", n, 60) for n in (16, 32, 48, 60)]


def test_no_episode_in_flight_is_refused(tmp_path):
    with pytest.raises(ValueError, match="in_flight is 0"):
        collect(dataclasses.replace(CONFIG, in_flight=0), EchoTool(), tmp_path)
