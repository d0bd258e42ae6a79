"""From a mask: the ranges of keys that the rows of a query tile may attend to.

    mask    kv < first or window(left = recent - 1)        over rows [q_first, q_last]

    ranges  [0, min(first, qpos_last + 1))
            [max(first, qpos_first - recent + 1), qpos_last + 1)

At most four ranges, in ascending order and disjoint, from begin to before end, for all lengths.
They hold every key that some row of the tile attends to; an empty one has `end <= begin`.
Ends are expressions over TILE_SYMBOLS, sizes, params, and what else in the mask is free of `q`
and `kv`, in global indices.  `derive_query_ranges` is the same, transposed.

The mask becomes an `or` of cubes (cubes.py).  Over a tile, a limit `kv <= f(q)` is taken where
`f` is largest: at the last row when `f` rises, at the first when it falls.  Where limits of
one cube rise and others fall, isl finds what they say together (integer_sets.py).  Each cube
gives one range.  Ranges are merged where they provably touch, and sorted at run time where
their order is not known.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias, final

from attngen.analysis.cubes import AXES, Condition, Cube, CubeBuilder, Limit, Rest
from attngen.analysis.integer_sets import IntegerSets, SetLimit
from attngen.analysis.linear import Atoms, Linear
from attngen.ir import interval
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
    Logical,
    LogicalOp,
    Not,
    Role,
    Select,
    Symbol,
)
from attngen.ir.functions import call
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder, substitute
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "MOST_RANGES",
    "KeyRanges",
    "QueryRanges",
    "Range",
    "derive_key_ranges",
    "derive_query_ranges",
]

MOST_RANGES: Final = 4


@final
@record(eq=False)
class Range:
    """Positions from `begin` to before `end`."""

    begin: Expr
    end: Expr


@final
@record(eq=False)
class KeyRanges:
    """Where the rows of a query tile may attend.

    may_have_empty_row  False: with `1 <= Sq <= Skv` and params in their declared ranges, the mask
                        lets every row attend to some key.  Scores of -inf are not considered.
    notes               for each part of the mask that sets no limit, why, and what would help
    """

    ranges: tuple[Range, ...]
    may_have_empty_row: bool
    notes: tuple[str, ...]


@final
@record(eq=False)
class QueryRanges:
    """Which rows may attend to the keys of a key tile; `notes` as in `KeyRanges`."""

    ranges: tuple[Range, ...]
    notes: tuple[str, ...]


def derive_key_ranges(attention: Attention) -> KeyRanges:
    """The keys that the rows [q_first, q_last] may attend to, over `q_first`, `qpos_last`, ….

    Without a mask, and where nothing is known, the one range [0, Skv).
    """
    ranges, notes = _derive(attention, "kv")
    return KeyRanges(ranges, _may_have_empty_row(attention), notes)


def derive_query_ranges(attention: Attention) -> QueryRanges:
    """The rows that may attend to the keys [kv_first, kv_last], over `kv_first` and `kv_last`."""
    return QueryRanges(*_derive(attention, "q"))


def _derive(attention: Attention, target: str) -> tuple[tuple[Range, ...], tuple[str, ...]]:
    mask = Const(True) if attention.mask is None else attention.mask
    other = "q" if target == "kv" else "kv"
    atoms = Atoms(attention, tile=other)
    builder = CubeBuilder(atoms, target)
    cubes = builder.build(mask)
    tile = _Tile(atoms, target)
    pieces = [piece for cube in cubes if (piece := tile.project(cube)) is not None]
    ranges = _Union(atoms, tile.length).ranges(pieces)
    return ranges, (*builder.notes, *tile.notes)


# ---- one cube over a tile ------------------------------------------------------------------

Direction: TypeAlias = int | None
"""How a value moves along an axis: 1 rises, -1 falls, 0 stays, None not known."""
_DEEPEST: Final = 20
_FAR: Final = 2**30
"""No sequence is expected to be longer than this, so a limit beyond it says nothing."""


@final
@record(eq=False)
class _Piece:
    """The range of one cube, where `condition` holds; None: always."""

    begin: Expr
    end: Expr
    condition: Expr | None


class _Tile:
    """Projects cubes onto the target axis, over a tile of the other one."""

    def __init__(self, atoms: Atoms, target: str) -> None:
        self.atoms = atoms
        self.target = target
        self.other = "q" if target == "kv" else "kv"
        self.length = Symbol(f"S{target}", Role.SIZE, ScalarType.INT)
        self.first = atoms.symbol(f"{self.other}_first", Role.TILE)
        self.last = atoms.symbol(f"{self.other}_last", Role.TILE)
        self.sets = IntegerSets(atoms, target)
        self.notes: list[str] = []

    def project(self, cube: Cube) -> _Piece | None:
        """The range of a cube; None when it is empty for every tile."""
        limits = [lit for lit in cube if isinstance(lit, Limit)]
        across = [limit for limit in limits if limit.axis == self.other]
        lows = [self.first, *(x.value for x in across if not x.is_upper)]
        highs = [self.last, *(x.value for x in across if x.is_upper)]
        begins, ends = [Linear(0)], [self.atoms.linear(self.length)]
        for limit in limits:
            if limit.axis == self.target:
                found = self._extremes(limit.value, limit.is_upper, lows, highs)
                kept = [f.plus(limit.is_upper) for f in found if self._is_of_use(f)]
                (ends if limit.is_upper else begins).extend(kept)
        for joint in self._joint_limits(cube, limits):
            if self._is_of_use(joint.value):
                (ends if joint.is_upper else begins).append(joint.value.plus(joint.is_upper))
        begin, end = self._largest(begins), self._smallest(ends)
        if self.atoms.never_exceeds(end, begin):
            return None
        conditions = [lit.value for lit in cube if isinstance(lit, Condition)]
        conditions += self._has_row(lows, highs, begins, ends)
        return _Piece(begin, end, _conjunction(conditions))

    def _is_of_use(self, value: Linear) -> bool:
        """Whether a limit can be computed, and is not farther away than any length."""
        return abs(value.constant) < _FAR and self.atoms.fits(value.plus(1))

    def _has_row(
        self, lows: list[Linear], highs: list[Linear], begins: list[Linear], ends: list[Linear]
    ) -> list[Expr]:
        """That some row of the tile lies in all of its limits, or the range is empty anyway."""
        low, high = self._largest(lows), self._smallest(highs)
        conditions: list[Expr] = []
        for a in _operands("max", low):
            for b in _operands("min", high):
                missing = (self.atoms.linear(a) - self.atoms.linear(b)).plus(-1)  # where no row is
                widths = (end - begin for end in ends for begin in begins)
                is_idle = any(self.atoms.most(width + missing) <= 0 for width in widths)
                if not self.atoms.never_exceeds(a, b) and not is_idle:
                    conditions.append(Compare(CompareOp.LE, a, b))
        return conditions

    def _largest(self, forms: list[Linear]) -> Expr:
        return self.atoms.largest([self.atoms.expr(form) for form in forms])

    def _smallest(self, forms: list[Linear]) -> Expr:
        return self.atoms.smallest([self.atoms.expr(form) for form in forms])

    def _extremes(
        self, value: Linear, is_upper: bool, lows: list[Linear], highs: list[Linear]
    ) -> list[Linear]:
        """Upper bounds of a value over the tile, or lower ones; none when nothing is known.

        The other axis stays between each of `lows` and each of `highs`.
        """
        direction = self._direction(value, _DEEPEST)
        if direction == 0:
            return [value]
        if direction is not None:
            points = highs if (direction > 0) is is_upper else lows
            return [self.atoms.at(value, {self.other: point}) for point in points]
        bound = self._bound(value, is_upper, _DEEPEST)
        return [] if bound is None else [bound]

    def _bound(self, form: Linear, is_upper: bool, depth: int) -> Linear | None:
        """One bound of a form over the tile, each of its terms by itself; None: not known."""
        total = form
        for atom in self.atoms.mentioning(form, AXES[self.other]):
            coefficient, rest = total.split_off(atom)
            bound = self._bound_of_atom(atom, is_upper is (coefficient > 0), depth)
            if bound is None:
                return None
            total = rest + bound.times(coefficient)
        return total if self.atoms.fits(total) else None

    def _bound_of_atom(self, atom: int, is_upper: bool, depth: int) -> Linear | None:
        def below(e: Expr, is_upper: bool) -> Expr | None:
            bound = self._bound(self.atoms.linear(e), is_upper, depth - 1) if depth else None
            return None if bound is None else self.atoms.expr(bound)

        match self.atoms.node(atom):
            case Symbol():
                return self.last if is_upper else self.first
            case Binary(BinaryOp.MOD, _, by) if self._sign(by) > 0:
                return self.atoms.linear(by).plus(-1) if is_upper else Linear(0)
            case Binary(BinaryOp.FLOORDIV | BinaryOp.MUL as op, x, by) if sign := self._sign(by):
                end = below(x, is_upper is (sign > 0))
                return None if end is None else self.atoms.linear(Binary(op, end, by))
            case Call("min" | "max" | "clamp" as function, arguments):
                ends = [end for x in arguments if (end := below(x, is_upper)) is not None]
                known = len(ends) == len(arguments)
                return self.atoms.linear(call(function, *ends)) if known else None
            case node:
                interval = self.atoms.interval(atom)
                if (
                    not interval.within(-_FAR, _FAR)
                    or self.atoms.type_of(node) is not ScalarType.INT
                ):
                    return None
                return Linear(int(interval.high if is_upper else interval.low))

    def _direction(self, form: Linear, depth: int) -> Direction:
        """How a form moves along the other axis."""
        found = []
        for atom in self.atoms.mentioning(form, AXES[self.other]):
            coefficient, _ = form.split_off(atom)
            found.append(_turned(self._direction_of_atom(atom, depth), coefficient))
        return _common(found)

    def _direction_of_atom(self, atom: int, depth: int) -> Direction:
        if not depth:
            return None

        def below(e: Expr) -> Direction:
            return self._direction(self.atoms.linear(e), depth - 1)

        match self.atoms.node(atom):
            case Symbol():
                return 1
            case Binary(BinaryOp.FLOORDIV, x, by) | Binary(BinaryOp.MUL, x, by) if (
                sign := self._sign(by)
            ):
                return _turned(below(x), sign)
            case Binary(BinaryOp.MUL, by, x) if sign := self._sign(by):
                return _turned(below(x), sign)
            case Call("min" | "max" | "clamp", arguments):
                return _common([below(x) for x in arguments])
            case Select(condition, then, otherwise) if not self._varies(condition):
                return _common([below(then), below(otherwise)])
            case _:
                return None

    def _sign(self, e: Expr) -> int:
        """1 or -1 of a value that stays the same along the other axis and is never 0; else 0."""
        if self._varies(e):
            return 0
        form = self.atoms.linear(e)
        return 1 if self.atoms.least(form) > 0 else -1 if self.atoms.most(form) < 0 else 0

    def _varies(self, e: Expr) -> bool:
        return bool(self.atoms.names(e) & AXES[self.other])

    def _joint_limits(self, cube: Cube, limits: list[Limit]) -> list[SetLimit]:
        """What isl finds, where single limits lose something."""
        is_unsolved = any(isinstance(lit, Rest) and not lit.is_stride for lit in cube)
        sides: tuple[set[Direction], set[Direction]] = (set(), set())
        for limit in limits:
            if limit.axis == self.target:
                sides[limit.is_upper].add(self._direction(limit.value, _DEEPEST))
        if not is_unsolved and not any({1, -1} <= side for side in sides):
            return []
        found = self.sets.limits(cube)
        if self.sets.gave_up and _GAVE_UP not in self.notes:
            self.notes.append(_GAVE_UP)
        return found


_GAVE_UP: Final = (
    "comparisons that hold together were taken one by one: the set of pairs is too complex"
)


def _operands(function: str, e: Expr) -> tuple[Expr, ...]:
    return e.arguments if isinstance(e, Call) and e.function == function else (e,)


def _turned(direction: Direction, factor: int) -> Direction:
    return direction if direction is None or factor > 0 else -direction


def _common(directions: list[Direction]) -> Direction:
    """The direction of a value that rises with each of its parts."""
    moving = {d for d in directions if d != 0}
    return (moving or {0}).pop() if len(moving) < 2 else None


def _conjunction(conditions: list[Expr]) -> Expr | None:
    if len(conditions) < 2:
        return conditions[0] if conditions else None
    return Logical(LogicalOp.AND, tuple(conditions))


# ---- several ranges ------------------------------------------------------------------------


class _Union:
    """At most MOST_RANGES disjoint, ascending ranges that cover some pieces."""

    def __init__(self, atoms: Atoms, length: Expr) -> None:
        self.atoms = atoms
        self.length = length

    def ranges(self, pieces: list[_Piece]) -> tuple[Range, ...]:
        joined = self._join_all(pieces)
        while len(joined) > MOST_RANGES:
            i, j = self._nearest(joined)
            rest = [piece for k, piece in enumerate(joined) if k not in (i, j)]
            hull = self._hull(self._unconditional(joined[i]), self._unconditional(joined[j]))
            joined = self._join_all([*rest, hull])
        return self._disjoint(self._sorted([Range(p.begin, self._end(p)) for p in joined]))

    # ---- merging ----

    def _join_all(self, pieces: list[_Piece]) -> list[_Piece]:
        """The pieces, with those in one that provably make one range."""
        done: list[_Piece] = []
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

    def _join(self, a: _Piece, b: _Piece) -> _Piece | None:
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
            return _Piece(a.begin, self.atoms.largest([self._end(a), self._end(b)]), None)
        for sometimes, always in ((a, b), (b, a)):
            if always.condition is None and self._is_same(a.end, b.end):
                assert sometimes.condition is not None
                both = self.atoms.smallest([a.begin, b.begin])
                begin = Select(sometimes.condition, both, always.begin)
                return _Piece(begin, always.end, None)
        return None

    def _contains(self, outer: _Piece, inner: _Piece) -> bool:
        before = self.atoms.never_exceeds
        return before(outer.begin, inner.begin) and before(inner.end, outer.end)

    def _is_same(self, a: Expr | None, b: Expr | None) -> bool:
        if a is None or b is None:
            return a is b
        return self.atoms.number(a) == self.atoms.number(b)

    def _hull(self, a: _Piece, b: _Piece) -> _Piece:
        begin = self.atoms.smallest([a.begin, b.begin])
        return _Piece(begin, self.atoms.largest([a.end, b.end]), a.condition)

    def _nearest(self, pieces: list[_Piece]) -> tuple[int, int]:
        """The two pieces with the smallest known gap; the last two when none is known."""
        count = len(pieces)
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        return min(reversed(pairs), key=lambda pair: self._gap(pieces[pair[0]], pieces[pair[1]]))

    def _gap(self, a: _Piece, b: _Piece) -> float:
        """The largest gap between the end of one piece and the begin of a later one."""
        if not self.atoms.never_exceeds(a.end, b.begin):
            return math.inf
        return self.atoms.most(self.atoms.linear(b.begin) - self.atoms.linear(a.end))

    def _unconditional(self, piece: _Piece) -> _Piece:
        """The piece with ends that make it empty where its condition fails."""
        if piece.condition is None:
            return piece
        return _Piece(Select(piece.condition, piece.begin, self.length), self._end(piece), None)

    def _end(self, piece: _Piece) -> Expr:
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


# ---- empty rows ----------------------------------------------------------------------------


_LARGEST_MASK: Final = 2000
"""A mask of more nodes is not looked at for rows without a key."""


def _may_have_empty_row(attention: Attention) -> bool:
    """Whether no key was found that every row attends to; looks at a few keys of each row."""
    if attention.mask is None:
        return False
    if sum(1 for _ in postorder(attention.mask)) > _LARGEST_MASK:
        return True
    atoms = Atoms(attention)
    row = atoms.symbol("q_first", Role.TILE)
    position = row + atoms.symbol("Skv") - atoms.symbol("Sq")
    keys = (position, row, Linear(0), atoms.symbol("Skv").plus(-1))
    values = {"q": atoms.expr(row), "qpos": atoms.expr(position)}
    masks = (substitute(attention.mask, {**values, "kv": atoms.expr(key)}) for key in keys)
    return not any(_always_holds(atoms, mask) for mask in masks)


def _always_holds(atoms: Atoms, mask: Expr) -> bool:
    """Proof that a truth value over one row holds, for `Sq <= Skv`."""
    known: dict[int, bool | None] = {}
    for node in postorder(mask):
        if atoms.type_of(node) is ScalarType.BOOL:
            known[id(node)] = _truth(atoms, node, [known.get(id(c)) for c in children(node)])
    return known[id(mask)] is True


def _truth(atoms: Atoms, node: Expr, operands: list[bool | None]) -> bool | None:
    """True, False or None (not known), from those of the operands."""
    match node:
        case Const(value):
            return bool(value)
        case Let():
            return operands[0]
        case Not():
            return None if operands[0] is None else not operands[0]
        case Logical(op):
            deciding = op is LogicalOp.OR
            if deciding in operands:
                return deciding
            return None if None in operands else not deciding
        case Select():
            condition, then, otherwise = operands
            if condition is None:
                return then if then is otherwise else None
            return then if condition else otherwise
        case Compare(op, left, right):
            return _order(atoms, op, left, right)
        case _:
            return None


def _order(atoms: Atoms, op: CompareOp, left: Expr, right: Expr) -> bool | None:
    """A comparison of integers, where it is known, or of equal truth values."""
    match atoms.type_of(left):
        case ScalarType.FLOAT:
            return None
        case ScalarType.BOOL:
            same = atoms.number(left) == atoms.number(right)
            return op in _HOLDS_WHEN_EQUAL if same else None
    difference = atoms.linear(left) - atoms.linear(right)
    low = atoms.least(difference, keys_reach_rows=True)
    high = atoms.most(difference, keys_reach_rows=True)
    found = interval.compare(op.value, Interval(low, high), interval.point(0))
    return bool(found.low) if found.is_point else None


_HOLDS_WHEN_EQUAL: Final = (CompareOp.EQ, CompareOp.LE, CompareOp.GE)
