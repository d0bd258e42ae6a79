"""The mask as tensor-core kernels see it: what mask_parts.py finds, as C++ text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from attngen.codegen.expr import Body, Emitted, ExprPrinter, Variable, member
from attngen.codegen.formulas import FixedFormula, Formula, fixed_formula, formula, line_of
from attngen.codegen.mask_parts import MaskParts
from attngen.ir.attention import Attention
from attngen.ir.expr import Compare, Expr, Logical, LogicalOp, Not, Symbol
from attngen.ir.traverse import children
from attngen.record import record

__all__ = ["MaskText", "print_mask"]


@final
@record
class MaskText:
    """A mask in parts.

    fixed   what joins the parts of the score lines
    rows    `row.r0`, `row.r1`, …         keys  `key.k0`, `key.k1`, …
    bounds  the keys of a row that bounds allow, a word of one bit each
    of_row  what the rest says of a row   of_key, pair  likewise; None where it says nothing
    is_or   `or` stands between these, and not `and`
    reads   `pair` reads a tensor
    """

    fixed: tuple[FixedFormula, ...]
    rows: tuple[FixedFormula, ...]
    keys: tuple[FixedFormula, ...]
    bounds: Formula | None
    of_row: Formula | None
    of_key: Formula | None
    pair: Formula | None
    is_or: bool
    reads: bool

    @property
    def asks_pairs(self) -> bool:
        """Whether there is more than bounds."""
        return any(f is not None for f in (self.of_row, self.of_key, self.pair))


def print_mask(attention: Attention, parts: MaskParts, first: int) -> MaskText:
    """The text of a mask in parts.

    first:  the number of the first of `fixed`, behind those of the score lines.
    """
    given: dict[int, Emitted] = {}
    roots = tuple(e for e in (parts.bounds, parts.rest, parts.pair) if e is not None)

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
        bounds=None if parts.bounds is None else _print_words(attention, parts.bounds, given),
        of_row=term(parts.of_row),
        of_key=term(parts.of_key),
        pair=term(parts.pair, is_branchless=True),
        is_or=parts.op is LogicalOp.OR,
        reads=parts.reads,
    )


def _print_words(attention: Attention, bounds: Expr, given: Mapping[int, Emitted]) -> Formula:
    """Bounds as words of one bit for each key of a lane: `kv < limit` is `keys_before(limit, kv0)`.

    Keys at and behind `kv_end` do not exist.
    """
    printer = ExprPrinter(attention, (bounds,), wraps=True, given=given)
    variables: dict[str, Variable] = {}

    def value(e: Expr) -> Body:
        body = printer.print(e, is_eager=True)
        variables.update((v.name, v) for v in body.variables)
        return body

    def words(e: Expr) -> str:
        match e:
            case Not(operand):
                return f"~{words(operand)}"
            case Logical(op, operands):
                sign = " & " if op is LogicalOp.AND else " | "
                return f"({sign.join(map(words, operands))})"
            case Compare(_, Symbol("kv"), limit):
                return f"keys_before({value(limit).text}, kv0)"
            case _:
                return f"({value(e).text} ? ~0u : 0)"

    is_and = isinstance(bounds, Logical) and bounds.op is LogicalOp.AND
    terms = children(bounds) if is_and else (bounds,)
    of_keys = [e for e in terms if _has_limit(e)]
    of_row = [f"({value(e).text})" for e in terms if not _has_limit(e)]
    first, *others = of_keys
    if isinstance(first, Compare):
        limit = value(first.right)
        end = "kv_end" if limit.c_type == "int" else f"({limit.c_type})kv_end"
        texts = [f"keys_before(ag_min({limit.text}, {end}), kv0)"]
    else:
        texts = ["keys_before(kv_end, kv0)", words(first)]
    text = " & ".join([*texts, *map(words, others)])
    if of_row:
        text = f"{' && '.join(of_row)} ? {text} : 0"
    line = None if attention.mask is None else line_of(attention.mask)
    return Formula(tuple(variables.values()), text, line)


def _has_limit(bounds: Expr) -> bool:
    """Whether it compares keys with a limit, and is not about the row alone."""
    match bounds:
        case Not() | Logical():
            return any(map(_has_limit, children(bounds)))
        case Compare(_, Symbol("kv"), _):
            return True
        case _:
            return False
