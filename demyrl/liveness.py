"""What ends a process whose company is gone: a `Watch` over the others, and `LastWords`.

Processes that run one program wait for each other inside collectives, so when one dies the others
would wait for ever. Each tells the others through JAX's coordinator, which lives in process 0, that
it is alive. JAX's own heartbeats do the same, but end the process in C++ with a page of stack trace
that names no remedy; they stay behind these as a second line.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

from jax.errors import JaxRuntimeError

ENDED = 3  # the exit code of a process that ends because another one is gone
BEAT_S = 2.0  # at most, between two signs of life
TELL_S = 5.0  # for the coordinator to take a message
LINGER_S = 10.0  # process 0 waits so long for the others to have read its message
LONGEST = 2000  # characters of a message to the others

GO_ON = "Run the same command again for every process: a run goes on from its last checkpoint."


class LastWords:
    """Writes a line to stderr once this process is gone, unless it has taken the line back.

    A shell waits at a pipe that closes however the process ends: killed by the system, or aborted
    by JAX, which does so within milliseconds when the coordinator is gone.
    """

    SCRIPT = 'while read -r line; do said="$line"; done; [ -z "$said" ] || echo "$said" >&2'

    def __init__(self, line: str):
        self._shell = subprocess.Popen(
            ["sh", "-c", self.SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.prepare(line)

    def prepare(self, line: str) -> None:
        """Replaces the line; an empty one means silence."""
        try:
            print(line, file=self._shell.stdin, flush=True)
        except OSError:
            pass  # someone ended the shell: then nothing is said

    def take_back(self) -> None:
        """Ends the shell; it says nothing."""
        self.prepare("")
        self._shell.stdin.close()
        self._shell.wait()


class Watch:
    """Tells the others that this process lives, and ends it when one of them does not.

    A process that has not been heard of for `silence_s`, or that says that it failed, ends this one
    with a message and code 3, even while the main thread hangs in a collective. Time is counted in
    beats that really came, so that a process that was itself asleep does not blame the others.
    """

    def __init__(self, client: Any, index: int, count: int, silence_s: float, words: LastWords):
        self._client, self._index, self._count, self._words = client, index, count, words
        self._silence_s = silence_s
        self._beat_s = min(max(silence_s / 20, 0.1), BEAT_S)
        self._rounds = 0  # beats that the coordinator has answered
        self._entries: dict[str, str] = {}  # what it answered last
        self._silent = {
            i: 0.0 for i in range(count) if i != index
        }  # seconds without a sign of life
        self._ending = threading.Lock()  # whoever holds it says why this process ends
        self._over = threading.Event()
        for loop in (self._beat, self._await_coordinator):
            threading.Thread(target=loop, name="demyrl-watch", daemon=True).start()

    def finish(self) -> None:
        """Waits until all others have finished too; whoever fails meanwhile ends this process."""
        self._tell("left", "")
        while not all(f"demyrl/left/{i}" in self._entries for i in range(self._count)):
            time.sleep(self._beat_s / 4)
        with self._ending:
            self._over.set()
        self._words.take_back()

    def fail(self, error: BaseException, text: str, code: int) -> NoReturn:
        """Writes the text to stderr, tells the others, and ends this process with the code.

        An error inside JAX may be another's death, of which the watch knows more after a while.
        """
        if isinstance(error, JaxRuntimeError):
            wait_s = self._silence_s + 3 * self._beat_s
            first = str(error).partition("\n")[0][:200]
            print(
                f"{self._name(self._index)} has an error, and waits {wait_s:.0f} s to hear whether "
                f"another one caused it: {first}",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(wait_s)
        self._end(text, f"{type(error).__name__}: {error}".rstrip(": "), code)

    def _beat(self) -> None:
        host = socket.gethostname()
        while not self._over.wait(self._beat_s):
            before = self._entries
            try:
                self._set("alive", f"{self._rounds} {host}")
                entries = dict(self._client.key_value_dir_get("demyrl/"))
            except JaxRuntimeError:
                continue  # the coordinator does not answer, which the other thread counts
            self._rounds += 1
            for index, silent_s in self._silent.items():
                key = f"demyrl/alive/{index}"
                moved = entries.get(key) != before.get(key)
                self._silent[index] = 0.0 if moved else silent_s + self._beat_s
            self._entries = entries
            self._end_if_alone()

    def _end_if_alone(self) -> None:
        for index, silent_s in self._silent.items():
            said = self._entries.get(f"demyrl/left/{index}")
            if said:
                self._end_with(f"{self._name(index)} stopped: {said}")
            elif said is None and silent_s >= self._silence_s:
                self._end_with(
                    f"{self._name(index)} has not been heard of for {self._silence_s:g} s: it was "
                    "killed, it hangs, or its machine is gone."
                )

    def _await_coordinator(self) -> None:
        rounds, still_s = 0, 0.0
        while not self._over.wait(self._beat_s):
            still_s = 0.0 if self._rounds != rounds else still_s + self._beat_s
            rounds = self._rounds
            if still_s >= self._silence_s:
                self._end_with(
                    f"{self._name(0)}, through which all hear of each other, has not answered for "
                    f"{self._silence_s:g} s: it was killed, it hangs, or its machine is gone."
                )

    def _name(self, index: int) -> str:
        _, _, host = self._entries.get(f"demyrl/alive/{index}", "").partition(" ")
        return f"Process {index} of {self._count}" + (f" (on {host})" if host else "")

    def _end_with(self, why: str) -> NoReturn:
        self._end(f"{why}\n{self._name(self._index)} ends with it. {GO_ON}", why, ENDED)

    def _end(self, text: str, why: str, code: int) -> NoReturn:
        self._ending.acquire()  # and never releases it: the other thread, if any, waits for the end
        print(text, file=sys.stderr, flush=True)
        self._tell("left", why[:LONGEST])
        deadline = time.monotonic() + (LINGER_S if self._index == 0 else 0.0)
        while time.monotonic() < deadline and not self._all_know():
            time.sleep(self._beat_s / 4)
        self._words.take_back()
        sys.stdout.flush()
        os._exit(code)

    def _all_know(self) -> bool:
        try:
            entries = dict(self._client.key_value_dir_get("demyrl/left/"))
        except JaxRuntimeError:
            return True
        return all(
            f"demyrl/left/{index}" in entries or silent_s >= self._silence_s
            for index, silent_s in self._silent.items()
        )

    def _set(self, what: str, value: str) -> None:
        self._client.key_value_set(f"demyrl/{what}/{self._index}", value, allow_overwrite=True)

    def _tell(self, what: str, value: str) -> None:
        """Sets it, but does not wait for ever: a frozen coordinator never answers."""

        def tell() -> None:
            try:
                self._set(what, value)
            except JaxRuntimeError:
                pass

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        teller.join(TELL_S)
