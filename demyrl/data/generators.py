"""Seeded procedural problems in three domains, each with what a scripted teacher knows about it.

The families themselves are in `families.py`. Nothing here runs programs or reads files.
"""

import dataclasses
import hashlib
import random
from typing import Literal

from demyrl.data.families import FAMILIES, Draft, ProblemConfig
from demyrl.types import Domain, Problem

Split = Literal["train", "eval"]

EVAL_SHARE = 8  # one problem in so many belongs to the eval split
PATIENCE = 3000  # draws in a row without a new problem before a family counts as exhausted


@dataclasses.dataclass(frozen=True)
class Task:
    """A generated problem with what the scripted teacher knows of it."""

    problem: Problem
    program: str  # prints the answer and nothing else
    slips: tuple[str, ...]  # wrong programs: some fail or print nothing, some print a wrong value


def tasks(config: ProblemConfig, split: Split, count: int, seed: int) -> list[Task]:
    """`count` different problems of one split, as evenly over domains and families as can be.

    The split of a problem follows from a hash of its operands, so train and eval never share one,
    whatever the seeds. The same arguments give the same list on every machine. Raises ValueError
    for an unknown family or split, sizes out of range, or a family with too few problems.
    """
    check(config, split, count)
    rng = random.Random(seed)
    found = []
    for family, share in family_counts(config.families, count).items():
        found += draw_family(family, config, split, share, random.Random(rng.getrandbits(64)))
    rng.shuffle(found)
    return found


def check(config: ProblemConfig, split: str, count: int) -> None:
    """Raises ValueError, naming the value, when no problems can be drawn with these settings."""
    unknown = [name for name in config.families if name not in FAMILIES]
    if unknown or not config.families:
        raise ValueError(
            f"families is {config.families}: {unknown or 'an empty list'} cannot be drawn. "
            f"Choose from {', '.join(FAMILIES)}."
        )
    if len(set(config.families)) != len(config.families):
        raise ValueError(f"families is {config.families}: name each family once.")
    if not 2 <= config.digits <= 4:
        raise ValueError(f"digits is {config.digits}: operands have 2, 3 or 4 digits.")
    if not 3 <= config.terms <= 8:
        raise ValueError(f"terms is {config.terms}: use 3 to 8 operands.")
    if split not in ("train", "eval"):
        raise ValueError(f"split is {split!r}: it must be 'train' or 'eval'.")
    if count < 0:
        raise ValueError(f"count is {count}: it must not be negative.")


def family_counts(families: tuple[str, ...], count: int) -> dict[str, int]:
    """How many problems each family gives; domains, then families in them, differ by at most 1."""
    by_domain: dict[str, list[str]] = {}
    for name in families:
        by_domain.setdefault(FAMILIES[name][0], []).append(name)
    counts = {}
    for names, share in zip(by_domain.values(), shares(count, len(by_domain)), strict=True):
        counts |= dict(zip(names, shares(share, len(names)), strict=True))
    return counts


def shares(count: int, parts: int) -> list[int]:
    """`count` cut in whole parts that differ by at most 1."""
    return [count // parts + (i < count % parts) for i in range(parts)]


def draw_family(
    family: str, config: ProblemConfig, split: Split, count: int, rng: random.Random
) -> list[Task]:
    """`count` different problems of one family; ValueError when it has too few."""
    domain, draw = FAMILIES[family]
    found: dict[str, Task] = {}
    idle = 0
    while len(found) < count:
        draft = draw(rng, config)
        if split_of(family, draft.key) != split or draft.key in found:
            idle += 1
        else:
            found[draft.key] = task_of(family, domain, draft, rng)
            idle = 0
        if idle == PATIENCE:
            raise ValueError(
                f"family {family!r} gave only {len(found)} different {split} problems of the "
                f"{count} asked for with digits={config.digits}. Ask for fewer problems, add "
                "families, or raise digits."
            )
    return list(found.values())


def split_of(family: str, key: str) -> Split:
    """The split a problem belongs to, whatever its wording."""
    return "eval" if digest(f"{family}|{key}") % EVAL_SHARE == 0 else "train"


def task_of(family: str, domain: Domain, draft: Draft, rng: random.Random) -> Task:
    prompt = rng.choice(draft.wordings)
    problem = Problem(
        id=f"{family}-{digest(prompt) % 16**12:012x}",
        source=family,
        domain=domain,
        prompt=prompt,
        answer=draft.answer,
        grader=draft.grader,
    )
    return Task(problem, draft.program, draft.slips)


def digest(text: str) -> int:
    """A number that depends on the text alone, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
