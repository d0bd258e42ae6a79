"""From a mask: the ranges of keys that the rows of a query tile may attend to.

    mask    kv < first or window(left = recent - 1)        over rows [q_first, q_last]

    ranges  [0, min(first, qpos_last + 1))
            [max(first, qpos_first - recent + 1), qpos_last + 1)

At most four ranges, in ascending order and disjoint, from begin to before end, for all lengths.
They hold every key that some row of the tile attends to; an empty one has `end <= begin`.
Ends are expressions over TILE_SYMBOLS, sizes, params, and what else in the mask is free of `q`
and `kv`, in global indices.  `derive_query_ranges` is the same, transposed.

The mask becomes an `or` of cubes (cubes.py), each cube one range over the tile
(tile_projection.py, integer_sets.py), and these a few disjoint ones (range_union.py).
"""

from __future__ import annotations

from typing import final

from attngen.analysis.cubes import CubeBuilder
from attngen.analysis.empty_rows import may_have_empty_row
from attngen.analysis.equalities import use_equalities
from attngen.analysis.linear import Atoms
from attngen.analysis.range_union import MOST_RANGES, Range, RangeUnion
from attngen.analysis.tile_projection import TileProjection
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Const,
)
from attngen.record import record

__all__ = [
    "MOST_RANGES",
    "KeyRanges",
    "QueryRanges",
    "Range",
    "derive_key_ranges",
    "derive_query_ranges",
]


@final
@record(eq=False)
class KeyRanges:
    """Where the rows of a query tile may attend.

    may_have_empty_row  False: with `1 <= Sq <= Skv` and params in their declared ranges, the mask
                        lets every row attend to some key.  Scores of -inf are not considered.
    notes               for each part of the mask that sets no limit, why, and what would help
    """

    ranges: tuple[Range, ...]
    may_have_empty_row: bool
    notes: tuple[str, ...]


@final
@record(eq=False)
class QueryRanges:
    """Which rows may attend to the keys of a key tile; `notes` as in `KeyRanges`."""

    ranges: tuple[Range, ...]
    notes: tuple[str, ...]


def derive_key_ranges(attention: Attention) -> KeyRanges:
    """The keys that the rows [q_first, q_last] may attend to, over `q_first`, `qpos_last`, ….

    Without a mask, and where nothing is known, the one range [0, Skv).
    """
    ranges, notes = _derive(attention, "kv")
    return KeyRanges(ranges, may_have_empty_row(attention), notes)


def derive_query_ranges(attention: Attention) -> QueryRanges:
    """The rows that may attend to the keys [kv_first, kv_last], over `kv_first` and `kv_last`."""
    return QueryRanges(*_derive(attention, "q"))


def _derive(attention: Attention, target: str) -> tuple[tuple[Range, ...], tuple[str, ...]]:
    attention = use_equalities(attention)
    mask = Const(True) if attention.mask is None else attention.mask
    other = "q" if target == "kv" else "kv"
    atoms = Atoms(attention, tile=other)
    builder = CubeBuilder(atoms, target)
    cubes = builder.build(mask)
    tile = TileProjection(atoms, target)
    pieces = [piece for cube in cubes if (piece := tile.project(cube)) is not None]
    ranges = RangeUnion(atoms, tile.length).ranges(pieces)
    return ranges, (*builder.notes, *tile.notes)
