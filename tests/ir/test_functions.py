"""Each builtin function: its value, its types, its derivative and its error bound agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from expressions import param

from attngen.ir.expr import Const, Expr, expr_type
from attngen.ir.functions import FUNCTIONS, LANGUAGE, call
from attngen.ir.semantics import evaluate
from attngen.ir.types import ScalarType

FLOAT, INT, BOOL = ScalarType.FLOAT, ScalarType.INT, ScalarType.BOOL

# name, points away from kinks and poles
SMOOTH: dict[str, list[tuple[float, ...]]] = {
    "exp": [(-3.0,), (0.0,), (0.5,), (4.0,)],
    "exp2": [(-3.0,), (0.0,), (0.5,), (7.0,)],
    "log": [(0.1,), (1.0,), (30.0,)],
    "log2": [(0.1,), (1.0,), (30.0,)],
    "sqrt": [(0.1,), (1.0,), (30.0,)],
    "rsqrt": [(0.1,), (1.0,), (30.0,)],
    "tanh": [(-2.0,), (0.0,), (0.3,), (3.0,)],
    "sigmoid": [(-5.0,), (0.0,), (0.3,), (5.0,)],
    "abs": [(-2.0,), (3.0,)],
    "min": [(1.0, 2.0), (2.0, 1.0), (-3.0, 4.0)],
    "max": [(1.0, 2.0), (2.0, 1.0), (-3.0, 4.0)],
    "clamp": [(0.5, -1.0, 1.0), (-2.0, -1.0, 1.0), (2.0, -1.0, 1.0)],
    "exp_difference": [(1.0, 2.0), (-3.0, 0.5)],
}
EXACT: dict[str, Any] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "abs": abs,
    "min": min,
    "max": max,
    "clamp": lambda x, low, high: min(max(x, low), high),
    "exp_difference": lambda a, b: math.exp(a - b),
}


def value(e: Expr, point: tuple[float, ...]) -> float:
    symbols = {name: np.float32(x) for name, x in zip("xyz", point, strict=False)}
    return float(evaluate(e, symbols, {}).data)


def arguments(name: str) -> tuple[Expr, ...]:
    return tuple(param(x) for x in "xyz"[: len(SMOOTH[name][0])])


def test_every_function_is_tested() -> None:
    assert set(SMOOTH) | {"floor", "bit"} == set(FUNCTIONS)
    assert {n for n, f in FUNCTIONS.items() if f.derivative is None} == {"floor", "bit"}
    assert set(LANGUAGE) == set(FUNCTIONS) - {"exp_difference"} | {"where"}
    assert all(name == f.name and f.summary for name, f in FUNCTIONS.items())
    assert len({f.cuda for f in FUNCTIONS.values()}) == len(FUNCTIONS)


@pytest.mark.parametrize("name", SMOOTH)
def test_values(name: str) -> None:
    for point in SMOOTH[name]:
        found = value(call(name, *arguments(name)), point)
        assert found == pytest.approx(EXACT[name](*point), rel=4e-7, abs=1e-7)


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives(name: str) -> None:
    """Against central differences of the exact function in float64."""
    derivative = FUNCTIONS[name].derivative
    assert derivative is not None
    parts = derivative(*arguments(name))
    assert len(parts) == len(arguments(name))
    for point in SMOOTH[name]:
        for i, part in enumerate(parts):
            assert expr_type(part) is FLOAT
            step = 1e-5
            up, down = list(point), list(point)
            up[i] += step
            down[i] -= step
            expected = (EXACT[name](*up) - EXACT[name](*down)) / (2 * step)
            assert value(part, point) == pytest.approx(expected, rel=1e-4, abs=1e-5)


# ---- types -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes(name: str) -> None:
    """float32 stays float32, an integer result is int64, a truth value bool."""
    signature = FUNCTIONS[name].signature
    least, most = signature.count
    kinds = [signature.argument] if signature.argument is not None else [INT, FLOAT]
    for kind in kinds:
        for count in {least, most or least + 2}:
            dtype = np.int64 if kind is INT else np.float32
            operands = [np.array([1, 2, 3], dtype) for _ in range(count)]
            scalars = [dtype(2) for _ in range(count)]
            expected = signature.result or kind
            for data in (operands, scalars, [operands[0], *scalars[1:]]):
                found = np.asarray(FUNCTIONS[name].numpy(*data))
                wanted = {INT: np.int64, FLOAT: np.float32, BOOL: np.bool_}[expected]
                assert found.dtype == wanted, (name, kind)


def test_call_knows_the_result_type() -> None:
    assert call("exp", param("x")).type is FLOAT
    assert call("floor", param("x")).type is INT
    assert call("min", Const(1), Const(2)).type is INT
    assert call("max", Const(1.0), Const(2.0)).type is FLOAT
    assert call("bit", Const(1), Const(2)).type is BOOL


# ---- corners -----------------------------------------------------------------------------


def at(name: str, *operands: Any) -> Any:
    with np.errstate(all="ignore"):
        return FUNCTIONS[name].numpy(*operands)


def test_infinities_and_nan() -> None:
    inf, nan, zero = np.float32(np.inf), np.float32(np.nan), np.float32(0)
    assert at("exp", -inf) == 0
    assert at("exp2", inf) == inf
    assert at("log", zero) == -inf
    assert np.isnan(at("log", np.float32(-1)))
    assert at("rsqrt", zero) == inf
    assert at("tanh", inf) == 1
    assert at("sigmoid", -inf) == 0
    assert at("sigmoid", inf) == 1
    assert at("sigmoid", np.float32(-1e30)) == 0
    assert np.isnan(at("max", nan, zero))
    assert np.isnan(at("min", zero, nan))
    assert np.isnan(at("clamp", nan, zero, inf))
    assert at("exp_difference", -inf, -inf) == 0
    assert at("exp_difference", -inf, zero) == 0
    assert at("exp_difference", zero, -inf) == inf


def test_floor() -> None:
    x = np.float32([-2.5, -0.0, 0.99, 2.0, 1e30, -1e30, np.inf, -np.inf, np.nan])
    low, high = -(2**63), 2**63 - 1
    assert at("floor", x).tolist() == [-3, 0, 0, 2, high, low, high, low, 0]


def test_bit() -> None:
    word = np.int64(-(2**63) + 5)
    expected = {0: True, 1: False, 2: True, 62: False, 63: True, 64: False, -1: False}
    for i, is_set in expected.items():
        assert bool(at("bit", word, np.int64(i))) is is_set


@pytest.mark.parametrize("name", [n for n in SMOOTH if FUNCTIONS[n].ulps])
def test_the_interval_allows_for_the_stated_error(name: str) -> None:
    """A result that is off by the stated `ulps` still lies in the function's interval."""
    function = FUNCTIONS[name]
    from attngen.ir.interval import point as exactly

    for values in SMOOTH[name]:
        exact = EXACT[name](*(float(np.float32(x)) for x in values))
        found = function.interval(*(exactly(float(np.float32(x))) for x in values))
        error = function.ulps * np.spacing(np.float32(abs(exact)))
        bounded = name in ("tanh", "sigmoid", "exp", "exp2")
        assert found.low <= exact - error or (bounded and found.low in (0.0, -1.0))
        assert found.high >= exact + error or (bounded and found.high == 1.0)
