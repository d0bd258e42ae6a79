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

A class that inherits from `Diagnostic` is a record by that alone.
"""

from __future__ import annotations

from dataclasses import field, fields
from string import Formatter
from typing import ClassVar, dataclass_transform

from attngen.diagnostics.span import Span
from attngen.record import record

__all__ = ["AttnError", "Diagnostic", "Note"]


@record
class Note:
    """A second place that belongs to the same error, with its own label."""

    label: str
    span: Span | None


@record
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Diagnostic:
    """One error: a code, texts with holes, and the values that fill them."""

    code: ClassVar[str]
    title: ClassVar[str]
    label: ClassVar[str | None] = None
    hint: ClassVar[str | None] = None

    span: Span | None

    def __init_subclass__(cls) -> None:
        record(cls)

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
        values = {f.name: getattr(self, f.name) for f in fields(self)}
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
