"""Tile classes and dead keys as a template sees them: C++ text of each formula."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from attngen.analysis.key_ranges import Range, derive_key_ranges
from attngen.analysis.ranges import INT32, LONGEST
from attngen.analysis.tile_classes import (
    MOST_IN_BOX,
    BoxSummary,
    classify_tiles,
    key_may_attend,
)
from attngen.codegen.expr import Body, ExprPrinter, Variable
from attngen.ir.attention import Attention
from attngen.ir.expr import Const, Expr, Let, Role, Symbol, expr_type
from attngen.ir.interval import Interval
from attngen.ir.traverse import postorder, rewrite
from attngen.ir.types import ScalarType
from attngen.passes.fold_constants import fold_expr
from attngen.passes.name_shared import name_shared_nodes
from attngen.record import record

__all__ = ["KeySets", "SummaryFormula", "TileFormulas", "find_key_sets", "tile_formulas"]


@final
@record
class SummaryFormula:
    """A value whose minimum and maximum over a tile are fields `<name>_low` and `<name>_high`.

    `least` and `most` are what they are before anything is known, as C++ literals.
    """

    name: str
    body: Body
    least: str
    most: str


@final
@record
class BoxFormula:
    """What a tile reads of a tensor: the fields of the tile are those of a summary.

    `read` is the call's text up to its indices, `i0`, `i1`, …, which lie in `ends`.
    """

    name: str
    variables: tuple[Variable, ...]
    ends: tuple[tuple[str, str], ...]
    read: str
    least: str
    most: str


@final
@record
class RangeFormulas:
    """The keys that the rows of a tile may attend to: ascending, disjoint (begin, end).

    start_variables  what is computed first to find the first key: all but what the last end needs
    end_variables    the same for the last key: of a single range what its end needs
    c_type           holds every end
    skips            false where the keys begin at 0 for all rows, so that none is skipped
    """

    start_variables: tuple[Variable, ...]
    end_variables: tuple[Variable, ...]
    ends: tuple[tuple[str, str], ...]
    c_type: str
    skips: bool


@final
@record
class KeySets:
    """The heads that share what is summarised along keys; other heads are another set.

    mask  doc[b, kv] == doc[b, qpos]    B sets: all heads of a sequence share one
    mask  table[kv] == doc[b, qpos]     one set

    dims        their number, a product; () is one
    ends        numbers of a key tile: the minimum and the maximum of each summary
    of_head     C++ of the set of the head `at`
    first_head  C++ of the first head of the set `set`, as a block counts heads
    """

    dims: tuple[str, ...]
    ends: int
    of_head: str
    first_head: str


@final
@record
class TileFormulas:
    """What a kernel asks of a tile; None where the answer is always yes.

    ranges          keys that the rows may attend to
    may             some pair of the tile may attend
    all             every pair of the tile attends
    rest            every pair does that is within the bounds of keys; None where nothing else is
                    asked of a pair, or no bounds are known
    key_may         some row of the sequence may see this key
    """

    ranges: RangeFormulas | None
    may: Body | None
    all: Body | None
    rest: Body | None
    row_summaries: tuple[SummaryFormula, ...]
    key_summaries: tuple[SummaryFormula, ...]
    boxes: tuple[BoxFormula, ...]
    most_in_box: int
    key_sets: KeySets | None
    key_may: Body | None


def tile_formulas(attention: Attention) -> TileFormulas:
    """The classes of a variant's tiles, ready to be placed into a template."""
    classes = classify_tiles(attention)
    alive = key_may_attend(attention)
    # A let at a tile's first row and the same at its last one have one name: they lose it.
    ends = [
        rewrite(end, lambda e: e.value if isinstance(e, Let) else e)
        for each in _ranges(attention)
        for end in (each.begin, each.end)
    ]
    of_boxes = [e for box in classes.box_summaries for e in (*box.lows, *box.highs)]
    unasked = [] if classes.rest is None else [classes.rest]
    questions = (classes.may, classes.all, alive or Const(True), *ends, *of_boxes, *unasked)
    may, everywhere, alive, *others = name_shared_nodes(tuple(fold_expr(e) for e in questions))
    unasked = [others.pop() for _ in unasked]
    ends, of_boxes = others[: len(ends)], others[len(ends) :]
    summaries = (*classes.row_summaries, *classes.key_summaries)
    values = tuple(s.value for s in summaries)
    position = Interval(-LONGEST, LONGEST - 1)
    ranges = dict.fromkeys(("qpos_first", "qpos_last"), position)
    ranges |= {n: Interval(0, LONGEST - 1) for n in ("q_first", "q_last", "kv_first", "kv_last")}
    ranges |= {f"{s.name}_{end}": INT32 for s in classes.summaries for end in ("low", "high")}
    printer = ExprPrinter(
        attention, (may, everywhere, alive, *others, *unasked, *values), ranges, wraps=True
    )

    def body(e: Expr) -> Body | None:
        return None if isinstance(e, Const) and e.value is True else printer.print(e, is_eager=True)

    def formulas(kind: str) -> tuple[SummaryFormula, ...]:
        return tuple(
            SummaryFormula(s.name, printer.print(s.value, is_eager=True), *_ends(s.value))
            for s in summaries
            if s.name.startswith(kind)
        )

    return TileFormulas(
        ranges=_range_formulas([printer.print(end, is_eager=True) for end in ends]),
        may=body(may),
        all=body(everywhere),
        rest=next((body(e) for e in unasked if not _is_false(e)), None),
        row_summaries=formulas("row"),
        key_summaries=formulas("key"),
        boxes=_box_formulas(
            classes.box_summaries, [printer.print(e, is_eager=True) for e in of_boxes]
        ),
        most_in_box=MOST_IN_BOX,
        key_sets=find_key_sets(attention),
        key_may=body(alive),
    )


