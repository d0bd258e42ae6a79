"""What follows from an equality, written shorter.

    doc[q] == doc[kv] and q - start[doc[q]] >= kv - start[doc[kv]]

    doc[q] == doc[kv] and q >= kv

Next to `a == b` what stands for `b` may stand for `a`.  Where terms then cancel, so that less is
read, the rest of an `and` is a condition on rows and keys themselves, which has limits at compile
time.  It is the same mask at every pair, but reads less: whether an index is inside of a tensor
is judged by the mask as it was written.

Source: congruence closure, G. Nelson and D. C. Oppen, 1980; here one equality at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Final

from attngen.analysis.linear import Atoms, Linear
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Compare,
    CompareOp,
    Expr,
    Let,
    Load,
    Logical,
    LogicalOp,
)
from attngen.ir.traverse import children, postorder, rebuild, rewrite
from attngen.ir.types import ScalarType

__all__ = ["use_equalities"]

_AXES: Final = frozenset({"q", "qpos", "kv"})
_MOST_NODES: Final = 512
"""Nodes of a mask beyond which it stays as it is: work grows with its square."""


@lru_cache(maxsize=64)  # every analysis asks
def use_equalities(attention: Attention) -> Attention:
    """The variant with a mask that means the same and reads less; the same object otherwise."""
    mask = attention.mask
    if mask is None:
        return attention
    nodes = list(postorder(mask))
    if len(nodes) > _MOST_NODES or not any(_is_equality(node) for node in nodes):
        return attention
    atoms = Atoms(attention)
    new = rewrite(mask, lambda e: _use_in_chain(e, atoms))
    return attention if new is mask else replace(attention, mask=new)


def _use_in_chain(e: Expr, atoms: Atoms) -> Expr:
    if not isinstance(e, Logical) or e.op is not LogicalOp.AND:
        return e
    operands = list(e.operands)
    for i, equality in enumerate(operands):
        found = _without_let(equality)
        if not (isinstance(found, Compare) and _is_equality(found)):
            continue
        if _is_int(found.left, atoms):
            operands[:i] = [_shorten(o, found, atoms) for o in operands[:i]]
            operands[i + 1 :] = [_shorten(o, found, atoms) for o in operands[i + 1 :]]
    return rebuild(e, tuple(operands))


def _shorten(e: Expr, equality: Compare, atoms: Atoms) -> Expr:
    """`e` where the equality holds, if it then reads less."""
    before = _reads(e, atoms)
    if not before:
        return e
    after = _cancel(_put(equality.left, equality.right, e, atoms), atoms)
    return after if _reads(after, atoms) < before else e


def _put(new: Expr, old: Expr, e: Expr, atoms: Atoms) -> Expr:
    """`e` with one expression in place of another; lets are left out, for they change."""
    wanted = atoms.number(old)
    built: dict[int, Expr] = {}
    for node in postorder(e):
        if atoms.number(node) == wanted:
            built[id(node)] = new
        elif isinstance(node, Let):
            built[id(node)] = built[id(node.value)]
        else:
            built[id(node)] = rebuild(node, tuple(built[id(c)] for c in children(node)))
    return built[id(e)]


def _cancel(e: Expr, atoms: Atoms) -> Expr:
    """`e` with sums, and comparisons of integers, in which terms cancel written without these."""

    def rule(node: Expr) -> Expr:
        match node:
            case Binary(BinaryOp.ADD | BinaryOp.SUB, left, right) if _is_int(left, atoms):
                sides = atoms.linear(left), atoms.linear(right)
                total = atoms.linear(node)
                return atoms.expr(total) if _has_fewer(total, sides) else node
            case Compare(op, left, right) if _is_int(left, atoms):
                sides = atoms.linear(left), atoms.linear(right)
                total = sides[0] - sides[1]
                if not _has_fewer(total, sides) or not atoms.fits(total):
                    return node
                positive = tuple(term for term in total.coefficients if term[1] > 0)
                negative = Linear(0, tuple(t for t in total.coefficients if t[1] < 0)).times(-1)
                first = Linear(total.constant, positive)
                return Compare(op, atoms.expr(first), atoms.expr(negative), node.span)
            case _:
                return node

    return rewrite(e, rule)


def _has_fewer(total: Linear, sides: tuple[Linear, Linear]) -> bool:
    """Whether terms of both sides cancel."""
    uses = Counter(atom for side in sides for atom in side.atoms)
    return len(total.atoms) < len(uses)


def _reads(e: Expr, atoms: Atoms) -> int:
    """How many different elements `e` reads for a pair."""
    return len(
        {
            atoms.number(node)
            for node in postorder(e)
            if isinstance(node, Load) and atoms.names(node) & _AXES
        }
    )


def _is_equality(e: Expr) -> bool:
    return isinstance(e, Compare) and e.op is CompareOp.EQ


def _is_int(e: Expr, atoms: Atoms) -> bool:
    return atoms.type_of(e) is ScalarType.INT


def _without_let(e: Expr) -> Expr:
    while isinstance(e, Let):
        e = e.value
    return e
