"""Functions of PyTorch that are made of several of the language's."""

from __future__ import annotations

from attngen.flex.arithmetic import (
    add,
    call,
    compare,
    literal,
    mul,
    neg,
    power,
    sub,
    to_float,
    true_divide,
    where,
)
from attngen.flex.values import Scalar
from attngen.ir.types import ScalarType

__all__ = [
    "erf", "expm1", "gelu", "leaky_relu", "log10", "log1p", "reciprocal", "relu", "sign",
    "silu", "softplus", "square",
]  # fmt: skip

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


def log1p(x: Scalar) -> Scalar:
    return call("log", _FLOAT, add(literal(x.graph, 1.0), x))


def expm1(x: Scalar) -> Scalar:
    return sub(call("exp", _FLOAT, x), literal(x.graph, 1.0))


def log10(x: Scalar) -> Scalar:
    return mul(call("log", _FLOAT, x), literal(x.graph, 0.4342944819032518))


def square(x: Scalar) -> Scalar:
    return mul(x, x)


def reciprocal(x: Scalar) -> Scalar:
    return true_divide(literal(x.graph, 1.0), x)


def sign(x: Scalar) -> Scalar:
    graph = x.graph
    zero, one = literal(graph, 0), literal(graph, 1)
    sign = where(compare("<", x, zero), neg(one), where(compare(">", x, zero), one, zero))
    return to_float(sign) if x.kind is _FLOAT else sign


def relu(x: Scalar, inplace: bool = False) -> Scalar:
    return call("max", None, x, literal(x.graph, 0))


def silu(x: Scalar, inplace: bool = False) -> Scalar:
    return mul(x, call("sigmoid", _FLOAT, x))


def gelu(x: Scalar, *, approximate: str = "none") -> Scalar:
    half = mul(literal(x.graph, 0.5), x)
    if approximate == "tanh":
        cubic = mul(literal(x.graph, 0.044715), power(x, literal(x.graph, 3)))
        inner = mul(literal(x.graph, 0.7978845608028654), add(x, cubic))
        curve = call("tanh", _FLOAT, inner)
    else:
        curve = erf(mul(x, literal(x.graph, 0.7071067811865476)))
    return mul(half, add(literal(x.graph, 1.0), curve))


def erf(x: Scalar) -> Scalar:
    """The error function, by a definition that is printed with the text."""
    return Scalar(x.graph, x.graph.call("erf", to_float(x).node), _FLOAT)


def softplus(x: Scalar, beta: float = 1.0, threshold: float = 20.0) -> Scalar:
    scaled = x if beta == 1 else mul(x, literal(x.graph, beta))
    soft = log1p(call("exp", _FLOAT, scaled))
    if beta != 1:
        soft = true_divide(soft, literal(x.graph, beta))
    return where(compare(">", scaled, literal(x.graph, threshold)), x, soft)


def leaky_relu(x: Scalar, negative_slope: float = 0.01, inplace: bool = False) -> Scalar:
    zero, slope = literal(x.graph, 0), literal(x.graph, negative_slope)
    return where(compare(">", x, zero), x, mul(x, slope))
