"""What can go wrong while a loop nest runs in NumPy."""

from __future__ import annotations

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = ["LengthOutside", "ReadOutside"]


class ReadOutside(Diagnostic):
    code = "A661"
    title = "tensor `{tensor}` is read outside its shape {shape} at a pair that attends"
    hint = "guard the read (`where`, `and`, `clamp`) or mask the pair"
    tensor: str
    shape: tuple[int, ...]


class LengthOutside(Diagnostic):
    code = "A662"
    title = "`length` makes {name} {has} for one sequence; the buffer holds {limit}"
    hint = "lengths lie between 0 and the size of the padded buffer"
    name: str
    has: int
    limit: int
