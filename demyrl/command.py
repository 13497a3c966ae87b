"""The command line that all stages share: from `sys.argv` to a checked, locked config.

    python -m demyrl.train --config=configs/grpo_tcr.py:tiny --config.rollout.slots=64 \\
        --workdir=runs/x

What a user can get wrong ends in a message and exit code 2, Ctrl-C in 130, a bug in a traceback.
JAX is not loaded here.
"""

import dataclasses
import difflib
import dis
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import site
import sys
import sysconfig
import tempfile
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from absl import flags
from ml_collections import ConfigDict, config_flags

from demyrl import storage
from demyrl.storage import Place

Section = TypeVar("Section")

MISUSE = 2
INTERRUPTED = 130


def run(stage: Callable[[ConfigDict, Place], None], default_config: str | None = None) -> NoReturn:
    """Runs a stage with the config and workdir of the command line, and ends the process.

    `default_config` is what `--config` is without being given, such as "configs/sft.py:tiny".
    """
    place: list[Place] = []

    def main() -> None:
        if {"--help", "-h", "-help"} & set(sys.argv[1:]):
            print(_help(stage, sys.argv, default_config))
            return
        config, workdir = parse(sys.argv, default_config)
        place.append(workdir)
        stage(config, workdir)

    end(main, lambda: _how_to_go_on(place[0] if place else None))


def end(main: Callable[[], None], stopped: Callable[[], str] = lambda: "Stopped.") -> NoReturn:
    """Calls `main` and ends the process: 0, or a message and 2 for misuse, 130 for Ctrl-C.

    `stopped` says what is left to do after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        main()
        if _processes():
            _processes().finish()
    except SystemExit:
        raise
    except BaseException as error:
        text, code = _message(error, stopped)
        if _processes():
            _processes().fail(error, text or traceback.format_exc(), code)
        if not text:
            raise
        print(text, file=sys.stderr)
        sys.exit(code)
    sys.exit(0)


def parse(argv: list[str], default_config: str | None = None) -> tuple[ConfigDict, Place]:
    """The locked config and the workdir that a command line asks for; `argv[0]` is the program.

    Raises ValueError for an unknown flag or key, a value of the wrong type, or a missing workdir.
    """
    spec, argv = _config_spec(argv, default_config)
    config = load_config(spec)
    _check_keys(argv, config, spec)
    before = dict(_flat(plain(config)))
    values = flags.FlagValues()
    flags.DEFINE_string(
        "workdir", None, "the folder of this run, or gs://BUCKET/FOLDER", flag_values=values
    )
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        rest = values(argv)[1:]
    except flags.Error as error:
        raise ValueError(_flag_message(str(error), before)) from error
    _check_tuples(before, config)
    if rest:
        raise ValueError(f"{rest[0]!r} is not a flag: write --config.NAME=VALUE or --workdir=DIR.")
    if not values["workdir"].value:
        raise ValueError(
            "no --workdir: say where this run keeps its files, such as --workdir=runs/first."
        )
    return config, storage.path(values["workdir"].value)


def load_config(spec: str) -> ConfigDict:
    """The locked config of "FILE" or "FILE:SIZE", from the file's `get_config`.

    Raises ValueError when there is no such file, or it has no `get_config`.
    """
    path, _, size = spec.partition(":")
    if not Path(path).is_file():
        there = ", ".join(sorted(map(str, Path("configs").glob("[a-z]*.py"))))
        raise ValueError(
            f"no config file {path!r} in {Path.cwd()}: "
            + (f"there are {there}." if there else "run from the root of the repository.")
        )
    module_spec = importlib.util.spec_from_file_location(f"config_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} has no get_config(size): it is not a config file.")
    return module.get_config(*([size] if size else [])).lock()


def frozen(cls: type[Section], section: Mapping[str, Any] | ConfigDict, **more: Any) -> Section:
    """A frozen dataclass from a config section, lists as tuples, nested sections included.

    `more` are fields that are known only at run time. Raises ValueError for an unknown or a
    missing key.
    """
    values = {**plain(section), **more}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise ValueError(f"{cls.__name__} has no key {key!r}.{_did_you_mean(key, fields)}")
    missing = [name for name, f in fields.items() if name not in values and _required(f)]
    if missing:
        raise ValueError(f"{cls.__name__} needs {', '.join(missing)}: add to its config section.")
    types = typing.get_type_hints(cls)
    return cls(**{key: _as_field(types[key], value) for key, value in values.items()})


def config_json(config: ConfigDict) -> str:
    """The config as JSON, the same for equal configs."""
    return json.dumps(plain(config), sort_keys=True, indent=2) + "\n"


def enable_compilation_cache() -> None:
    """Lets JAX keep compiled programs between runs; to be called before the first compilation.

    They lie in $DEMYRL_CACHE, or ~/.cache/demyrl/xla, apart for each kind of processor. Without a
    folder to write to, a warning is printed and nothing is kept.
    """
    import jax

    home = os.environ.get("DEMYRL_CACHE") or "~/.cache/demyrl/xla"
    folder = Path(home).expanduser() / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        print(f"WARNING: compiled programs are not kept: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# The command line


def _config_spec(argv: list[str], default: str | None) -> tuple[str, list[str]]:
    """The value of --config, or the default, and the command line without it."""
    spec = default
    rest = argv[:1]
    words = iter(argv[1:])
    for word in words:
        given = re.fullmatch(r"--?config(?:=(.*))?", word)
        if given:
            spec = given[1] if given[1] is not None else next(words, None)
        else:
            rest.append(word)
    if not spec:
        raise ValueError("no --config: name a file, such as --config=configs/grpo_tcr.py:tiny.")
    return spec, rest


def _check_keys(argv: list[str], config: ConfigDict, spec: str) -> None:
    """Raises ValueError for the first --config.KEY that cannot be set."""
    known = dict(_flat(plain(config)))
    sections = {key.rsplit(".", 1)[0] for key in known if "." in key}
    for word in argv[1:]:
        named = re.match(r"--?(?:no)?config\.([^=]*)", word)
        if not named:
            continue
        key = named[1]
        if key in sections:
            inside = ", ".join(name for name in known if name.startswith(f"{key}."))
            raise ValueError(f"--config.{key} is a section: set one of {inside}.")
        if key not in known:
            raise ValueError(f"{spec} has no key {key!r}.{_did_you_mean(key, known)}")
        if known[key] is None:
            raise ValueError(
                f"--config.{key} is None in {spec} and has no type to read a value by: "
                "set it in the config file."
            )


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    same_name = [name for name in known if name.rsplit(".", 1)[-1] == last]
    found = list(dict.fromkeys(same_name[:3] or near))
    return f" Did you mean {' or '.join(found)}?" if found else f" It has {', '.join(known)}."


def _check_tuples(before: dict[str, Any], config: ConfigDict) -> None:
    """Raises ValueError for a tuple whose elements have another type than the config's."""
    for key, value in _flat(plain(config)):
        kinds = {type(element) for element in before[key]} if isinstance(value, tuple) else set()
        allowed = kinds | {int} if float in kinds else kinds
        if allowed and any(type(element) not in allowed for element in value):
            raise ValueError(_wrong_type(key, value, before[key]))


