"""A score of -inf that a condition decides becomes a line of the mask.

    score where(kv <= qpos, s * 0.5, -inf)    →    score s * 0.5
                                                   mask  kv <= qpos

Both mean the same: a score of -inf is a masked pair.  As a mask it is analysed: tiles are skipped,
and what lies in memory at keys that nobody sees is never multiplied.  Only the last score line may
lose its condition, and the one before it once nothing is left of the last; a condition that reads
the score itself stays.
"""

from __future__ import annotations

import math
from dataclasses import replace

from attngen.ir.attention import Attention
from attngen.ir.expr import Const, Expr, Let, Logical, LogicalOp, Not, Role, Select, Symbol
from attngen.ir.traverse import postorder

__all__ = ["lift_masks"]


def lift_masks(attention: Attention) -> Attention:
    """Move conditions from the score lines to the mask; the same object where there is none."""
    scores = list(attention.scores)
    lifted: list[Expr] = []
    while scores and (found := _split(scores[-1])) is not None:
        condition, scores[-1] = found
        lifted.append(condition)
        if _is_score(scores[-1]):
            scores.pop()
    if not lifted:
        return attention
    parts = (*(() if attention.mask is None else (attention.mask,)), *lifted)
    mask = parts[0] if len(parts) == 1 else Logical(LogicalOp.AND, parts)
    return replace(attention, scores=tuple(scores), mask=mask)


def _split(line: Expr) -> tuple[Expr, Expr] | None:
    """When a pair is seen, and its score then; None when that is not decided here."""
    while isinstance(line, Let):
        line = line.value
    match line:
        case Select(condition, then, otherwise) if _is_masked(otherwise):
            found = condition, then
        case Select(condition, then, otherwise) if _is_masked(then):
            found = Not(condition), otherwise
        case _:
            return None
    return None if any(map(_is_score, postorder(condition))) else found


def _is_masked(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == -math.inf


def _is_score(e: Expr) -> bool:
    return isinstance(e, Symbol) and e.role is Role.SCORE
