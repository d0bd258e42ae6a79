"""The value of an expression of the syntax tree, for every pair at once, in float64.

Definitions and lets are expanded by name: an argument is a promise, evaluated in the scope
where it was written, once, when something needs it.  A definition's body sees its own
parameters, indices, sizes and other definitions, never the names of its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final, TypeAlias, assert_never, final

import numpy as np

from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.span import Span
from attngen.frontend import ast
from attngen.oracle import values
from attngen.oracle.errors import IndexOutside, Meaningless, closest
from attngen.oracle.values import Array, Fault, Value

__all__ = ["BUILTINS", "Promise", "Scope", "evaluate"]


@final
@dataclass(eq=False, slots=True)
class Promise:
    """An expression, the scope it was written in, and its declared type if there is one."""

    expr: ast.Expr
    scope: Scope
    type: str | None = None
    _value: Value | None = None
    _running: bool = False

    def value(self) -> Value:
        if self._value is None:
            if self._running:
                raise _meaningless(self.expr.span, "it needs itself")
            self._running = True
            result = _visit(self.expr, self.scope)
            self._running = False
            self._value = _as_type(result, self.type, self.expr.span) if self.type else result
        return self._value


@final
@dataclass(eq=False, slots=True)
class Scope:
    """The names that an expression can see.

    `shared` are the indices and sizes, which definitions see too.  A tensor is an array of its
    declared shape.  `expanding` lists the definitions whose bodies this scope is inside.
    """

    shared: Mapping[str, Value]
    definitions: Mapping[str, ast.Definition] = field(default_factory=dict)
    names: dict[str, Value | Promise] = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)
    expanding: tuple[str, ...] = ()

    def find(self, name: str) -> Value | None:
        found = self.names.get(name, self.shared.get(name))
        return found.value() if isinstance(found, Promise) else found


def evaluate(e: ast.Expr, scope: Scope) -> Value:
    """The value of `e`; faults are in it, and nothing is raised for them here.

    Errors:  A659 when the expression has no meaning (unknown names, wrong types).
    """
    try:
        with np.errstate(all="ignore"):
            return _visit(e, scope)
    except RecursionError:
        raise _meaningless(e.span, "it is nested too deeply") from None


def _visit(e: ast.Expr, scope: Scope) -> Value:
    match e:
        case ast.Literal(value=value):
            return values.constant(value, e.span)
        case ast.Name(name=name):
            return _name(e, name, scope)
        case ast.Index():
            return _read(e, scope)
        case ast.Call():
            return _call(e, scope)
        case ast.Unary(op="not", operand=operand):
            condition = _truth(_visit(operand, scope), operand.span)
            return Value(np.logical_not(condition.data), None, condition.faults)
        case ast.Unary(op=op, operand=operand):
            number = _number(_visit(operand, scope), operand.span)
            return values.negate(number, e.span) if op == "-" else number
        case ast.Binary():
            return _binary_chain(e, scope)
        case ast.Comparison():
            return _comparison(e, scope)
        case ast.BoolOp():
            return _bool_op(e, scope)
        case _:
            assert_never(e)


def _name(e: ast.Name, name: str, scope: Scope) -> Value:
    found = scope.find(name)
    if found is not None:
        return found
    if name in scope.definitions:
        return _expand(scope.definitions[name], (), scope, e.span)
    if name in scope.tensors:
        raise _meaningless(e.span, f"`{name}` is a tensor and needs indices")
    known = (*scope.names, *scope.shared, *scope.definitions)
    guess = closest(name, known)
    more = f"; did you mean `{guess}`?" if guess else ""
    raise _meaningless(e.span, f"nothing called `{name}` is visible here{more}")


# ---- operators ---------------------------------------------------------------------------

_ARITHMETIC: Final[Mapping[str, Callable[[Value, Value, Span], Value]]] = {
    "+": values.add,
    "-": values.subtract,
    "*": values.multiply,
    "/": lambda a, b, _span: values.divide(a, b),
    "//": values.floor_divide,
    "%": lambda a, b, _span: values.modulo(a, b),
    "**": values.power,
}

_ORDER: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "<": np.less,
    "<=": np.less_equal,
    "==": np.equal,
    "!=": np.not_equal,
    ">=": np.greater_equal,
    ">": np.greater,
}


def _binary_chain(e: ast.Binary, scope: Scope) -> Value:
    """`a + b + c + …` leans to the left: walk down that side in a loop, so no chain is too long."""
    pending: list[ast.Binary] = []
    leftmost: ast.Expr = e
    while isinstance(leftmost, ast.Binary):
        pending.append(leftmost)
        leftmost = leftmost.left
    result = _number(_visit(leftmost, scope), leftmost.span)
    for step in reversed(pending):
        right = _number(_visit(step.right, scope), step.right.span)
        result = _ARITHMETIC[step.op](result, right, step.span)
    return result


def _bool_op(e: ast.BoolOp, scope: Scope) -> Value:
    chain = _Chain(conjunction=e.op == "and")
    for operand in e.operands:
        chain.add(_truth(_visit(operand, scope), operand.span))
    return chain.value()


def _comparison(e: ast.Comparison, scope: Scope) -> Value:
    """`a < b < c` is `a < b and b < c` with one `b`; `c` is not needed where `a < b` fails."""
    chain = _Chain(conjunction=True)
    left = _visit(e.operands[0], scope)
    for op, operand in zip(e.ops, e.operands[1:], strict=True):
        right = _visit(operand, scope)
        kinds = {left.kind, right.kind}
        if "bool" in kinds and (len(kinds) > 1 or op not in ("==", "!=")):
            raise _meaningless(e.span, "truth values can be compared by == and != only")
        result = _ORDER[op](left.data, right.data)
        chain.add(Value(result, None, values.join_faults((left, right))))
        left = right
    return chain.value()


@final
@dataclass(slots=True)
class _Chain:
    """`and` / `or`: an operand is needed only where those before it left the answer open."""

    conjunction: bool
    open: Array = field(default_factory=lambda: np.bool_(True))
    parts: list[Value] = field(default_factory=list)

    def add(self, operand: Value) -> None:
        faults = values.narrow_faults(operand.faults, self.open)
        self.parts.append(Value(operand.data, None, faults))
        self.open = self.open & (operand.data if self.conjunction else ~operand.data)

    def value(self) -> Value:
        result = self.open if self.conjunction else np.logical_not(self.open)
        return Value(result, None, values.join_faults(self.parts))


def _truth(value: Value, span: Span) -> Value:
    if value.kind != "bool":
        raise _meaningless(span, "a truth value is needed here, and this is a number")
    return value


def _number(value: Value, span: Span) -> Value:
    if value.kind == "bool":
        raise _meaningless(span, "a number is needed here, and this is a truth value")
    return value


def _integer(value: Value, span: Span) -> Value:
    if value.kind != "int":
        raise _meaningless(span, f"an integer is needed here, and this is a {value.kind}")
    return value


# ---- tensor reads ------------------------------------------------------------------------


def _read(e: ast.Index, scope: Scope) -> Value:
    """One element per pair.  Negative and too large indices are faults."""
    if e.tensor not in scope.tensors:
        raise _meaningless(e.tensor_span, f"no tensor is called `{e.tensor}` here")
    tensor = scope.tensors[e.tensor]
    if len(e.indices) != tensor.ndim:
        count = len(e.indices)
        raise _meaningless(e.span, f"`{e.tensor}` needs {tensor.ndim} indices, and has {count}")
    parts = [_integer(_visit(index, scope), index.span) for index in e.indices]
    indices = [np.asarray(part.data) for part in parts]
    outside = [(i < 0) | (i >= n) for i, n in zip(indices, tensor.shape, strict=True)]
    shape = np.broadcast_shapes(*(i.shape for i in indices))
    if tensor.size:
        inside = [np.clip(i, 0, n - 1) for i, n in zip(indices, tensor.shape, strict=True)]
        data = np.asarray(tensor[tuple(inside)])
    else:
        data = np.zeros(shape, tensor.dtype)
    faults = values.join_faults(parts)
    anywhere = reduce(np.logical_or, outside)
    if np.any(anywhere):
        faults = {**faults, _index_fault(e, tensor.shape, indices, outside): anywhere}
    return Value(_widen(data), None, faults)


def _index_fault(
    e: ast.Index, sizes: tuple[int, ...], indices: list[Array], outside: list[Array]
) -> Fault:
    def describe(shape: tuple[int, ...], position: tuple[int, ...], place: str) -> IndexOutside:
        at = [bool(np.broadcast_to(bad, shape)[position]) for bad in outside]
        axis = at.index(True)
        index = int(np.broadcast_to(indices[axis], shape)[position])
        return IndexOutside(e.span, e.tensor, axis, index, sizes[axis], place)

    return Fault(describe)


def _widen(data: Array) -> Array:
    """bool as it is, integers as int64, floats of any width as float64: all exact."""
    if data.dtype.kind == "b":
        return data
    return data.astype(np.int64 if data.dtype.kind in "iu" else np.float64)


# ---- calls -------------------------------------------------------------------------------


def _call(e: ast.Call, scope: Scope) -> Value:
    if e.name in BUILTINS:
        return _call_builtin(e, scope)
    if e.name in scope.definitions:
        return _expand(scope.definitions[e.name], e.arguments, scope, e.span)
    guess = closest(e.name, (*BUILTINS, *scope.definitions))
    more = f"; did you mean `{guess}`?" if guess else ""
    raise _meaningless(e.name_span, f"no function is called `{e.name}`{more}")


def _call_builtin(e: ast.Call, scope: Scope) -> Value:
    fewest, most, function = BUILTINS[e.name]
    count = len(e.arguments)
    if count < fewest or (most is not None and count > most):
        raise _meaningless(e.span, f"`{e.name}` does not take {count} arguments")
    operands: list[Value] = []
    for argument in e.arguments:
        if argument.name is not None:
            raise _meaningless(argument.span, f"the arguments of `{e.name}` have no names")
        operands.append(_visit(argument.value, scope))
    return function(operands, e.span)


def _expand(
    definition: ast.Definition, arguments: tuple[ast.Argument, ...], scope: Scope, span: Span
) -> Value:
    """The body of a definition, in a scope of its own."""
    if definition.name in scope.expanding:
        raise _meaningless(span, f"`{definition.name}` is defined by itself")
    inner = Scope(scope.shared, scope.definitions, expanding=(*scope.expanding, definition.name))
    given = _match(definition, arguments)
    for parameter in definition.parameters:
        argument = given.get(parameter.name)
        if parameter.type == "tensor":
            name = argument.value.name if argument and isinstance(argument.value, ast.Name) else ""
            if name not in scope.tensors:
                where = argument.span if argument else span
                raise _meaningless(where, f"`{parameter.name}` must be the name of a tensor")
            inner.tensors[parameter.name] = scope.tensors[name]
        elif argument is not None and _is_flag(parameter, argument):
            inner.names[parameter.name] = Value(np.bool_(True))
        elif argument is not None:
            inner.names[parameter.name] = Promise(argument.value, scope, _scalar(parameter.type))
        elif parameter.default is not None:
            outside = Scope(scope.shared, scope.definitions, expanding=inner.expanding)
            inner.names[parameter.name] = Promise(
                parameter.default, outside, _scalar(parameter.type)
            )
        elif parameter.type == "flag":
            inner.names[parameter.name] = Value(np.bool_(False))
        else:
            raise _meaningless(span, f"`{definition.name}` needs `{parameter.name}`")
    return _as_type(_visit(definition.body, inner), definition.type, span)


def _match(
    definition: ast.Definition, arguments: tuple[ast.Argument, ...]
) -> dict[str, ast.Argument]:
    """Which argument each parameter gets: by name, by being the word of a flag, or in order."""
    flags = {p.name for p in definition.parameters if p.type == "flag"}
    in_order = [p.name for p in definition.parameters if p.type != "flag"]
    given: dict[str, ast.Argument] = {}
    for argument in arguments:
        name = argument.name
        if name is None and isinstance(argument.value, ast.Name) and argument.value.name in flags:
            name = argument.value.name
        elif name is None:
            name = next((p for p in in_order if p not in given), None)
        if name is None or name not in (*flags, *in_order):
            raise _meaningless(argument.span, f"`{definition.name}` has no place for this argument")
        if name in given:
            raise _meaningless(argument.span, f"`{name}` is given twice")
        given[name] = argument
    return given


def _is_flag(parameter: ast.Parameter, argument: ast.Argument) -> bool:
    return parameter.type == "flag" and argument.name is None


def _scalar(type_: str) -> str:
    return "bool" if type_ == "flag" else type_


def _as_type(value: Value, type_: str, span: Span) -> Value:
    """A value for a place that is declared `int`, `float` or `bool`."""
    if value.kind == type_:
        return value
    if value.kind == "int" and type_ == "float":
        return values.to_float(value)
    raise _meaningless(span, f"this is a {value.kind}, and was declared as {type_}")


# ---- builtin functions -------------------------------------------------------------------

Builtin: TypeAlias = Callable[[Sequence[Value], Span], Value]


def _smooth(f: Callable[[Any], Any], slope: Callable[[Any, Any], Any]) -> Builtin:
    """A float function; `slope` gives its derivative from the argument and the result."""

    def apply(operands: Sequence[Value], span: Span) -> Value:
        x = values.to_float(_number(operands[0], span))
        y = f(x.data)
        return Value(y, None if x.slope is None else slope(x.data, y) * x.slope, x.faults)

    return apply


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def _floor(operands: Sequence[Value], span: Span) -> Value:
    return values.floor(_number(operands[0], span), span)


def _abs(operands: Sequence[Value], span: Span) -> Value:
    return values.absolute(_number(operands[0], span), span)


def _extreme(a: Value, b: Value, smallest: bool) -> Value:
    """The smaller (or larger) of two; NaN when one is NaN, so that no NaN is lost."""
    faults = values.join_faults((a, b))
    if a.kind == b.kind == "int":
        return Value((np.minimum if smallest else np.maximum)(a.data, b.data), None, faults)
    a, b = values.to_float(a), values.to_float(b)
    data = (np.minimum if smallest else np.maximum)(a.data, b.data)
    if a.slope is None and b.slope is None:
        return Value(data, None, faults)
    slope_a = 0.0 if a.slope is None else a.slope
    slope_b = 0.0 if b.slope is None else b.slope
    first = (a.data < b.data) if smallest else (a.data > b.data)
    second = (b.data < a.data) if smallest else (b.data > a.data)
    # At a tie both one-sided derivatives exist; the steeper one is the safe choice for L.
    steeper = np.where(np.abs(slope_a) >= np.abs(slope_b), slope_a, slope_b)
    slope = np.where(first, slope_a, np.where(second, slope_b, steeper))
    return Value(data, slope, faults)


def _min(operands: Sequence[Value], span: Span) -> Value:
    return reduce(lambda a, b: _extreme(a, b, True), [_number(x, span) for x in operands])


def _max(operands: Sequence[Value], span: Span) -> Value:
    return reduce(lambda a, b: _extreme(a, b, False), [_number(x, span) for x in operands])


def _clamp(operands: Sequence[Value], span: Span) -> Value:
    x, low, high = operands
    return _min((_max((x, low), span), high), span)


def _where(operands: Sequence[Value], span: Span) -> Value:
    condition, then, otherwise = operands
    taken = _truth(condition, span).data
    kinds = {then.kind, otherwise.kind}
    if "bool" in kinds and len(kinds) > 1:
        raise _meaningless(span, "one branch is a truth value and the other one is a number")
    slope = None
    if then.slope is not None or otherwise.slope is not None:
        slope_then = 0.0 if then.slope is None else then.slope
        slope = np.where(taken, slope_then, 0.0 if otherwise.slope is None else otherwise.slope)
    used = (
        condition,
        Value(then.data, None, values.narrow_faults(then.faults, taken)),
        Value(otherwise.data, None, values.narrow_faults(otherwise.faults, ~taken)),
    )
    return Value(np.where(taken, then.data, otherwise.data), slope, values.join_faults(used))


def _bit(operands: Sequence[Value], span: Span) -> Value:
    """Bit i of a word in two's complement, counted from the lowest; false outside 0..63."""
    word, i = (_integer(x, span) for x in operands)
    inside = (i.data >= 0) & (i.data < 64)
    one = (np.right_shift(word.data, np.where(inside, i.data, 0)) & 1) == 1
    return Value(inside & one, None, values.join_faults((word, i)))


