"""Grades an answer that is a text, such as the letter of a choice."""

from demyrl.rewards.boxed import last_boxed
from demyrl.types import Verdict


def grade_text(answer: str, reply: str) -> Verdict:
    """Whether the reply's box holds exactly `answer`, white space around it aside.

    Raises ValueError when `answer` is empty.
    """
    if not answer.strip():
        raise ValueError("The answer is empty: no reply could be right.")
    boxed = last_boxed(reply)
    if boxed is None:
        return "no_answer"
    return "correct" if boxed == answer.strip() else "wrong"
