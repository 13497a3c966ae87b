"""What came of a plan: each program against the chip's memory, and each phase of a step.

A program's own arguments and temporaries are not all that lies in HBM while it runs. What lies
beside them is added before anything is said to fit.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from demyrl.planning.chips import Chip
from demyrl.planning.compiled import Compiled
from demyrl.planning.programs import Planned, Scene
from demyrl.planning.work import least_seconds

HELD = {  # by phase, what lies in HBM from its beginning to its end
    "sft": ("parameters", "moments", "working copy", "gradients"),
    "rollout": ("parameters", "moments", "reference", "sampling copy", "cache"),
    "score": ("parameters", "moments", "reference", "working copy"),
    "update": ("parameters", "moments", "reference", "working copy", "gradients"),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A program and, where there is a compiler, what that says."""

    program: Planned
    compiled: Compiled | None
    chip: Chip

    @property
    def held(self) -> int:
        """Bytes of HBM without temporaries and results."""
        return self.program.argument_bytes + self.program.beside

    @property
    def in_use(self) -> int | None:
        """Bytes of HBM while the program runs."""
        return self.compiled and self.compiled.total + self.program.beside

    @property
    def fits(self) -> bool | None:
        if self.compiled is None:
            return None
        return not self.compiled.refusal and self.in_use <= self.chip.usable

    @property
    def least_s(self) -> float:
        return least_seconds(self.program.work, self.chip)


@dataclasses.dataclass(frozen=True)
class Phase:
    """The most HBM that a phase of a step uses, and what it is made of, in bytes of one chip."""

    name: str
    held: dict[str, int]
    most: int  # with temporaries; without a compiler only what is held
    fits: bool | None


def phases(scene: Scene, outcomes: Sequence[Outcome]) -> list[Phase]:
    """The phases of which some program was planned, in order."""
    made = []
    for name, trees in HELD.items():
        own = [each for each in outcomes if each.program.phase == name]
        if not own:
            continue
        held = {tree: scene.sizes[tree] for tree in trees if scene.sizes[tree]}
        known = all(each.compiled for each in own)
        most = max([sum(held.values()), *(each.in_use or 0 for each in own)])
        fits = most <= own[0].chip.usable and all(each.fits for each in own) if known else None
        made.append(Phase(name, held, most, fits))
    return made


def program_row(each: Outcome) -> dict[str, Any]:
    """A program's line of the JSON; None is what only a compiler can say."""
    compiled, program = each.compiled, each.program
    known = compiled is not None
    return {
        "name": program.name,
        "phase": program.phase,
        "arguments_bytes": compiled.arguments if known else program.argument_bytes,
        "temporaries_bytes": compiled.temporaries if known else None,
        "outputs_bytes": compiled.outputs if known else None,
        "code_bytes": compiled.code if known else None,
        "total_bytes": compiled.total if known else None,
        "beside_bytes": program.beside,
        "in_use_bytes": each.in_use,
        "hbm_bytes": each.chip.memory,
        "fits": each.fits,
        "flops": program.work.flops,
        "bytes": program.work.bytes,
        "lower_bound_s": each.least_s,
        "collectives": {k: sent._asdict() for k, sent in compiled.collectives.items()}
        if known
        else None,
        "compile_s": round(compiled.compile_s, 1) if known else None,
        "refusal": compiled.refusal if known else "",
    }


def phase_row(each: Phase) -> dict[str, Any]:
    """A phase's line of the JSON."""
    return {"name": each.name, "held_bytes": each.held, "most_bytes": each.most, "fits": each.fits}
