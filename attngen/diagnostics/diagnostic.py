"""What an error says, as data; the exception that carries it is separate.

A diagnostic class holds the texts (`title`, `label`, `hint`) with `{field}` holes, and an
instance holds the typed values, so none can be raised half-filled:

    class UnknownName(Diagnostic):
        code = "A201"
        title = "unknown name `{name}`"
        label = "nothing of this name is visible here"
        hint = "did you mean `{closest}`?"        # left out when a field in it is None
        name: str
        closest: str | None

Codes are a stage digit and a number; they are documented in `docs/errors.md` and never
reused: A1xx syntax, A2xx names and types, A3xx analysis, A4xx schedule and resources,
A5xx toolchain, A6xx launch, A7xx files and command line, A9xx a bug in attngen.

A diagnostic class is written like a frozen dataclass and is one for type checkers.  It does
not go through `dataclasses`, which compiles five methods for each of a hundred classes and
would take a third of attngen's start.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field
from inspect import get_annotations
from string import Formatter
from typing import Any, ClassVar, Self, dataclass_transform

from attngen.diagnostics.span import Span

__all__ = ["AttnError", "Diagnostic", "Note"]


@dataclass(frozen=True, slots=True)
class Note:
    """A second place that belongs to the same error, with its own label."""

    label: str
    span: Span | None


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _Record:
    """A frozen record whose annotated members are its fields, those of its bases first."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _keywords: ClassVar[frozenset[str]] = frozenset()
    """Fields that are given by keyword only."""

    def __init_subclass__(cls) -> None:
        names = [n for n, kind in get_annotations(cls).items() if "ClassVar" not in str(kind)]
        for name in names:
            declared = cls.__dict__.get(name)
            if isinstance(declared, Field):
                if declared.kw_only is True:
                    cls._keywords |= {name}
                delattr(cls, name)
                if declared.default is not MISSING:
                    setattr(cls, name, declared.default)
        cls._fields = (*cls._fields, *(n for n in names if n not in cls._fields))

    def __init__(self, *values: Any, **named: Any) -> None:
        positional = [n for n in self._fields if n not in self._keywords]
        given = {**dict(zip(positional, values, strict=False)), **named}
        missing = [n for n in self._fields if n not in given and not hasattr(type(self), n)]
        twice = len(given) < len(values) + len(named)
        if missing or twice or not given.keys() <= set(self._fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(self._fields)}")
        self.__dict__.update(given)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a diagnostic does not change; use replace({name}=…)")

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Record) or type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), *self._values().values()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r:.200}" for name, value in self._values().items())
        return f"{type(self).__name__}({shown})"

    def replace(self, **changes: Any) -> Self:
        """The same error with other values."""
        return type(self)(**{**self._values(), **changes})


class Diagnostic(_Record):
    """One error: a code, texts with holes, and the values that fill them."""

    code: ClassVar[str]
    title: ClassVar[str]
    label: ClassVar[str | None] = None
    hint: ClassVar[str | None] = None

    span: Span | None

    def notes(self) -> tuple[Note, ...]:
        """Further places to show; overridden by the classes that have some."""
        return ()

    def message(self) -> str:
        """The title, filled in."""
        return self._fill(self.title) or self.title

    def label_text(self) -> str | None:
        """The text at the caret, filled in."""
        return self._fill(self.label)

    def hint_text(self) -> str | None:
        """The advice, filled in; None when it needs a value that is None."""
        return self._fill(self.hint)

    def _fill(self, template: str | None) -> str | None:
        if template is None:
            return None
        values = self._values()
        used = [name for _, name, _, _ in Formatter().parse(template) if name]
        if any(values[name] is None for name in used):
            return None
        return template.format(**values)


class AttnError(Exception):
    """Every error that a user of attngen can cause; `diagnostics` says what and where."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        self.diagnostics = diagnostics
        super().__init__(*diagnostics)

    def __str__(self) -> str:
        from attngen.diagnostics.render import render_plain

        return "\n\n".join(render_plain(d) for d in self.diagnostics)
