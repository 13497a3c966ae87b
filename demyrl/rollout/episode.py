"""One episode in progress: tokens are appended as the cache sees them, and nothing is rewritten."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from demyrl.text.chat import Chat
from demyrl.text.toolcalls import MalformedCall, parse_reply
from demyrl.types import Stop, ToolCall, ToolResult, Trajectory, TurnStop


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
    """The limits of one episode."""

    context: int  # tokens, prompt and tool output included
    turn_tokens: int  # most tokens of one assistant turn
    turns: int  # assistant turns
    calls: int  # tool calls over all turns
    output_tokens: int  # most tokens of one tool result; longer ones keep head and tail


@runtime_checkable
class Tools(Protocol):
    """What an episode needs of a tool box: a call in, a future result out, never an exception."""

    isolation: str  # what kept the code apart, to be recorded

    def submit(self, call: ToolCall) -> Future[ToolResult]: ...


class Episode:
    """The tokens, marks and calls of one sample of one problem, from prompt to stop.

    The cache of its row holds all tokens but the last.
    """

    def __init__(
        self, problem_id: str, sample: int, prompt: Sequence[int], key: Any, reply_start: str = ""
    ):
        self.problem_id, self.sample, self.key = problem_id, sample, key
        self.prompt_len = len(prompt)
        self.tokens = list(prompt)
        self.logprobs = [0.0] * len(prompt)
        self.turn_of = [-1] * len(prompt)
        self.version_of = [-1] * len(prompt)
        self.turn, self.turn_start = 0, len(prompt)
        self.calls: list[ToolCall | None] = []
        self.results: list[ToolResult] = []
        self.pending: list[Future[ToolResult]] = []
        self.stops: list[TurnStop] = []
        self.stop: Stop | None = None
        self.reply_start = reply_start  # words of the first reply that stand in the prompt
        self.reply = ""

    def budget(self, config: EpisodeConfig) -> int:
        """Tokens this turn may still get."""
        used = len(self.tokens) - self.turn_start
        return min(config.context - len(self.tokens), config.turn_tokens - used)

    def append(
        self, tokens: Int[np.ndarray, " n"], logprobs: Float[np.ndarray, " n"], version: int
    ) -> None:
        """Takes what the policy sampled."""
        self.tokens += tokens.tolist()
        self.logprobs += logprobs.tolist()
        self.turn_of += [self.turn] * len(tokens)
        self.version_of += [version] * len(tokens)

    def append_unsampled(self, tokens: Sequence[int]) -> None:
        """Takes what the chat format and the tools put between two turns; opens the next turn."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.turn_of += [self.turn] * len(tokens)
        self.version_of += [-1] * len(tokens)
        self.turn += 1
        self.turn_start = len(self.tokens)

    def finish(self, stop: Stop, turn_stop: TurnStop | None = None) -> None:
        """No token follows."""
        self.stop = stop
        if turn_stop:
            self.stops.append(turn_stop)

    def end_turn(self, ended: bool, chat: Chat, tools: Tools, config: EpisodeConfig) -> None:
        """Reads the turn that just ended: an answer, calls to submit, or a limit."""
        body = self.tokens[self.turn_start : len(self.tokens) - ended]
        self.reply = ("" if self.turn else self.reply_start) + chat.tokenizer.decode(body)
        if not ended:
            full = len(self.tokens) >= config.context
            self.finish("context_full" if full else "turn_length", "length")
            return
        asked = parse_reply(self.reply).calls
        if not asked:
            self.finish("answered", "ended")
        elif self.turn + 1 >= config.turns:
            self.refuse(asked, "turn_limit")
        elif len(self.calls) + len(asked) > config.calls:
            self.refuse(asked, "call_limit")
        else:
            self.stops.append("called")
            self.calls += [None if isinstance(c, MalformedCall) else c for c in asked]
            self.pending = [submit(call, tools) for call in asked]

    def refuse(self, asked: Sequence[ToolCall | MalformedCall], stop: Stop) -> None:
        """Ends the episode at a limit; the calls are on record but do not run."""
        self.calls += [None if isinstance(c, MalformedCall) else c for c in asked]
        self.results += [ToolResult("not_executed", f"stopped at the {stop}")] * len(asked)
        self.finish(stop, "called")

    @property
    def can_decode(self) -> bool:
        return not self.pending and self.stop is None

    @property
    def results_ready(self) -> bool:
        return bool(self.pending) and all(future.done() for future in self.pending)

    def take_results(self, chat: Chat, config: EpisodeConfig) -> None:
        """Appends the tool results, or ends the episode when they leave no room for an answer."""
        results = [future.result() for future in self.pending]
        self.pending = []
        self.results += results
        tokens = chat.tool_results([r.output for r in results], config.output_tokens)
        if len(self.tokens) + len(tokens) >= config.context:
            self.stop = "context_full"
        else:
            self.append_unsampled(tokens)

    def trajectory(self) -> Trajectory:
        """The finished episode, frozen."""
        assert self.stop is not None, "the episode is still going"
        versions = np.array(self.version_of, np.int32)
        return Trajectory(
            problem_id=self.problem_id,
            sample=self.sample,
            tokens=np.array(self.tokens, np.int32),
            sampled=versions >= 0,
            logprobs=np.array(self.logprobs, np.float32),
            turn=np.array(self.turn_of, np.int16),
            policy_version=versions,
            prompt_len=self.prompt_len,
            calls=tuple(self.calls),
            results=tuple(self.results),
            reply=self.reply,
            stops=tuple(self.stops),
            stop=self.stop,
        )


def submit(call: ToolCall | MalformedCall, tools: Tools) -> Future[ToolResult]:
    """The call's future result; what is not a call gets its explanation back at once."""
    if isinstance(call, ToolCall):
        return tools.submit(call)
    future: Future[ToolResult] = Future()
    future.set_result(ToolResult("malformed", f"This is not a valid tool call: {call.reason}"))
    return future
