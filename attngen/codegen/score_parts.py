"""Parts of the score lines that need no work for each pair.

    score   s + exp2(slope(h)) * float(kv - qpos)     over keys kv0, kv0 + 1, kv0 + 8, …
    fixed   c0 = exp2(slope(h))                       once for a block
    bases   x0 = c0 * float(kv0 - qpos)               once for a lane's keys of a tile
            s + (x0 + c0 * step)                      step = 0, 1, 8, …, constants of the loop
    addend  x0 + c0 * step                            added while q.k is scaled: one operation
    growth  c0 / scale                                where no more depends on the key, q.k
                                                      begins with `growth * step`

Fixed is what depends on the head alone and costs more than a register.  A base is a conversion
whose operand grows by the same amount from key to key, or its product with a factor that is the
same for all pairs: a conversion takes as long as four additions, and here one serves all keys of a
lane.  A sum is the same while the integer is below 2^24, and rounds twice instead of once beyond;
a product rounds twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, final

from attngen.analysis.growth import growth_of
from attngen.analysis.ranges import LONGEST, compile_time_ranges, infer_ranges
from attngen.codegen.expr import eager_lets, is_unconditional
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Const,
    Expr,
    Let,
    Load,
    Negate,
    Symbol,
    ToFloat,
)
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder, symbols, tensors
from attngen.record import record

__all__ = [
    "Base",
    "ScoreParts",
    "cost_of_pair",
    "find_addend",
    "find_called_elsewhere",
    "find_growth",
    "find_score_parts",
]

_OF_A_PAIR: Final = frozenset({"q", "qpos", "kv", "s"})
_COSTS: Final[Mapping[type, int]] = {Load: 8, Call: 8}
"""Of nodes that are more than one operation."""
_MOST_GROWTH: Final = 1 << 12
"""So that a tile's last step is exact."""
_DIVISIONS: Final = (BinaryOp.DIV, BinaryOp.FLOORDIV, BinaryOp.MOD)


@final
@record(eq=False)
class Base:
    """What grows from a key to the next by `growth`, which is not 0, times `factor`.

    node:    the conversion of an integer, or its product with the factor.
    factor:  the same for all pairs; None is 1.
    """

    node: Expr
    growth: int
    factor: Expr | None = None


@final
@record(eq=False)
class ScoreParts:
    """What score lines take from outside; the nodes are theirs."""

    fixed: tuple[Expr, ...]
    bases: tuple[Base, ...]


def find_score_parts(attention: Attention, given: frozenset[int] = frozenset()) -> ScoreParts:
    """Those that the functions of the score lines compute, and no other function.

    given:  nodes, by id, that they do not compute either.
    """
    elsewhere = find_called_elsewhere(attention) | given
    fixed: dict[int, Expr] = {}
    bases: dict[int, Base] = {}
    for line in attention.scores:
        stack: list[Expr] = [line]
        while stack:
            node = stack.pop()
            if id(node) in elsewhere or id(node) in fixed or id(node) in bases:
                continue
            if _is_fixed(node) and (not tensors(node) or is_unconditional(node, line)):
                fixed[id(node)] = node
                continue
            base = _as_base(node, line)
            if base is not None and id(base.factor) not in elsewhere:
                bases[id(node)] = base
                stack.append(base.factor or node)
                continue
            stack.extend(reversed(children(node)))
    return ScoreParts(tuple(fixed.values()), tuple(bases.values()))


def find_called_elsewhere(attention: Attention) -> set[int]:
    """Nodes, by id, that other functions than those of the score lines compute, too."""
    others = (attention.length_q, attention.length_kv, attention.scale, attention.mask)
    elsewhere = {id(n) for e in (*others, attention.sink) if e is not None for n in postorder(e)}
    for line in attention.scores:
        for let in _called(line):
            elsewhere |= {id(n) for n in postorder(let)}
    return elsewhere


def find_addend(attention: Attention) -> Expr | None:
    """What the first score line adds to s, where it does nothing else; None otherwise."""
    return _added(attention.scores[0]) if attention.scores else None


