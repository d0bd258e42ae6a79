"""Find the fastest schedule for one call: rank, compile, check, race, and look beside the winner.

    space         every schedule that the families offer          space.py
    rank          by the cost model; the default always stays     cost_model.py
    compile       the first of them, and what is beside the default build.py
    check         against the oracle, a ragged call included      exam.py
    race          in turns; the beaten drop out                   timing.py
    look beside   where another tile leads: the tile in every order inside a step, and what differs
                  in one setting, are compiled, checked and raced, too
    final         between the default and the few that may replace it: longer

The default is in every race, as what all others are compared with, and it is the winner unless
another one is faster by more than 1 %, beyond doubt.

Whatever happens, what was measured is kept: at the end of the budget, after Ctrl-C, and when the
device is lost.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from enum import Enum
from typing import Final, Protocol, TypeAlias, final

from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.schedule import Schedule
from attngen.record import record
from attngen.tuning.build import Build, Builder
from attngen.tuning.cost_model import CostModel, Prediction
from attngen.tuning.errors import NothingTimed
from attngen.tuning.exam import Verdict
from attngen.tuning.space import Space, describe
from attngen.tuning.timing import LostError, Race, RacePlan, Timer, Times, scaled, summarize

__all__ = [
    "Discarded", "Findings", "Measured", "Plan", "Progress", "Search", "Stage", "Stand", "Tell",
    "name_of", "shortlist",
]  # fmt: skip

_TILES: Final = 6
"""So many tiles are tried at first.  In 46 of 48 recorded problems the fastest tile is that of the
default or among the first five that are predicted, and in two it is up to 2.3 % faster than the
default (docs/tuning.md)."""
_FAR: Final = 2.0
"""The best of each family is tried, since families are what the model compares worst; but none that
is predicted to take more than so many times the best."""
_NEAR: Final = 1.2
"""So is the best of each height, which the model compares no better, and others, where at most so
many times the best is predicted."""
_BESIDE: Final = 1.1
"""Neighbours are tried where at most so many times the time of the schedule is predicted."""
_USUAL_RACE: Final = RacePlan(max_rounds=20)
_FIRST_ROUNDS: Final = 12
"""The first race only says beside whom to look, and who is far behind; whoever is left runs again,
with what is beside the winner."""
_FINAL: Final = RacePlan(min_rounds=9, max_rounds=24, sample_ms=20.0, warm_ms=500.0)
_FINALISTS: Final = 4
_CLOSE: Final = 1.02
"""Finalists are those that may take at most so many times the fastest, and that are faster than the
default by half of what it takes to replace it."""
_FEWEST_ROUNDS: Final = 5
"""In a race that the budget ended sooner, nobody is judged who was in one before."""
_TIE: Final = 0.01
"""By how much another schedule has to be faster than the default."""
_LEADERS: Final = 2
_LEADING: Final = 1.02
"""So many tiles, within so many times the fastest, are tried in all orders inside a step, since the
orders of one tile are up to 7 % apart and nobody can predict them."""
_COMPILING, _RACING, _COMPILING_BESIDE, _RACING_BESIDE = 0.45, 0.6, 0.75, 0.85
"""Parts of the budget at which each step has to end."""


@final
@record(kw_only=True)
class Plan:
    """How much to try.

    most:       schedules that are compiled; `beside` of them once it is known who leads.
    takes_all:  compile every candidate instead, whatever is predicted.
    budget_s:   seconds for everything; None: as long as it takes.
    compilers:  threads that compile; None: one for each processor.
    final:      the last race; None: there is none.
    """

    most: int = 28
    beside: int = 12
    takes_all: bool = False
    budget_s: float | None = 60.0
    compilers: int | None = None
    race: RacePlan = _USUAL_RACE
    final: RacePlan | None = _FINAL


class Stage(Enum):
    """Where a schedule was left behind."""

    RESOURCES = "resources"
    """The family's formulas say that it does not fit."""
    MODEL = "model"
    """Others are predicted to be faster, and the plan has no room for it."""
    COMPILER = "compiler"
    """It does not compile, or its registers spill."""
    EXAM = "exam"
    """It computes something else, or does harm."""
    RACE = "race"
    """It did harm while it was timed."""
    BUDGET = "budget"
    """There was no time for it."""


