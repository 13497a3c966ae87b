"""A conversation with one model: a message in, the answer of one or more turns out.

Each answer is an episode whose prompt is all that was said before, so turns, calls and limits are
those of a rollout. What the agent does for many rows, this does for one, and a viewer sees the
answer while it grows.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from demyrl.rollout.draw import episode_keys
from demyrl.rollout.episode import Episode, EpisodeConfig, Tools
from demyrl.rollout.sampler import Feed, Sampler
from demyrl.text.chat import Chat
from demyrl.text.toolcalls import THINK_OPEN, MalformedCall, parse_reply
from demyrl.types import Message, ToolCall, ToolResult

OUTPUT_TOKENS = 512  # of one tool result
LOOK_S = 0.1  # how soon a stop is noticed while a tool runs
STOPS = {"turn_length": "max_new_tokens"}  # other stops are called what an episode calls them


@runtime_checkable
class Viewer(Protocol):
    """Who watches an answer grow."""

    def reply(self, text: str, over: bool) -> None:
        """All text of the current turn so far; `over` with the last of it."""

    def results(self, results: Sequence[ToolResult]) -> None:
        """What the calls of the turn gave back."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One assistant turn: the tokens that were sampled, their text, its calls and their results."""

    ids: list[int]  # the end-of-turn token included
    text: str
    calls: tuple[ToolCall | MalformedCall, ...]
    results: tuple[ToolResult, ...]

    def row(self) -> dict[str, Any]:
        """The turn as JSON has it."""
        calls = [
            {"name": None, "arguments": None, "written": call.raw, "reason": call.reason}
            if isinstance(call, MalformedCall)
            else {"name": call.name, "arguments": call.arguments}
            for call in self.calls
        ]
        results = [{"status": each.status, "output": each.output} for each in self.results]
        return {"ids": self.ids, "text": self.text, "calls": calls, "results": results}


@dataclasses.dataclass(frozen=True)
class Answer:
    """All turns that answer one message."""

    prompt_ids: list[int]  # the whole conversation up to the first sampled token
    turns: list[Turn]
    stop: str  # "answered", "interrupted", "max_new_tokens" or another limit of an episode
    tokens_per_s: float  # of decoding

    @property
    def ids(self) -> list[int]:
        """The sampled tokens of all turns."""
        return [token for turn in self.turns for token in turn.ids]

    def row(self) -> dict[str, Any]:
        """The answer as JSON has it; its text is that of the last turn."""
        return {
            "prompt_ids": self.prompt_ids,
            "ids": self.ids,
            "text": self.turns[-1].text,
            "stop": self.stop,
            "turns": [turn.row() for turn in self.turns],
            "tokens_per_s": round(self.tokens_per_s, 2),
        }

    def summary(self) -> str:
        """How much was said, how fast, and what cut it short."""
        cut = "" if self.stop == "answered" else f", stopped: {self.stop}"
        return f"{len(self.ids)} tokens, {self.tokens_per_s:.1f} tokens/s{cut}"


def turns_of(episode: Episode, chat: Chat, with_tools: bool) -> list[Turn]:
    """The turns of an episode, also of one that was interrupted."""
    turns, results = [], iter(episode.results)
    for number in range(episode.turn + 1):
        ids = [
            token
            for token, turn, version in zip(
                episode.tokens, episode.turn_of, episode.version_of, strict=True
            )
            if turn == number and version >= 0
        ]
        ended = bool(ids) and ids[-1] in chat.end_tokens
        text = chat.tokenizer.decode(ids[:-1] if ended else ids)
        calls = parse_reply(text).calls if with_tools and ended else ()
        turns.append(Turn(ids, text, calls, tuple(islice(results, len(calls)))))
    return turns


class TooLong(ValueError):
    """A message that the context has no room for."""


