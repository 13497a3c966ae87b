"""What the benchmarks share: their command line, timing, and the line they print."""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from demyrl import command, recipe

Result = TypeVar("Result")

SIDE = 2048  # of the square matrices whose products are a device's pace
CHAIN = 4  # products in a row, so that a call takes a while
MATMUL_FLOPS = 2.0 * CHAIN * SIDE**3
TICK = 1e-6  # seconds; no call that is timed takes less


def options_of(about: str, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Any]:
    """The options and the config; settings are given as to a stage, --config.KEY=VALUE."""
    parser = parser_of(about)
    options, rest = parser.parse_known_args(argv)
    return options, config_of(parser, options, rest)


def parser_of(about: str) -> argparse.ArgumentParser:
    """The command line that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=about,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--config.KEY=VALUE changes the config, as in every stage.",
    )
    parser.add_argument("--config", default="configs/grpo_tcr.py:tiny")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each measurement")
    return parser


def config_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, settings: Sequence[str]
) -> Any:
    """The config with these --config.KEY=VALUE, of which the last one counts; misuse ends here."""
    words = ["bench", f"--config={options.config}", "--workdir=unused", *settings]
    try:
        config, _ = command.parse(words)
        recipe.read(config)
    except ValueError as error:
        parser.error(str(error))
    return config


def repeat(work: Callable[[], Result], seconds: float) -> tuple[list[Result], float]:
    """What `work` returned in each of as many calls as end after `seconds`, and what they took.

    One call goes before and is not counted. `work` must wait for the device.
    """
    work()
    results, start = [], time.perf_counter()
    while True:
        results.append(work())
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return results, elapsed


class Taken(NamedTuple):
    """Seconds of a work's calls: on the clock, and of all cores of this process."""

    seconds: Float[np.ndarray, " rounds"]
    cpu_seconds: Float[np.ndarray, " rounds"]


def in_turns(works: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Taken]:
    """What the calls of each work took, made in turn, so that all see the same machine.

    One call of each goes before and is not counted; the last round is the one in which `seconds`
    for each work are over. A work must wait for the device.
    """
    for work in works.values():
        work()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    start = now = clocks()
    while True:
        for name, work in works.items():
            before = now
            work()
            now = clocks()
            times[name].append((now[0] - before[0], now[1] - before[1]))
        if now[0] - start[0] >= seconds * len(works):
            return {name: Taken(*np.array(taken).T) for name, taken in times.items()}


def clocks() -> tuple[float, float]:
    """The time, and the CPU time of the process."""
    return time.perf_counter(), time.process_time()


def times_faster(one: Taken, other: Taken) -> dict[str, float | None]:
    """How many times the other's time is that of one, in the median round, by either clock.

    CPU time says little where the cores only wait for an accelerator: None there.
    """
    on_cpu = jax.default_backend() == "cpu"
    wall = np.median(other.seconds / one.seconds)
    cpu = np.median(other.cpu_seconds / np.maximum(one.cpu_seconds, TICK))
    return {"wall": float(wall), "cpu": float(cpu) if on_cpu else None}


def matmul(dtype: str) -> Callable[[], None]:
    """Work of MATMUL_FLOPS that is nothing but products of large matrices."""
    one = jax.random.normal(jax.random.key(0), (SIDE, SIDE)).astype(dtype)
    other = one * SIDE**-0.5  # keeps the numbers of one size

    @jax.jit
    def multiply(one: jax.Array, other: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            one = one @ other
        return one

    return lambda: jax.block_until_ready(multiply(one, other))


def compile_program(program: Any, *args: Any, **static: Any) -> tuple[Any, float]:
    """A jitted function compiled for these arguments, and the seconds of tracing and compiling."""
    start = time.perf_counter()
    compiled = program.lower(*args, **static).compile()
    return compiled, time.perf_counter() - start


def first_call_seconds(work: Callable[[], Any]) -> float:
    """What the first call of `work` took more than the second: tracing and compiling.

    The program is then compiled, unlike after `compile_program`. `work` must wait for the device.
    """
    times = [time.perf_counter()]
    for _ in range(2):
        work()
        times.append(time.perf_counter())
    return max(0.0, (times[1] - times[0]) - (times[2] - times[1]))


def temporary_bytes(compiled: Any) -> int | None:
    """What a compiled program needs besides its arguments and results; None where unknown."""
    analysis = compiled.memory_analysis()
    return analysis and int(analysis.temp_size_in_bytes)


def peak_rss_bytes() -> int:
    """Most memory the process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def peak_device_bytes() -> int | None:
    """Most memory of the first device; None where it keeps no count, as a CPU."""
    statistics = jax.devices()[0].memory_stats()
    return statistics and statistics.get("peak_bytes_in_use")


def machine() -> dict[str, Any]:
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
    }


def print_line(bench: str, options: argparse.Namespace, **numbers: Any) -> None:
    """One JSON object on one line: the measurement, and what it was made with."""
    line = {"bench": bench, "config": options.config, **machine(), **numbers}
    print(json.dumps(rounded(line), sort_keys=True))


def rounded(value: Any) -> Any:
    """Floats to four digits, at any depth: the rest is noise."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
