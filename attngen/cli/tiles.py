"""What a kernel does with each tile of one problem: in words, as a map, and in numbers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, final

from attngen.analysis.tile_classes import TileClasses
from attngen.analysis.tile_map import MIXED, TileCells, TileKind, TileMap, map_tiles
from attngen.cli.conditions import advice
from attngen.cli.console import Piece
from attngen.cli.problem import Problem
from attngen.compiler import Rendered
from attngen.engines.numpy_engine import as_numpy
from attngen.ir.attention import Attention
from attngen.ir.expr import Const, Expr
from attngen.ir.traverse import postorder
from attngen.kernels import all_families
from attngen.record import record

__all__ = ["TileMaps", "count_rows", "draw_map", "make_maps", "remarks"]

MAX_COLUMNS: Final = 96
MAX_LINES: Final = 24
"""Columns and lines of the map; a terminal may have fewer columns."""
_STYLES: Final[Mapping[int, str]] = {
    TileKind.SKIP: "dim", TileKind.PARTIAL: "yellow", TileKind.FULL: "green", MIXED: "yellow",
}  # fmt: skip
_TEMPLATE: Final = "common/tiles.cu.j2"
"""A family whose text includes it asks about a tile before it loads anything."""


@final
@record(eq=False)
class TileMaps:
    """A map for each size of tiles that some target has, with the names of these targets.

    `visiting` are the families among them that compute every tile whole.
    """

    maps: tuple[tuple[TileMap, tuple[str, ...]], ...]
    visiting: tuple[str, ...]

    @property
    def first(self) -> TileMap:
        return self.maps[0][0]


def make_maps(
    problem: Problem, rendered: Sequence[Rendered], tell: Callable[[str], None]
) -> TileMaps:
    """Maps of batch 0, head 0, with the tiles that each target would use."""
    targets: dict[tuple[int, int], list[Rendered]] = {}
    for one in rendered:
        tiles = one.launch.tiles
        targets.setdefault((tiles.tile_q, tiles.tile_kv), []).append(one)
    tensors = {name: as_numpy(view) for name, view in problem.binding.tensors.items()}
    maps = []
    for (tile_q, tile_kv), of_size in targets.items():
        tell(f"classifying tiles of {tile_q} x {tile_kv}")
        found = map_tiles(
            of_size[0].program.attention,
            tile_q=tile_q,
            tile_kv=tile_kv,
            sizes=problem.sizes,
            params=problem.params,
            tensors=tensors,
        )
        maps.append((found, tuple(one.target.name for one in of_size)))
    families = dict.fromkeys(one.launch.family for one in rendered)
    visiting = (name for name in families if _TEMPLATE not in all_families()[name].templates)
    return TileMaps(tuple(maps), tuple(visiting))


# ---- the map -----------------------------------------------------------------------------------


def draw_map(tile_map: TileMap, marks: str) -> Iterator[list[Piece]]:
    """What a character stands for, and the map; each line begins with its first row.

    marks:  for skip, partial, full, and several kinds together.
    """
    lead = len(f"q {tile_map.rows} | ")
    columns = min(shutil.get_terminal_size().columns - lead - 3, MAX_COLUMNS)
    cells = tile_map.cells(MAX_LINES, max(8, columns))
    shown: dict[int, str] = {
        TileKind.SKIP: "skip",
        TileKind.PARTIAL: "partial",
        TileKind.FULL: "full",
    }
    if cells.step_q * cells.step_kv > 1:
        shown[MIXED] = "of several kinds"
    heading: list[Piece] = [
        (f"{marks[kind]} {text}  ", _STYLES[kind]) for kind, text in shown.items()
    ]
    yield [*heading, f" a character is {_extent(tile_map, cells)}"]
    yield [" " * lead + "kv 0"]
    for row, kinds in zip(tile_map.q_tiles[:: cells.step_q], cells.kinds.tolist(), strict=True):
        line: list[Piece] = [f"q {int(row) * tile_map.tile_q:>{lead - 5}} | "]
        for kind, run in groupby(kinds):
            line.append((marks[kind] * len(list(run)), _STYLES[kind]))
        yield line


def _extent(tile_map: TileMap, cells: TileCells) -> str:
    if not tile_map.has_all_tiles:
        rows, keys = (
            math.ceil(n / cells.kinds.shape[i])
            for i, n in enumerate((tile_map.rows, tile_map.keys))
        )
        return f"about {rows} rows x {keys} keys"
    if cells.step_q * cells.step_kv == 1:
        return "one tile"
    rows, keys = cells.step_q * tile_map.tile_q, cells.step_kv * tile_map.tile_kv
    return f"{cells.step_q} x {cells.step_kv} tiles, {rows} rows x {keys} keys"


# ---- numbers -----------------------------------------------------------------------------------


def count_rows(maps: TileMaps) -> list[list[str]]:
    """A table with a row for each size of tiles: how many of each kind, and what is wasted."""
    rows = [["tile", "tiles", "skip", "partial", "full", "pairs computed", "wasted"]]
    for tile_map, _ in maps.maps:
        about = "" if tile_map.has_all_tiles else "about "
        counts = (tile_map.count(kind) for kind in TileKind)
        rows.append([
            f"{tile_map.tile_q} x {tile_map.tile_kv}",
            f"{tile_map.tiles:,}",
            *(f"{about}{n:,} ({n / tile_map.tiles:.1%})" for n in counts),
            f"{about}{tile_map.computed:,}",
            f"{'' if tile_map.has_all_pairs else 'about '}{tile_map.wasted_share:.1%}",
        ])  # fmt: skip
    if len(maps.maps) > 1:
        names = ["on", *(", ".join(names) for _, names in maps.maps)]
        rows = [[*row, name] for row, name in zip(rows, names, strict=True)]
    return rows


def remarks(maps: TileMaps, attention: Attention, classes: TileClasses) -> Iterator[str]:
    """What the numbers mean, what is not known of a tile, and what would help."""
    tile_map = maps.first
    if tile_map.count(TileKind.PARTIAL):
        yield "wasted are pairs that are computed and do not attend, all of them in partial tiles"
    if not tile_map.has_all_tiles:
        n_q, n_kv = tile_map.kinds.shape
        yield f"estimated from {n_q:,} rows and {n_kv:,} columns of tiles, evenly spaced"
    elif not tile_map.has_all_pairs:
        partial = tile_map.count(TileKind.PARTIAL)
        yield f"pairs were decided in {tile_map.counted:,} of {partial:,} partial tiles"
    yield from _exactness(tile_map, attention, classes)
    for name in maps.visiting:
        yield (
            f"note: {name} uses no tile classes: it computes every tile, and evaluates the mask at"
            " every pair"
        )
    if any(_holds_minus_infinity(score) for score in attention.scores):
        yield (
            "note: tiles know nothing of the pairs that a score line makes -inf; a condition that"
            " does not read the score belongs into `mask`"
        )


def _exactness(tile_map: TileMap, attention: Attention, classes: TileClasses) -> Iterator[str]:
    missed = [
        f"{n:,} {what}"
        for n, what in (
            (tile_map.missed_skip, "without any pair that attends"),
            (tile_map.missed_full, "in which all do"),
        )
        if n
    ]
    if not missed:
        if tile_map.has_all_pairs:
            yield "exact with these tiles: every one that could be skipped or full is"
        return
    of = "partial tiles" if tile_map.has_all_pairs else f"{tile_map.counted:,} partial tiles"
    yield f"not exact: among the {of} are {' and '.join(missed)}"
    yield from (f"note: {text}" for text in advice(attention, classes))


def _holds_minus_infinity(e: Expr) -> bool:
    return any(isinstance(n, Const) and n.value == -math.inf for n in postorder(e))
