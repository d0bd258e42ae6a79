"""Whether a row can be left without a key, proved from the mask alone.

    causal and doc[b, qpos] == doc[b, kv]       holds at kv = qpos, so no row is empty

A few keys of each row are put into the mask: its own position, the first, the last.  Where the
mask then holds for every length, whatever the tensors hold, no row is empty.
"""

from __future__ import annotations

from typing import Final

from attngen.analysis.linear import Atoms, Linear
from attngen.ir import interval
from attngen.ir.attention import Attention
from attngen.ir.expr import (
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
)
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder, substitute
from attngen.ir.types import ScalarType

__all__ = ["may_have_empty_row"]

_LARGEST_MASK: Final = 2000
"""A mask of more nodes is not looked at for rows without a key."""


def may_have_empty_row(attention: Attention) -> bool:
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
