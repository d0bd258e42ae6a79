"""Values of the oracle: an array, its derivative with respect to `s`, and where it has none.

Integers are int64 and exact: what leaves 64 bits is a fault, never a wrapped number.
Floats are float64.  A *fault* is a thing that must not happen at a pair that needs the value:
a read outside a tensor, an integer that does not fit.  Faults travel with the value; `and`,
`or` and `where` drop them where their operand is not taken, which is what makes these lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Span
from attngen.oracle.errors import IntegerOverflow

__all__ = [
    "Array", "Fault", "Value", "absolute", "add", "constant", "divide", "floor", "floor_divide",
    "join_faults", "modulo", "multiply", "narrow_faults", "negate", "overflow", "power",
    "raise_faults", "subtract", "to_float",
]  # fmt: skip

Array: TypeAlias = Any
"""A NumPy array or scalar of bool, int64 or float64."""

_LOWEST: Final = -(2**63)
_HIGHEST: Final = 2**63 - 1


@final
@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """One place in the text that can go wrong; `describe(shape, position, place)` says how."""

    describe: Callable[[tuple[int, ...], tuple[int, ...], str], Diagnostic]


Faults: TypeAlias = Mapping[Fault, Array]
"""Where each fault happens: bool arrays."""


@final
@dataclass(frozen=True, slots=True)
class Value:
    """`data` for every pair; `slope` is d data / ds (None: 0 everywhere)."""

    data: Array
    slope: Array | None = None
    faults: Faults = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`bool`, `int` or `float`."""
        return {"b": "bool", "i": "int", "f": "float"}[np.asarray(self.data).dtype.kind]


def constant(value: bool | int | float, span: Span | None = None) -> Value:
    """A number from the text or from the caller.  Floats are float32: 0.1 is the nearest one."""
    if isinstance(value, bool | np.bool_):
        return Value(np.bool_(value))
    if isinstance(value, int | np.integer):
        if not _LOWEST <= value <= _HIGHEST:
            return Value(np.int64(0), faults=overflow(span, np.bool_(True)))
        return Value(np.int64(value))
    with np.errstate(over="ignore", under="ignore"):
        return Value(np.float64(np.float32(value)))


def to_float(a: Value) -> Value:
    """An integer as a float; a float as it is."""
    return Value(np.asarray(a.data, np.float64), a.slope, a.faults)


# ---- faults ------------------------------------------------------------------------------


def join_faults(values: Iterable[Value]) -> Faults:
    """The faults of a result that needs all of these values."""
    joined: dict[Fault, Array] = {}
    for value in values:
        for fault, where in value.faults.items():
            joined[fault] = joined[fault] | where if fault in joined else where
    return joined


def narrow_faults(faults: Faults, taken: Array) -> Faults:
    """The faults that are left when the value is used only where `taken`."""
    left = {fault: where & taken for fault, where in faults.items()}
    return {fault: where for fault, where in left.items() if np.any(where)}


def overflow(span: Span | None, where: Array) -> Faults:
    """The fault of an integer that does not fit into 64 bits."""
    if not np.any(where):
        return {}
    return {Fault(lambda _shape, _position, place: IntegerOverflow(span, place)): where}


def raise_faults(value: Value, needed: Array, indices: Mapping[str, Array]) -> None:
    """Raise for the first fault at an element that is needed; `indices` name the element."""
    for fault, where in value.faults.items():
        bad = np.asarray(where & needed)
        if not bad.any():
            continue
        bad, *_ = np.broadcast_arrays(bad, *indices.values())
        position = tuple(int(i) for i in np.unravel_index(np.argmax(bad), bad.shape))
        place = ", ".join(
            f"{name} = {np.broadcast_to(array, bad.shape)[position]}"
            for name, array in indices.items()
        )
        raise AttnError(fault.describe(bad.shape, position, place or "every pair"))


# ---- arithmetic: integers stay integers, anything else becomes a float --------------------


def add(a: Value, b: Value, span: Span | None = None) -> Value:
    faults = join_faults((a, b))
    if a.kind == b.kind == "int":
        result = a.data + b.data
        outside = ((a.data ^ result) & (b.data ^ result)) < 0
        return Value(result, None, {**faults, **overflow(span, outside)})
    return Value(a.data + b.data, _sum(a.slope, b.slope), faults)


def subtract(a: Value, b: Value, span: Span | None = None) -> Value:
    faults = join_faults((a, b))
    if a.kind == b.kind == "int":
        result = a.data - b.data
        outside = ((a.data ^ b.data) & (a.data ^ result)) < 0
        return Value(result, None, {**faults, **overflow(span, outside)})
    return Value(a.data - b.data, _sum(a.slope, _times(b.slope, -1.0)), faults)


