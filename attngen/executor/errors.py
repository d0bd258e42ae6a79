"""What can go wrong while a loop nest runs in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = ["ReadOutside"]


@dataclass(frozen=True, slots=True)
class ReadOutside(Diagnostic):
    code = "A661"
    title = "tensor `{tensor}` is read outside its shape {shape} at a pair that attends"
    hint = "guard the read (`where`, `and`, `clamp`) or mask the pair"
    tensor: str
    shape: tuple[int, ...]