def pair_by_pair(attention: Attention) -> TileFormulas:
    """Formulas of a kernel that skips no tile and evaluates the mask at every pair.

    A read outside of a tensor is then met wherever the language says that it happens; tile
    classes would read more, and full tiles less.
    """
    formulas = tile_formulas(attention)
    return replace(
        formulas, ranges=None, may=None, all=formulas.all and Body((), "false", "bool"), rest=None,
        row_summaries=(), key_summaries=(), boxes=(), key_sets=None,
    )  # fmt: skip


def find_key_sets(attention: Attention) -> KeySets | None:
    """Who shares the summaries of keys; None where a mask has none.

    A length of its own makes the keys of a sequence its own, too.
    """
    summaries = classify_tiles(attention).key_summaries
    if not summaries:
        return None
    nodes = postorder(*(s.value for s in summaries))
    read = {n.name for n in nodes if isinstance(n, Symbol) and n.role in (Role.INDEX, Role.SIZE)}
    has_own_rows = "Sq" in read and attention.length_q is not None
    by_batch = "b" in read or attention.length_kv is not None or has_own_rows
    match ("h" in read, "hkv" in read):
        case (True, _):
            heads, head, first_head = ("Hq",), "at.h", "set"
        case (False, True):
            heads, head, first_head = ("Hkv",), "at.hkv", "set * (args.Hq / args.Hkv)"
        case _:
            return KeySets(
                ("B",) if by_batch else (),
                2 * len(summaries),
                "at.b" if by_batch else "0",
                "set * args.Hq",
            )
    return KeySets(
        ("B", *heads) if by_batch else heads,
        2 * len(summaries),
        f"at.b * args.{heads[0]} + {head}" if by_batch else head,
        first_head,
    )


def _is_false(e: Expr) -> bool:
    return isinstance(e, Const) and e.value is False


def _box_formulas(boxes: tuple[BoxSummary, ...], ends: list[Body]) -> tuple[BoxFormula, ...]:
    """`ends` are the text of every box's lows and highs, box by box."""
    formulas, texts = [], iter(ends)
    for box in boxes:
        dims = len(box.lows)
        bodies = [next(texts) for _ in range(2 * dims)]
        pairs = zip(bodies[:dims], bodies[dims:], strict=True)
        formulas.append(
            BoxFormula(
                box.name,
                tuple({v.name: v for body in bodies for v in body.variables}.values()),
                tuple((low.text, high.text) for low, high in pairs),
                f"read_{box.value.tensor}",
                *_ends(box.value),
            )
        )
    return tuple(formulas)


def _range_formulas(ends: list[Body]) -> RangeFormulas | None:
    """From the text of each begin and end; what several of them compute first is there once."""
    if not ends:
        return None
    texts = [body.text for body in ends]
    pairs = tuple(zip(texts[::2], texts[1::2], strict=True))
    types = {body.c_type for body in ends}
    return RangeFormulas(
        _variables_of(ends[:-1]),
        _variables_of(ends[-1:] if len(pairs) == 1 else ends),
        pairs,
        types.pop() if len(types) == 1 else "ag_i64",
        skips=texts[:-1] != ["0"],
    )


def _variables_of(bodies: list[Body]) -> tuple[Variable, ...]:
    return tuple({v.name: v for body in bodies for v in body.variables}.values())


def _ranges(attention: Attention) -> tuple[Range, ...]:
    """Those of a query tile; () where they say no more than [0, Skv)."""
    ranges = derive_key_ranges(attention).ranges
    match ranges:
        case (Range(Const(0), Symbol("Skv")),):
            return ()
        case _:
            return ranges


def _ends(value: Expr) -> tuple[str, str]:
    """The least and the largest value of a summary's type, as C++ literals."""
    if expr_type(value) is ScalarType.BOOL:
        return "0", "1"
    return "(-2147483647 - 1)", "2147483647"
