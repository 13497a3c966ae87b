"""The reward of an episode, from its last turn, its calls and its length.

Whatever the policy wrote, `grade` returns: a wrong or missing answer is worth -1, and an episode
that we could not judge (our sandbox or a grader failed) has no outcome and must not be trained on.
"""

import dataclasses
from collections.abc import Callable

from demyrl.rewards.boxed import last_boxed
from demyrl.rewards.expression_answer import grade_expression
from demyrl.rewards.number_answer import grade_number, number_of
from demyrl.rewards.reasoning_gym_answer import grade_reasoning_gym
from demyrl.rewards.shaping import TOOL_BONUSES, check_lengths, overlong, tool_bonus
from demyrl.rewards.text_answer import grade_text
from demyrl.types import Problem, Reward, Trajectory, Verdict

GRADERS: dict[str, Callable[[str, str], Verdict]] = {
    "number": grade_number,
    "text": grade_text,
    "expression": grade_expression,
    "reasoning_gym": grade_reasoning_gym,
}

NOT_RUN = ("malformed", "not_executed", "sandbox_error")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    tool_bonus: str  # off | intended | paper | shipped, see shaping.tool_bonus
    overlong: bool  # whether long responses are punished
    max_len: int  # tokens of a response at which the penalty reaches -1
    cache_len: int  # tokens before that over which it grows
    count_tool_tokens: bool  # whether tool output counts as length

    def __post_init__(self):
        if self.tool_bonus not in TOOL_BONUSES:
            raise ValueError(
                f"tool_bonus is {self.tool_bonus!r}: choose from {', '.join(TOOL_BONUSES)}."
            )
        if self.overlong:
            check_lengths(self.max_len, self.cache_len)


def grade(problem: Problem, trajectory: Trajectory, config: RewardConfig) -> Reward:
    """The reward of one episode; ungraded when the sandbox or the grader failed."""
    if any(result.status == "sandbox_error" for result in trajectory.results):
        return Reward(outcome=None)
    try:
        correct = judge(problem, trajectory.reply) == "correct"
    except Exception:  # whatever a grader trips over: it is counted as ungraded, never a crash
        return Reward(outcome=None)
    executed = sum(result.status not in NOT_RUN for result in trajectory.results)
    length = trajectory.response_len if config.count_tool_tokens else trajectory.sampled_len
    return Reward(
        outcome=1.0 if correct else -1.0,
        tool_bonus=tool_bonus(config.tool_bonus, correct, executed),
        overlong=overlong(length, config.max_len, config.cache_len) if config.overlong else 0.0,
    )


def judge(problem: Problem, reply: str) -> Verdict:
    """The verdict on the last assistant turn; raises what the problem's grader raises."""
    return GRADERS[problem.grader](problem.answer, reply)


def vote_of(problem: Problem, reply: str) -> str:
    """What a reply votes for in a majority, equal for equal numbers; empty without an answer."""
    boxed = last_boxed(reply)
    if boxed is None:
        return ""
    number = number_of(boxed) if problem.grader == "number" else None
    return "".join(boxed.split()) if number is None else str(number)
