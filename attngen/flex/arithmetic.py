"""Operators and comparisons of traced scalars, with PyTorch's promotion of types.

Truth values become integers, integers become floats where the other operand is one, and `/` gives
a float.
"""

from __future__ import annotations

from typing import Any, Final

from attngen.flex.graph import Graph, refuse
from attngen.flex.values import Scalar, to_scalar, to_value
from attngen.ir.types import ScalarType

__all__ = [
    "add", "binary", "call", "cast", "ceil", "clamp", "compare", "div", "floor", "floor_divide",
    "literal", "logical", "mul", "neg", "negation", "number", "power", "remainder", "sub",
    "to_float", "to_int", "true_divide", "trunc", "truth", "where",
]  # fmt: skip

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


def number(x: Scalar) -> Scalar:
    """A truth value as 0 or 1."""
    if x.kind is not _BOOL:
        return x
    graph = x.graph
    node = graph.call("where", x.node, graph.literal(1), graph.literal(0))
    return Scalar(graph, node, _INT, bits=1)


def truth(x: Scalar) -> Scalar:
    """A number as whether it is not 0."""
    return x if x.kind is _BOOL else compare("!=", x, literal(x.graph, 0))


def literal(graph: Graph, value: bool | int | float) -> Scalar:
    scalar = to_value(graph, value)
    assert isinstance(scalar, Scalar)
    return scalar


def _promoted(a: Scalar, b: Scalar) -> ScalarType:
    return _FLOAT if _FLOAT in (a.kind, b.kind) else _INT


def binary(op: str, a: Scalar, b: Scalar) -> Scalar:
    a, b = number(a), number(b)
    return Scalar(a.graph, a.graph.binary(op, a.node, b.node), _promoted(a, b))


def compare(op: str, a: Scalar, b: Scalar) -> Scalar:
    if not (a.kind is b.kind is _BOOL and op in ("==", "!=")):
        a, b = number(a), number(b)
    return Scalar(a.graph, a.graph.compare(op, a.node, b.node), _BOOL)


def logical(op: str, a: Scalar, b: Scalar) -> Scalar:
    """`and`, `or`; a constant that decides nothing is left out, as in PyTorch's `and_masks`."""
    decides = op == "or"
    for known, other in ((a, b), (b, a)):
        if known.constant is not None:
            return known if known.constant is decides else other
    return Scalar(a.graph, a.graph.logical(op, a.node, b.node), _BOOL)


def negation(a: Scalar) -> Scalar:
    return Scalar(a.graph, a.graph.unary("not", a.node), _BOOL)


def call(name: str, kind: ScalarType | None, *values: Scalar) -> Scalar:
    """A builtin function of numbers; without a kind the result has that of the arguments."""
    numbers = [number(x) for x in values]
    graph = numbers[0].graph
    found = kind or (_FLOAT if any(x.kind is _FLOAT for x in numbers) else _INT)
    return Scalar(graph, graph.call(name, *(x.node for x in numbers)), found)


