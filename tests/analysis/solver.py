"""Expressions as z3 formulas: a second judge, which shares nothing with the analyses.

Integers are mathematical; what is read from a tensor is an unknown function of its indices.
Floats, division of reals and functions of them have no formula here: a ValueError names what was
met, and such parts are judged by enumeration alone.
"""

from __future__ import annotations

from typing import Any

import z3

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
)
from attngen.ir.traverse import fold_up
from attngen.ir.types import ScalarType

__all__ = ["Formula", "to_formula"]

Formula = Any


def to_formula(e: Expr, names: dict[str, Formula]) -> Formula:
    """The formula of an expression over integers; symbols that are not in `names` are unknown."""

    def combine(node: Expr, operands: tuple[Formula, ...]) -> Formula:
        match node:
            case Const(value):
                return z3.BoolVal(value) if isinstance(value, bool) else z3.IntVal(value)
            case Symbol(name):
                return names.setdefault(name, z3.Int(name))
            case Load(tensor, indices, type_):
                result = z3.BoolSort() if type_ is ScalarType.BOOL else z3.IntSort()
                return z3.Function(tensor, *[z3.IntSort()] * len(indices), result)(*operands)
            case Let():
                return operands[0]
            case Negate():
                return -operands[0]
            case Not():
                return z3.Not(operands[0])
            case Binary(op):
                return _arithmetic(op, *operands)
            case Compare(op):
                return _COMPARE[op.value](*operands)
            case Logical(op):
                return (z3.And if op is LogicalOp.AND else z3.Or)(*operands)
            case Select():
                return z3.If(*operands)
            case Call(function):
                return _call(function, operands)
            case _:
                raise ValueError(f"no integer formula for a node {type(node).__name__}")

    return fold_up(e, combine)


_COMPARE = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">=": lambda a, b: a >= b,
    ">": lambda a, b: a > b,
}


def _arithmetic(op: BinaryOp, a: Formula, b: Formula) -> Formula:
    """z3 rounds a quotient down only where the divisor is positive."""
    floor = z3.If(b > 0, a / b, z3.If(b == 0, 0, (-a) / (-b)))
    match op:
        case BinaryOp.ADD:
            return a + b
        case BinaryOp.SUB:
            return a - b
        case BinaryOp.MUL:
            return a * b
        case BinaryOp.FLOORDIV:
            return floor
        case BinaryOp.MOD:
            return z3.If(b == 0, 0, a - b * floor)
        case _:
            raise ValueError(f"no integer formula for the operator {op.value}")


def _call(function: str, operands: tuple[Formula, ...]) -> Formula:
    def largest(a: Formula, b: Formula) -> Formula:
        return z3.If(a >= b, a, b)

    def smallest(a: Formula, b: Formula) -> Formula:
        return z3.If(a <= b, a, b)

    match function, operands:
        case "max", (first, *rest):
            for operand in rest:
                first = largest(first, operand)
            return first
        case "min", (first, *rest):
            for operand in rest:
                first = smallest(first, operand)
            return first
        case "clamp", (x, low, high):
            return smallest(largest(x, low), high)
        case "abs", (x,):
            return z3.If(x >= 0, x, -x)
        case _:
            raise ValueError(f"no integer formula for the function {function}")
