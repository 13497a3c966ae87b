"""The host side of sampling: slots, turns and tools.

Slots, not waves. A finished slot is refilled at once by the next waiting episode; a slot whose tool
runs is parked with its cache intact while the others decode, and when the result is there only its
tokens are fed. The prompt of a group is prefilled once and copied to the group's other slots, as
`rollout/seating.py` has it. The same tokens come out whatever the number of slots, the steps per
visit, the mesh, or the time a tool takes.

With several processes each plays its own problems in its own slots. Before each visit to the
devices they tell each other what they need there, and all run what any of them needs.
"""

import dataclasses
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

import jax
import numpy as np

from demyrl import processes
from demyrl.rollout.draw import episode_keys
from demyrl.rollout.episode import Episode, EpisodeConfig, Tools
from demyrl.rollout.sampler import Feed, Sampler, merged
from demyrl.rollout.seating import Slot, Waiting, Work, seat
from demyrl.text.chat import Chat
from demyrl.text.prompts import question
from demyrl.types import Problem, Trajectory

LOOK_S = 0.05  # how soon a process that waits for its tools hears what the others need


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """How many episodes a problem gets, and how slots are served."""

    samples: int  # G, trajectories of each problem
    early_return: float  # leave the device when fewer than this share of busy slots decode
    reply_start: str = ""  # put before every first reply, as a part of the prompt
    prompts: str = "bare"  # what is said around a problem, see text/prompts.py


@dataclasses.dataclass(frozen=True)
class Rollout:
    """All trajectories of this process, problem by problem and sample by sample, and how the slots
    of all processes were used."""

    trajectories: tuple[Trajectory, ...]
    numbers: dict[str, float]


class Visit(NamedTuple):
    """What one visit to the devices is for, in one process or in all of them."""

    early: int  # whether there are copies before what is fed
    late: int  # and behind it
    going: int  # rows that can decode
    pressing: int  # episodes that wait for a slot, or for a tool
    unfinished: int  # episodes
    lengths: tuple[int, ...]  # of the rounds of `extend`


