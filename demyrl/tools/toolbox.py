"""Many tool calls at once: a `ToolBox` hands calls to a few sandboxes and promises results."""

import concurrent.futures
import dataclasses
import queue
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from demyrl.tools.interpreter import SCHEMA, code_of
from demyrl.tools.sandbox import Sandbox, SandboxConfig, probe
from demyrl.types import ToolCall, ToolResult


@dataclasses.dataclass(frozen=True)
class ToolConfig:
    enabled: bool  # False: calls are answered with "not_executed", and nothing is started
    isolation: str  # "bwrap" | "unsafe", see SandboxConfig, also for the next four
    workers: int  # sandboxes, so programs that run at the same time
    timeout_s: float
    memory_mb: int
    disk_mb: int
    output_bytes: int
    delay_s: float  # results come up to this much later, at random; 0 but in tests

    def __post_init__(self):
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}: use at least 1")
        if self.delay_s < 0:
            raise ValueError(f"delay_s is {self.delay_s}: use 0 for no delay")
        self.sandbox()  # checks the rest

    def sandbox(self) -> SandboxConfig:
        names = [field.name for field in dataclasses.fields(SandboxConfig)]
        return SandboxConfig(**{name: getattr(self, name) for name in names})


class ToolBox:
    """The policy's tools, ready between `with` and the end of its block.

    Entering raises SandboxUnavailable when the isolation asked for does not work here.
    """

    def __init__(self, config: ToolConfig):
        self.schemas: list[dict[str, Any]] = [SCHEMA]
        self.isolation = config.isolation  # to be recorded with what the tools made
        self._config = config
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._sandboxes: list[Sandbox] = []
        self._threads: list[threading.Thread] = []
        self._open = False

    def __enter__(self) -> "ToolBox":
        self._open = True
        if self._config.enabled:
            try:
                self._start()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def submit(self, call: ToolCall) -> Future[ToolResult]:
        """The result to come. Whatever the call is, it ends in a result, never an exception.

        Raises RuntimeError outside of the `with` block.
        """
        if not self._open:
            raise RuntimeError("this ToolBox is not open: use it inside `with ToolBox(...)`")
        if not self._config.enabled:
            return _done(ToolResult("not_executed", "The tool is switched off."))
        code = code_of(call)
        if isinstance(code, ToolResult):
            return _done(code)
        result: Future[ToolResult] = Future()
        self._waiting.put((code, result))
        return result

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results of the calls, in their order; they run in parallel."""
        results = [self.submit(call) for call in calls]
        return [result.result() for result in results]

    def close(self) -> None:
        """Ends every sandbox; calls that still wait are answered with "not_executed"."""
        self._open = False
        self._dismiss()
        for _ in self._threads:
            self._waiting.put(None)
        for sandbox in self._sandboxes:
            sandbox.close()
        for thread in self._threads:
            thread.join()
        self._dismiss()  # what came in meanwhile
        self._sandboxes, self._threads = [], []

    def _dismiss(self) -> None:
        while not self._waiting.empty():
            item = self._waiting.get()
            if item is not None and item[1].set_running_or_notify_cancel():
                text = "The tool was shut down before this call ran."
                item[1].set_result(ToolResult("not_executed", text))

    def _start(self) -> None:
        probe(self._config.sandbox())
        ready = [Future() for _ in range(self._config.workers)]
        for future in ready:
            # A sandbox ends with the thread that started it, so each has one of its own. Daemons,
            # or a forgotten ToolBox would keep the program from ending.
            thread = threading.Thread(target=self._work, args=(future,), daemon=True)
            self._threads.append(thread)
            thread.start()
        concurrent.futures.wait(ready)
        for future in ready:
            future.result()

    def _work(self, ready: Future) -> None:
        """The life of a thread: one sandbox, one call after another."""
        try:
            sandbox = Sandbox(self._config.sandbox())
        except Exception as error:
            ready.set_exception(error)
            return
        self._sandboxes.append(sandbox)
        ready.set_result(None)
        with sandbox:
            while (item := self._waiting.get()) is not None:
                code, result = item
                if not result.set_running_or_notify_cancel():
                    continue
                try:
                    time.sleep(random.uniform(0, self._config.delay_s))
                    result.set_result(sandbox.run(code))
                except Exception as error:  # ours: the caller must see it
                    result.set_exception(error)


def _done(result: ToolResult) -> Future[ToolResult]:
    future: Future[ToolResult] = Future()
    future.set_result(result)
    return future
