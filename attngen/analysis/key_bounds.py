"""What of a mask says where the keys of a row begin and end.

    mask    kv <= qpos and kv > qpos - W and doc[b, qpos] == doc[b, kv]

    bounds  kv < qpos + 1 and not kv < qpos - W + 1
    rest    doc[b, qpos] == doc[b, kv]

Whatever is made of such comparisons is known for many keys of a row at once: those before a
limit are a word of ones, and `and`, `or` and `not` are those of words.  Only the rest is asked pair
by pair, and where it holds at all pairs of a tile, bounds alone decide.

A limit depends on the row, and on what no pair changes.  One that reads a tensor for each row
counts as rest, which reads it ahead; so does one that may leave 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, final

from attngen.analysis.equalities import use_equalities
from attngen.analysis.ranges import INT64, compile_time_ranges, infer_ranges, range_of_work
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    LogicalOp,
    Negate,
    Not,
    Role,
    Symbol,
    expr_type,
)
from attngen.ir.functions import call
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = ["MaskSplit", "split_mask"]

_ROW: Final = frozenset({"q", "qpos"})
_KEY: Final = frozenset({"kv"})
_NONE: Final[frozenset[str]] = frozenset()
_MOST_BOUNDS: Final = 8
"""Limits of a row; each takes about as long as eight pairs."""
_MOST_NODES: Final = 512
"""Nodes of a mask beyond which all of it is rest: looking takes long."""


@final
@record(eq=False)
class MaskSplit:
    """A mask as `bounds and rest`; None for a part that says nothing.

    bounds  `and`, `or` and `not` of comparisons `kv < limit` and of conditions on the row
    rest    any other terms of the mask
    """

    bounds: Expr | None
    rest: tuple[Expr, ...]


@lru_cache(maxsize=64)  # asked again for every schedule
def split_mask(attention: Attention) -> MaskSplit:
    """The bounds of a variant's mask, and its other terms."""
    attention = use_equalities(attention)
    mask = attention.mask
    if mask is None:
        return MaskSplit(None, ())
    if len(list(postorder(mask))) > _MOST_NODES:
        return MaskSplit(None, (mask,))
    finder = _Finder(attention, mask)
    bounds: list[Expr] = []
    rest: list[Expr] = []
    on_rows: list[Expr] = []
    for term in _terms(mask):
        found = finder.bounds_of(term)
        if found is None:
            rest.append(term)
        elif finder.varies(term) & _KEY:
            bounds.append(found)
        else:
            on_rows.append(term)
    if not bounds or sum(map(_limits, bounds)) > _MOST_BOUNDS:
        return MaskSplit(None, (mask,))
    return MaskSplit(_joined(LogicalOp.AND, (*bounds, *on_rows)), tuple(rest))


def _terms(mask: Expr) -> Iterator[Expr]:
    """The operands of an `and`, and of each `and` among them."""
    inner = mask
    while isinstance(inner, Let):
        inner = inner.value
    if isinstance(inner, Logical) and inner.op is LogicalOp.AND:
        for operand in inner.operands:
            yield from _terms(operand)
    else:
        yield mask


def _limits(bounds: Expr) -> int:
    """How many limits are compared with `kv`."""
    if isinstance(bounds, Not | Logical):
        return sum(map(_limits, children(bounds)))
    return int(isinstance(bounds, Compare))


