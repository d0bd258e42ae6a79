"""Intervals: what is known about a value before it is computed.

An `Interval` contains every value that the expression can take (sound, never exact by
promise).  Integer bounds are Python integers of any size; open ends are ±inf.  A truth
value is an interval in {0, 1}, which is three-valued logic: [0, 0] false, [1, 1] true,
[0, 1] unknown.  `nan` says that a float may be NaN, which makes every comparison unknown.

The operations here are those of exact arithmetic.  A float expression rounds each result to
float32, so an analysis passes the interval of every float node through `rounded`.

Source: R. E. Moore, Interval Analysis, 1966, chapter 2.
"""

from __future__ import annotations

import math
import struct
from typing import Final, TypeAlias, final

from attngen.record import record

__all__ = [
    "ANY_FLOAT",
    "FALSE",
    "TRUE",
    "UNKNOWN",
    "Interval",
    "Number",
    "add",
    "compare",
    "divide",
    "floor_divide",
    "hull",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "minimum",
    "modulo",
    "multiply",
    "negate",
    "point",
    "rounded",
    "subtract",
]

Number: TypeAlias = int | float
_INF: Final = math.inf


@final
@record
class Interval:
    """All values `x` with `low <= x <= high`, and NaN when `nan`."""

    low: Number
    high: Number
    nan: bool = False

    @property
    def is_point(self) -> bool:
        return self.low == self.high and not self.nan

    @property
    def ends(self) -> tuple[Number, Number]:
        return self.low, self.high

    def within(self, low: Number, high: Number) -> bool:
        """Every value lies in [low, high]."""
        return low <= self.low and self.high <= high and not self.nan


TRUE: Final = Interval(1, 1)
FALSE: Final = Interval(0, 0)
UNKNOWN: Final = Interval(0, 1)
ANY_FLOAT: Final = Interval(-_INF, _INF, nan=True)


def point(value: bool | int | float) -> Interval:
    """The interval of one known value."""
    if isinstance(value, float) and math.isnan(value):
        return ANY_FLOAT
    return Interval(int(value), int(value)) if isinstance(value, bool) else Interval(value, value)


def hull(a: Interval, b: Interval) -> Interval:
    """The smallest interval that contains both."""
    return Interval(min(a.low, b.low), max(a.high, b.high), a.nan or b.nan)


def negate(a: Interval) -> Interval:
    return Interval(-a.high, -a.low, a.nan)


def add(a: Interval, b: Interval) -> Interval:
    opposite = _INF in (a.high, b.high) and -_INF in (a.low, b.low)  # inf - inf is NaN
    nan = a.nan or b.nan or opposite
    return Interval(_sum(a.low, b.low, -_INF), _sum(a.high, b.high, _INF), nan)


def subtract(a: Interval, b: Interval) -> Interval:
    return add(a, negate(b))


