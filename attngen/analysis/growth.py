"""How an expression changes from key to key, or from row to row.

kv - q           gains 1 from each key to the next
kv // 4          gains 1 in 4 keys
(q - kv) % 6     is the same again after 6 keys: it gains 0
kv // 4 % 3      is the same again after 12 keys
kv * kv          nothing is known
"""

from __future__ import annotations

import math
from typing import Final, final

from attngen.ir.expr import Binary, BinaryOp, Const, Expr, Let, Negate, Symbol
from attngen.ir.traverse import fold_up
from attngen.record import record

__all__ = ["KEYS", "ROWS", "Growth", "find_growth_of", "growth_of"]

KEYS: Final = frozenset({"kv"})
ROWS: Final = frozenset({"q", "qpos"})
"""The indices that grow by 1 from a key, or a row, to the next."""


@final
@record
class Growth:
    """`gain` in `steps` keys or rows, wherever one begins; with 0 any value may be between."""

    steps: int
    gain: int


def growth_of(e: Expr, walked: frozenset[str] = KEYS) -> int | None:
    """What an integer gains from one key, or row, to the next; None where that is no constant."""
    growth = find_growth_of(e, walked)
    return growth.gain if growth is not None and growth.steps == 1 else None


def find_growth_of(e: Expr, walked: frozenset[str] = KEYS) -> Growth | None:
    """The growth of an expression of any type; None where nothing is known.

    Tensors do not change.  Integers are taken to stay within their bits.
    """

    def of_node(node: Expr, below: tuple[Growth | None, ...]) -> Growth | None:
        if isinstance(node, Symbol):
            return Growth(1, int(node.name in walked))
        known = tuple(growth for growth in below if growth is not None)
        return _of_operation(node, known) if len(known) == len(below) else None

    return fold_up(e, of_node)


def _of_operation(node: Expr, below: tuple[Growth, ...]) -> Growth | None:
    match node, below:
        case Let(), (growth,):
            return growth
        case Negate(), (growth,):
            return Growth(growth.steps, -growth.gain)
        case Binary(BinaryOp.ADD | BinaryOp.SUB as op), (left, right):
            steps = math.lcm(left.steps, right.steps)
            gains = (left.gain * steps // left.steps, right.gain * steps // right.steps)
            return Growth(steps, gains[0] + gains[1] * (1 if op is BinaryOp.ADD else -1))
        case (Binary(BinaryOp.MUL, Const(int(factor)), _), (_, growth)) | (
            Binary(BinaryOp.MUL, _, Const(int(factor))),
            (growth, _),
        ):
            return Growth(growth.steps, growth.gain * factor)
        case Binary(BinaryOp.FLOORDIV, _, Const(int(c))), (growth, _) if c > 0:
            times = c // math.gcd(c, growth.gain)
            return Growth(growth.steps * times, growth.gain * times // c)
        case Binary(BinaryOp.MOD, _, Const(int(c))), (growth, _) if c > 0:
            return Growth(growth.steps * (c // math.gcd(c, growth.gain)), 0)
        case _ if all(growth.gain == 0 for growth in below):
            return Growth(math.lcm(*(growth.steps for growth in below)), 0)
        case _:
            return None
