"""Which values an expression can take, before anything runs: intervals from declared ranges.

At compile time sizes are any length below 2^31 and params whatever their declaration
allows; at launch the same walk runs again over the real sizes and params.  The code
generator takes 32 bits where the compile-time interval proves it and 64 bits otherwise, so
only what exceeds 64 bits is left for the launch to reject.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias, assert_never

from attngen.ir import interval
from attngen.ir.attention import SIZES, Attention, Param
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    LogicalOp,
    Negate,
    Not,
    Select,
    Symbol,
    ToFloat,
    expr_type,
)
from attngen.ir.functions import FUNCTIONS
from attngen.ir.interval import ANY_FLOAT, UNKNOWN, Interval
from attngen.ir.traverse import children, postorder
from attngen.ir.types import Element, ScalarType

__all__ = [
    "INT32",
    "INT64",
    "Ranges",
    "compile_time_ranges",
    "exceeding_int64",
    "infer_ranges",
    "launch_ranges",
    "range_of_work",
]

Ranges: TypeAlias = Mapping[str, Interval]
"""The interval of each symbol, by name."""

INT32: Final = Interval(-(2**31), 2**31 - 1)
INT64: Final = Interval(-(2**63), 2**63 - 1)
_KV: Final = ("kv", "kv_first", "kv_last")
_QPOS: Final = ("qpos", "qpos_first", "qpos_last")
LONGEST: Final = 2**31 - 1
"""Lengths, batch and head counts stay below 2^31."""
_FAR: Final = 2**128
"""Farther than this from 0 an integer's bound is not known: a chain of squares would double its
digits with every step."""


def compile_time_ranges(attention: Attention) -> Ranges:
    """Symbol ranges that hold for every legal launch."""
    size = Interval(0, LONGEST)
    index = Interval(0, LONGEST - 1)
    ranges = dict.fromkeys((*SIZES, *attention.named_sizes), size)
    ranges |= dict.fromkeys(("b", "h", "hkv", "q", "kv"), index)
    ranges["qpos"] = Interval(-LONGEST, LONGEST - 1)
    ranges["s"] = ANY_FLOAT
    for param in attention.params:
        ranges[param.name] = _declared(param)
    return ranges


def launch_ranges(
    attention: Attention, sizes: Mapping[str, int], params: Mapping[str, bool | int | float]
) -> Ranges:
    """Symbol ranges for one launch, from its sizes and params."""
    ranges = {name: interval.point(value) for name, value in {**sizes, **params}.items()}
    for name, count in (("b", "B"), ("h", "Hq"), ("hkv", "Hkv"), ("q", "Sq"), ("kv", "Skv")):
        ranges[name] = Interval(0, max(sizes[count] - 1, 0))
    if attention.length_q is not None:
        ranges["Sq"] = Interval(0, sizes["Sq"])
    if attention.length_kv is not None:
        ranges["Skv"] = Interval(0, sizes["Skv"])
    last = interval.add(ranges["Skv"], Interval(-1, -1))
    ranges["qpos"] = Interval(
        min(ranges["Skv"].low - ranges["Sq"].high, last.low), max(last.high, 0)
    )
    ranges["s"] = ANY_FLOAT
    return ranges


def infer_ranges(
    roots: tuple[Expr, ...],
    symbols: Ranges,
    attention: Attention,
    assume: Callable[[Expr, Interval], Interval] | None = None,
) -> dict[int, Interval]:
    """The interval of every node, by identity.

    assume:  what is taken for a node's interval, which others then follow from.
    """
    elements = {tensor.name: tensor.element for tensor in attention.tensors}
    known: dict[int, Interval] = {}
    for node in postorder(*roots):
        found = _interval(node, tuple(known[id(c)] for c in children(node)), symbols, elements)
        if expr_type(node) is ScalarType.FLOAT and not isinstance(node, Call | Let | Select):
            found = interval.rounded(found)
        elif expr_type(node) is ScalarType.INT:
            found = _without_far_ends(found)
        known[id(node)] = found if assume is None else assume(node, found)
    return known


def range_of_work(node: Expr, known: Mapping[int, Interval]) -> Interval:
    """The values that computing a node comes across: a remainder divides first."""
    match node:
        case Binary(BinaryOp.MOD, left, right):
            quotient = interval.floor_divide(known[id(left)], known[id(right)])
            return interval.hull(known[id(node)], quotient)
        case _:
            return known[id(node)]


def exceeding_int64(attention: Attention, symbols: Ranges) -> Iterator[Expr]:
    """Integer nodes whose value may not fit 64 bits under the given symbol ranges.

    What was read from a captured tensor, or is the floor of a score, is left out: its values are
    not known here, and int64 arrays of small numbers are the rule.
    """
    roots = attention.expressions()
    known = infer_ranges(roots, symbols, attention)
    from_data: set[int] = set()
    for node in postorder(*roots):
        if _is_data(node, known) or any(id(child) in from_data for child in children(node)):
            from_data.add(id(node))
        elif expr_type(node) is ScalarType.INT and not _fits64(node, known):
            yield node


def _is_data(node: Expr, known: Mapping[int, Interval]) -> bool:
    """A value that depends on what is in an array, and so is not known before the launch."""
    is_floor = isinstance(node, Call) and node.function == "floor"
    return isinstance(node, Load) or (is_floor and _is_unbounded(known[id(node)]))


def _is_unbounded(a: Interval) -> bool:
    return a.low <= INT64.low or a.high >= INT64.high


def _fits64(node: Expr, known: Mapping[int, Interval]) -> bool:
    return range_of_work(node, known).within(*INT64.ends)


def _without_far_ends(a: Interval) -> Interval:
    """A larger interval whose finite ends have at most 129 bits."""
    low = -math.inf if a.low < -_FAR else min(a.low, _FAR)
    high = math.inf if a.high > _FAR else max(a.high, -_FAR)
    return Interval(low, high, a.nan)


def _declared(param: Param) -> Interval:
    low, high = param.bound.low, param.bound.high
    match param.type:
        case ScalarType.BOOL:
            return UNKNOWN
        case ScalarType.INT:
            least = INT64.low if low is None else low + param.bound.low_open
            return Interval(least, INT64.high if high is None else high - param.bound.high_open)
        case ScalarType.FLOAT:
            # A float param may be NaN only when no range was declared for it.
            return Interval(
                ANY_FLOAT.low if low is None else low,
                ANY_FLOAT.high if high is None else high,
                nan=low is None and high is None,
            )


def _interval(
    node: Expr, operands: tuple[Interval, ...], symbols: Ranges, elements: Mapping[str, Element]
) -> Interval:
    match node:
        case Const(value):
            return interval.point(value)
        case Symbol(name):
            return symbols[name]
        case Load(tensor):
            element = elements[tensor]
            is_float = element.scalar is ScalarType.FLOAT
            return ANY_FLOAT if is_float else Interval(element.low, element.high)
        case Let() | ToFloat():
            return operands[0]
        case Negate():
            return interval.negate(operands[0])
        case Not():
            return interval.logical_not(operands[0])
        # kv - qpos = (kv - q) - (Skv - Sq): the lengths cancel, which intervals alone do not see.
        case Binary(BinaryOp.SUB, Symbol(a), Symbol(b)) if a in _KV and b in _QPOS:
            return Interval(1 - symbols["Skv"].high, symbols["Sq"].high - 1)
        case Binary(BinaryOp.SUB, Symbol(a), Symbol(b)) if a in _QPOS and b in _KV:
            return Interval(1 - symbols["Sq"].high, symbols["Skv"].high - 1)
        case Binary(op):
            return _ARITHMETIC[op](*operands)
        case Compare(op):
            return interval.compare(op.value, *operands)
        case Logical(op):
            return (interval.logical_and if op is LogicalOp.AND else interval.logical_or)(*operands)
        case Select():
            condition, then, otherwise = operands
            if condition.is_point:
                return then if condition.low else otherwise
            return interval.hull(then, otherwise)
        case Call(function):
            return FUNCTIONS[function].interval(*operands)
        case _:
            assert_never(node)


_ARITHMETIC: Final = {
    BinaryOp.ADD: interval.add,
    BinaryOp.SUB: interval.subtract,
    BinaryOp.MUL: interval.multiply,
    BinaryOp.DIV: interval.divide,
    BinaryOp.FLOORDIV: interval.floor_divide,
    BinaryOp.MOD: interval.modulo,
}
