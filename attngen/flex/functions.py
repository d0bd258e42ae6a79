"""Which function, method or operator of PyTorch and NumPy is which function of traced values.

Types follow PyTorch's promotion.  Integers are those of mathematics, and floats are float32
throughout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from attngen.flex.arithmetic import (
    add,
    call,
    cast,
    ceil,
    clamp,
    compare,
    div,
    floor,
    floor_divide,
    literal,
    mul,
    neg,
    negation,
    power,
    remainder,
    sub,
    to_float,
    to_int,
    true_divide,
    trunc,
    truth,
    where,
)
from attngen.flex.bits import (
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    left_shift,
    right_shift,
)
from attngen.flex.captured import is_array, scalar_of
from attngen.flex.composed import (
    erf,
    expm1,
    gelu,
    leaky_relu,
    log1p,
    log10,
    reciprocal,
    relu,
    sign,
    silu,
    softplus,
    square,
)
from attngen.flex.graph import refuse
from attngen.flex.rows import (
    both,
    dot,
    each,
    either,
    elementwise,
    extreme,
    mean,
    reduced,
    total,
)
from attngen.flex.values import Row, Scalar, Traced, Value, scalars_of, to_value
from attngen.ir.types import ScalarType

__all__ = ["CREATING", "FUNCTIONS", "apply", "call_library", "is_known", "name_of"]

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT

_NAMESPACES: Final = ("aten", "prims", "approx")
"""Operators whose names say what they compute; `approx::tanh` is that of the attention gym."""


def apply(name: str, *arguments: Any, **options: Any) -> Any:
    """The value of a function of traced values, numbers and arrays.

    Errors:  A261 for other arguments than it takes.
    """
    try:
        return FUNCTIONS[name](*arguments, **options)
    except TypeError as error:
        reason = re.sub(r"^[\w.<>]+\(\) ", "", str(error))  # the name of a function here
        raise refuse(f"this call of `{name}`", reason) from None


def call_library(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The same for one of PyTorch's functions, or NumPy's.

    Errors:  A261 for one that has no words in the language.
    """
    name = name_of(function)
    if name == "getitem":
        return _getitem(*arguments)
    if name not in FUNCTIONS:
        shown = getattr(function, "_qualified_op_name", None) or name
        raise refuse(f"`{shown}`", "the language has no such function")
    if "out" in options:
        raise refuse("`out=`", "a traced function writes nothing")
    return apply(name, *arguments, **options)


def name_of(function: Any) -> str:
    """`add` for `Tensor.add`, `Tensor.__add__`, `torch.add`, `torch.ops.aten.add.Tensor`."""
    qualified = getattr(function, "_qualified_op_name", None)
    if qualified is None and hasattr(function, "overloadpacket"):
        qualified = function.overloadpacket._qualified_op_name
    if qualified is not None:
        namespace, _, name = str(qualified).partition("::")
        return name if namespace in _NAMESPACES else str(qualified)
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        return f".{getattr(function.__self__, '__name__', '')}"
    if name.startswith("__"):
        name = name.strip("_")
    return _ALIASES.get(name, name)


def is_known(value: Any) -> bool:
    """Whether a value is one of PyTorch's or NumPy's functions that are traced.

    What such a function gives follows from its arguments, and a tensor's contents.
    """
    kind = type(value)
    if kind is FunctionType:
        home = value.__globals__.get("__name__")
    elif kind is BuiltinFunctionType:
        is_method = not isinstance(value.__self__, ModuleType | None)
        home = "" if is_method else value.__module__
    elif kind.__name__ in _KINDS_OF_FUNCTIONS:
        home = kind.__module__
    else:
        return False
    name = name_of(value)
    is_theirs = str(home).partition(".")[0] in ("numpy", "torch")
    return is_theirs and (name in FUNCTIONS or name in CREATING)


_KINDS_OF_FUNCTIONS: Final = ("OpOverload", "OpOverloadPacket", "_ArrayFunctionDispatcher", "ufunc")
"""The classes of functions beside Python's own."""

CREATING: Final = frozenset({"tensor", "as_tensor", "scalar_tensor", "full", "zeros", "ones"})
"""Functions that make a tensor of numbers."""


def _getitem(array: Any, index: Any) -> Any:
    graph = next(scalars_of((array, *(index if isinstance(index, tuple) else (index,))))).graph
    return to_value(graph, array)[index]


# ---- casts and shapes --------------------------------------------------------------------


def _to(x: Value, *arguments: Any, **options: Any) -> Value:
    """`.to(dtype)`, `.to(device)`, `.to(other)`, in any combination."""
    given = [*arguments, options.get("dtype"), options.get("other")]
    for one in given:
        if isinstance(one, Scalar) or is_array(one):
            return _cast(x, one.dtype)
        if type(one).__name__ == "dtype":
            return _cast(x, one)
    return x


def _cast(x: Value, dtype: Any) -> Value:
    return each(partial(cast, dtype=dtype), x)


def _masked_fill(x: Scalar, mask: Scalar, value: Scalar) -> Scalar:
    return where(mask, value, x)


def _new_tensor(like: Traced, value: Any, **options: Any) -> Value:
    return to_value(like.graph, value)


def _same(x: Value, *arguments: Any, **options: Any) -> Value:
    return x


def _reshape(x: Value, *shape: Any) -> Value:
    if isinstance(x, Row):
        raise refuse("another shape of a row", "a row has one dimension")
    return x