@final
@record
class Discarded:
    """A schedule without a time, and why it has none."""

    schedule: Schedule
    stage: Stage
    reason: str


@final
@record(eq=False)
class Measured:
    """A right schedule and its time.

    times:   in the state of the GPU of the last race, by its ratio to the default (`timing.py`).
    ratio:   times of the reference, which is the default where that could be timed.
    remark:  why it dropped out of the race; None where it ran to the end.
    """

    build: Build
    verdict: Verdict
    times: Times
    ratio: Times
    remark: str | None

    @property
    def schedule(self) -> Schedule:
        return self.build.schedule


@final
@record(eq=False, kw_only=True)
class Findings:
    """What a search found, the fastest first; whoever was beaten stands behind all others.

    is_interrupted:  it was stopped by hand.
    failure:         why it ended early, where it did so by itself.
    """

    space: Space
    predictions: Mapping[Schedule, Prediction]
    measured: tuple[Measured, ...]
    discarded: tuple[Discarded, ...]
    mode: str
    seconds: float
    is_interrupted: bool = False
    failure: AttnError | None = None

    @property
    def best(self) -> Measured | None:
        """The default, unless another one is clearly faster."""
        default = self.default
        if default is None:
            return self.measured[0] if self.measured else None
        fastest = self.measured[0]
        is_clear = fastest.ratio.ms < 1 - _TIE and fastest.ratio.high_ms < 1
        return fastest if is_clear else default

    @property
    def default(self) -> Measured | None:
        """The schedule that runs where nothing is tuned; None where it has no time."""
        return next((m for m in self.measured if m.schedule == self.space.default), None)


@final
@record
class Progress:
    """How far a search is.

    spent:  part of the budget, 0 to 1; None where there is none.
    best:   the fastest schedule so far, and milliseconds.
    """

    doing: str
    spent: float | None
    best: tuple[Schedule, float] | None


Tell: TypeAlias = Callable[[Progress], None]


class Stand(Timer, Protocol):
    """Where candidates are checked and timed; `worker.Worker` is one."""

    @property
    def mode(self) -> str: ...

    def prepare(self) -> None:
        """Make ready what the first check needs; another thread may do so while others compile."""

    def check(self, name: str, build: Build) -> Verdict:
        """Errors:  LostError."""

    def close(self) -> None: ...


