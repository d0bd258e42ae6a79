"""Cut long `and` / `or` chains into pieces.

    a1 or a2 or … or a2000   →   let chain_1 = a1 or … or a32
                                 let chain_2 = chain_1 or a33 or … or a63 …

Each piece starts with the one before it, so it stays as lazy as it was.  The CUDA compiler
takes minutes for one expression of 2000 terms, and less than a second for the pieces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from attngen.ir.attention import Attention
from attngen.ir.expr import Expr, Let, Logical
from attngen.ir.traverse import postorder, rewrite_all

__all__ = ["split_chains"]

LONGEST: Final = 32


def split_chains(attention: Attention) -> Attention:
    """The variant without long chains; the same object when it has none."""
    roots = attention.expressions()
    nodes = list(postorder(*roots))
    if not any(isinstance(n, Logical) and len(n.operands) > LONGEST for n in nodes):
        return attention
    taken = {n.name for n in nodes if isinstance(n, Let)}
    count = 0

    def split(node: Expr) -> Expr:
        nonlocal count
        if not isinstance(node, Logical) or len(node.operands) <= LONGEST:
            return node
        piece: Expr = replace(node, operands=node.operands[:LONGEST])
        for start in range(LONGEST, len(node.operands), LONGEST - 1):
            count += 1
            while f"chain_{count}" in taken:
                count += 1
            rest = node.operands[start : start + LONGEST - 1]
            piece = replace(node, operands=(Let(f"chain_{count}", piece, node.span), *rest))
        return piece

    return attention.with_expressions(rewrite_all(roots, split))
