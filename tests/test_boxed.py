r"""The answer is the last balanced box of what was said, not of what was thought or run."""

import pytest

from demyrl.rewards.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{7}", "7"),
        (r"so \boxed{ 7 }.", "7"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\text{a\}b}}", r"\text{a\}b}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"{ \boxed{7}", "7"),
        (r"} \boxed{7}", "7"),
        (r"\boxed{7} \boxed{8", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{7", None),
        (r"\boxed{}", None),
        (r"boxed{7}", None),
        (r"\boxed 7", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text, answer):
    assert last_boxed(text) == answer


def test_a_box_in_a_thought_is_no_answer():
    assert last_boxed("<think>\n\\boxed{7}\n</think>\nDone.") is None


def test_the_box_after_the_last_thought_counts():
    text = "<think>a</think>\\boxed{1}<think>b</think>\\boxed{2}<think>c</think>\\boxed{3}"
    assert last_boxed(text) == "3"


def test_a_thought_opened_by_the_prompt_still_ends():
    assert last_boxed("hm \\boxed{1}</think>\\boxed{2}") == "2"


def test_an_unclosed_thought_means_no_answer():
    assert last_boxed("<think>a</think>\\boxed{1}<think>wait") is None


def test_a_box_in_a_call_is_no_answer():
    call = '<tool_call>\n{"arguments": {"code": "print(\'\\boxed{7}\')"}}'
    assert last_boxed(call + "\n</tool_call>") is None
    assert last_boxed(call) is None


def test_a_box_beside_a_call_counts():
    assert last_boxed("\\boxed{7}<tool_call>{}</tool_call>") == "7"


def test_many_open_boxes_are_read_once():
    """A reader that starts again at each box would not come back."""
    assert last_boxed("\\boxed{" * 100_000) is None
