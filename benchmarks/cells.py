"""Which problems are timed: the grids of the suites, as data.

| suite    | cells |
| -------- | ----- |
| forward  | D 64, 128, 256; full and causal; 1k to 16k tokens, 16k in a batch; 2048 / D heads |
| gqa      | 64 query heads over 8 key heads, D 128, one sequence of 4k to 32k tokens |
| variants | every variant at B 2, S 8192, 16 heads, D 128 |
| cold     | the first call of a fresh process, and the first call at another length |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final, final

from attngen.record import record
from benchmarks.variants import VARIANTS

__all__ = ["SUITES", "Cell", "make_cells", "select_cells", "shrink"]

SUITES: Final = ("forward", "gqa", "variants", "cold")
_TOKENS: Final = 16384
_WIDTH: Final = 2048
_SHRINK: Final = 128


@final
@record
class Cell:
    """One problem.  As many queries as keys; sizes by the names of the language."""

    suite: str
    variant: str
    dtype: str
    B: int
    S: int
    Hq: int
    Hkv: int
    D: int
    Dv: int

    @property
    def name(self) -> str:
        """What `--cells` is compared with, such as `forward-causal-d128-s4096`."""
        return f"{self.suite}-{self.variant}-d{self.D}-s{self.S}"


def make_cells(suites: Sequence[str], dtype: str = "bf16") -> tuple[Cell, ...]:
    """The cells of the suites, in their order."""
    made = []
    for suite in suites:
        match suite:
            case "forward":
                made += [
                    Cell(suite, mask, dtype, _TOKENS // S, S, _WIDTH // D, _WIDTH // D, D, D)
                    for D in (64, 128, 256)
                    for mask in ("full", "causal")
                    for S in (1024, 2048, 4096, 8192, 16384)
                ]
            case "gqa":
                made += [
                    Cell(suite, mask, dtype, 1, S, 64, 8, 128, 128)
                    for mask in ("full", "causal")
                    for S in (4096, 8192, 16384, 32768)
                ]
            case "variants":
                names = (name for name in VARIANTS if name != "full")
                made += [Cell(suite, name, dtype, 2, 8192, 16, 16, 128, 128) for name in names]
            case "cold":
                made.append(Cell(suite, "causal", dtype, 4, 4096, 16, 16, 128, 128))
            case _:
                raise ValueError(f"no suite {suite!r}; there are {', '.join(SUITES)}")
    return tuple(made)


def select_cells(cells: Iterable[Cell], patterns: str | None) -> tuple[Cell, ...]:
    """The cells whose name matches one of the comma-separated shell patterns; None: all."""
    if patterns is None:
        return tuple(cells)
    each = patterns.split(",")
    return tuple(c for c in cells if any(fnmatchcase(c.name, pattern) for pattern in each))


def shrink(cell: Cell) -> Cell:
    """The cell small enough for a CPU: for a dry run, whose times mean nothing."""
    group = cell.Hq // cell.Hkv
    heads = (2, 2) if group == 1 else (group, 1)
    B, S = min(cell.B, 2), cell.S // _SHRINK
    return replace(cell, B=B, S=S, Hq=heads[0], Hkv=heads[1])
