"""The builtin functions: everything there is to know about each, in one place.

A `Function` holds its NumPy value, its interval, the largest error of its CUDA form, the
CUDA function that computes it and its derivative.  The language's names are those of
`LANGUAGE`; the rest appears only in the formulas of the row state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.ir import interval
from attngen.ir.expr import Binary, BinaryOp, Call, Compare, CompareOp, Const, Expr, Negate, Select
from attngen.ir.interval import ANY_FLOAT, FALSE, TRUE, UNKNOWN, Interval
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = ["FUNCTIONS", "LANGUAGE", "Function", "Signature", "call"]

Array: TypeAlias = Any
INT, FLOAT, BOOL = ScalarType.INT, ScalarType.FLOAT, ScalarType.BOOL


@final
@record
class Signature:
    """Argument and result types.  `argument` None: all int or all float, and the result alike."""

    count: tuple[int, int | None]
    argument: ScalarType | None
    result: ScalarType | None


@final
@record
class Function:
    """One builtin function.

    `numpy` maps arrays to an array (float32 stays float32, integers are int64); `interval`
    maps intervals to an interval; `ulps` bounds the CUDA form's error in units in the last
    place of a float32 (CUDA C++ Programming Guide, "Mathematical Functions"); `cuda` names
    the device function; `derivative` gives one partial derivative per argument, None where
    the function is piecewise constant; `quick` names a device function of
    `templates/common/mma.cuh` for scores of 16-bit elements, where there is one.
    """

    name: str
    signature: Signature
    numpy: Callable[..., Array]
    interval: Callable[..., Interval]
    ulps: int
    cuda: str
    derivative: Callable[..., tuple[Expr, ...]] | None
    summary: str
    quick: str | None = None


def call(name: str, *arguments: Expr) -> Call:
    """A call of a builtin whose arguments already have the right types."""
    from attngen.ir.expr import expr_type

    result = FUNCTIONS[name].signature.result
    return Call(name, arguments, expr_type(arguments[0]) if result is None else result)


# ---- shorthand for the derivatives -------------------------------------------------------


def _mul(a: Expr, b: Expr) -> Expr:
    return Binary(BinaryOp.MUL, a, b)


def _div(a: Expr, b: Expr) -> Expr:
    return Binary(BinaryOp.DIV, a, b)


def _sub(a: Expr, b: Expr) -> Expr:
    return Binary(BinaryOp.SUB, a, b)


def _number(x: float) -> Expr:
    return Const(x)


def _if_less(a: Expr, b: Expr, then: float, otherwise: float) -> Expr:
    return Select(Compare(CompareOp.LT, a, b), Const(then), Const(otherwise))


# ---- intervals of monotone functions -----------------------------------------------------


_ULPS: Final = 8
"""More than the largest error of a device function below, in units in the last place."""


def _increasing(
    f: Callable[[float], float],
    low: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> Callable[[Interval], Interval]:
    """The interval of a function that increases from `low` on, with values in [least, most].

    Left of `low` the result is unknown.
    """

    def image(a: Interval) -> Interval:
        if a.nan or a.low < low:
            return ANY_FLOAT
        result = interval.rounded(Interval(_apply(f, a.low), _apply(f, a.high)), _ULPS)
        return Interval(max(result.low, least), min(result.high, most))

    return image


def _apply(f: Callable[[float], float], x: float) -> float:
    try:
        return f(float(x))
    except OverflowError:
        return math.inf
    except ValueError:  # log(0)
        return -math.inf


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


def _rsqrt_interval(a: Interval) -> Interval:
    if a.nan or a.low <= 0:
        return ANY_FLOAT
    result = interval.rounded(Interval(1.0 / math.sqrt(a.high), 1.0 / math.sqrt(a.low)), _ULPS)
    return Interval(max(result.low, 0.0), result.high)


def _abs_interval(a: Interval) -> Interval:
    if a.low >= 0:
        return a
    return Interval(0 if a.high >= 0 else -a.high, max(-a.low, a.high), a.nan)


def _floor_interval(a: Interval) -> Interval:
    limit = 2**63
    if a.nan:
        return Interval(-limit, limit - 1)
    low = -limit if a.low <= -limit else math.floor(a.low) if a.low < limit else limit - 1
    high = limit - 1 if a.high >= limit else math.floor(a.high) if a.high > -limit else -limit
    return Interval(low, high)


def _bit_interval(word: Interval, i: Interval) -> Interval:
    if word.is_point and i.is_point and 0 <= i.low < 64:
        return TRUE if (int(word.low) >> int(i.low)) & 1 else FALSE
    return UNKNOWN


def _fold(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A function of two operands, applied from the left to any number."""

    def folded(*operands: Any) -> Any:
        result = operands[0]
        for operand in operands[1:]:
            result = f(result, operand)
        return result

    return folded


# ---- NumPy values where NumPy has no function of its own ----------------------------------


def _np_floor(x: Array) -> Array:
    y = np.floor(np.asarray(x, np.float64))
    y = np.where(np.isnan(y), 0.0, np.clip(y, -(2.0**63), 2.0**63))
    too_large = y >= 2.0**63
    return np.where(too_large, np.int64(2**63 - 1), np.where(too_large, 0.0, y).astype(np.int64))


