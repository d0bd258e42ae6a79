"""A mask as an `or` of cubes, each an `and` of limits that one axis keeps.

    kv < first or kv <= qpos and qpos // 8 == kv // 8

    cube 1    kv <= first - 1
    cube 2    kv <= q + Skv - Sq
              kv >= 8 * (qpos // 8)
              kv <= 8 * (qpos // 8) + 7

Each comparison is solved for the target axis, here `kv`, or, where it does not mention it, for
the other one: `x // 8 <= t` is `x <= 8 * t + 7`, and `min`, `max`, `abs`, `clamp` and `where` are
split into their cases.  What has no solution is left out of its cube.  So the cubes hold at
every pair at which the mask does, and maybe at more: `notes` says why.

A comparison in which the target occurs twice is kept as it stands (`Rest`), for integer_sets.py.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, TypeAlias, final

from attngen.analysis.linear import Atoms, Linear
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
    Not,
    Select,
    Symbol,
)
from attngen.ir.functions import call
from attngen.ir.printer import print_expr
from attngen.ir.traverse import tensors
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "AXES",
    "DECIDED_BY_THE_KERNEL",
    "Condition",
    "Cube",
    "CubeBuilder",
    "Limit",
    "Literal",
    "Rest",
    "floor_divide",
]

AXES: Final = {"q": frozenset({"q", "qpos"}), "kv": frozenset({"kv"})}
"""The symbols that differ along each axis."""

_MOST_CUBES: Final = 16
_MOST_LITERALS: Final = 32
_MOST_STEPS: Final = 500
"""Parts of a mask, cases of comparisons included, that are looked at."""
_DEEPEST: Final = 40
"""How deep operations may stand in one another."""
_FAR: Final = 2**48
"""Farther than this from 0, a param or an element says the same as at this distance."""


@final
@record(eq=False)
class Limit:
    """`axis <= value`, or `axis >= value`; as a form, `form <= 0`.

    Of the target axis, `value` may depend on the other axis; of the other axis, on neither.
    """

    axis: str
    is_upper: bool
    value: Linear
    form: Linear


@final
@record(eq=False)
class Condition:
    """A truth value that is free of `q` and `kv`."""

    value: Expr


@final
@record(eq=False)
class Rest:
    """`form <= 0`, not solved; a stride is a remainder, which holds at regular distances."""

    form: Linear
    is_stride: bool = False


Literal: TypeAlias = Limit | Condition | Rest
Cube: TypeAlias = tuple[Literal, ...]
Cubes: TypeAlias = list[Cube]
_TRUE: Final[Cubes] = [()]


class _Reason(Enum):
    """Why a part of a mask does not limit a range, and what would."""

    DATA = "reads a tensor at every row or key; it is decided tile by tile, when the kernel runs"
    FLOAT = "compares floats; between integers it could be solved"
    STRIDE = "keeps keys at regular distances, which no range describes"
    SIGN = "multiplies or divides by a value whose sign is not known; declare it `where 1 <= …`"
    REMAINDER = (
        "takes a remainder by a value that is not constant; `where(x < n, x, x - n)` can be solved"
    )
    WIDE = "can leave 64 bits; declare the range of its params"
    HARD = "has no solution for one axis; a form with each of `q` and `kv` once would have one"
    LARGE = "and what follows has too many parts to be solved, so it is taken as true"


DECIDED_BY_THE_KERNEL: Final = _Reason.DATA.value
"""The end of a note that is no loss: the tile's minimum and maximum decide."""


