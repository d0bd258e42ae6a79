"""What of a mask says where the keys of a row begin and end.

    mask    kv <= qpos and kv > qpos - W and doc[b, qpos] == doc[b, kv]

    bounds  kv < qpos + 1 and not kv < qpos - W + 1
    rest    doc[b, qpos] == doc[b, kv]

Whatever is made of such comparisons is known for many keys of a row at once: those before a
limit are a word of ones, and `and`, `or` and `not` are those of words.  Only the rest is asked pair
by pair, and where it holds at all pairs of a tile, bounds alone decide.

Keys may begin and end again and again:

    limit    kv < qpos + 1
    phase    kv % 256 < q % 256     a limit after each 256 keys; a word has parts of two at most
    pattern  (q - kv) % 3 == 0      the same again after some keys, few enough to ask each

A limit depends on the row, and on what no pair changes.  One that reads a tensor for each row
counts as rest, which reads it ahead; so does what may leave 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final, final

from attngen.analysis.equalities import use_equalities
from attngen.analysis.growth import find_growth_of, growth_of
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
from attngen.ir.traverse import children, postorder, symbols
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "WORD_KEYS",
    "MaskSplit",
    "Phase",
    "as_phase",
    "find_bounds",
    "pieces_of_pattern",
    "split_mask",
]

WORD_KEYS: Final = 128
"""Keys of which a lane of a tensor-core kernel has 32, two in every 8, one bit each in a word."""

_ROW: Final = frozenset({"q", "qpos"})
_KEY: Final = frozenset({"kv"})
_NONE: Final[frozenset[str]] = frozenset()
_MOST_BOUNDS: Final = 12
"""Limits of a row; each takes about as long as eight pairs, of which a word has 32."""
_LIMITS_OF_PHASE: Final = 3
_PIECE: Final = 8
_MOST_PIECES: Final = 8
"""Of 8 keys, of which a pattern asks two: half of a word's."""
_LONGEST_PHASE: Final = 1 << 29
"""Keys, so that twice as many are within 32 bits."""
_MOST_NODES: Final = 512
"""Nodes of a mask beyond which all of it is rest: looking takes long."""


