"""Numbers are compared exactly, and nothing a policy writes can stop the grader."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.rewards.number_answer import grade_number, number_of


def box(text: str) -> str:
    return f"<think>\nx\n</think>\n\\boxed{{{text}}}"


@pytest.mark.parametrize(
    "written",
    ["8", "8.0", "8.", " 8 ", "+8", "$8$", "$ 8 $", "08", "8e0", "0.8E1", "80e-1", "16/2"],
)
def test_other_ways_to_write_eight_are_correct(written):
    assert grade_number("8", box(written)) == "correct"


@pytest.mark.parametrize(
    "written",
    ["8.01", "-8", "8,0", "7.9999999999999999999", "eight", "8 m", "'8'", "8_0", "NaN", "inf"]
    + ["8%", "1 8", "2*4", "x=8", "8/0", "8/1.0", "٨", "0x8", ".", "+", "$", "e1", "--8", "8;8"],
)
def test_what_is_not_eight_is_wrong(written):
    assert grade_number("8", box(written)) == "wrong"


def test_thousands_may_have_commas():
    assert grade_number("1000", box("1,000")) == "correct"
    assert grade_number("1234567.5", box("1,234,567.5")) == "correct"


def test_commas_in_odd_places_are_wrong():
    assert grade_number("1000", box("10,00")) == "wrong"


def test_negative_numbers_keep_their_sign():
    assert grade_number("-12", box("-12.0")) == "correct"


def test_no_tolerance_hides_a_small_difference():
    assert grade_number("3", box("3.000001")) == "wrong"


@pytest.mark.parametrize("huge", ["1e999999999", "1e-999999999", "9" * 5000, "1/" + "3" * 4000])
def test_huge_numbers_are_refused_at_once(huge):
    assert grade_number("8", box(huge)) == "wrong"


def test_a_reply_without_a_box_has_no_answer():
    assert grade_number("8", "The answer is 8.") == "no_answer"


def test_an_answer_that_is_no_number_is_our_mistake():
    with pytest.raises(ValueError, match="'abc' is not a number"):
        grade_number("abc", box("8"))


@settings(max_examples=50)
@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9
    )
)
def test_a_decimal_number_has_its_exact_value(number):
    assert number_of(f"{number:f}") == Fraction(number)


@settings(max_examples=100)
@given(st.text())
def test_no_text_raises(text):
    assert grade_number("8", box(text)) in ("correct", "wrong", "no_answer")
