"""The host side of sampling: slots, turns and tools.

Slots, not waves. A finished slot is refilled at once by the next waiting episode; a slot whose tool
runs is parked with its cache intact while the others decode, and when the result is there only its
tokens are fed. The prompt of a group is prefilled once and copied to the group's other slots. The
same tokens come out whatever the number of slots, the steps per visit, or the time a tool takes.
"""

import dataclasses
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

import jax
import numpy as np

from demyrl.rollout.episode import Episode, EpisodeConfig, Tools
from demyrl.rollout.sampler import Feed, Sampler, episode_keys
from demyrl.text.chat import Chat
from demyrl.text.prompts import question
from demyrl.types import Problem, Trajectory


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """How many episodes a problem gets, and how slots are served."""

    samples: int  # G, trajectories of each problem
    early_return: float  # leave the device when fewer than this share of busy slots decode
    reply_start: str = ""  # put before every first reply, as a part of the prompt
    prompts: str = "bare"  # what is said around a problem, see text/prompts.py


@dataclasses.dataclass(frozen=True)
class Rollout:
    """All trajectories, problem by problem and sample by sample, and how the slots were used."""

    trajectories: tuple[Trajectory, ...]
    numbers: dict[str, float]


@dataclasses.dataclass
class Slot:
    """One cache row: whose episode decodes in it, and whose prompt its first tokens are."""

    row: int
    episode: Episode | None = None
    prompt: int | None = None  # index of the problem whose prompt the row begins with