def _np_sigmoid(x: Array) -> Array:
    one = np.float32(1)
    return one / (one + np.exp(-x))


def _np_bit(word: Array, i: Array) -> Array:
    inside = (i >= 0) & (i < 64)
    return inside & (((word >> np.where(inside, i, 0)) & 1) == 1)


def _np_exp_difference(a: Array, b: Array) -> Array:
    dead = np.isneginf(a)
    return np.where(dead, np.float32(0), np.exp(np.where(dead, np.float32(0), a - b)))


_ONE_FLOAT = Signature((1, 1), FLOAT, FLOAT)

_ALL: tuple[Function, ...] = (
    Function(
        "exp", _ONE_FLOAT, np.exp, _increasing(math.exp, least=0.0), 2, "ag_exp",
        lambda x: (call("exp", x),), "e to the x",
    ),
    Function(
        "exp2", _ONE_FLOAT, np.exp2, _increasing(lambda x: 2.0**x, least=0.0), 2, "ag_exp2",
        lambda x: (_mul(call("exp2", x), _number(math.log(2.0))),), "2 to the x",
    ),
    Function(
        "log", _ONE_FLOAT, np.log, _increasing(math.log, low=0.0), 1, "ag_log",
        lambda x: (_div(_number(1.0), x),), "natural logarithm",
    ),
    Function(
        "log2", _ONE_FLOAT, np.log2, _increasing(math.log2, low=0.0), 1, "ag_log2",
        lambda x: (_div(_number(1.0 / math.log(2.0)), x),), "logarithm to the base 2",
    ),
    Function(
        "sqrt", _ONE_FLOAT, np.sqrt, _increasing(math.sqrt, low=0.0, least=0.0), 0, "ag_sqrt",
        lambda x: (_div(_number(0.5), call("sqrt", x)),), "square root",
    ),
    Function(
        "rsqrt", _ONE_FLOAT, lambda x: np.float32(1) / np.sqrt(x), _rsqrt_interval, 2, "ag_rsqrt",
        lambda x: (_div(_number(-0.5), _mul(x, call("sqrt", x))),), "1 / sqrt(x)",
    ),
    Function(
        "tanh", _ONE_FLOAT, np.tanh, _increasing(math.tanh, least=-1.0, most=1.0), 2, "ag_tanh",
        lambda x: (_sub(_number(1.0), _mul(call("tanh", x), call("tanh", x))),),
        "hyperbolic tangent", "ag_tanh_quick",
    ),
    Function(
        "sigmoid", _ONE_FLOAT, _np_sigmoid, _increasing(_sigmoid, least=0.0, most=1.0), 4,
        "ag_sigmoid",
        lambda x: (_mul(call("sigmoid", x), _sub(_number(1.0), call("sigmoid", x))),),
        "1 / (1 + exp(-x))", "ag_sigmoid_quick",
    ),
    Function(
        "floor", Signature((1, 1), FLOAT, INT), _np_floor, _floor_interval, 0, "ag_floor_to_int",
        None, "largest integer not above x, as an integer",
    ),
    Function(
        "abs", Signature((1, 1), None, None), np.abs, _abs_interval, 0, "ag_abs",
        lambda x: (_if_less(x, _number(0.0), -1.0, 1.0),), "absolute value",
    ),
    Function(
        "min", Signature((2, None), None, None), _fold(np.minimum), _fold(interval.minimum), 0,
        "ag_min",
        lambda a, b: (_if_less(b, a, 0.0, 1.0), _if_less(b, a, 1.0, 0.0)), "the smallest",
    ),
    Function(
        "max", Signature((2, None), None, None), _fold(np.maximum), _fold(interval.maximum), 0,
        "ag_max",
        lambda a, b: (_if_less(a, b, 0.0, 1.0), _if_less(a, b, 1.0, 0.0)), "the largest",
    ),
    Function(
        "clamp", Signature((3, 3), None, None),
        lambda x, low, high: np.minimum(np.maximum(x, low), high),
        lambda x, low, high: interval.minimum(interval.maximum(x, low), high), 0, "ag_clamp",
        lambda x, low, high: (
            Select(Compare(CompareOp.LT, x, low), Const(0.0), _if_less(high, x, 0.0, 1.0)),
            _if_less(x, low, 1.0, 0.0),
            _if_less(high, x, 1.0, 0.0),
        ),
        "x, but at least low and at most high",
    ),
    Function(
        "bit", Signature((2, 2), INT, BOOL), _np_bit, _bit_interval, 0, "ag_bit",
        None, "whether bit i of the word is set (false outside 0..63)",
    ),
    Function(
        "exp_difference", Signature((2, 2), FLOAT, FLOAT), _np_exp_difference,
        lambda a, b: _increasing(math.exp, least=0.0)(interval.rounded(interval.subtract(a, b))),
        2, "ag_exp_difference",
        lambda a, b: (call("exp_difference", a, b), Negate(call("exp_difference", a, b))),
        "exp(a - b), and 0 when a is -inf",
    ),
)  # fmt: skip

FUNCTIONS: Final[dict[str, Function]] = {f.name: f for f in _ALL}
LANGUAGE: Final[tuple[str, ...]] = (*(f.name for f in _ALL if f.name != "exp_difference"), "where")
"""The function names of the language; `where` is the node `Select`."""
