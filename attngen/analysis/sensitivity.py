"""How much the final score of a pair can change with each value that its score lines compute.

    score 30.0 * tanh(s / 30.0)      tanh(…): 30    s / 30.0: 30    s: 1
    score s * sigmoid(s)             sigmoid(…): infinite, for s has no bound

The score's derivative by a value is a sum over the ways from the value up to the score; on each
way it is a product of derivatives, of which intervals give bounds.  So an error of a value, times
this number, is at most the error that it brings into the score.
"""

from __future__ import annotations

import math
from typing import Final, final

from attngen.analysis.ranges import Ranges, compile_time_ranges, infer_ranges
from attngen.ir import interval
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Expr,
    Let,
    Negate,
    Role,
    Select,
    Symbol,
    expr_type,
)
from attngen.ir.functions import FUNCTIONS
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = ["Reach", "find_reach"]

_ANY_NUMBER: Final = Interval(-(2.0**127), 2.0**127)
"""A score before the score lines: NaN and infinity have no error."""


@final
@record(eq=False)
class Reach:
    """What is known of the float nodes of the score lines, by their ids.

    slope:   the most by which the final score can change with the value.
    values:  what the value can be.
    """

    slope: dict[int, float]
    values: dict[int, Interval]


def find_reach(attention: Attention) -> Reach:
    """Bounds for all nodes of the score lines."""
    names: Ranges = {**compile_time_ranges(attention), "s": _ANY_NUMBER}
    lines: list[_Line] = []
    for line in attention.scores:
        lines.append(_Line(line, names, infer_ranges((line,), names, attention)))
        names = {**names, "s": lines[-1].values[id(line)]}
    reach = Reach({}, {})
    slope = 1.0  # of what the line gives
    for one in reversed(lines):
        line, found = one.score, one.values
        slopes = _slopes(one, slope, attention)
        slope = 0.0
        for node in postorder(line):
            if isinstance(node, Symbol) and node.role is Role.SCORE:
                slope += slopes[id(node)]
            before = reach.values.get(id(node), found[id(node)])
            reach.values[id(node)] = interval.hull(before, found[id(node)])
            reach.slope[id(node)] = reach.slope.get(id(node), 0.0) + slopes[id(node)]
    return reach


@final
@record(eq=False)
class _Line:
    """A score line, the ranges of its names, and those of its nodes."""

    score: Expr
    names: Ranges
    values: dict[int, Interval]


def _slopes(line: _Line, of_line: float, attention: Attention) -> dict[int, float]:
    """The slope of each node of a line, from that of the line's value."""
    nodes = tuple(postorder(line.score))
    slopes = dict.fromkeys(map(id, nodes), 0.0)
    slopes[id(line.score)] = of_line
    for node in reversed(nodes):
        slope = slopes[id(node)]
        if slope == 0.0:
            continue
        for child, steepest in zip(
            children(node), _derivatives(node, line, attention), strict=True
        ):
            slopes[id(child)] += slope * steepest if steepest else 0.0
    return slopes


def _derivatives(node: Expr, line: _Line, attention: Attention) -> tuple[float, ...]:
    """Bounds of a node's derivatives by its operands; infinite where it may jump."""
    values = line.values
    match node:
        case Let() | Negate():
            return (1.0,)
        case Binary(BinaryOp.ADD | BinaryOp.SUB):
            return (1.0, 1.0)
        case Binary(BinaryOp.MUL, left, right):
            return (_size(values[id(right)]), _size(values[id(left)]))
        case Binary(BinaryOp.DIV, left, right):
            inverse = 1.0 / least if (least := _least(values[id(right)])) else math.inf
            return (inverse, _size(values[id(left)]) * inverse * inverse)
        case Select():
            return (_jump(node.condition), 1.0, 1.0)
        case Call(name, arguments):
            derivative = FUNCTIONS[name].derivative
            if name in ("min", "max", "clamp", "abs"):
                return (1.0,) * len(arguments)
            if derivative is None or expr_type(node) is not ScalarType.FLOAT:
                return tuple(_jump(a) for a in arguments)
            by_operand = derivative(*arguments)
            found = infer_ranges(by_operand, line.names, attention)
            return tuple(_size(found[id(d)]) for d in by_operand)
        case _:
            return tuple(_jump(child) for child in children(node))


def _jump(operand: Expr) -> float:
    """What depends on a float by more than its size: no error of it is small."""
    is_exact = expr_type(operand) is not ScalarType.FLOAT and not any(
        expr_type(n) is ScalarType.FLOAT for n in postorder(operand)
    )
    return 0.0 if is_exact else math.inf


def _size(a: Interval) -> float:
    return math.inf if a.nan else max(abs(float(a.low)), abs(float(a.high)))


def _least(a: Interval) -> float:
    return 0.0 if a.nan or a.low <= 0 <= a.high else min(abs(float(a.low)), abs(float(a.high)))
