"""The arguments of one call, checked against the declaration: sizes, params, tensor views.

Everything is checked before anything is compiled or launched, and every message names the
argument, what it has and what was expected.
"""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, TypeGuard, final

from attngen.analysis.ranges import (
    INT32,
    Ranges,
    compile_time_ranges,
    exceeding_int64,
    infer_ranges,
    launch_ranges,
    range_of_work,
)
from attngen.backend.device import ITEM_BYTES, ArrayView
from attngen.binding_errors import (
    DtypeMismatch,
    GroupMismatch,
    HeadDimUnsupported,
    IntegerTooLarge,
    MissingArgument,
    ParamOutOfRange,
    ParamType,
    RangeOutside,
    ReservedArgument,
    ShapeMismatch,
    SizeTooLarge,
    UnknownArgument,
)
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.ir.attention import Attention, Bound, Param, Tensor, TensorDim
from attngen.ir.expr import Call
from attngen.ir.interval import Interval
from attngen.ir.traverse import postorder
from attngen.ir.types import FLOATING, Element, ScalarType

__all__ = [
    "Binding", "IntegerCheck", "Layout", "ParamCheck", "bind", "is_int", "require_free_names",
    "split_arguments",
]  # fmt: skip

Layout: TypeAlias = Literal["bhsd", "bshd"]

LARGEST_HEAD_DIM: Final = 256
LARGEST_SIZE: Final = 2**31 - 1025
"""Lengths stay so far below 2^31 that the last tile's end still fits 32 bits."""
_NO_DROPOUT: Final = "attngen computes no dropout; leave it out, or pass 0"
_REFUSED: Final = {"dropout": _NO_DROPOUT, "dropout_p": _NO_DROPOUT}
"""What other libraries take; 0 asks for nothing, so it is taken."""
_OF_THE_CALL: Final = frozenset(
    {"q", "k", "v", "return_lse", "out", "layout", "check", "q_range", "kv_range", "Sq", "Skv"}
)
"""Arguments of every call, whose names no tensor or param can have."""


@final
@dataclass(frozen=True, slots=True)  # every call makes one, and a record's constructor is slower
class Binding:
    """One call's arguments.

    `q`, `k`, `v` are [B, H, tokens, D]; they hold the rows `rows` and the keys `keys` of the
    logical problem.  Every tensor view has all its declared dimensions, with stride 0 along
    an optional one that was 1 or absent.
    """

    q: ArrayView
    k: ArrayView
    v: ArrayView
    dtype: Element
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float]
    tensors: Mapping[str, ArrayView]
    rows: tuple[int, int]
    keys: tuple[int, int]


def require_free_names(attention: Attention) -> None:
    """No tensor or param has the name of an argument that every call has.

    Errors:  A632 for each that does.
    """
    reason = "every call has an argument of this name; choose another, such as `my_{}`"
    declared: list[Tensor | Param] = [*attention.tensors, *attention.params]
    taken = [
        ReservedArgument(each.span, each.name, reason.format(each.name))
        for each in declared
        if each.name in _OF_THE_CALL
    ]
    if taken:
        raise AttnError(*taken)


