"""The reward of an episode: its parts, what counts for them, and what cannot be graded."""

import dataclasses
import math

import numpy as np
import pytest

from demyrl.rewards import grade as grading
from demyrl.rewards.grade import RewardConfig, grade, judge, vote_of
from demyrl.types import Problem, ToolCall, ToolResult, Trajectory

PROBLEM = Problem("p", "lcm", "math", "?", "36", "number")
PLAIN = RewardConfig("off", overlong=False, max_len=0, cache_len=0, count_tool_tokens=True)
RAMP = RewardConfig("off", overlong=True, max_len=100, cache_len=20, count_tool_tokens=True)
OK = ToolResult("ok", "36\n")


def trajectory(reply: str, results=(), prompt=10, sampled=50, tool=0) -> Trajectory:
    """An episode with so many tokens of each kind."""
    n = prompt + sampled + tool
    chosen = np.zeros(n, bool)
    chosen[prompt : prompt + sampled] = True
    return Trajectory(
        problem_id="p",
        sample=0,
        tokens=np.zeros(n, np.int32),
        sampled=chosen,
        logprobs=np.zeros(n, np.float32),
        turn=np.zeros(n, np.int16),
        policy_version=np.zeros(n, np.int32),
        prompt_len=prompt,
        calls=tuple(ToolCall("code_interpreter", {"code": "1"}) for _ in results),
        results=tuple(results),
        reply=reply,
        stops=("ended",),
        stop="answered",
    )


RIGHT, WRONG, MISSING = "\\boxed{36}", "\\boxed{35}", "I do not know."


@pytest.mark.parametrize(("reply", "outcome"), [(RIGHT, 1), (WRONG, -1), (MISSING, -1)])
def test_right_is_worth_one_and_anything_else_minus_one(reply, outcome):
    assert grade(PROBLEM, trajectory(reply), PLAIN).outcome == outcome


def test_a_box_that_the_tool_printed_is_no_answer():
    result = ToolResult("ok", RIGHT)
    assert not grade(PROBLEM, trajectory(MISSING, [result]), PLAIN).correct


def test_a_failed_sandbox_leaves_the_episode_ungraded():
    reward = grade(PROBLEM, trajectory(RIGHT, [OK, ToolResult("sandbox_error", "")]), PLAIN)
    assert reward.outcome is None and not reward.graded


@pytest.mark.parametrize("status", ["error", "timeout", "output_limit", "malformed"])
def test_a_failure_of_the_policy_is_graded(status):
    assert grade(PROBLEM, trajectory(RIGHT, [ToolResult(status, "")]), PLAIN).correct


@pytest.mark.parametrize("change", [{"answer": "thirty-six"}, {"grader": "vibes"}])
def test_a_problem_that_no_grader_can_judge_is_ungraded(change):
    reward = grade(dataclasses.replace(PROBLEM, **change), trajectory(RIGHT), PLAIN)
    assert reward.outcome is None and math.isnan(reward.total)


def test_a_grader_that_crashes_leaves_the_episode_ungraded(monkeypatch):
    def crash(answer, reply):
        raise RecursionError

    monkeypatch.setitem(grading.GRADERS, "number", crash)
    assert grade(PROBLEM, trajectory(RIGHT), PLAIN).outcome is None


@pytest.mark.parametrize(("tokens", "penalty"), [(70, 0), (90, -0.5), (100, -1)])
def test_long_responses_are_punished(tokens, penalty):
    assert grade(PROBLEM, trajectory(RIGHT, sampled=tokens), RAMP).overlong == penalty


def test_the_prompt_does_not_count_as_length():
    assert grade(PROBLEM, trajectory(RIGHT, prompt=500, sampled=70), RAMP).overlong == 0


def test_tool_output_counts_as_length_only_when_it_should():
    episode = trajectory(RIGHT, sampled=60, tool=35)
    without = dataclasses.replace(RAMP, count_tool_tokens=False)
    assert grade(PROBLEM, episode, RAMP).overlong == -0.75
    assert grade(PROBLEM, episode, without).overlong == 0


def test_without_the_penalty_its_lengths_do_not_matter():
    assert grade(PROBLEM, trajectory(RIGHT, sampled=5000), PLAIN).overlong == 0


def test_only_calls_that_ran_earn_a_bonus():
    results = [OK, ToolResult("error", ""), ToolResult("malformed", ""), ToolResult("timeout", "")]
    results += [ToolResult("not_executed", "")]
    config = dataclasses.replace(PLAIN, tool_bonus="intended")
    assert grade(PROBLEM, trajectory(WRONG, results), config).tool_bonus == pytest.approx(0.3)


def test_the_total_is_the_sum_of_its_parts():
    config = dataclasses.replace(RAMP, tool_bonus="intended")
    reward = grade(PROBLEM, trajectory(WRONG, [OK], sampled=90), config)
    assert reward.total == pytest.approx(-1 + 0.1 - 0.5)


def test_text_is_compared_exactly_after_stripping():
    problem = dataclasses.replace(PROBLEM, answer="B ", grader="text")
    assert judge(problem, "\\boxed{ B}") == "correct"
    assert judge(problem, "\\boxed{b}") == "wrong"


def test_equal_numbers_are_one_vote():
    assert vote_of(PROBLEM, "\\boxed{36.0}") == vote_of(PROBLEM, RIGHT) == "36"


def test_a_reply_without_an_answer_votes_for_nothing():
    assert vote_of(PROBLEM, MISSING) == ""


def test_an_unknown_bonus_is_refused_at_the_start():
    with pytest.raises(ValueError, match="tool_bonus is 'generous'"):
        dataclasses.replace(PLAIN, tool_bonus="generous")


def test_a_cache_longer_than_the_limit_is_refused_at_the_start():
    with pytest.raises(ValueError, match="cache_len is 30 and max_len is 20"):
        dataclasses.replace(RAMP, max_len=20, cache_len=30)
