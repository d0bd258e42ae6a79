"""The fastest of all schedules of a call: every one is timed, and the slow ones not for long.

    two launches   who takes 1.5 times as long as the fastest in both is out
    2 to 4 rounds  who was 25 %, 12.5 %, 6 % slower in every one of them is out
    orders         of all tiles within 8 % of the fastest, all orders inside a step join
    12 rounds      the same thresholds, down to 0.5 %; then the three fastest are left

A clock that falls under load takes at most a fifth, and is the same for all of a round, so none of
these can lose a schedule that is more than 1 % faster than what is left, but by a sample in every
round that strays by more than its threshold.  The three are timed anew by whoever asked.

Not tried are
- what the model predicts to take more than `within` times the best; 3 leaves out `forward_simt`,
  which does without tensor cores: a sixteenth of the rate of products;
- at a longer length of the same operation, what took `carry` times the best at the length before:
  the machine code is the same, and by docs/performance.md tiles change places by 10 % at most when
  a length doubles;
- orders of tiles that are further than `orders` behind.  They were never more than 7 % apart.

`to_the_end` leaves out nothing, and nobody drops out: then the time of a whole search is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, final

from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.schedule import Schedule
from attngen.record import record
from attngen.tuning.build import Build, Builder
from attngen.tuning.exam import Verdict
from attngen.tuning.search import name_of
from attngen.tuning.space import describe
from attngen.tuning.timing import LostError, Race, RacePlan
from attngen.tuning.worker import Worker
from benchmarks.tuning_jobs import Job

__all__ = [
    "Admitted", "Seat", "Swept", "Thresholds", "describe_lost", "is_plain", "race_all", "sweep",
    "to_the_end_s",
]  # fmt: skip

_FIRST: Final = RacePlan(min_rounds=4, max_rounds=4, sample_ms=2.0, hopeless=1.5)
_SECOND: Final = RacePlan(min_rounds=6, max_rounds=12, sample_ms=3.0, warm_ms=0.0, hopeless=1.5)
_LEFT: Final = 3
_ROUNDS: Final = 29
"""That it takes to know a ratio to 0.5 %; see `attngen/tuning/timing.py`."""


@final
class Seat:
    """A place in a worker that several searches use, one operation after the other.

    It is the search's stand, and outlives it.  `exam_s` adds up the time of all whole exams.
    """

    def __init__(self, worker: Worker, prefix: str) -> None:
        self.exams = 0
        self.exam_s = 0.0
        self._worker, self._prefix = worker, prefix

    @property
    def mode(self) -> str:
        return self._worker.mode

    def prepare(self) -> None:
        self._worker.prepare()

    def check(self, name: str, build: Build, first: int = 0) -> Verdict:
        start = time.perf_counter()
        try:
            return self._worker.check(self._prefix + name, build, first)
        finally:
            if first == 0:
                self.exams += 1
                self.exam_s += time.perf_counter() - start

    def sample(self, name: str, repeats: int) -> float:
        return self._worker.sample(self._prefix + name, repeats)

    def close(self) -> None:
        """The worker goes on with the next search."""


@final
@record(kw_only=True)
class Thresholds:
    """What is left out of a sweep; see above."""

    within: float = 3.0
    carry: float = 1.5
    orders: float = 1.08
    most: int = 1 << 12


@final
@record(eq=False)
class Admitted:
    """Compiled, and right in the exams that it sat."""

    build: Build
    verdict: Verdict


@final
@record(eq=False)
class Swept:
    """What a sweep found.

    fastest:  the best, the fastest first; each was right in all exams.
    ratios:   of all that were timed, over the fastest.
    ms:       the same, in milliseconds of one launch.
    lost:     those that were wrong or did harm, and why.
    """

    fastest: tuple[Schedule, ...]
    admitted: Mapping[Schedule, Admitted]
    ratios: Mapping[Schedule, float]
    ms: Mapping[Schedule, float]
    lost: Mapping[Schedule, str]
    spilled: int
    seconds: float


def sweep(
    job: Job,
    seat: Seat,
    builder: Builder,
    thresholds: Thresholds,
    slow: Mapping[Schedule, float] | None = None,
) -> Swept:
    """Time all, as described above.  `slow` has the ratios of the length before."""
    start = time.perf_counter()
    hall = _Hall(job, seat, builder)
    first = _tried_first(job, thresholds, slow or {})
    ratios, ms = _run(hall.admit(first), hall, _FIRST)
    best = min(ratios.values(), default=1.0)
    close = {s for s, ratio in ratios.items() if is_plain(s) and ratio <= thresholds.orders * best}
    orders = [s for s in job.space.candidates if not is_plain(s) and s.without_order() in close]
    joined = [*(s for s in ratios if ratios[s] <= thresholds.orders * best), *hall.admit(orders)]
    contest, contest_ms = _run(joined, hall, _SECOND)
    ratios, ms = {**ratios, **contest}, {**ms, **contest_ms}
    best = min(ratios.values(), default=1.0)
    fastest = _right(sorted(contest, key=lambda s: contest[s]), hall)
    return Swept(
        fastest,
        hall.admitted,
        {s: ratio / best for s, ratio in ratios.items()},
        ms,
        hall.lost,
        hall.spilled,
        time.perf_counter() - start,
    )


def race_all(job: Job, seat: Seat, builder: Builder, plan: RacePlan) -> Swept:
    """Time every candidate to the end; all of them sit all exams."""
    start = time.perf_counter()
    hall = _Hall(job, seat, builder)
    ratios, ms = _run(hall.admit(job.space.candidates, exams=0), hall, plan)
    best = min(ratios.values(), default=1.0)
    fastest = tuple(sorted(ratios, key=lambda s: ratios[s])[:_LEFT])
    seconds = time.perf_counter() - start
    over = {s: ratio / best for s, ratio in ratios.items()}
    return Swept(fastest, hall.admitted, over, ms, hall.lost, hall.spilled, seconds)


def is_plain(schedule: Schedule) -> bool:
    """Whether the family's rule decides the order inside a step."""
    return not schedule.has_order


