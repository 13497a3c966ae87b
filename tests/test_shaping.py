"""The length penalty and the four readings of the tool bonus, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.rewards.shaping import TOOL_BONUSES, overlong, tool_bonus


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0),
        (70, 0),
        (80, 0),
        (85, -0.25),
        (90, -0.5),
        (95, -0.75),
        (100, -1),
        (101, -1),
        (999, -1),
    ],
)
def test_the_penalty_falls_over_the_last_twenty_of_a_hundred_tokens(length, penalty):
    assert overlong(length, max_len=100, cache_len=20) == penalty


def test_the_penalty_of_the_paper_starts_at_16384_tokens():
    assert overlong(16384, 20480, 4096) == 0
    assert overlong(16385, 20480, 4096) == -1 / 4096
    assert overlong(20480, 20480, 4096) == -1


def test_a_cache_as_long_as_the_limit_punishes_from_the_first_token():
    assert overlong(25, max_len=100, cache_len=100) == -0.25


@pytest.mark.parametrize("cache_len", [101, 0, -1])
def test_a_cache_that_punishes_everything_or_nothing_is_refused(cache_len):
    with pytest.raises(ValueError, match=f"cache_len is {cache_len} and max_len is 100"):
        overlong(50, max_len=100, cache_len=cache_len)


@settings(max_examples=50)
@given(st.integers(0, 300), st.integers(0, 300))
def test_a_longer_response_never_scores_higher(short, extra):
    assert overlong(short + extra, 200, 50) <= overlong(short, 200, 50)


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("off", [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ("intended", [0, 0, 0, 0, 0], [0, 0.1, 0.2, 0.4, 0.4]),
        ("paper", [0, 0.1, 0.2, 0.4, 0.9], [0, 0.1, 0.2, 0.4, 0.4]),
        ("shipped", [0, 0, 0, 0, 0], [-0.1, -0.1, -0.1, -0.1, -0.1]),
    ],
)
def test_bonuses_for_0_1_2_4_and_9_calls(option, right, wrong):
    calls = (0, 1, 2, 4, 9)
    assert [tool_bonus(option, True, n) for n in calls] == pytest.approx(right)
    assert [tool_bonus(option, False, n) for n in calls] == pytest.approx(wrong)


@pytest.mark.parametrize("option", TOOL_BONUSES)
def test_no_bonus_makes_a_wrong_answer_worth_a_right_one(option):
    assert -1 + tool_bonus(option, False, 1000) < 1 + tool_bonus(option, True, 0)


def test_an_unknown_bonus_is_refused():
    with pytest.raises(ValueError, match="tool_bonus is 'generous': choose from off"):
        tool_bonus("generous", True, 1)
