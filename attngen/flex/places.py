"""The place in the Python source at which a traced function is just now."""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Iterator
from functools import cache
from itertools import islice, pairwise
from types import CodeType, FrameType
from typing import final

from attngen.diagnostics.span import Source, Span
from attngen.record import record

__all__ = ["Place", "function_place", "running_place"]

_OWN = "attngen.flex"
_LIBRARIES = ("torch", "functools")
"""Where an operation of a user's function may come from, such as `torch`'s `and_masks`."""


@final
@record
class Place:
    """An expression of the Python source, and the variable that its value is stored in next."""

    span: Span
    variable: str | None


def running_place() -> Place:
    """The place in the traced function that called attngen's operators.

    An operation inside of a library counts as at the line that called the library, where there
    is one.
    """
    frames = list(_traced_frames())
    own = [f for f in frames if not _is_in(f, _LIBRARIES)]
    frame = (own or frames)[0]
    code, at = frame.f_code, frame.f_lasti
    known = _places.get((id(code), at))
    if known is None:
        known = _places[id(code), at] = code, Place(_span(code, at), _stores(code).get(at))
    return known[1]


_places: dict[tuple[int, int], tuple[CodeType, Place]] = {}
"""Places by code and instruction: a function that is traced again looks nothing up."""


def function_place(code: CodeType) -> Span:
    """The first line of a function."""
    line = code.co_firstlineno
    return _line_span(_source(code.co_filename, line), line)


def _traced_frames() -> Iterator[FrameType]:
    """The frames between attngen's operators and attngen's call of the function, inner first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_in(frame, (_OWN,)):
        frame = frame.f_back
    while frame is not None and not _is_in(frame, (_OWN,)):
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, packages: tuple[str, ...]) -> bool:
    module = frame.f_globals.get("__name__", "")
    return any(module == package or module.startswith(package + ".") for package in packages)


def _span(code: CodeType, instruction: int) -> Span:
    positions = next(islice(code.co_positions(), instruction // 2, None))
    line, end_line, column, end_column = positions
    first = code.co_firstlineno if line is None else line
    source = _source(code.co_filename, first)
    if end_line is None or column is None or end_column is None or not source.text.strip():
        return _line_span(source, first)
    return source.span(_offset(source, first, column), _offset(source, end_line, end_column))


@cache
def _stores(code: CodeType) -> dict[int, str]:
    """The variable that an instruction's result goes to, by the instruction's offset."""
    steps = list(dis.get_instructions(code))
    stores: dict[int, str] = {}
    for step, following in pairwise(steps):
        if following.opname.startswith("STORE_") and following.argval is not None:
            stored = following.argval  # Python 3.13 may store and load in one instruction
            stores[step.offset] = str(stored[0] if isinstance(stored, tuple) else stored)
    return stores


def _offset(source: Source, line: int, column: int) -> int:
    """The character of a text at a line and a column in bytes of UTF-8."""
    before = source.line(line).encode()[:column].decode(errors="ignore")
    return source.line_start(line) + len(before)


def _line_span(source: Source, line: int) -> Span:
    text = source.line(line)
    start = source.line_start(line)
    return source.span(start + len(text) - len(text.lstrip()), start + len(text))


_sources: dict[str, tuple[list[str], Source]] = {}


def _source(name: str, line: int) -> Source:
    """The text of a Python file; empty lines up to `line` where nobody has it, as in a prompt."""
    lines = linecache.getlines(name)
    if len(lines) < line:
        return Source(name, "\n" * line)
    known = _sources.get(name)
    if known is None or known[0] is not lines:
        known = _sources[name] = lines, Source(name, "".join(lines))
    return known[1]
