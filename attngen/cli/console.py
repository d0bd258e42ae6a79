"""What a person sees: plain text where nobody sits at a terminal, colours where somebody does.

Results go to stdout; notes, errors and progress go to stderr.  `rich` is imported for a
terminal only, and not when NO_COLOR is set.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, TypeAlias, final

import click

from attngen.diagnostics.diagnostic import Diagnostic
from attngen.options import settings

__all__ = [
    "ERRORS_AS_JSON", "Piece", "Progress", "can_show", "is_fancy", "note", "progress",
    "rich_console", "say", "say_json", "show_errors", "show_errors_as_json", "table",
]  # fmt: skip

Piece: TypeAlias = str | tuple[str, str]
"""A text, or a text and its style in a terminal, in the words of `rich`."""

PROGRESS_AFTER_S: Final = 1.0
"""What takes no longer than this shows no progress."""
ERRORS_AS_JSON: Final = "errors as JSON"
"""The object of a click context under `--json-errors`."""


def say(*pieces: Piece) -> None:
    """One line of the result, or several, on stdout."""
    _write(pieces, sys.stdout)


def note(text: str) -> None:
    """A remark on stderr; none where errors are for tools, which read all of stderr."""
    context = click.get_current_context(silent=True)
    if context is not None and context.obj == ERRORS_AS_JSON:
        return
    _write([("note: ", "cyan"), text], sys.stderr)


def say_json(value: Any) -> None:
    """A result for tools, on stdout."""
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def show_errors(diagnostics: Sequence[Diagnostic]) -> None:
    """Errors for a person, on stderr, with an empty line between them."""
    from attngen.diagnostics.render import render_plain

    for i, diagnostic in enumerate(diagnostics):
        if i:
            click.echo("", err=True)
        if is_fancy(sys.stderr):
            from attngen.diagnostics.render import render_rich

            rich_console(sys.stderr).print(render_rich(diagnostic), soft_wrap=True)
        else:
            click.echo(render_plain(diagnostic), err=True)


def show_errors_as_json(diagnostics: Sequence[Diagnostic]) -> None:
    """Errors for tools, on stderr: `{"format": …, "errors": […]}`."""
    from attngen.diagnostics.render import to_json

    value = {"format": "attngen-errors/1", "errors": [to_json(d) for d in diagnostics]}
    click.echo(json.dumps(value, indent=2, sort_keys=True), err=True)


def table(rows: Sequence[Sequence[str]], *, indent: int = 2) -> list[str]:
    """Rows as lines with aligned columns; the last column is as wide as it is."""
    columns = max((len(row) for row in rows), default=0)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def can_show(characters: str) -> bool:
    """Whether stdout has an encoding with these characters."""
    try:
        characters.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _write(pieces: Sequence[Piece], stream: IO[str]) -> None:
    if is_fancy(stream):
        from rich.text import Text

        rich_console(stream).print(Text.assemble(*pieces), soft_wrap=True)
    else:
        text = "".join(piece if isinstance(piece, str) else piece[0] for piece in pieces)
        click.echo(text, file=stream)


def is_fancy(stream: IO[str]) -> bool:
    """Whether somebody sits there who wants colours."""
    chosen = settings()
    return stream.isatty() and chosen.is_color_on


def rich_console(stream: IO[str]) -> Any:
    """A console of `rich` that writes what it is given as it is."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


# ---- progress ----------------------------------------------------------------------------


@final
class Progress:
    """Says on a terminal what is being done, once it takes longer than a moment."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._status: Any = None
        self._is_done = False
        self._timer = threading.Timer(PROGRESS_AFTER_S, self._show)
        self._timer.daemon = True

    def update(self, text: str) -> None:
        """Say how far it is."""
        with self._lock:
            self._text = text
            if self._status is not None:
                self._status.update(text)

    def start(self) -> None:
        if is_fancy(sys.stderr):
            self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_done = True
            if self._status is not None:
                self._status.stop()

    def _show(self) -> None:
        with self._lock:
            if not self._is_done:
                self._status = rich_console(sys.stderr).status(self._text)
                self._status.start()


@contextmanager
def progress(text: str) -> Iterator[Progress]:
    """Around a step that may take more than a second."""
    shown = Progress(text)
    shown.start()
    try:
        yield shown
    finally:
        shown.stop()
