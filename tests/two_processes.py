"""What test_processes runs in several processes at once: meets the others, and does a part.

    python tests/two_processes.py PART PROCESS

PROCESS is the one that comes to grief in its third step, if PART says so.
"""

import json
import os
import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from demyrl import command, processes
from demyrl.model.mesh import MeshConfig, make_mesh


def values() -> None:
    """Prints what this process gets from the others, as JSON."""
    own = processes.index()
    mesh = make_mesh(MeshConfig(data=4, tensor=1, sequence=2))
    processes.check(mesh)
    rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)[2 * own :][:2]
    by_rows = processes.spread_rows({"a": rows}, NamedSharding(mesh, PartitionSpec("data")))
    wide = np.arange(16).reshape(4, 4)[2 * own :][:2]
    tiles = processes.spread_rows(wide, NamedSharding(mesh, PartitionSpec("data", "sequence")))
    whole = NamedSharding(mesh, PartitionSpec())
    found = {
        "processes": [processes.count(), own, processes.is_first(), jax.device_count()],
        "exchanged": processes.exchange(np.array([2**40 + own, -own])).tolist(),
        "exact": processes.exchange(np.array([0.1 + own])).tolist(),
        "gathered": [len(each["x"]) for each in processes.gather({"x": "x" * (1 + 3000 * own)})],
        "shape": by_rows["a"].shape,
        "spread": np.asarray(jax.jit(lambda x: x, out_shardings=whole)(by_rows["a"])).tolist(),
        "own": processes.own_rows(by_rows)["a"].tolist(),
        "tiles": processes.own_rows(tiles).tolist(),
        "refused": refusal(MeshConfig(data=1, tensor=4, sequence=2)),
    }
    print("FOUND", json.dumps(found), flush=True)
    time.sleep(1.5 * own)  # the first to finish waits for the other


def refusal(config: MeshConfig) -> str:
    try:
        processes.check(make_mesh(config))
    except ValueError as error:
        return str(error)
    return ""


def steps(part: str, who: int) -> None:
    """Exchanges numbers for ever, until something happens to process `who` or to this one."""
    for step in range(10**6):
        processes.exchange(np.array([step]))
        if processes.index() == who and step == 2:
            grief(part)


def grief(part: str) -> None:
    print("GRIEF", flush=True)
    if part == "raises":
        raise ValueError("slots is 3: use an even number.")
    signals = {"is killed": signal.SIGKILL, "freezes": signal.SIGSTOP, "is told": signal.SIGTERM}
    os.kill(os.getpid(), signals[part])


def main() -> None:
    processes.join()
    part, who = sys.argv[1:]
    values() if part == "values" else steps(part, int(who))


if __name__ == "__main__":
    command.end(main)
