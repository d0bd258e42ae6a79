"""A few disjoint, ascending ranges that cover some pieces.

    [0, first)  or  [qpos_first - 4, qpos_last + 1)

    [0, first)      [max(first, qpos_first - 4), qpos_last + 1)

Pieces that provably touch, or share an end, become one.  Those whose order is not known are
sorted by comparisons, which run with the kernel.
"""

from __future__ import annotations

import math
from typing import Final, final

from attngen.analysis.linear import Atoms
from attngen.analysis.tile_projection import Piece
from attngen.ir.expr import (
    Compare,
    CompareOp,
    Const,
    Expr,
    Select,
)
from attngen.ir.functions import call
from attngen.record import record

__all__ = ["MOST_RANGES", "Range", "RangeUnion"]

MOST_RANGES: Final = 4


@final
@record(eq=False)
class Range:
    """Positions from `begin` to before `end`."""

    begin: Expr
    end: Expr


@final
class RangeUnion:
    """At most MOST_RANGES disjoint, ascending ranges that cover some pieces."""

    def __init__(self, atoms: Atoms, length: Expr) -> None:
        self.atoms = atoms
        self.length = length

    def ranges(self, pieces: list[Piece]) -> tuple[Range, ...]:
        joined = self._join_all(pieces)
        while len(joined) > MOST_RANGES:
            i, j = self._nearest(joined)
            rest = [piece for k, piece in enumerate(joined) if k not in (i, j)]
            hull = self._hull(self._unconditional(joined[i]), self._unconditional(joined[j]))
            joined = self._join_all([*rest, hull])
        return self._disjoint(self._sorted([Range(p.begin, self._end(p)) for p in joined]))

    # ---- merging ----

    def _join_all(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, with those in one that provably make one range."""
        done: list[Piece] = []
        todo = list(reversed(pieces))
        while todo:
            piece = todo.pop()
            for i, other in enumerate(done):
                if (joined := self._join(piece, other)) is not None:
                    del done[i]
                    todo.append(joined)
                    break
            else:
                done.append(piece)
        return done

    def _join(self, a: Piece, b: Piece) -> Piece | None:
        """One piece that is both; None when that is not proved."""
        for inner, outer in ((a, b), (b, a)):
            is_always = outer.condition is None or self._is_same(inner.condition, outer.condition)
            if is_always and self._contains(outer, inner):
                return outer
        if self._is_same(a.condition, b.condition):
            before = self.atoms.never_exceeds
            touches = before(a.begin, b.end) and before(b.begin, a.end)
            shares = self._is_same(a.begin, b.begin) or self._is_same(a.end, b.end)
            return self._hull(a, b) if touches or shares else None
        if self._is_same(a.begin, b.begin):
            return Piece(a.begin, self.atoms.largest([self._end(a), self._end(b)]), None)
        for sometimes, always in ((a, b), (b, a)):
            if always.condition is None and self._is_same(a.end, b.end):
                assert sometimes.condition is not None
                both = self.atoms.smallest([a.begin, b.begin])
                begin = Select(sometimes.condition, both, always.begin)
                return Piece(begin, always.end, None)
        return None

    def _contains(self, outer: Piece, inner: Piece) -> bool:
        before = self.atoms.never_exceeds
        return before(outer.begin, inner.begin) and before(inner.end, outer.end)

    def _is_same(self, a: Expr | None, b: Expr | None) -> bool:
        if a is None or b is None:
            return a is b
        return self.atoms.number(a) == self.atoms.number(b)

    def _hull(self, a: Piece, b: Piece) -> Piece:
        begin = self.atoms.smallest([a.begin, b.begin])
        return Piece(begin, self.atoms.largest([a.end, b.end]), a.condition)

    def _nearest(self, pieces: list[Piece]) -> tuple[int, int]:
        """The two pieces with the smallest known gap; the last two when none is known."""
        count = len(pieces)
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        return min(reversed(pairs), key=lambda pair: self._gap(pieces[pair[0]], pieces[pair[1]]))

    def _gap(self, a: Piece, b: Piece) -> float:
        """The largest gap between the end of one piece and the begin of a later one."""
        if not self.atoms.never_exceeds(a.end, b.begin):
            return math.inf
        return self.atoms.most(self.atoms.linear(b.begin) - self.atoms.linear(a.end))

    def _unconditional(self, piece: Piece) -> Piece:
        """The piece with ends that make it empty where its condition fails."""
        if piece.condition is None:
            return piece
        return Piece(Select(piece.condition, piece.begin, self.length), self._end(piece), None)

    def _end(self, piece: Piece) -> Expr:
        if piece.condition is None:
            return piece.end
        return Select(piece.condition, piece.end, Const(0))

    # ---- order ----

    def _sorted(self, ranges: list[Range]) -> list[Range]:
        """Ascending begins, by comparisons at run time where the order is not proved."""
        ranges = list(ranges)
        for last in range(len(ranges) - 1, 0, -1):
            for i in range(last):
                ranges[i], ranges[i + 1] = self._in_order(ranges[i], ranges[i + 1])
        return ranges

    def _in_order(self, a: Range, b: Range) -> tuple[Range, Range]:
        if self.atoms.never_exceeds(a.begin, b.begin):
            return a, b
        if self.atoms.never_exceeds(b.begin, a.begin):
            return b, a
        is_sorted = Compare(CompareOp.LE, a.begin, b.begin)
        low = Range(call("min", a.begin, b.begin), Select(is_sorted, a.end, b.end))
        return low, Range(call("max", a.begin, b.begin), Select(is_sorted, b.end, a.end))

    def _disjoint(self, ranges: list[Range]) -> tuple[Range, ...]:
        """No range begins before the ends of those before it."""
        covered: list[Expr] = []
        done = []
        for r in ranges:
            done.append(Range(self.atoms.largest([*covered, r.begin]), r.end))
            covered = [self.atoms.largest([*covered, r.end])]
        return tuple(done)