def _tried_first(
    job: Job, thresholds: Thresholds, slow: Mapping[Schedule, float]
) -> list[Schedule]:
    """The default, and all tiles, those that are predicted to be fast first."""
    ranked = job.model.rank(job.space.candidates)
    most = thresholds.within * ranked[0][1].us
    is_fixed = all(not is_plain(s) for s, _ in ranked)
    chosen = {job.space.default: None}
    for schedule, prediction in ranked:
        is_slow = prediction.us > most or slow.get(schedule, 1.0) > thresholds.carry
        if not is_slow and (is_plain(schedule) or is_fixed):
            chosen[schedule] = None
    return list(chosen)[: thresholds.most]


def _run(
    schedules: Iterable[Schedule], hall: _Hall, plan: RacePlan
) -> tuple[dict[Schedule, float], dict[Schedule, float]]:
    """Race them beside the default: times of each over its time, and milliseconds."""
    by_name = {name_of(s): s for s in dict.fromkeys((*hall.default, *schedules))}
    reference = name_of(next(iter(hall.default))) if hall.default else None
    race = Race(hall.seat, tuple(by_name), plan, reference=reference)
    for _ in race.rounds():
        pass
    ratios, ms = {}, {}
    for name, schedule in by_name.items():
        if race.samples.get(name):
            ratios[schedule] = race.ratio(name).ms
            ms[schedule] = race.times(name).ms
        elif name in race.firsts and race.reference is not None:
            ms[schedule] = race.firsts[name]
            of_reference = race.times(race.reference).ms
            ratios[schedule] = race.firsts[name] / of_reference
        elif name in race.outs:
            hall.lost[schedule] = race.outs[name]
    return ratios, ms


def _right(ordered: Iterable[Schedule], hall: _Hall) -> tuple[Schedule, ...]:
    """The first few that are right in all exams."""
    found: list[Schedule] = []
    for schedule in ordered:
        if len(found) == _LEFT:
            break
        if hall.sits_all(schedule):
            found.append(schedule)
    return tuple(found)


@final
class _Hall:
    """Compiles and examines: on the ragged call alone, which takes a millisecond."""

    def __init__(self, job: Job, seat: Seat, builder: Builder) -> None:
        self.seat = seat
        self.admitted: dict[Schedule, Admitted] = {}
        self.lost: dict[Schedule, str] = {}
        self.spilled = 0
        self._job, self._builder = job, builder

    @property
    def default(self) -> tuple[Schedule, ...]:
        """It, if it can be timed."""
        default = self._job.space.default
        return (default,) if default in self.admitted else ()

    def admit(self, schedules: Iterable[Schedule], exams: int = 1) -> list[Schedule]:
        """Those that can be timed, of these; they sit the exams from number `exams` on."""
        wanted = [s for s in dict.fromkeys(schedules) if s not in self.admitted]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            builds = list(pool.map(self._build, wanted))
        for schedule, build in zip(wanted, builds, strict=True):
            if build is None:
                continue
            if build.reason_against is not None and schedule != self._job.space.default:
                self.spilled += 1
                continue
            self._sit(schedule, build, exams)
        return [s for s in schedules if s in self.admitted]

    def sits_all(self, schedule: Schedule) -> bool:
        return self._sit(schedule, self.admitted[schedule].build, 0)

    def _sit(self, schedule: Schedule, build: Build, first: int) -> bool:
        try:
            verdict = self.seat.check(name_of(schedule), build, first)
        except LostError as lost:
            self.lost[schedule] = str(lost)
            return False
        self.admitted[schedule] = Admitted(build, verdict)
        return True

    def _build(self, schedule: Schedule) -> Build | None:
        try:
            return self._builder.build(schedule)
        except AttnError as error:
            self.lost[schedule] = error.diagnostics[0].message()
            return None


def to_the_end_s(job: Job, swept: Swept, plan: RacePlan, exam_s: float) -> float:
    """What it would take to examine every candidate and to time it until it is known to 0.5 %.

    Computed: a schedule that was timed takes what it took, an order what its tile took, and what
    was not tried at all as much longer than the default as is predicted.
    """
    default = job.space.default
    scale = swept.ms.get(default, 0.0) / max(1e-9, job.model.predict(default).us)
    total_ms = plan.warm_ms
    for schedule in job.space.candidates:
        ms = swept.ms.get(schedule) or swept.ms.get(schedule.without_order())
        ms = ms or scale * job.model.predict(schedule).us
        repeats = max(1, round(plan.sample_ms / max(ms, 1e-3)))
        total_ms += _ROUNDS * (repeats + 1) * ms
    count = len(job.space.candidates)
    return 1e-3 * total_ms + count * exam_s


def describe_lost(swept: Swept) -> dict[str, str]:
    return {describe(s): reason for s, reason in swept.lost.items()}
