"""Where in the Python source an error of the traced text comes from."""

from __future__ import annotations

from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.span import Span
from attngen.frontend import ast
from attngen.frontend.load import expressions, walk
from attngen.frontend.parse import parse

__all__ = ["note_python_lines"]


def note_python_lines(error: AttnError, traced: ast.File) -> None:
    """Add a note to an error for every place in the text of `traced` that it names."""
    for diagnostic in error.diagnostics:
        place = None if diagnostic.span is None else _origin(diagnostic.span, traced)
        if place is not None:
            line = place.source.line(place.first.line).strip()
            error.add_note(f"traced from {place.source.name}:{place.first.line}: {line}")


def _origin(span: Span, traced: ast.File) -> Span | None:
    """The Python source of the smallest expression that contains a span of the text."""
    written = _block(parse(span.source))
    found: Span | None = None
    for printed, known in zip(written.statements, _block(traced).statements, strict=True):
        for e, original in zip(expressions(printed), expressions(known), strict=True):
            for node, source in zip(walk(e), walk(original), strict=True):
                if node.span.start <= span.start and span.end <= node.span.end:
                    found = source.span  # inner nodes come later
    return found if found is not None and found.source.text else None


def _block(file: ast.File) -> ast.Attention:
    block = file.items[-1]
    assert isinstance(block, ast.Attention)
    return block
