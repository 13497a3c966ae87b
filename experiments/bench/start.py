"""How long until something happens: each measurement is a process of its own.

    python -m experiments.bench.start --config.model.source=runs/quickstart/sft

Keys:

  import_s           starting Python and importing the training stage, JAX included
  help_s             `python -m demyrl.train --help`
  first_step_s       from the command to the first line of metrics.jsonl, with compiled programs
                     "cold": none kept, "warm": all kept
  one_step_run_s     the same until a run of one step has ended, its checkpoint saved
  problems, samples, source   what the step samples, from which weights
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from demyrl import recipe
from experiments.bench.measure import options_of, print_line

STAGE = "demyrl.train"
LOOK_EVERY_S = 0.01


def seconds_of(*words: str) -> float:
    """Seconds of a Python process with these arguments."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def one_step(words: Sequence[str], workdir: Path, cache: Path) -> tuple[float, float]:
    """Seconds until a run of one step has logged it, and until it has ended.

    Raises RuntimeError, with what the run said, when it fails.
    """
    command = [sys.executable, "-m", STAGE, *words]
    command += ["--config.train.steps=1", f"--workdir={workdir}"]
    environment = {**os.environ, "DEMYRL_CACHE": str(cache)}
    log = workdir.with_suffix(".txt")
    logged, start = None, time.perf_counter()
    with open(log, "w") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while run.poll() is None:
            if logged is None and has_line(workdir / "metrics.jsonl"):
                logged = time.perf_counter() - start
            time.sleep(LOOK_EVERY_S)
    ended = time.perf_counter() - start
    if run.returncode:
        raise RuntimeError(f"the run ended with exit code {run.returncode}:\n{log.read_text()}")
    return logged or ended, ended


def has_line(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options, config = options_of(__doc__, argv)
    settings = recipe.read(config)
    keys = [word for word in argv if word.startswith("--config.")]
    words = [f"--config={options.config}", *keys]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs = {name: one_step(words, root / name, root / "xla") for name in ("cold", "warm")}
    print_line(
        "start",
        options,
        import_s=seconds_of("-c", f"import {STAGE}"),
        help_s=seconds_of("-m", STAGE, "--help"),
        first_step_s={name: logged for name, (logged, _) in runs.items()},
        one_step_run_s={name: ended for name, (_, ended) in runs.items()},
        problems=settings.train.problems,
        samples=settings.train.samples,
        source=settings.source,
    )


if __name__ == "__main__":
    main()
