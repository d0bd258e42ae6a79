"""What the caller passed, checked against what the attention block declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, final

import numpy as np

from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.span import Span
from attngen.frontend import ast
from attngen.oracle import values
from attngen.oracle.errors import (
    MissingArgument,
    SurplusArgument,
    WrongElement,
    WrongHeads,
    WrongShape,
    WrongValue,
    closest,
)
from attngen.oracle.evaluate import Scope, evaluate
from attngen.oracle.values import Array, Value

__all__ = ["Problem", "Scalar", "bind_problem", "element_name"]

Scalar: TypeAlias = bool | int | float
Statement = TypeVar("Statement", bound=ast.Statement)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One call: the block, its sizes (`Sq` and `Skv` are those of the buffers) and its values.

    `tensors` have their declared shapes; `names` are consts, params and sizes that tensor
    shapes bind.
    """

    attention: ast.Attention
    definitions: Mapping[str, ast.Definition]
    sizes: Mapping[str, int]
    names: Mapping[str, Value]
    tensors: Mapping[str, Array]

    def statements(self, kind: type[Statement]) -> tuple[Statement, ...]:
        """The statements of one kind, in the order of the text."""
        return tuple(s for s in self.attention.statements if isinstance(s, kind))


def bind_problem(
    attention: ast.Attention,
    definitions: Mapping[str, ast.Definition],
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    tensors: Mapping[str, Any],
    params: Mapping[str, Scalar],
    consts: Mapping[str, Scalar],
) -> Problem:
    """Check the arguments of a call and give every declared name its value.

    Errors:  A650 to A655.
    """
    sizes = _sizes(shapes)
    names = _consts(attention, definitions, sizes, consts)
    _check_dims(attention, definitions, sizes, names)
    names.update(_params(attention, definitions, sizes, names, params))
    arrays, dims = _tensors(attention, sizes, tensors)
    names.update({name: Value(np.int64(size)) for name, size in dims.items()})
    return Problem(attention, definitions, sizes, names, arrays)


# ---- query, key, value -------------------------------------------------------------------


