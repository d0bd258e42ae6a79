"""The `attention` block as the template sees it: C++ text of each formula, reads, lets."""

from __future__ import annotations

from collections import Counter
from typing import final

from attngen.codegen.arguments import C_ELEMENT
from attngen.codegen.expr import (
    ExprPrinter,
    Variable,
    called_lets,
    mentions_score,
)
from attngen.ir.attention import Attention, Tensor, TensorDim
from attngen.ir.expr import Expr, Let, Load, Symbol
from attngen.ir.traverse import children, postorder
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "FixedFormula",
    "Formula",
    "LetFormula",
    "TensorRead",
    "convert_of",
    "formula",
    "is_inside",
    "let_formulas",
    "line_of",
    "tensor_reads",
]

_MATCHING_SIZE = {"b": "B", "h": "Hq", "hkv": "Hkv", "q": "Sq", "kv": "Skv"}
"""Indices that are always below the size of the same row here."""


@final
@record
class Formula:
    """C++ text of an expression, and the line of the `.attn` text it comes from."""

    variables: tuple[Variable, ...]
    text: str
    line: int | None


@final
@record
class FixedFormula:
    """A part of the score lines or of the mask that is computed ahead, with its C++ type."""

    c_type: str
    formula: Formula


@final
@record
class LetFormula:
    """One let that is a device function of its own.

    One that calls others and is called in several places is not inlined: the text would
    double with every level.
    """

    name: str
    c_type: str
    takes_score: bool
    inlined: bool
    variables: tuple[Variable, ...]
    text: str
    line: int | None


@final
@record
class TensorRead:
    """How one captured tensor is read.

    `number` counts the declarations from 1; `clamped` lists the dimensions whose index is not
    proved to be inside.  Of some tensors elements are copied to shared memory (`is_staged`), of
    some read where they are needed (`is_read`), of some both.
    """

    name: str
    number: int
    declaration: str
    c_type: str
    convert: str
    c_element: str
    dims: tuple[int, ...]
    clamped: tuple[int, ...]
    is_staged: bool
    is_read: bool


def formula(printer: ExprPrinter, e: Expr, *, is_eager: bool = False) -> Formula:
    """An expression, with its line; `is_eager` as in `ExprPrinter.print`."""
    body = printer.print(e, is_eager=is_eager)
    return Formula(body.variables, body.text, line_of(e))


def fixed_formula(printer: ExprPrinter, e: Expr, *, is_eager: bool = False) -> FixedFormula:
    """An expression that is computed ahead; `is_eager` as in `ExprPrinter.print`."""
    body = printer.print(e, is_eager=is_eager)
    return FixedFormula(body.c_type, Formula(body.variables, body.text, line_of(e)))


def let_formulas(attention: Attention, printer: ExprPrinter) -> tuple[LetFormula, ...]:
    """The lets that are functions, those that others use first.

    A let that depends on `s` may exist once per score line; the copies print alike, and one
    function that takes `s` serves them all.
    """
    roots = attention.expressions()
    nodes = list(postorder(*roots))
    uses = Counter(child.name for n in nodes for child in children(n) if isinstance(child, Let))
    called: set[str] = set()
    for root in (*roots, *(n for n in nodes if isinstance(n, Let))):
        called |= called_lets(root)
    lets: dict[str, LetFormula] = {}
    for node in nodes:
        if isinstance(node, Let) and node.name in called and node.name not in lets:
            body = printer.print(node)
            lets[node.name] = LetFormula(
                name=node.name,
                c_type=printer.type_of(node),
                takes_score=mentions_score(node),
                inlined=uses[node.name] < 2 or not called_lets(node),
                variables=body.variables,
                text=body.text,
                line=line_of(node),
            )
    return tuple(lets.values())


def tensor_reads(
    attention: Attention, staged: frozenset[int] = frozenset()
) -> tuple[TensorRead, ...]:
    """The tensors that are read, in order of declaration; `staged` are ids of staged reads."""
    reads: list[TensorRead] = []
    for number, tensor in enumerate(attention.tensors, start=1):
        loads = [
            node
            for node in postorder(*attention.expressions())
            if isinstance(node, Load) and node.tensor == tensor.name
        ]
        if not loads:
            continue
        dims = range(len(tensor.dims))
        clamped = tuple(
            i for i in dims if not all(is_inside(load.indices[i], tensor.dims[i]) for load in loads)
        )
        c_type, convert = convert_of(tensor)
        reads.append(
            TensorRead(
                name=tensor.name,
                number=number,
                declaration=_declaration(tensor),
                c_type=c_type,
                convert=convert,
                c_element=C_ELEMENT[tensor.element.name],
                dims=tuple(dims),
                clamped=clamped,
                is_staged=any(id(load) in staged for load in loads),
                is_read=any(id(load) not in staged for load in loads),
            )
        )
    return tuple(reads)


def is_inside(index: Expr, dim: TensorDim) -> bool:
    """Whether an index is always one of this dimension's."""
    return isinstance(index, Symbol) and _MATCHING_SIZE.get(index.name) == dim.size


def convert_of(tensor: Tensor) -> tuple[str, str]:
    """The C++ type of a read value and what converts the stored element to it."""
    match tensor.element.scalar:
        case ScalarType.FLOAT:
            return "float", "ag_to_float"
        case ScalarType.BOOL:
            return "bool", "0 != "
        case ScalarType.INT:
            wide = tensor.element.name in ("int64", "uint32")
            return ("ag_i64", "(ag_i64)") if wide else ("int", "(int)")


def _declaration(tensor: Tensor) -> str:
    dims = ", ".join(f"{d.size}{'?' if d.optional else ''}" for d in tensor.dims)
    return (
        f"{tensor.name} : {tensor.element.name}[{dims}], stored as {C_ELEMENT[tensor.element.name]}"
    )


def line_of(e: Expr) -> int | None:
    """The line of the `.attn` text that an expression comes from."""
    return None if e.span is None else e.span.first.line
