"""The problem that `explain`, `run` and `bench` are about: sizes, params, captured tensors.

What the command line and the input files leave open is made up, and said.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.backend.device import CPU, ITEM_BYTES, ArrayView, numpy_dtype, view
from attngen.binding import Binding, bind
from attngen.cli.errors import BadOption, InputMismatch, ParamWithoutValue, UnknownInput
from attngen.cli.guess import guess_sizes, make_tensor, shape_of
from attngen.cli.reads import find_read_outside, longest_inside
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.ir.attention import SIZES, Attention, Tensor
from attngen.ir.types import FLOATING, Element, ScalarType

__all__ = ["Input", "Problem", "as_element", "make_problem"]

Array: TypeAlias = Any

DEFAULT_DTYPE: Final = "bf16"
DEFAULT_HEAD_DIM: Final = 64
_OPERANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "q": ("B", "Hq", "Sq", "Dqk"),
    "k": ("B", "Hkv", "Skv", "Dqk"),
    "v": ("B", "Hkv", "Skv", "Dv"),
}


@final
@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """An array and where it comes from, in words."""

    array: Array
    origin: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One problem, complete and checked.

    `tensors` hold the captured tensors as they are passed to a kernel; `binding` has them with
    all their declared dimensions.
    """

    attention: Attention
    dtype: Element
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float]
    tensors: Mapping[str, Input]
    binding: Binding


