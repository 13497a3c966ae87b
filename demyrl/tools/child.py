"""What happens in one child of the sandbox's server: confinement, then one program.

Stands alone, like `server.py`: standard library only, nothing of demyrl. A child never returns to
the server; its exit code and the bytes it wrote are all that comes back.
"""

import ast
import atexit
import base64
import ctypes
import dataclasses
import gc
import io
import linecache
import math
import os
import resource
import signal
import sys
import threading
import traceback
import types
import warnings

CODE_NAME = "<code>"  # what tracebacks call the program
CONFINED = b"+"  # the child's first byte: its limits and filter are in force
OPEN_FILES = 64
THREADS = 128
STACK_BYTES = 8 << 20
LAST_BYTES = 32 << 20  # what a program that ran out of memory may still use to say so

LAST_WORDS = signal.SIGUSR1  # tells a program whose time is up to flush and leave

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the host says once, at the start."""

    isolated: bool  # True: the first process of its own namespaces; False: an ordinary process
    folder: str  # the only place a program may write
    user: int  # the user id to take, when isolated
    timeout_s: float
    memory_bytes: int
    disk_bytes: int
    output_bytes: int
    filter: str  # the system call filter, base64; empty when not isolated


def write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


class Filter(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def system_call(function, *arguments) -> None:
    """Calls the C library and raises OSError when it answers anything but 0."""
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function.__name__}: {os.strerror(code)}")


def prctl(libc, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:5]
    system_call(libc.prctl, *[ctypes.c_ulong(value) for value in padded])


def limit(settings: Settings) -> None:
    """Sets the limits of this process, which it cannot raise again."""
    seconds = math.ceil(settings.timeout_s) + 1
    limits = {
        "RLIMIT_AS": (settings.memory_bytes, settings.memory_bytes + LAST_BYTES),
        "RLIMIT_CPU": (seconds, seconds + 1),
        "RLIMIT_FSIZE": (settings.disk_bytes, settings.disk_bytes),
        "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES),
        "RLIMIT_STACK": (STACK_BYTES, STACK_BYTES),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_MEMLOCK": (0, 0),
    }
    if settings.isolated and processes_are_counted_per_namespace():
        limits["RLIMIT_NPROC"] = (THREADS, THREADS)
    for name, (soft, hard) in limits.items():
        try:
            which = getattr(resource, name)
            highest = resource.getrlimit(which)[1]
            if highest != resource.RLIM_INFINITY:
                soft, hard = min(soft, highest), min(hard, highest)
            resource.setrlimit(which, (soft, hard))
        except (AttributeError, ValueError, OSError):
            if settings.isolated:
                raise


def processes_are_counted_per_namespace() -> bool:
    """Whether the kernel counts a user's processes in each user namespace apart (Linux 5.14)."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor.split("-")[0])) >= (5, 14)


def install_filter(settings: Settings, libc) -> None:
    """From here on the calling process can neither fork, open a socket nor gain privileges."""
    instructions = base64.b64decode(settings.filter)
    program = Filter(len(instructions) // 8, instructions)
    prctl(libc, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


class Output(io.FileIO):
    """Standard output, that knows whether anything was written to it."""

    written = False

    def write(self, content) -> int | None:
        self.written = True
        return super().write(content)


def open_streams() -> Output:
    """Makes Python's standard streams as a program expects them; returns the base of stdout.

    They name descriptors 0 to 2, so made once, before the fork, they lead to each child's pipes.
    """
    raw = Output(1, "wb", closefd=False)
    buffered = io.BufferedWriter(raw)
    how = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": True}
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(buffered, **how)
    error = io.BufferedWriter(io.FileIO(2, "wb", closefd=False))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(error, **how, write_through=True)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, "rb", closefd=False))
    return raw


def run_child(settings: Settings, libc, stdout: Output) -> None:
    """The whole life of a child, from the fork to its exit; never returns."""
    os.setsid()
    os.closerange(3, 1024)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(LAST_WORDS, lambda *_: os._exit(flush()))
    limit(settings)
    gc.enable()
    if settings.isolated:
        install_filter(settings, libc)
    os.write(1, CONFINED)
    source = b"".join(iter(lambda: os.read(0, 1 << 16), b""))
    os._exit(finish(run_code(source.decode("utf-8", "surrogatepass"), stdout)))


def run_code(source: str, stdout: Output) -> int:
    """Runs a program as `__main__`; returns its exit code, 1 after an uncaught exception."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [CODE_NAME]
    sys.path.insert(0, os.getcwd())
    linecache.cache[CODE_NAME] = (len(source), None, source.splitlines(True), CODE_NAME)
    try:
        execute(source, main.__dict__, stdout)
        return 0
    except BaseException as error:
        return exit_code(error)


def execute(source: str, names: dict, stdout: Output) -> None:
    """Runs the statements; a last expression is shown when nothing else was printed."""
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    tree = ast.parse(source, CODE_NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, CODE_NAME, "exec"), names)
    if last is None:
        return
    value = eval(compile(ast.Expression(last.value), CODE_NAME, "eval"), names)
    if value is not None:
        flush()
        if not stdout.written:
            print(repr(value))


def warm_up() -> None:
    """Does once, before any fork, what the first compilation and traceback of a process cost."""
    names = {}
    tree = ast.parse("class A:\n    def f(self, *a, **k): return [x for x in a]\n1 / 0", CODE_NAME)
    try:
        exec(compile(tree, CODE_NAME, "exec"), names)
    except ZeroDivisionError as error:
        "".join(traceback.format_exception(error))
    eval(compile(ast.parse("1 + 1", CODE_NAME, "eval"), CODE_NAME, "eval"), names)


def exit_code(error: BaseException) -> int:
    """What an uncaught exception means for the exit code; its traceback is written to stderr."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    flush()
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != CODE_NAME:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    write_all(2, text.encode("utf-8", "backslashreplace"))
    return 1


def finish(code: int) -> int:
    """Waits for the program's threads and runs what it registered, as a normal exit does."""
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
    except BaseException as error:
        code = code or exit_code(error)
    flush()
    return code


def flush() -> int:
    """Writes out what Python's streams still hold; 0, fit for an exit code."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass  # the program closed or replaced it: there is nobody left to tell
    return 0
