"""Reasoning modes: what counts as thought before a call, and as deliberative or reactive."""

import pytest

from demyrl.analysis import modes
from demyrl.analysis.modes import Borders, Habit


def row_of(turns, statuses=(), sampled_len=100, correct=False):
    pieces = [{"kind": "prompt", "turn": -1, "text": "a long prompt " * 9}]
    for turn, text in enumerate(turns):
        pieces.append({"kind": "sampled", "turn": turn, "text": text})
        pieces.append({"kind": "tool", "turn": turn, "text": "42 " * 50})
    return {
        "pieces": pieces,
        "calls": [{"name": "code_interpreter", "arguments": {}} for _ in statuses],
        "results": [{"status": status, "output": "", "seconds": 0.1} for status in statuses],
        "sampled_len": sampled_len,
        "correct": correct,
    }


def habit_of(think, calls, correct=False):
    return Habit(think_tokens=think, calls=calls, ok_calls=calls, correct=correct)


def test_thought_ends_where_the_first_call_opens():
    row = row_of(["t" * 30 + "<tool_call>" + "c" * 39, "a" * 20], ["ok"])
    assert modes.habit(row).think_tokens == pytest.approx(30)


def test_without_a_call_the_whole_response_is_thought():
    assert modes.habit(row_of(["only words"])).think_tokens == 100


def test_a_call_in_another_form_counts_its_whole_turn_as_thought():
    row = row_of(["t" * 25, "a" * 75], ["malformed"])
    assert modes.habit(row).think_tokens == pytest.approx(25)


def test_only_programs_that_ran_to_their_end_count_as_ok():
    habit = modes.habit(row_of(["x"], ["ok", "error", "timeout", "ok"]))
    assert (habit.calls, habit.ok_calls) == (4, 2)


@pytest.mark.parametrize(
    ("think", "calls", "expected"),
    [
        (80, 1, "deliberative"),
        (80, 0, "no call"),
        (20, 4, "reactive"),
        (80, 4, "mixed"),
        (20, 1, "mixed"),
    ],
)
def test_the_mode_follows_thought_and_calls(think, calls, expected):
    assert modes.mode(habit_of(think, calls), Borders(think_tokens=50, calls=2)) == expected


def test_borders_are_the_medians_of_those_that_call():
    habits = [habit_of(10, 1), habit_of(30, 3), habit_of(20, 2), habit_of(999, 0)]
    assert modes.borders(habits) == Borders(think_tokens=20, calls=2)


def test_the_summary_counts_calls_and_not_trajectories_for_success():
    rows = [row_of(["x"], ["ok", "ok", "ok"]), row_of(["x"], ["error"]), row_of(["x"])]
    found = modes.summarize(rows)
    assert (found["call_ok"], found["call_share"], found["calls"]) == (0.75, 2 / 3, 4 / 3)
    assert found["causes"] == {"ok": 3, "error": 1}


def test_the_summary_tells_how_often_each_number_of_calls_is_right():
    rows = [row_of(["x"], ["ok"], correct=True), row_of(["x"], ["ok"]), row_of(["x"], ["ok"] * 5)]
    by_calls = modes.summarize(rows)["by_calls"]
    assert by_calls["1"] == {"share": pytest.approx(2 / 3), "correct": 0.5}
    assert by_calls["3 or more"]["correct"] == 0.0


def test_without_any_call_success_is_unknown():
    assert modes.summarize([row_of(["x"])])["call_ok"] is None


def test_no_trajectories_are_refused():
    with pytest.raises(ValueError, match="no trajectories"):
        modes.summarize([])
