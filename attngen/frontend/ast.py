"""The syntax tree of a `.attn` file: what was written, with the span of every piece.

    File       = Import* (Definition | Attention | Schedule)*
    Definition = define NAME(Parameter*) : type = Expr
    Attention  = attention NAME { Statement* }
    Schedule   = schedule [TARGET] { Setting* }
    Expr       = Literal | Name | Index | Call | Unary | Binary | Comparison | BoolOp

The tree is the only thing that the compiler and the float64 oracle share.  Spans and
comments never take part in equality, so `parse(format(tree)) == tree`.
"""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias, assert_never, final

from attngen.diagnostics.span import Span
from attngen.record import record

__all__ = [
    "Argument",
    "Attention",
    "Binary",
    "BoolOp",
    "Call",
    "Comments",
    "Comparison",
    "Const",
    "Definition",
    "Dim",
    "Dtype",
    "Expr",
    "File",
    "HeadDim",
    "Heads",
    "Import",
    "Index",
    "Length",
    "Let",
    "Literal",
    "Mask",
    "Name",
    "Output",
    "Param",
    "Parameter",
    "Scale",
    "Schedule",
    "Score",
    "Setting",
    "Statement",
    "Tensor",
    "TopLevel",
    "Unary",
    "Weights",
    "operands",
]


@final
@record
class Comments:
    """Comments that belong to a statement: whole lines above it and the one behind it.

    `blank_before` says that the author left an empty line above; the formatter keeps one.
    An empty string in `above`, and in `closing` below, is an empty line between comments.
    """

    above: tuple[str, ...] = ()
    behind: str | None = None
    blank_before: bool = False


# ---- expressions -------------------------------------------------------------------------


@final
@record
class Literal:
    """A number or truth value: `3`, `2.5e-3`, `true`, `inf`, `nan`.  `text` is as written.

    Equality looks at the text alone, since `nan` does not equal itself.
    """

    value: bool | int | float = field(compare=False)
    text: str
    span: Span = field(compare=False)


@final
@record
class Name:
    """A bare name: an index, a size, a const, a param, a let, or a definition without arguments."""

    name: str
    span: Span = field(compare=False)


@final
@record
class Index:
    """A tensor read, `tensor[i, j]`."""

    tensor: str
    indices: tuple[Expr, ...]
    span: Span = field(compare=False)
    tensor_span: Span = field(compare=False)


@final
@record
class Argument:
    """One argument of a call or setting: `64` (name is None) or `left = 64`."""

    name: str | None
    value: Expr
    span: Span = field(compare=False)


@final
@record
class Call:
    """`softcap(s, cap)`: a builtin function or a definition."""

    name: str
    arguments: tuple[Argument, ...]
    span: Span = field(compare=False)
    name_span: Span = field(compare=False)


@final
@record
class Unary:
    """`op` is `-`, `+` or `not`."""

    op: str
    operand: Expr
    span: Span = field(compare=False)


@final
@record
class Binary:
    """`op` is one of `+ - * / // % **`, with Python's precedence and associativity."""

    op: str
    left: Expr
    right: Expr
    span: Span = field(compare=False)


@final
@record
class Comparison:
    """A chain `a <= b < c`: `operands` has one entry more than `ops`."""

    ops: tuple[str, ...]
    operands: tuple[Expr, ...]
    span: Span = field(compare=False)


@final
@record
class BoolOp:
    """`a and b and c`, flat: `op` is `and` or `or`, two operands or more, evaluated lazily."""

    op: str
    operands: tuple[Expr, ...]
    span: Span = field(compare=False)


Expr: TypeAlias = Literal | Name | Index | Call | Unary | Binary | Comparison | BoolOp


def operands(node: Expr) -> tuple[Expr, ...]:
    """The expressions that an expression is made of, from left to right."""
    match node:
        case Literal() | Name():
            return ()
        case Index():
            return node.indices
        case Call():
            return tuple(argument.value for argument in node.arguments)
        case Unary():
            return (node.operand,)
        case Binary():
            return (node.left, node.right)
        case Comparison() | BoolOp():
            return node.operands
        case _:
            assert_never(node)


