"""Frozen dataclasses whose methods are not compiled anew for each class.

    @final
    @record
    class TensorDim:
        size: int | str
        optional: bool

`dataclasses.dataclass` writes the source of `__init__`, `__eq__` and others for every class, and
compiles it.  That takes half a millisecond, and a hundred such classes were half of attngen's
start.  Here the methods are written once, and each class gets them with its own fields.  In
every other way a record is a frozen dataclass: to `fields`, `replace` and `asdict`, to `match`,
`copy` and `pickle`, and to type checkers.

Constructing one takes 0.5 instead of 0.35 microseconds, and 2 instead of 0.5 with keywords or
defaults.  So what every call of a kernel makes is a plain dataclass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, NoReturn, TypeVar, dataclass_transform, overload

__all__ = ["record"]

T = TypeVar("T")


@overload
def record(cls: type[T], /) -> type[T]: ...
@overload
def record(*, eq: bool = True, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[Any] | None = None, /, *, eq: bool = True, kw_only: bool = False) -> Any:
    """Make a class a frozen dataclass.

    eq:       compare and hash by the fields; False: by identity.
    kw_only:  fields are given by keyword only.
    """

    def make(cls: Any) -> Any:
        cls.__doc__ = cls.__doc__ or cls.__name__  # without one, `dataclass` makes a signature
        dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        methods = _methods(cls)
        if eq:
            methods |= _comparison(cls)
        for name, method in methods.items():
            setattr(cls, name, method)
        return cls

    return make if cls is None else make(cls)


def _methods(cls: Any) -> dict[str, Any]:
    """The constructor, the text, and what refuses to change a field."""
    declared = fields(cls)
    positional = tuple(f.name for f in declared if not f.kw_only)
    names = (*positional, *(f.name for f in declared if f.kw_only))
    whole = len(names) if names == positional else None  # so many values need no completion
    known = frozenset(names)
    defaults = {f.name: f.default for f in declared if f.default is not MISSING}
    shown = tuple(f.name for f in declared if f.repr)
    set_field = object.__setattr__

    def construct(self: Any, *values: Any, **named: Any) -> None:
        if named or len(values) != whole:
            values = complete(values, named)
        for name, value in zip(names, values):  # noqa: B905 (`strict` takes a third longer)
            set_field(self, name, value)

    def complete(values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The values of all fields, in their order."""
        given = {**dict(zip(positional, values, strict=False)), **named}
        every = {**defaults, **given}
        if len(given) < len(values) + len(named) or every.keys() != known:
            raise TypeError(f"{cls.__name__} takes {', '.join(names)}")
        return tuple(map(every.__getitem__, names))

    def show(self: Any) -> str:
        return f"{cls.__qualname__}({', '.join(f'{n}={getattr(self, n)!r}' for n in shown)})"

    def refuse(self: Any, name: str, *value: Any) -> NoReturn:
        raise FrozenInstanceError(f"a record does not change; use replace(…, {name}=…)")

    return {
        "__init__": construct,
        "__repr__": cls.__dict__.get("__repr__", show),
        "__setattr__": refuse,
        "__delattr__": refuse,
    }


def _comparison(cls: Any) -> dict[str, Any]:
    """Equality and hash, by the fields that take part."""
    names = tuple(f.name for f in fields(cls) if f.compare)

    def values(self: Any) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in names])

    def equals(self: Any, other: object) -> Any:
        if type(other) is not type(self):
            return NotImplemented
        return other is self or values(self) == values(other)

    def digest(self: Any) -> int:
        return hash(values(self))

    return {"__eq__": equals, "__hash__": digest}