def together(own: Visit, ladder: Sequence[int]) -> Visit:
    """What all processes need of a visit; their rounds are told as a count for each length."""
    if processes.count() == 1:
        return own
    numbers = [*own[:-1], *(own.lengths.count(length) for length in ladder)]
    everyone = processes.exchange(np.array(numbers, np.int32))
    early, late = everyone[:, :2].max(axis=0).tolist()
    going, pressing, unfinished = everyone[:, 2:5].sum(axis=0).tolist()
    counts = everyone[:, :4:-1]  # as rounds come: the longest first
    lengths = merged([np.repeat(ladder[::-1], each).tolist() for each in counts])
    return Visit(early, late, going, pressing, unfinished, tuple(lengths))


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
        self.slots = [Slot(row, sampler.shard(row)) for row in range(sampler.rows)]
        self.counts = dict.fromkeys(("prefills", "decode_steps", "busy", "tools_wait_s"), 0.0)

    def roll_out(
        self,
        problems: Sequence[Problem],
        root: jax.Array,
        step: int,
        version: int,
        advance: Callable[[int], None] = lambda finished: None,
    ) -> Rollout:
        """G trajectories for each of this process's problems.

        `root` and `step` seed the draws, together with each problem's id and sample number.
        `version` is recorded with every sampled token; `advance` hears how many episodes of all
        processes just finished. Raises ValueError when a prompt leaves no room in the context.
        """
        self.counts = dict.fromkeys(self.counts, 0.0)
        for slot in self.slots:
            slot.episode = slot.prompt = None
        episodes = self.episodes(problems, root, step)
        waiting, before = Waiting(episodes, self.config.samples), None
        while True:
            work = seat(self.slots, waiting)
            self.take_results(work)
            visit = together(self.visit(work, waiting), self.sampler.config.extend_lengths)
            advance((visit.unfinished if before is None else before) - visit.unfinished)
            before = visit.unfinished
            if not visit.unfinished:
                return Rollout(tuple(each.trajectory() for each in episodes), self.numbers())
            if visit.going:
                self.serve(work, visit)
                self.decode(version, visit)
            else:
                self.wait_for_result()
            self.release()

    def episodes(self, problems: Sequence[Problem], root: jax.Array, step: int) -> list[Episode]:
        """Every episode of the rollout, none begun."""
        if not problems:
            return []
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

    def take_results(self, work: Work) -> None:
        """Adds the tool results that are there to what is fed."""
        for slot in self.slots:
            if slot.episode and slot.episode.results_ready:
                start = len(slot.episode.tokens) - 1
                slot.episode.take_results(self.chat, self.limits)
                if slot.episode.tokens[start:-1]:
                    work.feeds.append(Feed(slot.row, start, slot.episode.tokens[start:-1]))

    def visit(self, work: Work, waiting: Waiting) -> Visit:
        """What this process needs of the next visit to the devices."""
        busy = [slot.episode for slot in self.slots if slot.episode]
        return Visit(
            early=int(bool(work.early)),
            late=int(bool(work.late)),
            going=sum(episode.can_decode for episode in busy),
            pressing=waiting.count + sum(bool(episode.pending) for episode in busy),
            unfinished=waiting.count + sum(episode.stop is None for episode in busy),
            lengths=tuple(run.length for run in self.sampler.rounds(work.feeds)),
        )

    def serve(self, work: Work, visit: Visit) -> None:
        """Fills the cache; what only other processes need runs here with nothing."""
        self.counts["prefills"] += work.prefills
        if visit.early:
            self.sampler.copy(work.early)
        self.sampler.extend(work.feeds, visit.lengths)
        if visit.late:
            self.sampler.copy(work.late)

    def wait_for_result(self) -> None:
        """Waits until a parked episode can go on; with several processes, not for long."""
        started = time.perf_counter()
        patience = LOOK_S if processes.count() > 1 else float("inf")
        parked = [slot.episode for slot in self.slots if slot.episode and slot.episode.pending]
        while parked and not any(episode.results_ready for episode in parked):
            left = started + patience - time.perf_counter()
            if left <= 0:
                break
            futures = [f for episode in parked for f in episode.pending if not f.done()]
            wait(futures, min(left, threading.TIMEOUT_MAX), return_when=FIRST_COMPLETED)
        self.counts["tools_wait_s"] += time.perf_counter() - started

    def decode(self, version: int, visit: Visit) -> None:
        """One visit to the devices for all slots that can decode."""
        going = [s for s in self.slots if s.episode and s.episode.can_decode]
        last, lengths, budgets = np.zeros((3, len(self.slots)), np.int32)
        keys = np.zeros((len(self.slots), 2), np.uint32)
        for slot in going:
            episode = slot.episode
            last[slot.row], lengths[slot.row] = episode.tokens[-1], len(episode.tokens) - 1
            budgets[slot.row], keys[slot.row] = episode.budget(self.limits), episode.key
        busy = self.config.early_return if visit.pressing else 0.0
        chunk = self.sampler.decode(last, lengths, budgets, keys, max(1, int(busy * visit.going)))
        self.counts["decode_steps"] += int(chunk.steps)
        self.counts["busy"] += int(chunk.counts.sum())
        for slot in going:
            count, ended = chunk.counts[slot.row], bool(chunk.ended[slot.row])
            slot.episode.append(
                chunk.tokens[slot.row, :count], chunk.logprobs[slot.row, :count], version
            )
            if ended or slot.episode.budget(self.limits) <= 0:
                slot.episode.end_turn(ended, self.chat, self.tools, self.limits)

    def release(self) -> None:
        """Frees the slots of stopped episodes."""
        for slot in self.slots:
            if slot.episode and slot.episode.stop:
                slot.episode = None

    def numbers(self) -> dict[str, float]:
        """How the slots of all processes were used: documented in `logs.METRICS`."""
        everyone = processes.gather(self.counts)
        steps = self.counts["decode_steps"]  # the same in all of them
        busy = sum(counts["busy"] for counts in everyone)
        return {
            "rollout/prefills": sum(counts["prefills"] for counts in everyone),
            "rollout/decode_steps": steps,
            "rollout/slot_use": busy / max(steps * self.sampler.config.slots, 1),
            "time/tools_wait_s": max(counts["tools_wait_s"] for counts in everyone),
        }
