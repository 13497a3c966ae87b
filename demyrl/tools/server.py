"""The program inside a sandbox: runs one piece of Python after another, each in a fresh child.

It stands alone (standard library only, nothing of demyrl), because a sandbox sees nothing else.
It reads one frame with its settings, then a frame for each piece of code, and answers each with a
frame. The next child is forked and confined while nothing is asked, so a call only has to hand it
the code. When a call is over, whatever it left behind is killed and its folder emptied.
"""

import builtins
import codecs
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import select
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import child as program

del sys.path[0], sys.modules["child"]  # not in the way of a program's own `child`

REQUESTS, ANSWERS = 0, 1  # file descriptors
PRELOADED = (
    "array bisect cmath collections copy datetime decimal enum fractions functools heapq "
    "itertools json operator random re statistics string struct textwrap typing"
)
FILES_IN_FOLDER = 4096
LAST_WORDS_S = 0.05
TICK_S = 0.05  # how often a call that writes nothing is looked at

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
CAPABILITY_VERSION_3 = 0x20080522


@dataclasses.dataclass(frozen=True)
class Child:
    """A forked, confined process that waits for its code."""

    pid: int
    code_fd: int
    output_fd: int


class Kept:
    """The first and the last bytes of an output of any length."""

    def __init__(self, limit: int):
        self.half = limit // 2
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def add(self, part: bytes) -> None:
        self.total += len(part)
        room = self.half - len(self.head)
        self.head += part[:room]
        self.tail += part[room:] if room < len(part) else b""
        if len(self.tail) > 4 * self.half:
            del self.tail[: -self.half]

    @property
    def cut(self) -> bool:
        return self.total > 2 * self.half

    def text(self) -> str:
        """The output, with a note in the middle where bytes were left out."""
        if not self.cut:
            return (self.head + self.tail).decode("utf-8", "replace")
        # Neither half may begin or end inside a character.
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self.head))
        tail = bytes(self.tail[-self.half :]).lstrip(bytes(range(0x80, 0xC0)))
        note = f"\n[... {self.total - 2 * self.half} bytes left out ...]\n"
        return head + note + tail.decode("utf-8", "replace")


def read_frame(fd: int):
    """The next JSON value of a pipe, or None at its end."""
    header = read_exactly(fd, 4)
    body = header and read_exactly(fd, int.from_bytes(header, "big"))
    return json.loads(body) if body else None


def read_exactly(fd: int, count: int) -> bytes:
    """`count` bytes, or none when the pipe ends before."""
    parts = []
    while count:
        part = os.read(fd, count)
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_frame(fd: int, value) -> None:
    body = json.dumps(value).encode()
    program.write_all(fd, len(body).to_bytes(4, "big") + body)


def enclose(settings: program.Settings, libc) -> None:
    """Makes the writable folder, then gives up every privilege."""
    if os.getpid() != 1:
        raise RuntimeError("the isolated server must be process 1 of its own namespace")
    user = settings.user
    options = f"size={settings.disk_bytes},nr_inodes={FILES_IN_FOLDER}"
    options += f",mode=0700,uid={user},gid={user}"
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    folder = settings.folder.encode()
    program.system_call(libc.mount, b"tmpfs", folder, b"tmpfs", flags, options.encode())
    program.prctl(libc, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    if os.getuid() != user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    program.system_call(libc.capset, header, (ctypes.c_uint32 * 6)())
    program.prctl(libc, PR_SET_DUMPABLE, 0)
    program.prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    # With its default action a signal from inside the namespace cannot reach process 1.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def fork_child(settings: program.Settings, libc, stdout: program.Output) -> Child:
    """The next child, ready for its code. Raises RuntimeError when it cannot be confined."""
    code_read, code_write = os.pipe()
    output_read, output_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(code_read, 0)
            os.dup2(output_write, 1)
            os.dup2(output_write, 2)
            program.run_child(settings, libc, stdout)
        except BaseException as error:
            os.write(1, repr(error).encode())
        finally:
            os._exit(1)
    os.close(code_read)
    os.close(output_write)
    first = os.read(output_read, 1)
    if first != program.CONFINED:
        rest = os.read(output_read, 4096)
        raise RuntimeError(f"a program could not be confined: {(first + rest).decode()}")
    return Child(pid, code_write, output_read)


def answer(child: Child, code: str, settings: program.Settings) -> dict:
    """Runs the code in the child; the fields of a ToolResult."""
    started = time.monotonic()
    kept = Kept(settings.output_bytes)
    with contextlib.suppress(BrokenPipeError):
        program.write_all(child.code_fd, code.encode("utf-8", "surrogatepass"))
    os.close(child.code_fd)
    status = watch(child, kept, started + settings.timeout_s)
    if status is None:
        stop(child, kept)
    drain(child.output_fd, kept)
    os.close(child.output_fd)
    kind, note = verdict(status, kept, settings)
    text = kept.text()
    if note:
        text = f"{text}\n{note}" if text and not text.endswith("\n") else text + note
    return {"status": kind, "output": text, "seconds": time.monotonic() - started}


def watch(child: Child, kept: Kept, deadline: float) -> int | None:
    """Collects output until the child exits; its wait status, or None when its time is up."""
    poller = select.poll()
    poller.register(child.output_fd, select.POLLIN)
    poller.register(REQUESTS, 0)  # reports only that the host has gone
    reading, pause = True, 0.0001
    while (left := deadline - time.monotonic()) > 0:
        if reading:
            events = dict(poller.poll(1000 * min(left, TICK_S)))
            if REQUESTS in events:
                sys.exit()
            part = os.read(child.output_fd, 1 << 16) if child.output_fd in events else None
            if part:
                kept.add(part)
                continue
            reading = part is None
        else:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.01)
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            return status
    return None


