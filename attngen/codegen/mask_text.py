"""The mask as tensor-core kernels see it: what mask_parts.py finds, as C++ text."""

from __future__ import annotations

from typing import final

from attngen.codegen.expr import Emitted, ExprPrinter, member
from attngen.codegen.formulas import FixedFormula, Formula, fixed_formula, formula
from attngen.codegen.mask_parts import MaskParts
from attngen.ir.attention import Attention
from attngen.ir.expr import Expr, LogicalOp
from attngen.record import record

__all__ = ["MaskText", "print_mask"]


@final
@record
class MaskText:
    """A mask in parts.

    fixed   what joins the parts of the score lines
    rows    `row.r0`, `row.r1`, …         keys  `key.k0`, `key.k1`, …
    of_row  what the mask says of a row   of_key, pair  likewise; None where it says nothing
    is_or   `or` stands between these, and not `and`
    reads   `pair` reads a tensor
    """

    fixed: tuple[FixedFormula, ...]
    rows: tuple[FixedFormula, ...]
    keys: tuple[FixedFormula, ...]
    of_row: Formula | None
    of_key: Formula | None
    pair: Formula | None
    is_or: bool
    reads: bool


def print_mask(attention: Attention, parts: MaskParts, first: int) -> MaskText:
    """The text of a mask in parts.

    first:  the number of the first of `fixed`, behind those of the score lines.
    """
    given: dict[int, Emitted] = {}
    roots = tuple(e for e in (parts.mask, parts.pair) if e is not None)

    def name(of: str, letter: str, first: int, nodes: tuple[Expr, ...]) -> tuple[FixedFormula, ...]:
        printer = ExprPrinter(attention, roots, wraps=True, given=dict(given))
        found = tuple(fixed_formula(printer, e, is_eager=True) for e in nodes)
        for i, (e, one) in enumerate(zip(nodes, found, strict=True), start=first):
            given[id(e)] = member(of, f"{letter}{i}", one.c_type)
        return found

    def term(e: Expr | None, *, is_branchless: bool = False) -> Formula | None:
        if e is None:
            return None
        printer = ExprPrinter(
            attention, roots, is_branchless=is_branchless, wraps=True, given=given
        )
        return formula(printer, e, is_eager=True)

    fixed = name("fixed", "c", first, parts.fixed)
    rows = name("row", "r", 0, parts.rows)
    keys = name("key", "k", 0, parts.keys)
    return MaskText(
        fixed=fixed,
        rows=rows,
        keys=keys,
        of_row=term(parts.of_row),
        of_key=term(parts.of_key),
        pair=term(parts.pair, is_branchless=True),
        is_or=parts.op is LogicalOp.OR,
        reads=parts.reads,
    )
