"""Times that can be compared: candidates take turns, and whoever is beaten drops out.

    warm up   a a a a …   the reference alone, until the clock has come down
    round 1   a b c d
    round 2   b c d a     another one is first each time
    round 3   c d a       b took 1.3 times as long as the fastest, twice: it is out

**One clock for all of a round.**  A GPU under load is held at its limit of power, and its clock
follows power and temperature.  On an H200 the same kernel took 0.43 and 0.49 ms within a minute.
Who drops out after four rounds was timed at the first clock, who stays for forty at the last one;
their medians say nothing about each other, and a beaten candidate once was named the fastest, by
samples that came from before the clock fell.  So a candidate is known by its *ratio*: in each round
its sample is divided by that of the reference, which is in all rounds of all races, and the median
of these is kept.  What a round's clock does to both cancels.  A time is the ratio times the
reference's median in the race that came last.

**Beaten by whom.**  Who dropped out after six rounds has six ratios, in which the reference may
have met the slower clock by chance; the leader has forty.  So whoever did not lead a race is known
by its ratio to who beat it, or to who led at the end, in the rounds of both, times the ratio of
that one: what was beaten is recorded as slower than what it was beaten by.

**Warm first.**  Ratios do not cancel all of it: who waits for memory loses less by a low clock than
who computes, so candidates have to be compared in the state that long use brings about.  The
limit of power acts within tenths of a second, so 0.3 s of load come before a race that only
sorts out the slow, and 0.5 s more before the last one, which follows at once; what the heat sink
does afterwards takes minutes, and is the same for all of a round.  (Estimates; `benchmarks.tuning`
records how far times still drift.)

**How many rounds.**  One sample in 28 of 5 ms strays by about 0.8 % of the median
(benchmarks/results/2026-11-30-h200-6.jsonl: an interval of ±0.3 %), a ratio of two by 1.1 %, and
the median of n ratios by 1.25 · 1.1 % / √n.  To tell 1 % apart with 95 % takes
n ≥ (1.96 · 1.25 · 1.1)² = 8 rounds, and ±0.5 % takes 29.  The last race has samples of 20 ms, which
stray less, 9 to 24 rounds of at most four candidates, and ends when each ratio is known to ±0.5 %:
4 · 9 · 21 ms = 0.8 s, 2 s at most.

How a sample is taken is not said here: a `Timer` may ask a GPU, another process, or a file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, final

from attngen.record import record

__all__ = [
    "LostError", "Race", "RacePlan", "ReplayTimer", "Timer", "Times", "interval_of_median",
    "rotate", "scaled", "summarize",
]  # fmt: skip


_AROUND: Final = 2
"""Rounds before and after one, in which the clock hardly changes."""


@final
@record
class Times:
    """Milliseconds of one call: the median, its 95 % interval, and the number of samples.

    Or the same of a ratio, without a unit.
    """

    ms: float
    low_ms: float
    high_ms: float
    samples: int


class LostError(Exception):
    """A candidate that cannot be timed any further; the text says why."""


class Timer(Protocol):
    def sample(self, name: str, repeats: int) -> float:
        """Milliseconds of one call of a candidate: so many in a row, after one that is not timed.

        Errors:  LostError, after which this candidate is not asked for again.
        """


@final
@record
class RacePlan:
    """How long to measure.

    sample_ms:  about how long one sample takes: as many calls in a row as fill it.
    warm_ms:    how long the reference runs before the first round.
    tolerance:  half the width of a ratio's interval where rounds may end.
    drops:      whether the beaten drop out.
    hopeless:   who takes so many times as long as the fastest in its first two launches drops out
                at once.  A falling clock makes that no more than 1.2 times.
    """

    min_rounds: int = 9
    max_rounds: int = 40
    sample_ms: float = 3.0
    warm_ms: float = 300.0
    tolerance: float = 0.005
    drops: bool = True
    hopeless: float | None = None


@final
class Race:
    """Candidates timed side by side.  It may be stopped between any two samples.

    reference:  what the others are compared with; it never drops out for being slow.
    samples:    milliseconds of one call, of those that were timed, by name, one for each round.
    outs:       why a candidate is out, by name.
    beaten_by:  who led when one dropped out for being slower, by name.
    firsts:     milliseconds of the faster of two launches, of those that dropped out after them.
    """

    def __init__(
        self,
        timer: Timer,
        names: Sequence[str],
        plan: RacePlan,
        *,
        reference: str | None = None,
    ) -> None:
        """Without a reference, or where it is lost at once, the first that is timed is one."""
        self.samples: dict[str, list[float]] = {}
        self.outs: dict[str, str] = {}
        self.beaten_by: dict[str, str] = {}
        self.firsts: dict[str, float] = {}
        self._timer = timer
        self._names = tuple(names)
        self._plan = plan
        self._reference = reference
        self._repeats: dict[str, int] = {}
        self._least_ms = math.inf

    @property
    def running(self) -> tuple[str, ...]:
        """Those that are not out, in the order given."""
        return tuple(name for name in self._names if name not in self.outs)

    @property
    def reference(self) -> str | None:
        """What ratios are relative to; None before anything is timed."""
        if self._reference in self.samples and self._reference not in self.outs:
            return self._reference
        return max(
            (name for name in self._names if name in self.samples),
            key=lambda name: len(self.samples[name]),
            default=None,
        )

    @property
    def leader(self) -> str | None:
        """The fastest of those that are timed and not out."""
        timed = [name for name in self.running if self.samples.get(name)]
        return min(timed, key=lambda name: statistics.median(self._ratios(name)), default=None)

    def ratio(self, name: str) -> Times:
        """How many times as long as the reference it takes, in rounds that both were in.

        Of the reference itself, how far it strays from its neighbours in time.
        """
        return summarize(self._ratios(name))

    def ratio_to(self, name: str, other: str) -> Times:
        """The same to another one than the reference."""
        return summarize(self._pairs(name, other))

    def times(self, name: str) -> Times:
        """The ratio in milliseconds of the reference's median."""
        assert self.reference is not None
        return scaled(self.ratio(name), statistics.median(self.samples[self.reference]))

    def rounds(self) -> Iterator[int]:
        """Measure, and say after each sample in which round it was, until all is settled."""
        self._warm_up()
        for number in range(self._plan.max_rounds):
            for name in rotate(self.running, number):
                self._sample(name)
                yield number
            if self._plan.drops:
                self._drop_beaten()
            if not self.running or (number + 1 >= self._plan.min_rounds and self._is_settled()):
                return

    def _warm_up(self) -> None:
        """Load without a gap, as long as planned."""
        first = self._names[:1] if self._reference not in self._names else (self._reference,)
        for name in first:
            if self._plan.warm_ms <= 0 or name is None:
                return
            try:
                ms = self._timer.sample(name, 1)
                self._timer.sample(name, max(1, round(self._plan.warm_ms / max(ms, 1e-3))))
            except LostError as lost:
                self.outs[name] = str(lost)

    def _sample(self, name: str) -> None:
        try:
            if name not in self._repeats:
                first_ms = self._timer.sample(name, 1)
                if self._is_hopeless(name, first_ms):
                    return
                self._repeats[name] = max(1, round(self._plan.sample_ms / max(first_ms, 1e-3)))
            ms = self._timer.sample(name, self._repeats[name])
        except LostError as lost:
            self.outs[name] = str(lost)
        else:
            self.samples.setdefault(name, []).append(ms)

    def _is_hopeless(self, name: str, first_ms: float) -> bool:
        """Whether it is out by its first two launches; a single one may be disturbed."""
        limit = self._plan.hopeless
        if limit is not None and first_ms > limit * self._least_ms and name != self._reference:
            first_ms = min(first_ms, self._timer.sample(name, 1))
            if first_ms > limit * self._least_ms:
                self.firsts[name] = first_ms
                ratio = first_ms / self._least_ms
                self.outs[name] = f"beaten in its first launches: {ratio:.2f} times the fastest"
                return True
        self._least_ms = min(self._least_ms, first_ms)
        return False

    def _ratios(self, name: str) -> list[float]:
        """One for each round that it and the reference were in."""
        reference = self.reference
        assert reference is not None
        samples = self.samples[name]
        if name == reference:
            nearby = [
                ms / statistics.median(samples[max(0, i - _AROUND) : i + _AROUND + 1])
                for i, ms in enumerate(samples)
            ]
            middle = statistics.median(nearby)
            return [ratio / middle for ratio in nearby]
        pairs = zip(samples, self.samples[reference], strict=False)
        return [ms / of_reference for ms, of_reference in pairs]

    def _drop_beaten(self) -> None:
        leader = self.leader
        for name in self.running:
            if leader is None or name in (leader, self._reference):
                continue
            slower = self._slower_by(name, leader)
            if slower > 0:
                ratio = statistics.median(self._pairs(name, leader))
                rounds = len(self.samples[name])
                self.outs[name] = f"beaten after {rounds} rounds: {ratio:.2f} times the fastest"
                self.beaten_by[name] = leader

    def _slower_by(self, name: str, leader: str) -> float:
        """By how much it is slower than the leader beyond doubt; not above 0 where there is doubt.

        The fewer rounds, the more has to lie between them: one sample may be disturbed.
        """
        pairs = self._pairs(name, leader)
        if len(pairs) < 2:
            return 0.0
        low, _ = interval_of_median(pairs)
        return low - 1 - max(self._plan.tolerance, 0.5 ** len(pairs))

    def _pairs(self, name: str, leader: str) -> list[float]:
        pairs = zip(self.samples[name], self.samples[leader], strict=False)
        return [a / b for a, b in pairs]

    def _is_settled(self) -> bool:
        each = (self.ratio(name) for name in self.running)
        return all(t.high_ms - t.low_ms <= 2 * self._plan.tolerance * t.ms for t in each)


