"""A spec as FlexAttention's functions: the other direction of `attngen.flex`.

So a user's own spec can be timed beside FlexAttention.  Sizes and params become numbers in the
functions, and captured tensors are read as they are.  An index is clamped where it is not proved
to lie inside: a function of FlexAttention computes both branches of a `where`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final, TypeAlias, assert_never, final

from attngen.analysis.ranges import infer_ranges, launch_ranges
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    LogicalOp,
    Negate,
    Not,
    Role,
    Select,
    Symbol,
    ToFloat,
)
from attngen.ir.functions import FUNCTIONS
from attngen.ir.interval import Interval
from attngen.ir.traverse import fold_up, postorder
from attngen.record import record

__all__ = ["FlexFunctions", "NotExpressibleError", "as_flex_functions", "plain_mask"]

Value: TypeAlias = Any
"""A number of Python, or a tensor of PyTorch that holds one element or broadcasts."""

_BINARY: Final[Mapping[BinaryOp, Callable[[Value, Value], Value]]] = {
    BinaryOp.ADD: operator.add,
    BinaryOp.SUB: operator.sub,
    BinaryOp.MUL: operator.mul,
    BinaryOp.DIV: operator.truediv,
    BinaryOp.FLOORDIV: operator.floordiv,
    BinaryOp.MOD: operator.mod,
}
_COMPARE: Final[Mapping[CompareOp, Callable[[Value, Value], Value]]] = {
    CompareOp.LT: operator.lt,
    CompareOp.LE: operator.le,
    CompareOp.EQ: operator.eq,
    CompareOp.NE: operator.ne,
    CompareOp.GE: operator.ge,
    CompareOp.GT: operator.gt,
}


class NotExpressibleError(Exception):
    """A spec that FlexAttention cannot compute; the text says why."""


@final
@record(eq=False)
class FlexFunctions:
    """What FlexAttention takes.

    scale:   of the product of q and k; the score function has it where it is no number.
    varies:  whether the mask depends on the sequence or the head.
    """

    score_mod: Callable[..., Value] | None
    mask_mod: Callable[..., Value] | None
    scale: float
    varies: bool


def as_flex_functions(
    attention: Attention,
    sizes: Mapping[str, int],
    params: Mapping[str, bool | int | float],
    tensors: Mapping[str, Value],
) -> FlexFunctions:
    """The functions for one problem; `tensors` are PyTorch's, where q, k and v will be.

    Errors:  NotExpressibleError.
    """
    if attention.row_state.name != "softmax" or attention.row_state.has_sink:
        raise NotExpressibleError("FlexAttention has neither sinks nor other weights than softmax")
    if attention.length_q is not None or attention.length_kv is not None:
        raise NotExpressibleError("FlexAttention has one length for all sequences of a batch")
    writer = _Writer(attention, sizes, params, tensors)
    scale = writer.value(attention.scale, {}) if not _indices(attention.scale) else None
    scores, mask = attention.scores, attention.mask

    def score_mod(s: Value, b: Value, h: Value, q_idx: Value, kv_idx: Value) -> Value:
        indices = writer.indices(b, h, q_idx, kv_idx)
        if scale is None:
            s = s * writer.value(attention.scale, indices)
        for score in scores:
            s = writer.value(score, {**indices, "s": s})
        return s

    def mask_mod(b: Value, h: Value, q_idx: Value, kv_idx: Value) -> Value:
        assert mask is not None
        attends = writer.value(mask, writer.indices(b, h, q_idx, kv_idx))
        return (q_idx >= 0) & attends  # a tensor, also where sizes alone decide

    return FlexFunctions(
        score_mod if scores or scale is None else None,
        None if mask is None else mask_mod,
        1.0 if scale is None else float(scale),
        mask is not None and not _indices(mask).isdisjoint({"b", "h", "hkv"}),
    )


def plain_mask(attention: Attention) -> str | None:
    """`full` or `causal` where the spec is nothing else; None for any other.

    The scale is not looked at: all libraries take one.
    """
    state = attention.row_state
    is_plain = state.name == "softmax" and not state.has_sink and not attention.scores
    if not is_plain or attention.length_q is not None or attention.length_kv is not None:
        return None
    mask = attention.mask
    while isinstance(mask, Let):
        mask = mask.value
    match mask:
        case None:
            return "full"
        case Compare(CompareOp.LE, Symbol("kv"), Symbol("qpos")):
            return "causal"
        case Compare(CompareOp.GE, Symbol("qpos"), Symbol("kv")):
            return "causal"
    return None


def _indices(e: Expr) -> set[str]:
    """The indices that an expression reads."""
    return {
        node.name for node in postorder(e) if isinstance(node, Symbol) and node.role is Role.INDEX
    }


@final
class _Writer:
    """Evaluates expressions of one problem on tensors of PyTorch."""

    def __init__(
        self,
        attention: Attention,
        sizes: Mapping[str, int],
        params: Mapping[str, bool | int | float],
        tensors: Mapping[str, Value],
    ) -> None:
        self._known = {**sizes, **params}
        self._tensors = tensors
        self._first_position = sizes["Skv"] - sizes["Sq"]
        self._group = sizes["Hq"] // max(1, sizes["Hkv"])
        ranges = launch_ranges(attention, sizes, params)
        self._ranges = infer_ranges(attention.expressions(), ranges, attention)

    def indices(self, b: Value, h: Value, q: Value, kv: Value) -> dict[str, Value]:
        """The indices of the language, from those of FlexAttention."""
        qpos = q + self._first_position if self._first_position else q
        return {"b": b, "h": h, "hkv": h // self._group, "q": q, "qpos": qpos, "kv": kv}

    def value(self, e: Expr, symbols: Mapping[str, Value]) -> Value:
        import torch

        def combine(node: Expr, operands: tuple[Value, ...]) -> Value:
            match node:
                case Const(value):
                    return value
                case Symbol(name):
                    return symbols[name] if name in symbols else self._known[name]
                case Load():
                    return self._load(node, operands)
                case Let():
                    return operands[0]
                case Negate():
                    return -operands[0]
                case Not():
                    return not operands[0] if isinstance(operands[0], bool) else ~operands[0]
                case Binary(op):
                    return _BINARY[op](*operands)
                case Compare(op):
                    return _COMPARE[op](*operands)
                case Logical(op):
                    joined = operator.and_ if op is LogicalOp.AND else operator.or_
                    return reduce(joined, operands)
                case Select():
                    condition, then, otherwise = operands
                    if isinstance(condition, bool):
                        return then if condition else otherwise
                    return torch.where(condition, then, otherwise)
                case ToFloat():
                    (found,) = operands
                    is_tensor = isinstance(found, torch.Tensor)
                    return found.to(torch.float32) if is_tensor else float(found)
                case Call(function):
                    return _call(torch, function, operands)
                case _:
                    assert_never(node)

        return fold_up(e, combine)

    def _load(self, node: Load, operands: tuple[Value, ...]) -> Value:
        """An element; dimensions that are 1 or absent in the argument are read at 0."""
        import torch

        tensor = self._tensors[node.tensor]
        lead = len(node.indices) - tensor.dim()
        places = []
        pairs = zip(node.indices[lead:], operands[lead:], tensor.shape, strict=True)
        for expression, found, size in pairs:
            place = 0 if size == 1 else found
            if isinstance(place, torch.Tensor) and not self._is_inside(expression, size):
                place = place.clamp(0, size - 1)
            places.append(place)
        element = tensor[tuple(places)]
        return element.to(torch.float32) if element.is_floating_point() else element

    def _is_inside(self, index: Expr, size: int) -> bool:
        found: Interval = self._ranges[id(index)]
        return found.low >= 0 and found.high < size


def _call(torch: Any, function: str, arguments: tuple[Value, ...]) -> Value:
    if not any(isinstance(x, torch.Tensor) for x in arguments):
        return FUNCTIONS[function].numpy(*arguments).item()
    match function:
        case "min" | "max":
            least = torch.minimum if function == "min" else torch.maximum
            return reduce(lambda a, b: least(*_as_tensors(torch, a, b)), arguments)
        case "clamp":
            x, low, high = arguments
            raised = torch.maximum(*_as_tensors(torch, x, low))
            return torch.minimum(*_as_tensors(torch, raised, high))
        case "floor":
            return torch.floor(arguments[0]).to(torch.int64)
        case "bit":
            word, i = _as_tensors(torch, *arguments)
            is_there = (i >= 0) & (i < 64)
            return is_there & (((word >> i.clamp(0, 63)) & 1) == 1)
    return getattr(torch, function)(*arguments)


def _as_tensors(torch: Any, *values: Value) -> tuple[Value, ...]:
    """Numbers as tensors beside one that is a tensor already."""
    like = next(x for x in values if isinstance(x, torch.Tensor))
    return tuple(x if isinstance(x, torch.Tensor) else torch.full_like(like, x) for x in values)