BUILTINS: Final[Mapping[str, tuple[int, int | None, Builtin]]] = {
    "exp": (1, 1, _smooth(np.exp, lambda _x, y: y)),
    "exp2": (1, 1, _smooth(np.exp2, lambda _x, y: y * np.log(2.0))),
    "log": (1, 1, _smooth(np.log, lambda x, _y: 1.0 / x)),
    "log2": (1, 1, _smooth(np.log2, lambda x, _y: 1.0 / (x * np.log(2.0)))),
    "sqrt": (1, 1, _smooth(np.sqrt, lambda _x, y: 0.5 / y)),
    "rsqrt": (1, 1, _smooth(lambda x: 1.0 / np.sqrt(x), lambda x, y: -0.5 * y / x)),
    "tanh": (1, 1, _smooth(np.tanh, lambda _x, y: 1.0 - y * y)),
    "sigmoid": (1, 1, _smooth(_sigmoid, lambda _x, y: y * (1.0 - y))),
    "floor": (1, 1, _floor),
    "abs": (1, 1, _abs),
    "min": (2, None, _min),
    "max": (2, None, _max),
    "clamp": (3, 3, _clamp),
    "where": (3, 3, _where),
    "bit": (2, 2, _bit),
}
"""Per function: fewest and most arguments, and what it does with their values."""


def _meaningless(span: Span, reason: str) -> AttnError:
    return AttnError(Meaningless(span, reason))