def split_arguments(
    attention: Attention, named: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of a call → tensors and params (defaults filled in), both complete."""
    known = {t.name for t in attention.tensors} | {p.name for p in attention.params}
    problems: list[Diagnostic] = [
        _unknown(attention, name, known)
        for name, value in named.items()
        if name not in known and not _asks_for_nothing(name, value)
    ]
    tensors, params = {}, {}
    for tensor in attention.tensors:
        if tensor.name in named:
            tensors[tensor.name] = named[tensor.name]
        else:
            problems.append(MissingArgument(tensor.span, attention.name, "tensor", tensor.name))
    for param in attention.params:
        if param.name in named:
            params[param.name] = named[param.name]
        elif param.default is not None:
            params[param.name] = param.default
        else:
            problems.append(MissingArgument(param.span, attention.name, "param", param.name))
    if problems:
        raise AttnError(*problems)
    return tensors, params


def bind(
    attention: Attention,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    tensors: Mapping[str, ArrayView],
    params: Mapping[str, Any],
    *,
    q_range: tuple[int, int] | None = None,
    kv_range: tuple[int, int] | None = None,
    logical: tuple[int | None, int | None] = (None, None),
    layout: Layout = "bhsd",
    integers: IntegerCheck | None = None,
) -> Binding:
    """Check one call.

    Shapes:  q [B, Hq, rows, Dqk], k [B, Hkv, keys, Dqk], v [B, Hkv, keys, Dv]; `layout` is
             how the caller has them, for the words of an error.
    Units:   `logical` is (Sq, Skv) when the arrays hold only the ranges; otherwise the arrays
             hold everything, and the ranges say which part is computed.
    integers says when no integer can leave 64 bits; left out, every call is searched.
    Errors:  A621 to A631.
    """
    dtype = _check_operands(attention, q, k, v, layout)
    q, rows, Sq = _take_range("q", q, q_range, logical[0], layout)
    k, keys, Skv = _take_range("k", k, kv_range, logical[1], layout)
    v, _, _ = _take_range("v", v, kv_range, logical[1], layout)
    sizes = {
        "B": q.shape[0], "Hq": q.shape[1], "Hkv": k.shape[1], "Sq": Sq, "Skv": Skv,
        "Dqk": q.shape[3], "Dv": v.shape[3],
    }  # fmt: skip
    _check_sizes(attention, sizes, (q, k, v), layout)
    # A dimension that may be 1 or absent does not say how long it is, so it is bound last.
    in_order = sorted(attention.tensors, key=lambda t: any(d.optional for d in t.dims))
    bound = {t.name: _bind_tensor(t, tensors[t.name], sizes) for t in in_order}
    views = {t.name: bound[t.name] for t in attention.tensors}
    values = {p.name: ParamCheck(p)(params[p.name]) for p in attention.params}
    if integers is None or integers.is_needed(values.values()):
        _check_integers(attention, sizes, values)
    return Binding(q, k, v, dtype, sizes, values, views, rows, keys)


# ---- q, k, v -----------------------------------------------------------------------------


def _check_operands(
    attention: Attention, q: ArrayView, k: ArrayView, v: ArrayView, layout: Layout
) -> Element:
    dims = {"q": ("B", "Hq", "Sq", "Dqk"), "k": ("B", "Hkv", "Skv", "Dqk")}
    dims["v"] = ("B", "Hkv", "Skv", "Dv")
    for name, view in (("q", q), ("k", k), ("v", v)):
        if len(view.shape) != 4:
            raise AttnError(ShapeMismatch(None, name, _shape(view), _listed(dims[name], layout)))
        if view.dtype not in FLOATING:
            expected = attention.dtype.name if attention.dtype else "fp16, bf16 or fp32"
            raise AttnError(DtypeMismatch(None, name, view.dtype, expected))
    dtype = attention.dtype or FLOATING[q.dtype]
    for name, view in (("q", q), ("k", k), ("v", v)):
        if view.dtype != dtype.name:
            why = "as declared" if attention.dtype else "as q has"
            raise AttnError(DtypeMismatch(None, name, view.dtype, f"{dtype.name}, {why}"))
    B, _, _, Dqk = q.shape
    if k.shape[0] != B or k.shape[3] != Dqk:
        expected = f"{_listed(dims['k'], layout)} with B = {B}, Dqk = {Dqk}"
        raise AttnError(ShapeMismatch(None, "k", _listed(k.shape, layout), expected))
    if v.shape[:3] != k.shape[:3]:
        expected = f"{_listed((*k.shape[:3], 'Dv'), layout)}, as k has"
        raise AttnError(ShapeMismatch(None, "v", _listed(v.shape, layout), expected))
    return dtype


def _check_sizes(
    attention: Attention,
    sizes: Mapping[str, int],
    operands: tuple[ArrayView, ArrayView, ArrayView],
    layout: Layout,
) -> None:
    q, k, v = operands
    for name in ("B", "Hq", "Hkv", "Sq", "Skv"):
        if sizes[name] > LARGEST_SIZE:
            raise AttnError(SizeTooLarge(None, name, sizes[name], LARGEST_SIZE))
    for name, argument in (("Dqk", "q"), ("Dv", "v")):
        if not 1 <= sizes[name] <= LARGEST_HEAD_DIM:
            raise AttnError(HeadDimUnsupported(None, argument, sizes[name], LARGEST_HEAD_DIM))
    if sizes["Hkv"] == 0 or sizes["Hq"] % sizes["Hkv"]:
        raise AttnError(GroupMismatch(None, sizes["Hq"], sizes["Hkv"]))
    declared = (
        ("Hq", "q", q, attention.heads_q), ("Hkv", "k", k, attention.heads_kv),
        ("Dqk", "q", q, attention.head_dim_qk), ("Dv", "v", v, attention.head_dim_v),
    )  # fmt: skip
    for name, argument, view, value in declared:
        if value is not None and sizes[name] != value:
            has = f"{_listed(view.shape, layout)}, with {name} = {sizes[name]}"
            raise AttnError(ShapeMismatch(None, argument, has, f"{name} = {value}, as declared"))


def _take_range(
    name: str,
    view: ArrayView,
    range_: tuple[int, int] | None,
    logical: int | None,
    layout: Layout,
) -> tuple[ArrayView, tuple[int, int], int]:
    """The part of an operand that is computed, its range, and the logical length."""
    range_name, size_name = ("q_range", "Sq") if name == "q" else ("kv_range", "Skv")
    tokens, has = view.shape[2], _listed(view.shape, layout)
    if logical is not None and (not is_int(logical) or logical < 0):
        reason = f"it is the number of tokens of the whole problem, not {logical!r}"
        raise AttnError(ReservedArgument(None, size_name, reason))
    size = tokens if logical is None else int(logical)
    if range_ is None:
        if size != tokens:
            expected = f"{size_name} = {size} tokens, or a {range_name} that says which it holds"
            raise AttnError(ShapeMismatch(None, name, has, expected))
        return view, (0, tokens), tokens
    if not (isinstance(range_, Sequence) and len(range_) == 2 and all(map(is_int, range_))):
        reason = f"it is a pair (begin, end) of integers, not {range_!r}"
        raise AttnError(ReservedArgument(None, range_name, reason))
    begin, end = int(range_[0]), int(range_[1])
    if not 0 <= begin <= end <= size:
        raise AttnError(RangeOutside(None, range_name, begin, end, size))
    if logical is None:
        view = view._replace(
            pointer=view.pointer + begin * view.strides[2] * ITEM_BYTES[view.dtype],
            shape=(*view.shape[:2], end - begin, view.shape[3]),
        )
    elif tokens != end - begin:
        expected = f"{end - begin} tokens, as {range_name} says"
        raise AttnError(ShapeMismatch(None, name, has, expected))
    return view, (begin, end), size


# ---- captured tensors --------------------------------------------------------------------


def _bind_tensor(tensor: Tensor, view: ArrayView, sizes: dict[str, int]) -> ArrayView:
    """A view with all declared dimensions; names that its shape binds go into `sizes`."""
    if view.dtype != tensor.element.name:
        raise AttnError(_tensor_dtype(tensor, view.dtype))
    absent = len(tensor.dims) - len(view.shape)
    may_be_absent = 0
    while may_be_absent < len(tensor.dims) and tensor.dims[may_be_absent].optional:
        may_be_absent += 1
    if not 0 <= absent <= may_be_absent:
        raise _tensor_shape(tensor, view, sizes)
    shape, strides = [], []
    for i, dim in enumerate(tensor.dims):
        has = 1 if i < absent else view.shape[i - absent]
        stride = 0 if i < absent else view.strides[i - absent]
        size = _bind_size(dim, has, sizes)
        if has != size:
            if not (dim.optional and has == 1):
                raise _tensor_shape(tensor, view, sizes)
            stride = 0
        shape.append(size)
        strides.append(stride)
    return view._replace(shape=tuple(shape), strides=tuple(strides))


def _bind_size(dim: TensorDim, has: int, sizes: dict[str, int]) -> int:
    if isinstance(dim.size, int):
        return dim.size
    if dim.size not in sizes:
        if has > LARGEST_SIZE:
            raise AttnError(SizeTooLarge(None, dim.size, has, LARGEST_SIZE))
        sizes[dim.size] = has
    return sizes[dim.size]


def _tensor_dtype(tensor: Tensor, has: str) -> Diagnostic:
    """Nothing is converted behind the caller's back, so the error says who could."""
    name, expected = tensor.name, tensor.element.name
    advice = f"pass `{name}` as {expected}, or declare `{name} : {has}[…]`"
    return DtypeMismatch(tensor.span, name, has, expected, advice)


def _tensor_shape(tensor: Tensor, view: ArrayView, sizes: Mapping[str, int]) -> AttnError:
    names = [f"{d.size}{'?' if d.optional else ''}" for d in tensor.dims]
    values = [
        f"{d.size} = {sizes[d.size]}"
        for d in tensor.dims
        if isinstance(d.size, str) and d.size in sizes
    ]
    expected = f"[{', '.join(names)}]" + (
        f" with {', '.join(dict.fromkeys(values))}" if values else ""
    )
    return AttnError(ShapeMismatch(tensor.span, tensor.name, _shape(view), expected))


# ---- params ------------------------------------------------------------------------------


@final
class ParamCheck:
    """The check of one param's values: a bool, an integer of 64 bits, or a float32.

    What does not depend on the value is found once, for calls that come often.
    """

    def __init__(self, param: Param) -> None:
        self.name, self.default = param.name, param.default
        self._param = param
        self._convert = {
            ScalarType.BOOL: self._to_bool,
            ScalarType.INT: self._to_int,
            ScalarType.FLOAT: self._to_float,
        }[param.type]
        is_float = param.type is ScalarType.FLOAT
        bound = _as_float32_bound(param.bound) if is_float else param.bound
        self._bound = None if bound == Bound() else bound

    def __call__(self, value: Any) -> bool | int | float:
        """The value as a kernel gets it.

        Errors:  A625 its type; A626 its bounds; A630 an integer beyond 64 bits.
        """
        checked = self._convert(value)
        if self._bound is not None and not self._bound.contains(checked):
            raise AttnError(ParamOutOfRange(self._param.span, self.name, repr(checked)))
        return checked

    def _to_bool(self, value: Any) -> bool:
        found = _item(value)
        if not isinstance(found, bool):
            raise self._refuse(value, "a bool")
        return found

    def _to_int(self, value: Any) -> int:
        if type(value) is not int:
            found = _item(value)
            if isinstance(found, bool) or not isinstance(found, numbers.Integral):
                raise self._refuse(value, "an integer")
            value = int(found)
        if not -(2**63) <= value < 2**63:
            raise AttnError(IntegerTooLarge(self._param.span, str(value)))
        return int(value)

    def _to_float(self, value: Any) -> float:
        if type(value) is not float:
            found = _item(value)
            if isinstance(found, bool) or not isinstance(found, numbers.Real):
                raise self._refuse(value, "a number")
            value = found
        return _as_float32(value)

    def _refuse(self, value: Any, expected: str) -> AttnError:
        kind = f"a value of type {type(value).__name__}"
        return AttnError(ParamType(self._param.span, self.name, kind, expected))


def _item(value: Any) -> Any:
    """The number in an array without dimensions."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    return value


def _as_float32(value: Any) -> float:
    """The nearest float32; infinite beyond its range."""
    try:
        return ctypes.c_float(float(value)).value
    except OverflowError:  # an integer beyond float64
        return math.inf if value > 0 else -math.inf


def _as_float32_bound(bound: Bound) -> Bound:
    """The ends as a kernel would compare them: `cap <= 0.1` takes 0.1."""
    low = None if bound.low is None else _as_float32(bound.low)
    high = None if bound.high is None else _as_float32(bound.high)
    return replace(bound, low=low, high=high)


@final
class IntegerCheck:
    """Whether integers of a call may leave 64 bits, known from its params alone.

    The search through all expressions takes 200 microseconds and more, so what holds for every
    legal size is found once: mostly that nothing can happen while params have 32 bits.
    """

    def __init__(self, attention: Attention) -> None:
        declared = compile_time_ranges(attention)
        self._is_ever_needed = _may_exceed_int64(attention, declared)
        narrow = dict(declared)
        for param in attention.params:
            if param.type is ScalarType.INT:
                narrow[param.name] = _within_32_bits(declared[param.name])
        # The floor of a param is looked at only where its value is known.
        has_floor = any(
            isinstance(node, Call) and node.function == "floor"
            for node in postorder(*attention.expressions())
        )
        self._is_always_needed = self._is_ever_needed and (
            has_floor or _may_exceed_int64(attention, narrow)
        )

    def is_needed(self, params: Iterable[bool | int | float]) -> bool:
        """Whether a call with these params needs the search."""
        if not self._is_ever_needed or self._is_always_needed:
            return self._is_ever_needed
        return any(type(p) is int and not INT32.low <= p <= INT32.high for p in params)


def _may_exceed_int64(attention: Attention, ranges: Ranges) -> bool:
    return next(exceeding_int64(attention, ranges), None) is not None


def _within_32_bits(declared: Interval) -> Interval:
    """The values of 32 bits among those declared; all that are declared where none is."""
    low, high = max(declared.low, INT32.low), min(declared.high, INT32.high)
    return Interval(low, high) if low <= high else declared


def _check_integers(
    attention: Attention, sizes: Mapping[str, int], params: Mapping[str, bool | int | float]
) -> None:
    """No integer of this call leaves 64 bits."""
    ranges = launch_ranges(attention, sizes, params)
    for node in exceeding_int64(attention, ranges):
        found = range_of_work(node, infer_ranges((node,), ranges, attention))
        worst = max(found.low, found.high, key=abs)
        raise AttnError(IntegerTooLarge(node.span, str(worst)))


def _unknown(attention: Attention, name: str, known: set[str]) -> Diagnostic:
    if name in _REFUSED:
        return ReservedArgument(None, name, _REFUSED[name])
    from difflib import get_close_matches

    closest = get_close_matches(name, sorted(known), n=1)
    takes = ", ".join(sorted(known)) or "none"
    return UnknownArgument(None, attention.name, name, takes, closest[0] if closest else None)


def _asks_for_nothing(name: str, value: Any) -> bool:
    return name in _REFUSED and isinstance(value, numbers.Real) and value == 0


def is_int(value: object) -> TypeGuard[int]:
    """Whether a caller's value is an integer: Python's, NumPy's, but no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _shape(view: ArrayView) -> str:
    return _listed(view.shape)


def _listed(dims: Sequence[int | str], layout: Layout = "bhsd") -> str:
    """Dimensions in the order the caller has them; they come as (B, H, S, D)."""
    if layout == "bshd":
        b, h, s, d = dims
        dims = (b, s, h, d)
    return f"({', '.join(map(str, dims))})"