def multiply(a: Value, b: Value, span: Span | None = None) -> Value:
    faults = join_faults((a, b))
    if a.kind == b.kind == "int":
        if _largest(a.data) * _largest(b.data) <= _HIGHEST:
            return Value(a.data * b.data, None, faults)
        return _exact(lambda x, y: x * y, a, b, span)
    slope = _sum(_times(a.slope, b.data), _times(b.slope, a.data))
    return Value(np.multiply(a.data, b.data, dtype=np.float64), slope, faults)


def divide(a: Value, b: Value) -> Value:
    """Real division, also of integers."""
    quotient = np.true_divide(a.data, b.data, dtype=np.float64)
    slope = _sum(
        None if a.slope is None else a.slope / b.data,
        None if b.slope is None else -b.slope * quotient / b.data,
    )
    return Value(quotient, slope, join_faults((a, b)))


def floor_divide(a: Value, b: Value, span: Span | None = None) -> Value:
    """Floor division; an integer divided by the integer 0 is 0."""
    faults = join_faults((a, b))
    if a.kind == b.kind == "int":
        zero = b.data == 0
        outside = (a.data == _LOWEST) & (b.data == -1)
        result = np.where(zero, 0, np.floor_divide(a.data, np.where(zero, 1, b.data)))
        return Value(result, None, {**faults, **overflow(span, outside)})
    return Value(np.floor_divide(to_float(a).data, b.data), None, faults)


def modulo(a: Value, b: Value) -> Value:
    """What floor division leaves, with the sign of the divisor; 0 for the integer divisor 0."""
    faults = join_faults((a, b))
    if a.kind == b.kind == "int":
        zero = b.data == 0
        return Value(np.where(zero, 0, np.mod(a.data, np.where(zero, 1, b.data))), None, faults)
    slope = _sum(a.slope, _times(b.slope, -np.floor_divide(to_float(a).data, b.data)))
    return Value(np.mod(to_float(a).data, b.data), slope, faults)


def power(a: Value, b: Value, span: Span | None = None) -> Value:
    """`a ** b`: an integer where `b` is one number for all pairs and not negative, else a float."""
    if a.kind == b.kind == "int" and np.ndim(b.data) == 0 and b.data >= 0:
        return _exact(_integer_power, a, b, span)
    result = np.power(to_float(a).data, to_float(b).data)
    slope = None
    if a.slope is not None:
        slope = a.slope * b.data * np.power(to_float(a).data, b.data - 1.0)
    if b.slope is not None:
        slope = _sum(slope, b.slope * result * np.log(to_float(a).data))
    return Value(result, slope, join_faults((a, b)))


def negate(a: Value, span: Span | None = None) -> Value:
    faults = {**a.faults, **overflow(span, a.data == _LOWEST)} if a.kind == "int" else a.faults
    return Value(-a.data, _times(a.slope, -1.0), faults)


def absolute(a: Value, span: Span | None = None) -> Value:
    faults = {**a.faults, **overflow(span, a.data == _LOWEST)} if a.kind == "int" else a.faults
    return Value(np.abs(a.data), _times(a.slope, np.where(a.data < 0, -1.0, 1.0)), faults)


def floor(a: Value, span: Span | None = None) -> Value:
    """The largest integer not above `a`; NaN and what leaves 64 bits has none."""
    if a.kind == "int":
        return a
    whole = np.floor(a.data)
    fits = (whole >= -(2.0**63)) & (whole < 2.0**63)
    return Value(
        np.where(fits, whole, 0.0).astype(np.int64),
        None,
        {**a.faults, **overflow(span, np.logical_not(fits))},
    )


def _sum(a: Array | None, b: Array | None) -> Array | None:
    if a is None:
        return b
    return a if b is None else a + b


def _times(slope: Array | None, factor: Array) -> Array | None:
    return None if slope is None else slope * factor


def _largest(a: Array) -> int:
    """The largest magnitude, as a number of any length."""
    return max(abs(int(np.min(a))), abs(int(np.max(a)))) if np.size(a) else 0


def _exact(f: Callable[[int, int], int], a: Value, b: Value, span: Span | None) -> Value:
    """`f` in integers of any length, then checked against 64 bits."""
    exact = np.frompyfunc(f, 2, 1)
    whole = np.asarray(exact(np.asarray(a.data).astype(object), np.asarray(b.data).astype(object)))
    outside = np.asarray((whole < _LOWEST) | (whole > _HIGHEST), np.bool_)
    result = np.where(outside, 0, whole).astype(np.int64)
    return Value(result, None, {**join_faults((a, b)), **overflow(span, outside)})


def _integer_power(base: int, exponent: int) -> int:
    # Two to the 64 is outside already; larger powers need not be computed to know that.
    if abs(base) > 1:
        exponent = min(exponent, 64)
    elif base == -1:
        exponent %= 2
    return int(base**exponent)
