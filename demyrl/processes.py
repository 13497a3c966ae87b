"""Several processes that run one program over one mesh: how they meet, tell each other, and part.

Every process runs the same compiled programs in the same order. Each drives the episodes and tools
of its own rows, so what the host alone knows must be exchanged before they go on together. With one
process, every function here returns at once.
"""

import hashlib
import math
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the client of the coordinator has no public name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped

from demyrl.liveness import GO_ON, LastWords, Watch

JOIN_S = 60.0  # for all processes to come
SILENCE_S = 40.0  # after which a process counts as gone; a pause of Python's may last 30
SHUTDOWN_S = 30
NOT_JOINED = 2
PIECE = 1 << 24  # bytes of each process's that are on the devices at a time, when gathered
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

Value = TypeVar("Value")

_watch: Watch | None = None


def join() -> None:
    """Meets the other processes that the environment names; to be called before JAX has devices.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name them, or
    DEMYRL_PROCESSES=auto finds them on a TPU pod or under Slurm; with neither there is one process.
    From here on, one that dies ends the others within a minute (DEMYRL_SILENCE_S).

    Raises ValueError for variables that are wrong. Ends the process with a message when not all
    have come within DEMYRL_JOIN_TIMEOUT_S.
    """
    global _watch
    meeting = wanted(os.environ)
    if meeting is None or jax.distributed.is_initialized():
        return
    wait_s = _seconds("DEMYRL_JOIN_TIMEOUT_S", JOIN_S)
    silence_s = _seconds("DEMYRL_SILENCE_S", SILENCE_S)
    words = LastWords(
        "JAX ended this process while it waited for the others: see the lines above. Has each "
        "process another JAX_PROCESS_ID?"
    )
    # JAX would catch SIGTERM, by which a process is told to stop.
    jax.config.update("jax_enable_preemption_service", False)
    too_late = threading.Timer(wait_s, _end_unmet, (wait_s, words))
    too_late.daemon = True
    too_late.start()
    try:
        jax.distributed.initialize(
            **meeting,
            initialization_timeout=round(wait_s) + SHUTDOWN_S,
            heartbeat_timeout_seconds=round(4 * silence_s) + SHUTDOWN_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        words.take_back()
        raise ValueError(_cannot_meet(meeting, error)) from error
    finally:
        too_late.cancel()
    state = distributed.global_state
    if state.num_processes == 1:
        words.take_back()
        return
    words.prepare(
        f"Process {state.process_id} of {state.num_processes} was killed, or JAX ended it because "
        f"process 0 is gone. {GO_ON}"
    )
    _watch = Watch(state.client, state.process_id, state.num_processes, silence_s, words)


def finish() -> None:
    """Waits for all processes to finish, so that none counts as gone."""
    if _watch:
        _watch.finish()


def fail(error: BaseException, text: str, code: int) -> None:
    """With several processes: writes the text, tells the others, ends this one with the code."""
    if _watch:
        _watch.fail(error, text, code)


def count() -> int:
    return jax.process_count()


def index() -> int:
    return jax.process_index()


def is_first() -> bool:
    """Whether this is the process that writes what all share."""
    return jax.process_index() == 0


def check(mesh: Mesh) -> None:
    """Raises ValueError unless each process has whole shards of the rows, and as many as another.

    Only then can it fill rows, and read their results, on its own.
    """
    processes = len({device.process_index for device in mesh.devices.flat})
    rows = mesh.devices.reshape(mesh.shape["data"], -1)
    owners = [{device.process_index for device in shard} for shard in rows]
    if mesh.shape["data"] % processes == 0 and all(len(owner) == 1 for owner in owners):
        return
    share = mesh.size // processes
    tensor = math.gcd(mesh.shape["tensor"], share)
    sequence = math.gcd(mesh.shape["sequence"], share // tensor)
    raise ValueError(
        f"mesh.data is {mesh.shape['data']}, which does not give each of {processes} processes "
        f"rows of its own: it must be a multiple of {processes}, and mesh.tensor x mesh.sequence "
        f"must divide the {share} devices of a process. A mesh that would work: mesh.data is "
        f"{mesh.size // (tensor * sequence)}, mesh.tensor is {tensor}, mesh.sequence is {sequence}."
    )


def exchange(numbers: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, "processes n"]:
    """The numbers of every process, in every process, to the bit; each gives as many."""
    numbers = np.ascontiguousarray(numbers)
    if count() == 1:
        return numbers[None]
    ordered = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(ordered, object).reshape(count(), -1), ("processes", "devices"))
    content = numbers.view(np.uint8)[None]  # as bytes: JAX would cut 64 bits to 32
    spread = spread_rows(content, NamedSharding(mesh, PartitionSpec("processes")))
    everyone = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(spread)
    return np.asarray(everyone.addressable_data(0)).view(numbers.dtype)


def gather(value: Any) -> list[Any]:
    """The values of all processes, in every process, in their order."""
    if count() == 1:
        return [value]
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = exchange(np.array([len(content)]))[:, 0]
    most = int(sizes.max())
    size = min(PIECE, 1 << (most - 1).bit_length())  # few sizes to compile for
    padded = np.zeros(-(-most // size) * size, np.uint8)
    padded[: len(content)] = content
    everyone = np.concatenate([exchange(part) for part in padded.reshape(-1, size)], axis=1)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(everyone, sizes, strict=True)]


def each(act: Callable[[], Value]) -> list[Value]:
    """What `act` returns in each process, in every one; all wait for all.

    An error in one of them is raised in all, so that they fail together and with its message.
    """
    if count() == 1:
        return [act()]
    value, error = None, None
    try:
        value = act()
    except Exception as raised:
        error = raised
    everyone = gather((value, portable(error)))
    if error is not None:
        raise error
    for _, others in everyone:
        if others is not None:
            raise others
    return [value for value, _ in everyone]


def portable(error: Exception | None) -> Exception | None:
    """The error, or its text where it would not survive the way to another process."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def first(act: Callable[[], Value]) -> Value:
    """What `act` returns in the first process, the only one to call it; as `each` otherwise."""
    return each(lambda: act() if is_first() else None)[0]


def agree(what: str, parts: Iterable[bytes]) -> None:
    """Raises ValueError in every process unless all have the same parts; `what` names them."""
    if count() == 1:
        return
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    digests = gather(digest.digest())
    for other, found in enumerate(digests):
        if found != digests[0]:
            raise ValueError(
                f"process {other} has other {what} than process 0: start every process with the "
                "same command, the same files and the same code."
            )


def require_shared(path: Path) -> None:
    """Raises ValueError in every process unless all see the path, which the first has made."""
    seen = each(path.exists)
    if not all(seen):
        raise ValueError(
            f"process {seen.index(False)} does not see {path}, which process 0 has made: several "
            "processes need a workdir on a disk that all of them share, or in a bucket (gs://...)."
        )


def spread_rows(rows: Any, place: NamedSharding) -> Any:
    """A tree of arrays on the devices, whose rows are those of all processes, one after another."""
    if count() == 1:
        return jax.device_put(rows, place)
    return jax.tree.map(lambda own: jax.make_array_from_process_local_data(place, own), rows)


def own_rows(arrays: Any) -> Any:
    """This process's rows of a tree of arrays that are spread by their rows."""
    if count() == 1:
        return jax.device_get(arrays)

    def own(array: jax.Array) -> np.ndarray:
        starts = sorted({shard.index[0].start or 0 for shard in array.addressable_shards})
        height = array.addressable_shards[0].data.shape[0]
        whole = np.empty((len(starts) * height, *array.shape[1:]), array.dtype)
        for shard in array.addressable_shards:
            place = starts.index(shard.index[0].start or 0) * height
            whole[place : place + height, *shard.index[1:]] = shard.data
        return whole

    return jax.tree.map(own, arrays)


# Where and how to meet


def wanted(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is to be called with; None for one process."""
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    how = environment.get("DEMYRL_PROCESSES", "")
    if how not in ("", "auto"):
        raise ValueError(f"DEMYRL_PROCESSES is {how!r}: use 'auto', or unset it for one process.")
    if how:
        clash = [name for name in VARIABLES[1:] if name in given]
        if clash:
            raise ValueError(
                f"DEMYRL_PROCESSES is 'auto', which finds the processes by itself, but {clash[0]} "
                f"is {given[clash[0]]!r}: unset one of them."
            )
        return {}
    if not given:
        return None
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise ValueError(
            f"{', '.join(given)} is set but {', '.join(missing)} is not: several processes need "
            "all three, one process none."
        )
    return _explicit(given)


def _explicit(given: dict[str, str]) -> dict[str, Any] | None:
    address = given["JAX_COORDINATOR_ADDRESS"]
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS is {address!r}: use HOST:PORT of the machine of process 0, "
            "such as 10.0.0.2:8476."
        )
    processes = _whole("JAX_NUM_PROCESSES", given, 1, None)
    process = _whole("JAX_PROCESS_ID", given, 0, processes - 1)
    if processes == 1:
        return None
    return {
        "coordinator_address": address,
        "num_processes": processes,
        "process_id": process,
        "cluster_detection_method": "deactivate",
    }


def _whole(name: str, given: dict[str, str], least: int, most: int | None) -> int:
    text = given[name]
    if text.isdecimal() and least <= int(text) <= (int(text) if most is None else most):
        return int(text)
    span = f"of {least} or more" if most is None else f"from {least} to {most}"
    of = "" if most is None else f", as JAX_NUM_PROCESSES is {given['JAX_NUM_PROCESSES']}"
    raise ValueError(f"{name} is {text!r}: use a whole number {span}{of}.")


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < math.inf:
        raise ValueError(f"{name} is {text!r}: use a number of seconds, at least 1.")
    return seconds


def _cannot_meet(meeting: dict[str, Any], error: Exception) -> str:
    if not meeting:
        return (
            f"DEMYRL_PROCESSES is 'auto', but JAX finds no cluster here ({error}): set "
            f"{', '.join(VARIABLES)} instead, or unset it for one process."
        )
    return (
        f"Process {meeting['process_id']} of {meeting['num_processes']} cannot meet the others at "
        f"JAX_COORDINATOR_ADDRESS={meeting['coordinator_address']}: {error}. Is the port taken? "
        "Choose another one, the same for every process."
    )


def _end_unmet(wait_s: float, words: LastWords) -> None:
    """Ends this process, which hangs in C++, with what keeps it from meeting the others."""
    state = distributed.global_state
    address = state.coordinator_address
    host, _, port = str(address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        found = "process 0 is there, but not all others came. Start every process"
    except (OSError, ValueError) as error:
        found = f"nobody answers there ({error}). Start process 0 on that machine, open the port"
    print(
        f"Process {state.process_id} of {state.num_processes} waited {wait_s:g} s at "
        f"JAX_COORDINATOR_ADDRESS={address} for the others: {found}, and check JAX_NUM_PROCESSES "
        "and JAX_PROCESS_ID of each (DEMYRL_JOIN_TIMEOUT_S waits longer).",
        file=sys.stderr,
        flush=True,
    )
    words.take_back()
    os._exit(NOT_JOINED)


def _same(x: jax.Array) -> jax.Array:
    return x
