"""Fold what is known: constants, and the integer and boolean laws that hold for every value.

    1 / sqrt(64.0) * s          →   0.125 * s
    q + 0 < 2 * 8 and true      →   q < 16

Integers fold exactly; an operation whose result leaves 64 bits stays as it is, for the launch
to refuse.  Floats fold in float64 (one rounding at the end, never more error than the float32
steps they replace).  Float identities such as x + 0.0 or 0.0 * x are left alone: they
change the sign of zero, or hide an infinity or a NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
    Const,
    Expr,
    Let,
    Logical,
    LogicalOp,
    Negate,
    Not,
    Select,
    ToFloat,
)
from attngen.ir.functions import FUNCTIONS
from attngen.ir.traverse import rewrite, rewrite_all
from attngen.ir.types import ScalarType

__all__ = ["fold_constants", "fold_expr"]


def fold_constants(attention: Attention) -> Attention:
    """Fold every expression of a variant; the same object when nothing changed."""
    folded = attention.with_expressions(rewrite_all(attention.expressions(), _fold_node))
    mask = _drop_true(folded.mask)
    return folded if mask is folded.mask else replace(folded, mask=mask)


def fold_expr(e: Expr) -> Expr:
    """Fold one expression, operands first."""
    return rewrite(e, _fold_node)


def _drop_true(mask: Expr | None) -> Expr | None:
    return None if isinstance(mask, Const) and mask.value is True else mask


def _fold_node(e: Expr) -> Expr:
    span = e.span
    match e:
        case Let(_, Const(value)):
            return Const(value, span)
        case ToFloat(Const(value)):
            return Const(float(value), span)
        case Negate(Const(value)):
            return _known(e, -value)
        # Negation of truth.
        case Not(Const(value)):
            return Const(not value, span)
        case Not(Not(x)):
            return x
        # Arithmetic of two numbers.
        case Binary(op, Const(a), Const(b)):
            return _known(e, _arithmetic(op, a, b))
        # Integer identities.
        case Binary(BinaryOp.ADD, x, Const(0)) | Binary(BinaryOp.ADD, Const(0), x) if _is_int(e):
            return x
        case Binary(BinaryOp.SUB, x, Const(0)) if _is_int(e):
            return x
        case Binary(BinaryOp.MUL, x, Const(1)) | Binary(BinaryOp.MUL, Const(1), x) if _is_int(e):
            return x
        case Binary(BinaryOp.FLOORDIV, x, Const(1)):
            return x
        case Binary(BinaryOp.MOD, _, Const(1)):
            return Const(0, span)
        case Compare(op, Const(a), Const(b)):
            return Const(_compare(op, a, b), span)
        # A decided operand of `and` / `or`; laziness is kept, because only later ones are dropped.
        case Logical(op, operands):
            return _logical(e, op, operands)
        # Selection by a known condition.
        case Select(Const(condition), then, otherwise):
            return then if condition else otherwise
        # A limit on what is a number in one case is known there.
        case Call("clamp", (Select(_, then, otherwise) as chosen, Const() as low, Const() as high)):
            if not isinstance(then, Const) and not isinstance(otherwise, Const):
                return e
            then, otherwise = (
                _fold_node(replace(e, arguments=(x, low, high))) for x in (then, otherwise)
            )
            return replace(chosen, then=then, otherwise=otherwise)
        case Call(name, arguments) if all(isinstance(a, Const) for a in arguments):
            return _call(e, name, arguments)
        case _:
            return e


_LEAST_INT: Final = -(2**63)
_LARGEST_INT: Final = 2**63 - 1


def _known(e: Expr, value: int | float) -> Expr:
    """The value in place of `e`; an integer that does not fit 64 bits has no constant."""
    fits = isinstance(value, float) or _LEAST_INT <= value <= _LARGEST_INT
    return Const(value, e.span) if fits else e


def _is_int(e: Binary) -> bool:
    return all(isinstance(x.value, int) for x in (e.left, e.right) if isinstance(x, Const))


def _arithmetic(op: BinaryOp, a: float, b: float) -> int | float:
    match op:
        case BinaryOp.ADD:
            return a + b
        case BinaryOp.SUB:
            return a - b
        case BinaryOp.MUL:
            return a * b
        case BinaryOp.DIV:
            with np.errstate(all="ignore"):
                return float(np.float64(a) / np.float64(b))
        case BinaryOp.FLOORDIV:
            return a // b if b else 0
        case BinaryOp.MOD:
            return a % b if b else 0


def _compare(op: CompareOp, a: float, b: float) -> bool:
    results = {
        CompareOp.LT: a < b, CompareOp.LE: a <= b, CompareOp.EQ: a == b,
        CompareOp.NE: a != b, CompareOp.GE: a >= b, CompareOp.GT: a > b,
    }  # fmt: skip
    return bool(results[op])


def _logical(e: Logical, op: LogicalOp, operands: tuple[Expr, ...]) -> Expr:
    deciding = op is LogicalOp.OR
    kept: list[Expr] = []
    for operand in operands:
        if isinstance(operand, Const):
            if operand.value is deciding:
                kept.append(operand)
                break
            continue
        kept.append(operand)
    if not kept:
        return Const(not deciding, e.span)
    if len(kept) == 1:
        return kept[0]
    return e if len(kept) == len(operands) else replace(e, operands=tuple(kept))


def _call(e: Call, name: str, arguments: tuple[Expr, ...]) -> Expr:
    values = [a.value for a in arguments if isinstance(a, Const)]
    if name == "abs" and values == [_LEAST_INT]:
        return e
    with np.errstate(all="ignore"):
        result = FUNCTIONS[name].numpy(
            *(np.float64(v) if isinstance(v, float) else np.int64(v) for v in values)
        )
    if e.type is ScalarType.FLOAT:
        return Const(float(result), e.span)
    return Const(bool(result) if e.type is ScalarType.BOOL else int(result), e.span)
