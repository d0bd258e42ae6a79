"""Bit operations on traced integers, as sums: `x & 12` is `x // 4 % 4 * 4`."""

from __future__ import annotations

from functools import reduce

from attngen.flex.arithmetic import (
    binary,
    compare,
    literal,
    logical,
    mul,
    neg,
    negation,
    number,
)
from attngen.flex.graph import refuse
from attngen.flex.values import Scalar
from attngen.ir.types import ScalarType

__all__ = ["bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"]

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


def bitwise_and(a: Scalar, b: Scalar) -> Scalar:
    if a.kind is b.kind is _BOOL:
        return logical("and", a, b)
    a, b = _integers(a, b)
    if a.constant is not None:
        a, b = b, a
    if not isinstance(b.constant, int):
        raise refuse("`&` of these integers", "one of them must be a number")
    if b.constant >= 0:
        return _masked(a, b.constant)
    return binary("-", a, _masked(a, ~b.constant))


def _masked(a: Scalar, mask: int) -> Scalar:
    """The bits of `mask`, as a sum over its runs of ones: `x // 4 % 2 * 4` for the mask 4."""
    if a.parts:
        return reduce(bitwise_or, (_masked(part, mask) for part in a.parts))
    wanted = mask if a.bits is None else mask & a.bits
    if wanted == a.bits:
        return a
    graph = a.graph
    total: Scalar | None = None
    for low, width in _runs(wanted):
        part = a if low == 0 else binary("//", a, literal(graph, 1 << low))
        if a.bits is None or a.bits >> (low + width):
            part = binary("%", part, literal(graph, 1 << width))
        if low:
            part = binary("*", part, literal(graph, 1 << low))
        total = part if total is None else binary("+", total, part)
    if total is None:
        return literal(graph, 0)
    total.bits = wanted
    return total


def _runs(mask: int) -> list[tuple[int, int]]:
    """The runs of ones of a number, each as its lowest bit and its width."""
    runs, low = [], 0
    while mask >> low:
        if not mask >> low & 1:
            low += 1
            continue
        width = 1
        while mask >> (low + width) & 1:
            width += 1
        runs.append((low, width))
        low += width
    return runs


def bitwise_or(a: Scalar, b: Scalar) -> Scalar:
    if a.kind is b.kind is _BOOL:
        return logical("or", a, b)
    a, b = _integers(a, b)
    if a.bits is not None and b.bits is not None and not a.bits & b.bits:
        joined = binary("+", a, b)
        joined.bits = a.bits | b.bits
        return joined
    if a.constant is not None:
        a, b = b, a
    if isinstance(b.constant, int) and b.constant >= 0:
        return binary("+", binary("-", a, _masked(a, b.constant)), b)
    bits = None if a.bits is None or b.bits is None else a.bits | b.bits
    return Scalar(a.graph, None, _INT, bits, parts=(*(a.parts or (a,)), *(b.parts or (b,))))


def bitwise_xor(a: Scalar, b: Scalar) -> Scalar:
    if a.kind is b.kind is _BOOL:
        return compare("!=", a, b)
    a, b = _integers(a, b)
    if a.constant is not None:
        a, b = b, a
    if not (isinstance(b.constant, int) and b.constant >= 0):
        raise refuse("`^` of these integers", "one of them must be a number that is not negative")
    twice = mul(literal(a.graph, 2), _masked(a, b.constant))
    return binary("-", binary("+", a, b), twice)


def bitwise_not(a: Scalar) -> Scalar:
    if a.kind is _BOOL:
        return negation(a)
    (a,) = _integers(a)
    return binary("-", neg(a), literal(a.graph, 1))


def left_shift(a: Scalar, b: Scalar) -> Scalar:
    a, b = _integers(a, b)
    by = _shift(b)
    if a.parts:
        return reduce(bitwise_or, (left_shift(part, b) for part in a.parts))
    shifted = binary("*", a, literal(a.graph, 1 << by))
    shifted.bits = None if a.bits is None else a.bits << by
    return shifted


def right_shift(a: Scalar, b: Scalar) -> Scalar:
    a, b = _integers(a, b)
    by = _shift(b)
    if a.parts:
        return reduce(bitwise_or, (right_shift(part, b) for part in a.parts))
    shifted = binary("//", a, literal(a.graph, 1 << by))
    shifted.bits = None if a.bits is None else a.bits >> by
    return shifted


def _shift(by: Scalar) -> int:
    if not (isinstance(by.constant, int) and 0 <= by.constant < 64):
        raise refuse("this shift", "its width must be a number from 0 to 63")
    return by.constant


def _integers(*values: Scalar) -> list[Scalar]:
    numbers = [number(x) for x in values]
    if any(x.kind is _FLOAT for x in numbers):
        raise refuse("a bitwise operation on floats", "only integers have bits")
    return numbers
