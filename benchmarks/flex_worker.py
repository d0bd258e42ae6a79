"""Lanes in a process of their own: one that faults, hangs or exits costs only itself.

    benchmark  →  one line of JSON for each function: its name, and the lanes to run
    worker     →  the lane that it is at, again and again; then the records, or what was lost

After a fault the GPU does nothing more for a process, so that is ended, and another one started
while the benchmark goes on elsewhere.  The lane at which it was is the one that is to blame.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any, Final, TypeAlias, final

from attngen.record import record
from benchmarks.cold import ROOT

__all__ = ["Outcome", "Worker", "serve"]

Record: TypeAlias = dict[str, Any]
RunLanes: TypeAlias = Callable[[str, Sequence[str], Callable[[str], None]], Sequence[Record]]

PATIENCE_S: Final = 120.0
"""How long a worker may stay at one lane, or start: compilers take their time."""


@final
@record(eq=False)
class Outcome:
    """The records of lanes that ran; and the lane at which the process was lost, and how.

    `lane` is None where nothing was lost, or before the first lane began.
    """

    records: tuple[Record, ...]
    lane: str | None = None
    lost: str | None = None


@final
class Worker:
    """The benchmark's side.  The process is started at once, and again after a loss."""

    def __init__(self, command: Sequence[str], patience_s: float = PATIENCE_S) -> None:
        """command:  a module and its arguments; it calls `serve`."""
        self._command = [sys.executable, "-m", *command]
        self._patience_s = patience_s
        self._start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, function: str, lanes: Sequence[str]) -> Outcome:
        """Run the lanes of one function."""
        records: list[Record] = []
        lane = None
        try:
            self._send({"function": function, "lanes": list(lanes)})
            for answer in self._answers():
                if "at" in answer:
                    lane = answer["at"]
                elif "record" in answer:
                    records.append(answer["record"])
                elif "lost" in answer:
                    raise _LostError(answer["lost"])
                else:
                    break
        except _LostError as lost:
            self._end()
            self._start()
            return Outcome(tuple(records), lane, str(lost))
        return Outcome(tuple(records))

    def _start(self) -> None:
        self._popen = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(self._popen.stdout, self._lines), daemon=True)
        reader.start()

    def _end(self) -> None:
        """Stop it, whatever it is doing."""
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        assert self._popen.stdin is not None
        with suppress(OSError):  # it may not have read what was written last
            self._popen.stdin.close()

    def _send(self, question: Record) -> None:
        assert self._popen.stdin is not None
        try:
            print(json.dumps(question), file=self._popen.stdin, flush=True)
        except OSError:
            raise _LostError(f"its process ended with {self._popen.wait()}") from None

    def _answers(self) -> Iterator[Record]:
        while True:
            try:
                line = self._lines.get(timeout=self._patience_s)
            except queue.Empty:
                raise _LostError(f"nothing for {self._patience_s:g} s") from None
            if not line:
                raise _LostError(f"its process ended with {self._popen.wait()}")
            yield json.loads(line)


class _LostError(Exception):
    """The process is of no use any more; the text says why."""


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Hand on lines as they come, and an empty one at the end."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")


# ---- inside of the process -----------------------------------------------------------------------


def serve(run_lanes: RunLanes) -> None:
    """Answer until the standard input ends, or the device is lost.

    run_lanes:  gives the records of a function and lanes; it says at which lane it is.  What it
                raises ends the process, since nobody knows what state the device is in.
    """
    answers = os.fdopen(os.dup(1), "w")  # what is printed meanwhile goes to the error stream
    os.dup2(2, 1)

    def say(answer: Record) -> None:
        print(json.dumps(answer, allow_nan=False), file=answers, flush=True)

    for line in sys.stdin:
        question = json.loads(line)
        try:
            found = run_lanes(question["function"], question["lanes"], lambda at: say({"at": at}))
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            say({"lost": f"{type(error).__name__}: {first_line}"})
            return
        for each in found:
            say({"record": each})
        say({"end": True})
