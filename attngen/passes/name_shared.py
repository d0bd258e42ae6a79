"""Give a name to every subexpression that is used more than once.

    softcap(s + bias) used twice   →   let shared_1 = s + bias, and two uses of it

Text would otherwise double with every level of sharing, and so would the time to compile it.
"""

from __future__ import annotations

from collections import Counter

from attngen.ir.attention import Attention
from attngen.ir.expr import Const, Expr, Let, Symbol
from attngen.ir.traverse import children, postorder, rebuild

__all__ = ["name_shared", "name_shared_nodes"]


def name_shared(attention: Attention) -> Attention:
    """The variant with a let around each shared node; the same object when there is none."""
    return attention.with_expressions(name_shared_nodes(attention.expressions()))


def name_shared_nodes(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The same expressions with a let around each node that is used more than once."""
    nodes = list(postorder(*roots))
    uses = Counter(id(child) for node in nodes for child in children(node))
    taken = {node.name for node in nodes if isinstance(node, Let)}
    under_let = {id(node.value) for node in nodes if isinstance(node, Let)}
    new: dict[int, Expr] = {}
    count = 0
    for node in nodes:
        built = rebuild(node, tuple(new[id(child)] for child in children(node)))
        is_leaf = isinstance(node, Const | Symbol | Let)
        if uses[id(node)] > 1 and not is_leaf and id(node) not in under_let:
            count += 1
            while f"shared_{count}" in taken:
                count += 1
            built = Let(f"shared_{count}", built, node.span)
        new[id(node)] = built
    return tuple(new[id(root)] for root in roots)
