"""What is written down about trajectories: their text cut by author, and numbers by hand."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl import logs, records
from demyrl.analysis.stats import summarize
from demyrl.types import Reward, ToolCall, ToolResult, Trajectory
from tests.tiny import chat, problem

CALL = ToolCall("code_interpreter", {"code": "print(4)"})


def trajectory(marks="PPPSSTTSS", results=(), stop="answered", reply="\\boxed{4}", tokens=None):
    """P prompt, S sampled, T tool: one token each; a turn begins after every T that ends a run."""
    sampled = np.array([mark == "S" for mark in marks])
    after_tool = [i > 0 and marks[i - 1] == "T" and marks[i] != "T" for i in range(len(marks))]
    turn = np.where([mark == "P" for mark in marks], -1, np.cumsum(after_tool))
    if tokens is None:
        tokens = chat().tokenizer.encode("What is 2+2? Let us see what it is.")[: len(marks)]
    return Trajectory(
        problem_id="p2",
        sample=1,
        tokens=np.array(tokens, np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)) * np.arange(len(marks)),
        turn=turn.astype(np.int16),
        policy_version=np.where(sampled, 3, -1).astype(np.int32),
        prompt_len=marks.count("P"),
        calls=(CALL,) * len(results),
        results=tuple(ToolResult(*result) for result in results),
        reply=reply,
        stops=("called",) * len(results) + ("ended",),
        stop=stop,
    )


def row(**changes):
    reward = Reward(1.0, overlong=-0.25)
    return records.row_of(problem(2), trajectory(**changes), reward, chat(), "bwrap")


def test_pieces_change_where_the_author_does():
    kinds = [(piece["kind"], piece["turn"]) for piece in row()["pieces"]]
    assert kinds == [("prompt", -1), ("sampled", 0), ("tool", 0), ("sampled", 1)]


@given(st.text("PST", min_size=1, max_size=9), st.randoms())
@settings(max_examples=40, deadline=None)
def test_pieces_concatenate_to_the_decoded_trajectory(marks, random):
    marks = "P" * marks.count("P") + marks.replace("P", "")
    whole_words = [i for i in range(700) if "\ufffd" not in chat().tokenizer.decode([i])]
    tokens = [random.choice(whole_words) for _ in marks]
    pieces = records.pieces_of(trajectory(marks, tokens=tokens), chat())
    assert "".join(piece["text"] for piece in pieces) == chat().tokenizer.decode(tokens)


def test_a_piece_has_the_mean_log_prob_of_what_was_sampled():
    means = [piece["mean_logprob"] for piece in row()["pieces"]]
    assert means == [None, -0.5 * 3.5, None, -0.5 * 7.5]


def test_a_row_holds_the_exact_tokens_and_the_parts_of_the_reward():
    written = json.loads(json.dumps(row()))
    assert written["tokens"] == trajectory().tokens.tolist()
    assert written["reward"]["total"] == 0.75 and written["reward"]["overlong"] == -0.25
    assert (written["prompt_len"], written["response_len"], written["sampled_len"]) == (3, 6, 4)
    assert written["answer_given"] == "4" and written["isolation"] == "bwrap"


def test_a_call_that_could_not_be_parsed_is_null():
    made = trajectory(results=[("malformed", "no"), ("ok", "4", 0.123456)])
    made = dataclasses.replace(made, calls=(None, CALL))
    written = records.row_of(problem(2), made, Reward(1.0), chat(), "bwrap")
    assert written["calls"] == [None, {"name": "code_interpreter", "arguments": CALL.arguments}]
    assert written["results"][1] == {"status": "ok", "output": "4", "seconds": 0.1235}


R, W, U = Reward(1.0), Reward(-1.0), Reward(None)  # right, wrong, ungraded


def test_reward_numbers_of_three_groups_by_hand():
    """[right, wrong], [ungraded, right] and [wrong, wrong with a penalty]."""
    got = records.reward_numbers([R, W, U, R, W, Reward(-1.0, overlong=-0.5)], samples=2)
    want = {
        "reward/mean": (1 - 1 + 1 - 1 - 1.5) / 5,
        "reward/correct": 2 / 5,
        "reward/avg_at_g": (1 / 2 + 1 + 0) / 3,
        "reward/pass_at_g": 2 / 3,
        "reward/equal_groups": 1 / 3,  # the one with a single graded member
        "reward/solved_none": 1 / 3,
        "reward/solved_all": 1 / 3,
        "reward/ungraded": 1.0,
        "reward/overlong": -0.5 / 5,
        "reward/std": np.std([1, -1, 1, -1, -1.5]),
    }
    assert got == pytest.approx(want)


def test_a_step_without_a_graded_trajectory_has_no_mean_and_no_crash():
    got = records.reward_numbers([U, U], samples=2)
    assert np.isnan(got["reward/mean"]) and got["reward/ungraded"] == 2
    assert got["reward/pass_at_g"] == got["reward/solved_none"] == 0


def test_a_reward_that_is_nan_counts_as_ungraded():
    got = records.reward_numbers([R, Reward(1.0, format=float("nan"))], samples=2)
    assert got["reward/ungraded"] == 1 and got["reward/mean"] == got["reward/correct"] == 1.0


def test_rollout_numbers_of_three_trajectories_by_hand():
    calls = trajectory(results=[("ok", "4", 0.2), ("timeout", "", 2.0)])
    broken = trajectory("PPSS", results=[("malformed", ""), ("sandbox_error", "", 9.0)])
    cut = trajectory("PSSSS", stop="context_full", reply="")
    got = records.rollout_numbers([calls, broken, cut])
    want = {
        "rollout/response_tokens": (6 + 2 + 4) / 3,
        "rollout/sampled_tokens": (4 + 2 + 4) / 3,
        "rollout/turns": (3 + 3 + 1) / 3,
        "rollout/calls": 4 / 3,
        "rollout/call_share": 2 / 3,
        "rollout/truncated": 1 / 3,
        "tools/ok": 1 / 4,
        "tools/error": 0.0,
        "tools/timeout": 1 / 4,
        "tools/malformed": 1 / 4,
        "tools/output_limit": 0.0,
        "tools/not_executed": 0.0,
        "tools/sandbox_errors": 1.0,
        "tools/seconds": (0.2 + 2.0) / 2,  # of what ran
    }
    assert got == pytest.approx(want)


def test_trajectories_without_calls_have_zeros_not_nan():
    got = records.rollout_numbers([trajectory("PSS")])
    assert got["tools/ok"] == got["tools/seconds"] == got["rollout/call_share"] == 0.0


def test_every_number_is_documented():
    names = {**records.reward_numbers([R, W], 2), **records.rollout_numbers([trajectory()])}
    assert [name for name in names if logs.documented_as(name) is None] == []


def test_verdicts_are_what_the_statistics_read():
    right = records.verdict_row(problem(2), trajectory(), R)
    other = dataclasses.replace(trajectory(reply="no idea"), sample=0)
    silent = records.verdict_row(problem(2), other, W)
    assert right["answer"] == "4" and silent["answer"] is None
    overall = summarize([right, silent], 2)["domains"]["all"]
    assert overall["avg_at_k"]["value"] == 0.5 and overall["pass_at_k"]["value"] == 1.0
