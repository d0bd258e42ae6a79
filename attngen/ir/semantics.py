"""What an expression means, in NumPy: the definition that the generated code is checked against.

Values are arrays that broadcast against each other: int64 for integers, float32 for floats,
bool for truth values.  `and`, `or` and `where` are lazy: an out-of-range tensor read counts
only where its value is used.  So every node yields its value and the places where that value
came from outside a tensor, and laziness decides which of those places survive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, assert_never, final

import numpy as np

from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
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
)
from attngen.ir.functions import FUNCTIONS
from attngen.ir.traverse import fold_up
from attngen.record import record

__all__ = ["Value", "evaluate"]

Array: TypeAlias = Any


@final
@record
class Value:
    """`data`, and where it depends on a read outside a tensor (`outside` False: nowhere).

    `tensor` names the first tensor that was read outside.
    """

    data: Array
    outside: Array = False
    tensor: str | None = None


def floor_divide(a: Array, b: Array) -> Array:
    """Floor division of integers; 0 where the divisor is 0."""
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))


def modulo(a: Array, b: Array) -> Array:
    """Remainder of floor division, with the divisor's sign; 0 where the divisor is 0."""
    return np.where(b == 0, 0, np.mod(a, np.where(b == 0, 1, b)))


_BINARY: Final[dict[BinaryOp, Callable[[Array, Array], Array]]] = {
    BinaryOp.ADD: np.add,
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.divide,
    BinaryOp.FLOORDIV: floor_divide,
    BinaryOp.MOD: modulo,
}

_COMPARE: Final[dict[CompareOp, Callable[[Array, Array], Array]]] = {
    CompareOp.LT: np.less,
    CompareOp.LE: np.less_equal,
    CompareOp.EQ: np.equal,
    CompareOp.NE: np.not_equal,
    CompareOp.GE: np.greater_equal,
    CompareOp.GT: np.greater,
}


def evaluate(e: Expr, symbols: Mapping[str, Array], tensors: Mapping[str, Array]) -> Value:
    """The value of an expression for every combination of the given symbol arrays.

    `tensors` maps each captured tensor to an array with all its declared dimensions; an
    optional one that is 1 or absent has been broadcast to its declared size.
    """

    def combine(node: Expr, operands: tuple[Value, ...]) -> Value:
        data = tuple(v.data for v in operands)
        match node:
            case Const(value):
                return Value(_constant(value))
            case Symbol(name):
                return Value(symbols[name])
            case Load(tensor):
                return _load(tensor, tensors[tensor], operands)
            case Let():
                return operands[0]
            case Select():
                condition, then, otherwise = operands
                branch = np.where(condition.data, then.outside, otherwise.outside)
                outside = condition.outside | branch
                return Value(np.where(*data), outside, _first_tensor(operands))
            case Logical(op):
                return _lazy_chain(op, operands)
            case Negate():
                result = np.negative(data[0])
            case Not():
                result = np.logical_not(data[0])
            case Binary(op):
                result = _BINARY[op](*data)
            case Compare(op):
                result = _COMPARE[op](*data)
            case ToFloat():
                result = np.asarray(data[0]).astype(np.float32)
            case Call(function):
                result = FUNCTIONS[function].numpy(*data)
            case _:
                assert_never(node)
        outside = False
        for v in operands:
            outside = outside | v.outside
        return Value(result, outside, _first_tensor(operands))

    with np.errstate(all="ignore"):
        return fold_up(e, combine)


def _constant(value: bool | int | float) -> Array:
    if isinstance(value, bool):
        return np.bool_(value)
    return np.int64(value) if isinstance(value, int) else np.float32(value)


def _first_tensor(operands: tuple[Value, ...]) -> str | None:
    return next((v.tensor for v in operands if v.tensor is not None), None)


def _load(name: str, tensor: Array, operands: tuple[Value, ...]) -> Value:
    """One element per index; an index outside reads the nearest element and is marked."""
    indices, outside = [], np.bool_(False)
    for operand, size in zip(operands, tensor.shape, strict=True):
        index = np.asarray(operand.data)
        outside = outside | operand.outside | (index < 0) | (index >= size)
        indices.append(np.clip(index, 0, max(size - 1, 0)))
    if tensor.size:
        data = tensor[tuple(np.broadcast_arrays(*indices))] if indices else tensor[()]
    else:
        data = np.zeros(np.broadcast_shapes(*(i.shape for i in indices)), tensor.dtype)
    data = np.asarray(data)
    if data.dtype != np.bool_:
        data = data.astype(np.int64 if np.issubdtype(data.dtype, np.integer) else np.float32)
    return Value(data, outside, name if np.any(outside) else _first_tensor(operands))


def _lazy_chain(op: LogicalOp, operands: tuple[Value, ...]) -> Value:
    """`and` / `or`: an operand counts only where the ones before it did not decide."""
    undecided: Array = np.bool_(True)
    outside: Array = np.bool_(False)
    for v in operands:
        outside = outside | (undecided & v.outside)
        undecided = undecided & (v.data if op is LogicalOp.AND else np.logical_not(v.data))
    data = undecided if op is LogicalOp.AND else np.logical_not(undecided)
    return Value(data, outside, _first_tensor(operands))
