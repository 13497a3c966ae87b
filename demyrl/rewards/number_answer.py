"""Grades a number exactly, without evaluating anything."""

import re
from fractions import Fraction

from demyrl.rewards.boxed import last_boxed
from demyrl.types import Verdict

MAX_CHARS = 400
NUMBER = re.compile(
    r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?"
)
RATIO = re.compile(r"[+-]?[0-9]+/[0-9]+")


def grade_number(answer: str, reply: str) -> Verdict:
    """Whether the reply's box holds the number `answer`, however it is written.

    8.0 equals 8 and 1,000 equals 1000; there is no tolerance. Raises ValueError when `answer` is
    not a number.
    """
    expected = number_of(answer)
    if expected is None:
        raise ValueError(f"The answer {answer!r} is not a number: use another grader for it.")
    boxed = last_boxed(reply)
    if boxed is None:
        return "no_answer"
    return "correct" if number_of(boxed) == expected else "wrong"


def number_of(text: str) -> Fraction | None:
    """The exact value of a decimal number or a ratio of integers; None for anything else."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    if len(text) > MAX_CHARS:
        return None
    if RATIO.fullmatch(text):
        above, below = text.split("/")
        return Fraction(int(above), int(below)) if int(below) else None
    if NUMBER.fullmatch(text) and text.lower().split("e")[0].strip("+-."):
        return Fraction(text.replace(",", ""))
    return None
