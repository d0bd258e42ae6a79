"""Times of several peers that can be compared: interleaved, repeated until they are settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

from attngen.bench.machines import Timer
from attngen.record import record
from attngen.tuning.timing import Times, rotate, summarize

__all__ = ["Plan", "Times", "measure"]

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


def _are_settled(samples: Mapping[str, Sequence[float]], tolerance: float) -> bool:
    each = (summarize(found) for found in samples.values())
    return all(t.high_ms - t.low_ms <= 2 * tolerance * t.ms for t in each)