@final
class Search:
    """One search.  `findings` may be asked for at any time."""

    def __init__(
        self,
        name: str,
        space: Space,
        model: CostModel,
        builder: Builder,
        stand: Stand,
        plan: Plan | None = None,
        tell: Tell = lambda progress: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is the attention's, for errors."""
        self._name, self._space, self._builder, self._stand = name, space, builder, stand
        self._plan, self._tell, self._now = plan or Plan(), tell, now
        self._start = now()
        self._ranked = model.rank(space.candidates)
        self._admitted: dict[Schedule, tuple[Build, Verdict]] = {}
        self._discarded: dict[Schedule, Discarded] = {}
        self._races: list[Race] = []
        self._tried = 0

    def run(self) -> Findings:
        """Search until all is settled or the budget is used up.

        Errors:  A471 when no candidate is left.  What ends a search early and has a time already
                 is `Findings.failure`.
        """
        is_interrupted, failure = False, None
        try:
            self._search()
        except KeyboardInterrupt:
            is_interrupted = True
        except AttnError as error:
            if not any(race.samples for race in self._races):
                raise
            failure = error
        finally:
            self._stand.close()
        return self.findings(is_interrupted=is_interrupted, failure=failure)

    def findings(
        self, *, is_interrupted: bool = False, failure: AttnError | None = None
    ) -> Findings:
        """What is known by now."""
        measured = sorted(self._measured(), key=self._place)
        timed = {m.schedule for m in measured}
        reasons = {r.schedule: Discarded(r.schedule, Stage.RESOURCES, r.reason)
                   for r in self._space.rejected}  # fmt: skip
        for schedule, _ in self._ranked:
            if schedule not in timed:
                reasons[schedule] = self._discarded.get(schedule) or self._left_out(schedule)
        return Findings(
            space=self._space,
            predictions=dict(self._ranked),
            measured=tuple(measured),
            discarded=tuple(reasons.values()),
            mode=self._stand.mode,
            seconds=self._now() - self._start,
            is_interrupted=is_interrupted,
            failure=failure,
        )

    # ---- the steps ----

    def _search(self) -> None:
        plan, default = self._plan, self._space.default
        first = list(self._space.candidates)
        if not plan.takes_all:
            first = shortlist(self._ranked, default, plan.most - plan.beside)
        self._admit(first, until=_COMPILING)
        if not self._admitted:
            reasons = (f"{describe(d.schedule)}: {d.reason}" for d in self._discarded.values())
            device = self._space.target
            raise AttnError(NothingTimed(None, self._name, device, "; ".join(reasons)))
        rounds = min(_FIRST_ROUNDS, plan.race.max_rounds)
        first_race = replace(plan.race, max_rounds=rounds) if plan.beside else plan.race
        running = self._race(tuple(self._admitted), first_race, until=_RACING)
        beside = self._beside(running)[: plan.beside] if running else []
        self._admit(beside, until=_COMPILING_BESIDE)
        more = tuple(s for s in beside if s in self._admitted)
        if more:
            running = self._race((*running, *more), plan.race, until=_RACING_BESIDE)
        finalists = self._finalists(running)
        left_s = self._seconds_until(1.0)
        has_time = plan.final and (left_s is None or 1e3 * left_s > plan.final.warm_ms)
        if plan.final is not None and has_time and len(finalists) > 1:
            self._race(finalists, plan.final, until=1.0)

    def _admit(self, schedules: Sequence[Schedule], until: float) -> None:
        """Compile side by side, and check what is compiled meanwhile."""
        pool = ThreadPoolExecutor(1 + (self._plan.compilers or os.cpu_count() or 1))
        try:
            ready = pool.submit(self._stand.prepare)
            building = {pool.submit(self._builder.build, s): s for s in schedules}
            ready.result()
            for future, schedule in self._completed(building, until):
                self._say(f"compiled and checked {self._tried} of {len(self._wanted(schedules))}")
                self._examine(schedule, future)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _wanted(self, schedules: Sequence[Schedule]) -> set[Schedule]:
        return {*schedules, *self._admitted, *self._discarded}

    def _completed(
        self, building: Mapping[Future[Build], Schedule], until: float
    ) -> Iterator[tuple[Future[Build], Schedule]]:
        """What is compiled, as it comes; the default is waited for, whatever the time."""
        default, left = self._space.default, set(building)
        while left:
            limit = self._seconds_until(until)
            if any(building[future] == default for future in left):
                limit = None
            elif limit is not None and limit <= 0:
                break
            done, _ = wait(left, limit, FIRST_COMPLETED)
            if not done:
                break
            future = min(done, key=lambda f: building[f] != default)
            left.remove(future)
            yield future, building[future]
        for future in left:
            reason = "the search ended before it was compiled"
            self._discard(building[future], Stage.BUDGET, reason)

    def _examine(self, schedule: Schedule, future: Future[Build]) -> None:
        self._tried += 1
        try:
            build = future.result()
        except AttnError as error:
            self._discard(schedule, Stage.COMPILER, error.diagnostics[0].message())
            return
        is_default = schedule == self._space.default
        if build.reason_against is not None and not is_default:
            self._discard(schedule, Stage.COMPILER, build.reason_against)
            return
        try:
            verdict = self._stand.check(name_of(schedule), build)
        except LostError as lost:
            self._discard(schedule, Stage.EXAM, str(lost))
            return
        self._admitted[schedule] = build, verdict

    def _race(
        self, schedules: Sequence[Schedule], plan: RacePlan, until: float
    ) -> tuple[Schedule, ...]:
        """Time them; those that are left, the fastest first."""
        by_name = {name_of(schedule): schedule for schedule in schedules}
        race = Race(self._stand, tuple(by_name), plan, reference=name_of(self._space.default))
        self._races.append(race)
        said = -1
        for number in race.rounds():
            if number > said:  # to say who leads takes as long as a short sample
                self._say(f"round {number + 1} of the race, {len(race.running)} left")
                said = number
            limit = self._seconds_until(until)
            if limit is not None and limit <= 0 and race.samples:
                break
        timed = [name for name in race.running if race.samples.get(name)]
        timed.sort(key=lambda name: race.ratio(name).ms)
        return tuple(by_name[name] for name in timed)

    def _finalists(self, running: Sequence[Schedule]) -> tuple[Schedule, ...]:
        """The default, and the few that may replace it, by the race that came last."""
        if not running:
            return ()
        race, default = self._races[-1], self._space.default
        found = {schedule: race.ratio(name_of(schedule)) for schedule in running}
        most = _CLOSE * found[running[0]].ms
        hopeful = 1 - _TIE / 2 if default in found else math.inf
        close = [
            s for s in running if s != default and found[s].low_ms <= most and found[s].ms < hopeful
        ]
        kept = [default] if default in found else []
        return (*kept, *close[: _FINALISTS - len(kept)])

    def _beside(self, running: Sequence[Schedule]) -> list[Schedule]:
        """What else to try, once somebody leads: all orders inside a step of the tile that leads,
        what is beside it, and the orders of other tiles that are as fast but for their order."""
        known, race, winner = self._wanted(()), self._races[-1], running[0]
        most = _LEADING * race.ratio(name_of(winner)).ms
        near = [s for s in running if race.ratio(name_of(s)).ms <= most]
        tiles = dict.fromkeys(s.without_order() for s in near)
        wanted: dict[Schedule, None] = {}
        for tile in list(tiles)[:_LEADERS]:
            wanted |= dict.fromkeys(s for s, _ in self._ranked if s.without_order() == tile)
            if tile == winner.without_order():
                default = self._space.default  # beside which the first were chosen already
                centre = default if _is_same_tile(winner, default) else winner
                wanted |= dict.fromkeys(neighbours(self._ranked, centre))
        return [s for s in wanted if s not in known]

    # ---- what is known ----

    def _measured(self) -> Iterator[Measured]:
        for schedule, (build, verdict) in self._admitted.items():
            name = name_of(schedule)
            if any(race.samples.get(name) for race in self._races):
                ratio = self._ratio(name)
                times = scaled(ratio, self._reference_ms(self._last_race(name)))
                out = next((r.outs[name] for r in self._races if name in r.outs), None)
                yield Measured(build, verdict, times, ratio, out)

    def _ratio(self, name: str) -> Times:
        """Times of the reference, through who beat it or led its last race; see `timing.py`."""
        race = self._last_race(name)
        other = race.beaten_by.get(name, race.leader)
        if other is None or other == name or race.reference in (name, other):
            return race.ratio(name)
        return scaled(race.ratio_to(name, other), self._ratio(other).ms)

    def _last_race(self, name: str) -> Race:
        """The last that says enough about a candidate, in which it met the best."""
        races = [race for race in self._races if race.samples.get(name)]
        enough = [race for race in races if len(race.samples[name]) >= _FEWEST_ROUNDS]
        return (enough or races)[-1]

    def _place(self, one: Measured) -> tuple[bool, int, float]:
        """Sorts finalists first, then who was not beaten, then all others."""
        race = self._last_race(name_of(one.schedule))
        return one.remark is not None, -self._races.index(race), one.times.ms

    def _reference_ms(self, race: Race) -> float:
        """Of a race's reference, as it was timed last."""
        name = race.reference
        assert name is not None
        last = next(r for r in reversed(self._races) if r.samples.get(name))
        return summarize(last.samples[name]).ms

    def _left_out(self, schedule: Schedule) -> Discarded:
        for race in self._races:
            if (reason := race.outs.get(name_of(schedule))) is not None:
                return Discarded(schedule, Stage.RACE, reason)
        if schedule in self._admitted:
            return Discarded(schedule, Stage.BUDGET, "the search ended before it was timed")
        times = dict(self._ranked)
        ratio = times[schedule].us / max(self._ranked[0][1].us, 1e-9)
        reason = f"predicted to take {ratio:.2f} times the best prediction"
        return Discarded(schedule, Stage.MODEL, reason)

    def _discard(self, schedule: Schedule, stage: Stage, reason: str) -> None:
        self._discarded[schedule] = Discarded(schedule, stage, reason)

    def _seconds_until(self, share: float) -> float | None:
        """Seconds until a part of the budget is used up; None where there is no end."""
        if self._plan.budget_s is None:
            return None
        return self._start + share * self._plan.budget_s - self._now()

    def _say(self, doing: str) -> None:
        best = None
        if self._races and (leader := self._races[-1].leader) is not None:
            by_name = {name_of(schedule): schedule for schedule in self._admitted}
            best = by_name[leader], self._races[-1].times(leader).ms
        budget_s = self._plan.budget_s
        spent = None if budget_s is None else (self._now() - self._start) / max(budget_s, 1e-9)
        self._tell(Progress(doing, spent if spent is None else min(1.0, spent), best))


def shortlist(
    ranked: Sequence[tuple[Schedule, Prediction]], default: Schedule, most: int
) -> list[Schedule]:
    """The schedules to compile at once: the default, the best of each family and of each height,
    then the best, and what is beside the default: its tile in all orders inside a step, and its
    neighbours.

    Of those that differ in what the model does not see, only the first is among the best.
    """
    best_us = ranked[0][1].us if ranked else 0.0
    chosen: dict[Schedule, None] = {default: None}
    distinct: dict[object, tuple[Schedule, Prediction]] = {}
    for schedule, prediction in ranked:
        distinct.setdefault(_seen_by_model(schedule), (schedule, prediction))
    kinds: set[tuple[object, ...]] = set()
    for schedule, prediction in distinct.values():
        for kind, most_us in (
            ((schedule.kernel,), _FAR * best_us),
            ((schedule.kernel, schedule.tile_q), _NEAR * best_us),
        ):
            if kind not in kinds and prediction.us <= most_us:
                kinds.add(kind)
                chosen[schedule] = None
    for schedule, prediction in distinct.values():
        if len(chosen) >= _TILES or prediction.us > _NEAR * best_us:
            break
        chosen[schedule] = None
    tile = default.without_order()
    chosen |= dict.fromkeys(s for s, _ in ranked if s.without_order() == tile)
    chosen |= dict.fromkeys(neighbours(ranked, default))
    return list(chosen)[: max(1, most)]


def neighbours(ranked: Sequence[tuple[Schedule, Prediction]], schedule: Schedule) -> list[Schedule]:
    """What differs from a schedule in one setting, and by one step of it, the best first; without
    what is predicted to be slower than it by more than the model errs between such two."""
    steps = _steps(s for s, _ in ranked)
    usual_us = next((p.us for s, p in ranked if s == schedule), math.inf)
    return [s for s, p in ranked if p.us <= _BESIDE * usual_us and _is_beside(s, schedule, steps)]


def _seen_by_model(schedule: Schedule) -> tuple[object, ...]:
    is_ahead = schedule.stages is not None and schedule.stages > 1
    return schedule.kernel, schedule.tile_q, schedule.tile_kv, schedule.warps, is_ahead


_SETTINGS: Final = tuple(f.name for f in fields(Schedule))
_FOLLOWING: Final = frozenset({"warps"})
"""What is not counted as a difference of its own: it follows from the rows of a tile."""


def _is_same_tile(one: Schedule, other: Schedule) -> bool:
    names = ("kernel", "tile_q", "tile_kv")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _steps(schedules: Iterable[Schedule]) -> dict[str, list[int]]:
    """The values that each number takes, ascending."""
    found: dict[str, set[int]] = {name: set() for name in _SETTINGS}
    for schedule in schedules:
        for name in _SETTINGS:
            value = getattr(schedule, name)
            if isinstance(value, int):
                found[name].add(value)
    return {name: sorted(values) for name, values in found.items()}


def _is_beside(one: Schedule, other: Schedule, steps: Mapping[str, list[int]]) -> bool:
    differing = [n for n in _SETTINGS if getattr(one, n) != getattr(other, n)]
    counted = [n for n in differing if n not in _FOLLOWING] or differing
    if len(counted) != 1:
        return False
    a, b = (getattr(each, counted[0]) for each in (one, other))
    if not isinstance(a, int) or not isinstance(b, int):
        return False
    values = steps[counted[0]]
    return abs(values.index(a) - values.index(b)) == 1


def name_of(schedule: Schedule) -> str:
    """Names a candidate: every setting, so that no two have one name."""
    return " ".join(str(getattr(schedule, name)) for name in _SETTINGS)
