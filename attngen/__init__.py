"""attngen: attention variants from a small language to fast, readable CUDA.

    kernel = attngen.compile("examples/gemma2_local.attn")
    o, lse = kernel(q, k, v, doc=doc, return_lse=True)

Importing this package imports neither NumPy, CuPy nor PyTorch; each name loads what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.api import Kernel, compile, compile_text
    from attngen.diagnostics.diagnostic import AttnError, Diagnostic
    from attngen.diagnostics.span import Source, Span
    from attngen.flex.attention import from_python
    from attngen.frontend.load import load_file, load_text
    from attngen.ir.printer import print_attention, print_program
    from attngen.oracle.dense import Reference, reference
    from attngen.partial import PartialState

__version__ = "0.1.0"

__all__ = [
    "AttnError",
    "Diagnostic",
    "Kernel",
    "PartialState",
    "Reference",
    "Source",
    "Span",
    "__version__",
    "compile",
    "compile_text",
    "from_python",
    "load_file",
    "load_text",
    "print_attention",
    "print_program",
    "reference",
]

_HOME = {
    "AttnError": "attngen.diagnostics.diagnostic",
    "Diagnostic": "attngen.diagnostics.diagnostic",
    "Kernel": "attngen.api",
    "PartialState": "attngen.partial",
    "Reference": "attngen.oracle.dense",
    "Source": "attngen.diagnostics.span",
    "Span": "attngen.diagnostics.span",
    "compile": "attngen.api",
    "compile_text": "attngen.api",
    "from_python": "attngen.flex.attention",
    "load_file": "attngen.frontend.load",
    "load_text": "attngen.frontend.load",
    "print_attention": "attngen.ir.printer",
    "print_program": "attngen.ir.printer",
    "reference": "attngen.oracle.dense",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