def _flag_message(text: str, before: dict[str, Any]) -> str:
    """A parse error of absl, with the type that the key takes."""
    wrong = re.match(r"flag --config\.([^=]*)=(.*?): ", text, re.DOTALL)
    return _wrong_type(wrong[1], wrong[2], before[wrong[1]]) if wrong else text


def _wrong_type(key: str, value: Any, before: Any) -> str:
    return (
        f"--config.{key}={value} is not what {key} takes, "
        f"{type(before).__name__}: write it like the config's {before!r}."
    )


def _help(stage: Callable, argv: list[str], default_config: str | None) -> str:
    """What the stage does, its flags, and every key of its config with the value it has."""
    about = sys.modules[stage.__module__].__doc__ or stage.__doc__ or ""
    lines = [about.strip(), "", "  --config=FILE:SIZE    " + f"default {default_config}"]
    lines += ["  --workdir=DIR         the folder of this run, required"]
    words = [word for word in argv if word.lstrip("-") not in ("help", "h")]
    try:
        spec, _ = _config_spec(words, default_config)
        config = load_config(spec)
    except ValueError as error:
        return "\n".join([*lines, "", str(error)])
    keys = [f"  --config.{key}={value!r}" for key, value in _flat(plain(config))]
    return "\n".join([*lines, "", f"Keys of {spec}:", *keys])


# How a run ends


def _processes() -> ModuleType | None:
    """`demyrl.processes`, which loads JAX, if the stage has loaded it."""
    return sys.modules.get("demyrl.processes")


def _message(error: BaseException, stopped: Callable[[], str]) -> tuple[str, int]:
    """What to tell the user, "" for a bug, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return f"\n{stopped()}", INTERRUPTED
    if os.environ.get("DEMYRL_TRACEBACK") or not _is_message(error):
        return "", 1
    return f"{error}\n(DEMYRL_TRACEBACK=1 shows where this comes from.)", MISUSE


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _how_to_go_on(workdir: Place | None) -> str:
    stopped = f"Stopped at {time.strftime('%H:%M:%S')}."
    saved = None
    if workdir and (workdir / "checkpoints").is_dir():
        from demyrl import checkpoint  # here, because it loads JAX

        saved = checkpoint.latest_step(workdir)
    where = "" if saved is None else f" {workdir} has a checkpoint of step {saved}."
    return f"{stopped}{where} Run the same command again to go on."


def _is_message(error: BaseException) -> bool:
    """Whether an error was written for the user: the system's, or a `raise` of our own code."""
    if not isinstance(error, ValueError | RuntimeError | OSError):
        return False
    if isinstance(error, OSError):
        return True
    origin = error.__traceback__
    while origin.tb_next:
        origin = origin.tb_next
    code = origin.tb_frame.f_code
    raised = dis.opname[code.co_code[origin.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
    return raised and _is_ours(code.co_filename)


def _is_ours(filename: str) -> bool:
    """Whether code is demyrl's, a config's or an experiment's, and not an installed library's."""
    library = (sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages())
    inside = str(Path(__file__).parent)
    return filename.startswith(inside) or not filename.startswith((*library, "<"))


# Configs as plain values


def plain(section: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """A config or a part of it as nested dicts."""
    return section.to_dict() if isinstance(section, ConfigDict) else dict(section)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Each value with its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _as_field(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return frozen(kind, value)
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _processor() -> str:
    """A name for what compiled programs depend on: a folder may be shared by unlike machines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        features = next((line for line in text.splitlines() if line.startswith("flags")), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
