"""What the functions, methods and operators of PyTorch and NumPy mean in the language.

Types follow PyTorch's promotion: truth values become integers, integers become floats where the
other operand is one, `/` and functions such as `exp` give floats.  Integers are those of
mathematics, and floats are float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Final

from attngen.flex.captured import is_array, scalar_of
from attngen.flex.graph import Graph, refuse
from attngen.flex.values import Row, Scalar, Traced, Value, scalars_of, to_value
from attngen.ir.types import ScalarType

__all__ = ["FUNCTIONS", "apply", "call_library"]

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
        raise refuse(f"this call of `{name}`", str(error)) from None


def call_library(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The same for one of PyTorch's functions, or NumPy's.

    Errors:  A261 for one that has no words in the language.
    """
    name = _name(function)
    if name == "getitem":
        return _getitem(*arguments)
    if name not in FUNCTIONS:
        shown = getattr(function, "_qualified_op_name", None) or name
        raise refuse(f"`{shown}`", "the language has no such function")
    if "out" in options:
        raise refuse("`out=`", "a traced function writes nothing")
    return apply(name, *arguments, **options)


def _name(function: Any) -> str:
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


def _getitem(array: Any, index: Any) -> Any:
    graph = next(scalars_of((array, *(index if isinstance(index, tuple) else (index,))))).graph
    return to_value(graph, array)[index]


# ---- building blocks ---------------------------------------------------------------------


def _number(x: Scalar) -> Scalar:
    """A truth value as 0 or 1."""
    if x.kind is not _BOOL:
        return x
    graph = x.graph
    node = graph.call("where", x.node, graph.literal(1), graph.literal(0))
    return Scalar(graph, node, _INT, bits=1)


def _truth(x: Scalar) -> Scalar:
    """A number as whether it is not 0."""
    return x if x.kind is _BOOL else _compare("!=", x, _literal(x.graph, 0))


def _literal(graph: Graph, value: bool | int | float) -> Scalar:
    scalar = to_value(graph, value)
    assert isinstance(scalar, Scalar)
    return scalar


def _promoted(a: Scalar, b: Scalar) -> ScalarType:
    return _FLOAT if _FLOAT in (a.kind, b.kind) else _INT


def _binary(op: str, a: Scalar, b: Scalar) -> Scalar:
    a, b = _number(a), _number(b)
    return Scalar(a.graph, a.graph.binary(op, a.node, b.node), _promoted(a, b))


def _compare(op: str, a: Scalar, b: Scalar) -> Scalar:
    if not (a.kind is b.kind is _BOOL and op in ("==", "!=")):
        a, b = _number(a), _number(b)
    return Scalar(a.graph, a.graph.compare(op, a.node, b.node), _BOOL)


def _logical(op: str, a: Scalar, b: Scalar) -> Scalar:
    """`and`, `or`; a constant that decides nothing is left out, as in PyTorch's `and_masks`."""
    decides = op == "or"
    for known, other in ((a, b), (b, a)):
        if known.constant is not None:
            return known if known.constant is decides else other
    return Scalar(a.graph, a.graph.logical(op, a.node, b.node), _BOOL)


def _not(a: Scalar) -> Scalar:
    return Scalar(a.graph, a.graph.unary("not", a.node), _BOOL)


def _call(name: str, kind: ScalarType | None, *values: Scalar) -> Scalar:
    """A builtin function of numbers; without a kind the result has that of the arguments."""
    numbers = [_number(x) for x in values]
    graph = numbers[0].graph
    found = kind or (_FLOAT if any(x.kind is _FLOAT for x in numbers) else _INT)
    return Scalar(graph, graph.call(name, *(x.node for x in numbers)), found)


# ---- one function each, of scalars -------------------------------------------------------


