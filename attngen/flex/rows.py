"""Functions of rows: element by element, and reductions, all written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from attngen.flex.arithmetic import (
    binary,
    call,
    cast,
    literal,
    logical,
    mul,
    number,
    true_divide,
    truth,
)
from attngen.flex.graph import refuse
from attngen.flex.values import Row, Scalar, Value, scalars_of, to_value
from attngen.ir.types import ScalarType

__all__ = ["both", "dot", "each", "either", "elementwise", "extreme", "mean", "reduced", "total"]

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


def each(function: Callable[..., Scalar], *operands: Any, **options: Any) -> Value:
    """The function of scalars, or of rows element by element."""
    graph = next(scalars_of(operands)).graph
    values = [to_value(graph, x) for x in operands]
    rows = [x for x in values if isinstance(x, Row)]
    if not rows:
        return function(*values, **options)
    lengths = {len(row.items) for row in rows} - {1}
    if len(lengths) > 1:
        raise refuse("these rows", f"they have {' and '.join(map(str, sorted(lengths)))} elements")
    length = lengths.pop() if lengths else 1
    columns = [(x,) if isinstance(x, Scalar) else x.items for x in values]
    wide = [column * length if len(column) == 1 else column for column in columns]
    return Row(graph, tuple(function(*one, **options) for one in zip(*wide, strict=True)))


def elementwise(function: Callable[..., Scalar], count: int) -> Callable[..., Value]:
    """A function whose first `count` arguments may be rows."""

    def apply(*arguments: Any, **options: Any) -> Value:
        named = {"other": 1, "exponent": 1, "input": 0, "self": 0}
        operands = list(arguments[:count])
        for name, at in named.items():
            if name in options and at >= len(operands):
                operands.append(options.pop(name))
        extra = partial(_with_arguments, function, arguments[count:])
        return each(extra, *operands, **options)

    return apply


def _with_arguments(
    function: Callable[..., Scalar], more: tuple[Any, ...], *operands: Any, **options: Any
) -> Scalar:
    return function(*operands, *more, **options)


def reduced(
    combine: Callable[[Scalar, Scalar], Scalar], empty: bool | int | None
) -> Callable[..., Scalar]:
    """A reduction over the one dimension of a row; `empty` is its value for none."""

    def reduce_row(
        x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Scalar:
        if isinstance(x, Scalar):
            return x
        if keepdim:
            raise refuse("`keepdim=True`", "a row becomes one number")
        items = list(x.items)
        if not items:
            if empty is None:
                raise refuse("this reduction", "the row is empty")
            return literal(x.graph, empty)
        total = reduce(combine, items)
        return total if dtype is None else cast(total, dtype)

    return reduce_row


def _count(a: Scalar, b: Scalar) -> Scalar:
    return binary("+", number(a), number(b))


def either(a: Scalar, b: Scalar) -> Scalar:
    return logical("or", truth(a), truth(b))


def both(a: Scalar, b: Scalar) -> Scalar:
    return logical("and", truth(a), truth(b))


def total(x: Value, *arguments: Any, **options: Any) -> Scalar:
    total = reduced(_count, 0)(x, *arguments, **options)
    return number(total)


def mean(x: Value, *arguments: Any, **options: Any) -> Scalar:
    count = 1 if isinstance(x, Scalar) else len(x.items)
    return true_divide(total(x, *arguments, **options), literal(x.graph, count))


def dot(a: Value, b: Value) -> Scalar:
    if not (isinstance(a, Row) and isinstance(b, Row) and a.shape == b.shape):
        raise refuse("this `dot`", "it takes two rows of one length")
    return total(each(mul, a, b))


def extreme(name: str) -> Callable[..., Value]:
    """`torch.max(a, b)`, or `x.max()` of a row."""
    combine = partial(call, name, None)

    def extreme(x: Value, other: Any = None, **options: Any) -> Value:
        if other is not None and not isinstance(other, int):
            return each(combine, x, other)
        if other is not None or "dim" in options:
            raise refuse(f"`{name}` along a dimension", "it gives indices too", f"use `a{name}`")
        return reduced(combine, None)(x)

    return extreme
