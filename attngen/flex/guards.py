"""Whether a Python function would be traced to the same text again.

A trace is decided by what the function reads: its code, and what that reaches by names,
attributes and elements.  `make_guard` walks over all of it once, and gives a check that walks over
the same places of this function, or of a new closure of the same code:

    a number, a word        equal, and of one type
    a captured array        of one type, dtype, shape and device; its contents are not looked at
    a function              the same code, and the same behind its cells, defaults and globals
    a list, tuple, dict     as long, and the same in every place
    an object               the same class, and the same behind every attribute that is named
    a module                the same behind every attribute that is read
    a `Function.apply`      of the same subclass of `torch.autograd.Function`, the same forward

What is none of these, and code that does more than compute (writes to a global, imports, catches
an exception), is not guarded, and then a function is traced at every call.  Lists are lists of
what is known, so that what Python gets in another version is not guarded either.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.flex.captured import is_array, is_filled, is_torch
from attngen.flex.functions import is_known
from attngen.record import record

__all__ = ["Guard", "UnguardedError", "make_guard"]

Match: TypeAlias = Callable[[Any, list[Any]], bool]
"""Whether a value is as it was; puts the captured arrays of the value into the list, in order."""
Chain: TypeAlias = tuple[str, ...]
"""The attributes that are read of a variable one behind the other: `("nn", "functional")`."""

MAX_PLACES: Final = 400
"""Places of one guard: beyond it a check is no cheaper than a trace."""

_MISSING: Final = object()
_WRAPPED: Final = frozenset({"__wrapped__"})
"""What `functools.wraps` notes at a function; nobody reads it."""

_STEPS: Final = frozenset(
    {
        "CACHE", "CALL", "CALL_FUNCTION_EX", "CALL_INTRINSIC_1", "CALL_KW", "COMPARE_OP",
        "CONTAINS_OP", "CONVERT_VALUE", "COPY", "COPY_FREE_VARS", "DICT_MERGE", "DICT_UPDATE",
        "END_FOR", "EXTENDED_ARG", "FORMAT_SIMPLE", "FORMAT_VALUE", "FORMAT_WITH_SPEC",
        "FOR_ITER", "GET_ITER", "GET_LEN", "GET_YIELD_FROM_ITER", "IS_OP", "KW_NAMES",
        "LIST_APPEND", "LIST_EXTEND", "LIST_TO_TUPLE", "LOAD_ASSERTION_ERROR", "LOAD_ATTR",
        "LOAD_CLOSURE", "LOAD_COMMON_CONSTANT", "LOAD_CONST", "LOAD_CONST_IMMORTAL",
        "LOAD_CONST_MORTAL", "LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_AND_CLEAR",
        "LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_FAST_CHECK",
        "LOAD_FAST_LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD", "LOAD_SMALL_INT", "MAKE_CELL",
        "MAKE_FUNCTION", "MAP_ADD", "NOP", "NOT_TAKEN", "POP_ITER", "POP_TOP", "PRECALL",
        "PUSH_NULL", "RAISE_VARARGS", "RERAISE", "RESUME", "RETURN_CONST", "RETURN_GENERATOR",
        "RETURN_VALUE", "SEND", "SET_ADD", "SET_FUNCTION_ATTRIBUTE", "SET_UPDATE",
        "STORE_DEREF", "STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_MAYBE_NULL",
        "STORE_FAST_STORE_FAST", "STORE_SUBSCR", "SWAP", "TO_BOOL", "UNPACK_EX",
        "UNPACK_SEQUENCE", "YIELD_VALUE",
    }
)  # fmt: skip
_KINDS_OF_STEPS: Final = ("BINARY_", "BUILD_", "JUMP_", "POP_JUMP_", "UNARY_")
"""What code may do.  Not: write to names and attributes, import, catch, define a class."""

_BUILTINS: Final = (
    abs, all, any, bool, complex, dict, divmod, enumerate, filter, float, frozenset, int,
    isinstance, iter, len, list, map, max, min, next, pow, range, reversed, round, set, slice,
    sorted, str, sum, tuple, zip, NotImplemented, AssertionError, ValueError, TypeError,
    NotImplementedError, RuntimeError, IndexError,
)  # fmt: skip
"""Functions and classes of Python whose result follows from their arguments."""

_OPERATORS: Final = tuple(
    getattr(operator, name)
    for name in (
        "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "index", "inv", "invert",
        "le", "lshift", "lt", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift",
        "sub", "truediv", "truth", "xor",
    )
)  # fmt: skip

_PURE: Final = {id(each): each for each in (*_BUILTINS, *_OPERATORS)}

_HARMLESS: Final = frozenset(
    {
        "__annotations__", "__class_getitem__", "__copy__", "__dataclass_fields__",
        "__dataclass_params__", "__deepcopy__", "__del__", "__delattr__", "__dict__", "__doc__",
        "__firstlineno__", "__getstate__", "__init__", "__init_subclass__", "__match_args__",
        "__module__", "__new__", "__orig_bases__", "__parameters__", "__post_init__",
        "__qualname__", "__reduce__", "__reduce_ex__", "__replace__", "__setattr__",
        "__setstate__", "__slots__", "__static_attributes__", "__subclasshook__",
        "__type_params__", "__weakref__",
    }
)  # fmt: skip
"""What a class may define without changing what is read of its objects."""
_OF_DATACLASSES: Final = frozenset({"__eq__", "__hash__", "__repr__"})
"""What a dataclass writes itself; then it reads the fields."""


class UnguardedError(Exception):
    """A function that has to be traced at every call; the text says why."""


@final
@record(eq=False)
class Guard:
    """A check of a function, and which of the arrays that it finds are one object."""

    match: Match
    same: tuple[int, ...]

    def arrays_of(self, function: Any) -> list[Any] | None:
        """The captured arrays, where the function is as it was; else None."""
        found: list[Any] = []
        try:
            if not self.match(function, found):
                return None
        except Exception:  # an empty cell, an object's own error: the trace meets it again
            return None
        return found if len(found) < 2 or _same_objects(found) == self.same else None


def make_guard(function: Any) -> Guard:
    """A check for a function that takes symbols, or None; made before it is traced.

    Errors:  UnguardedError.
    """
    names: frozenset[str] = frozenset()
    while True:
        builder = _Builder(names)
        match = builder.visit(function, ((),))
        if not builder.has_objects or builder.attributes <= names:
            return Guard(match, _same_objects(builder.arrays))
        names |= builder.attributes


def _same_objects(values: Sequence[Any]) -> tuple[int, ...]:
    """For each value the first place at which the same object stands."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(value), i) for i, value in enumerate(values)])


