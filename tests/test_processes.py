"""Several processes: what they tell each other, and how they end when one of them does.

The processes are real ones, each with four virtual devices. They are started once for the whole
file, two groups at a time, because starting is what takes long.
"""

import concurrent.futures
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from demyrl import liveness, processes

ROOT = Path(__file__).parents[1]
SILENCE_S = 5
PATIENCE_S = 90  # for a loaded machine to start a few interpreters
GROUPS = (  # how many processes, what they do, and to which one it happens
    (2, "values", 0),
    (2, "is killed", 0),
    (3, "is killed", 1),
    (2, "freezes", 0),
    (2, "freezes", 1),
    (3, "raises", 1),
    (2, "is told", 1),
)


@dataclasses.dataclass
class Ended:
    code: int
    printed: str  # the error output
    found: dict  # what it printed as FOUND


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def start(part, who, index, count, address, **more):
    environment = {name: text for name, text in os.environ.items() if "JAX" not in name}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(ROOT),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "DEMYRL_SILENCE_S": str(SILENCE_S),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "two_processes.py"), part, str(who)],
        env=environment | more,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end(process, timeout_s=PATIENCE_S):
    printed, errors = process.communicate(timeout=timeout_s)
    lines = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    return Ended(process.returncode, errors, json.loads(lines[0][6:]) if lines else {})


def run_group(count, part, who):
    """How each process of a group ended; the frozen one is killed after the others have."""
    address = free_address()
    group = [start(part, who, index, count, address) for index in range(count)]
    try:
        ended = {index: end(group[index]) for index in range(count) if index != who}
        if part == "freezes":
            group[who].kill()
        return ended | {who: end(group[who])}
    finally:
        for process in group:
            process.kill()


@pytest.fixture(scope="module")
def groups():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = {(part, who): pool.submit(run_group, n, part, who) for n, part, who in GROUPS}
        yield lambda part, who: running[part, who].result()


def test_each_process_has_its_place(groups):
    ended = groups("values", 0)
    assert ended[0].found["processes"] == [2, 0, True, 8]
    assert ended[1].found["processes"] == [2, 1, False, 8]


def test_numbers_are_exchanged_to_the_bit(groups):
    for ended in groups("values", 0).values():
        assert ended.found["exchanged"] == [[2**40, 0], [2**40 + 1, -1]]
        assert ended.found["exact"] == [[0.1], [1.1]]


def test_objects_of_different_sizes_are_gathered(groups):
    for ended in groups("values", 0).values():
        assert ended.found["gathered"] == [1, 3001]


def test_rows_of_all_processes_make_one_array(groups):
    for ended in groups("values", 0).values():
        assert ended.found["spread"] == np.arange(12.0).reshape(4, 3).tolist()


def test_a_process_gets_back_the_rows_it_gave(groups):
    for index, ended in groups("values", 0).items():
        rows = slice(2 * index, 2 * index + 2)
        assert ended.found["own"] == np.arange(12.0).reshape(4, 3)[rows].tolist()
        assert ended.found["tiles"] == np.arange(16).reshape(4, 4)[rows].tolist()


def test_a_mesh_that_mixes_the_rows_of_processes_is_refused(groups):
    refused = groups("values", 0)[1].found["refused"]
    assert "mesh.data is 1" in refused and "multiple of 2" in refused
    assert "mesh.data is 2, mesh.tensor is 4, mesh.sequence is 1." in refused


def test_processes_that_finish_at_different_times_end_well_and_silently(groups):
    for ended in groups("values", 0).values():
        assert (ended.code, ended.printed) == (0, "")


def test_a_killed_process_ends_all_others(groups):
    ended = groups("is killed", 1)
    for index in (0, 2):
        assert ended[index].code == liveness.ENDED
        assert "Process 1 of 3" in ended[index].printed
        assert f"has not been heard of for {SILENCE_S} s" in ended[index].printed
        assert ended[index].printed.endswith(f"{liveness.GO_ON}\n")
        assert "Traceback" not in ended[index].printed


def test_the_last_words_of_a_killed_process_say_what_to_do(groups):
    assert groups("is killed", 1)[1].printed == (
        f"Process 1 of 3 was killed, or JAX ended it because process 0 is gone. {liveness.GO_ON}\n"
    )


