"""Where in which text: half-open, 0-based offsets inside; 1-based line and column when shown."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import field
from functools import cached_property
from typing import NamedTuple, final

from attngen.record import record

__all__ = ["LINE_END", "Location", "Source", "Span"]

LINE_END = re.compile(r"\r\n?|\n")
"""What ends a line, as in Python: LF, CRLF, or CR alone."""


@final
class Location(NamedTuple):
    """A place as a person counts: line and column both start at 1."""

    line: int
    column: int


@final
@record(eq=False)
class Source:
    """One text and the name it is shown under."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(end.end() for end in LINE_END.finditer(self.text))]

    def location(self, offset: int) -> Location:
        """Line and column of a character offset; the end of the text is a valid offset."""
        line = bisect_right(self._line_starts, offset)
        return Location(line, offset - self._line_starts[line - 1] + 1)

    def line_start(self, number: int) -> int:
        """The offset at which a 1-based line begins."""
        return self._line_starts[number - 1]

    def line(self, number: int) -> str:
        """The text of a 1-based line, without its line end."""
        start = self.line_start(number)
        end = self._line_starts[number] if number < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def span(self, start: int, end: int) -> Span:
        """The half-open span `[start, end)` of this text."""
        return Span(self, start, end)


@final
@record
class Span:
    """`source.text[start:end]`."""

    source: Source = field(repr=False)
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def first(self) -> Location:
        """Location of the first character."""
        return self.source.location(self.start)

    @property
    def last(self) -> Location:
        """Location of the last character (the first one, when the span is empty)."""
        return self.source.location(max(self.start, self.end - 1))

    def to(self, other: Span) -> Span:
        """The smallest span that covers both."""
        return Span(self.source, min(self.start, other.start), max(self.end, other.end))
