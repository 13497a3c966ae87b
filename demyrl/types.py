"""The nouns of the host: what a problem, a tool call, a trajectory and a reward are.

NumPy only, so that worker processes can use these types without loading JAX. The nouns of the
device stand in `arrays.py`.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

Domain = Literal["math", "science", "code"]

ToolStatus = Literal[
    "ok",
    "error",  # the code raised, or exited with a non-zero code
    "timeout",
    "output_limit",
    "malformed",  # what the policy wrote is not a valid call
    "not_executed",  # a valid call that a limit, or a disabled tool, kept from running
    "sandbox_error",  # our failure, not the policy's
]

TurnStop = Literal["ended", "called", "length", "tool_error"]
Stop = Literal[
    "answered",
    "context_full",
    "turn_length",
    "turn_limit",
    "call_limit",
    "malformed_limit",  # too many turns in a row without one valid call
    "malformed",  # a call that could not be read ended it, as in the paper's reference code
]

Verdict = Literal["correct", "wrong", "no_answer", "grader_timeout", "grader_error"]
UNGRADED: tuple[Verdict, ...] = ("grader_timeout", "grader_error")  # our failures: no reward


@dataclasses.dataclass(frozen=True)
class Problem:
    """One task with a checkable answer."""

    id: str  # unique within a data set, stable over runs
    source: str  # the generator family or data set it came from
    domain: Domain
    prompt: str  # what the user says, without instructions about tools
    answer: str  # what `grader` compares with; never shown to the policy
    grader: str  # which function of `rewards` judges it, a key of `grade.GRADERS`


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One invocation the policy asked for."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation; `calls` only on assistant turns."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """What a call gave back. A call that fails is data for the policy, never an exception."""

    status: ToolStatus
    output: str
    seconds: float = 0.0  # from the start of the program
    queued_s: float = 0.0  # that the call waited for a free worker


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a program ended, its two streams apart."""

    status: ToolStatus  # ok | error | timeout | output_limit | sandbox_error
    stdout: str
    stderr: str
    exit_code: int | None  # negative: the signal that ended it; None after a timeout or our failure
    note: str = ""  # what ended it, when its streams do not tell: "timed out after 2 s"
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One finished episode, exactly as the cache saw it.

    The per-token arrays have one entry for each token, the prompt included. Tokens are only ever
    appended by what fed the cache; text is decoded from them and never encoded back.
    """

    problem_id: str
    sample: int  # which of the problem's samples this is
    tokens: Int[np.ndarray, " n"]
    sampled: Bool[np.ndarray, " n"]  # True where the policy chose the token
    logprobs: Float[np.ndarray, " n"]  # the sampler's; 0 where not sampled
    turn: Int[np.ndarray, " n"]  # the assistant turn a token belongs to, -1 in the prompt
    policy_version: Int[np.ndarray, " n"]  # the update count of the weights that chose it, or -1
    prompt_len: int
    calls: tuple[ToolCall | None, ...]  # in order; None where the call was malformed
    results: tuple[ToolResult, ...]  # one for each call
    reply: str  # text of the last assistant turn
    stops: tuple[TurnStop, ...]  # how each turn ended
    stop: Stop  # how the episode ended

    @property
    def response_len(self) -> int:
        """Tokens after the prompt, tool output included."""
        return len(self.tokens) - self.prompt_len

    @property
    def sampled_len(self) -> int:
        """Tokens the policy chose."""
        return int(self.sampled.sum())


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a grader made of one reply."""

    verdict: Verdict
    score: float | None  # 1 correct, 0 wrong, of code the share of tests passed; None: ungraded
    extracted: str | None = None  # the answer that was found in the reply
    reason: str = ""  # of a verdict that the answer alone does not explain
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Reward:
    """The parts of an episode's reward; `outcome` is None when it could not be graded."""

    outcome: float | None  # 1 correct, -1 wrong; of code, what `RewardConfig.code` makes of it
    tool_bonus: float = 0.0
    overlong: float = 0.0
    format: float = 0.0
    verdict: Verdict | None = None  # None: the sign of the outcome says it
    reason: str = ""  # why it could not be graded

    @property
    def graded(self) -> bool:
        return self.outcome is not None and bool(np.isfinite(self.total))

    @property
    def correct(self) -> bool:
        if self.verdict is not None:
            return self.verdict == "correct"
        return self.outcome is not None and self.outcome > 0

    @property
    def total(self) -> float:
        """The number the advantage is made from; NaN when the episode could not be graded."""
        if self.outcome is None:
            return float("nan")
        return self.outcome + self.tool_bonus + self.overlong + self.format