def stop(child: Child, kept: Kept) -> None:
    """Ends a child whose time is up; it may still hand over what it printed half a line of."""
    os.kill(child.pid, program.LAST_WORDS)
    if watch(child, kept, time.monotonic() + LAST_WORDS_S) is None:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


def drain(fd: int, kept: Kept) -> None:
    """Takes what is still in the pipe, without waiting for more."""
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):  # a pipe holds less; a survivor might write for ever
            if not (part := os.read(fd, 1 << 16)):
                return
            kept.add(part)


def verdict(status: int | None, kept: Kept, settings: program.Settings) -> tuple[str, str]:
    """The status of a finished call and what to add to its output."""
    if status is None:
        return "timeout", f"timed out after {settings.timeout_s:g} s"
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return "timeout", "timed out: used too much processor time"
    if code < 0:
        known = -code in list(signal.Signals)
        return "error", f"killed by signal {signal.Signals(-code).name if known else -code}"
    if code > 1:
        return "error", f"exit code {code}"
    if code == 1:
        return "error", ""
    return ("output_limit" if kept.cut else "ok"), ""


def end_tree(child: Child, isolated: bool) -> None:
    """Kills and reaps whatever a call left running."""
    if isolated and os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything in this namespace but this process
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child.pid, 0)


def empty(folder: bytes) -> None:
    """Deletes everything in a folder, whatever its names, modes and depth.

    A directory's directories are moved to the top before it goes, so no path grows long.
    """
    os.chmod(folder, 0o700)
    fresh = os.urandom(8).hex().encode()
    serial = 0
    while names := os.listdir(folder):
        for path in (os.path.join(folder, name) for name in names):
            if not is_directory(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in (os.path.join(path, name) for name in os.listdir(path)):
                if not is_directory(inner):
                    os.unlink(inner)
                    continue
                serial += 1
                os.chmod(inner, 0o700)  # moving a directory writes to it
                os.rename(inner, os.path.join(folder, b"%s.%d" % (fresh, serial)))
            os.rmdir(path)


def is_directory(path: bytes) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def serve(settings: program.Settings, libc) -> None:
    """Answers requests until there are no more."""
    stdout = program.open_streams()
    child = fork_child(settings, libc, stdout)
    try:
        write_frame(ANSWERS, "ready")
        while (code := read_frame(REQUESTS)) is not None:
            result = answer(child, code, settings)
            end_tree(child, settings.isolated)
            write_frame(ANSWERS, result)
            empty(os.fsencode(settings.folder))
            child = fork_child(settings, libc, stdout)
    finally:
        end_tree(child, settings.isolated)
        if not settings.isolated:  # the folder is on a disk, and the host may be gone
            with contextlib.suppress(OSError):
                empty(os.fsencode(settings.folder))
                os.rmdir(settings.folder)


def main() -> None:
    settings = program.Settings(**read_frame(REQUESTS))
    libc = None
    if settings.isolated:
        libc = ctypes.CDLL(None, use_errno=True)
        enclose(settings, libc)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.chdir(settings.folder)
    for name in PRELOADED.split():
        importlib.import_module(name)
    builtins.exit = builtins.quit = sys.exit  # what `site` would have set
    program.warm_up()
    gc.disable()
    gc.collect()
    gc.freeze()  # a child that collects garbage must not copy the pages of this process
    serve(settings, libc)


if __name__ == "__main__":
    main()
