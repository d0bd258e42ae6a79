"""Which tiles of one problem are skipped, full or partial, and what partial ones waste.

    mask  kv <= qpos, 4 rows and keys to a tile        █▒··   skip     may is false
                                                       ██▒·   full     all is true
                                                       ███▒   partial  every pair is decided

`tile_classes.py` gives the two conditions as expressions.  Here they get their numbers: sizes,
params, captured tensors and, for each row or key of tiles, its ends and summaries.  All tiles
are evaluated together, in blocks; pairs are looked at in partial tiles alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from itertools import product
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.analysis.tile_classes import (
    MOST_IN_BOX,
    BoxSummary,
    Summary,
    TileClasses,
    classify_tiles,
)
from attngen.ir.attention import Attention
from attngen.ir.expr import Expr
from attngen.ir.semantics import evaluate
from attngen.record import record

__all__ = ["MIXED", "TileCells", "TileKind", "TileMap", "map_tiles", "summarise_box"]

Array: TypeAlias = Any

MAX_TILES: Final = 1 << 25
"""Tiles that are classified, a byte each: 128k rows and keys in tiles of 16 x 32."""
MAX_ALONG: Final = 1 << 16
"""Tiles along one axis; of more, so many are taken, evenly spaced."""
MAX_PAIRS: Final = 1 << 24
"""Pairs of partial tiles that are decided one by one; of more, some tiles are taken."""
AT_ONCE: Final = 1 << 17
"""Tiles or pairs in one step: 1 MiB for every intermediate array."""


class TileKind(IntEnum):
    """What a kernel does with a tile."""

    SKIP = 0
    """no pair attends, and nothing is loaded"""
    PARTIAL = 1
    """every pair is decided by itself"""
    FULL = 2
    """every pair attends, and the mask is not evaluated"""


MIXED: Final = len(TileKind)
"""Tiles of several kinds, where a drawing takes them together."""


@final
@record(eq=False)
class TileCells:
    """Groups of `step_q` x `step_kv` neighbouring tiles, powers of two; the last have fewer.

    kinds:  uint8 [groups, groups], values of `TileKind`, or `MIXED`
    """

    kinds: Array
    step_q: int
    step_kv: int


@final
@record(eq=False)
class TileMap:
    """The tiles of one batch and head.

    rows, keys:        the length of the sequence, in tokens
    q_tiles, kv_tiles: numbers of the tiles that were classified; all, up to `MAX_TILES`
    kinds:             uint8 [q_tiles, kv_tiles], values of `TileKind`
    counted:           partial tiles whose pairs were decided; all, up to `MAX_PAIRS`
    attending:         pairs that attend in these
    counted_pairs:     pairs in these
    missed_skip:       how many of these hold no pair that attends
    missed_full:       how many of these hold none that does not

    Pairs past the end of the sequence do not count.
    """

    rows: int
    keys: int
    tile_q: int
    tile_kv: int
    q_tiles: Array
    kv_tiles: Array
    kinds: Array
    counted: int
    attending: int
    counted_pairs: int
    missed_skip: int
    missed_full: int

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return -(-self.rows // self.tile_q) * -(-self.keys // self.tile_kv)

    @property
    def has_all_tiles(self) -> bool:
        return bool(self.kinds.size == self.tiles)

    @property
    def has_all_pairs(self) -> bool:
        """Whether every pair of every partial tile was decided."""
        return self.has_all_tiles and self.counted == self._found(TileKind.PARTIAL)

    def count(self, kind: TileKind) -> int:
        """Tiles of a kind; an estimate where not all were classified."""
        return round(self._found(kind) * self._scale)

    def pairs(self, kind: TileKind) -> int:
        """Pairs in the tiles of a kind; an estimate where not all were classified."""
        if not self.kinds.size:
            return 0
        here = self.kinds == kind
        heights = _extents(self.q_tiles, self.tile_q, self.rows)
        widths = _extents(self.kv_tiles, self.tile_kv, self.keys)
        in_row = np.count_nonzero(here, axis=1) * self.tile_kv
        narrower_by = self.tile_kv - widths[-1]  # only the last tile can be narrower
        found = heights @ (in_row - here[:, -1] * narrower_by)
        return round(int(found) * self._scale)

    @property
    def computed(self) -> int:
        """Pairs that a kernel computes: those of partial and full tiles."""
        return self.pairs(TileKind.PARTIAL) + self.pairs(TileKind.FULL)

    @property
    def wasted_share(self) -> float:
        """The share of computed pairs that do not attend, 0 to 1; all of them are in partial
        tiles."""
        if not self.counted_pairs:
            return 0.0
        idle = 1 - self.attending / self.counted_pairs
        return idle * self.pairs(TileKind.PARTIAL) / self.computed

    def cells(self, most_q: int, most_kv: int) -> TileCells:
        """The map in small: at most [most_q, most_kv] groups of neighbouring tiles."""
        low = high = self.kinds
        steps = _step(low.shape[0], most_q), _step(low.shape[1], most_kv)
        for axis, step in enumerate(steps):
            starts = np.arange(0, low.shape[axis], step)
            low = np.minimum.reduceat(low, starts, axis=axis)
            high = np.maximum.reduceat(high, starts, axis=axis)
        kinds = np.where(low == high, low, np.uint8(MIXED))
        return TileCells(kinds, *steps)

    def _found(self, kind: TileKind) -> int:
        return int(np.count_nonzero(self.kinds == kind))

    @property
    def _scale(self) -> float:
        return self.tiles / self.kinds.size if self.kinds.size else 1.0


def map_tiles(
    attention: Attention,
    *,
    tile_q: int,
    tile_kv: int,
    sizes: Mapping[str, int],
    params: Mapping[str, bool | int | float],
    tensors: Mapping[str, Array],
    b: int = 0,
    h: int = 0,
    most_pairs: int | None = None,
) -> TileMap:
    """Classify the tiles of one batch and head, and decide the pairs of the partial ones.

    A pair attends here when the mask is true; what a score line makes -inf still attends.

    Shapes:  `tensors` have all their declared dimensions.
    Units:   `tile_q`, `tile_kv` in tokens; `sizes` are the block's and those that tensors name.
    most_pairs:  of partial tiles are decided, `MAX_PAIRS` by default; with 0 only kinds are found.
    Memory:  grows with tiles, up to `MAX_TILES` bytes, and with what a row or key of tiles needs;
             never with pairs.
    """
    known = _Known(attention, sizes, params, tensors, b, h)
    q_tiles = _evenly(-(-known.rows // tile_q), MAX_ALONG)
    kv_tiles = _evenly(-(-known.keys // tile_kv), MAX_ALONG)
    q_tiles = q_tiles[_evenly(len(q_tiles), max(1, MAX_TILES // max(1, len(kv_tiles))))]
    classes = classify_tiles(attention)
    kinds = np.empty((len(q_tiles), len(kv_tiles)), np.uint8)
    if kinds.size:
        rows = known.along_rows(q_tiles, tile_q, classes.row_summaries)
        keys = known.along_keys(kv_tiles, tile_kv, classes.key_summaries)
        _classify(known, classes, rows, keys, kinds)
    counted = attending = pairs = missed_skip = missed_full = 0
    most = MAX_PAIRS if most_pairs is None else most_pairs
    for i, j in _partial_tiles(kinds, most, tile_q * tile_kv):
        visible, inside = known.pairs(q_tiles[i] * tile_q, kv_tiles[j] * tile_kv, tile_q, tile_kv)
        counted += len(i)
        attending += int(visible.sum())
        pairs += int(inside.sum())
        missed_skip += int(np.count_nonzero(visible == 0))
        missed_full += int(np.count_nonzero(visible == inside))
    return TileMap(
        known.rows, known.keys, tile_q, tile_kv, q_tiles, kv_tiles, kinds,
        counted, attending, pairs, missed_skip, missed_full,
    )  # fmt: skip


def summarise_box(
    summary: BoxSummary, tensor: Array, value: Callable[[Expr], Array]
) -> dict[str, Array]:
    """`<name>_low` and `<name>_high`, as a kernel finds them: an index outside is the nearest one.

    value:  the value of an expression over each tile.
    """
    lows = [np.asarray(value(e)) for e in summary.lows]
    highs = [np.asarray(value(e)) for e in summary.highs]
    counts: list[Array] = list(
        np.broadcast_arrays(*(b - a + 1 for a, b in zip(lows, highs, strict=True)))
    )
    is_small = np.logical_and.reduce([c <= MOST_IN_BOX for c in counts])
    counts = [np.where(is_small, c, 1) for c in counts]
    is_small &= np.multiply.reduce(counts) <= MOST_IN_BOX
    is_truth = tensor.dtype == bool
    least, most = (0, 1) if is_truth else (-(2**31), 2**31 - 1)
    low = np.full(counts[0].shape, most, np.int64)
    high = np.full(counts[0].shape, least, np.int64)
    for steps in product(*(range(int(np.where(is_small, c, 1).max(initial=1))) for c in counts)):
        # A step behind the last element reads it again, which changes no minimum.
        at = [np.minimum(a + i, b) for a, b, i in zip(lows, highs, steps, strict=True)]
        at = [np.clip(x, 0, size - 1) for x, size in zip(at, tensor.shape, strict=True)]
        element = tensor[tuple(at)].astype(np.int64) if tensor.size else 0
        low, high = np.minimum(low, element), np.maximum(high, element)
    return {
        f"{summary.name}_low": np.where(is_small, low, least),
        f"{summary.name}_high": np.where(is_small, high, most),
    }


# ---- one batch and head ----------------------------------------------------------------------


class _Known:
    """What is known for one batch and head, and the expressions evaluated with it."""

    def __init__(
        self,
        attention: Attention,
        sizes: Mapping[str, int],
        params: Mapping[str, bool | int | float],
        tensors: Mapping[str, Array],
        b: int,
        h: int,
    ) -> None:
        self._mask = attention.mask
        self._tensors = tensors
        group = max(1, sizes["Hq"] // max(1, sizes["Hkv"]))
        self._names: dict[str, Array] = {
            **{name: np.int64(size) for name, size in sizes.items()},
            **{n: np.float32(v) if isinstance(v, float) else v for n, v in params.items()},
            "b": np.int64(b), "h": np.int64(h), "hkv": np.int64(h // group),
        }  # fmt: skip
        lengths = [
            self._names[name] if e is None else np.int64(self.value(e, {}))
            for name, e in (("Sq", attention.length_q), ("Skv", attention.length_kv))
        ]
        self._names |= {"Sq": lengths[0], "Skv": lengths[1]}
        self.rows, self.keys = (int(length) for length in lengths)
        self._shift = self.keys - self.rows

    def value(self, e: Expr, names: Mapping[str, Array]) -> Array:
        return evaluate(e, {**self._names, **names}, self._tensors).data

    def along_rows(
        self, tiles: Array, tile: int, summaries: tuple[Summary, ...]
    ) -> dict[str, Array]:
        """Ends and summaries of each tile of rows; every array is [tiles]."""
        first, last = _ends(tiles, tile, self.rows)
        ends = {"q_first": first, "q_last": last}
        ends |= {"qpos_first": first + self._shift, "qpos_last": last + self._shift}
        return ends | self._summarise(first, last, tile, summaries, ("q", "qpos"))

    def along_keys(
        self, tiles: Array, tile: int, summaries: tuple[Summary, ...]
    ) -> dict[str, Array]:
        """Ends and summaries of each tile of keys; every array is [tiles]."""
        first, last = _ends(tiles, tile, self.keys)
        ends = {"kv_first": first, "kv_last": last}
        return ends | self._summarise(first, last, tile, summaries, ("kv",))

    def _summarise(
        self,
        first: Array,
        last: Array,
        tile: int,
        summaries: tuple[Summary, ...],
        names: tuple[str, ...],
    ) -> dict[str, Array]:
        found = {
            f"{s.name}_{end}": np.empty(len(first), np.int64)
            for s in summaries
            for end in ("low", "high")
        }
        for part in _slices(len(first), max(1, AT_ONCE // tile)):
            # A tile that is cut short repeats its last token, which changes no minimum.
            tokens = np.minimum(first[part, None] + np.arange(tile), last[part, None])
            at = dict(zip(names, (tokens, tokens + self._shift), strict=False))
            for s in summaries:
                values = np.broadcast_to(self.value(s.value, at), tokens.shape)
                found[f"{s.name}_low"][part] = values.min(axis=1)
                found[f"{s.name}_high"][part] = values.max(axis=1)
        return found

    def box(self, summary: BoxSummary, tile: Mapping[str, Array]) -> dict[str, Array]:
        """Ends of what tiles reach of a tensor; the shape is that of the tiles."""
        tensor = self._tensors[summary.value.tensor]
        return summarise_box(summary, tensor, lambda e: self.value(e, tile))

    def pairs(
        self, q_first: Array, kv_first: Array, tile_q: int, tile_kv: int
    ) -> tuple[Array, Array]:
        """How many pairs attend in tiles with these first rows and keys, and how many there are."""
        q = (q_first[:, None] + np.arange(tile_q))[:, :, None]
        kv = (kv_first[:, None] + np.arange(tile_kv))[:, None, :]
        inside = (q < self.rows) & (kv < self.keys)
        visible = inside
        if self._mask is not None:
            visible = inside & self.value(self._mask, {"q": q, "kv": kv, "qpos": q + self._shift})
        return visible.sum(axis=(1, 2)), inside.sum(axis=(1, 2))


def _classify(
    known: _Known, classes: TileClasses, rows: dict[str, Array], keys: dict[str, Array], out: Array
) -> None:
    """Write the kind of every tile into `out`, block by block."""
    for part_kv in _slices(out.shape[1], AT_ONCE):
        width = part_kv.stop - part_kv.start
        for part_q in _slices(out.shape[0], max(1, AT_ONCE // width)):
            tile = {name: x[part_q, None] for name, x in rows.items()}
            tile |= {name: x[None, part_kv] for name, x in keys.items()}
            for box in classes.box_summaries:
                tile |= known.box(box, tile)
            block = out[part_q, part_kv]
            block[...] = TileKind.PARTIAL
            np.putmask(block, _wide(known.value(classes.all, tile), block), TileKind.FULL)
            np.putmask(block, ~_wide(known.value(classes.may, tile), block), TileKind.SKIP)


def _wide(x: Array, like: Array) -> Array:
    return np.broadcast_to(x, like.shape)


def _partial_tiles(kinds: Array, most: int, area: int) -> Iterator[tuple[Array, Array]]:
    """Rows and columns of partial tiles with at most so many pairs, some at a time."""
    if not most:
        return
    in_row = np.count_nonzero(kinds == TileKind.PARTIAL, axis=1)
    before = np.cumsum(in_row) - in_row
    chosen = _spread(int(in_row.sum()), max(1, most // area))
    row_of: Array = np.searchsorted(before + in_row, chosen, side="right")
    step = max(1, AT_ONCE // area)
    for part in _slices(len(chosen), step):
        i, rank = row_of[part], chosen[part] - before[row_of[part]]
        columns = [
            np.flatnonzero(kinds[row] == TileKind.PARTIAL)[rank[i == row]] for row in np.unique(i)
        ]
        yield i, np.concatenate(columns)


# ---- axes ------------------------------------------------------------------------------------


def _ends(tiles: Array, tile: int, length: int) -> tuple[Array, Array]:
    first = tiles * tile
    return first, np.minimum(first + tile, length) - 1


def _extents(tiles: Array, tile: int, length: int) -> Array:
    first, last = _ends(tiles, tile, length)
    return last - first + 1


def _step(size: int, most: int) -> int:
    """The least power of two that cuts so many into at most so many groups.

    Masks are made of blocks whose edges are powers of two; groups then end where they do.
    """
    step = 1
    while size > step * most:
        step *= 2
    return step


def _evenly(size: int, most: int) -> Array:
    """At most so many integers of [0, size), evenly spaced: the middles of equal parts."""
    if size <= most:
        return np.arange(size, dtype=np.int64)
    return (2 * np.arange(most, dtype=np.int64) + 1) * size // (2 * most)


def _spread(size: int, most: int) -> Array:
    """At most so many integers of [0, size), one somewhere in each of equal parts.

    Tiles along a diagonal repeat, and even steps could meet one kind alone.  The places are
    pseudo-random, and the same every time.
    """
    if size <= most:
        return np.arange(size, dtype=np.int64)
    edges = np.arange(most + 1, dtype=np.int64) * size // most
    return np.random.default_rng(0).integers(edges[:-1], edges[1:])


def _slices(size: int, step: int) -> Iterator[slice]:
    for begin in range(0, size, step):
        yield slice(begin, min(begin + step, size))
