"""Which functions of the score lines may take their shortest forms, from what their errors cost.

    softcap(s, 30.0)    tanh errs by 2^-21, the score by 30 times that: short
    softcap(s, 1e6)     the score would err by 1/2: tanh keeps its series near 0

Weights are rounded to 16 bits, which costs them a relative error of up to u (2^-8 for bf16, 2^-11
for fp16).  An error of e in the score is one of e in the weight; the short forms of a variant may
bring in u / 8 together.  An error's way into the score is bounded by analysis/sensitivity.py.
Where log-sum-exp is an output, which has no rounding to hide them, less is left for them.

    1.0 - r(t) * exp(-x * x)    what the short exponential makes 0 is below 2^-126 and lost in 1.0

Any exponential from a score is a quick one; the short form errs no more than that, but makes
numbers below 2^-126 zero.  Behind a sum with a constant nobody can tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from attngen.analysis.sensitivity import Reach, find_reach
from attngen.ir.attention import Attention
from attngen.ir.expr import Binary, BinaryOp, Call, Const, Expr, Let, Negate
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder

__all__ = ["ERRORS", "SHARE", "find_short_calls"]

SHARE: Final = 2.0**-3
"""Of the rounding unit of the weights: what the short forms may cost."""

LEFT_BESIDE_LSE: Final = 2.0**-16
"""What they may cost where log-sum-exp is an output, whose bound is 2^-20 and more.  The bounds of
errors here are about 8 times what is found: softcap(s, 50.0) has 2.4e-5, and its lse errs by 3e-6.
"""

_LARGE: Final = 2.0**-40
_SMALL: Final = _LARGE * 2.0**-26
"""A number of at least the one does not change with a sum with less than the other."""


def _of_tanh(x: Interval) -> float:
    """2 / (1 + 2^t) - 1, t = -2 x log2(e): errors of the power, the sum and the reciprocal."""
    return 2.0**-21


def _of_power(scale: float) -> Callable[[Interval], float]:
    """2^t, t = x scale: 2^-22 of it, and what t does, which errs by 2^-23 with its factor."""

    def error(x: Interval) -> float:
        if x.nan or x.high > 80.0:
            return math.inf
        # 2^t |t| is largest at t = -1 / ln 2 below 0, where it is 0.54, and grows above 0.
        top = math.exp2(x.high * scale)
        return top * 2.0**-22 + max(0.54, top * x.high * scale) * 2.0**-23

    return error


def _of_logarithm(scale: float) -> Callable[[Interval], float]:
    """log2(x) scale: 2^-22 for x between 1/2 and 2, else 2^-22 of it; 2^-24 more for the factor."""

    def error(x: Interval) -> float:
        largest = 149.0  # below 0 it is NaN in either form
        if not x.nan and x.low > 0 and x.high < math.inf:
            largest = max(1.0, abs(math.log2(x.low)), abs(math.log2(x.high)))
        return scale * largest * (2.0**-22 + 2.0**-24)

    return error


ERRORS: Final[Mapping[str, Callable[[Interval], float]]] = {
    "tanh": _of_tanh,
    "exp": _of_power(math.log2(math.e)),
    "exp2": _of_power(1.0),
    "log": _of_logarithm(math.log(2.0)),
    "log2": _of_logarithm(1.0),
}
"""The largest absolute error of a short form, for operands in an interval."""


def find_short_calls(attention: Attention) -> Mapping[int, Interval]:
    """The calls that may be short, by id, and what their operands can be."""
    calls: list[Call] = []
    for node in postorder(*attention.scores):
        if isinstance(node, Call) and node.function in ERRORS:
            calls.append(node)
    if not calls or attention.dtype is None:
        return {}
    reach = find_reach(attention)
    left = attention.dtype.unit * SHARE
    if "lse" in attention.outputs:
        left = min(left, LEFT_BESIDE_LSE)
    users = _find_users(attention)
    short: dict[int, Interval] = {}
    for node in calls:
        operand = reach.values[id(node.arguments[0])]
        if node.function in ("exp", "exp2") and _is_lost(node, reach, users):
            short[id(node)] = operand
            continue
        slope = reach.slope[id(node)]
        error = slope * ERRORS[node.function](operand) if slope else 0.0
        if error <= left:
            left -= error
            short[id(node)] = operand
    return short


def _find_users(attention: Attention) -> dict[int, list[Expr]]:
    """Who takes each node of the score lines, by its id."""
    users: dict[int, list[Expr]] = {}
    for node in postorder(*attention.scores):
        for child in children(node):
            users.setdefault(id(child), []).append(node)
    return users


def _is_lost(node: Expr, reach: Reach, users: Mapping[int, list[Expr]]) -> bool:
    """Whether a value below 2^-126 changes no sum that it gets into."""
    stack = [(node, 2.0**-126)]
    while stack:
        below, size = stack.pop()
        if not users.get(id(below)):
            return False  # the line itself
        for user in users[id(below)]:
            match user:
                case Let() | Negate():
                    stack.append((user, size))
                case Binary(BinaryOp.MUL, left, right) if left is not right:
                    factor = reach.values[id(right if left is below else left)]
                    largest = max(abs(factor.low), abs(factor.high))
                    if factor.nan or size * largest > _SMALL:
                        return False
                    stack.append((user, size * largest))
                case Binary(BinaryOp.ADD | BinaryOp.SUB, Const(float(c)), _) if abs(c) >= _LARGE:
                    pass
                case Binary(BinaryOp.ADD | BinaryOp.SUB, _, Const(float(c))) if abs(c) >= _LARGE:
                    pass
                case _:
                    return False
    return True
