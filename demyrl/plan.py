"""What a config takes on a slice of TPUs, without the TPUs: memory, operations, collectives.

    python -m demyrl.plan --config=configs/grpo_tcr.py:qwen3_4b --topology=v5e:4x4 [--json]
        [--programs=update,decode] [--advice=off] [--tokens=8000] [--sampled=0.7]
        [--config.KEY=VALUE ...]

Every program of SFT, rollout, scoring and update is compiled by XLA's TPU compiler, which runs on
any CPU with the package libtpu. When something does not fit, changes are tried until it does.
Without libtpu only what can be worked out is printed. Nothing is run, and no weights are read.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, AxisType
from ml_collections import ConfigDict
from rich.console import Console

from demyrl import command, recipe
from demyrl.model.config import AUTO
from demyrl.model.mesh import AXES, TABLE, MeshConfig, instead, make_mesh, undivided
from demyrl.planning import compiled, show
from demyrl.planning.advice import MOST, Advice, advise
from demyrl.planning.chips import GIB, Slice, slice_of
from demyrl.planning.outcome import Outcome, phases
from demyrl.planning.programs import Load, Planned, Scene, planned
from demyrl.planning.step import step_seconds

DEFAULT = "configs/grpo_tcr.py:qwen3_4b"


class Parser(argparse.ArgumentParser):
    """Refuses a wrong command line with one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. --help lists what can be given.")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, ConfigDict]:
    """The options and the config; ValueError names what is wrong."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("demyrl.plan", description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--topology", required=True, help="such as v5e:4x4")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--programs", default="", help="only those whose names begin with one of these, by commas"
    )
    parser.add_argument("--advice", choices=("on", "off"), default="on", help="try what would fit")
    parser.add_argument("--most", type=int, default=MOST, help="compilations for advice")
    parser.add_argument(
        "--tokens", type=int, default=0, help="of a trajectory on average; 0: the whole context"
    )
    parser.add_argument("--sampled", type=float, default=1.0, help="share of them that is sampled")
    asked, words = parser.parse_known_args(argv)
    config, _ = command.parse(["plan", *words, "--workdir=."], DEFAULT)
    if asked.tokens < 0 or not 0 < asked.sampled <= 1:
        raise ValueError(
            f"--tokens={asked.tokens} and --sampled={asked.sampled}: give at least 0 tokens, and a "
            "share above 0 and up to 1."
        )
    return asked, config


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is planned: a config on a slice, for trajectories of some kind."""

    config: ConfigDict
    place: Slice
    devices: list[Any] | None  # of the slice; None where there is no compiler that knows them
    tokens: int  # of a trajectory on average; 0: the whole context
    sampled: float  # share of them that the policy chose

    def scene(self, changes: dict[str, Any]) -> Scene:
        """The scene of the config with some changes, checked as a run's is."""
        config = self.config.copy_and_resolve_references()
        config.update_from_flattened_dict(changes)
        settings = settings_of(config)
        check_mesh(settings, self.place)
        load = Load(self.tokens or settings.rollout.sampler.context, self.sampled)
        if self.devices is None:
            kinds = (AxisType.Auto,) * len(AXES)
            mesh = AbstractMesh(settings.mesh.sizes, AXES, axis_types=kinds)
        else:
            mesh = make_mesh(settings.mesh, self.devices)
        return Scene(settings, mesh, load)


def settings_of(config: ConfigDict) -> recipe.Recipe:
    """The checked recipe, without the weights that it would start from."""
    config = config.copy_and_resolve_references().unlock()
    source = config.model.source
    if not source.startswith("builtin:") and not Path(source).expanduser().is_dir():
        config.model.source, config.tokenizer = "", config.tokenizer or "builtin:tiny"
    settings = recipe.read(config)
    if settings.model.dtype == AUTO:
        model = dataclasses.replace(settings.model, dtype="bfloat16")
        settings = dataclasses.replace(settings, model=model)
    return settings


def check_mesh(settings: recipe.Recipe, place: Slice) -> None:
    """Raises ValueError, with a mesh that would work, unless it takes every chip of the slice."""
    mesh = settings.mesh
    if mesh.devices == place.devices:
        return
    model = settings.model
    counts = {f"model.{n}": (n, getattr(model, n)) for n in TABLE if hasattr(model, str(n))}
    counts |= recipe.spread_counts(settings)
    inner = mesh.tensor * mesh.sequence
    nearest = dataclasses.replace(mesh, data=max(1, place.devices // inner))
    if nearest.devices != place.devices or undivided(nearest, counts):
        working = instead(MeshConfig(place.devices, 1, 1), counts)
    else:
        working = f"A mesh that would work: {nearest}."
    raise ValueError(
        f"{mesh}: that takes {mesh.devices} chips, but {place.name} has {place.devices}. {working}"
    )


def main() -> None:
    """Plans what the command line says, and prints it."""
    asked, config = parse(sys.argv[1:])
    place = slice_of(asked.topology)
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    console = Console(highlight=False, soft_wrap=True, stderr=asked.json)

    def say(line: str) -> None:
        console.print(line, markup=False)

    devices, make = None, None
    if compiled.available():
        devices, make = compiled.devices_of(place), noting(say)
    else:
        say(compiled.MISSING)
    found = plan(Setting(config, place, devices, asked.tokens, asked.sampled), asked, make, say)
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        show.print_plan(Console(highlight=False), found)


def plan(
    setting: Setting,
    asked: argparse.Namespace,
    make: Callable[..., compiled.Compiled] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """What the JSON holds; `make` compiles, where something can, and `say` hears of progress."""
    scene = setting.scene({})
    everything = planned(scene)
    chosen = select(everything, asked.programs)
    outcomes: list[Outcome] = []
    for number, program in enumerate(chosen, start=1):
        result = make(program, f"{number}/{len(chosen)} ") if make else None
        outcomes.append(Outcome(program, result, setting.place.chip))
    advice: Advice | None = None
    if asked.advice == "on" and any(each.fits is False for each in outcomes):
        say("It does not fit. Trying what would:")
        advice = advise(setting.config, outcomes, setting.scene, make, say, asked.most)
    seconds = step_seconds(scene, everything, setting.place.chip)
    return show.as_json(scene, setting.place, outcomes, phases(scene, outcomes), seconds, advice)


def select(programs: Sequence[Planned], prefixes: str) -> list[Planned]:
    """Those whose names begin with one of the prefixes; ValueError when there is none."""
    wanted = tuple(prefixes.split(","))
    chosen = [program for program in programs if program.name.startswith(wanted)]
    if not chosen:
        names = ", ".join(program.name for program in programs)
        raise ValueError(f"--programs={prefixes}: no program begins so. There are {names}.")
    return chosen


def noting(say: Callable[[str], None]) -> Callable[..., compiled.Compiled]:
    """The compiler, with a line before and after each program."""

    def compile_noted(program: Planned, number: str = "") -> compiled.Compiled:
        say(f"{number}{program.name}: compiling ...")
        result = compiled.compile_program(program)
        size = f"{result.total / GIB:.2f} GiB"
        words = f"takes {size}" if not result.refusal else f"does not compile, needs {size}"
        say(f"{number}{program.name}: {words}, {result.compile_s:.0f} s")
        return result

    return compile_noted


if __name__ == "__main__":
    command.end(main)