# ---- statements of an attention block ----------------------------------------------------


@final
@record
class Dtype:
    """`dtype bf16`."""

    dtype: str
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class HeadDim:
    """`head_dim 128` (qk and v alike) or `head_dim qk = 192, v = 128`."""

    qk: Expr
    v: Expr
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Heads:
    """`heads q = 32, kv = 8`."""

    q: Expr
    kv: Expr
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Const:
    """`const W = 4096` or `const W : int` (then `-D W=…` must give it)."""

    name: str
    type: str | None
    value: Expr | None
    span: Span = field(compare=False)
    name_span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Param:
    """`param w : int = 256 where 1 <= w < 2**31`."""

    name: str
    type: str
    default: Expr | None
    range: Expr | None
    span: Span = field(compare=False)
    name_span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Dim:
    """One dimension of a tensor: `Skv`, `Hq?` (may be 1 or absent), or a number."""

    size: str | int
    optional: bool
    span: Span = field(compare=False)


@final
@record
class Tensor:
    """`tensor doc : int32[B, Skv]`, a captured array."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]
    span: Span = field(compare=False)
    name_span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Length:
    """`length q = ql[b], kv = kl[b]`: the true lengths inside padded buffers."""

    q: Expr | None
    kv: Expr | None
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Let:
    """`let same_doc = doc[b, qpos] == doc[b, kv]`."""

    name: str
    value: Expr
    span: Span = field(compare=False)
    name_span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Scale:
    """`scale 1 / sqrt(Dqk)`."""

    value: Expr
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Score:
    """`score softcap(s, cap)`: the new `s`."""

    value: Expr
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Mask:
    """`mask kv <= qpos`: True attends; several lines are and-ed."""

    value: Expr
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Weights:
    """`weights softmax`, `weights softmax(sink = sink[h])` or `weights sigmoid`."""

    kind: str
    sink: Expr | None
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Output:
    """`output o, lse, row_max`."""

    names: tuple[str, ...]
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


Statement: TypeAlias = (
    Dtype
    | HeadDim
    | Heads
    | Const
    | Param
    | Tensor
    | Length
    | Let
    | Scale
    | Score
    | Mask
    | Weights
    | Output
)


# ---- top level ---------------------------------------------------------------------------


@final
@record
class Import:
    """`import "masks.attn"`: the definitions of another file, relative to this one."""

    path: str
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Parameter:
    """A parameter of a definition; `type` is int, float, bool, flag or tensor."""

    name: str
    type: str
    default: Expr | None
    span: Span = field(compare=False)


@final
@record
class Definition:
    """`define window(left : int, right : int = 0) : bool = …`, expanded where it is called."""

    name: str
    parameters: tuple[Parameter, ...]
    type: str
    body: Expr
    span: Span = field(compare=False)
    name_span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Attention:
    """`attention NAME { … }`: what is computed."""

    name: str
    statements: tuple[Statement, ...]
    span: Span = field(compare=False)
    name_span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)
    closing: tuple[str, ...] = field(default=(), compare=False)
    """Comment lines between the last statement and the closing brace."""


@final
@record
class Setting:
    """One line of a schedule, `tile q = 128, kv = auto`: a key and its arguments."""

    key: str
    arguments: tuple[Argument, ...]
    span: Span = field(compare=False)
    key_span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)


@final
@record
class Schedule:
    """`schedule { … }` (every target) or `schedule sm_90a { … }` (overrides key by key)."""

    target: str | None
    settings: tuple[Setting, ...]
    span: Span = field(compare=False)
    comments: Comments = field(default=Comments(), compare=False)
    closing: tuple[str, ...] = field(default=(), compare=False)


TopLevel: TypeAlias = Import | Definition | Attention | Schedule


@final
@record
class File:
    """A whole file.  `closing` holds comment lines behind the last item."""

    items: tuple[TopLevel, ...]
    span: Span = field(compare=False)
    closing: tuple[str, ...] = field(default=(), compare=False)
