"""Fix what the first call decides: dtype, head dims, and the head counts where declared.

attention a { mask causal }, called with bf16 and D = 64
    →   dtype bf16, head_dim 64, and Dqk, Dv are the number 64 everywhere
"""

from __future__ import annotations

from dataclasses import replace

from attngen.ir.attention import Attention
from attngen.ir.expr import Const, Expr, Symbol
from attngen.ir.traverse import rewrite_all
from attngen.ir.types import Element

__all__ = ["specialize"]


def specialize(
    attention: Attention, dtype: Element, head_dim_qk: int, head_dim_v: int
) -> Attention:
    """The variant with nothing left open; compile-time sizes become constants."""
    known = {"Dqk": head_dim_qk, "Dv": head_dim_v}
    if attention.heads_q is not None and attention.heads_kv is not None:
        known |= {"Hq": attention.heads_q, "Hkv": attention.heads_kv}

    def fix(node: Expr) -> Expr:
        if isinstance(node, Symbol) and node.name in known:
            return Const(known[node.name], node.span)
        return node

    fixed = attention.with_expressions(rewrite_all(attention.expressions(), fix))
    decided = (fixed.dtype, fixed.head_dim_qk, fixed.head_dim_v)
    if decided == (dtype, head_dim_qk, head_dim_v):
        return fixed
    return replace(fixed, dtype=dtype, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v)
