"""When a tile is skipped and when it is full, in the words of the language.

    skip unless  kv_first <= qpos_last
                 and min(doc[b, qpos]) <= max(doc[b, kv])
                 and min(doc[b, kv]) <= max(doc[b, qpos])

And what is not known of a tile, why, and what would help.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from attngen.analysis.key_ranges import KeyRanges
from attngen.analysis.ranges import compile_time_ranges, infer_ranges
from attngen.analysis.tile_classes import MOST_IN_BOX, BoxSummary, Summary, TileClasses
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Compare,
    CompareOp,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    Not,
    Role,
    Symbol,
    expr_type,
)
from attngen.ir.printer import print_expr
from attngen.ir.traverse import postorder, rewrite, symbols
from attngen.ir.types import ScalarType
from attngen.passes.fold_constants import fold_expr

__all__ = ["advice", "condition_rows", "formula_lines", "range_rows", "unknown_parts"]

WIDTH: Final = 84
"""Characters of a line of a formula."""
MAX_LINES: Final = 16
"""Lines of one formula; a longer one is cut, and says so."""
MAX_NAME: Final = 40
"""Characters of a value that is written where it is used; a longer one is named first."""

_OPPOSITE: Final[Mapping[CompareOp, CompareOp]] = {
    CompareOp.LT: CompareOp.GE, CompareOp.GE: CompareOp.LT, CompareOp.GT: CompareOp.LE,
    CompareOp.LE: CompareOp.GT, CompareOp.EQ: CompareOp.NE, CompareOp.NE: CompareOp.EQ,
}  # fmt: skip
_ROW: Final = frozenset({"q", "qpos"})
_KEY: Final = frozenset({"kv"})


def condition_rows(classes: TileClasses, bounds: Expr | None = None) -> list[list[str]]:
    """The conditions as rows of a table: what they decide, and a line of the formula.

    bounds:  those of keys, of the mask (key_bounds.py).
    """
    named: dict[str, Expr] = {}
    definitions: list[list[str]] = []
    for summary in classes.summaries:
        text = print_expr(summary.value)
        if len(text) > MAX_NAME or "\n" in text:
            definitions += _labelled(f"{summary.name} is", formula_lines(summary.value))
            text = summary.name
        named |= _ends_in_words(summary, text)
    rows = _condition("skip", "unless", classes.may, True, named)
    rows += _condition("full", "where", classes.all, False, named)
    of_row = [] if bounds is None else formula_lines(bounds)
    if bounds is not None and classes.rest is not None:
        rows += _condition("known", "where", classes.rest, False, named)
        rows += _labelled("", ["there a row's keys are (forward_simt asks each pair)", *of_row])
    if bounds is not None and classes.rest is None:
        lines = ["otherwise: a row's keys are (forward_simt asks each pair)", *of_row]
        rows += _labelled("partial", lines)
    else:
        rows.append(["partial", "otherwise: the mask is evaluated pair by pair"])
    if named:
        of = [
            what
            for what, some in (
                ("rows", classes.row_summaries or classes.box_summaries),
                ("keys", classes.key_summaries or classes.box_summaries),
            )
            if some
        ]
        words = _used_words(classes)
        rows.append(["", f"{words}: over the {' or '.join(of)} of the tile"])
    return [*definitions, *rows]


def range_rows(ranges: KeyRanges) -> list[list[str]]:
    """The keys that a tile of rows visits, as rows of a table: one range after the other."""
    if not ranges.ranges:
        return [["keys", "none: no pair attends"]]
    rows: list[list[str]] = []
    for each in ranges.ranges:
        begin, end = (" ".join(formula_lines(_without_lets(e))) for e in (each.begin, each.end))
        lines = [f"{begin} <= kv < {end}"]
        if len(lines[0]) > WIDTH:
            lines = [f"from {begin}", f"up to {end}, excluded"]
        lines = [x for line in lines for x in textwrap.wrap(line, WIDTH, subsequent_indent="    ")]
        rows += _labelled("or" if rows else "keys", lines)
    return rows


def _without_lets(e: Expr) -> Expr:
    return rewrite(e, lambda node: node.value if isinstance(node, Let) else node)


def _condition(
    label: str, joint: str, e: Expr, never: bool, named: Mapping[str, Expr]
) -> list[list[str]]:
    """`never` is the value of a condition that cannot come true."""
    lines = formula_lines(e, named)
    if lines == [print_expr(Const(never))]:
        return [[label, "never"]]
    if lines == [print_expr(Const(not never))]:
        return [[label, "always"]]
    return _labelled(f"{label} {joint}", lines)


def _labelled(label: str, lines: list[str]) -> list[list[str]]:
    return [["" if i else label, line] for i, line in enumerate(lines)]


def formula_lines(e: Expr, named: Mapping[str, Expr] | None = None) -> list[str]:
    """A formula, one line for each of its parts that are joined by the outermost `and` or `or`.

    named:  what stands for a symbol, or for the comparison of a symbol with 1.
    """
    folded = _flattened(fold_expr(_in_words(e, named or {})))
    *lets, text = print_expr(folded).splitlines()
    joint = f" {folded.op.value} " if isinstance(folded, Logical) else None
    parts = _split_outside_parentheses(text, joint) if joint else [text]
    parts = [parts[0], *(f"{joint}{part}".lstrip() for part in parts[1:])]
    lines: list[str] = []
    for part in (*lets, *parts):
        lines += textwrap.wrap(part, WIDTH, subsequent_indent="    ", break_long_words=False)
    if len(lines) > MAX_LINES:
        return [*lines[: MAX_LINES - 1], f"… and {len(lines) - MAX_LINES + 1} more lines"]
    return lines


def _flattened(e: Expr) -> Expr:
    """A chain together with the chains of the same kind that are its operands."""
    if not isinstance(e, Logical):
        return e
    parts: list[Expr] = []
    stack: list[Expr] = [e]
    while stack:
        node = stack.pop()
        if isinstance(node, Logical) and node.op is e.op:
            stack.extend(reversed(node.operands))
        else:
            parts.append(node)
    return Logical(e.op, tuple(parts), e.span)


def _split_outside_parentheses(text: str, joint: str) -> list[str]:
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth == 0 and text.startswith(joint, i):
            parts.append(text[begin:i])
            begin = i + len(joint)
    return [*parts, text[begin:]]


# ---- summaries in words ----------------------------------------------------------------------


def _ends_in_words(summary: Summary | BoxSummary, text: str) -> dict[str, Expr]:
    """`row0_low` is `min(doc[b, qpos])`; of a truth value, `all(keep[b, kv])`."""
    is_truth = expr_type(summary.value) is ScalarType.BOOL
    low, high = ("all", "any") if is_truth else ("min", "max")
    kind = ScalarType.BOOL if is_truth else ScalarType.INT
    return {
        f"{summary.name}_{end}": Symbol(f"{word}({text})", Role.TILE, kind)
        for end, word in (("low", low), ("high", high))
    }


def _in_words(e: Expr, named: Mapping[str, Expr]) -> Expr:
    """Summaries by their words, and `kv_first <= 3` for `not kv_first > 3`.

    A summary that is a truth value is compared with 1 in a tile class.
    """

    def rename(node: Expr) -> Expr:
        match node:
            case Compare(CompareOp.EQ, Symbol(name), Const(1)) if _is_truth(named.get(name)):
                return named[name]
            case Symbol(name) if name in named and not _is_truth(named[name]):
                return named[name]
            case Not(Compare(op, left, right)) if expr_type(left) is ScalarType.INT:
                return Compare(_OPPOSITE[op], left, right)
            case _:
                return node

    return rewrite(e, rename)


def _is_truth(e: Expr | None) -> bool:
    return e is not None and expr_type(e) is ScalarType.BOOL


def _used_words(classes: TileClasses) -> str:
    values = [s.value for s in classes.summaries]
    words = []
    if any(expr_type(value) is not ScalarType.BOOL for value in values):
        words += ["min", "max"]
    if any(expr_type(value) is ScalarType.BOOL for value in values):
        words += ["any", "all"]
    return ", ".join(words)


# ---- what is not known, and what would help --------------------------------------------------


def unknown_parts(attention: Attention, classes: TileClasses) -> Iterator[str]:
    """Parts of the mask that are known only pair by pair: why, and how to write them."""
    yield from classes.notes
    if attention.mask is None:
        return
    for text, divisor in _unproved_divisors(attention, attention.mask).items():
        is_param = isinstance(divisor, Symbol) and divisor.role is Role.PARAM
        remedy = f"declare it `where {text} >= 0`" if is_param else f"write `max({text}, 0)`"
        yield f"`//` and `%` by `{text}` are decided pair by pair, as it may be negative: {remedy}"


def _unproved_divisors(attention: Attention, mask: Expr) -> dict[str, Expr]:
    """What positions are divided by, where nothing proves that it is positive, by its text."""
    ranges = infer_ranges(attention.expressions(), compile_time_ranges(attention), attention)
    found: dict[str, Expr] = {}
    for node in postorder(mask):
        match node:
            case Binary(BinaryOp.FLOORDIV | BinaryOp.MOD as op, left, right):
                sign = ranges[id(right)]
                is_known = sign.low >= 0 or (op is BinaryOp.FLOORDIV and sign.high <= 0)
                if _varies(left) and not is_known and not _varies(right):
                    found.setdefault(print_expr(right).splitlines()[-1], right)
            case _:
                pass
    return found


def advice(attention: Attention, classes: TileClasses) -> Iterator[str]:
    """What would let more tiles be skipped or full, where a map shows that some could be."""
    if attention.mask is None:
        return
    nodes = list(postorder(attention.mask))
    tables = {
        node.tensor
        for node in nodes
        if isinstance(node, Load) and symbols(node) & _ROW and symbols(node) & _KEY
    }
    for name in sorted(tables):
        yield f"a tile is known that reads at most {MOST_IN_BOX} elements of `{name}`: smaller help"
    has_floats = any(_is_float_comparison(node) for node in nodes)
    if has_floats:
        yield "a comparison of integers is known for a whole tile, one of floats may not be"
    summaries = (*classes.row_summaries, *classes.key_summaries)
    if summaries:
        yield (
            "of what is read from a tensor, a tile knows the least and the largest value: values"
            " in order along the tokens are told apart best"
        )
    divisors = _unproved_divisors(attention, attention.mask)
    if not (tables or has_floats or summaries or divisors):
        yield "conditions may hold in a tile one by one, and nowhere together: smaller tiles help"


def _varies(e: Expr) -> bool:
    return bool(symbols(e) & (_ROW | _KEY))


def _is_float_comparison(node: Expr) -> bool:
    if not isinstance(node, Compare) or expr_type(node.left) is not ScalarType.FLOAT:
        return False
    return bool(symbols(node) & _ROW and symbols(node) & _KEY)
