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
from attngen.ir.traverse import children, postorder
from attngen.record import record

__all__ = [
    "FlexFunctions", "NotExpressibleError", "as_flex_functions", "constant_scale", "plain_mask",
]  # fmt: skip

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


_SYMBOLS: Final = ("s", "b", "h", "hkv", "q", "qpos", "kv")
_VARYING: Final = frozenset({"b", "h", "hkv"})


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
    scale = writer.steps(attention.scale)
    scores = [writer.steps(score) for score in attention.scores]
    mask = None if attention.mask is None else writer.steps(attention.mask)
    fixed_scale = scale.constant

    def score_mod(s: Value, b: Value, h: Value, q_idx: Value, kv_idx: Value) -> Value:
        indices = writer.indices(b, h, q_idx, kv_idx)
        if fixed_scale is None:
            s = s * scale(s, *indices)
        for score in scores:
            s = score(s, *indices)
        return s

    def mask_mod(b: Value, h: Value, q_idx: Value, kv_idx: Value) -> Value:
        assert mask is not None
        attends = mask(None, *writer.indices(b, h, q_idx, kv_idx))
        return (q_idx >= 0) & attends  # a tensor, also where sizes alone decide

    return FlexFunctions(
        score_mod if scores or fixed_scale is None else None,
        None if mask is None else mask_mod,
        1.0 if fixed_scale is None else float(fixed_scale),
        attention.mask is not None and not _VARYING.isdisjoint(_indices(attention.mask)),
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


def constant_scale(
    attention: Attention, sizes: Mapping[str, int], params: Mapping[str, bool | int | float]
) -> float | None:
    """The scale in one problem; None where it differs from pair to pair."""
    if any(
        isinstance(node, Load) or (isinstance(node, Symbol) and node.name in _SYMBOLS)
        for node in postorder(attention.scale)
    ):
        return None
    scale = _Writer(attention, sizes, params, {}).steps(attention.scale).constant
    return None if scale is None else float(scale)


def _indices(e: Expr) -> set[str]:
    """The indices that an expression reads."""
    return {
        node.name for node in postorder(e) if isinstance(node, Symbol) and node.role is Role.INDEX
    }


@final
@record(eq=False)
class _Steps:
    """An expression as one operation after the other, which PyTorch's compiler unrolls.

    The list of values begins with `s` and the indices, then `constants`; each step puts one behind
    it, of the values at its places.  `constant` is the expression's value where it needs no step.
    """

    constants: tuple[Value, ...]
    steps: tuple[tuple[Callable[..., Value], tuple[int, ...]], ...]
    last: int
    constant: Value | None

    def __call__(self, *symbols: Value) -> Value:
        values = [*symbols, *self.constants]
        for operation, places in self.steps:
            values.append(operation(*[values[place] for place in places]))
        return values[self.last]


@final
class _Writer:
    """Writes the expressions of one problem; what sizes and params decide is computed here."""

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

    def indices(self, b: Value, h: Value, q: Value, kv: Value) -> tuple[Value, ...]:
        """The indices of the language in the order of `_SYMBOLS`, from those of FlexAttention."""
        qpos = q + self._first_position if self._first_position else q
        return b, h, h // self._group, q, qpos, kv

    def steps(self, e: Expr) -> _Steps:
        known: dict[int, Value] = {}  # values of nodes that are constant
        order: dict[int, int] = {}  # numbers of the steps of all others
        steps: list[tuple[Callable[..., Value], tuple[Expr, ...]]] = []
        symbols: dict[int, int] = {}
        for node in postorder(e):
            operands = children(node)
            if isinstance(node, Symbol) and node.name in _SYMBOLS:
                symbols[id(node)] = _SYMBOLS.index(node.name)
            elif all(id(child) in known for child in operands):
                known[id(node)] = self._operation(node)(*(known[id(c)] for c in operands))
            else:
                order[id(node)] = len(steps)
                steps.append((self._operation(node), operands))
        constants = list(known)
        first_step = len(_SYMBOLS) + len(constants)

        def place(node: Expr) -> int:
            if id(node) in symbols:
                return symbols[id(node)]
            if id(node) in known:
                return len(_SYMBOLS) + constants.index(id(node))
            return first_step + order[id(node)]

        placed = tuple((f, tuple(place(child) for child in operands)) for f, operands in steps)
        return _Steps(tuple(known.values()), placed, place(e), known.get(id(e)))

    def _operation(self, node: Expr) -> Callable[..., Value]:
        """What makes the value of a node of those of its operands."""
        match node:
            case Const(value):
                return lambda: value
            case Symbol(name):
                return lambda: self._known[name]
            case Load():
                return self._load(node)
            case Let():
                return lambda value: value
            case Negate():
                return operator.neg
            case Not():
                return _negate
            case Binary(op):
                return _BINARY[op]
            case Compare(op):
                return _COMPARE[op]
            case Logical(LogicalOp.AND):
                return lambda *conditions: reduce(operator.and_, conditions)
            case Logical():
                return lambda *conditions: reduce(operator.or_, conditions)
            case Select():
                return _select
            case ToFloat():
                return _to_float
            case Call(function):
                return lambda *arguments: _call(function, arguments)
            case _:
                assert_never(node)

    def _load(self, node: Load) -> Callable[..., Value]:
        """Reads an element; dimensions that are 1 or absent in the argument are read at 0."""
        tensor = self._tensors[node.tensor]
        lead = len(node.indices) - tensor.dim()
        sizes, is_float = tuple(tensor.shape), tensor.is_floating_point()
        is_inside = [
            self._is_inside(index, size)
            for index, size in zip(node.indices[lead:], sizes, strict=True)
        ]

        def load(*indices: Value) -> Value:
            places = []
            for index, size, inside in zip(indices[lead:], sizes, is_inside, strict=True):
                if size == 1:
                    places.append(0)
                elif inside or isinstance(index, int):
                    places.append(index)
                else:
                    places.append(index.clamp(0, size - 1))
            element = tensor[tuple(places)]
            return _to_float(element) if is_float else element

        return load

    def _is_inside(self, index: Expr, size: int) -> bool:
        found: Interval = self._ranges[id(index)]
        return found.low >= 0 and found.high < size


def _is_number(value: Value) -> bool:
    return isinstance(value, bool | int | float)


def _negate(condition: Value) -> Value:
    return not condition if _is_number(condition) else ~condition


def _select(condition: Value, then: Value, otherwise: Value) -> Value:
    if _is_number(condition):
        return then if condition else otherwise
    import torch

    return torch.where(condition, then, otherwise)


def _to_float(value: Value) -> Value:
    if _is_number(value):
        return float(value)
    import torch

    return value.to(torch.float32)


def _call(function: str, arguments: tuple[Value, ...]) -> Value:
    """A builtin function of numbers, or of tensors and numbers."""
    if all(_is_number(x) for x in arguments):
        return FUNCTIONS[function].numpy(*arguments).item()
    import torch

    match function:
        case "min" | "max":
            least = torch.minimum if function == "min" else torch.maximum
            return reduce(lambda a, b: least(*_as_tensors(a, b)), arguments)
        case "clamp":
            x, low, high = arguments
            raised = torch.maximum(*_as_tensors(x, low))
            return torch.minimum(*_as_tensors(raised, high))
        case "floor":
            return torch.floor(arguments[0]).to(torch.int64)
        case "bit":
            word, i = _as_tensors(*arguments)
            is_there = (i >= 0) & (i < 64)
            return is_there & (((word >> i.clamp(0, 63)) & 1) == 1)
    return getattr(torch, function)(*arguments)


def _as_tensors(*values: Value) -> tuple[Value, ...]:
    """Numbers as tensors beside one that is a tensor already."""
    import torch

    like = next(x for x in values if not _is_number(x))
    return tuple(torch.full_like(like, x) if _is_number(x) else x for x in values)
