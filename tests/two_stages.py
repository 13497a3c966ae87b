"""What test_two_processes runs in two processes at once: the stages of a run in miniature.

    python tests/two_stages.py PART FOLDER

PART is "begin", which prints what is found on the way as JSON, trains with SFT, and then with RL
until one process is killed; or "go on", which is the same RL again and an evaluation.
"""

import contextlib
import errno
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from demyrl import checkpoint, command, processes
from demyrl.export import require_one_process
from demyrl.model.hf_load import load_params
from demyrl.model.hf_save import write_checkpoint
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.train_sft import train_sft
from tests import tiny_run

MESH = (2, 2, 2)
DIES = (1, 2)  # the process that is killed, and the step in whose middle it is


class Mortal(tiny_run.Rl):
    """A run in which a process is killed between the rollout and the updates of a step."""

    def score(self, trajectories):
        step = int(self.state.step) // self.settings.train.updates
        if (processes.index(), step) == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score(trajectories)


def refusals(folder: Path) -> dict[str, str]:
    """What each thing that must not be done says in this process."""
    own = processes.index()
    here, there = folder / f"here_{own}", folder / "there"
    here.mkdir()
    (here / "rows.jsonl").write_text((folder / "demonstrations.jsonl").read_text() * (1 + own))
    with contextlib.chdir(here):
        files = refusal(train_sft, of(folder, sft__demonstrations="rows.jsonl"), there)
    return {
        "files": files,
        "config": refusal(train_sft, of(folder, seed=own), there),
        "mesh": refusal(train_sft, of(folder, mesh__data=1, mesh__tensor=4), folder / "mesh"),
        "workdir": refusal(train_sft, of(folder), here),
        "export": refusal(require_one_process),
        "weights": refusal(write_checkpoint, folder, {}, tiny_run.SHAPE),
    }


def of(folder: Path, **changes):
    return tiny_run.config(folder, MESH, **changes)


def refusal(act, *arguments) -> str:
    try:
        act(*arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "was done"


def loads_its_shards(folder: Path) -> bool:
    """Whether this process's parts of a checkpoint's weights are those of the whole."""
    spread, alone = (
        jax.tree.leaves(load_params(folder / "source", tiny_run.SHAPE, params_sharding(*where)))
        for where in (
            (tiny_run.SHAPE, make_mesh(MeshConfig(*MESH))),
            (tiny_run.SHAPE, make_mesh(MeshConfig(1, 1, 1), jax.local_devices()[:1])),
        )
    )
    return all(
        np.array_equal(shard.data, np.asarray(whole)[shard.index])
        for leaf, whole in zip(spread, alone, strict=True)
        for shard in leaf.addressable_shards
    )


def checkpoints(workdir: Path) -> dict:
    """Two saves, one that fails in one process alone, and a restore of what is intact."""
    place = NamedSharding(make_mesh(MeshConfig(*MESH)), PartitionSpec("data", "tensor"))

    def save(step: int) -> None:
        rows = np.full((2, 4), 10 * step + processes.index(), np.float32)
        state = {"x": processes.spread_rows(rows, place)}
        checkpoint.save(workdir, step, state, {"position": step}, keep=3)

    save(1)
    save(2)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with only_in(1, mock.patch.object(ocp.PyTreeCheckpointHandler, "save", side_effect=full)):
        failed = refusal(save, 3)
    left = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    processes.first((workdir / "checkpoints" / left[-1] / "checkpoint.json").unlink)
    wanted = {"x": jax.ShapeDtypeStruct((4, 4), np.float32, sharding=place)}
    with only_in(1, mock.patch.object(checkpoint, "_newest_intact", side_effect=AssertionError)):
        restored = checkpoint.restore(workdir, wanted)
    rows = processes.own_rows(restored.state["x"]).tolist()
    return {"failed": failed, "left": left, "restored": [restored.step, restored.extra, rows]}


def only_in(process: int, patch):
    return patch if processes.index() == process else contextlib.nullcontext()


def begin(folder: Path) -> None:
    found = refusals(folder) | checkpoints(folder / "saved") | {"loads": loads_its_shards(folder)}
    print("FOUND", json.dumps(found), flush=True)
    tiny_run.sft(folder, folder / "pair" / "sft", MESH)
    rl(folder, Mortal)


def rl(folder: Path, kind: type = tiny_run.Rl) -> None:
    source = str(folder / "pair" / "sft")
    tiny_run.rl(folder, folder / "pair" / "rl", MESH, kind, model__source=source)


def go_on(folder: Path) -> None:
    rl(folder)
    tiny_run.evaluation(folder, folder / "pair" / "eval", MESH, folder / "pair" / "rl")


def main() -> None:
    processes.join()
    part, folder = sys.argv[1], Path(sys.argv[2])
    begin(folder) if part == "begin" else go_on(folder)


if __name__ == "__main__":
    command.end(main)
