"""What to change when a config does not fit, found by trying.

Changes are tried one on top of the other, the cheapest first: each costs some time of a step, and
the later ones some precision or much time. A change that does not help is taken back.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from demyrl.planning.chips import GIB, Chip
from demyrl.planning.compiled import Compiled
from demyrl.planning.outcome import Outcome
from demyrl.planning.programs import Planned, Scene, planned

MOST = 8  # compilations, unless told otherwise
STRONGER = {"none": "dots", "dots": "full"}
TRAINING = {"sft", "score", "update"}

Changes = dict[str, Any]  # dotted keys of the config, and their values


@dataclasses.dataclass(frozen=True)
class Advice:
    """Changes under which everything that was asked for fits; or None, and what was tried."""

    changes: Changes | None
    tried: tuple[str, ...]

    @property
    def flags(self) -> str:
        return flags(self.changes or {})


def flags(changes: Changes) -> str:
    """Changes as they are written on a command line."""
    return " ".join(f"--config.{key}={spelled(value)}" for key, value in changes.items())


def spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return "'(" + "".join(f"{each}," for each in value) + ")'"
    return str(value)


def candidates(config: Any, failing: set[str]) -> Iterator[Changes]:
    """Changes for phases that do not fit, each given with the config as it was at the start."""
    training, rollout = failing & TRAINING, "rollout" in failing
    if training:
        yield from stronger_remat(config)
        yield from fewer_rows(config, failing)
    if rollout:
        yield {"rollout.slots": config.rollout.slots // 2}
        if len(config.rollout.extend_lengths) > 1:
            yield {"rollout.extend_lengths": tuple(config.rollout.extend_lengths[:-1])}
    yield from other_meshes(config)
    yield {"memory.moments": "bfloat16"}
    if training:
        yield {"head_chunk": config.head_chunk // 2}
        yield {"memory.gradients": "bfloat16"}
    if rollout:
        yield {"rollout.slots": config.rollout.slots // 4}
    yield {"memory.offload": True}


def stronger_remat(config: Any) -> Iterator[Changes]:
    remat = config.memory.remat
    while remat in STRONGER:
        remat = STRONGER[remat]
        yield {"memory.remat": remat}


def fewer_rows(config: Any, failing: set[str]) -> Iterator[Changes]:
    """Half the rows of a micro-batch, and a quarter."""
    for part in (2, 4):
        changes = {}
        if failing & {"score", "update"}:
            changes["train.pack.rows"] = config.train.pack.rows // part
        if "sft" in failing:
            changes["sft.pack.rows"] = config.sft.pack.rows // part
        yield changes


def other_meshes(config: Any) -> Iterator[Changes]:
    """Fewer rows side by side, with more devices for each."""
    data = config.mesh.data
    for axis in ("sequence", "tensor"):
        if data % 2 == 0:
            yield {"mesh.data": data // 2, f"mesh.{axis}": config.mesh[axis] * 2}


def advise(
    config: Any,
    outcomes: Sequence[Outcome],
    scene_of: Callable[[Changes], Scene],
    compiled: Callable[[Planned], Compiled],
    say: Callable[[str], None],
    most: int = MOST,
) -> Advice:
    """The first sum of changes under which every program that did not fit does.

    `scene_of` raises ValueError for changes that the config's own checks refuse.
    """
    failing = sorted((o for o in outcomes if o.fits is False), key=lambda o: -o.in_use)
    order = [program.name for program in planned(scene_of({}))]
    places = [order.index(each.program.name) for each in failing]
    best, kept = failing[0], {}
    tried: list[str] = []
    for change in candidates(config, {each.program.phase for each in failing}):
        if most <= 0:
            break
        try:
            scene = scene_of(kept | change)
        except ValueError:
            continue
        results = attempts(scene, places, compiled, best.chip)
        most -= sum(each.compiled is not None for each in results)
        tried.append(verdict(change, results[-1]))
        say(tried[-1])
        if better(results[0], best):
            best, kept = results[0], kept | change
        if results[-1].fits:
            return Advice(kept | change, tuple(tried))
    return Advice(None, tuple(tried))


def attempts(
    scene: Scene, places: Iterable[int], compiled: Callable[[Planned], Compiled], chip: Chip
) -> list[Outcome]:
    """The programs at some places of a plan, compiled, up to the first that does not fit.

    One that would not fit even without temporaries is not compiled.
    """
    programs, results = planned(scene), []
    for place in places:
        result = Outcome(programs[place], None, chip)
        if result.held <= chip.usable:
            result = Outcome(programs[place], compiled(programs[place]), chip)
        results.append(result)
        if not result.fits:
            break
    return results


def better(now: Outcome, before: Outcome) -> bool:
    """Whether less HBM is used, or where one was not compiled, held."""
    if now.compiled and before.compiled:
        return now.in_use < before.in_use
    return now.held < before.held


def verdict(change: Changes, last: Outcome) -> str:
    """One line on what a change led to."""
    needed = last.in_use if last.compiled else last.held
    words = {True: "fits", False: "does not fit", None: "does not fit, temporaries apart"}
    return (
        f"with {flags(change)}: {last.program.name} takes {needed / GIB:.2f} of "
        f"{last.chip.usable / GIB:.2f} GiB, {words[last.fits]}"
    )
