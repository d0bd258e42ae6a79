"""Fix what the first call decides: dtype, head dims, and the head counts where declared.

attention a { mask causal }, called with bf16 and D = 64
    →   dtype bf16, head_dim 64, and Dqk, Dv are the number 64 everywhere
"""

from __future__ import annotations

from dataclasses import replace

from attngen.ir.attention import Attention
from attngen.ir.expr import Const, Expr
from attngen.ir.traverse import substitute
from attngen.ir.types import Element

__all__ = ["specialize"]


def specialize(
    attention: Attention, dtype: Element, head_dim_qk: int, head_dim_v: int
) -> Attention:
    """The variant with nothing left open; compile-time sizes become constants."""
    known: dict[str, Expr] = {"Dqk": Const(head_dim_qk), "Dv": Const(head_dim_v)}
    if attention.heads_q is not None and attention.heads_kv is not None:
        known |= {"Hq": Const(attention.heads_q), "Hkv": Const(attention.heads_kv)}

    def fix(e: Expr | None) -> Expr | None:
        return None if e is None else substitute(e, known)

    return replace(
        attention,
        dtype=dtype,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        scale=substitute(attention.scale, known),
        scores=tuple(substitute(e, known) for e in attention.scores),
        mask=fix(attention.mask),
        sink=fix(attention.sink),
        length_q=fix(attention.length_q),
        length_kv=fix(attention.length_kv),
    )