@final
class CubeBuilder:
    """The cubes of truth values, solved for one target axis."""

    def __init__(self, atoms: Atoms, target: str) -> None:
        self.atoms = atoms
        self.target = target
        self.other = "q" if target == "kv" else "kv"
        self.notes: list[str] = []
        self.is_too_large = False
        self._steps = 0
        self._source: Expr = Const(True)

    def build(self, e: Expr, wanted: bool = True, depth: int = _DEEPEST) -> Cubes:
        """Cubes that hold wherever `e` is `wanted`."""
        match e:
            case Const(value):
                return _TRUE if value is wanted else []
            case Let(_, value):
                return self.build(value, wanted, depth)
        if not self._varies(e):
            return [(Condition(e if wanted else Not(e)),)]
        self._steps += 1
        if not depth or self._steps > _MOST_STEPS:
            return self._unknown(_Reason.LARGE, e)
        below = depth - 1
        match e:
            case Not(operand):
                return self.build(operand, not wanted, below)
            case Logical(op, operands):
                parts = [self.build(operand, wanted, below) for operand in operands]
                return self._all(parts) if (op is LogicalOp.AND) is wanted else self._any(parts)
            case Select(condition, then, otherwise):
                yes = [self.build(condition, True, below), self.build(then, wanted, below)]
                no = [self.build(condition, False, below), self.build(otherwise, wanted, below)]
                return self._any([self._all(yes), self._all(no)])
            case Compare(op, left, right):
                return self._compare(e, op if wanted else _OPPOSITE[op], left, right, below)
            case _:
                return self._unknown(_Reason.DATA if tensors(e) else _Reason.HARD, e)

    # ---- and, or ----

    def _all(self, parts: list[Cubes]) -> Cubes:
        """The cubes of an `and`; a part that makes too many is left out."""
        result = _TRUE
        for part in sorted(parts, key=len):
            is_large = len(result) * len(part) > _MOST_CUBES
            if is_large or (part != _TRUE and any(len(c) >= _MOST_LITERALS for c in result)):
                self._unknown(_Reason.LARGE, self._source)
                continue
            result = [(*a, *b) for a in result for b in part]
        return result

    def _any(self, parts: list[Cubes]) -> Cubes:
        """The cubes of an `or`; too many of them are taken as true."""
        result = [cube for part in parts for cube in part]
        if () in result:
            return _TRUE
        return result if len(result) <= _MOST_CUBES else self._unknown(_Reason.LARGE, self._source)

    # ---- comparisons ----

    def _compare(self, e: Expr, op: CompareOp, left: Expr, right: Expr, depth: int) -> Cubes:
        self._source = e
        match self.atoms.type_of(left):
            case ScalarType.FLOAT:
                return self._unknown(_Reason.FLOAT, e)
            case ScalarType.BOOL:
                return self._compare_truths(e, op, left, right, depth)
        difference = self.atoms.linear(left) - self.atoms.linear(right)
        opposite = difference.times(-1)
        match op:
            case CompareOp.LE:
                return self._solve(difference, depth)
            case CompareOp.LT:
                return self._solve(difference.plus(1), depth)
            case CompareOp.GE:
                return self._solve(opposite, depth)
            case CompareOp.GT:
                return self._solve(opposite.plus(1), depth)
            case CompareOp.EQ:
                return self._all([self._solve(difference, depth), self._solve(opposite, depth)])
            case CompareOp.NE:
                if any(isinstance(self.atoms.node(a), Symbol) for a in self._along(difference)):
                    return _TRUE  # all but one key
                sides = (difference.plus(1), opposite.plus(1))
                return self._any([self._solve(side, depth) for side in sides])

    def _compare_truths(self, e: Expr, op: CompareOp, left: Expr, right: Expr, depth: int) -> Cubes:
        if op not in (CompareOp.EQ, CompareOp.NE):
            return self._unknown(_Reason.HARD, e)
        cases = [
            self._all(
                [self.build(left, x, depth), self.build(right, x is (op is CompareOp.EQ), depth)]
            )
            for x in (True, False)
        ]
        return self._any(cases)

    def _solve(self, form: Linear, depth: int) -> Cubes:
        """The cubes of `form <= 0`."""
        if not form.coefficients:
            return _TRUE if form.constant <= 0 else []
        involved = self._along(form)
        if not involved:
            return self._condition(form)
        self._steps += 1
        if not depth or self._steps > _MOST_STEPS:
            return self._unknown(_Reason.LARGE, self._source)
        for atom in involved:
            if (cases := self._split(form, atom, depth - 1)) is not None:
                return cases
        if len(involved) == 1:
            return self._isolate(form, involved[0], depth - 1)
        for atom in involved:
            if not _is_affine(node := self.atoms.node(atom)):
                return self._unknown(self._reason(node), self._source)
        return [(Rest(form),)]

    def _along(self, form: Linear) -> tuple[int, ...]:
        """The atoms to solve for: those along the target axis, else those along the other."""
        target = self.atoms.mentioning(form, AXES[self.target])
        return target or self.atoms.mentioning(form, AXES[self.other])

    def _condition(self, form: Linear) -> Cubes:
        known = self._in_range(form, Linear(0))
        if known is None:
            return self._unknown(_Reason.WIDE, self._source)
        return [(Condition(Compare(CompareOp.LE, self.atoms.expr(known), Const(0))),)]

    def _split(self, form: Linear, atom: int, depth: int) -> Cubes | None:
        """The cases of `min`, `max`, `abs`, `clamp` or `where`; None for any other atom."""
        coefficient, rest = form.split_off(atom)

        def case(value: Linear) -> Cubes:
            return self._solve(rest + value.times(coefficient), depth)

        # coefficient · max(x, y) <= t is an `and` of both for a positive coefficient, else an `or`.
        highest, lowest = (self._all, self._any) if coefficient > 0 else (self._any, self._all)
        linear: Callable[[Expr], Linear] = self.atoms.linear
        match self.atoms.node(atom):
            case Call("max", values):
                return highest([case(linear(x)) for x in values])
            case Call("min", values):
                return lowest([case(linear(x)) for x in values])
            case Call("abs", (x,)):
                return highest([case(linear(x)), case(linear(x).times(-1))])
            case Call("clamp", (x, low, high)):
                return lowest([highest([case(linear(x)), case(linear(low))]), case(linear(high))])
            case Select(condition, then, otherwise):
                yes = [self.build(condition, True, depth), case(linear(then))]
                no = [self.build(condition, False, depth), case(linear(otherwise))]
                return self._any([self._all(yes), self._all(no)])
            case _:
                return None

    def _isolate(self, form: Linear, atom: int, depth: int) -> Cubes:
        """`form <= 0` as `sign · atom <= top`, solved for what stands inside of the atom."""
        coefficient, rest = form.split_off(atom)
        sign = 1 if coefficient > 0 else -1
        dividend = self._in_range(rest.times(-1), form - rest)
        if dividend is None:
            reads = any(isinstance(self.atoms.node(a), Load) for a in self._along(form))
            return self._unknown(_Reason.DATA if reads else _Reason.WIDE, self._source)
        top = floor_divide(self.atoms, dividend, abs(coefficient))
        match self.atoms.node(atom):
            case Symbol():
                return self._limit(form, atom, sign, top)
            case Binary(BinaryOp.FLOORDIV, x, divisor) if by := self._sign(divisor):
                # x // d = -x // -d, and x // d <= t is x < d · (t + 1).
                size = self.atoms.linear(divisor).times(by)
                product = self._product(top.plus(1 if sign > 0 else 0), size)
                strict = 1 if sign > 0 else 0
                inner = self.atoms.linear(x).times(by * sign)
                return self._solve(inner - product.plus(-strict), depth)
            case Binary(BinaryOp.MOD, _, divisor) if self._sign(divisor) > 0:
                # 0 <= x % d < d
                reach = Linear(0) if sign > 0 else self.atoms.linear(divisor).plus(-1)
                self._unknown(_Reason.STRIDE, self._source)
                stride: Cubes = [(Rest(form, is_stride=True),)]
                return self._all([stride, self._solve(top.times(-1) - reach, depth)])
            case Binary(BinaryOp.MUL, x, factor) if by := self._sign(factor):
                return self._divide(x, factor, by, sign, top, depth)
            case Binary(BinaryOp.MUL, factor, x) if by := self._sign(factor):
                return self._divide(x, factor, by, sign, top, depth)
            case node:
                return self._unknown(self._reason(node), self._source)

    def _divide(self, x: Expr, factor: Expr, by: int, sign: int, top: Linear, depth: int) -> Cubes:
        """`sign · x · factor <= top` for a factor of the sign `by`."""
        size = self.atoms.expr(self.atoms.linear(factor).times(by))
        quotient = Binary(BinaryOp.FLOORDIV, self.atoms.expr(top), size)
        inner = self.atoms.linear(x).times(by * sign)
        return self._solve(inner - self.atoms.linear(quotient), depth)

    def _limit(self, form: Linear, atom: int, sign: int, top: Linear) -> Cubes:
        names = self.atoms.names(atom)
        axis = next(axis for axis, own in AXES.items() if names & own)
        return [(Limit(axis, sign > 0, top.times(sign), form),)]

    # ---- values ----

    def _varies(self, e: Expr) -> bool:
        return any(self.atoms.names(e) & own for own in AXES.values())

    def _sign(self, e: Expr) -> int:
        """1 or -1 of a value that is free of `q` and `kv` and never 0; else 0."""
        return 0 if self._varies(e) else self.atoms.sign(e)

    def _product(self, a: Linear, b: Linear) -> Linear:
        if not b.coefficients:
            return a.times(b.constant)
        return self.atoms.linear(Binary(BinaryOp.MUL, self.atoms.expr(b), self.atoms.expr(a)))

    def _in_range(self, form: Linear, compared: Linear) -> Linear | None:
        """The form within 64 bits, or one that compares alike; None where there is neither."""
        if self.atoms.fits(form.plus(1)):
            return form
        wide = [a for a in form.atoms if not self.atoms.interval(a).within(-_FAR, _FAR)]
        if len(wide) != 1:
            return None
        coefficient, rest = form.split_off(wide[0])
        near = self.atoms.stays_within(rest - compared, _FAR // 2)
        if abs(coefficient) != 1 or not near:
            return None
        node = call("clamp", self.atoms.node(wide[0]), Const(-_FAR), Const(_FAR))
        return rest + self.atoms.linear(node).times(coefficient)

    def _reason(self, node: Expr) -> _Reason:
        """Why a node has no solution."""
        match node:
            case Load():
                return _Reason.DATA
            case Call("floor"):
                return _Reason.FLOAT
            case Binary(BinaryOp.MOD):
                return _Reason.REMAINDER
            case Binary(_, left, right) if not (self._varies(left) and self._varies(right)):
                return _Reason.SIGN
            case _:
                return _Reason.HARD

    def _unknown(self, reason: _Reason, e: Expr) -> Cubes:
        """Nothing is known of a part, and why."""
        if reason is _Reason.LARGE and self.is_too_large:
            return _TRUE
        self.is_too_large |= reason is _Reason.LARGE
        text = print_expr(e).rsplit("\n", 1)[-1]
        shown = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
        note = f"`{shown}` {reason.value}"
        if note not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(note)
        return _TRUE


_LONGEST_TEXT: Final = 60
_MOST_NOTES: Final = 8
_OPPOSITE: Final = {
    CompareOp.LT: CompareOp.GE, CompareOp.LE: CompareOp.GT, CompareOp.EQ: CompareOp.NE,
    CompareOp.NE: CompareOp.EQ, CompareOp.GE: CompareOp.LT, CompareOp.GT: CompareOp.LE,
}  # fmt: skip


def floor_divide(atoms: Atoms, form: Linear, divisor: int) -> Linear:
    """`form // divisor` for a positive divisor; what it divides comes out of the quotient."""
    if divisor == 1:
        return form
    whole = tuple((a, c // divisor) for a, c in form.coefficients if c % divisor == 0)
    rest = Linear(form.constant, tuple((a, c) for a, c in form.coefficients if c % divisor))
    if not rest.coefficients:
        return Linear(form.constant // divisor, whole)
    quotient = Binary(BinaryOp.FLOORDIV, atoms.expr(rest), Const(divisor))
    return Linear(0, whole) + atoms.linear(quotient)


def _is_affine(node: Expr) -> bool:
    match node:
        case Symbol() | Binary(BinaryOp.FLOORDIV | BinaryOp.MOD, _, Const()):
            return True
        case _:
            return False
