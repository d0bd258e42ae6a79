"""The mask as tensor-core kernels see it: what mask_parts.py finds, as C++ text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, final

from attngen.analysis.key_bounds import WORD_KEYS, as_phase, pieces_of_pattern
from attngen.codegen.expr import Body, Emitted, ExprPrinter, Variable, member
from attngen.codegen.formulas import FixedFormula, Formula, fixed_formula, formula, line_of
from attngen.codegen.mask_parts import MaskParts
from attngen.ir.attention import Attention
from attngen.ir.expr import Compare, Expr, Logical, LogicalOp, Not, Symbol
from attngen.ir.traverse import children, postorder, symbols
from attngen.record import record

__all__ = ["BoundsText", "MaskText", "PatternText", "print_mask"]


_SIGNS: Final[Mapping[LogicalOp, str]] = {LogicalOp.AND: " & ", LogicalOp.OR: " | "}


@final
@record
class PatternText:
    """What the keys of every `pieces` pieces of 8 have in common: it is asked of the first."""

    attends: Formula
    pieces: int

    def doublings(self, tile_kv: int) -> tuple[int, ...]:
        """The shifts that repeat the bits of the first pieces, until they are those of a tile."""
        bits, wanted = 2 * self.pieces, min(tile_kv, WORD_KEYS) // 4
        shifts = []
        while bits < wanted:
            shifts.append(bits)
            bits *= 2
        return tuple(shifts)


@final
@record
class BoundsText:
    """The keys of a row that bounds allow, a word of one bit each.

    words       of keys from kv0 on; those at and behind kv_end do not exist
    patterns    the words `pattern0`, `pattern1`, … in `words`
    has_phases  `words` calls keys_in_phase and is at the key kv0
    takes_says  `words` takes what `of_row` and `of_key` say, as `row_says` and `keys_attend`
    """

    words: Formula
    patterns: tuple[PatternText, ...]
    has_phases: bool
    takes_says: bool


@final
@record
class MaskText:
    """A mask in parts.

    fixed   what joins the parts of the score lines
    rows    `row.r0`, `row.r1`, …         keys  `key.k0`, `key.k1`, …
    bounds  the keys of a row that bounds allow
    of_row  what the rest says of a row   of_key, pair  likewise; None where it says nothing
    is_or   `or` stands between these, and not `and`
    reads   `pair` reads a tensor
    """

    fixed: tuple[FixedFormula, ...]
    rows: tuple[FixedFormula, ...]
    keys: tuple[FixedFormula, ...]
    bounds: BoundsText | None
    of_row: Formula | None
    of_key: Formula | None
    pair: Formula | None
    is_or: bool
    reads: bool

    @property
    def asks_pairs(self) -> bool:
        """Whether there is more than bounds."""
        if self.bounds is not None and self.bounds.takes_says:
            return False
        return any(f is not None for f in (self.of_row, self.of_key, self.pair))


def print_mask(
    attention: Attention, parts: MaskParts, first: int, *, in_words: bool = False
) -> MaskText:
    """The text of a mask in parts.

    first:     the number of the first of `fixed`, behind those of the score lines.
    in_words:  bounds have all of the mask, if it `is_in_words`.
    """
    if in_words := in_words and parts.is_in_words:
        parts = replace(parts, pair=None, rows=(), keys=())
    given: dict[int, Emitted] = {}
    of_mask = (parts.bounds, parts.rest, parts.pair)
    roots = tuple(e for e in of_mask if e is not None)

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
    bounds = None
    if in_words:
        bounds = _Words(attention, parts.limits, given).of_rest(parts)
    elif parts.bounds is not None:
        bounds = _Words(attention, parts.bounds, given).of_bounds(parts.bounds)
    return MaskText(
        fixed=fixed,
        rows=rows,
        keys=keys,
        bounds=bounds,
        of_row=term(parts.of_row),
        of_key=term(parts.of_key),
        pair=term(parts.pair, is_branchless=True),
        is_or=parts.op is LogicalOp.OR,
        reads=parts.reads,
    )


class _Words:
    """Writes a mask as words, a bit for each key: `kv < limit` is `keys_before(limit, kv0)`."""

    def __init__(
        self, attention: Attention, bounds: Expr | None, given: Mapping[int, Emitted]
    ) -> None:
        self._attention = attention
        self._given = given
        self._bounds = () if bounds is None else (bounds,)
        self._printer = ExprPrinter(attention, self._bounds, wraps=True, given=given)
        self._line = None if attention.mask is None else line_of(attention.mask)
        self._variables: dict[str, Variable] = {}
        self._patterns: list[PatternText] = []

    def of_bounds(self, bounds: Expr) -> BoundsText:
        """The keys that bounds allow."""
        is_and = isinstance(bounds, Logical) and bounds.op is LogicalOp.AND
        terms = children(bounds) if is_and else (bounds,)
        of_keys = [e for e in terms if "kv" in symbols(e)]
        of_row = [f"({self._value(e).text})" for e in terms if "kv" not in symbols(e)]
        match of_keys:
            case [Compare(_, Symbol("kv"), first_limit), *others]:
                limit = self._value(first_limit)
                end = "kv_end" if limit.c_type == "int" else f"({limit.c_type})kv_end"
                first = f"keys_before(ag_min({limit.text}, {end}), kv0)"
            case others:
                first = "keys_before(kv_end, kv0)"
        text = " & ".join([first, *map(self._words, others)])
        if of_row:
            text = f"{' && '.join(of_row)} ? {text} : 0"
        return self._text(text)

    def of_rest(self, parts: MaskParts) -> BoundsText:
        """The keys that row, key and pair allow together."""
        texts = ["(row_says ? ~0u : 0)"] if parts.of_row is not None else []
        texts += ["keys_attend"] if parts.of_key is not None else []
        texts += [self._words(parts.limits)] if parts.limits is not None else []
        joined = _SIGNS[parts.op].join(texts)
        joined = f"({joined})" if len(texts) > 1 else joined
        return self._text(f"keys_before(kv_end, kv0) & {joined}", takes_says=True)

    def _text(self, text: str, *, takes_says: bool = False) -> BoundsText:
        has_phases = any(as_phase(node) is not None for node in postorder(*self._bounds))
        words = Formula(tuple(self._variables.values()), text, self._line)
        return BoundsText(words, tuple(self._patterns), has_phases, takes_says)

    def _words(self, e: Expr) -> str:
        if phase := as_phase(e):
            place, end = (self._value(x).text for x in (phase.place, phase.limit))
            return f"keys_in_phase((int)({place}), {phase.period}, {end})"
        match e:
            case Not(operand):
                return f"~{self._words(operand)}"
            case Logical(op, operands):
                return f"({_SIGNS[op].join(map(self._words, operands))})"
            case Compare(_, Symbol("kv"), limit):
                return f"keys_before({self._value(limit).text}, kv0)"
        if pieces := pieces_of_pattern(e):
            return self._pattern(e, pieces)
        return f"({self._value(e).text} ? ~0u : 0)"

    def _pattern(self, e: Expr, pieces: int) -> str:
        printer = ExprPrinter(self._attention, (e,), wraps=True, given=self._given)
        attends = replace(formula(printer, e, is_eager=True), line=self._line)
        self._patterns.append(PatternText(attends, pieces))
        return f"pattern{len(self._patterns) - 1}"

    def _value(self, e: Expr) -> Body:
        body = self._printer.print(e, is_eager=True)
        self._variables.update((v.name, v) for v in body.variables)
        return body