class Conversation:
    """The tokens of a conversation, and the one row of the sampler that holds them.

    Answers and messages are appended; nothing is rewritten or encoded twice. Without `tools` a
    call is only text.
    """

    def __init__(
        self, sampler: Sampler, chat: Chat, tools: Tools | None, max_new_tokens: int, seed: int
    ):
        self.sampler, self.chat, self.tools = sampler, chat, tools
        self.limits = EpisodeConfig(
            context=sampler.config.context,
            turn_tokens=max_new_tokens,
            turns=max_new_tokens + 1,  # each has a token at least, so these two never bind
            calls=max_new_tokens + 1,
            output_tokens=OUTPUT_TOKENS,
        )
        self.root = jax.random.key(seed)
        self.answers = 0
        self.decode_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Forgets what was said."""
        self.tokens: list[int] = []
        self.cached = 0  # how many of the tokens the row holds

    def answer(
        self, text: str, viewer: Viewer, stopped: Callable[[], bool] = lambda: False
    ) -> Answer:
        """The model's answer to a message, shown while it grows, until it ends or is `stopped`.

        Raises TooLong, and forgets the message, when it leaves no room in the context.
        """
        episode = self._begin(text)
        prompt_ids, self.decode_s = list(episode.tokens), 0.0
        while episode.stop is None and not stopped():
            limits = self._limits(episode)
            if episode.pending:
                self._take_results(episode, limits, viewer)
            elif episode.budget(limits) <= 0:
                episode.finish("turn_length")  # the last token that it had ended a call
            else:
                self._reply(episode, limits, viewer)
        for future in episode.pending:
            future.cancel()
        self._keep(episode.tokens)
        turns = turns_of(episode, self.chat, self.tools is not None)
        stop = STOPS.get(episode.stop, episode.stop) or "interrupted"
        rate = sum(len(turn.ids) for turn in turns) / max(self.decode_s, 1e-9)
        return Answer(prompt_ids, turns, stop, rate)

    def _begin(self, text: str) -> Episode:
        """An episode whose prompt is the conversation with a message at its end."""
        behind = self.chat.next_user(text) if self.tokens else self.chat.prompt(text)
        tokens = self.tokens + behind
        if len(tokens) >= self.limits.context:
            what = "the conversation with this message" if self.tokens else "the prompt"
            remedy = "Begin a new one" if self.tokens else "Shorten it"
            raise TooLong(
                f"{what} has {len(tokens)} tokens and the context holds {self.limits.context}: no "
                f"room for an answer. {remedy}, or raise the context."
            )
        one = np.zeros(1, np.uint32)
        sample = np.array([self.answers], np.int32)
        key = np.asarray(episode_keys(self.root, np.int32(0), one, sample))[0]
        self.answers += 1
        return Episode("chat", self.answers - 1, tokens, key)

    def _limits(self, episode: Episode) -> EpisodeConfig:
        """The limits of the current turn: earlier ones have used up a part of the answer's."""
        used = sum(version >= 0 for version in episode.version_of[: episode.turn_start])
        return dataclasses.replace(self.limits, turn_tokens=self.limits.turn_tokens - used)

    def _reply(self, episode: Episode, limits: EpisodeConfig, viewer: Viewer) -> None:
        """A few more tokens of the current turn, and its end if they reach it."""
        ended = self._decode(episode, episode.budget(limits))
        over = ended or episode.budget(limits) <= 0
        decode, start = self.chat.tokenizer.decode, episode.turn_start
        inside = decode(episode.tokens[max(0, start - 8) : start]).rstrip().endswith(THINK_OPEN)
        said = decode(episode.tokens[start : len(episode.tokens) - ended])
        viewer.reply((THINK_OPEN + "\n" if inside else "") + said, over)
        if over and self.tools:
            episode.end_turn(ended, self.chat, self.tools, limits)
        elif over:
            full = len(episode.tokens) >= limits.context
            episode.finish("answered" if ended else "context_full" if full else "turn_length")

    def _decode(self, episode: Episode, budget: int) -> bool:
        """Appends what is sampled in one visit to the device; True when it ends the turn."""
        fresh = episode.tokens[self.cached : -1]
        if fresh:
            self.sampler.extend([Feed(0, self.cached, fresh)])
            jax.block_until_ready(self.sampler.cache)  # or decoding would seem to take its time
        started = time.perf_counter()
        last, length, budgets = np.array(
            [[episode.tokens[-1]], [len(episode.tokens) - 1], [budget]], np.int32
        )
        chunk = self.sampler.decode(last, length, budgets, episode.key[None], 1)
        self.decode_s += time.perf_counter() - started
        count = chunk.counts[0]
        episode.append(chunk.tokens[0, :count], chunk.logprobs[0, :count], 0)
        self.cached = len(episode.tokens) - 1
        return bool(chunk.ended[0])

    def _take_results(self, episode: Episode, limits: EpisodeConfig, viewer: Viewer) -> None:
        """The results of the turn's calls, once they are there."""
        wait(episode.pending, timeout=LOOK_S)
        if episode.results_ready:
            seen = len(episode.results)
            episode.take_results(self.chat, limits)
            viewer.results(episode.results[seen:])

    def _keep(self, tokens: list[int]) -> None:
        """Makes an answer part of the conversation; a turn that was cut is closed."""
        closing = self.chat.assistant(Message("assistant", ""))
        self.tokens = tokens + ([] if tokens[-1] in self.chat.end_tokens else closing)
