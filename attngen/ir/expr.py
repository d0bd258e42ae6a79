"""Scalar expressions over indices, scores, params and tensor reads.

    Expr = Const(value)
         | Symbol(name, role)                       index, size, param, score or row value
         | Load(tensor, Expr*)                      one element of a captured tensor
         | Negate(Expr) | Not(Expr)
         | Binary(+ - * / // %, Expr, Expr)
         | Compare(< <= == != >= >, Expr, Expr)
         | Logical(and or, Expr+)                   lazy, flat
         | Select(Expr, Expr, Expr)                 lazy: where(condition, then, otherwise)
         | ToFloat(Expr)                            integer to float32
         | Call(function, Expr*)                    a builtin function of ir/functions.py
         | Let(name, Expr)                          a named, shared subexpression

Nodes compare and hash by identity: a shared node is one object (a `Let` that is used twice
is the same `Let`), and every traversal in `ir/traverse.py` visits it once.  Whether two
expressions mean the same is asked of their printed text.  Integers are mathematical; the
code generator picks 32 or 64 bits from proven ranges.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias, final

from attngen.diagnostics.span import Span
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "Binary",
    "BinaryOp",
    "Call",
    "Compare",
    "CompareOp",
    "Const",
    "Expr",
    "Let",
    "Load",
    "Logical",
    "LogicalOp",
    "Negate",
    "Not",
    "Role",
    "Select",
    "Symbol",
    "ToFloat",
    "expr_type",
]


class Role(Enum):
    """What a symbol stands for, and so when its value is known."""

    INDEX = "index"
    """`b, h, hkv, q, kv, qpos`: differs from pair to pair."""
    SIZE = "size"
    """`B, Hq, Hkv, Sq, Skv, Dqk, Dv` and named tensor dimensions: known at launch."""
    PARAM = "param"
    """A run-time scalar: known at launch."""
    SCORE = "score"
    """`s`, the score so far."""
    TILE = "tile"
    """What is known of a whole tile: its first and last row and key, and summaries over them."""
    ROW = "row"
    """A field of the row state (`m`, `l`, `acc`, …); only in the formulas of ir/row_state.py."""


class BinaryOp(Enum):
    ADD = "+"
    SUB = "-"
    MUL = "*"
    DIV = "/"
    FLOORDIV = "//"
    MOD = "%"


class CompareOp(Enum):
    LT = "<"
    LE = "<="
    EQ = "=="
    NE = "!="
    GE = ">="
    GT = ">"


class LogicalOp(Enum):
    AND = "and"
    OR = "or"


@final
@record(eq=False)
class Const:
    value: bool | int | float
    span: Span | None = None


@final
@record(eq=False)
class Symbol:
    name: str
    role: Role
    type: ScalarType
    span: Span | None = None


@final
@record(eq=False)
class Load:
    """`tensor[indices]`; one index per declared dimension, optional ones included."""

    tensor: str
    indices: tuple[Expr, ...]
    type: ScalarType
    span: Span | None = None


@final
@record(eq=False)
class Negate:
    operand: Expr
    span: Span | None = None


@final
@record(eq=False)
class Not:
    operand: Expr
    span: Span | None = None


@final
@record(eq=False)
class Binary:
    """Both operands have one type; `/` is between floats, `//` and `%` between integers."""

    op: BinaryOp
    left: Expr
    right: Expr
    span: Span | None = None


@final
@record(eq=False)
class Compare:
    """Both operands have one type."""

    op: CompareOp
    left: Expr
    right: Expr
    span: Span | None = None


@final
@record(eq=False)
class Logical:
    op: LogicalOp
    operands: tuple[Expr, ...]
    span: Span | None = None


@final
@record(eq=False)
class Select:
    """`then` and `otherwise` have one type."""

    condition: Expr
    then: Expr
    otherwise: Expr
    span: Span | None = None


@final
@record(eq=False)
class ToFloat:
    operand: Expr
    span: Span | None = None


@final
@record(eq=False)
class Call:
    """`function` is a key of `ir.functions.FUNCTIONS`; the arguments have the types it wants."""

    function: str
    arguments: tuple[Expr, ...]
    type: ScalarType
    span: Span | None = None


@final
@record(eq=False)
class Let:
    name: str
    value: Expr
    span: Span | None = None


Expr: TypeAlias = (
    Const
    | Symbol
    | Load
    | Negate
    | Not
    | Binary
    | Compare
    | Logical
    | Select
    | ToFloat
    | Call
    | Let
)


def expr_type(e: Expr) -> ScalarType:
    """The scalar type of an expression.  Walks down one operand, never recursively."""
    while True:
        match e:
            case Const(value):
                if isinstance(value, bool):
                    return ScalarType.BOOL
                return ScalarType.INT if isinstance(value, int) else ScalarType.FLOAT
            case Symbol() | Load() | Call():
                return e.type
            case Not() | Compare() | Logical():
                return ScalarType.BOOL
            case ToFloat():
                return ScalarType.FLOAT
            case Binary(op, left, _):
                if op is BinaryOp.DIV:
                    return ScalarType.FLOAT
                e = left
            case Negate(operand):
                e = operand
            case Select(_, then, _):
                e = then
            case Let(_, value):
                e = value
