"""Show a diagnostic to a person or to a program.

    error[A103]: expected `,` or `)`                         code and title
      --> gemma.attn:12:31                                   place, line and column from 1
       |
    12 |     mask      window(left = 3 right = 0)            the line of the span
       |                     -         ^^^^^ found `right`   its label, behind the carets
       |                     opened here                     a note, with a place of its own
       |
    hint: arguments are separated by `,`                     advice

Carets count terminal cells, so they stand right under tabs and wide characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from attngen.diagnostics.diagnostic import Diagnostic
from attngen.diagnostics.span import Source, Span
from attngen.record import record

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["render_plain", "render_rich", "to_json"]

TAB_CELLS: Final = 4
MAX_CHARACTERS: Final = 100
"""A longer line is shown in part, around the span."""
LEAD_CHARACTERS: Final = 40
"""So much of a longer line is shown in front of the span."""
MAX_LINES: Final = 4
"""A span of more lines is shown without its middle."""


class Role(Enum):
    """What a piece of the output is; the value is its style in a terminal."""

    ERROR = "bold red"
    TITLE = "bold"
    GUTTER = "blue"
    SOURCE = ""
    CARET = "red"
    NOTE = "cyan"
    HINT = "green"


Line: TypeAlias = list[tuple[str, Role]]


def render_plain(diagnostic: Diagnostic) -> str:
    """The diagnostic as text, without colour."""
    lines = _layout(diagnostic)
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def render_rich(diagnostic: Diagnostic) -> Text:
    """The same text with colours, for `rich`."""
    from rich.text import Text

    styled = ([(text, role.value) for text, role in line] for line in _layout(diagnostic))
    return Text("\n").join(Text.assemble(*line) for line in styled)


def to_json(diagnostic: Diagnostic) -> dict[str, Any]:
    """The diagnostic as plain data for editors and other tools.

    Units:  `start`, `end` count characters from 0; lines and columns count from 1; the end
            is the place behind the last character.
    """
    return {
        "severity": "error",
        "code": diagnostic.code,
        "message": diagnostic.message(),
        "label": diagnostic.label_text(),
        "hint": diagnostic.hint_text(),
        "place": _place(diagnostic.span),
        "notes": [{"label": n.label, "place": _place(n.span)} for n in diagnostic.notes()],
    }


def _place(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    first, behind = span.first, span.source.location(span.end)
    return {
        "file": span.source.name,
        "start": span.start,
        "end": span.end,
        "line": first.line,
        "column": first.column,
        "end_line": behind.line,
        "end_column": behind.column,
    }


# ---- layout ------------------------------------------------------------------------------


@final
@record
class _Mark:
    """A span to be marked, and what is to be said about it."""

    span: Span
    label: str
    sign: str
    role: Role

    def shares_line_with(self, other: _Mark) -> bool:
        """Whether both fit under one and the same line."""
        first, second = sorted((self.span, other.span), key=lambda span: span.start)
        return (
            first.source is second.source
            and first.first.line == second.last.line
            and first.end <= second.start
            and len(first.source.line(first.first.line)) <= MAX_CHARACTERS
        )


def _layout(diagnostic: Diagnostic) -> Iterator[Line]:
    yield [
        (f"error[{diagnostic.code}]", Role.ERROR),
        (f": {diagnostic.message()}", Role.TITLE),
    ]
    marks: list[_Mark] = []
    remarks: list[str] = []
    label = diagnostic.label_text() or ""
    if diagnostic.span:
        marks.append(_Mark(diagnostic.span, label, "^", Role.CARET))
    elif label:
        remarks.append(label)
    for note in diagnostic.notes():
        if note.span:
            marks.append(_Mark(note.span, note.label, "-", Role.NOTE))
        else:
            remarks.append(note.label)

    margin = max((len(str(mark.span.last.line)) for mark in marks), default=1)
    yield from _snippets(marks, margin)
    hint = diagnostic.hint_text()
    if marks and (remarks or hint):
        yield _gutter(margin)
    for remark in remarks:
        yield [("note: ", Role.NOTE), (remark, Role.SOURCE)]
    if hint:
        yield [("hint: ", Role.HINT), (hint, Role.SOURCE)]


def _snippets(marks: list[_Mark], margin: int) -> Iterator[Line]:
    shown_in: Source | None = None
    while marks:
        source, first = marks[0].span.source, marks[0].span.first
        if source is not shown_in:
            where = f"{source.name}:{first.line}:{first.column}"
            yield [(" " * margin + "--> ", Role.GUTTER), (where, Role.SOURCE)]
            shown_in = source
        yield _gutter(margin)
        if len(marks) > 1 and marks[0].shares_line_with(marks[1]):
            yield from _two_marks(marks[0], marks[1], margin)
            marks = marks[2:]
        else:
            yield from _one_mark(marks[0], margin)
            marks = marks[1:]


def _one_mark(mark: _Mark, margin: int) -> Iterator[Line]:
    """The lines of a span, each with signs under the part that belongs to it."""
    first, last = mark.span.first.line, mark.span.last.line
    for number in range(first, last + 1):
        if last - first >= MAX_LINES and first + 1 < number < last:
            if number == first + 2:
                yield [(" " * margin + " ...", Role.GUTTER)]
            continue
        text, indent, width = _marked_line(mark.span, number)
        yield [*_gutter(margin, number), (text, Role.SOURCE)]
        if width or number == last:
            label = f" {mark.label}" if number == last and mark.label else ""
            signs = " " * indent + mark.sign * max(1, width) + label
            yield [*_gutter(margin), (signs, mark.role)]


def _two_marks(one: _Mark, other: _Mark, margin: int) -> Iterator[Line]:
    """Two spans on a line, the label of the left one below."""
    left, right = sorted((one, other), key=lambda mark: mark.span.start)
    number = left.span.first.line
    text, left_indent, left_width = _marked_line(left.span, number)
    _, right_indent, right_width = _marked_line(right.span, number)
    left_signs = " " * left_indent + left.sign * max(1, left_width)
    right_signs = right.sign * max(1, right_width) + f" {right.label}"
    yield [*_gutter(margin, number), (text, Role.SOURCE)]
    yield [
        *_gutter(margin),
        (left_signs.ljust(right_indent), left.role),
        (right_signs, right.role),
    ]
    yield [*_gutter(margin), (" " * left_indent + left.label, left.role)]


def _gutter(margin: int, number: int | None = None) -> Line:
    shown = "" if number is None else str(number)
    return [(f"{shown:>{margin}} | ", Role.GUTTER)]


def _marked_line(span: Span, number: int) -> tuple[str, int, int]:
    """A line as shown, and the cells in front of and under its part of the span."""
    line = span.source.line(number)
    start_of_line = span.source.line_start(number)
    start = min(max(span.start - start_of_line, 0), len(line))
    end = min(max(span.end - start_of_line, start), len(line))
    if number > span.first.line:  # the indentation of a further line is not marked
        start = min(end, len(line) - len(line.lstrip()))
    left, right = 0, len(line)
    if len(line) > MAX_CHARACTERS:
        left = max(0, min(start - LEAD_CHARACTERS, len(line) - MAX_CHARACTERS))
        right = min(left + MAX_CHARACTERS, len(line))
        end = min(end, right)
    lead = "…" if left else ""
    before, _ = _cells(line[left:start], len(lead))
    under, width = _cells(line[start:end], len(lead) + _width(before))
    indent = len(lead) + _width(before)
    rest, _ = _cells(line[end:right], indent + width)
    shown = lead + before + under + rest + ("…" if right < len(line) else "")
    return shown, indent, width


def _cells(text: str, column: int) -> tuple[str, int]:
    """The text as a terminal shows it, and its width when it begins in a column."""
    shown, at = [], column
    for character in text:
        tab = character == "\t"
        piece = " " * (TAB_CELLS - at % TAB_CELLS) if tab else _printable(character)
        shown.append(piece)
        at += _width(piece)
    return "".join(shown), at - column


def _printable(character: str) -> str:
    match unicodedata.category(character):
        case "Cf":  # invisible, or turns the writing direction
            return ""
        case "Cc" | "Cs" | "Co" | "Cn" | "Zl" | "Zp":
            return "\N{REPLACEMENT CHARACTER}"
        case _:
            return character


def _width(shown: str) -> int:
    return sum(_character_width(character) for character in shown)


def _character_width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
