"""The range that a cube of limits gives, over a tile of the other axis.

    kv <= q + Skv - Sq            rises with q: largest at the last row
    kv >= 8 * (qpos // 8)         rises with q: smallest at the first row

    [max(0, 8 * (qpos_first // 8)), qpos_last + 1)

A limit that rises or falls along the other axis is taken at an end of the tile; limits of that
axis itself narrow the tile first.  A limit that does neither is bounded term by term.  Where limits
of one cube rise and others fall, isl finds what they say together (integer_sets.py).
"""

from __future__ import annotations

from typing import Final, TypeAlias, final

from attngen.analysis.cubes import AXES, Condition, Cube, Limit, Rest
from attngen.analysis.integer_sets import IntegerSets, SetLimit
from attngen.analysis.linear import Atoms, Linear
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
    Expr,
    Logical,
    LogicalOp,
    Role,
    Select,
    Symbol,
)
from attngen.ir.functions import call
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = ["Piece", "TileProjection"]


@final
@record(eq=False)
class Piece:
    """The range of one cube, where `condition` holds; None: always."""

    begin: Expr
    end: Expr
    condition: Expr | None


Direction: TypeAlias = int | None
"""How a value moves along an axis: 1 rises, -1 falls, 0 stays, None not known."""
_DEEPEST: Final = 20
_FAR: Final = 2**30
"""A limit farther away than this is left out, as it would hardly ever make a range shorter."""


@final
class TileProjection:
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

    def project(self, cube: Cube) -> Piece | None:
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
        return Piece(begin, end, _conjunction(conditions))

    def _is_of_use(self, value: Linear) -> bool:
        """Whether a limit fits 64 bits and is near enough to matter."""
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
                if len(ends) < len(arguments):
                    return None
                return self.atoms.linear(call(function, *ends))
            case Select(condition, then, otherwise):
                yes, no = below(then, is_upper), below(otherwise, is_upper)
                if yes is None or no is None:
                    return None
                if not self._varies(condition):
                    return self.atoms.linear(Select(condition, yes, no))
                return self.atoms.linear(call("max" if is_upper else "min", yes, no))
            case _:
                known = self.atoms.interval(atom)
                if not known.within(-_FAR, _FAR):
                    return None
                return Linear(int(known.high if is_upper else known.low))

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
        return 0 if self._varies(e) else self.atoms.sign(e)

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
