"""The score lines as tensor-core kernels see them: what score_parts.py finds, as C++ text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

from attngen.codegen.expr import (
    Core,
    ExprPrinter,
    eager_lets,
    fixed,
    float_literal,
    growing,
    mentions_score,
)
from attngen.codegen.formulas import FixedFormula, Formula, fixed_formula, formula
from attngen.codegen.near_scores import find_near
from attngen.codegen.quick_functions import find_short_calls
from attngen.codegen.score_parts import ScoreParts, find_addend, find_growth, find_score_parts
from attngen.codegen.staged_reads import StagedRead, name_staged
from attngen.ir.attention import Attention
from attngen.ir.expr import Const, Expr, Let, Role, Symbol
from attngen.ir.traverse import postorder, tensors
from attngen.record import record

__all__ = ["NearText", "ScoreText", "ScoreUnit", "ScoreUnitText", "print_scores"]


@final
@record
class ScoreUnitText:
    """A ScoreUnit as C++ numbers; `factor` is the unit times log2(e)."""

    unit: str
    zero: str
    factor: str


@final
@record
class ScoreUnit:
    """What the last score line leaves to the weights: a score is unit * s + zero, unit above 0."""

    unit: float
    zero: float

    @property
    def text(self) -> ScoreUnitText:
        """The same for a template."""
        factor = self.unit * math.log2(math.e)
        return ScoreUnitText(*(float_literal(x) for x in (self.unit, self.zero, factor)))


@final
@record
class NearText:
    """A NearScore as C++ numbers."""

    limit: str
    coefficients: tuple[str, ...]


@final
@record(eq=False)
class ScoreText:
    """The score lines of a variant.

    printer:  knows the parts, and takes the quick forms of functions.
    fixed:    what the lines take as `fixed.c0`, `fixed.c1`, …
    bases:    what they take as `bases.x0`, `bases.x1`, …
    addend:   what is added to s before the lines; None where there is nothing such.
    lines:    the others.
    is_raw:   the first of them takes q.k, and its scale.
    is_for_all:  they are dear and read nothing, so a pair that does not attend may be scored, too,
              instead of a branch for each pair.
    unit:     of what the last of them gives; None where that is the score.
    near:     the only line where s is near 0; None where it is the same everywhere.
    growth:   what the addend gains from a key to the next, in units of q.k, where that is all that
              depends on the key and products may begin with it.
    """

    printer: ExprPrinter
    fixed: tuple[FixedFormula, ...]
    bases: tuple[Formula, ...]
    addend: Formula | None
    lines: tuple[Formula, ...]
    is_raw: bool
    is_for_all: bool
    unit: ScoreUnit | None
    near: NearText | None
    growth: Formula | None


def print_scores(
    attention: Attention,
    *,
    is_checked: bool,
    is_dear: bool,
    takes_unit: bool,
    most_growth: float = 0.0,
    staged: tuple[StagedRead, ...] = (),
) -> ScoreText:
    """The text of the score lines, in parts.

    is_dear:      a score costs more than a product and an addend.
    takes_unit:   weights can take a unit.
    most_growth:  by which an addend may grow from key to key, for products to begin with it.
    staged:       what the lines take from shared memory.

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
    growth = find_growth(attention, parts, most_growth)
    with_fixed = ExprPrinter(attention, () if growth is None else (growth,), given=dict(given))
    for i, base in enumerate(parts.bases):
        factor = None if base.factor is None else with_fixed.print_operand(base.factor)
        given[id(base.node)] = growing(f"x{i}", base.growth, factor)
    addend = find_addend(attention)
    further = () if addend is None else (addend,)
    raw = _raw_symbols(attention) if addend is None else frozenset()
    short = find_short_calls(attention)
    printer = ExprPrinter(attention, further, is_quick=True, given=given, short=short, raw=raw)
    lines = attention.scores if addend is None else attention.scores[1:]
    texts = [formula(printer, line) for line in lines]
    unit = near = None
    if lines and takes_unit and attention.row_state.running_max:
        core = printer.print_core(lines[-1])
        if core is not None:
            texts[-1] = replace(texts[-1], text=core.text)
            unit = ScoreUnit(core.number, core.addend)
            is_alone = len(lines) == 1 and not texts[-1].variables and is_dear
            near = _near(attention, core) if is_alone else None
    return ScoreText(
        printer,
        of_block,
        tuple(formula(with_fixed, base.node) for base in parts.bases),
        None if addend is None else formula(printer, addend),
        tuple(texts),
        bool(raw),
        is_dear and not tensors(*attention.scores),
        unit,
        near,
        None if growth is None else formula(with_fixed, growth),
    )


def _near(attention: Attention, core: Core) -> NearText | None:
    """What such a score is near 0, where the scale of q.k is known and most scores are there."""
    if core.power is None or not isinstance(attention.scale, Const):
        return None
    near = find_near(core.power, float(attention.scale.value))
    if near is None:
        return None
    return NearText(float_literal(near.limit), tuple(float_literal(c) for c in near.coefficients))


def _raw_symbols(attention: Attention) -> frozenset[int]:
    """The first line's `s`, by id, where nothing but the line takes it: it may stay unscaled."""

    def scores(lines: tuple[Expr, ...]) -> frozenset[int]:
        nodes = (n for n in postorder(*lines) if isinstance(n, Symbol))
        return frozenset(id(n) for n in nodes if n.role is Role.SCORE)

    first = scores(attention.scores[:1])
    local = {id(let) for line in attention.scores[:1] for let in (line, *eager_lets(line))}
    lets = (n for n in postorder(*attention.scores[:1]) if isinstance(n, Let))
    is_called = any(id(let) not in local and mentions_score(let) for let in lets)
    return frozenset() if is_called or first & scores(attention.scores[1:]) else first