# ---- code ----------------------------------------------------------------------------------------


@final
@record(eq=False)
class _Reads:
    """What code reads by name, that of functions inside of it included."""

    code: CodeType  # lives as long as what is known of it
    globals: Mapping[str, tuple[Chain, ...]]
    free: Mapping[str, tuple[Chain, ...]]
    attributes: frozenset[str]


_reads: dict[int, _Reads] = {}
MOST_CODES: Final = 1024


def _reads_of(code: CodeType) -> _Reads:
    """Errors:  UnguardedError."""
    found = _reads.get(id(code))
    if found is None:
        if len(_reads) >= MOST_CODES:
            _reads.clear()
        found = _reads[id(code)] = _find_reads(code)
    return found


def _find_reads(code: CodeType) -> _Reads:
    names: dict[str, dict[str, set[Chain]]] = {"LOAD_GLOBAL": {}, "LOAD_DEREF": {}}
    attributes: set[str] = set()
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("EXTENDED_ARG", "CACHE")]
    for at, step in enumerate(steps):
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
            raise UnguardedError(f"`{code.co_name}` writes to `{step.argval}`")
        if step.opname not in _STEPS and not step.opname.startswith(_KINDS_OF_STEPS):
            raise UnguardedError(f"`{code.co_name}` has the instruction {step.opname}")
        if step.opname in _ATTRIBUTES:
            if step.argval.startswith("__") or step.argval == "gi_frame":
                raise UnguardedError(f"`{code.co_name}` reads `{step.argval}`")
            attributes.add(step.argval)
        if step.opname in names:
            chain = _chain(steps, at + 1)
            names[step.opname].setdefault(step.argval, set()).add(chain)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            reads = _reads_of(inner)
            attributes |= reads.attributes
            for kind, more in (("LOAD_GLOBAL", reads.globals), ("LOAD_DEREF", reads.free)):
                for name, chains in more.items():
                    names[kind].setdefault(name, set()).update(chains)
    free = {n: tuple(sorted(c)) for n, c in names["LOAD_DEREF"].items() if n in code.co_freevars}
    read = {n: tuple(sorted(c)) for n, c in names["LOAD_GLOBAL"].items()}
    return _Reads(code, read, free, frozenset(attributes))