def make_problem(
    attention: Attention,
    *,
    shape: Mapping[str, int],
    values: Mapping[str, Any],
    inputs: Mapping[str, Input],
    defaults: Mapping[str, int],
    seed: int,
) -> Problem:
    """Complete a problem.

    Where nothing decides the lengths, and with the usual ones an attending pair would read outside
    of a tensor, the longest are taken for which no read can; then there are more sequences, so that
    there are about as many tokens.

    shape:     sizes from the command line, by name.
    values:    numbers from `--set`: params, or tensors that hold one number or a list.
    inputs:    arrays from files by name; q, k and v as [B, H, S, D].
    defaults:  B, Hq, Sq for what nothing else decides.
    Errors:    A711 a size; A715 a param without a value; A716 a name that is not declared;
               A717 a tensor that cannot be made; A62x whatever does not fit the declaration.
    """
    _check_names(attention, shape, values, inputs)
    dtype = _choose_dtype(attention, inputs)
    params = _choose_params(attention, values, inputs)
    decided = _decide_sizes(attention, shape, inputs)

    def complete(defaults: Mapping[str, int]) -> Problem:
        sizes = _complete_sizes(decided, defaults)
        sizes |= _sizes_of_tensors(attention, sizes, values, inputs)
        sizes |= guess_sizes(attention, sizes, params)
        rng = np.random.default_rng(seed)
        tensors = {
            tensor.name: _choose_tensor(attention, tensor, sizes, values, inputs, rng)
            for tensor in attention.tensors
        }
        return _bound(attention, dtype, sizes, params, tensors)

    usual = complete(defaults)
    is_open = decided.keys().isdisjoint({"Sq", "Skv"})
    if not is_open or find_read_outside(attention, usual.binding) is None:
        return usual
    tokens = longest_inside(attention, usual.sizes, params)
    if tokens is None:
        return usual
    batch = max(1, defaults["B"] * defaults["Sq"] // tokens)
    return complete({**defaults, "B": batch, "Sq": tokens})


def _bound(
    attention: Attention,
    dtype: Element,
    sizes: Mapping[str, int],
    params: Mapping[str, bool | int | float],
    tensors: Mapping[str, Input],
) -> Problem:
    q, k, v = (_stand_in(dtype, tuple(sizes[n] for n in _OPERANDS[name])) for name in "qkv")
    views = {name: view(given.array, name) for name, given in tensors.items()}
    binding = bind(attention, q, k, v, views, params)
    return Problem(attention, dtype, dict(binding.sizes), dict(binding.params), tensors, binding)


def _stand_in(dtype: Element, shape: tuple[int, ...]) -> ArrayView:
    """A view that has a shape and no memory."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return ArrayView(0, shape, strides, dtype.name, CPU, None)


# ---- names ---------------------------------------------------------------------------------


def _check_names(
    attention: Attention,
    shape: Mapping[str, int],
    values: Mapping[str, Any],
    inputs: Mapping[str, Input],
) -> None:
    params = [param.name for param in attention.params]
    captured = [tensor.name for tensor in attention.tensors]
    errors: list[Diagnostic] = []
    sizes = [*SIZES, *attention.named_sizes]
    errors += [_unknown("--shape", attention, "size", n, sizes) for n in shape if n not in sizes]
    known = [*params, *captured]
    errors += [_unknown("--set", attention, "param", n, known) for n in values if n not in known]
    known = ["q", "k", "v", *captured, *params]
    for name, given in inputs.items():
        if name not in known:
            errors.append(_unknown(given.origin, attention, "input", name, known))
        elif name in values:
            problem = "is given in a file as well"
            errors.append(BadOption(None, "--set", f"{name}=…", problem))
    if errors:
        raise AttnError(*errors)


def _unknown(
    where: str, attention: Attention, kind: str, name: str, known: list[str]
) -> UnknownInput:
    closest = difflib.get_close_matches(name, known, n=1)
    takes = ", ".join(known) or "none"
    return UnknownInput(
        None, where, attention.name, kind, name, takes, closest[0] if closest else None
    )


# ---- dtype and sizes -----------------------------------------------------------------------


def _choose_dtype(attention: Attention, inputs: Mapping[str, Input]) -> Element:
    """The declared one, else that of the first operand from a file, else the default."""
    if attention.dtype is not None:
        return attention.dtype
    for name in _OPERANDS:
        if name in inputs:
            found = _element_name(inputs[name].array.dtype)
            if found in FLOATING:
                return FLOATING[found]
    return FLOATING[DEFAULT_DTYPE]


def _element_name(dtype: np.dtype[Any]) -> str:
    names = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    return names.get(dtype.name, dtype.name)


def _decide_sizes(
    attention: Attention, shape: Mapping[str, int], inputs: Mapping[str, Input]
) -> dict[str, int]:
    """Sizes that are declared, asked for, or those of the arrays."""
    sizes = dict(shape)
    origin = dict.fromkeys(shape, "--shape")
    declared = {
        "Hq": attention.heads_q, "Hkv": attention.heads_kv,
        "Dqk": attention.head_dim_qk, "Dv": attention.head_dim_v,
    }  # fmt: skip
    for name, value in declared.items():
        if value is None:
            continue
        if sizes.setdefault(name, value) != value:
            problem = f"`{attention.name}` has {name} = {value}"
            raise AttnError(BadOption(None, "--shape", f"{name}={sizes[name]}", problem))
        origin[name] = f"`{attention.name}`"
    for argument, names in _OPERANDS.items():
        if argument not in inputs:
            continue
        given = inputs[argument]
        if len(given.array.shape) != 4:
            problem = f"has shape {given.array.shape}"
            raise AttnError(InputMismatch(None, argument, given.origin, problem, "four dimensions"))
        for name, size in zip(names, given.array.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                problem = f"has {name} = {size}"
                expected = f"{name} = {sizes[name]}, as {origin[name]} has"
                raise AttnError(InputMismatch(None, argument, given.origin, problem, expected))
            origin.setdefault(name, f"`{argument}`")
    for tensor in attention.tensors:
        if tensor.name in inputs:
            _take_sizes(tensor, inputs[tensor.name].array.shape, sizes)
    return sizes


def _take_sizes(tensor: Tensor, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Sizes that an array of a captured tensor shows, where nothing else has decided them."""
    for dim, size in zip(tensor.dims[len(tensor.dims) - len(shape) :], shape, strict=False):
        if isinstance(dim.size, str) and not dim.optional:
            sizes.setdefault(dim.size, size)


def _complete_sizes(decided: Mapping[str, int], defaults: Mapping[str, int]) -> dict[str, int]:
    """B, Hq, Hkv, Sq, Skv, Dqk, Dv, and whatever else is decided."""
    sizes = dict(decided)
    sizes.setdefault("B", defaults["B"])
    if "Hq" not in sizes and "Hkv" not in sizes:
        sizes["Hq"] = defaults["Hq"]
        sizes["Hkv"] = max(1, defaults["Hq"] // 2)
    sizes.setdefault("Hq", sizes.get("Hkv", 1))
    sizes.setdefault("Hkv", sizes["Hq"])
    sizes.setdefault("Sq", sizes.get("Skv", defaults["Sq"]))
    sizes.setdefault("Skv", sizes["Sq"])
    for name, other in (("Dqk", "Dv"), ("Dv", "Dqk")):
        sizes.setdefault(name, sizes.get(other, DEFAULT_HEAD_DIM))
    return sizes


def _sizes_of_tensors(
    attention: Attention,
    sizes: Mapping[str, int],
    values: Mapping[str, Any],
    inputs: Mapping[str, Input],
) -> dict[str, int]:
    """Sizes with names of their own, as far as given tensors decide them."""
    found = dict(sizes)
    for tensor in attention.tensors:
        if tensor.name in inputs:
            _take_sizes(tensor, inputs[tensor.name].array.shape, found)
        elif isinstance(values.get(tensor.name), tuple) and len(tensor.dims) == 1:
            _take_sizes(tensor, (len(values[tensor.name]),), found)
    return found


# ---- params --------------------------------------------------------------------------------


def _choose_params(
    attention: Attention, values: Mapping[str, Any], inputs: Mapping[str, Input]
) -> dict[str, bool | int | float]:
    params: dict[str, bool | int | float] = {}
    errors: list[Diagnostic] = []
    for param in attention.params:
        if param.name in values:
            value = values[param.name]
            if isinstance(value, tuple):
                shown = ",".join(map(str, value))
                problem = f"`{param.name}` is a param, which is one number"
                errors.append(BadOption(None, "--set", f"{param.name}={shown}", problem))
                continue
            params[param.name] = _converted(value, param.type)
        elif param.name in inputs:
            given = inputs[param.name]
            if given.array.size != 1:
                problem = f"has shape {given.array.shape}"
                errors.append(
                    InputMismatch(param.span, param.name, given.origin, problem, "one number")
                )
                continue
            params[param.name] = _converted(given.array.reshape(()).item(), param.type)
        elif param.default is not None:
            params[param.name] = param.default
        else:
            errors.append(ParamWithoutValue(param.span, attention.name, param.name))
    if errors:
        raise AttnError(*errors)
    return params


def _converted(value: Any, wanted: ScalarType) -> Any:
    """0 and 1 are truth values as well, and an integer is a float."""
    if wanted is ScalarType.BOOL and not isinstance(value, bool) and value in (0, 1):
        return bool(value)
    if wanted is ScalarType.FLOAT and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


# ---- captured tensors ----------------------------------------------------------------------


def _choose_tensor(
    attention: Attention,
    tensor: Tensor,
    sizes: Mapping[str, int],
    values: Mapping[str, Any],
    inputs: Mapping[str, Input],
    rng: np.random.Generator,
) -> Input:
    if tensor.name in inputs:
        given = inputs[tensor.name]
        return Input(as_element(given, tensor.name, tensor.element), given.origin)
    if tensor.name in values:
        value = values[tensor.name]
        shape = shape_of(tensor, sizes)
        if isinstance(value, tuple) and shape != (len(value),):
            shown = ",".join(map(str, value))
            problem = f"`{tensor.name}` has shape {shape}"
            advice = f"give one number for all of it, or --input {tensor.name}={tensor.name}.npy"
            raise AttnError(BadOption(None, "--set", f"{tensor.name}={shown}", problem, advice))
        array = np.broadcast_to(np.asarray(value), shape)
        given = Input(array, "--set")
        return Input(np.ascontiguousarray(as_element(given, tensor.name, tensor.element)), "--set")
    array, words = make_tensor(attention, tensor, sizes, rng)
    return Input(array, f"made: {words}")


def as_element(given: Input, name: str, element: Element) -> Array:
    """An array of a file in the declared element type; nothing but rounding may be lost.

    Errors:  A718 when the values are of another kind or do not fit.
    """
    array = given.array
    wanted = numpy_dtype(element.name)
    if array.dtype == wanted:
        return array
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and element.name == "bf16":
        return array.view(wanted)  # how `numpy.save` writes bfloat16
    kind = array.dtype.kind if array.dtype.kind in "biuf" else "f"
    if array.dtype.kind not in "biuf" and _element_name(array.dtype) not in ITEM_BYTES:
        raise _mismatch(given, name, f"holds {array.dtype}", f"{element.name} or a number type")
    match element.scalar:
        case ScalarType.BOOL if kind in "iu" and np.isin(array, (0, 1)).all():
            return array.astype(wanted)
        case ScalarType.INT if kind in "biu":
            _check_range(given, name, element)
            return array.astype(wanted)
        case ScalarType.FLOAT if kind in "fiu":
            with np.errstate(over="ignore"):
                return array.astype(wanted)
        case _:
            raise _mismatch(given, name, f"holds {_element_name(array.dtype)}", element.name)


def _check_range(given: Input, name: str, element: Element) -> None:
    array = given.array
    if array.size and not element.low <= int(array.min()) <= int(array.max()) <= element.high:
        worst = max((int(array.min()), int(array.max())), key=lambda n: abs(n))
        raise _mismatch(given, name, f"holds {worst}", f"{element.low} to {element.high}")


def _mismatch(given: Input, name: str, problem: str, expected: str) -> AttnError:
    return AttnError(InputMismatch(None, name, given.origin, problem, expected))
