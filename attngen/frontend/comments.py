"""Give every comment of a text to the statement that it speaks about.

# above                      Comments.above
mask  (kv <= q     # inside  Comments.above, behind those that stand above
       and k > 0)  # behind  Comments.behind
# last                       closing of the block or file
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from attngen.diagnostics.span import LINE_END, Source
from attngen.frontend.ast import (
    Attention,
    Comments,
    Definition,
    File,
    Import,
    Schedule,
    Setting,
    Statement,
    TopLevel,
)
from attngen.frontend.tokens import Token

__all__ = ["attach_comments"]

Line = TypeVar("Line", bound=Import | Definition | Statement | Setting)


def attach_comments(file: File, comments: Sequence[Token]) -> File:
    """The same file, with `comments` and `closing` filled in."""
    attacher = _Attacher(file.span.source, deque(comments))
    items = tuple(attacher.item(item) for item in file.items)
    return replace(file, items=items, closing=attacher.lines_before(file.span.end))


class _Attacher:
    """Walks a file from top to bottom and takes comments off the front."""

    def __init__(self, source: Source, waiting: deque[Token]) -> None:
        self.source = source
        self.waiting = waiting
        self.done = 0
        """End of the last comment or statement that has its place."""

    def item(self, item: TopLevel) -> TopLevel:
        match item:
            case Attention():
                comments = self._header(item, item.statements)
                statements = tuple(self._line(line) for line in item.statements)
                closing = self._closing(item, statements)
                return replace(item, statements=statements, comments=comments, closing=closing)
            case Schedule():
                comments = self._header(item, item.settings)
                settings = tuple(self._line(line) for line in item.settings)
                closing = self._closing(item, settings)
                return replace(item, settings=settings, comments=comments, closing=closing)
            case _:
                return self._line(item)

    def lines_before(self, offset: int) -> tuple[str, ...]:
        """The waiting comments in front of an offset, with `""` for an empty line."""
        lines = []
        while self.waiting and self.waiting[0].span.start < offset:
            if self._blank_before(self.waiting[0].span.start):
                lines.append("")
            lines.append(self._take())
        return tuple(lines)

    def _line(self, line: Line) -> Line:
        above, blank_before = self._above(line.span.start)
        while self.waiting and self.waiting[0].span.start < line.span.end:
            above += (self._take(),)
        self.done = line.span.end
        behind = self._behind(line.span.end)
        return replace(line, comments=Comments(above, behind, blank_before))

    def _header(self, block: Attention | Schedule, body: Sequence[Statement | Setting]) -> Comments:
        above, blank_before = self._above(block.span.start)
        first = body[0].span.start if body else block.span.end
        behind = self._behind(block.span.start, limit=first)
        return Comments(above, behind, blank_before)

    def _closing(
        self, block: Attention | Schedule, body: Sequence[Statement | Setting]
    ) -> tuple[str, ...]:
        lines = self.lines_before(block.span.end)
        if not body and lines[:1] == ("",):  # no empty line behind a `{`
            lines = lines[1:]
        self.done = block.span.end
        behind = self._behind(block.span.end)
        return lines if behind is None else (*lines, behind)

    def _above(self, offset: int) -> tuple[tuple[str, ...], bool]:
        lines = self.lines_before(offset)
        if not lines:
            return (), self._blank_before(offset)
        blank_before = lines[0] == ""
        below = ("",) if self._blank_before(offset) else ()
        return lines[blank_before:] + below, blank_before

    def _behind(self, offset: int, limit: int | None = None) -> str | None:
        """The comment that begins on the line of an offset."""
        if not self.waiting:
            return None
        start = self.waiting[0].span.start
        if limit is not None and start >= limit:
            return None
        same_line = not LINE_END.search(self.source.text, offset, start)
        return self._take() if same_line else None

    def _blank_before(self, offset: int) -> bool:
        return len(LINE_END.findall(self.source.text, self.done, offset)) > 1

    def _take(self) -> str:
        comment = self.waiting.popleft()
        self.done = comment.span.end
        return comment.text.rstrip()