def _unsqueeze(x: Value, dim: int) -> Value:
    if isinstance(x, Scalar):
        return Row(x.graph, (x,))
    raise refuse("`unsqueeze` of a row", "rows of rows have no words in the language")


def _squeeze(x: Value, dim: int | None = None) -> Value:
    return x.items[0] if isinstance(x, Row) and x.shape == (1,) else x


def _filled(value: bool | int | float) -> Callable[..., Scalar]:
    """`torch.zeros_like`, `x.new_ones(())`."""

    def fill(like: Traced, size: Any = (), *, dtype: Any = None, **options: Any) -> Scalar:
        if tuple(size):
            raise refuse("a new tensor", "only one without dimensions can be made", "use `()`")
        kind = _FLOAT if not isinstance(like, Scalar) else like.kind
        if dtype is not None:
            kind = scalar_of(_element_word(dtype))
        made = {_BOOL: bool, _INT: int, _FLOAT: float}[kind](value)
        return literal(like.graph, made)

    return fill


def _full(like: Traced, size: Any, fill_value: Any = None, **options: Any) -> Scalar:
    """`torch.full_like(x, value)`, `x.new_full((), value)`."""
    value = size if fill_value is None else fill_value
    return _filled(value)(like, dtype=options.get("dtype"))


def _element_word(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return "float" if "float" in name else name


def _item(x: Value) -> Any:
    return float(x)  # refuses, and says why


# ---- all of them -------------------------------------------------------------------------

_COMPARISONS: Final = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}

_ALIASES: Final = {
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "truediv": "true_divide",
    "floordiv": "floor_divide", "mod": "remainder", "rand": "bitwise_and", "ror": "bitwise_or",
    "rxor": "bitwise_xor",
    "divide": "div", "subtract": "sub", "multiply": "mul", "negative": "neg",
    "absolute": "abs", "clip": "clamp", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "not_equal": "ne", "radd": "add", "rmul": "mul", "matmul": "dot",
    "power": "pow", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift",
    "equal": "eq",
}  # fmt: skip
"""Other names of the same functions, in `Tensor.__and__`, in PyTorch and in NumPy."""


def _rsub(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    return sub(b, a, alpha=alpha)


def _rdiv(a: Scalar, b: Scalar) -> Scalar:
    return true_divide(b, a)


def _rpow(a: Scalar, b: Scalar) -> Scalar:
    return power(b, a)


def _rmod(a: Scalar, b: Scalar) -> Scalar:
    return remainder(b, a)


def _rfloordiv(a: Scalar, b: Scalar) -> Scalar:
    return floor_divide(b, a)


_OF_TWO: Final[dict[str, Callable[..., Scalar]]] = {
    "add": add, "sub": sub, "mul": mul, "true_divide": true_divide, "div": div,
    "floor_divide": floor_divide, "remainder": remainder, "pow": power, "rsub": _rsub,
    "rdiv": _rdiv, "rtruediv": _rdiv, "rpow": _rpow, "rmod": _rmod, "rfloordiv": _rfloordiv,
    "bitwise_and": bitwise_and, "bitwise_or": bitwise_or, "bitwise_xor": bitwise_xor,
    "bitwise_left_shift": left_shift, "bitwise_right_shift": right_shift,
    "logical_and": both, "logical_or": either,
    "logical_xor": lambda a, b: compare("!=", truth(a), truth(b)),
    "minimum": partial(call, "min", None), "maximum": partial(call, "max", None),
    **{name: partial(compare, op) for name, op in _COMPARISONS.items()},
}  # fmt: skip

_OF_ONE: Final[dict[str, Callable[..., Scalar]]] = {
    "neg": neg, "abs": partial(call, "abs", None), "bitwise_not": bitwise_not,
    "logical_not": lambda a: negation(truth(a)), "floor": floor, "ceil": ceil, "trunc": trunc,
    "log1p": log1p, "expm1": expm1, "log10": log10, "square": square,
    "reciprocal": reciprocal, "sign": sign, "relu": relu, "silu": silu, "gelu": gelu,
    "erf": erf, "softplus": softplus, "leaky_relu": leaky_relu, "clamp": clamp,
    "clamp_min": lambda x, min: clamp(x, min=min),
    "clamp_max": lambda x, max: clamp(x, max=max),
    "bool": truth, "int": to_int, "long": to_int, "float": to_float,
    **{name: partial(call, name, _FLOAT) for name in (
        "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid",
    )},
}  # fmt: skip

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: elementwise(function, 2) for name, function in _OF_TWO.items()},
    **{name: elementwise(function, 1) for name, function in _OF_ONE.items()},
    "where": elementwise(where, 3), "to": _to, "type_as": _to, "type": _to,
    "masked_fill": elementwise(_masked_fill, 3), "new_tensor": _new_tensor,
    "contiguous": _same, "clone": _same, "detach": _same, "view": _reshape,
    "reshape": _reshape, "expand": _reshape, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "item": _item, "half": partial(_cast, dtype="float16"),
    "bfloat16": partial(_cast, dtype="bfloat16"), "double": partial(_cast, dtype="float64"),
    "zeros_like": _filled(0), "ones_like": _filled(1), "full_like": _full,
    "new_zeros": _filled(0), "new_ones": _filled(1), "new_full": _full,
    "any": reduced(either, False), "all": reduced(both, True), "sum": total, "mean": mean,
    "prod": reduced(mul, 1), "amax": reduced(partial(call, "max", None), None),
    "amin": reduced(partial(call, "min", None), None), "max": extreme("max"),
    "min": extreme("min"), "dot": dot,
}  # fmt: skip
