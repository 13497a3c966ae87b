"""Which waiting episode gets which slot, and what the cache needs for that.

A prompt is prefilled once and copied to other slots of its group, but never out of its data shard.
So a group sits in one shard where it can, and its prompt is prefilled again only where a slot would
stay empty otherwise.
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Sequence
from itertools import zip_longest

from demyrl.rollout.episode import Episode
from demyrl.rollout.sampler import Feed


@dataclasses.dataclass
class Slot:
    """One cache row: whose episode decodes in it, and whose prompt its first tokens are."""

    row: int
    shard: int  # of this process, that holds the row
    episode: Episode | None = None
    prompt: int | None = None  # index of the problem whose prompt the row begins with


class Waiting:
    """Episodes that have no slot yet, by problem; problems are begun in their order."""

    def __init__(self, episodes: Sequence[Episode], samples: int):
        self.groups = [deque(episodes[i : i + samples]) for i in range(0, len(episodes), samples)]
        self.begun = 0  # problems that have had a slot
        self.count = len(episodes)

    def take(self, problem: int) -> Episode:
        self.begun = max(self.begun, problem + 1)
        self.count -= 1
        return self.groups[problem].popleft()

    def at_hand(self, prompts: Collection[int]) -> int | None:
        """A problem with one of these prompts, or else the next that is not begun."""
        known = [problem for problem in prompts if self.groups[problem]]
        if known:
            return min(known)
        return self.begun if self.begun < len(self.groups) else None

    def longest(self) -> int:
        """The problem for which most samples wait."""
        return max(range(self.begun), key=lambda problem: len(self.groups[problem]))


@dataclasses.dataclass
class Work:
    """What the cache needs before the next decoding, in this order."""

    early: list[tuple[int, int]]  # copies of rows: source and target
    feeds: list[Feed]
    late: list[tuple[int, int]]  # copies of rows that were just fed
    prefills: int  # feeds that are prompts


def seat(slots: Sequence[Slot], waiting: Waiting) -> Work:
    """Gives free slots to waiting episodes, a slot of each shard in turn.

    Copies of prompts that are in the cache go first, then prefills overwrite rows, then come the
    copies of what was just prefilled.
    """
    work = Work([], [], [], 0)
    written: set[int] = set()  # rows whose prompt is there after the feeds
    shards: dict[int, list[Slot]] = {}
    for slot in slots:
        shards.setdefault(slot.shard, []).append(slot)
    in_turn = [slot for each in zip_longest(*shards.values()) for slot in each if slot]
    free = [slot for slot in in_turn if slot.episode is None]
    for at_once in (True, False):  # groups stay together, then no slot stays empty
        for slot in free:
            if slot.episode is None and waiting.count:
                shard = shards[slot.shard]
                problem = waiting.at_hand({s.prompt for s in shard if s.prompt is not None})
                if problem is None and not at_once:
                    problem = waiting.longest()
                if problem is not None:
                    take_seat(slot, problem, shard, waiting, work, written)
    return work


def take_seat(
    slot: Slot,
    problem: int,
    shard: Sequence[Slot],
    waiting: Waiting,
    work: Work,
    written: set[int],
) -> None:
    """Seats the problem's next episode, its prompt copied from the shard or prefilled."""
    slot.episode = waiting.take(problem)
    there, slot.prompt = slot.prompt == problem, problem
    source = next((s.row for s in shard if s.prompt == problem and s is not slot), None)
    if there:
        return
    if source is None:
        work.prefills += 1
        written.add(slot.row)
        if slot.episode.tokens[:-1]:
            work.feeds.append(Feed(slot.row, 0, slot.episode.tokens[:-1]))
    elif source in written:
        written.add(slot.row)
        work.late.append((source, slot.row))
    else:
        work.early.append((source, slot.row))
