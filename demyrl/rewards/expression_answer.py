"""Grades an expression in x by the values it takes, walking its syntax tree.

What the policy wrote is never handed to `eval`: only whole numbers, x, parentheses and
+ - * // % are understood.
"""

import ast
import json
import operator
import re
from collections.abc import Callable

from demyrl.rewards.boxed import last_boxed
from demyrl.types import Verdict

MAX_CHARS = 60
MAX_VALUE = 10**15  # of any intermediate value
MAX_OPERATIONS = 4  # fewer than interpolating takes, or copying the tests would be an answer
ALLOWED = re.compile(r"[0-9x+\-*/%() ]*")

OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class RefusedError(ValueError):
    """The expression holds something that is not understood, or leaves the range of values."""


def grade_expression(answer: str, reply: str) -> Verdict:
    """Whether the reply's box holds a short expression with the value y at each x of the tests.

    `answer` is a JSON list of pairs [x, y] of integers. Raises ValueError for any other answer.
    """
    tests = tests_of(answer)
    boxed = last_boxed(reply)
    if boxed is None:
        return "no_answer"
    try:
        tree = parsed(boxed)
        right = all(value_at(tree, x) == y for x, y in tests)
    except (RefusedError, SyntaxError, ZeroDivisionError):
        return "wrong"
    return "correct" if right else "wrong"


def tests_of(answer: str) -> list[list[int]]:
    """The tests in an answer; ValueError unless there is at least one, all pairs of integers."""
    try:
        tests = json.loads(answer)
    except json.JSONDecodeError as error:
        raise ValueError(f"The answer {answer!r} is not JSON: {error}.") from error
    shaped = isinstance(tests, list) and all(
        isinstance(test, list) and len(test) == 2 and all(type(n) is int for n in test)
        for test in tests
    )
    if not shaped or not tests:
        raise ValueError(f"The answer is {answer!r}: expected a JSON list of pairs [x, y].")
    return tests


def parsed(text: str) -> ast.expr:
    """The syntax tree of a short expression; RefusedError or SyntaxError for other text."""
    text = text.strip().strip("$").strip()
    if len(text) > MAX_CHARS or not ALLOWED.fullmatch(text):
        raise RefusedError(text[:MAX_CHARS])
    tree = ast.parse(text, mode="eval").body
    if sum(isinstance(node, ast.BinOp) for node in ast.walk(tree)) > MAX_OPERATIONS:
        raise RefusedError(text)
    return tree


def value_at(node: ast.expr, x: int) -> int:
    """The value of a syntax tree at x; RefusedError for a node or a size that is not allowed."""
    match node:
        case ast.Constant(value=int() as value):
            pass
        case ast.Name(id="x"):
            value = x
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = value_at(operand, x)
            value = -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](value_at(left, x), value_at(right, x))
        case _:
            raise RefusedError(type(node).__name__)
    if abs(value) > MAX_VALUE:
        raise RefusedError("a value is too large")
    return value