def _add(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    if a.kind is b.kind is _BOOL:
        return _logical("or", a, b)
    if alpha != 1:
        b = _binary("*", b, _literal(b.graph, alpha))
    return _binary("+", a, b)


def _sub(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    if a.kind is b.kind is _BOOL:
        raise refuse("`-` of two truth values", "PyTorch has none either", "use `^` or `~`")
    if alpha != 1:
        b = _binary("*", b, _literal(b.graph, alpha))
    return _binary("-", a, b)


def _mul(a: Scalar, b: Scalar) -> Scalar:
    return _logical("and", a, b) if a.kind is b.kind is _BOOL else _binary("*", a, b)


def _true_divide(a: Scalar, b: Scalar) -> Scalar:
    divided = _binary("/", a, b)
    return Scalar(divided.graph, divided.node, _FLOAT)


def _floor_divide(a: Scalar, b: Scalar) -> Scalar:
    a, b = _number(a), _number(b)
    if _promoted(a, b) is _FLOAT:
        return _floor(_true_divide(a, b))
    divided = _binary("//", a, b)
    by = b.constant
    if a.bits is not None and by and by > 0 and int(by).bit_count() == 1:
        divided.bits = a.bits >> (int(by).bit_length() - 1)
    return divided


def _div(a: Scalar, b: Scalar, *, rounding_mode: str | None = None) -> Scalar:
    if rounding_mode is None:
        return _true_divide(a, b)
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    quotient = _trunc(_true_divide(a, b))
    return _to_int(quotient) if _FLOAT not in (a.kind, b.kind) else quotient


def _remainder(a: Scalar, b: Scalar) -> Scalar:
    a, b = _number(a), _number(b)
    if _promoted(a, b) is _FLOAT:
        return _sub(a, _mul(b, _floor_divide(a, b)))
    rest = _binary("%", a, b)
    if isinstance(b.constant, int) and b.constant > 0:
        rest.bits = (1 << (b.constant - 1).bit_length()) - 1
    return rest


def _pow(base: Scalar, exponent: Scalar) -> Scalar:
    base, exponent = _number(base), _number(exponent)
    n, c, graph = exponent.constant, base.constant, base.graph
    if isinstance(n, int | float) and n == int(n) and abs(n) <= 64:
        power = Scalar(graph, graph.binary("**", base.node, graph.literal(abs(int(n)))), base.kind)
        if n >= 0:
            return power if exponent.kind is _INT else _to_float(power)
        if base.kind is _INT:
            raise refuse("a negative power of an integer", "PyTorch refuses it as well")
        return _true_divide(_literal(graph, 1.0), power)
    if n in (0.5, -0.5):
        return _call("sqrt" if n == 0.5 else "rsqrt", _FLOAT, base)
    if c is not None and c > 0:
        if base.kind is exponent.kind is _INT:
            raise refuse("an integer to a traced power", "the language has no such product")
        if c != 2:
            exponent = _mul(exponent, _call("log2", _FLOAT, _to_float(base)))
        return _call("exp2", _FLOAT, exponent)
    raise refuse("this power", "the exponent is no whole number from -64 to 64, nor 0.5")


def _neg(a: Scalar) -> Scalar:
    a = _number(a)
    return Scalar(a.graph, a.graph.unary("-", a.node), a.kind)


def _where(condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
    if condition.kind is not _BOOL:
        raise refuse("a condition that is a number", "`torch.where` takes a truth value")
    if a.kind is b.kind is _BOOL:
        kind = _BOOL
    else:
        a, b = _number(a), _number(b)
        kind = _promoted(a, b)
    graph = condition.graph
    return Scalar(graph, graph.call("where", condition.node, a.node, b.node), kind)


def _clamp(x: Scalar, min: Any = None, max: Any = None) -> Scalar:
    graph = x.graph
    low = None if min is None else _scalar(graph, min)
    high = None if max is None else _scalar(graph, max)
    if low is not None and high is not None:
        return _call("clamp", None, x, low, high)
    if low is not None:
        return _call("max", None, x, low)
    if high is None:
        raise refuse("this `clamp`", "it has neither a `min` nor a `max`")
    return _call("min", None, x, high)


def _floor(x: Scalar) -> Scalar:
    """As a float, like PyTorch's; that of the language is an integer."""
    return x if x.kind is not _FLOAT else _to_float(_call("floor", _INT, x))


def _ceil(x: Scalar) -> Scalar:
    return x if x.kind is not _FLOAT else _to_float(_neg(_call("floor", _INT, _neg(x))))


def _trunc(x: Scalar) -> Scalar:
    return x if x.kind is not _FLOAT else _to_float(_to_int(x))


def _to_float(x: Scalar) -> Scalar:
    if x.kind is _FLOAT:
        return x
    if x.constant is not None:
        return _literal(x.graph, float(x.constant))
    return _mul(_literal(x.graph, 1.0), _number(x))


def _to_int(x: Scalar) -> Scalar:
    """Rounded towards 0, as PyTorch's casts are."""
    if x.kind is not _FLOAT:
        return _number(x)
    zero = _literal(x.graph, 0)
    up = _neg(_call("floor", _INT, _neg(x)))
    return _where(_compare("<", x, zero), up, _call("floor", _INT, x))


def _log1p(x: Scalar) -> Scalar:
    return _call("log", _FLOAT, _add(_literal(x.graph, 1.0), x))


def _expm1(x: Scalar) -> Scalar:
    return _sub(_call("exp", _FLOAT, x), _literal(x.graph, 1.0))


def _log10(x: Scalar) -> Scalar:
    return _mul(_call("log", _FLOAT, x), _literal(x.graph, 0.4342944819032518))


def _square(x: Scalar) -> Scalar:
    return _mul(x, x)


def _reciprocal(x: Scalar) -> Scalar:
    return _true_divide(_literal(x.graph, 1.0), x)


def _sign(x: Scalar) -> Scalar:
    graph = x.graph
    zero, one = _literal(graph, 0), _literal(graph, 1)
    sign = _where(_compare("<", x, zero), _neg(one), _where(_compare(">", x, zero), one, zero))
    return _to_float(sign) if x.kind is _FLOAT else sign


def _relu(x: Scalar, inplace: bool = False) -> Scalar:
    return _call("max", None, x, _literal(x.graph, 0))


def _silu(x: Scalar, inplace: bool = False) -> Scalar:
    return _mul(x, _call("sigmoid", _FLOAT, x))


def _gelu(x: Scalar, *, approximate: str = "none") -> Scalar:
    half = _mul(_literal(x.graph, 0.5), x)
    if approximate == "tanh":
        cubic = _mul(_literal(x.graph, 0.044715), _pow(x, _literal(x.graph, 3)))
        inner = _mul(_literal(x.graph, 0.7978845608028654), _add(x, cubic))
        curve = _call("tanh", _FLOAT, inner)
    else:
        curve = _erf(_mul(x, _literal(x.graph, 0.7071067811865476)))
    return _mul(half, _add(_literal(x.graph, 1.0), curve))


def _erf(x: Scalar) -> Scalar:
    """The error function, by a definition that is printed with the text."""
    return Scalar(x.graph, x.graph.call("erf", _to_float(x).node), _FLOAT)


def _softplus(x: Scalar, beta: float = 1.0, threshold: float = 20.0) -> Scalar:
    scaled = x if beta == 1 else _mul(x, _literal(x.graph, beta))
    soft = _log1p(_call("exp", _FLOAT, scaled))
    if beta != 1:
        soft = _true_divide(soft, _literal(x.graph, beta))
    return _where(_compare(">", scaled, _literal(x.graph, threshold)), x, soft)


def _leaky_relu(x: Scalar, negative_slope: float = 0.01, inplace: bool = False) -> Scalar:
    zero, slope = _literal(x.graph, 0), _literal(x.graph, negative_slope)
    return _where(_compare(">", x, zero), x, _mul(x, slope))


# ---- bits of integers --------------------------------------------------------------------


def _bitwise_and(a: Scalar, b: Scalar) -> Scalar:
    if a.kind is b.kind is _BOOL:
        return _logical("and", a, b)
    a, b = _integers(a, b)
    if isinstance(b.constant, int) and b.constant >= 0:
        return _masked(a, b.constant)
    if isinstance(a.constant, int) and a.constant >= 0:
        return _masked(b, a.constant)
    raise refuse("`&` of these integers", "one of them must be a number that is not negative")


def _masked(a: Scalar, mask: int) -> Scalar:
    """The bits of `mask`, as a sum over its runs of ones: `x // 4 % 2 * 4` for the mask 4."""
    if a.parts:
        return reduce(_bitwise_or, (_masked(part, mask) for part in a.parts))
    wanted = mask if a.bits is None else mask & a.bits
    if wanted == a.bits:
        return a
    graph = a.graph
    total: Scalar | None = None
    for low, width in _runs(wanted):
        part = a if low == 0 else _binary("//", a, _literal(graph, 1 << low))
        if a.bits is None or a.bits >> (low + width):
            part = _binary("%", part, _literal(graph, 1 << width))
        if low:
            part = _binary("*", part, _literal(graph, 1 << low))
        total = part if total is None else _binary("+", total, part)
    if total is None:
        return _literal(graph, 0)
    total.bits = wanted
    return total


def _runs(mask: int) -> list[tuple[int, int]]:
    """The runs of ones of a number, each as its lowest bit and its width."""
    runs, low = [], 0
    while mask >> low:
        if not mask >> low & 1:
            low += 1
            continue
        width = 1
        while mask >> (low + width) & 1:
            width += 1
        runs.append((low, width))
        low += width
    return runs


def _bitwise_or(a: Scalar, b: Scalar) -> Scalar:
    if a.kind is b.kind is _BOOL:
        return _logical("or", a, b)
    a, b = _integers(a, b)
    if a.bits is not None and b.bits is not None and not a.bits & b.bits:
        joined = _binary("+", a, b)
        joined.bits = a.bits | b.bits
        return joined
    if a.constant is not None:
        a, b = b, a
    if isinstance(b.constant, int) and b.constant >= 0:
        return _binary("+", _binary("-", a, _masked(a, b.constant)), b)
    bits = None if a.bits is None or b.bits is None else a.bits | b.bits
    return Scalar(a.graph, None, _INT, bits, parts=(*(a.parts or (a,)), *(b.parts or (b,))))


def _bitwise_xor(a: Scalar, b: Scalar) -> Scalar:
    if a.kind is b.kind is _BOOL:
        return _compare("!=", a, b)
    a, b = _integers(a, b)
    if a.constant is not None:
        a, b = b, a
    if not (isinstance(b.constant, int) and b.constant >= 0):
        raise refuse("`^` of these integers", "one of them must be a number that is not negative")
    twice = _mul(_literal(a.graph, 2), _masked(a, b.constant))
    return _binary("-", _binary("+", a, b), twice)


def _bitwise_not(a: Scalar) -> Scalar:
    if a.kind is _BOOL:
        return _not(a)
    (a,) = _integers(a)
    return _binary("-", _neg(a), _literal(a.graph, 1))


def _left_shift(a: Scalar, b: Scalar) -> Scalar:
    a, b = _integers(a, b)
    by = _shift(b)
    if a.parts:
        return reduce(_bitwise_or, (_left_shift(part, b) for part in a.parts))
    shifted = _binary("*", a, _literal(a.graph, 1 << by))
    shifted.bits = None if a.bits is None else a.bits << by
    return shifted


def _right_shift(a: Scalar, b: Scalar) -> Scalar:
    a, b = _integers(a, b)
    by = _shift(b)
    if a.parts:
        return reduce(_bitwise_or, (_right_shift(part, b) for part in a.parts))
    shifted = _binary("//", a, _literal(a.graph, 1 << by))
    shifted.bits = None if a.bits is None else a.bits >> by
    return shifted


def _shift(by: Scalar) -> int:
    if not (isinstance(by.constant, int) and 0 <= by.constant < 64):
        raise refuse("this shift", "its width must be a number from 0 to 63")
    return by.constant


def _integers(*values: Scalar) -> list[Scalar]:
    numbers = [_number(x) for x in values]
    if any(x.kind is _FLOAT for x in numbers):
        raise refuse("a bitwise operation on floats", "only integers have bits")
    return numbers


# ---- casts and shapes --------------------------------------------------------------------


def _to(x: Value, *arguments: Any, **options: Any) -> Value:
    """`.to(dtype)`, `.to(device)`, `.to(other)`, in any combination."""
    given = [*arguments, options.get("dtype"), options.get("other")]
    for each in given:
        if isinstance(each, Scalar):
            return _cast(x, str(each.dtype))
        if is_array(each):
            return _cast(x, str(each.dtype))
        if type(each).__name__ == "dtype":
            return _cast(x, str(each))
    return x


_CASTS: Final = {
    "bool": _truth, "int32": _to_int, "int64": _to_int, "int": _to_int, "long": _to_int,
    "float32": _to_float, "float": _to_float,
}  # fmt: skip


def _cast(x: Value, dtype: Any) -> Value:
    name = str(dtype).removeprefix("torch.")
    cast = _CASTS.get(name)
    if cast is None:
        wide = "every float is a float32, and integers are those of mathematics"
        raise refuse(f"a cast to {name}", wide)
    return _each(cast, x)


def _masked_fill(x: Scalar, mask: Scalar, value: Scalar) -> Scalar:
    return _where(mask, value, x)


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
        return _literal(like.graph, made)

    return fill


def _full(like: Traced, size: Any, fill_value: Any = None, **options: Any) -> Scalar:
    """`torch.full_like(x, value)`, `x.new_full((), value)`."""
    value = size if fill_value is None else fill_value
    filled = _filled(value)(like, **{k: v for k, v in options.items() if k == "dtype"})
    return filled


def _element_word(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return "float" if "float" in name else name


def _item(x: Value) -> Any:
    return float(x)  # refuses, and says why


# ---- rows --------------------------------------------------------------------------------


def _reduced(
    combine: Callable[[Scalar, Scalar], Scalar], empty: bool | int | None
) -> Callable[..., Scalar]:
    """A reduction over the one dimension of a row; `empty` is its value for none."""

    def reduce_row(
        x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Scalar:
        if isinstance(x, Scalar):
            return x
        if keepdim:
            raise refuse("`keepdim=True`", "a row becomes one number")
        items = list(x.items)
        if not items:
            if empty is None:
                raise refuse("this reduction", "the row is empty")
            return _literal(x.graph, empty)
        total = reduce(combine, items)
        return total if dtype is None else _only(_cast(total, dtype))

    return reduce_row


def _count(a: Scalar, b: Scalar) -> Scalar:
    return _binary("+", _number(a), _number(b))


def _either(a: Scalar, b: Scalar) -> Scalar:
    return _logical("or", _truth(a), _truth(b))


def _both(a: Scalar, b: Scalar) -> Scalar:
    return _logical("and", _truth(a), _truth(b))


def _sum(x: Value, *arguments: Any, **options: Any) -> Scalar:
    total = _reduced(_count, 0)(x, *arguments, **options)
    return _number(total)


def _mean(x: Value, *arguments: Any, **options: Any) -> Scalar:
    count = 1 if isinstance(x, Scalar) else len(x.items)
    return _true_divide(_sum(x, *arguments, **options), _literal(x.graph, count))


def _dot(a: Value, b: Value) -> Scalar:
    if not (isinstance(a, Row) and isinstance(b, Row) and a.shape == b.shape):
        raise refuse("this `dot`", "it takes two rows of one length")
    return _sum(_each(_mul, a, b))


def _extreme(name: str) -> Callable[..., Value]:
    """`torch.max(a, b)`, or `x.max()` of a row."""
    combine = partial(_call, name, None)

    def extreme(x: Value, other: Any = None, **options: Any) -> Value:
        if other is not None and not isinstance(other, int):
            return _each(combine, x, other)
        if other is not None or "dim" in options:
            raise refuse(f"`{name}` along a dimension", "it gives indices too", f"use `a{name}`")
        return _reduced(combine, None)(x)

    return extreme


# ---- all of them -------------------------------------------------------------------------


def _scalar(graph: Graph, value: Any) -> Scalar:
    return _only(to_value(graph, value))


def _only(value: Value) -> Scalar:
    if isinstance(value, Row):
        if value.shape == (1,):
            return value.items[0]
        raise refuse("a row", "one number is needed here")
    return value


def _each(function: Callable[..., Scalar], *operands: Any, **options: Any) -> Value:
    """The function of scalars, or of rows element by element."""
    graph = next(scalars_of(operands)).graph
    values = [to_value(graph, x) for x in operands]
    rows = [x for x in values if isinstance(x, Row)]
    if not rows:
        return function(*values, **options)
    lengths = {len(row.items) for row in rows} - {1}
    if len(lengths) > 1:
        raise refuse("these rows", f"they have {' and '.join(map(str, sorted(lengths)))} elements")
    length = lengths.pop() if lengths else 1
    columns = [
        [x] * length if isinstance(x, Scalar) else list(x.items) * (length // len(x.items) or 1)
        for x in values
    ]
    return Row(graph, tuple(function(*each, **options) for each in zip(*columns, strict=True)))


def _elementwise(function: Callable[..., Scalar], count: int) -> Callable[..., Value]:
    """A function whose first `count` arguments may be rows."""

    def call(*arguments: Any, **options: Any) -> Value:
        named = {"other": 1, "exponent": 1, "input": 0, "self": 0}
        operands = list(arguments[:count])
        for name, at in named.items():
            if name in options and at >= len(operands):
                operands.append(options.pop(name))
        extra = partial(_with_arguments, function, arguments[count:])
        return _each(extra, *operands, **options)

    return call


def _with_arguments(
    function: Callable[..., Scalar], more: tuple[Any, ...], *operands: Any, **options: Any
) -> Scalar:
    return function(*operands, *more, **options)


_COMPARISONS: Final = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}

_ALIASES: Final = {
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor",
    "divide": "div", "subtract": "sub", "multiply": "mul", "negative": "neg",
    "absolute": "abs", "clip": "clamp", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "not_equal": "ne", "radd": "add", "rmul": "mul", "matmul": "dot",
    "power": "pow", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift",
    "equal": "eq",
}  # fmt: skip
"""Other names of the same functions, in `Tensor.__and__`, in PyTorch and in NumPy."""


def _rsub(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    return _sub(b, a, alpha=alpha)


def _rdiv(a: Scalar, b: Scalar) -> Scalar:
    return _true_divide(b, a)


def _rpow(a: Scalar, b: Scalar) -> Scalar:
    return _pow(b, a)


def _rmod(a: Scalar, b: Scalar) -> Scalar:
    return _remainder(b, a)


def _rfloordiv(a: Scalar, b: Scalar) -> Scalar:
    return _floor_divide(b, a)


_OF_TWO: Final[dict[str, Callable[..., Scalar]]] = {
    "add": _add, "sub": _sub, "mul": _mul, "true_divide": _true_divide, "div": _div,
    "floor_divide": _floor_divide, "remainder": _remainder, "pow": _pow, "rsub": _rsub,
    "rdiv": _rdiv, "rtruediv": _rdiv, "rpow": _rpow, "rmod": _rmod, "rfloordiv": _rfloordiv,
    "bitwise_and": _bitwise_and, "bitwise_or": _bitwise_or, "bitwise_xor": _bitwise_xor,
    "bitwise_left_shift": _left_shift, "bitwise_right_shift": _right_shift,
    "logical_and": _both, "logical_or": _either,
    "logical_xor": lambda a, b: _compare("!=", _truth(a), _truth(b)),
    "minimum": partial(_call, "min", None), "maximum": partial(_call, "max", None),
    **{name: partial(_compare, op) for name, op in _COMPARISONS.items()},
}  # fmt: skip

_OF_ONE: Final[dict[str, Callable[..., Scalar]]] = {
    "neg": _neg, "abs": partial(_call, "abs", None), "bitwise_not": _bitwise_not,
    "logical_not": lambda a: _not(_truth(a)), "floor": _floor, "ceil": _ceil, "trunc": _trunc,
    "log1p": _log1p, "expm1": _expm1, "log10": _log10, "square": _square,
    "reciprocal": _reciprocal, "sign": _sign, "relu": _relu, "silu": _silu, "gelu": _gelu,
    "erf": _erf, "softplus": _softplus, "leaky_relu": _leaky_relu, "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "bool": _truth, "int": _to_int, "long": _to_int, "float": _to_float,
    **{name: partial(_call, name, _FLOAT) for name in (
        "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid",
    )},
}  # fmt: skip

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: _elementwise(function, 2) for name, function in _OF_TWO.items()},
    **{name: _elementwise(function, 1) for name, function in _OF_ONE.items()},
    "where": _elementwise(_where, 3), "to": _to, "type_as": _to, "type": _to,
    "masked_fill": _elementwise(_masked_fill, 3), "new_tensor": _new_tensor,
    "contiguous": _same, "clone": _same, "detach": _same, "view": _reshape,
    "reshape": _reshape, "expand": _reshape, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "item": _item, "half": partial(_cast, dtype="float16"),
    "bfloat16": partial(_cast, dtype="bfloat16"), "double": partial(_cast, dtype="float64"),
    "zeros_like": _filled(0), "ones_like": _filled(1), "full_like": _full,
    "new_zeros": _filled(0), "new_ones": _filled(1), "new_full": _full,
    "any": _reduced(_either, False), "all": _reduced(_both, True), "sum": _sum, "mean": _mean,
    "prod": _reduced(_mul, 1), "amax": _reduced(partial(_call, "max", None), None),
    "amin": _reduced(partial(_call, "min", None), None), "max": _extreme("max"),
    "min": _extreme("min"), "dot": _dot,
}  # fmt: skip