@final
class ReplayTimer:
    """Times from records, low, median and high in turn; nothing runs."""

    def __init__(self, times: Mapping[str, Times]) -> None:
        self._times = dict(times)
        self._asked: dict[str, int] = {}

    def add(self, name: str, times: Times) -> None:
        """One more candidate."""
        self._times[name] = times

    def sample(self, name: str, repeats: int) -> float:
        found = self._times.get(name)
        if found is None:
            raise LostError("there is no recorded time of it")
        number = self._asked[name] = self._asked.get(name, 0) + 1
        return (found.ms, found.low_ms, found.high_ms)[number % 3]


def rotate(names: Sequence[str], number: int) -> tuple[str, ...]:
    """The names in order, beginning with another one for each number."""
    first = number % len(names) if names else 0
    return (*names[first:], *names[:first])


def scaled(times: Times, factor: float) -> Times:
    """All of it so many times as long."""
    return Times(factor * times.ms, factor * times.low_ms, factor * times.high_ms, times.samples)


def summarize(samples: Sequence[float]) -> Times:
    """Median and interval of the samples, which are at least one."""
    low, high = interval_of_median(samples)
    return Times(statistics.median(samples), low, high, len(samples))


_DOUBT: Final = 0.05


def interval_of_median(samples: Sequence[float]) -> tuple[float, float]:
    """Between which samples the true median lies with at least 95 %; all of them below 6.

    Source:  order statistics; how many of n samples lie below the median is binomial.
    """
    ordered, n = sorted(samples), len(samples)
    outside, first = 0.0, -1
    while outside + math.comb(n, first + 1) / 2**n <= _DOUBT / 2:
        first += 1
        outside += math.comb(n, first) / 2**n
    first = max(0, first)
    return ordered[first], ordered[n - 1 - first]
