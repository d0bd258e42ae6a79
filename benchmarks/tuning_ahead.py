"""Jobs, exams and kernels for `benchmarks.tuning`, made ahead by processes of their own.

    tasks in order   →   job and exams of each   →   what it will try, compiled into the disk cache

The GPU is busy with one task meanwhile.  The processes are nice, and leave two processors alone,
so that whoever starts launches is not held up.  Each has one thread for linear algebra: with more,
those of all processes wait for each other, and what they wait counts as time of a processor.
"""

from __future__ import annotations

import math
import os
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from multiprocessing import get_context
from typing import Final, Protocol, TypeAlias, final

from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.schedule import Schedule
from attngen.record import record
from attngen.tuning.build import Builder
from attngen.tuning.call import Subject
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.exam import Exam
from benchmarks.tuning_jobs import Job, Task, make_job, make_job_exams

__all__ = ["Ahead", "Now", "Ready", "Supply", "processors", "waves_s"]

MakeBuilder: TypeAlias = Callable[[Subject], Builder]
Wanted: TypeAlias = Callable[[Job, Task], Iterable[Schedule]]
"""What is compiled ahead for a job, the most urgent first."""

_THREADS: Final = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"
"""What the libraries for linear algebra ask for the number of their threads."""
_EARLY: Final = 4
"""So many tasks are made ready before the kernels of the first are compiled."""
_FROM_CACHE_S: Final = 0.05
"""What takes less was not compiled."""


@final
@record(eq=False)
class Ready:
    """A job with the answers of its exams; `seconds` that both took, with nothing else running."""

    job: Job
    exams: tuple[Exam, ...]
    seconds: float


class Supply(Protocol):
    """Where tasks come from."""

    def ready(self, task: Task) -> Ready:
        """The job, with all that was to be compiled for it."""

    @property
    def compile_s(self) -> float | None:
        """Seconds of one processor for one kernel, so far; None where it is not known."""

    def close(self) -> None: ...


@final
class Now:
    """Makes each job when it is asked for, and compiles nothing ahead."""

    compile_s = None

    def __init__(self, device: DeviceClass) -> None:
        self._device = device

    def ready(self, task: Task) -> Ready:
        return _make_ready(task, self._device, time.perf_counter)

    def close(self) -> None:
        pass


@final
class Ahead:
    """Makes everything in the order of the tasks, in `processes`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        device: DeviceClass,
        make_builder: MakeBuilder,
        wanted: Wanted,
        processes: int | None = None,
    ) -> None:
        count = processes or max(1, processors() - 2)
        self._usual = {name: os.environ.get(name) for name in _THREADS}
        os.environ.update(dict.fromkeys(_THREADS, "1"))  # the processes start when there is work
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), _be_nice)
        self._tasks, self._device, self._make_builder = tuple(tasks), device, make_builder
        self._wanted = wanted
        self._readies: dict[Task, Future[Ready]] = {}
        self._compiled: dict[Task, list[Future[float | None]]] = {}
        self._is_fed = {task: threading.Event() for task in self._tasks}
        self._known: set[tuple[str, Schedule]] = set()
        self._seconds: list[float] = []
        threading.Thread(target=self._feed, daemon=True).start()

    def ready(self, task: Task) -> Ready:
        found = self._readies_of(task).result()
        self._is_fed[task].wait()
        left = set(self._compiled[task])
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            found_s = (future.result() for future in done)
            self._seconds += [s for s in found_s if s is not None and s > _FROM_CACHE_S]
        return found

    @property
    def compile_s(self) -> float | None:
        return statistics.mean(self._seconds) if self._seconds else None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for name, value in self._usual.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def _readies_of(self, task: Task) -> Future[Ready]:
        while task not in self._readies:
            time.sleep(0.01)
        return self._readies[task]

    def _feed(self) -> None:
        """Hand out work in the order in which it is needed, without waiting for its end."""
        with suppress(RuntimeError):  # closed meanwhile
            for task in self._tasks[:_EARLY]:
                self._make_ready(task)
            ops: dict[str, list[Future[float | None]]] = {}
            for number, task in enumerate(self._tasks):
                futures: list[Future[float | None]] = []
                try:
                    job = self._readies[task].result().job
                except AttnError:
                    pass  # who asks for it hears of it
                else:
                    futures = ops.setdefault(job.op, [])
                    futures += self._compile(job, task)
                self._compiled[task] = list(futures)
                self._is_fed[task].set()
                if number + _EARLY < len(self._tasks):
                    self._make_ready(self._tasks[number + _EARLY])

    def _make_ready(self, task: Task) -> None:
        self._readies[task] = self._pool.submit(_make_ready, task, self._device, time.process_time)

    def _compile(self, job: Job, task: Task) -> list[Future[float | None]]:
        subject = pickle.dumps(job.subject)
        futures = []
        for schedule in self._wanted(job, task):
            if (job.op, schedule) not in self._known:
                self._known.add((job.op, schedule))
                futures.append(self._pool.submit(_compile, self._make_builder, subject, schedule))
        return futures


def _be_nice() -> None:
    with suppress(OSError, AttributeError):
        os.nice(10)


def _make_ready(task: Task, device: DeviceClass, clock: Callable[[], float]) -> Ready:
    start = clock()
    job = make_job(task, device)
    return Ready(job, make_job_exams(job), clock() - start)


def _compile(make_builder: MakeBuilder, subject: bytes, schedule: Schedule) -> float | None:
    """Seconds of a processor; None where it does not compile, which the search meets again."""
    start = time.process_time()
    try:
        _builder(make_builder, subject).build(schedule)
    except AttnError:
        return None
    return time.process_time() - start


@lru_cache(maxsize=2)
def _builder(make_builder: MakeBuilder, subject: bytes) -> Builder:
    return make_builder(pickle.loads(subject))


def processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def waves_s(kernels: int, compile_s: float | None, processors: int) -> float:
    """How long so many kernels take side by side."""
    return 0.0 if compile_s is None else math.ceil(kernels / processors) * compile_s