class Agent:
    """Plays episodes in the sampler's slots until all have stopped."""

    def __init__(
        self,
        sampler: Sampler,
        chat: Chat,
        tools: Tools,
        agent: AgentConfig,
        episode: EpisodeConfig,
    ):
        self.sampler, self.chat, self.tools = sampler, chat, tools
        self.config, self.limits = agent, episode
        self.slots = [Slot(row) for row in range(sampler.config.slots)]
        self.counts = dict.fromkeys(("prefills", "decode_steps", "busy", "tools_wait_s"), 0.0)

    def roll_out(
        self,
        problems: Sequence[Problem],
        root: jax.Array,
        step: int,
        version: int,
        advance: Callable[[int], None] = lambda finished: None,
    ) -> Rollout:
        """G trajectories for each problem.

        `root` and `step` seed the draws, together with each problem's id and sample number.
        `version` is recorded with every sampled token; `advance` hears how many episodes just
        finished. Raises ValueError when a prompt leaves no room in the context.
        """
        self.counts = dict.fromkeys(self.counts, 0.0)
        for slot in self.slots:
            slot.episode = slot.prompt = None
        episodes = self.episodes(problems, root, step)
        waiting = deque(enumerate(episodes))
        unfinished = len(episodes)
        while unfinished:
            self.fill(waiting)
            self.feed_results()
            self.decode(version, pressing=bool(waiting))
            finished = self.release()
            unfinished -= finished
            advance(finished)
        return Rollout(tuple(episode.trajectory() for episode in episodes), self.numbers())

    def episodes(self, problems: Sequence[Problem], root: jax.Array, step: int) -> list[Episode]:
        """Every episode of the rollout, none begun."""
        count = self.config.samples
        prompts = [self.prompt(problem) for problem in problems]
        names = np.repeat([zlib.crc32(p.id.encode()) for p in problems], count).astype(np.uint32)
        samples = np.tile(np.arange(count, dtype=np.int32), len(problems))
        keys = np.asarray(episode_keys(root, np.int32(step), names, samples))
        return [
            Episode(
                problems[i // count].id,
                i % count,
                prompts[i // count],
                keys[i],
                self.config.reply_start,
            )
            for i in range(len(problems) * count)
        ]

    def prompt(self, problem: Problem) -> list[int]:
        tokens = self.chat.prompt(question(problem, self.config.prompts))
        tokens += self.chat.tokenizer.encode_written(self.config.reply_start)
        if len(tokens) >= self.limits.context:
            raise ValueError(
                f"the prompt of problem {problem.id} has {len(tokens)} tokens and the context "
                f"holds {self.limits.context}: no room for an answer. Raise rollout.context or "
                "drop the problem."
            )
        return tokens

    def fill(self, waiting: deque[tuple[int, Episode]]) -> None:
        """Seats waiting episodes in free slots: a prompt is prefilled once, and copied where a
        slot with the same prompt exists. Copies of prompts that are in the cache go first, then
        prefills overwrite rows, then come the copies of what was just prefilled."""
        early, late, fresh = [], [], {}
        for slot in self.slots:
            if slot.episode is not None or not waiting:
                continue
            index, slot.episode = waiting.popleft()
            prompt = index // self.config.samples
            source = next((s.row for s in self.slots if s.prompt == prompt), None)
            if source is None:
                fresh[slot.row] = Feed(slot.row, 0, slot.episode.tokens[:-1])
            elif source != slot.row:
                (late if source in fresh else early).append((source, slot.row))
            slot.prompt = prompt
        self.sampler.copy(early)
        self.sampler.extend([feed for feed in fresh.values() if feed.tokens])
        self.sampler.copy(late)
        self.counts["prefills"] += len(fresh)

    def feed_results(self) -> None:
        """Gives finished tool results to their rows; waits for one when no slot can decode."""
        parked = [s for s in self.slots if s.episode and s.episode.pending]
        if parked and len(parked) == sum(s.episode is not None for s in self.slots):
            started = time.perf_counter()
            while not any(s.episode.results_ready for s in parked):
                futures = [f for s in parked for f in s.episode.pending if not f.done()]
                wait(futures, return_when=FIRST_COMPLETED)
            self.counts["tools_wait_s"] += time.perf_counter() - started
        feeds = []
        for slot in parked:
            if slot.episode.results_ready:
                start = len(slot.episode.tokens) - 1
                slot.episode.take_results(self.chat, self.limits)
                feeds.append(Feed(slot.row, start, slot.episode.tokens[start:-1]))
        self.sampler.extend([feed for feed in feeds if feed.tokens])

    def decode(self, version: int, pressing: bool) -> None:
        """One visit to the device for all slots that can decode."""
        going = [s for s in self.slots if s.episode and s.episode.can_decode]
        if not going:
            return
        last, lengths, budgets = np.zeros((3, len(self.slots)), np.int32)
        keys = np.zeros((len(self.slots), 2), np.uint32)
        for slot in going:
            episode = slot.episode
            last[slot.row], lengths[slot.row] = episode.tokens[-1], len(episode.tokens) - 1
            budgets[slot.row], keys[slot.row] = episode.budget(self.limits), episode.key
        parked = any(s.episode and s.episode.pending for s in self.slots)
        busy = self.config.early_return if pressing or parked else 0.0
        chunk = self.sampler.decode(last, lengths, budgets, keys, max(1, int(busy * len(going))))
        self.counts["decode_steps"] += int(chunk.steps)
        self.counts["busy"] += int(chunk.counts.sum())
        for slot in going:
            count, ended = chunk.counts[slot.row], bool(chunk.ended[slot.row])
            slot.episode.append(
                chunk.tokens[slot.row, :count], chunk.logprobs[slot.row, :count], version
            )
            if ended or slot.episode.budget(self.limits) <= 0:
                slot.episode.end_turn(ended, self.chat, self.tools, self.limits)

    def release(self) -> int:
        """Frees the slots of stopped episodes; returns how many there were."""
        stopped = [slot for slot in self.slots if slot.episode and slot.episode.stop]
        for slot in stopped:
            slot.episode = None
        return len(stopped)

    def numbers(self) -> dict[str, float]:
        """How the slots were used: documented in `logs.METRICS`."""
        steps = self.counts["decode_steps"]
        return {
            "rollout/prefills": self.counts["prefills"],
            "rollout/decode_steps": steps,
            "rollout/slot_use": self.counts["busy"] / max(steps * len(self.slots), 1),
            "time/tools_wait_s": self.counts["tools_wait_s"],
        }
