"""Integer expressions as linear forms: `kv - qpos + w` is `kv - q - Skv + Sq + w`.

A linear form is a constant and a coefficient for each *atom*, which is a symbol or a node that is
not linear (`kv // 8`, `plen[b]`, `min(q, w)`).  Nodes that mean the same have one number, so
`doc[b, q] - doc[b, q]` is 0.  `qpos` counts as `q + Skv - Sq`, which lets lengths cancel.

The ranges of params and tensors, and `0 <= q_first <= q_last < Sq` for the rows of a tile, bound
a form from both sides.  That proves which of two forms is smaller, for all lengths.

Source: linear forms with ranges of their atoms, as in affine arithmetic, L. H. de Figueiredo and
J. Stolfi, 2004.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final, final

from attngen.analysis.ranges import INT64, LONGEST, compile_time_ranges, infer_ranges
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    Negate,
    Role,
    Symbol,
    expr_type,
)
from attngen.ir.functions import call
from attngen.ir.interval import Interval, Number
from attngen.ir.traverse import children, rebuild, substitute
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = ["Atoms", "Linear"]

_INT: Final = ScalarType.INT
_MOST_TERMS: Final = 32
"""A sum of more different atoms is an atom itself, so that work stays linear in the text."""
_DEEPEST: Final = 6
"""How deep a proof looks into `min` and `max`."""
_LARGEST_FACTOR: Final = 2**20
"""Forms with quotients are multiplied by at most this much."""


@final
@record
class Linear:
    """`constant + Σ coefficient · atom`; atoms by their number in `Atoms`, no coefficient 0."""

    constant: int
    coefficients: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: Linear) -> Linear:
        total = dict(self.coefficients)
        for atom, coefficient in other.coefficients:
            total[atom] = total.get(atom, 0) + coefficient
        kept = tuple((atom, c) for atom, c in total.items() if c)
        return Linear(self.constant + other.constant, kept)

    def __sub__(self, other: Linear) -> Linear:
        return self + other.times(-1)

    def times(self, factor: int) -> Linear:
        if not factor:
            return Linear(0)
        scaled = tuple((atom, c * factor) for atom, c in self.coefficients)
        return Linear(self.constant * factor, scaled)

    def plus(self, number: int) -> Linear:
        return Linear(self.constant + number, self.coefficients)

    def split_off(self, atom: int) -> tuple[int, Linear]:
        """The coefficient of an atom, and the form without it."""
        rest = tuple((a, c) for a, c in self.coefficients if a != atom)
        return dict(self.coefficients).get(atom, 0), Linear(self.constant, rest)

    @property
    def atoms(self) -> tuple[int, ...]:
        return tuple(atom for atom, _ in self.coefficients)


@final
class Atoms:
    """The atoms of one variant: numbers, linear forms and what is known of both.

    `tile` is the axis, `q` or `kv`, along which there is a tile, with at least one row or key.
    """

    def __init__(self, attention: Attention, tile: str = "q") -> None:
        self.attention = attention
        self.tile = tile
        position, index = Interval(-LONGEST, LONGEST - 1), Interval(0, LONGEST - 1)
        self.ranges = dict(compile_time_ranges(attention))
        for name in ("q", "kv"):
            self.ranges |= {f"{name}_first": index, f"{name}_last": index}
        self.ranges |= {"qpos_first": position, "qpos_last": position}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._seen: dict[int, tuple[Expr, int]] = {}  # by identity; holds the node, so ids last
        self._nodes: list[Expr] = []
        self._operands: list[tuple[int, ...]] = []
        self._stand_ins: list[Expr] = []  # a symbol of the same type in place of each node
        self._shallow: list[Expr] = []  # each node with such operands
        self._names: list[frozenset[str]] = []
        self._forms: dict[int, Linear] = {}
        self._intervals: dict[int, Interval] = {}
        self._ordered: dict[tuple[int, int], bool] = {}

    # ---- numbers ----

    def number(self, e: Expr) -> int:
        """The number of a node; equal numbers mean the same."""
        todo = [e]
        while todo and id(e) not in self._seen:
            node = todo[-1]
            missing = [child for child in children(node) if id(child) not in self._seen]
            if missing:
                todo.extend(missing)
            else:
                self._seen[id(node)] = (todo.pop(), self._number_one(node))
        return self._seen[id(e)][1]

    def _number_one(self, node: Expr) -> int:
        operands = tuple(self._seen[id(child)][1] for child in children(node))
        if isinstance(node, Let):
            return operands[0]
        signature = (*_kind(node), *operands)
        if signature not in self._numbers:
            number = len(self._nodes)
            self._numbers[signature] = number
            self._nodes.append(node)
            self._operands.append(operands)
            own = frozenset({node.name}) if isinstance(node, Symbol) else frozenset()
            self._names.append(own.union(*(self._names[o] for o in operands)))
            shallow = rebuild(node, tuple(self._stand_ins[o] for o in operands))
            is_leaf = isinstance(node, Symbol | Const)
            stand_in = node if is_leaf else Symbol(f"#{number}", Role.TILE, expr_type(shallow))
            self._shallow.append(shallow)
            self._stand_ins.append(stand_in)
        return self._numbers[signature]

    def type_of(self, e: Expr) -> ScalarType:
        """The type of an expression, without a walk down to its leaves."""
        return expr_type(self._stand_ins[self.number(e)])

    def node(self, atom: int) -> Expr:
        return self._nodes[atom]

    def names(self, e: Expr | int) -> frozenset[str]:
        """The symbols that a node mentions."""
        return self._names[e if isinstance(e, int) else self.number(e)]

    def mentioning(self, form: Linear, names: frozenset[str]) -> tuple[int, ...]:
        """The atoms of a form that mention one of these symbols."""
        return tuple(a for a in form.atoms if self._names[a] & names)

    # ---- linear forms ----

    def symbol(self, name: str, role: Role = Role.SIZE) -> Linear:
        return self.linear(Symbol(name, role, _INT))

    def linear(self, e: Expr) -> Linear:
        """The linear form of an integer expression."""
        for key in self._unknown_below(self.number(e), self._forms):
            form = self._form(self._nodes[key], key)
            too_long = len(form.coefficients) > _MOST_TERMS
            self._forms[key] = Linear(0, ((key, 1),)) if too_long else form
        return self._forms[self.number(e)]

    def _unknown_below(self, atom: int, known: Mapping[int, object]) -> Iterator[int]:
        """The nodes below one of which nothing is known yet, operands first, and itself."""
        todo = [atom]
        while todo:
            missing = [o for o in self._operands[todo[-1]] if o not in known]
            if missing:
                todo.extend(missing)
            elif (ready := todo.pop()) not in known:
                yield ready

    def _form(self, node: Expr, key: int) -> Linear:
        if expr_type(self._stand_ins[key]) is not _INT:
            return Linear(0, ((key, 1),))
        match node:
            case Const(value):
                return Linear(int(value))
            case Symbol("qpos" | "qpos_first" | "qpos_last" as name, role):
                row = Symbol(name.replace("pos", ""), role, _INT)
                return self.linear(row) + self.symbol("Skv") - self.symbol("Sq")
            case Negate(operand):
                return self.linear(operand).times(-1)
            case Binary(op, left, right):
                found = _binary(op, self.linear(left), self.linear(right))
                return Linear(0, ((key, 1),)) if found is None else found
            case _:
                return Linear(0, ((key, 1),))

    def expr(self, form: Linear) -> Expr:
        """The expression of a form; `q + Skv - Sq` is written as `qpos` again."""
        terms = self._with_positions(form)
        terms.sort(key=lambda term: term[1] < 0)  # what is added comes first
        total: Expr | None = None if terms or form.constant else Const(0)
        for node, coefficient in terms:
            size = abs(coefficient)
            term = node if size == 1 else Binary(BinaryOp.MUL, node, Const(size))
            if total is None:
                total = Negate(term) if coefficient < 0 else term
            else:
                op = BinaryOp.SUB if coefficient < 0 else BinaryOp.ADD
                total = Binary(op, total, term)
        if total is None:
            return Const(form.constant)
        if form.constant:
            op = BinaryOp.SUB if form.constant < 0 else BinaryOp.ADD
            total = Binary(op, total, Const(abs(form.constant)))
        return total

    def _with_positions(self, form: Linear) -> list[tuple[Expr, int]]:
        coefficients = {self._nodes[atom]: c for atom, c in form.coefficients}
        sizes = {n.name: n for n in coefficients if isinstance(n, Symbol)}
        rows = [n for n in sizes if n in ("q", "q_first", "q_last")]
        if len(rows) != 1 or not {"Sq", "Skv"} <= sizes.keys():
            return list(coefficients.items())
        row = sizes[rows[0]]
        c = coefficients[row]
        if coefficients[sizes["Skv"]] != c or coefficients[sizes["Sq"]] != -c:
            return list(coefficients.items())
        position = Symbol(row.name.replace("q", "qpos"), row.role, _INT)
        lengths = (row, sizes["Sq"], sizes["Skv"])
        return [(position, c), *((n, k) for n, k in coefficients.items() if n not in lengths)]

    def at(self, form: Linear, values: Mapping[str, Linear]) -> Linear:
        """The form with `q` or `kv` replaced."""
        exprs = {name: self.expr(value) for name, value in values.items()}
        if "q" in values:
            position = values["q"] + self.symbol("Skv") - self.symbol("Sq")
            exprs["qpos"] = self.expr(position)
        changed = exprs.keys()
        total = Linear(form.constant)
        for atom, coefficient in form.coefficients:
            if self._names[atom] & changed:
                total += self.linear(substitute(self._nodes[atom], exprs)).times(coefficient)
            else:
                total += Linear(0, ((atom, coefficient),))
        return total

    # ---- what is known ----

    def interval(self, atom: int) -> Interval:
        for key in self._unknown_below(atom, self._intervals):
            operands = {f"#{o}": self._intervals[o] for o in self._operands[key]}
            shallow = self._shallow[key]
            found = infer_ranges((shallow,), {**self.ranges, **operands}, self.attention)
            self._intervals[key] = found[id(shallow)]
        return self._intervals[atom]

    def least(self, form: Linear, *, keys_reach_rows: bool = False) -> Number:
        """A lower bound of a form; `keys_reach_rows` assumes `Sq <= Skv`."""
        plain = self._least(form, keys_reach_rows)
        scale, smaller = self._without_quotients(form)
        if smaller is form:
            return plain
        low = self._least(smaller, keys_reach_rows)
        return max(plain, -(-low // scale)) if math.isfinite(low) else plain

    def _least(self, form: Linear, keys_reach_rows: bool) -> Number:
        total: Number = form.constant
        steps = {name: 0 for chain in _CHAINS.values() for name in chain}
        for atom, coefficient in form.coefficients:
            node = self._nodes[atom]
            if isinstance(node, Symbol) and node.name in steps:
                steps[node.name] += coefficient
                continue
            known = self.interval(atom)
            end = known.low if coefficient > 0 else known.high
            total += coefficient * end if math.isfinite(end) else -math.inf
        if keys_reach_rows:
            steps["Sq"] += steps["Skv"]
        for axis, chain in _CHAINS.items():
            weights = [steps[name] for name in chain]
            total += _least_of_chain(weights) + (weights[-1] if axis == self.tile else 0)
        return total

    def _without_quotients(self, form: Linear) -> tuple[int, Linear]:
        """A factor, and less than so many times the form: `c · (x // c)` is in [x - c + 1, x]."""
        factor = 1
        for atom in form.atoms:
            match self._nodes[atom]:
                case Binary(BinaryOp.FLOORDIV, x, Const(c)) if 0 < c * factor <= _LARGEST_FACTOR:
                    coefficient, _ = form.split_off(atom)
                    if coefficient % c:
                        factor, form, coefficient = (
                            factor * int(c),
                            form.times(int(c)),
                            coefficient * int(c),
                        )
                    _, rest = form.split_off(atom)
                    low = self.linear(x).plus(1 - int(c) if coefficient > 0 else 0)
                    form = rest + low.times(coefficient // int(c))
        return factor, form

    def most(self, form: Linear, *, keys_reach_rows: bool = False) -> Number:
        """An upper bound of a form."""
        return -self.least(form.times(-1), keys_reach_rows=keys_reach_rows)

    def sign(self, e: Expr) -> int:
        """1 or -1 where an integer is proved to be positive or negative; else 0."""
        form = self.linear(e)
        return 1 if self.least(form) > 0 else -1 if self.most(form) < 0 else 0

    def fits(self, form: Linear) -> bool:
        """Whether the form, and each sum of some of its terms, stays within 64 bits."""
        return self.stays_within(form, int(INT64.high))

    def stays_within(self, form: Linear, reach: int) -> bool:
        """Whether the magnitudes of all terms add up to at most `reach`."""
        terms = [Linear(0, (term,)) for term in form.coefficients]
        sizes = (max(-self._least(t, False), -self._least(t.times(-1), False), 0) for t in terms)
        return abs(form.constant) + sum(sizes) <= reach

    # ---- order ----

    def never_exceeds(self, x: Expr, y: Expr) -> bool:
        """Proof that `x <= y` for every tile of every legal launch; False: not known."""
        return self._is_ordered(x, y, _DEEPEST)

    def _is_ordered(self, x: Expr, y: Expr, depth: int) -> bool:
        pair = self.number(x), self.number(y)
        if pair not in self._ordered:
            self._ordered[pair] = self._compare(x, y, depth)
        return self._ordered[pair]

    def _compare(self, x: Expr, y: Expr, depth: int) -> bool:
        if self.least(self.linear(y) - self.linear(x)) >= 0:
            return True
        if not depth:
            return False
        match x:
            case Call("max", parts):
                return all(self._is_ordered(part, y, depth - 1) for part in parts)
            case Call("min", parts) if any(self._is_ordered(p, y, depth - 1) for p in parts):
                return True
        match y:
            case Call("min", parts):
                return all(self._is_ordered(x, part, depth - 1) for part in parts)
            case Call("max", parts):
                return any(self._is_ordered(x, part, depth - 1) for part in parts)
            case _:
                return False

    def largest(self, operands: list[Expr]) -> Expr:
        """Their maximum, without those that another one never falls below."""
        return self._extreme("max", operands)

    def smallest(self, operands: list[Expr]) -> Expr:
        """Their minimum, without those that never fall below another one."""
        return self._extreme("min", operands)

    def _extreme(self, function: str, operands: list[Expr]) -> Expr:
        kept: list[Expr] = []
        for operand in operands:
            if any(self._is_idle(function, operand, other) for other in kept):
                continue
            kept = [other for other in kept if not self._is_idle(function, other, operand)]
            kept.append(operand)
        return kept[0] if len(kept) == 1 else call(function, *kept)

    def _is_idle(self, function: str, operand: Expr, other: Expr) -> bool:
        pair = (operand, other) if function == "max" else (other, operand)
        return self.never_exceeds(*pair)


_CHAINS: Final = {"q": ("q_first", "q_last", "Sq"), "kv": ("kv_first", "kv_last", "Skv")}
"""Each is at least the one before, and at least 0."""


def _least_of_chain(weights: list[int]) -> Number:
    """The least `Σ weight · value` of values `0 <= first <= last <= length`."""
    return sum(min(sum(weights[i:]) * LONGEST, 0) for i in range(len(weights)))


def _kind(node: Expr) -> tuple[object, ...]:
    """What a node is, besides its operands."""
    match node:
        case Const(value):
            return "const", type(value).__name__, repr(value)
        case Symbol(name):
            return "symbol", name
        case Load(tensor):
            return "load", tensor
        case Binary(op) | Compare(op) | Logical(op):
            return type(node).__name__, op.value
        case Call(function):
            return "call", function
        case _:
            return (type(node).__name__,)


def _binary(op: BinaryOp, a: Linear, b: Linear) -> Linear | None:
    """The form of an operation on forms; None where it is not linear."""
    match op:
        case BinaryOp.ADD:
            return a + b
        case BinaryOp.SUB:
            return a - b
        case BinaryOp.MUL if not b.coefficients:
            return a.times(b.constant)
        case BinaryOp.MUL if not a.coefficients:
            return b.times(a.constant)
        case BinaryOp.FLOORDIV | BinaryOp.MOD if a == Linear(0):
            return Linear(0)  # by 0 too
        case BinaryOp.FLOORDIV if b == Linear(1):
            return a
        case BinaryOp.MOD if b == Linear(1):
            return Linear(0)
        case BinaryOp.FLOORDIV if not a.coefficients and not b.coefficients and b.constant:
            return Linear(a.constant // b.constant)
        case BinaryOp.MOD if not a.coefficients and not b.coefficients and b.constant:
            return Linear(a.constant % b.constant)
        case _:
            return None
