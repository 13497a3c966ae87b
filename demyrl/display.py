"""What a run shows on the console: live bars on a terminal, plain lines elsewhere.

It keeps nothing and writes no file; `logs.py` drives it.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from rich import progress
from rich.console import Console

HEADLINES = (  # what the line of a step shows, when the step has it
    "sft/loss",
    "sft/probe_copy",
    "reward/avg_at_g",
    "reward/pass_at_g",
    "policy/entropy",
    "rollout/call_share",
    "rollout/response_tokens",
    "time/step_s",
)
QUIET_S = 3.0  # the least time between two plain lines


class Display:
    """Progress of a run of `steps` steps, of which `first` were done before."""

    def __init__(self, steps: int, first: int = 0, console: Console | None = None):
        self._steps = steps
        self._first = first
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bars = _bars(self._console) if self._console.is_terminal else None
        self._run = self._bars and self._bars.add_task("steps", total=steps, completed=first)
        self._started = time.perf_counter()
        self._last_step_line = -math.inf
        self._last_line = self._started

    def start(self) -> None:
        if self._bars:
            self._bars.start()

    def stop(self) -> None:
        if self._bars:
            self._bars.stop()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, markup=False, highlight=False)
        self._console.file.flush()
        self._last_line = time.perf_counter()

    def numbers(self, step: int, line: Mapping[str, float | None]) -> None:
        """Show the headlines of a step; an evaluation and the last step always get a line."""
        evaluation = [name for name in line if name.startswith("eval/all/")]
        done = step if evaluation else step + 1
        if self._bars:
            self._bars.update(self._run, completed=done)
        now = time.perf_counter()
        if evaluation or done >= self._steps or now - self._last_step_line >= QUIET_S:
            self._last_step_line = now
            names = [name for name in (*HEADLINES, *evaluation) if line.get(name) is not None]
            numbers = "  ".join(f"{_short(name)} {line[name]:.3g}" for name in names)
            self.note(f"step {done}/{self._steps}  {numbers}{self._eta(done)}")

    @contextlib.contextmanager
    def phase(
        self, name: str, total: int | None = None, step: int | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Show how far a part of a step is; gives the function that counts what got done."""
        if not self._bars:
            yield self._counter(name, total, step)
            return
        bar = self._bars.add_task(name, total=total)
        self._bars.refresh()
        try:
            yield lambda count=1: self._bars.advance(bar, count)
        finally:
            self._bars.remove_task(bar)

    def _counter(self, name: str, total: int | None, step: int | None) -> Callable[[int], None]:
        start, done = time.perf_counter(), 0
        where = "" if step is None else f"step {step + 1}/{self._steps}  "

        def advance(count: int = 1) -> None:
            nonlocal done
            done += count
            now = time.perf_counter()
            if now - max(start, self._last_line) >= QUIET_S:
                amount = f"{done}/{total}" if total else f"{done}"
                self.note(f"{where}{name} {amount}  {now - start:.1f} s")

        return advance

    def _eta(self, done: int) -> str:
        if self._bars or done <= self._first or done >= self._steps:
            return ""
        each_s = (time.perf_counter() - self._started) / (done - self._first)
        minutes, seconds = divmod(round(each_s * (self._steps - done)), 60)
        return f"  ETA {minutes}:{seconds:02d}"


def _bars(console: Console) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description:<10}"),
        progress.BarColumn(bar_width=28),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("ETA"),
        progress.TimeRemainingColumn(),
        console=console,
    )


def _short(name: str) -> str:
    """A metric's name without its area, unless that is `eval`."""
    return name.replace("eval/all/", "eval ").rpartition("/")[2]