@final
@record(eq=False)
class MaskSplit:
    """A mask as `bounds and rest`; None for a part that says nothing.

    bounds  `and`, `or` and `not` of limits, phases, patterns, and conditions on the row
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
    terms = [(term, finder.bounds_of(term)) for term in _terms(mask)]
    of_keys = [e for term, e in terms if e is not None and finder.varies(term) & _KEY]
    bounds = _cheapest(of_keys)
    if not bounds:
        return MaskSplit(None, (mask,))
    on_rows = [e for term, e in terms if e is not None and not finder.varies(term) & _KEY]
    joined = _joined(LogicalOp.AND, (*bounds, *on_rows))
    taken = {id(e) for e in (*bounds, *on_rows)}
    return MaskSplit(joined, tuple(term for term, e in terms if id(e) not in taken))


def find_bounds(attention: Attention, term: Expr) -> Expr | None:
    """A term as bounds; None where it is more than that, or where a row cannot be asked so much."""
    if len(list(postorder(term))) > _MOST_NODES:
        return None
    bounds = _Finder(attention, term).bounds_of(term)
    return bounds if bounds is not None and _limits(bounds) <= _MOST_BOUNDS else None


def _cheapest(bounds: list[Expr]) -> list[Expr]:
    """As many of them as a row can be asked, in the order in which they are."""
    spent, taken = 0, set[int]()
    for e in sorted(bounds, key=_limits):
        spent += _limits(e)
        if spent <= _MOST_BOUNDS:
            taken.add(id(e))
    return [e for e in bounds if id(e) in taken]


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
    match bounds:
        case Compare(_, Symbol("kv"), _):
            return 1
        case _ if as_phase(bounds) is not None:
            return _LIMITS_OF_PHASE
        case Not() | Logical():
            return sum(map(_limits, children(bounds)))
        case _:
            return pieces_of_pattern(bounds) or 0


@final
@record(eq=False)
class Phase:
    """`place < limit`, where `place` counts keys up to `period - 1`, and from 0 on again."""

    place: Expr
    period: int
    limit: Expr


def as_phase(e: Expr) -> Phase | None:
    """The bounds as a phase of which a word has parts of two at most; None where it is none."""
    match e:
        case Compare(CompareOp.LT, Binary(BinaryOp.MOD, x, Const(int(period))) as place, limit):
            is_phase = WORD_KEYS <= period <= _LONGEST_PHASE and growth_of(x) == 1
            return Phase(place, period, limit) if is_phase and growth_of(limit) == 0 else None
        case _:
            return None


def pieces_of_pattern(e: Expr) -> int | None:
    """Pieces of 8 keys after which the truth is the same again; None where it depends on no key."""
    growth = find_growth_of(e)
    if "kv" not in symbols(e) or growth is None or growth.gain != 0:
        return None
    return growth.steps // math.gcd(growth.steps, _PIECE)


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
                return self._compare(op, left, right) or self._pattern(e)
            case _:
                return self._pattern(e)

    def _pattern(self, e: Expr) -> Expr | None:
        """The term where it is the same again after few keys."""
        e = _without_abs(e)
        pieces = pieces_of_pattern(e)
        return e if pieces is not None and pieces <= _MOST_PIECES and self._fits(e) else None

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
            case Binary(BinaryOp.MOD, left, Const(int(c))) if c > 0:
                return self._phase(left, c, limit)
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
        return _before([limit], "min") if self._fits(limit) else None

    def _phase(self, x: Expr, period: int, limit: Expr) -> Expr | None:
        """`x % period < limit` as bounds."""
        while isinstance(x, Let):
            x = x.value
        match x, growth_of(x):
            case Binary(BinaryOp.FLOORDIV, inner, Const(int(c))), _ if c > 0:
                return self._phase(inner, period * c, Binary(BinaryOp.MUL, limit, Const(c)))
            case _, -1:  # backwards: x % p is p - 1 - (-x - 1) % p
                turned = _minus(Negate(x), Const(1))
                return self._negated(self._phase(turned, period, _minus(Const(period), limit)))
            case _:
                pass
        bounds = Compare(CompareOp.LT, Binary(BinaryOp.MOD, x, Const(period)), limit)
        return bounds if as_phase(bounds) is not None and self._fits(bounds) else None

    def _fits(self, e: Expr) -> bool:
        """Whether all that is computed stays within 64 bits."""
        known = infer_ranges((e,), self._symbols, self._attention)
        return all(
            expr_type(node) is not ScalarType.INT or range_of_work(node, known).within(*INT64.ends)
            for node in postorder(e)
        )


_KV: Final = Symbol("kv", Role.INDEX, ScalarType.INT)
_TURNED: Final[Mapping[CompareOp, CompareOp]] = {
    CompareOp.LT: CompareOp.GT,
    CompareOp.LE: CompareOp.GE,
    CompareOp.GT: CompareOp.LT,
    CompareOp.GE: CompareOp.LE,
    CompareOp.EQ: CompareOp.EQ,
    CompareOp.NE: CompareOp.NE,
}


def _without_abs(e: Expr) -> Expr:
    """`abs(x) % c == 0` is `x % c == 0`."""

    def plain(x: Expr) -> Expr:
        while isinstance(x, Let):
            x = x.value
        return x

    match e:
        case Compare(CompareOp.EQ | CompareOp.NE, left, Const(0)):
            match plain(left):
                case Binary(BinaryOp.MOD, x, Const(int())) as rest:
                    match plain(x):
                        case Call("abs", (inner,)):
                            return replace(e, left=replace(rest, left=inner))
    return e


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
