"""A score line near 0 as a polynomial, where a sigmoid would cost an exponential and a reciprocal.

    score softcap(s, 30.0)    60 sigmoid2(s / 5.2) - 30 anywhere: two of the slowest instructions
    |s| <= 8.6                60 (1/2 + s (c0 + c1 s^2 + c2 s^4)) - 30: four products

Most scores are small beside a cap.  A warp asks once a step whether all of its scores are, and
takes the polynomial then.  Pairs that do not attend have no say, so no value depends on them.

The polynomial is the function's Chebyshev series up to its last term, which errs by a few
hundredths more than the best polynomial of that degree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

from attngen.record import record

__all__ = ["ENOUGH", "ERROR", "MOST_TERMS", "NearScore", "find_near"]

ERROR: Final = 2.0**-24
"""Of the polynomial beside its rounding.  The quick sigmoid errs by 2^-22, but seldom; this errs
by as much at many places, and log-sum-exp would show it."""

MOST_TERMS: Final = 4
ENOUGH: Final = 8.0
"""Scores up to this should be near, or it is no use: those of normal q and k, scaled as usual,
hardly reach 6."""

_NODES: Final = 64
_LEAST: Final = 2.0**-100
"""Coefficients below this might leave float32's normal numbers on their way."""


@final
@record
class NearScore:
    """sigmoid2 of a score for |q.k| up to `limit`: 1/2 + x (c0 + c1 x^2 + ...), x = q.k."""

    limit: float
    coefficients: tuple[float, ...]


def find_near(power: float, scale: float) -> NearScore | None:
    """1 / (1 + 2^-(q.k scale power)) near 0; None where few scores are there."""
    for terms in range(2, MOST_TERMS + 1):
        reach = _find_reach(terms)
        steep = power * scale
        odd = _fit(reach, terms)
        coefficients = tuple(c * steep ** (2 * i + 1) for i, c in enumerate(odd))
        if reach / abs(power) >= ENOUGH and min(map(abs, coefficients)) >= _LEAST:
            return NearScore(_round_down(reach / abs(steep)), coefficients)
    return None


def _round_down(x: float) -> float:
    """Three digits of a number above 0."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 2)
    return math.floor(x / unit) * unit


def _sigmoid2(x: float) -> float:
    """1 / (1 + 2^-x) - 1/2, which is odd."""
    return math.tanh(x * math.log(2.0) / 2.0) / 2.0


def _find_reach(terms: int) -> float:
    """How far from 0 so many terms err by at most ERROR."""
    low, high = 0.0, 8.0
    for _ in range(20):
        middle = (low + high) / 2.0
        if _error(_fit(middle, terms), middle) <= ERROR:
            low = middle
        else:
            high = middle
    return low


def _fit(reach: float, terms: int) -> tuple[float, ...]:
    """Coefficients of x, x^3, ... for |x| up to `reach`, from the series in T1, T3, ..."""
    turns = [math.pi * (i + 0.5) / _NODES for i in range(_NODES)]
    values = [_sigmoid2(reach * math.cos(turn)) for turn in turns]
    sums = [0.0] * (2 * terms)
    before, now = [1.0], [0.0, 1.0]  # T0, T1: coefficients of 1, t, t^2, ...
    for k in range(1, 2 * terms):
        if k % 2:
            along = zip(values, turns, strict=True)
            weight = sum(value * math.cos(k * turn) for value, turn in along) * 2.0 / _NODES
            for i, c in enumerate(now):
                sums[i] += weight * c
        doubled = [0.0, *(2.0 * c for c in now)]
        shorter = [*before, *[0.0] * (len(doubled) - len(before))]
        before, now = now, [a - b for a, b in zip(doubled, shorter, strict=True)]
    return tuple(c / reach**i for i, c in enumerate(sums) if i % 2)


def _error(odd: Sequence[float], reach: float) -> float:
    """The largest error on the way from 0 to `reach`."""
    worst = 0.0
    for i in range(_NODES + 1):
        x = reach * math.sin(math.pi / 2.0 * i / _NODES)  # closer where the error turns faster
        found = 0.0
        for c in reversed(odd):
            found = found * x * x + c
        worst = max(worst, abs(found * x - _sigmoid2(x)))
    return worst
