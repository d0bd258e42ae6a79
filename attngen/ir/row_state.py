"""The state that must survive after each tile of keys, and every formula that touches it.

Per query row a softmax needs a running maximum `m`, a sum `l` of exponentials relative to
that maximum, and `acc`, the weighted sum of values.  `RowState` holds those formulas once,
as expressions over row values; the NumPy executor evaluates them, the kernels print them,
and split-KV, shared prefixes and rings of GPUs merge partial states with them.

    init       m = -inf, l = 0, acc = 0                   the identity of merge
    update     m' = max(m, max s);  f = rescale(m, m')
               l' = l f + Σ weight(s, m');  acc' = acc f + Σ weight(s, m') v
    merge      m' = max(m₁, m₂);  l' = l₁ f₁ + l₂ f₂;  acc' = acc₁ f₁ + acc₂ f₂
    finalize   o(m, l, acc), lse(m, l)

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, for the
running pair (m, l); Dao et al., "FlashAttention", 2022, for acc.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, final

from attngen.ir.expr import Binary, BinaryOp, Compare, CompareOp, Const, Expr, Role, Select, Symbol
from attngen.ir.functions import call
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = ["ROW_VALUES", "SIGMOID", "SOFTMAX", "SOFTMAX_WITH_SINK", "RowState"]


def _row(name: str) -> Symbol:
    return Symbol(name, Role.ROW, ScalarType.FLOAT)


_S = Symbol("s", Role.SCORE, ScalarType.FLOAT)
_M, _M_OLD, _L, _ACC, _SINK = _row("m"), _row("m_old"), _row("l"), _row("acc"), _row("sink")

ROW_VALUES: Final = ("s", "m", "m_old", "l", "acc", "sink")
"""The names that formulas of a row state may mention."""


@final
@record
class RowState:
    """One way of turning scores into weights.

    Fields kept per query row, all float32: `m` and `l` when `running_max`, `acc` always.
    """

    name: str
    running_max: bool
    """Weights are relative to a running maximum, so `m` and `l` are kept."""
    init: Mapping[str, float]
    """The fields and their values before any key: the identity of `merge`."""
    raise_max: Expr
    """The maximum `m` of two, from `m_old` and `m`; NaN when one is NaN."""
    has_sink: bool
    weight: Expr
    """Weight of one pair, from `s` and `m`: exactly 0 for `s = -inf`, NaN for `s = inf`."""
    rescale: Expr
    """What `l` and `acc` are multiplied by when the maximum goes from `m_old` to `m`."""
    output: Expr
    """The output element, from `acc`, `l`, `m` (and `sink`)."""
    output_of_normalized: Expr
    """The same when `acc` has been divided by `l` already."""
    lse: Expr | None
    """The log-sum-exp, from `m`, `l` (and `sink`)."""
    saved_for_backward: tuple[str, ...]


def _softmax() -> RowState:
    empty = Compare(CompareOp.EQ, _L, Const(0.0))
    return RowState(
        name="softmax",
        running_max=True,
        init={"m": -math.inf, "l": 0.0, "acc": 0.0},
        raise_max=call("max", _M_OLD, _M),
        has_sink=False,
        weight=call("exp_difference", _S, _M),
        rescale=call("exp_difference", _M_OLD, _M),
        output=Select(empty, Const(0.0), Binary(BinaryOp.DIV, _ACC, _L)),
        output_of_normalized=_ACC,
        lse=Binary(BinaryOp.ADD, _M, call("log", _L)),
        saved_for_backward=("lse",),
    )


def _softmax_with_sink() -> RowState:
    """A sink is one more score that has a weight but no value; it joins at the end, once."""
    top = call("max", _M, _SINK)
    share = call("exp_difference", _M, top)
    total = Binary(
        BinaryOp.ADD, Binary(BinaryOp.MUL, _L, share), call("exp_difference", _SINK, top)
    )
    empty = Compare(CompareOp.EQ, _L, Const(0.0))
    scaled = Binary(BinaryOp.DIV, Binary(BinaryOp.MUL, _ACC, share), total)
    rescaled = Binary(
        BinaryOp.MUL, _ACC, Binary(BinaryOp.DIV, Binary(BinaryOp.MUL, _L, share), total)
    )
    return RowState(
        name="softmax_with_sink",
        running_max=True,
        init={"m": -math.inf, "l": 0.0, "acc": 0.0},
        raise_max=call("max", _M_OLD, _M),
        has_sink=True,
        weight=call("exp_difference", _S, _M),
        rescale=call("exp_difference", _M_OLD, _M),
        output=Select(empty, Const(0.0), scaled),
        output_of_normalized=Select(empty, Const(0.0), rescaled),
        lse=Binary(BinaryOp.ADD, top, call("log", total)),
        saved_for_backward=("lse",),
    )


def _sigmoid() -> RowState:
    return RowState(
        name="sigmoid",
        running_max=False,
        init={"acc": 0.0},
        raise_max=_M,
        has_sink=False,
        weight=Select(
            Compare(CompareOp.EQ, _S, Const(math.inf)), Const(math.nan), call("sigmoid", _S)
        ),
        rescale=Const(1.0),
        output=_ACC,
        output_of_normalized=_ACC,
        lse=None,
        saved_for_backward=(),
    )


SOFTMAX: Final = _softmax()
SOFTMAX_WITH_SINK: Final = _softmax_with_sink()
SIGMOID: Final = _sigmoid()