def _sizes(shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> dict[str, int]:
    q, k, v = shapes
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != 4:
            raise _shape(None, name, shape, "(batch, heads, length, head dim)")
    B, Hq, Sq, Dqk = q
    _, Hkv, Skv, _ = k
    Dv = v[3]
    if k != (B, Hkv, Skv, Dqk):
        raise _shape(None, "k", k, f"({B}, heads, length, {Dqk})")
    if v != (B, Hkv, Skv, Dv):
        raise _shape(None, "v", v, f"({B}, {Hkv}, {Skv}, head dim)")
    if (Hkv == 0 and Hq != 0) or (Hkv and Hq % Hkv):
        raise AttnError(WrongHeads(None, Hq, Hkv))
    return {"B": B, "Hq": Hq, "Hkv": Hkv, "Sq": Sq, "Skv": Skv, "Dqk": Dqk, "Dv": Dv}


def _check_dims(
    attention: ast.Attention,
    definitions: Mapping[str, ast.Definition],
    sizes: Mapping[str, int],
    names: Mapping[str, Value],
) -> None:
    """`head_dim` and `heads`, where the block gives them."""
    scope = Scope({}, definitions, dict(names))
    for statement in attention.statements:
        match statement:
            case ast.HeadDim(qk=qk, v=v):
                pairs = (("Dqk", qk), ("Dv", v))
            case ast.Heads(q=q, kv=kv):
                pairs = (("Hq", q), ("Hkv", kv))
            case _:
                continue
        for size, expr in pairs:
            value = evaluate(expr, scope)
            declared = int(_of_type("size", size, value, "int", expr.span).data)
            if declared != sizes[size]:
                has, expected = str(sizes[size]), str(declared)
                raise AttnError(WrongValue(expr.span, "size", size, has, expected))


# ---- consts and params -------------------------------------------------------------------


def _consts(
    attention: ast.Attention,
    definitions: Mapping[str, ast.Definition],
    sizes: Mapping[str, int],
    given: Mapping[str, Scalar],
) -> dict[str, Value]:
    """Every const, from the caller or from its own expression over the consts above it."""
    declared = {s.name: s for s in attention.statements if isinstance(s, ast.Const)}
    _no_surplus("const", given, declared, attention)
    compile_time = {name: Value(np.int64(sizes[name])) for name in ("Dqk", "Dv")}
    names: dict[str, Value] = {}
    for name, const in declared.items():
        if name in given:
            value = values.constant(np.asarray(given[name])[()].item())
        elif const.value is not None:
            value = evaluate(const.value, Scope(compile_time, definitions, dict(names)))
        else:
            raise AttnError(MissingArgument(const.name_span, "const", name))
        names[name] = _of_type("const", name, value, const.type or value.kind, const.name_span)
    return names


def _params(
    attention: ast.Attention,
    definitions: Mapping[str, ast.Definition],
    sizes: Mapping[str, int],
    consts: Mapping[str, Value],
    given: Mapping[str, Scalar],
) -> dict[str, Value]:
    declared = {s.name: s for s in attention.statements if isinstance(s, ast.Param)}
    _no_surplus("param", given, declared, attention)
    shared = {name: Value(np.int64(size)) for name, size in sizes.items()}
    names: dict[str, Value] = {}
    for name, param in declared.items():
        scope = Scope(shared, definitions, dict(consts))
        if name in given:
            value = values.constant(np.asarray(given[name])[()].item())
        elif param.default is not None:
            value = evaluate(param.default, scope)
        else:
            raise AttnError(MissingArgument(param.name_span, "param", name))
        names[name] = _of_type("param", name, value, param.type, param.name_span)
        if param.range is not None:
            scope.names[name] = names[name]
            if not evaluate(param.range, scope).data:
                text = param.range.span.text
                raise AttnError(
                    WrongValue(param.range.span, "param", name, str(names[name].data), text)
                )
    return names


def _of_type(kind: str, name: str, value: Value, type_: str, span: Span) -> Value:
    """A const or param as its declared type; a float is rounded to float32, as a kernel gets it."""
    values.raise_faults(value, np.bool_(True), {})
    if type_ == "float" and value.kind != "bool":
        return values.constant(float(value.data))
    if value.kind != type_:
        raise AttnError(WrongValue(span, kind, name, str(value.data), f"of type {type_}"))
    return Value(value.data)


def _no_surplus(
    kind: str, given: Mapping[str, Any], declared: Mapping[str, Any], attention: ast.Attention
) -> None:
    for name in given:
        if name not in declared:
            guess = closest(name, declared)
            raise AttnError(SurplusArgument(attention.name_span, kind, name, attention.name, guess))


# ---- captured tensors --------------------------------------------------------------------

_KINDS: Final[Mapping[str, str]] = {"bool": "b", "int": "i", "uint": "i", "float": "f"}


def element_name(dtype: np.dtype[Any]) -> str:
    """An element type in the words of the language: `bool`, `int32`, `fp16`, `bf16`, `fp32`."""
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
    return short.get(dtype.name, dtype.name)


def _kind(element: str) -> str:
    """`b`, `i` or `f` for an element type in the words of the language."""
    word = element.rstrip("0123456789")
    return _KINDS.get(word, "f")


def _tensors(
    attention: ast.Attention, sizes: Mapping[str, int], given: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, int]]:
    """Each tensor broadcast to its declared shape, and the sizes that the shapes bind."""
    declared = {s.name: s for s in attention.statements if isinstance(s, ast.Tensor)}
    _no_surplus("tensor", given, declared, attention)
    arrays: dict[str, Array] = {}
    for name, tensor in declared.items():
        if name not in given:
            raise AttnError(MissingArgument(tensor.name_span, "tensor", name))
        arrays[name] = _of_rank(tensor, np.asarray(given[name]))
    dims = _bind_dims(declared, arrays, sizes)
    known = {**sizes, **dims}
    for name, tensor in declared.items():
        expected = tuple(known[d.size] if isinstance(d.size, str) else d.size for d in tensor.dims)
        fits = all(
            n == e or (n == 1 and d.optional)
            for n, e, d in zip(arrays[name].shape, expected, tensor.dims, strict=True)
        )
        if not fits:
            wanted = ", ".join(
                f"{d.size}{'?' if d.optional else ''}" + ("" if d.size == e else f" = {e}")
                for d, e in zip(tensor.dims, expected, strict=True)
            )
            raise _shape(tensor.span, name, np.shape(given[name]), f"[{wanted}]")
        arrays[name] = np.broadcast_to(arrays[name], expected)
    return arrays, dims


def _of_rank(tensor: ast.Tensor, array: Array) -> Array:
    """The array with all declared dimensions: those missing on the left have size 1."""
    missing = len(tensor.dims) - array.ndim
    if missing < 0 or not all(d.optional for d in tensor.dims[:missing]):
        wanted = ", ".join(f"{d.size}{'?' if d.optional else ''}" for d in tensor.dims)
        raise _shape(tensor.span, tensor.name, array.shape, f"[{wanted}]")
    element = element_name(array.dtype)
    if _kind(element) != _kind(tensor.dtype) or element == "uint64":
        raise AttnError(WrongElement(tensor.span, tensor.name, element, tensor.dtype))
    return array.reshape((1,) * missing + array.shape)


def _bind_dims(
    declared: Mapping[str, ast.Tensor], arrays: Mapping[str, Array], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Sizes of the names that only shapes bind; a `?` dimension of size 1 says nothing."""
    dims: dict[str, int] = {}
    silent: dict[str, int] = {}
    for name, tensor in declared.items():
        for dim, size in zip(tensor.dims, arrays[name].shape, strict=True):
            if isinstance(dim.size, int) or dim.size in sizes:
                continue
            target = silent if dim.optional and size == 1 else dims
            target.setdefault(dim.size, size)
    return {**silent, **dims}


def _shape(span: Span | None, name: str, shape: tuple[int, ...], expected: str) -> AttnError:
    return AttnError(WrongShape(span, name, str(tuple(shape)), expected))
