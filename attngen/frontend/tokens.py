"""The tokens of a text, and what they are called in messages."""

from __future__ import annotations

from typing import Final, final

from attngen.diagnostics.span import Span
from attngen.record import record

__all__ = [
    "CONSTANTS",
    "END",
    "NEW_LINE",
    "RESERVED_WORDS",
    "SCHEDULE_KEYS",
    "STARTS",
    "STATEMENTS",
    "TOP_LEVEL",
    "Token",
]

NEW_LINE: Final = "_NL"
END: Final = "$END"

TOP_LEVEL: Final = ("import", "define", "attention", "schedule")
STATEMENTS: Final = (
    "dtype",
    "head_dim",
    "heads",
    "const",
    "param",
    "tensor",
    "length",
    "let",
    "scale",
    "score",
    "mask",
    "weights",
    "output",
)
SCHEDULE_KEYS: Final = (
    "kernel",
    "loop",
    "normalize",
    "overlap",
    "passes",
    "splits",
    "stages",
    "tile",
    "warps",
)
"""The keys that messages suggest; which ones exist is the checker's business."""

STARTS: Final = {
    "file": TOP_LEVEL,
    "attention": (*STATEMENTS, *TOP_LEVEL),
    "schedule": (*SCHEDULE_KEYS, *TOP_LEVEL),
}
"""By scope: the words that, first on a line, begin a statement even behind an open bracket."""

CONSTANTS: Final = ("true", "false", "inf", "nan")
RESERVED_WORDS: Final = ("and", "or", "not", *CONSTANTS)


@final
@record
class Token:
    """One token; `type` is the name of its terminal in `grammar/attn.lark`."""

    type: str
    text: str
    span: Span
