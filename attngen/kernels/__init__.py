"""Kernel families, best first.  Each has a template of the same name."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from attngen.kernels.base import KernelFamily

__all__ = ["FALLBACK", "NAMED_ONLY", "all_families"]

FALLBACK: Final = "forward_simt"
"""The family that takes every problem."""

NAMED_ONLY: Final = frozenset({"forward_mma"})
"""Families that run only where a schedule names them, `kernel forward_mma`."""


def all_families() -> dict[str, KernelFamily]:
    """Every family by name, sorted; a family is a module here with a constant `FAMILY`."""
    names = sorted(m.name for m in iter_modules(__path__) if m.name != "base")
    return {name: import_module(f"{__name__}.{name}").FAMILY for name in names}
