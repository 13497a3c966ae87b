"""Expressions are judged by their values, and nothing but arithmetic is ever carried out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.data.generators import ProblemConfig, tasks
from demyrl.rewards.expression_answer import grade_expression

LINE = "[[12, 121], [37, 296], [0, 37], [49, 380]]"  # 7x + 37


def box(text: str) -> str:
    return f"\\boxed{{{text}}}"


@pytest.mark.parametrize(
    "written",
    ["7*x+37", "7 *x+ 37", "37+x*7", "(7*x)+37", "37--7*x", "$7*x+37$", "7*(x+5)+2", "+7*x+37"]
    + ["x*7+74//2", "8*x-x+37", "7*x+100%63"],
)
def test_any_expression_with_the_right_values_is_correct(written):
    assert grade_expression(LINE, box(written)) == "correct"


@pytest.mark.parametrize(
    "written",
    ["7*x+36", "7x+37", "7*y+37", "x", "121", "7*x+37.0", "7*x+37/1", "f(x)", "x.real", "()", "*"]
    + ["7*x+37;1", "lambda x:7*x+37", "x if x else 37", "'7'", "x//0", "x%0", "7*x+37==1", "(7,x)"]
    + ["7**x", "__import__('os')", "[x for x in x]", "7*x+37 #", "7*x\n+37", "True*x", "x:=3"],
)
def test_what_has_other_values_or_is_not_arithmetic_is_wrong(written):
    assert grade_expression(LINE, box(written)) == "wrong"


def test_visible_tests_alone_are_not_enough():
    assert grade_expression(LINE, box("x//37*175+121")) == "wrong"


def test_copying_the_tests_into_a_formula_is_no_answer():
    assert grade_expression(LINE, box("121+(x-12)*(296-121)//(37-12)")) == "wrong"


@pytest.mark.parametrize(
    "written", ["9" * 59, "*".join(["9" * 14] * 4), "(" * 30 + "x" + ")" * 30, "9" * 10_000]
)
def test_large_or_long_expressions_are_refused_at_once(written):
    assert grade_expression(LINE, box(written)) == "wrong"


def test_a_reply_without_a_box_has_no_answer():
    assert grade_expression(LINE, "7*x+37") == "no_answer"


@pytest.mark.parametrize("answer", ["7*x+37", "[]", "{}", "[[1]]", "[[1, 2.0]]", "[[1, true]]", ""])
def test_tests_that_are_not_pairs_of_integers_are_our_mistake(answer):
    with pytest.raises(ValueError, match="The answer"):
        grade_expression(answer, box("x"))


@settings(max_examples=100)
@given(st.text(alphabet="0123456789x+-*/%() ", max_size=60))
def test_no_text_raises(text):
    assert grade_expression(LINE, box(text)) in ("correct", "wrong", "no_answer")


def test_generated_answers_hide_more_points_than_they_show():
    config = ProblemConfig(("linear_expression",), digits=2, terms=3)
    assert len(json.loads(tasks(config, "train", 1, seed=0)[0].problem.answer)) == 4
