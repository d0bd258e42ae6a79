"""Intervals contain what they promise to contain: every value, by enumeration and by sampling."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attngen.ir import interval
from attngen.ir.functions import FUNCTIONS
from attngen.ir.interval import ANY_FLOAT, FALSE, TRUE, UNKNOWN, Interval, point, rounded

INF = math.inf
FLOAT_MAX = float(np.finfo(np.float32).max)

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def holds(found: Interval, value: float) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return found.nan
    return bool(found.low <= value <= found.high)


# ---- integers: every value ---------------------------------------------------------------


@st.composite
def int_intervals(draw: st.DrawFn) -> Interval:
    low, high = sorted((draw(st.integers(-9, 9)), draw(st.integers(-9, 9))))
    return Interval(
        draw(st.sampled_from([low, low, low, -INF])), draw(st.sampled_from([high, high, high, INF]))
    )


def ints(a: Interval) -> range:
    """All integers of an interval, up to a distance."""
    low = -30 if a.low == -INF else int(a.low)
    high = 30 if a.high == INF else int(a.high)
    return range(low, high + 1)


def floor_divide(x: int, y: int) -> int:
    return x // y if y else 0


def modulo(x: int, y: int) -> int:
    return x % y if y else 0


BINARY: list[tuple[Callable[[Interval, Interval], Interval], Callable[[int, int], int]]] = [
    (interval.add, operator.add),
    (interval.subtract, operator.sub),
    (interval.multiply, operator.mul),
    (interval.floor_divide, floor_divide),
    (interval.modulo, modulo),
    (interval.minimum, min),
    (interval.maximum, max),
    (interval.hull, lambda x, y: x),
    (interval.hull, lambda x, y: y),
    (FUNCTIONS["min"].interval, min),
    (FUNCTIONS["max"].interval, max),
]


@pytest.mark.parametrize(("on_intervals", "on_values"), BINARY)
@given(a=int_intervals(), b=int_intervals())
def test_integer_operators(on_intervals: Any, on_values: Any, a: Interval, b: Interval) -> None:
    found = on_intervals(a, b)
    for x, y in product(ints(a), ints(b)):
        assert holds(found, on_values(x, y)), (x, y, found)


@given(a=int_intervals())
def test_negate_and_abs(a: Interval) -> None:
    for x in ints(a):
        assert holds(interval.negate(a), -x)
        assert holds(FUNCTIONS["abs"].interval(a), abs(x))


@given(a=int_intervals(), b=int_intervals(), c=int_intervals())
def test_clamp(a: Interval, b: Interval, c: Interval) -> None:
    found = FUNCTIONS["clamp"].interval(a, b, c)
    for x, y, z in product(ints(a)[::3], ints(b)[::3], ints(c)[::3]):
        assert holds(found, min(max(x, y), z))


@given(word=st.integers(-(2**63), 2**63 - 1), i=st.integers(-2, 70))
def test_bit(word: int, i: int) -> None:
    expected = 0 <= i < 64 and (word >> i) & 1
    for w, j in product((point(word), Interval(word, word + 5)), (point(i), Interval(i, i + 1))):
        assert holds(FUNCTIONS["bit"].interval(w, j), int(expected))


@pytest.mark.parametrize("op", COMPARE)
@given(a=int_intervals(), b=int_intervals())
def test_comparisons(op: str, a: Interval, b: Interval) -> None:
    found = interval.compare(op, a, b)
    assert found in (TRUE, FALSE, UNKNOWN)
    for x, y in product(ints(a), ints(b)):
        assert holds(found, int(COMPARE[op](x, y)))


def test_known_results_are_exact() -> None:
    assert interval.modulo(Interval(5, 7), point(8)) == Interval(5, 7)
    assert interval.modulo(Interval(-3, -1), point(8)) == Interval(5, 7)
    assert interval.modulo(Interval(0, 3), Interval(1, 100)) == Interval(0, 3)
    assert interval.floor_divide(Interval(-7, 7), point(2)) == Interval(-4, 3)
    assert interval.floor_divide(Interval(0, INF), point(64)).low == 0
    assert interval.multiply(Interval(-2, 3), Interval(-5, 7)) == Interval(-15, 21)
    assert interval.compare("<", Interval(0, 4), Interval(5, 9)) == TRUE
    assert interval.compare("==", point(4), point(4)) == TRUE
    assert interval.compare("!=", Interval(0, 4), Interval(5, 9)) == TRUE
    assert interval.compare(">=", Interval(0, 4), Interval(4, 9)) == UNKNOWN


def test_integers_of_any_size() -> None:
    large = point(10**60)
    assert interval.multiply(large, large) == point(10**120)
    assert interval.floor_divide(large, point(10**30)) == point(10**30)
    assert interval.add(large, Interval(-INF, INF)).high == INF
    assert rounded(large) == Interval(FLOAT_MAX, INF) or rounded(large).high == INF


# ---- three-valued logic ------------------------------------------------------------------

TRUTHS = {TRUE: {True}, FALSE: {False}, UNKNOWN: {True, False}}


def test_logic() -> None:
    for a, b in product(TRUTHS, TRUTHS):
        for x, y in product(TRUTHS[a], TRUTHS[b]):
            assert (x and y) in TRUTHS[interval.logical_and(a, b)]
            assert (x or y) in TRUTHS[interval.logical_or(a, b)]
            assert (not x) in TRUTHS[interval.logical_not(a)]
    assert interval.logical_and(FALSE, UNKNOWN) == FALSE
    assert interval.logical_or(TRUE, UNKNOWN) == TRUE


# ---- floats: samples, infinities and NaN -------------------------------------------------

FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, -1e-45, 1e-38, 1e38, -1e38, INF, -INF]),
    st.floats(width=32, allow_nan=False),
    st.floats(-100, 100, width=32),
    st.integers(-20, 20).map(float),
).map(lambda x: float(np.float32(x)))


@st.composite
def float_intervals(draw: st.DrawFn) -> tuple[Interval, list[np.float32]]:
    """An interval, and some float32 values that lie in it: its ends among them."""
    low, high = sorted((draw(FLOATS), draw(FLOATS)))
    inside = [low, high, *(min(max(draw(FLOATS), low), high) for _ in range(3))]
    inside += [x for x in (0.0, -0.0, INF, -INF) if low <= x <= high]
    has_nan = draw(st.sampled_from([False, False, True]))
    values = [np.float32(x) for x in inside] + [np.float32(math.nan)] * has_nan
    return Interval(low, high, has_nan), values


ARITHMETIC: list[tuple[Callable[[Interval, Interval], Interval], Any]] = [
    (interval.add, np.add),
    (interval.subtract, np.subtract),
    (interval.multiply, np.multiply),
    (interval.divide, np.divide),
    (interval.minimum, np.minimum),
    (interval.maximum, np.maximum),
]


@pytest.mark.parametrize(("on_intervals", "on_values"), ARITHMETIC)
@given(a=float_intervals(), b=float_intervals())
def test_float_operators(on_intervals: Any, on_values: Any, a: Any, b: Any) -> None:
    found = rounded(on_intervals(a[0], b[0]))
    with np.errstate(all="ignore"):
        for x, y in product(a[1], b[1]):
            assert holds(found, float(on_values(x, y))), (x, y, found)


@given(a=float_intervals(), b=float_intervals(), c=float_intervals())
def test_fused_multiply_add(a: Any, b: Any, c: Any) -> None:
    """The product is not rounded where the compiler fuses it with the addition."""
    found = rounded(interval.add(rounded(interval.multiply(a[0], b[0])), c[0]))
    with np.errstate(all="ignore"):
        for x, y, z in product(a[1][:4], b[1][:4], c[1][:4]):
            fused = np.float32(np.float64(x) * np.float64(y) + np.float64(z))
            assert holds(found, float(fused)), (x, y, z, found)


@pytest.mark.parametrize("op", COMPARE)
@given(a=float_intervals(), b=float_intervals())
def test_float_comparisons(op: str, a: Any, b: Any) -> None:
    found = interval.compare(op, a[0], b[0])
    for x, y in product(a[1], b[1]):
        assert holds(found, int(COMPARE[op](x, y)))


@pytest.mark.parametrize(
    "name",
    ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "abs", "floor"],
)
@given(a=float_intervals())
@example(a=(Interval(-0.0, 2.0**-148), [np.float32(2.0**-149)]))
@example(a=(Interval(2.0**-149, INF), [np.float32(2.0**-149), np.float32(INF)]))
def test_functions_of_a_float(name: str, a: Any) -> None:
    function = FUNCTIONS[name]
    found = function.interval(a[0])
    with np.errstate(all="ignore"):
        for x in a[1]:
            value = function.numpy(x)
            assert holds(found, int(value) if name == "floor" else float(value)), (x, found)


@given(a=float_intervals(), b=float_intervals())
def test_exp_difference(a: Any, b: Any) -> None:
    found = FUNCTIONS["exp_difference"].interval(a[0], b[0])
    with np.errstate(all="ignore"):
        for x, y in product(a[1], b[1]):
            value = float(FUNCTIONS["exp_difference"].numpy(x, y))
            assert holds(found, value), (x, y, found)


@given(st.integers(-(2**70), 2**70), st.integers(0, 100))
def test_integers_as_floats(low: int, width: int) -> None:
    found = rounded(Interval(low, low + width))
    for n in (low, low + width // 2, low + width):
        assert holds(found, float(np.float32(n)))


def test_rounding() -> None:
    assert rounded(Interval(1.0, 2.0)) == Interval(1.0, 2.0)
    assert rounded(Interval(1, 2)) == Interval(1, 2)
    assert rounded(point(0.1)).low < 0.1 < rounded(point(0.1)).high
    assert rounded(Interval(0.0, 1e39)).high == INF
    assert rounded(Interval(1e39, 1e39)).low >= FLOAT_MAX
    assert rounded(Interval(1e-42, 1.0)).low == 0.0
    assert rounded(Interval(-1.0, -1e-42)).high == 0.0
    assert rounded(ANY_FLOAT) == ANY_FLOAT
    assert rounded(Interval(-INF, INF), ulps=4) == Interval(-INF, INF)
    wide = rounded(Interval(1.0, 1.0), ulps=2)
    assert 1 - wide.low == pytest.approx(2 * 2.0**-23)


def test_points() -> None:
    assert point(True) == TRUE
    assert point(False) == FALSE
    assert point(math.nan) == ANY_FLOAT
    assert point(3).is_point
    assert not ANY_FLOAT.is_point
    assert Interval(1, 2).within(0, 3)
    assert not ANY_FLOAT.within(-INF, INF)
