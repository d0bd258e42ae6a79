"""Kernel families, best first.  Each has a template of the same name."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from attngen.kernels.base import KernelFamily

__all__ = ["all_families"]

_BEST_FIRST: Final = ("forward_wgmma", "forward_mma", "forward_simt")
"""The last takes every problem."""


def all_families() -> dict[str, KernelFamily]:
    """Every family by name, best first; a family is a module here with a constant `FAMILY`."""
    return {name: import_module(f"{__name__}.{name}").FAMILY for name in _BEST_FIRST}