def _added(e: Expr) -> Expr | None:
    """What a sum adds to s, which is one of its terms and in no other."""
    match e:
        case Binary(BinaryOp.ADD, x, y) if "s" not in symbols(y):
            left, op, right = x, BinaryOp.ADD, y
        case Binary(BinaryOp.ADD, x, y) if "s" not in symbols(x):
            left, op, right = y, BinaryOp.ADD, x
        case Binary(BinaryOp.SUB, x, y) if "s" not in symbols(y):
            left, op, right = x, BinaryOp.SUB, y
        case _:
            return None
    if isinstance(left, Symbol):
        right = right if op is BinaryOp.ADD else Negate(right)
        return right if left.name == "s" else None
    inner = _added(left)
    return None if inner is None else Binary(op, inner, right)


def find_growth(attention: Attention, parts: ScoreParts, most: float) -> Expr | None:
    """What the addend gains from a key to the next, over the scale of q.k.

    None where there are further lines, where something else depends on the key, where the gain may
    exceed `most` in either direction, or the scale is not known or not above 0; and where `most` is
    0, even of a sum that gains nothing.
    """
    addend, scale = find_addend(attention), attention.scale
    if addend is None or len(attention.scores) > 1 or most == 0:
        return None
    if not isinstance(scale, Const) or not scale.value > 0:
        return None
    gains = _gains(addend, {id(base.node): base for base in parts.bases})
    if not gains:
        return None
    terms = [
        Const(number / scale.value)
        if factor is None
        else Binary(BinaryOp.MUL, factor, Const(number / scale.value))
        for number, factor in gains
    ]
    growth: Expr = terms[0]
    for term in terms[1:]:
        growth = Binary(BinaryOp.ADD, growth, term)
    # There is a head where an addend is computed.
    names = {**compile_time_ranges(attention), "Hq": Interval(1, LONGEST)}
    found = infer_ranges((growth,), names, attention)[id(growth)]
    limit = most / scale.value
    return growth if not found.nan and found.within(-limit, limit) else None


def _gains(e: Expr, bases: Mapping[int, Base]) -> list[tuple[float, Expr | None]] | None:
    """The number and factor of each base in a sum; None where more of it depends on the key."""
    if id(e) in bases:
        return [(bases[id(e)].growth, bases[id(e)].factor)]
    match e:
        case Negate(x):
            inner = _gains(x, bases)
            return None if inner is None else [(-number, factor) for number, factor in inner]
        case Binary(BinaryOp.ADD | BinaryOp.SUB as op, x, y):
            left, right = _gains(x, bases), _gains(y if op is BinaryOp.ADD else Negate(y), bases)
            return None if left is None or right is None else left + right
        case _:
            return None if "kv" in symbols(e) or tensors(e) else []


def cost_of_pair(attention: Attention) -> int:
    """Operations of the score lines for each pair, beside what is computed ahead of it."""
    parts = find_score_parts(attention)
    ahead = {id(e) for e in (*parts.fixed, *(base.node for base in parts.bases))}
    cost = len(parts.bases)  # `x0 + step`
    stack: list[Expr] = list(attention.scores)
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in ahead or id(node) in seen:
            continue
        seen.add(id(node))
        if not isinstance(node, Const | Symbol | Let):
            cost += _COSTS.get(type(node), 1)
        stack.extend(children(node))
    return cost


def _as_base(node: Expr, line: Expr) -> Base | None:
    match node:
        case ToFloat(operand):
            growth = growth_of(operand)
            return Base(node, growth) if growth and abs(growth) <= _MOST_GROWTH else None
        case Binary(BinaryOp.MUL, ToFloat() as grown, factor):
            pass
        case Binary(BinaryOp.MUL, factor, ToFloat() as grown):
            pass
        case _:
            return None
    base = _as_base(grown, line)
    if base is None or symbols(factor) & _OF_A_PAIR:
        return None
    if tensors(factor) and not is_unconditional(factor, line):
        return None
    return Base(node, base.growth, factor)


def _called(line: Expr) -> Iterator[Let]:
    """Lets below a score line that are functions of their own."""
    local = {id(let) for let in eager_lets(line)}
    for node in postorder(line):
        if isinstance(node, Let) and node is not line and id(node) not in local:
            yield node


def _is_fixed(e: Expr) -> bool:
    """Whether it depends on the head alone, and is worth a register."""
    if symbols(e) & _OF_A_PAIR:
        return False
    return any(
        isinstance(n, Load | Call) or (isinstance(n, Binary) and n.op in _DIVISIONS)
        for n in postorder(e)
    )
