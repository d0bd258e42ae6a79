"""The arrays that a Python function captures, and what they are called there.

A PyTorch tensor announces by itself what is done to it.  An array of another library does not,
so the function is traced as a copy of itself, in which something else stands for the array.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any, Final, final

from attngen.backend.device import ITEM_BYTES
from attngen.frontend.elaborate import reserved_meaning
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "Captured", "element_of", "free_name", "is_array", "is_filled", "is_torch", "name_arrays",
    "read_shape", "scalar_of", "with_stand_ins",
]  # fmt: skip

_ELEMENT: Final = {"float32": "float", "float16": "fp16", "bfloat16": "bf16"}
"""What the language calls an element type, where its name differs."""

_WORDS: Final = frozenset(
    {"and", "or", "not", "true", "false", "inf", "nan"}
    | {"out", "layout", "check", "return_lse", "q_range", "kv_range", "k", "v"}
    | {"qk_scale", "qk_sink", "erf", "erf_of_size", "erf_rational", "erf_signed"}
)
"""Words of the language, arguments that every call of a kernel has, and what `write.py` adds."""

MAX_LOOKED_AT: Final = 1000
"""Values that are looked at for the name of an array; a method may belong to a large model."""


@final
@record(eq=False)
class Captured:
    """A captured array; one without dimensions is read as one of one element.

    `element` is None for elements that no kernel reads.
    """

    name: str
    element: str | None
    shape: tuple[int, ...]
    array: Any


def is_torch(value: object) -> bool:
    """Whether a value is a tensor of PyTorch, whose functions tell what is done to it."""
    return hasattr(type(value), "__torch_function__") and hasattr(type(value), "data_ptr")


def is_array(value: object) -> bool:
    """Whether a value is an array of any library; a number of NumPy is none."""
    kind = type(value)
    has_memory = hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")
    return is_torch(value) or (has_memory and hasattr(kind, "dtype"))


def element_of(array: Any) -> str | None:
    """The element type in the language's word; None where there is none."""
    theirs = str(array.dtype).removeprefix("torch.")
    ours = _ELEMENT.get(theirs, theirs)
    return ours if theirs in _ELEMENT or theirs in ITEM_BYTES else None


def read_shape(array: Any) -> tuple[int, ...]:
    return tuple(map(int, array.shape))


def scalar_of(element: str) -> ScalarType:
    """The type of an expression that reads such an element."""
    if element == "bool":
        return ScalarType.BOOL
    return ScalarType.FLOAT if element in _ELEMENT.values() else ScalarType.INT


def free_name(wanted: str) -> str:
    """A name of Python as one that the language leaves free."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", wanted)
    if name in _WORDS or reserved_meaning(name) is not None or not re.match("[A-Za-z_]", name):
        return f"my_{name}"
    return name


# ---- what a function captures ------------------------------------------------------------


def name_arrays(function: Any) -> dict[int, str]:
    """The arrays that a function can reach by a name, by their id; near ones first."""
    names: dict[int, str] = {}
    seen: set[int] = set()
    queue = deque([("captured", function)])
    while queue and len(seen) < MAX_LOOKED_AT:
        name, value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_array(value):
            names[id(value)] = free_name(name)
        else:
            queue += _parts(name, value)
    return names


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a function, method, `partial` or container holds, with the name it has there."""
    if isinstance(value, FunctionType):
        yield from _variables(value).items()
    elif isinstance(value, functools.partial):
        parameters = getattr(value.func, "__code__", None)
        names = parameters.co_varnames if parameters else ()
        yield name, value.func
        yield from zip(names, value.args, strict=False)
        yield from value.keywords.items()
    elif isinstance(value, list | tuple):
        yield from ((name, each) for each in value)
    elif isinstance(value, dict):
        yield from ((key, each) for key, each in value.items() if isinstance(key, str))
    elif hasattr(value, "__func__"):
        yield name, value.__func__
        yield "self", value.__self__
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not _is_module(value):
        yield from vars(value).items()


def _is_module(value: object) -> bool:
    return type(value).__name__ == "module"


def _variables(function: FunctionType) -> dict[str, Any]:
    """Globals that the code mentions, then what it closes over, then its defaults."""
    code = function.__code__
    found = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if is_filled(cell):
            found[name] = cell.cell_contents
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    found.update(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    found.update(function.__kwdefaults__ or {})
    return found


def is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# ---- stand-ins ---------------------------------------------------------------------------


def with_stand_ins(function: Any, stand_in: Callable[[Any], Any]) -> Any:
    """A copy of a function in which every array but PyTorch's is replaced.

    Functions, `partial`s, lists and tuples that it captures are copied where they hold one.
    """
    return _StandIns(stand_in).replace(function)


@final
class _StandIns:
    def __init__(self, stand_in: Callable[[Any], Any]) -> None:
        self._stand_in = stand_in
        self._done: dict[int, Any] = {}

    def replace(self, value: Any) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        self._done[id(value)] = value  # a function may capture itself
        replaced = self._copy(value)
        self._done[id(value)] = replaced
        return replaced

    def _copy(self, value: Any) -> Any:
        if is_array(value):
            return value if is_torch(value) else self._stand_in(value)
        if isinstance(value, FunctionType):
            return self._copy_function(value)
        if isinstance(value, functools.partial):
            function, arguments = self.replace(value.func), self.replace(value.args)
            keywords = self._copy_mapping(value.keywords)
            if function is value.func and arguments is value.args and keywords is value.keywords:
                return value
            return functools.partial(function, *arguments, **keywords)
        if type(value) in (list, tuple):
            parts = [self.replace(each) for each in value]
            same = all(a is b for a, b in zip(parts, value, strict=True))
            return value if same else type(value)(parts)
        return value

    def _copy_function(self, function: FunctionType) -> FunctionType:
        new = self._copy_mapping(_variables(function))
        if all(value is new[name] for name, value in _variables(function).items()):
            return function
        code, cells = function.__code__, function.__closure__ or ()
        closure = tuple(
            CellType(new[name]) if name in new and is_filled(cell) else cell
            for name, cell in zip(code.co_freevars, cells, strict=True)
        )
        used = {n: new[n] for n in code.co_names if n in function.__globals__ and n in new}
        names = {**function.__globals__, **used}
        copy = FunctionType(code, names, function.__name__, None, closure or None)
        copy.__defaults__ = self.replace(function.__defaults__)
        copy.__kwdefaults__ = self._copy_mapping(function.__kwdefaults__ or {})
        return copy

    def _copy_mapping(self, values: Mapping[str, Any]) -> Any:
        new = {name: self.replace(value) for name, value in values.items()}
        return values if all(new[name] is values[name] for name in new) else new
