"""Times that can be compared: candidates take turns, and whoever is beaten drops out.

    round 1   a b c d
    round 2   b c d a      another one is first each time
    round 3   c d a        b took 1.3 times as long as the fastest, twice: it is out

A clock that falls while the GPU warms up is the same for all of a round, so candidates are
compared within rounds.  How a sample is taken is not said here: a `Timer` may ask a GPU, another
process, or a file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol, final

from attngen.record import record

__all__ = [
    "LostError", "Race", "RacePlan", "ReplayTimer", "Timer", "Times", "interval_of_median",
    "rotate", "summarize",
]  # fmt: skip


@final
@record
class Times:
    """Milliseconds of one call: the median, its 95 % interval, and the number of samples."""

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
    tolerance:  half the width of the median's interval, relative to it, where rounds may end.
    drops:      whether the beaten drop out.
    """

    min_rounds: int = 9
    max_rounds: int = 40
    sample_ms: float = 3.0
    tolerance: float = 0.005
    drops: bool = True


@final
class Race:
    """Candidates timed side by side.  It may be stopped between any two samples.

    kept:     never drop out for being slow.
    samples:  milliseconds of one call, of those that were timed, by name, one for each round.
    outs:     why a candidate is out, by name.
    """

    def __init__(
        self, timer: Timer, names: Sequence[str], plan: RacePlan, *, kept: Collection[str] = ()
    ) -> None:
        self.samples: dict[str, list[float]] = {}
        self.outs: dict[str, str] = {}
        self._timer = timer
        self._names = tuple(names)
        self._plan = plan
        self._kept = frozenset(kept)
        self._repeats: dict[str, int] = {}

    @property
    def running(self) -> tuple[str, ...]:
        """Those that are not out, in the order given."""
        return tuple(name for name in self._names if name not in self.outs)

    @property
    def leader(self) -> str | None:
        """The fastest of those that are timed and not out."""
        timed = [name for name in self.running if self.samples.get(name)]
        return min(timed, key=lambda name: statistics.median(self.samples[name]), default=None)

    def rounds(self) -> Iterator[int]:
        """Measure, and say after each sample in which round it was, until all is settled."""
        for number in range(self._plan.max_rounds):
            for name in rotate(self.running, number):
                self._sample(name)
                yield number
            if self._plan.drops:
                self._drop_beaten()
            if not self.running or (number + 1 >= self._plan.min_rounds and self._is_settled()):
                return

    def _sample(self, name: str) -> None:
        try:
            if name not in self._repeats:
                first_ms = self._timer.sample(name, 1)
                self._repeats[name] = max(1, round(self._plan.sample_ms / max(first_ms, 1e-3)))
            ms = self._timer.sample(name, self._repeats[name])
        except LostError as lost:
            self.outs[name] = str(lost)
        else:
            self.samples.setdefault(name, []).append(ms)

    def _drop_beaten(self) -> None:
        leader = self.leader
        for name in self.running:
            if leader is None or name == leader or name in self._kept:
                continue
            slower = self._slower_by(name, leader)
            if slower > 0:
                median = statistics.median(self.samples[name])
                ratio = median / statistics.median(self.samples[leader])
                rounds = len(self.samples[name])
                self.outs[name] = f"beaten after {rounds} rounds: {ratio:.2f} times the fastest"

    def _slower_by(self, name: str, leader: str) -> float:
        """By how much it is slower than the leader beyond doubt; not above 0 where there is doubt.

        The fewer rounds, the more has to lie between them: one sample may be disturbed.
        """
        pairs = list(zip(self.samples[name], self.samples[leader], strict=False))
        if len(pairs) < 2:
            return 0.0
        low, _ = interval_of_median([a / b for a, b in pairs])
        return low - 1 - max(self._plan.tolerance, 0.5 ** len(pairs))

    def _is_settled(self) -> bool:
        each = (summarize(self.samples[name]) for name in self.running)
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
