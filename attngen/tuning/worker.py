"""Timing in a process of its own: a candidate that faults, hangs or exits costs only itself.

    tuner   →  pickles of own types: the calls, a candidate, what to do with it
    worker  →  one line of JSON for each: a result, or what went wrong

What a candidate has run in may have written anything, so nothing that comes from there is
unpickled.  The tuner waits for each answer for a limited time; then it ends the process, starts
another, and goes on with the other candidates.

`python -m attngen.tuning.worker` is the worker; it ends with its standard input.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final, TypeAlias, final

from attngen.diagnostics.diagnostic import AttnError
from attngen.record import record
from attngen.tuning.bench import Bench, MakeBench
from attngen.tuning.build import Build
from attngen.tuning.errors import TimingProcessFailed
from attngen.tuning.exam import Exam, Verdict
from attngen.tuning.timing import LostError

__all__ = ["Patience", "Worker", "main"]

Answer: TypeAlias = Mapping[str, Any]
MakeExams: TypeAlias = Callable[[], Sequence[Exam]]

_LENGTH: Final = struct.Struct("<Q")
_LONGEST_LINE: Final = 1 << 16
_FIRST_LINE_BYTES: Final = 300
_LOOK_S: Final = 1.0


@final
@record(kw_only=True)
class Patience:
    """How many seconds an answer may take.

    open_s:    starting, with the arrays of the calls.
    check_s:   all exams of a candidate.
    sample_s:  one sample.
    """

    open_s: float = 120.0
    check_s: float = 20.0
    sample_s: float = 10.0


@final
class Worker:
    """The tuner's side: a timer of candidates, behind which processes come and go.

    `restarts` counts processes after the first.
    """

    def __init__(
        self, make_bench: MakeBench, make_exams: MakeExams, patience: Patience | None = None
    ) -> None:
        """Both are called when the first candidate is there: exams while others compile, and
        while the process begins."""
        self.restarts = -1
        self.mode = "events"
        self._make_bench = make_bench
        self._make_exams = make_exams
        self._exams: tuple[Exam, ...] | None = None
        self._patience = patience or Patience()
        self._builds: dict[str, Build] = {}
        self._process: _Process | None = None
        self._loaded: set[str] = set()
        self._is_closed = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Start the process, with all calls on its device.  Errors:  A472, A65x."""
        self._running()

    def reopen(self, make_exams: MakeExams) -> None:
        """Go on with other calls of the same attention: what is loaded stays loaded.

        Errors:  A472, A65x.
        """
        self._make_exams, self._exams = make_exams, None
        process = self._process
        if process is None:
            self._running()
            return
        try:
            self._exams = tuple(make_exams())
            process.ask("open", (self._exams,), self._patience.open_s)
        except (_DiedError, _RefusedError) as error:
            self._end_process()
            raise AttnError(TimingProcessFailed(None, str(error))) from None

    def check(self, name: str, build: Build, first: int = 0) -> Verdict:
        """Let a candidate sit its exams, from this one on; then it can be timed by its name.

        Errors:  LostError, when it is wrong or did harm.
        """
        self._builds[name] = build
        answer = self._ask(name, "check", (name, first), self._patience.check_s)
        return Verdict(float(answer["max_error"]), float(answer["bound_ratio"]))

    def sample(self, name: str, repeats: int) -> float:
        """See `timing.Timer`."""
        answer = self._ask(name, "sample", (name, repeats), self._patience.sample_s)
        self.mode = str(answer["mode"])
        return float(answer["ms"])

    def close(self) -> None:
        """End the process, if there is one, for good."""
        self._is_closed = True
        self._end_process()

    def _ask(self, name: str, action: str, values: tuple[Any, ...], limit_s: float) -> Answer:
        """The answer about a candidate, loaded first where the process does not have it yet."""
        process = self._running()
        try:
            if name not in self._loaded:
                self._loaded.add(name)
                process.ask("load", (name, self._builds[name]), self._patience.check_s)
            return process.ask(action, values, limit_s)
        except _DiedError as died:
            self._end_process()
            raise LostError(str(died)) from None
        except _RefusedError as refused:
            if refused.is_lost:
                self._end_process()
            raise LostError(str(refused)) from None

    def _end_process(self) -> None:
        """The next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _running(self) -> _Process:
        """The process, started and with all calls on its device.

        Errors:  A472 where that cannot be done, for which no candidate is to blame.
        """
        if self._is_closed:
            raise AttnError(TimingProcessFailed(None, "it was ended"))
        if self._process is None:
            self.restarts += 1
            self._loaded.clear()
            self._process = process = _Process()
            try:
                process.send("wake", (self._make_bench,))
                if self._exams is None:
                    self._exams = tuple(self._make_exams())
                process.receive(self._patience.open_s)
                process.ask("open", (self._exams,), self._patience.open_s)
            except (_DiedError, _RefusedError) as error:
                self._end_process()
                raise AttnError(TimingProcessFailed(None, str(error))) from None
            except AttnError:
                self._end_process()
                raise
        return self._process


# ---- the process, seen from outside ----------------------------------------------------------


class _DiedError(Exception):
    """The process is gone, or was ended because it did not answer."""


class _RefusedError(Exception):
    """What went wrong inside; `is_lost` when the device does nothing more there."""

    def __init__(self, reason: str, is_lost: bool) -> None:
        super().__init__(reason)
        self.is_lost = is_lost


class _Process:
    def __init__(self) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this)
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "attngen.tuning.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            start_new_session=True,  # so that Ctrl-C reaches the tuner alone
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, action: str, values: tuple[Any, ...], limit_s: float) -> Answer:
        """Errors:  _DiedError, _RefusedError."""
        self.send(action, values)
        return self.receive(limit_s)

    def receive(self, limit_s: float) -> Answer:
        """The answer to what was sent first.  Errors:  _DiedError, _RefusedError."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self.end()
            raise _DiedError(f"it did not end within {limit_s:g} s") from None
        answer = _parse(line)
        if answer is None:
            raise _DiedError(self._describe_end())
        if "reason" in answer:
            raise _RefusedError(str(answer["reason"]), bool(answer.get("is_lost")))
        return answer

    def end(self) -> None:
        """Stop it, whatever it is doing."""
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        assert self._popen.stdin is not None
        with suppress(OSError):  # it may not have read what was written last
            self._popen.stdin.close()
        self._errors.close()

    def send(self, action: str, values: tuple[Any, ...]) -> None:
        """Errors:  _DiedError."""
        message = pickle.dumps((action, values))
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(_LENGTH.pack(len(message)) + message)
            self._popen.stdin.flush()
        except OSError:
            raise _DiedError(self._describe_end()) from None

    def _read(self) -> None:
        """Hand on lines as they come, and an empty one at the end."""
        stream = self._popen.stdout
        assert stream is not None
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                self._lines.put(line)
        self._lines.put(b"")

    def _describe_end(self) -> str:
        """How it ended, with the last line that it wrote."""
        try:
            code = self._popen.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            return "its process answered what was not asked"
        how = f"exit status {code}" if code >= 0 else f"signal {_signal_name(-code)}"
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        said = f": {lines[-1][:_FIRST_LINE_BYTES]}" if lines else ""
        return f"its process ended with {how}{said}"