def multiply(a: Interval, b: Interval) -> Interval:
    corners = [_product(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    infinite_times_zero = (_is_unbounded(a) and b.low <= 0 <= b.high) or (
        _is_unbounded(b) and a.low <= 0 <= a.high
    )
    return Interval(min(corners), max(corners), a.nan or b.nan or infinite_times_zero)


def divide(a: Interval, b: Interval) -> Interval:
    """Real division; unknown when the divisor may be 0 or anything may be infinite."""
    if b.low <= 0 <= b.high or _is_unbounded(a) or _is_unbounded(b) or a.nan or b.nan:
        return ANY_FLOAT
    corners = [x / y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(corners), max(corners))


def floor_divide(a: Interval, b: Interval) -> Interval:
    """Floor division; by 0 it gives 0, as everywhere in the language."""
    if b.low <= 0 <= b.high:
        reach = max(abs(a.low), abs(a.high))  # |a // b| <= |a| for |b| >= 1, and -1 // n is -1
        return Interval(-reach, reach)
    corners = [_floor_quotient(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(corners), max(corners))


def modulo(a: Interval, b: Interval) -> Interval:
    """Remainder of floor division: between 0 and the divisor; 0 for divisor 0."""
    if b.low > 0:
        if a.is_point and b.is_point and not _is_unbounded(a):
            return point(a.low % b.low)
        if b.is_point and not _is_unbounded(a) and a.low // b.low == a.high // b.low:
            return Interval(a.low % b.low, a.high % b.low)
        high = b.high - 1 if a.low < 0 else min(b.high - 1, a.high)
        return Interval(0, high)
    return Interval(min(0, b.low + 1), max(0, b.high - 1))


def minimum(a: Interval, b: Interval) -> Interval:
    """NaN when an operand is NaN."""
    return Interval(min(a.low, b.low), min(a.high, b.high), a.nan or b.nan)


def maximum(a: Interval, b: Interval) -> Interval:
    """NaN when an operand is NaN."""
    return Interval(max(a.low, b.low), max(a.high, b.high), a.nan or b.nan)


def rounded(a: Interval, ulps: int = 0) -> Interval:
    """What a float32 result can be when the exact value, give or take `ulps`, lies in `a`.

    Contains the exact value too (a fused multiply-add skips one rounding), overflow to
    infinity, and subnormal results flushed to zero.
    """
    low, high = -_round_up(-_to_double(a.low), ulps), _round_up(_to_double(a.high), ulps)
    return Interval(low, high, a.nan)


def compare(op: str, a: Interval, b: Interval) -> Interval:
    """Three-valued `<`, `<=`, `==`, `!=`, `>=`, `>`."""
    match op:
        case "<":
            always, never = a.high < b.low, a.low >= b.high
        case "<=":
            always, never = a.high <= b.low, a.low > b.high
        case ">" | ">=":
            return compare("<" if op == ">" else "<=", b, a)
        case "==":
            always = a.is_point and b.is_point and a.low == b.low
            never = a.high < b.low or b.high < a.low
        case _:
            return logical_not(compare("==", a, b))
    if a.nan or b.nan:
        return UNKNOWN
    return TRUE if always else FALSE if never else UNKNOWN


def logical_not(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def logical_and(*operands: Interval) -> Interval:
    return Interval(min(a.low for a in operands), min(a.high for a in operands))


def logical_or(*operands: Interval) -> Interval:
    return Interval(max(a.low for a in operands), max(a.high for a in operands))


# ---- corners with infinite ends ----------------------------------------------------------


def _is_unbounded(a: Interval) -> bool:
    return abs(a.low) == _INF or abs(a.high) == _INF


def _sum(a: Number, b: Number, when_undefined: Number) -> Number:
    if abs(a) == _INF and abs(b) == _INF:
        return a if a == b else when_undefined
    if abs(a) == _INF or abs(b) == _INF:
        return a if abs(a) == _INF else b
    return a + b


def _product(a: Number, b: Number) -> Number:
    if a == 0 or b == 0:
        return 0
    if abs(a) == _INF or abs(b) == _INF:
        return _INF if (a > 0) == (b > 0) else -_INF
    return a * b


def _floor_quotient(a: Number, b: Number) -> Number:
    if abs(a) == _INF:
        return a if b > 0 else -a
    if abs(b) == _INF:
        return 0 if (a >= 0) == (b > 0) else -1
    return a // b


_SMALLEST_NORMAL: Final = 2.0**-126


def _to_double(x: Number) -> float:
    try:
        return float(x)
    except OverflowError:
        return _INF if x > 0 else -_INF


def _to_float32(x: float) -> float:
    try:
        (result,) = struct.unpack("f", struct.pack("f", x))
        return float(result)
    except OverflowError:
        return math.copysign(_INF, x)


def _round_up(x: float, ulps: int) -> float:
    """The largest float32 that a result with the exact value `x` can be."""
    if ulps and math.isfinite(x):
        x += ulps * (abs(x) * 2.0**-23 + 2.0**-149)
    nearest = _to_float32(x)
    if nearest != x:
        x = max(nearest, math.nextafter(x, _INF))
    return 0.0 if -_SMALLEST_NORMAL < x < 0 else x
