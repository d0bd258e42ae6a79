"""Times of several peers that can be compared: interleaved, repeated until they are settled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, final

from attngen.bench.machines import Timer
from attngen.record import record

__all__ = ["Plan", "Times", "interval_of_median", "measure", "rotate", "summarize"]

_MIN_ROUNDS: Final = 9
_MAX_ROUNDS: Final = 60
_SAMPLE_MS: Final = 5.0
_TOLERANCE: Final = 0.005
"""Medians known to half a per cent each tell 2 % apart."""


@final
@record
class Plan:
    """How long to measure.

    sample_ms:  about how long one sample takes: as many calls in a row as fill it.
    tolerance:  half the width of the median's interval, relative to it, where rounds may end.
    """

    min_rounds: int = _MIN_ROUNDS
    max_rounds: int = _MAX_ROUNDS
    sample_ms: float = _SAMPLE_MS
    tolerance: float = _TOLERANCE


@final
@record
class Times:
    """Milliseconds of one call: the median, its 95 % interval, and the number of samples."""

    ms: float
    low_ms: float
    high_ms: float
    samples: int


def measure(timers: Mapping[str, Timer], plan: Plan) -> dict[str, Times]:
    """The times of each, from rounds in which each is sampled once, another one first each time.

    So a clock that falls while the GPU warms up is the same for all.
    """
    repeats = {n: max(1, round(plan.sample_ms / max(t(1), 1e-3))) for n, t in timers.items()}
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(plan.max_rounds):
        for name in rotate(tuple(timers), number):
            samples[name].append(timers[name](repeats[name]))
        if number + 1 >= plan.min_rounds and _are_settled(samples, plan.tolerance):
            break
    return {name: summarize(found) for name, found in samples.items()}


def rotate(names: Sequence[str], number: int) -> tuple[str, ...]:
    """The names in order, beginning with another one for each number."""
    first = number % len(names) if names else 0
    return (*names[first:], *names[:first])


def summarize(samples: Sequence[float]) -> Times:
    """Median and interval of the samples, which are at least one."""
    low, high = interval_of_median(samples)
    return Times(statistics.median(samples), low, high, len(samples))


def interval_of_median(samples: Sequence[float]) -> tuple[float, float]:
    """Between which samples the true median lies with at least 95 %; all of them below 6.

    Source:  order statistics; how many of n samples lie below the median is binomial.
    """
    ordered, n = sorted(samples), len(samples)
    outside, first = 0.0, -1
    while outside + math.comb(n, first + 1) / 2**n <= 0.025:
        first += 1
        outside += math.comb(n, first) / 2**n
    first = max(0, first)
    return ordered[first], ordered[n - 1 - first]


def _are_settled(samples: Mapping[str, Sequence[float]], tolerance: float) -> bool:
    each = (summarize(found) for found in samples.values())
    return all(t.high_ms - t.low_ms <= 2 * tolerance * t.ms for t in each)
