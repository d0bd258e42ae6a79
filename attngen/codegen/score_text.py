"""The score lines as tensor-core kernels see them: what score_parts.py finds, as C++ text."""

from __future__ import annotations

from typing import final

from attngen.codegen.expr import ExprPrinter, fixed, growing
from attngen.codegen.formulas import FixedFormula, Formula, fixed_formula, formula
from attngen.codegen.score_parts import ScoreParts, find_addend, find_score_parts
from attngen.codegen.staged_reads import StagedRead, name_staged
from attngen.ir.attention import Attention
from attngen.record import record

__all__ = ["ScoreText", "print_scores"]


@final
@record(eq=False)
class ScoreText:
    """The score lines of a variant.

    printer:  knows the parts, and takes the quick forms of functions.
    fixed:    what the lines take as `fixed.c0`, `fixed.c1`, …
    bases:    what they take as `bases.x0`, `bases.x1`, …
    addend:   what is added to s before the lines; None where there is nothing such.
    lines:    the others.
    """

    printer: ExprPrinter
    fixed: tuple[FixedFormula, ...]
    bases: tuple[Formula, ...]
    addend: Formula | None
    lines: tuple[Formula, ...]


def print_scores(
    attention: Attention, *, is_checked: bool, staged: tuple[StagedRead, ...] = ()
) -> ScoreText:
    """The text of the score lines, in parts; `staged` are what they read from shared memory.

    What is computed ahead is read where no pair attends, too, which a check must not report: a
    checked kernel has no parts.
    """
    named = name_staged(staged, attention)
    parts = ScoreParts((), ()) if is_checked else find_score_parts(attention, frozenset(named))
    plain = ExprPrinter(attention)
    of_block = tuple(fixed_formula(plain, e) for e in parts.fixed)
    given = {
        id(e): fixed(f"c{i}", one.c_type)
        for i, (e, one) in enumerate(zip(parts.fixed, of_block, strict=True))
    }
    given |= named
    with_fixed = ExprPrinter(attention, given=dict(given))
    for i, base in enumerate(parts.bases):
        factor = None if base.factor is None else with_fixed.print_operand(base.factor)
        given[id(base.node)] = growing(f"x{i}", base.growth, factor)
    addend = find_addend(attention)
    further = () if addend is None else (addend,)
    printer = ExprPrinter(attention, further, is_quick=True, given=given)
    lines = attention.scores if addend is None else attention.scores[1:]
    return ScoreText(
        printer,
        of_block,
        tuple(formula(with_fixed, base.node) for base in parts.bases),
        None if addend is None else formula(printer, addend),
        tuple(formula(printer, line) for line in lines),
    )