_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD")


def _chain(steps: Sequence[dis.Instruction], at: int) -> Chain:
    """The attributes that are read of what the instruction before `at` loads."""
    end = at
    while end < len(steps) and steps[end].opname in _ATTRIBUTES:
        end += 1
    return tuple(step.argval for step in steps[at:end])


# ---- values --------------------------------------------------------------------------------------


@final
class _Builder:
    """Walks over a function; `names` are the attributes that any code in it reads."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.attributes: set[str] = set()
        self.has_objects = False
        self.arrays: list[Any] = []
        self._count = 0
        self._inside: set[int] = set()
        self.depth = 0

    def visit(self, value: Any, chains: tuple[Chain, ...] = ((),)) -> Match:
        """The check of one value, of which these attributes are read; `()` where it is passed on.

        Errors:  UnguardedError.
        """
        self._count += 1
        if self._count > MAX_PLACES:
            raise UnguardedError("it reaches too much")
        if id(value) in self._inside:
            raise UnguardedError(f"it reaches a {type(value).__name__} that holds itself")
        self._inside.add(id(value))
        try:
            return self._visit(value, chains)
        finally:
            self._inside.discard(id(value))

    def _visit(self, value: Any, chains: tuple[Chain, ...]) -> Match:
        kind = type(value)
        if _is_identical(value):
            return _is(value)
        if kind in (int, str, bytes, range) or _is_plain(value):
            return _equals(value)
        if kind in (float, complex) or isinstance(value, np.floating):
            return _has_text_of(value)
        if is_array(value):
            return self._array(value)
        if kind is FunctionType:
            return self._function(value, chains)
        if kind is tuple or kind is list:
            return self._sequence(value)
        if kind is dict:
            return self._dict(value)
        if kind is functools.partial:
            return self._partial(value)
        if kind is MethodType:
            return self._method(value)
        if isinstance(value, ModuleType):
            return self._module(value, chains)
        return self._object(value)

    def _array(self, array: Any) -> Match:
        if self.depth and not is_torch(array):
            raise UnguardedError("an object or a dict holds an array that is not PyTorch's")
        self.arrays.append(array)
        kind, dtype, shape = type(array), array.dtype, tuple(array.shape)
        device = getattr(array, "device", None)

        def match(value: Any, found: list[Any]) -> bool:
            found.append(value)
            return (
                type(value) is kind
                and value.shape == shape
                and value.dtype == dtype
                and getattr(value, "device", None) == device
            )

        return match

    def _function(self, function: FunctionType, chains: tuple[Chain, ...]) -> Match:
        code = function.__code__
        reads = _reads_of(code)
        self.attributes |= reads.attributes
        if any(chains) or not vars(function).keys() <= _WRAPPED:
            raise UnguardedError(f"`{code.co_name}` has attributes")
        globals_match = self._globals(function, reads)
        cells = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if not is_filled(cell):
                raise UnguardedError(f"`{name}` has no value yet")
            cells.append(self.visit(cell.cell_contents, reads.free.get(name, ())))
        defaults = self.visit(function.__defaults__)
        options = self.visit(function.__kwdefaults__)

        def match(value: Any, found: list[Any]) -> bool:
            if type(value) is not FunctionType or value.__code__ is not code:
                return False
            if value.__dict__ and not value.__dict__.keys() <= _WRAPPED:
                return False
            if not globals_match(value.__globals__, found):
                return False
            if cells:
                for cell, matches in zip(value.__closure__ or (), cells, strict=True):
                    if not matches(cell.cell_contents, found):
                        return False
            return defaults(value.__defaults__, found) and options(value.__kwdefaults__, found)

        return match

    def _globals(self, function: FunctionType, reads: _Reads) -> Match:
        names, builtin_names = function.__globals__, vars(builtins)
        own = names.get("__builtins__", builtins)
        if own is not builtins and own is not builtin_names:
            raise UnguardedError(f"`{function.__name__}` has builtins of its own")
        same: list[tuple[str, Any]] = []
        others: list[tuple[str, Match]] = []
        absent: list[tuple[str, Match]] = []
        for name, chains in reads.globals.items():
            if name in names and _is_identical(names[name]):
                same.append((name, names[name]))
            elif name in names:
                others.append((name, self.visit(names[name], chains)))
            elif name in builtin_names:
                absent.append((name, self.visit(builtin_names[name], chains)))

        def match(names: Any, found: list[Any]) -> bool:
            for name, expected in same:
                if names.get(name, _MISSING) is not expected:
                    return False
            for name, matches in others:
                if not matches(names.get(name, _MISSING), found):
                    return False
            for name, matches in absent:
                if name in names or not matches(builtin_names.get(name, _MISSING), found):
                    return False
            return True

        return match

    def _sequence(self, values: Sequence[Any]) -> Match:
        kind, count, parts = type(values), len(values), [self.visit(each) for each in values]

        def match(value: Any, found: list[Any]) -> bool:
            if type(value) is not kind or len(value) != count:
                return False
            return _all_match(parts, value, found)

        return match

    def _dict(self, values: Mapping[Any, Any]) -> Match:
        if not all(type(key) in (str, int, bool) for key in values):
            raise UnguardedError("a dict has other keys than words and numbers")
        keys = list(values)
        parts = [self._behind(each) for each in values.values()]

        def match(value: Any, found: list[Any]) -> bool:
            if type(value) is not dict or list(value) != keys:
                return False
            return _all_match(parts, value.values(), found)

        return match

    def _partial(self, value: functools.partial[Any]) -> Match:
        if vars(value):
            raise UnguardedError("a `partial` has attributes")
        function, arguments = self.visit(value.func), self.visit(value.args)
        options = [(name, self.visit(each)) for name, each in value.keywords.items()]
        names = list(value.keywords)

        def match(value: Any, found: list[Any]) -> bool:
            return (
                type(value) is functools.partial
                and function(value.func, found)
                and arguments(value.args, found)
                and list(value.keywords) == names
                and all(matches(value.keywords[name], found) for name, matches in options)
            )

        return match

    def _method(self, value: MethodType) -> Match:
        if _is_applied_function(value):
            return self._applied_function(value)
        with _Depth(self):
            function, owner = self.visit(value.__func__), self.visit(value.__self__)

        def match(value: Any, found: list[Any]) -> bool:
            return (
                type(value) is MethodType
                and function(value.__func__, found)
                and owner(value.__self__, found)
            )

        return match

    def _applied_function(self, value: Any) -> Match:
        """`apply` of a class with a forward and a backward; the trace runs the forward."""
        owner: type = value.__self__
        apply = value.__func__
        parts: list[tuple[str, Match]] = []
        for name in _RUN_BY_APPLY:
            method = _find_in_class(owner, name)
            if not isinstance(method, staticmethod):
                raise UnguardedError(f"`{name}` of {owner.__name__} is no static method")
            function = method.__func__
            is_default = function.__module__ == _AUTOGRAD
            parts.append((name, _is(function) if is_default else self._behind(function)))

        def match(value: Any, found: list[Any]) -> bool:
            if type(value) is not MethodType or value.__func__ is not apply:
                return False
            if value.__self__ is not owner:
                return False
            for name, matches in parts:
                method = _find_in_class(owner, name)
                if not isinstance(method, staticmethod) or not matches(method.__func__, found):
                    return False
            return True

        return match

    def _module(self, module: ModuleType, chains: tuple[Chain, ...]) -> Match:
        if not all(chains) or not chains:
            raise UnguardedError(f"the module {module.__name__} is passed on")
        parts = []
        for name in sorted({chain[0] for chain in chains}):
            value = getattr(module, name, _MISSING)
            if value is _MISSING:
                raise UnguardedError(f"{module.__name__} has no `{name}`")
            behind = tuple(sorted({chain[1:] for chain in chains if chain[0] == name}))
            parts.append((name, self.visit(value, behind)))

        def match(value: Any, found: list[Any]) -> bool:
            if value is not module:
                return False
            return _attributes_match(parts, value, found)

        return match

    def _object(self, value: Any) -> Match:
        """An object of a class in Python, without operators; it may be called."""
        self.has_objects = True
        kind = type(value)
        _require_plain_class(kind)
        names = self._names | getattr(kind, "__dataclass_fields__", {}).keys()
        call = _find_in_class(kind, "__call__")
        methods = [] if call is None else [("__call__", self._behind(call))]
        others: list[tuple[str, Match]] = []
        for name in sorted(names):
            of_class = _find_in_class(kind, name)
            if type(of_class) is FunctionType:
                methods.append((name, self._behind(of_class)))
            elif hasattr(of_class, "__get__") and type(of_class) is not MemberDescriptorType:
                raise UnguardedError(f"`{name}` of a {kind.__name__} is computed")
            elif hasattr(value, name):
                others.append((name, self._behind(getattr(value, name))))
        hidden = frozenset(name for name, _ in methods)
        if not hidden.isdisjoint(getattr(value, "__dict__", ())):
            raise UnguardedError(f"a {kind.__name__} hides a method of its own")

        def match(value: Any, found: list[Any]) -> bool:
            if type(value) is not kind:
                return False
            if methods and not hidden.isdisjoint(getattr(value, "__dict__", ())):
                return False
            for name, matches in methods:
                if not matches(_find_in_class(kind, name), found):
                    return False
            return _attributes_match(others, value, found)

        return match

    def _behind(self, value: Any) -> Match:
        with _Depth(self):
            return self.visit(value)


def _all_match(parts: Sequence[Match], values: Iterable[Any], found: list[Any]) -> bool:
    for matches, value in zip(parts, values, strict=True):  # noqa: SIM110
        if not matches(value, found):
            return False
    return True


def _attributes_match(parts: Sequence[tuple[str, Match]], owner: Any, found: list[Any]) -> bool:
    for name, matches in parts:  # noqa: SIM110
        if not matches(getattr(owner, name, _MISSING), found):
            return False
    return True


@final
class _Depth:
    """While it lasts, arrays belong to an object, where nothing can stand for them."""

    def __init__(self, builder: _Builder) -> None:
        self._builder = builder

    def __enter__(self) -> None:
        self._builder.depth += 1

    def __exit__(self, *exception: object) -> None:
        self._builder.depth -= 1


_AUTOGRAD: Final = "torch.autograd.function"
_RUN_BY_APPLY: Final = ("forward", "setup_context")


def _is_applied_function(value: MethodType) -> bool:
    """Whether a method is `apply` of a subclass of `torch.autograd.Function`, as PyTorch has it."""
    if not isinstance(value.__self__, type):
        return False
    for base in value.__self__.__mro__:
        if base.__module__ == _AUTOGRAD and base.__name__ == "Function":
            apply = _find_in_class(base, "apply")
            return isinstance(apply, classmethod) and apply.__func__ is value.__func__
    return False


def _is_identical(value: Any) -> bool:
    """Whether a value can only be itself: then nothing behind it is looked at."""
    kind = type(value)
    if value is None or value is ... or kind is bool or id(value) in _PURE:
        return True
    if kind is BuiltinFunctionType and value.__self__ is math:
        return True
    return is_known(value)


def _is_plain(value: Any) -> bool:
    """Whether a value never changes, and equal ones do not differ."""
    kind = type(value)
    if isinstance(value, np.dtype | np.integer | np.bool_):
        return True
    return kind.__module__ == "torch" and kind.__name__ in ("Size", "device", "dtype")


def _is(expected: Any) -> Match:
    return lambda value, found: value is expected


def _equals(expected: Any) -> Match:
    kind = type(expected)
    return lambda value, found: type(value) is kind and bool(value == expected)


def _has_text_of(expected: Any) -> Match:
    """For floats: 0.0 is equal to -0.0, and NaN to nothing."""
    kind, text = type(expected), repr(expected)
    return lambda value, found: value is expected or (type(value) is kind and repr(value) == text)


def _find_in_class(kind: type, name: str) -> Any:
    """What a class has of a name, as it stands there; None for nothing."""
    for each in kind.__mro__:
        if name in each.__dict__:
            return each.__dict__[name]
    return None


def _require_plain_class(kind: type) -> None:
    """Errors:  UnguardedError for one that is not Python's, or defines what an operator does."""
    for each in kind.__mro__[:-1]:
        if type(each) is not type or not each.__flags__ & _IN_PYTHON:
            raise UnguardedError(f"a {kind.__name__} is not looked into")
        for name, value in vars(each).items():
            if not (name.startswith("__") and name.endswith("__")) or name in _HARMLESS:
                continue
            if name == "__call__" and type(value) is FunctionType:
                continue
            is_written = type(value) is FunctionType and "__dataclass_fields__" in vars(each)
            if name in _OF_DATACLASSES and (value is None or (is_written and _is_generated(value))):
                continue
            raise UnguardedError(f"a {kind.__name__} defines `{name}`")


_IN_PYTHON: Final = 1 << 9
"""The flag of classes that are made at run time."""


def _is_generated(function: FunctionType) -> bool:
    wrapped = getattr(function, "__wrapped__", function)  # by `recursive_repr`
    return isinstance(wrapped, FunctionType) and wrapped.__code__.co_filename == "<string>"