def test_the_death_of_the_coordinator_ends_with_a_clear_line(groups):
    ended = groups("is killed", 0)[1]
    assert ended.code != 0
    assert "process 0 is gone" in ended.printed.splitlines()[-1]


@pytest.mark.parametrize("who", [0, 1])
def test_a_frozen_process_ends_the_other(groups, who):
    ended = groups("freezes", who)[1 - who]
    assert ended.code == liveness.ENDED
    assert f"Process {who} of 2" in ended.printed and "it hangs" in ended.printed


def test_the_others_hear_the_message_of_a_process_that_fails(groups):
    ended = groups("raises", 1)
    assert ended[1].code == 2 and ended[1].printed.startswith("slots is 3")
    for index in (0, 2):
        assert ended[index].code == liveness.ENDED
        assert "stopped: ValueError: slots is 3: use an even number." in ended[index].printed


def test_a_process_that_is_told_to_stop_ends_the_other(groups):
    ended = groups("is told", 1)
    assert ended[1].code == 130
    assert ended[0].code == liveness.ENDED and "KeyboardInterrupt" in ended[0].printed


def test_the_default_silence_leaves_time_to_end_within_a_minute():
    assert processes.SILENCE_S + 3 * liveness.BEAT_S + liveness.TELL_S < 60


@pytest.mark.parametrize(
    "index, message", [(0, "not all others came"), (1, "nobody answers there")]
)
def test_others_that_cannot_be_reached_are_one_clear_error(index, message):
    address = free_address()
    started = time.monotonic()
    ended = end(start("values", 0, index, 2, address, DEMYRL_JOIN_TIMEOUT_S="2"))
    assert time.monotonic() - started < 30
    assert ended.code == 2
    assert message in ended.printed and f"JAX_COORDINATOR_ADDRESS={address}" in ended.printed
    assert len(ended.printed.splitlines()) == 1


def test_without_variables_there_is_one_process():
    assert processes.wanted({}) is None
    assert processes.count() == 1


def test_three_variables_name_the_place_to_meet():
    given = ("10.0.0.2:8476", "2", "1")
    meeting = processes.wanted(dict(zip(processes.VARIABLES, given, strict=True)))
    assert meeting["coordinator_address"] == "10.0.0.2:8476"
    assert (meeting["num_processes"], meeting["process_id"]) == (2, 1)


def test_auto_leaves_it_to_jax():
    assert processes.wanted({"DEMYRL_PROCESSES": "auto"}) == {}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID is not"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID is '2': use a whole number from 0 to 1"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'"),
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "JAX_COORDINATOR_ADDRESS is 'host': use HOST:PORT"),
        ({"DEMYRL_PROCESSES": "yes"}, "DEMYRL_PROCESSES is 'yes': use 'auto'"),
        ({"DEMYRL_PROCESSES": "auto"}, "but JAX_NUM_PROCESSES is '2': unset one"),
    ],
)
def test_variables_that_are_wrong_are_named(change, message):
    well = dict(zip(processes.VARIABLES, ("10.0.0.2:8476", "2", "1"), strict=True))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        processes.wanted(well | change)


def test_a_time_limit_that_is_no_number_is_named(monkeypatch):
    for name, text in zip(processes.VARIABLES, ("10.0.0.2:8476", "2", "1"), strict=True):
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("DEMYRL_JOIN_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="DEMYRL_JOIN_TIMEOUT_S is 'soon'"):
        processes.join()


def grid(owners, data, tensor, sequence):
    """What `check` reads of a mesh whose devices belong to these processes, in order."""
    devices = np.array([SimpleNamespace(process_index=owner) for owner in owners], object)
    shape = {"data": data, "tensor": tensor, "sequence": sequence}
    return SimpleNamespace(
        devices=devices.reshape(tuple(shape.values())), shape=shape, size=len(owners)
    )


def test_whole_shards_of_the_rows_are_accepted():
    processes.check(grid([0, 0, 1, 1], 2, 2, 1))
    processes.check(grid([0, 0, 0, 0], 1, 2, 2))


def test_a_shard_that_two_processes_share_is_refused():
    with pytest.raises(ValueError, match="mesh.data is 2, which does not give each of 2 processes"):
        processes.check(grid([0, 1, 0, 1], 2, 2, 1))
