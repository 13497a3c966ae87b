"""Programs compiled for a TPU by XLA's own compiler, on a machine that has none.

Needs the package libtpu, whose compiler runs on any CPU. What it writes to stderr is about the TPU
that is not there, and is kept from the user unless the compilation fails.
"""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from demyrl.planning.chips import GIB, Slice, unknown
from demyrl.planning.collectives import Sent, collectives
from demyrl.planning.programs import Planned

ENVIRONMENT = {  # of libtpu: several at a time, and no search for the machine that it runs on
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}
MISSING = (
    "libtpu is not installed, so nothing is compiled: only what can be worked out follows. For the "
    "rest, install XLA's TPU compiler, which needs no TPU: pip install 'demyrl[plan]'"
)
WHOLE_CHIP = {"v4": {"chip_config_name": "megacore"}}  # or each of its two cores is a device
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Compiled(NamedTuple):
    """What the compiler says of a program, in bytes of one chip."""

    arguments: int
    temporaries: int
    outputs: int  # that do not lie in an argument's place
    code: int
    collectives: dict[str, Sent]
    compile_s: float
    refusal: str  # why it did not compile, and its largest arrays; "" when it did

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.outputs + self.code


def available() -> bool:
    """Whether there is a compiler for TPUs."""
    return importlib.util.find_spec("libtpu") is not None


def devices_of(place: Slice) -> list[Any]:
    """The devices of a slice, to be compiled for; ValueError for a shape that there is not."""
    os.environ.update(ENVIRONMENT)
    more = WHOLE_CHIP.get(place.name.split(":")[0], {})
    found, problem = [], None
    with quiet():
        try:
            found = topologies.get_topology_desc(place.name, "tpu", **more).devices
        except jax.errors.JaxRuntimeError as error:
            problem = error
    if problem:
        raise ValueError(f"{unknown(place.name)} libtpu says: {problem}")
    assert len(found) == place.devices, f"{place.name} has {len(found)} devices"
    return list(found)


def compile_program(program: Planned) -> Compiled:
    """The program compiled; one that needs more memory than a chip has says so in `refusal`.

    The text of the result is what the compiler writes to a folder: read back through JAX, some
    programs are refused, with asynchronous operations that have several operands.
    """
    started, problem = time.perf_counter(), None
    lowered = program.function.lower(*program.arguments, **program.options)
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            memory = lowered.compile({"xla_dump_to": folder}).memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            problem = str(error)
        took_s = time.perf_counter() - started
        text = written(folder, "*after_optimizations.txt")
        largest = largest_arrays(written(folder, "*memory-usage-report.txt"))
    if problem:
        return refused(program, problem, largest, took_s)
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        collectives=collectives(text, program.turns),
        compile_s=took_s,
        refusal="",
    )


def written(folder: str, pattern: str) -> str:
    """The text of a file that the compiler left; "" without one."""
    found = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
    return found[-1].read_text(errors="replace") if found else ""


def largest_arrays(report: str, count: int = 10) -> str:
    """The largest allocations of a program, a line each, from the compiler's report of them."""
    in_hbm = report.split("Memory Space: ")[1:2]
    rows = re.findall(r";\s+([\d.]+)([KMGT]?)i?B;.*; (\S.*)", "".join(in_hbm))
    sized = [(float(number) * UNITS[unit], kind) for number, unit, kind in rows]
    sized.sort(key=lambda row: -row[0])
    return "\n".join(f"{size / GIB:8.2f} GiB  {kind.strip()}" for size, kind in sized[:count])


def refused(program: Planned, message: str, largest: str, took_s: float) -> Compiled:
    """What a refusal says: the bytes that the program would need, its arguments among them."""
    arguments = program.argument_bytes
    sizes = re.findall(r"(?:[Uu]sed |required for [\w ]*\()([\d.]+[KMGT]?)", message)
    total = max(map(byte_count, sizes), default=arguments)
    said = "\n".join([message.strip().splitlines()[0], *largest.splitlines()])
    return Compiled(arguments, max(total - arguments, 0), 0, 0, {}, took_s, said)


def byte_count(text: str) -> int:
    """Bytes of a size as XLA writes it, such as "15.75G"."""
    unit = text[-1] if text[-1] in UNITS else ""
    return int(float(text.removesuffix(unit)) * UNITS[unit])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what libraries write to stderr; shows it when the block fails."""
    sys.stderr.flush()
    kept, failed = os.dup(2), True
    with tempfile.TemporaryFile() as noise:
        os.dup2(noise.fileno(), 2)
        try:
            yield
            failed = False
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            if failed:
                noise.seek(0)
                sys.stderr.write(noise.read().decode(errors="replace"))