def _parse(line: bytes) -> Answer | None:
    """The object of a line; None for anything else, which no worker in order writes."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


# ---- the process, seen from inside -----------------------------------------------------------


def main() -> int:
    """Answer until the standard input ends."""
    requests, answers = _take_streams()
    threading.Thread(target=_end_with_tuner, daemon=True).start()
    bench: Bench | None = None
    while (message := _receive(requests)) is not None:
        action, values = message
        try:
            if action == "wake":
                bench = values[0]()
            assert bench is not None, "`wake` comes first"
            answer = _answer(bench, action, values)
        except Exception as error:  # of a candidate, its compiler, or its device
            is_lost = bench is not None and bench.is_lost()
            answer = {"reason": _first_line(error), "is_lost": is_lost}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
    return 0


def _answer(bench: Bench, action: str, values: tuple[Any, ...]) -> Answer:
    match action:
        case "wake":
            bench.wake()
            return {}
        case "open":
            bench.open(*values)
            return {}
        case "load":
            bench.load(*values)
            return {}
        case "check":
            verdict = bench.check(*values)
            return {"max_error": verdict.max_error, "bound_ratio": verdict.bound_ratio}
        case "sample":
            return {"ms": bench.sample(*values), "mode": bench.mode}
        case _:
            raise ValueError(action)


def _take_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Where requests come from and answers go; what else is printed goes to the error stream."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, answers


def _receive(requests: IO[bytes]) -> tuple[str, tuple[Any, ...]] | None:
    """The next request of the tuner that started this process; None at the end."""
    head = requests.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    action, values = pickle.loads(requests.read(length))
    return action, values


def _first_line(error: Exception) -> str:
    if isinstance(error, AttnError):
        found = error.diagnostics[0]
        label = found.label_text()
        return found.message() if label is None else f"{found.message()}: {label}"
    return str(error).partition("\n")[0] or type(error).__name__


def _end_with_tuner() -> None:
    """A tuner that was killed leaves nobody who would end an endless candidate."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
