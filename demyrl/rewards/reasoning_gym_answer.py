"""Grades with the verifier of reasoning-gym, for the problems that came from that package."""

from demyrl.data.reasoning_gym import solves
from demyrl.rewards.boxed import last_boxed
from demyrl.types import Verdict


def grade_reasoning_gym(answer: str, reply: str) -> Verdict:
    """Whether the package's scorer gives the reply's box its full score.

    It is as strict as the dataset: most compare text, so 36.0 is not 36. Part of a score is wrong.
    Raises ValueError when `answer` is not what such a problem keeps, ImportError without the
    package.
    """
    boxed = last_boxed(reply)
    if boxed is None:
        return "no_answer"
    return "correct" if solves(answer, boxed) else "wrong"
