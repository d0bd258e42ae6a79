"""Limits that several comparisons set together, from the integer-set library isl.

    kv <= q and kv <= 9 - q     →   2 * kv <= 9, whatever the rows

Each comparison alone is solved by cubes.py in closed form.  isl is asked only where a closed form
loses something: where the target axis occurs twice in a comparison, or where some limits of a cube
rise along the other axis and others fall.  It projects the other axis out of the set of pairs,
and the limits of the hull of what is left hold for every row.

isl counts its own operations, and gives up after a set number of them.  So what is found does not
depend on the machine, and needs no other process.  A part that it gives up on has its closed form.

Source: S. Verdoolaege, isl: An Integer Set Library for the Polyhedral Model, 2010.
"""

from __future__ import annotations

import math
from typing import Any, Final, final

from attngen.analysis.cubes import AXES, Cube, Limit, Rest, floor_divide
from attngen.analysis.linear import Atoms, Linear
from attngen.ir.expr import Binary, BinaryOp, Const, Role, Symbol
from attngen.record import record

__all__ = ["MOST_OPERATIONS", "IntegerSets", "SetLimit"]

MOST_OPERATIONS: Final = 50_000
"""What isl may do for one mask: at most 52 ms in what was measured (ARCHITECTURE.md, Decisions)."""
_DEEPEST: Final = 8
"""How deep quotients may stand in one another."""


@final
@record(eq=False)
class SetLimit:
    """`target <= value` or `target >= value` for every row of a tile."""

    is_upper: bool
    value: Linear


@final
class IntegerSets:
    """isl, with one budget for all cubes of a mask."""

    def __init__(self, atoms: Atoms, target: str, most_operations: int = MOST_OPERATIONS) -> None:
        self.atoms = atoms
        self.target = target
        self.most_operations = most_operations
        self.gave_up = False
        self._context: Any = None

    def limits(self, cube: Cube) -> list[SetLimit]:
        """What all comparisons of a cube together say of the target axis, over a tile of the other.

        Nothing once isl has given up.  Comparisons that are not affine are left out.
        """
        if self.gave_up:
            return []
        try:
            import islpy as isl
        except ImportError:  # no wheel for this system
            self.gave_up = True
            return []
        if self._context is None:
            self._context = isl.Context()
            self._context.set_max_operations(self.most_operations)
        text = _Writer(self.atoms, self.target)
        described = text.describe([lit.form for lit in cube if isinstance(lit, Limit | Rest)])
        try:
            pairs = isl.Set.read_from_str(self._context, described)
            hull = pairs.project_out(isl.dim_type.set, 0, 1).simple_hull().remove_divs()
            if hull.is_empty():
                return [SetLimit(True, Linear(-1))]
            # islpy does not notice a budget that ends while it reads a number.
            self._context.set_max_operations(0)
            found = [limit for c in hull.get_constraints() for limit in text.limits(c)]
            self._context.set_max_operations(self.most_operations)
            return found
        except isl.Error:
            self.gave_up = True
            return []


class _Writer:
    """A cube in isl's notation, and isl's constraints as linear forms.

    `x` is the other axis and `y` the target; a parameter `p5` is atom 5.
    """

    def __init__(self, atoms: Atoms, target: str) -> None:
        self.atoms = atoms
        self.target = target
        self.other = "q" if target == "kv" else "kv"
        self.params: list[int] = []

    def describe(self, forms: list[Linear]) -> str:
        tile = [self.atoms.symbol(f"{self.other}_{end}", Role.TILE) for end in ("first", "last")]
        lengths = [self.atoms.symbol(f"S{axis}") for axis in (self.other, self.target)]
        first, last, along, across = (self._text(end, _DEEPEST) for end in (*tile, *lengths))
        parts = [f"0 <= {first} <= x <= {last} < {along}", f"0 <= y < {across}"]
        for form in forms:
            text = self._text(form, _DEEPEST)
            parts += [] if text is None else [f"{text} <= 0"]
        for atom in self.params:
            low, high = self.atoms.interval(atom).ends
            parts += [f"p{atom} >= {low}"] if math.isfinite(low) else []
            parts += [f"p{atom} <= {high}"] if math.isfinite(high) else []
        names = ", ".join(f"p{atom}" for atom in self.params)
        return f"[{names}] -> {{ [x, y] : {' and '.join(parts)} }}"

    def _text(self, form: Linear, depth: int) -> str | None:
        terms = [str(form.constant)]
        for atom, coefficient in form.coefficients:
            text = self._atom(atom, depth)
            if text is None:
                return None
            terms.append(f"{coefficient} * {text}")
        return f"({' + '.join(terms)})"

    def _atom(self, atom: int, depth: int) -> str | None:
        names = self.atoms.names(atom)
        axis = next((axis for axis, own in AXES.items() if names & own), None)
        if axis is None:
            return self._param(atom)
        match self.atoms.node(atom):
            case Symbol():
                return "y" if axis == self.target else "x"
            case Binary(BinaryOp.FLOORDIV | BinaryOp.MOD as op, x, Const(c)) if c > 0 and depth:
                inner = self._text(self.atoms.linear(x), depth - 1)
                quotient = f"floor({inner}/{c})"
                if inner is None:
                    return None
                return quotient if op is BinaryOp.FLOORDIV else f"({inner} - {c} * {quotient})"
            case _:
                return None

    def _param(self, atom: int) -> str:
        if atom not in self.params:
            self.params.append(atom)
        return f"p{atom}"

    def limits(self, constraint: Any) -> list[SetLimit]:
        """What `rest + c · y >= 0` says of y."""
        import islpy as isl

        c = constraint.get_coefficient_val(isl.dim_type.set, 0).to_python()
        rest = Linear(constraint.get_constant_val().to_python())
        for place in range(constraint.dim(isl.dim_type.param)):
            coefficient = constraint.get_coefficient_val(isl.dim_type.param, place).to_python()
            atom = int(constraint.get_dim_name(isl.dim_type.param, place)[1:])
            rest += Linear(0, ((atom, coefficient),) if coefficient else ())
        if not c or not self.atoms.fits(rest):
            return []
        found = [self._limit(rest, c)]
        return [*found, self._limit(rest.times(-1), -c)] if constraint.is_equality() else found

    def _limit(self, rest: Linear, c: int) -> SetLimit:
        """`rest + c · y >= 0`, solved for y."""
        quotient = floor_divide(self.atoms, rest, abs(c))
        return SetLimit(True, quotient) if c < 0 else SetLimit(False, quotient.times(-1))
