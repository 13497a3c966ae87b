"""What the user says about a problem: by its domain, row by row."""

import re

import pytest

from demyrl.text.prompts import STYLES, question
from demyrl.types import Problem

TOOL_WORDS = re.compile(r"\b(tools?|calls?|calling|interpreter|runs?)\b", re.IGNORECASE)
KINDS = (
    ("math", "number"),
    ("math", "expression"),
    ("science", "text"),
    ("science", "choice"),
    ("code", "text"),
    ("code", "tests"),
)


def problem(domain: str, grader: str) -> Problem:
    return Problem("1", "test", domain, "What is {x} in \\boxed{}?", "7", grader)


def said(domain: str, grader: str, style: str = "agentic") -> str:
    """What is said around the problem's own text."""
    return question(problem(domain, grader), style).replace(problem(domain, grader).prompt, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_the_text_of_the_problem_appears_exactly_once(kind, style):
    assert question(problem(*kind), style).count(problem(*kind).prompt) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_prompt_is_the_problem_alone(kind):
    assert question(problem(*kind), "bare") == problem(*kind).prompt


@pytest.mark.parametrize("style", ["agentic", "no_tool"])
def test_each_domain_has_its_own_instructions(style):
    texts = [said("math", "number", style), said("science", "number", style)]
    texts.append(said("code", "tests", style))
    assert len(set(texts)) == 3
    for text, word in zip(texts, ("math", "science", "programming"), strict=True):
        assert f"{word} problem" in text


@pytest.mark.parametrize("kind", KINDS)
def test_no_word_about_tools_is_in_a_prompt_without_them(kind):
    assert not TOOL_WORDS.search(said(*kind, "no_tool"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_agentic_prompt_asks_to_plan_and_to_stop_calling_the_tool(kind):
    text = said(*kind)
    assert text.index("First plan") < text.index("use the tool") < text.index("stop calling it")


@pytest.mark.parametrize("style", ["agentic", "no_tool"])
def test_a_box_is_asked_for_without_units_and_quotes(style):
    for kind in (("math", "number"), ("science", "text"), ("code", "text")):
        assert "\\boxed{}, without units or quote marks" in said(*kind, style)


@pytest.mark.parametrize("style", ["agentic", "no_tool"])
def test_a_program_is_asked_for_in_a_fence_and_not_in_a_box(style):
    text = said("code", "tests", style)
    assert "```python" in text and "stdin" in text and "stdout" in text
    assert "\\boxed" not in text


@pytest.mark.parametrize("style", ["agentic", "no_tool"])
def test_a_choice_is_asked_for_as_a_capital_letter(style):
    assert "capital letter of the right option in \\boxed{}" in said("science", "choice", style)


def test_a_question_about_code_asks_for_no_program():
    assert "```python" not in said("code", "expression")


def test_an_unknown_style_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'agent'.*bare, agentic, no_tool"):
        question(problem("math", "number"), "agent")