class _Finder:
    """Writes terms of one mask as comparisons `kv < limit`."""

    def __init__(self, attention: Attention, mask: Expr) -> None:
        self._attention = attention
        self._symbols = compile_time_ranges(attention)
        self._varies: dict[int, frozenset[str]] = {}
        self._reads: dict[int, bool] = {}
        self._note(mask)

    def varies(self, e: Expr) -> frozenset[str]:
        return self._varies[id(e)]

    def _note(self, root: Expr) -> None:
        for node in postorder(root):
            if id(node) in self._varies:
                continue
            own = frozenset({node.name}) & (_ROW | _KEY) if isinstance(node, Symbol) else _NONE
            below = children(node)
            self._varies[id(node)] = own.union(*(self._varies[id(c)] for c in below))
            reads_row = isinstance(node, Load) and bool(self._varies[id(node)])
            self._reads[id(node)] = reads_row or any(self._reads[id(c)] for c in below)

    # ---- truth values ----

    def bounds_of(self, e: Expr) -> Expr | None:
        """The term as bounds; None where it is more than that."""
        if self._reads[id(e)]:
            return None
        if not self._varies[id(e)] & _KEY:
            return e
        match e:
            case Let(_, value):
                return self.bounds_of(value)
            case Not(operand):
                return self._negated(self.bounds_of(operand))
            case Logical(op, operands):
                return _joined(op, tuple(self.bounds_of(o) for o in operands))
            case Compare(op, left, right) if expr_type(left) is ScalarType.INT:
                return self._compare(op, left, right)
            case _:
                return None

    def _negated(self, bounds: Expr | None) -> Expr | None:
        return None if bounds is None else Not(bounds)

    def _compare(self, op: CompareOp, left: Expr, right: Expr) -> Expr | None:
        """`left op right`, by means of `x < limit` alone; one side depends on the key."""
        if self.varies(right) & _KEY:
            if self.varies(left) & _KEY:
                return None
            left, right, op = right, left, _TURNED[op]
        after = _plus(right, 1)
        match op:
            case CompareOp.LT:
                return self._below(left, right)
            case CompareOp.LE:
                return self._below(left, after)
            case CompareOp.GE:
                return self._negated(self._below(left, right))
            case CompareOp.GT:
                return self._negated(self._below(left, after))
            case CompareOp.EQ | CompareOp.NE:
                parts = (self._below(left, after), self._negated(self._below(left, right)))
                equal = _joined(LogicalOp.AND, parts)
                return equal if op is CompareOp.EQ else self._negated(equal)

    # ---- integers ----

    def _below(self, x: Expr, limit: Expr) -> Expr | None:
        """`x < limit` as bounds; `x` depends on the key, `limit` does not."""
        match x:
            case Symbol():  # it is kv
                return self._bound(limit)
            case Let(_, value):
                return self._below(value, limit)
            case Negate(operand):
                return self._above(operand, _negative(limit))
            case Binary(BinaryOp.ADD, left, right):
                if not self.varies(right) & _KEY:
                    return self._below(left, _minus(limit, right))
                if not self.varies(left) & _KEY:
                    return self._below(right, _minus(limit, left))
            case Binary(BinaryOp.SUB, left, right):
                if not self.varies(right) & _KEY:
                    return self._below(left, _add(right, limit))
                if not self.varies(left) & _KEY:
                    return self._above(right, _minus(left, limit))
            case Binary(BinaryOp.FLOORDIV, left, Const(int(c))) if c > 0:
                return self._below(left, Binary(BinaryOp.MUL, limit, Const(c)))
            case Call("abs", (operand,)):
                parts = (self._below(operand, limit), self._above(operand, _negative(limit)))
                return _joined(LogicalOp.AND, parts)
            case Call("min" | "max" as function, operands):
                op = LogicalOp.OR if function == "min" else LogicalOp.AND
                return _joined(op, tuple(self._part(o, limit) for o in operands))
            case _:
                pass
        return None

    def _part(self, x: Expr, limit: Expr) -> Expr | None:
        """`x < limit`, whatever `x` depends on."""
        if self.varies(x) & _KEY:
            return self._below(x, limit)
        return None if self._reads[id(x)] else Compare(CompareOp.LT, x, limit)

    def _above(self, x: Expr, limit: Expr) -> Expr | None:
        """`x > limit`."""
        return self._negated(self._below(x, _plus(limit, 1)))

    def _bound(self, limit: Expr) -> Expr | None:
        known = infer_ranges((limit,), self._symbols, self._attention)
        if not all(_fits(node, known) for node in postorder(limit)):
            return None
        return _before([limit], "min")


_KV: Final = Symbol("kv", Role.INDEX, ScalarType.INT)
_TURNED: Final[Mapping[CompareOp, CompareOp]] = {
    CompareOp.LT: CompareOp.GT,
    CompareOp.LE: CompareOp.GE,
    CompareOp.GT: CompareOp.LT,
    CompareOp.GE: CompareOp.LE,
    CompareOp.EQ: CompareOp.EQ,
    CompareOp.NE: CompareOp.NE,
}


def _fits(node: Expr, known: Mapping[int, Interval]) -> bool:
    is_int = expr_type(node) is ScalarType.INT
    return not is_int or range_of_work(node, known).within(*INT64.ends)


def _plus(e: Expr, number: int) -> Expr:
    """`e + number`, with one constant in a sum."""
    match e:
        case Const(int(c)):
            return Const(c + number)
        case Binary(BinaryOp.ADD, Const(int(c)), x) | Binary(BinaryOp.ADD, x, Const(int(c))):
            return _plus(x, c + number)
        case Binary(BinaryOp.SUB, x, Const(int(c))):
            return _plus(x, number - c)
        case _ if number < 0:
            return Binary(BinaryOp.SUB, e, Const(-number))
        case _:
            return Binary(BinaryOp.ADD, e, Const(number)) if number else e


def _add(x: Expr, y: Expr) -> Expr:
    match y:
        case Const(int(c)):
            return _plus(x, c)
        case _:
            return Binary(BinaryOp.ADD, x, y)


def _minus(x: Expr, y: Expr) -> Expr:
    match y:
        case Const(int(c)):
            return _plus(x, -c)
        case _:
            return Binary(BinaryOp.SUB, x, y)


def _negative(e: Expr) -> Expr:
    match e:
        case Const(int(c)):
            return Const(-c)
        case _:
            return Negate(e)


def _joined(op: LogicalOp, parts: tuple[Expr | None, ...]) -> Expr | None:
    """All of them, or None where one is more than bounds; of several limits there is one left."""
    ends: list[Expr] = []
    begins: list[Expr] = []
    joined: list[Expr] = []
    for part in parts:
        match part:
            case None:
                return None
            case Compare(CompareOp.LT, Symbol("kv"), limit):
                ends.append(limit)
            case Not(Compare(CompareOp.LT, Symbol("kv"), limit)):
                begins.append(limit)
            case _:
                joined.append(part)
    is_and = op is LogicalOp.AND
    if begins:
        joined.insert(0, Not(_before(begins, "max" if is_and else "min")))
    if ends:
        joined.insert(0, _before(ends, "min" if is_and else "max"))
    return joined[0] if len(joined) == 1 else Logical(op, tuple(joined))


def _before(limits: list[Expr], function: str) -> Expr:
    limit = limits[0] if len(limits) == 1 else call(function, *limits)
    return Compare(CompareOp.LT, _KV, limit)