def add(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    if a.kind is b.kind is _BOOL:
        return logical("or", a, b)
    if alpha != 1:
        b = binary("*", b, literal(b.graph, alpha))
    return binary("+", a, b)


def sub(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    if a.kind is b.kind is _BOOL:
        raise refuse("`-` of two truth values", "PyTorch has none either", "use `^` or `~`")
    if alpha != 1:
        b = binary("*", b, literal(b.graph, alpha))
    return binary("-", a, b)


def mul(a: Scalar, b: Scalar) -> Scalar:
    return logical("and", a, b) if a.kind is b.kind is _BOOL else binary("*", a, b)


def true_divide(a: Scalar, b: Scalar) -> Scalar:
    divided = binary("/", a, b)
    return Scalar(divided.graph, divided.node, _FLOAT)


def floor_divide(a: Scalar, b: Scalar) -> Scalar:
    a, b = number(a), number(b)
    if _promoted(a, b) is _FLOAT:
        return floor(true_divide(a, b))
    divided = binary("//", a, b)
    by = b.constant
    if a.bits is not None and by and by > 0 and int(by).bit_count() == 1:
        divided.bits = a.bits >> (int(by).bit_length() - 1)
    return divided


def div(a: Scalar, b: Scalar, *, rounding_mode: str | None = None) -> Scalar:
    if rounding_mode is None:
        return true_divide(a, b)
    if rounding_mode == "floor":
        return floor_divide(a, b)
    quotient = trunc(true_divide(a, b))
    return to_int(quotient) if _FLOAT not in (a.kind, b.kind) else quotient


def remainder(a: Scalar, b: Scalar) -> Scalar:
    a, b = number(a), number(b)
    if _promoted(a, b) is _FLOAT:
        return sub(a, mul(b, floor_divide(a, b)))
    rest = binary("%", a, b)
    if isinstance(b.constant, int) and b.constant > 0:
        rest.bits = (1 << (b.constant - 1).bit_length()) - 1
    return rest


def power(base: Scalar, exponent: Scalar) -> Scalar:
    base, exponent = number(base), number(exponent)
    n, c, graph = exponent.constant, base.constant, base.graph
    if isinstance(n, int | float) and n == int(n) and abs(n) <= 64:
        power = Scalar(graph, graph.binary("**", base.node, graph.literal(abs(int(n)))), base.kind)
        if n >= 0:
            return power if exponent.kind is _INT else to_float(power)
        if base.kind is _INT:
            raise refuse("a negative power of an integer", "PyTorch refuses it as well")
        return true_divide(literal(graph, 1.0), power)
    if n in (0.5, -0.5):
        return call("sqrt" if n == 0.5 else "rsqrt", _FLOAT, base)
    if c is not None and c > 0:
        if base.kind is exponent.kind is _INT:
            raise refuse("an integer to a traced power", "the language has no such product")
        if c != 2:
            exponent = mul(exponent, call("log2", _FLOAT, to_float(base)))
        return call("exp2", _FLOAT, exponent)
    raise refuse("this power", "the exponent is no whole number from -64 to 64, nor 0.5")


def neg(a: Scalar) -> Scalar:
    a = number(a)
    return Scalar(a.graph, a.graph.unary("-", a.node), a.kind)


def where(condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
    if condition.kind is not _BOOL:
        raise refuse("a condition that is a number", "`torch.where` takes a truth value")
    if a.kind is b.kind is _BOOL:
        kind = _BOOL
    else:
        a, b = number(a), number(b)
        kind = _promoted(a, b)
    graph = condition.graph
    return Scalar(graph, graph.call("where", condition.node, a.node, b.node), kind)


def clamp(x: Scalar, min: Any = None, max: Any = None) -> Scalar:
    graph = x.graph
    low = None if min is None else to_scalar(graph, min)
    high = None if max is None else to_scalar(graph, max)
    if low is not None and high is not None:
        return call("clamp", None, x, low, high)
    if low is not None:
        return call("max", None, x, low)
    if high is None:
        raise refuse("this `clamp`", "it has neither a `min` nor a `max`")
    return call("min", None, x, high)


def floor(x: Scalar) -> Scalar:
    """As a float, like PyTorch's; that of the language is an integer."""
    return x if x.kind is not _FLOAT else to_float(call("floor", _INT, x))


def ceil(x: Scalar) -> Scalar:
    return x if x.kind is not _FLOAT else to_float(neg(call("floor", _INT, neg(x))))


def trunc(x: Scalar) -> Scalar:
    return x if x.kind is not _FLOAT else to_float(to_int(x))


def to_float(x: Scalar) -> Scalar:
    if x.kind is _FLOAT:
        return x
    if x.constant is not None:
        return literal(x.graph, float(x.constant))
    return mul(literal(x.graph, 1.0), number(x))


def to_int(x: Scalar) -> Scalar:
    """Rounded towards 0, as PyTorch's casts are."""
    if x.kind is not _FLOAT:
        return number(x)
    zero = literal(x.graph, 0)
    up = neg(call("floor", _INT, neg(x)))
    return where(compare("<", x, zero), up, call("floor", _INT, x))


_CASTS: Final = {
    "bool": truth, "int32": to_int, "int64": to_int, "int": to_int, "long": to_int,
    "float32": to_float, "float": to_float,
}  # fmt: skip


def cast(x: Scalar, dtype: Any) -> Scalar:
    """The value as a type of PyTorch or NumPy.

    Errors:  A261 for one that would round, or wrap around.
    """
    name = str(dtype).removeprefix("torch.")
    convert = _CASTS.get(name)
    if convert is None:
        reason = "every float is a float32, and integers are those of mathematics"
        raise refuse(f"a cast to {name}", reason)
    return convert(x)
