"""How a reply looks while it is written."""

import json

import pytest

from demyrl.text.passages import passages
from demyrl.text.tokenizer import load_tokenizer

CODE = "print(\"a\\b\", 'é🌟')\nx = 1 < 2"
CALL = json.dumps({"name": "code_interpreter", "arguments": {"code": CODE}})
REPLIES = (
    "Plain words, 1 < 2 and <b>.",
    "<think>\nLet me see: <tool_call> is a tag.\n</think>\n\nIt is 4.",
    f"I run it.\n<tool_call>\n{CALL}\n</tool_call>",
    f"No line end <tool_call>{CALL}</tool_call> words <tool_call>\n{CALL}\n</tool_call>",
    '<tool_call>\n{"name": 3}\n</tool_call> and <tool_call>\nno JSON',
    '<tool_call>{"arguments": {"code": "1 \\q 2"}, "name": "late"}</tool_call>',
)


def shown(text, over=True):
    return "".join(part for _, part in passages(text, over))


def kinds(text):
    return [kind for kind, part in passages(text, True) if part]


@pytest.mark.parametrize("reply", REPLIES)
def test_what_is_shown_of_a_growing_reply_only_grows(reply):
    steps = [shown(reply[:end], over=False) for end in range(len(reply) + 1)] + [shown(reply)]
    assert all(after.startswith(before) for before, after in zip(steps, steps[1:], strict=False))


@pytest.mark.parametrize("reply", REPLIES[:2])
def test_words_and_thought_are_shown_as_they_are(reply):
    assert shown(reply) == reply


def test_the_program_of_a_call_is_shown_as_code_under_the_name_of_the_tool():
    assert shown(REPLIES[2]) == f"I run it.\n[call code_interpreter]\n{CODE}\n"


def test_a_call_begins_on_a_line_of_its_own():
    assert shown(REPLIES[3]).startswith("No line end \n[call code_interpreter]\n")


def test_a_program_is_shown_before_its_call_is_complete():
    begun = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "x = 1\\nprint(\\'
    assert shown(begun, over=False) == "[call code_interpreter]\nx = 1\nprint("


def test_a_call_without_a_program_is_shown_as_it_is_written():
    assert shown(REPLIES[4]) == (
        '[call]\n<tool_call>\n{"name": 3}\n</tool_call>\n and \n[call]\n<tool_call>\nno JSON\n'
    )


def test_words_thought_and_calls_are_told_apart():
    assert kinds(f"<think>a</think>b<tool_call>{CALL}</tool_call>") == ["thought", "words", "call"]


def test_an_unfinished_tag_is_held_back_until_the_reply_is_over():
    assert (shown("Hm <tool", over=False), shown("Hm <tool")) == ("Hm ", "Hm <tool")


def test_half_a_character_is_held_back():
    tokenizer = load_tokenizer("builtin:tiny")
    tokens = tokenizer.encode("aé🌟")
    steps = [shown(tokenizer.decode(tokens[:n]), over=False) for n in range(len(tokens) + 1)]
    assert len(tokens) > 4 and set(steps) == {"", "a", "aé", "aé🌟"}
