"""The map of tiles as a picture: one SVG file that needs nothing else, on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby
from typing import Any, Final, TypeAlias

from attngen.analysis.tile_map import MIXED, TileKind, TileMap

__all__ = ["draw_svg"]

Array: TypeAlias = Any

MAX_CELLS: Final = 256
"""Rows and columns of the picture; of more tiles, neighbours share a cell."""
SIDE: Final = 480
"""The longer side of the map, in pixels; the other follows from the lengths."""
LEAST_SIDE: Final = 160
LEFT, TOP, RIGHT, BELOW, LINE = 92, 76, 28, 56, 20
"""Margins around the map, and the distance of two lines of the legend, in pixels."""
WIDEST, CHARACTER = 440, 9
"""What a line of the legend takes, and a character of the title, in pixels."""

_CLASSES: Final[Mapping[int, str]] = {
    TileKind.SKIP: "skip", TileKind.PARTIAL: "partial", TileKind.FULL: "full", MIXED: "mixed",
}  # fmt: skip
_STYLE: Final = """\
text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.page { fill: #ffffff; }
.skip { fill: #eaeef2; }
.partial { fill: #f0a63a; }
.mixed { fill: #f8dcae; }
.full { fill: #2563a8; }
.frame { fill: none; stroke: #59636e; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .page { fill: #0d1117; }
  .skip { fill: #262c36; }
  .partial { fill: #d9922b; }
  .mixed { fill: #6f5527; }
  .full { fill: #6cb0f5; }
  .frame { stroke: #9198a1; }
}"""


def draw_svg(title: str, tile_map: TileMap) -> str:
    """The picture of a map that has tiles.

    Units:  axes are in tokens, the picture in pixels.
    """
    longest = max(tile_map.rows, tile_map.keys)
    width, height = (max(LEAST_SIDE, SIDE * n // longest) for n in (tile_map.keys, tile_map.rows))
    cells = tile_map.cells(MAX_CELLS, MAX_CELLS)
    legend = _legend(tile_map, cells.step_q * cells.step_kv > 1)
    page = (
        LEFT + max(width, WIDEST, CHARACTER * len(title)) + RIGHT,
        TOP + height + BELOW + LINE * len(legend),
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {page[0]} {page[1]}"'
        f' width="{page[0]}" height="{page[1]}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>\n{_STYLE}\n</style>",
        f'<rect class="page" width="{page[0]}" height="{page[1]}"/>',
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
        f'<g shape-rendering="crispEdges" transform="translate({LEFT} {TOP})">',
        f'<rect class="skip" width="{width}" height="{height}"/>',
        *_tiles(cells.kinds, width, height),
        f'<rect class="frame" width="{width}" height="{height}"/>',
        "</g>",
        *_key_axis(tile_map.keys, width),
        *_row_axis(tile_map.rows, height),
    ]
    for i, (kind, text) in enumerate(legend):
        y = TOP + height + BELOW + LINE * i
        if kind is not None:
            box = f'x="{LEFT}" y="{y - 11}" width="13" height="13"'
            lines.append(f'<rect class="{_CLASSES[kind]}" {box}/>')
        lines.append(f'<text x="{LEFT + 22}" y="{y}">{escape(text)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _tiles(kinds: Array, width: int, height: int) -> list[str]:
    """One path for each kind but SKIP, which is the ground; neighbours in a row are one piece."""
    xs = [round(width * j / kinds.shape[1], 2) for j in range(kinds.shape[1] + 1)]
    ys = [round(height * i / kinds.shape[0], 2) for i in range(kinds.shape[0] + 1)]
    pieces: dict[int, list[str]] = {TileKind.PARTIAL: [], TileKind.FULL: [], MIXED: []}
    for i, row in enumerate(kinds.tolist()):
        begin = 0
        for kind, run in groupby(row):
            end = begin + len(list(run))
            if kind != TileKind.SKIP:
                corners = f"M{xs[begin]:g} {ys[i]:g}H{xs[end]:g}V{ys[i + 1]:g}H{xs[begin]:g}Z"
                pieces[kind].append(corners)
            begin = end
    return [
        f'<path class="{_CLASSES[kind]}" d="{"".join(found)}"/>'
        for kind, found in pieces.items()
        if found
    ]


def _key_axis(keys: int, width: int) -> list[str]:
    lines = [f'<text x="{LEFT + width / 2:g}" y="46" text-anchor="middle">key kv, in tokens</text>']
    for token in _ticks(keys, width // 70):
        x = LEFT + width * token / keys
        lines.append(f'<path class="frame" d="M{x:.5g} {TOP - 5}V{TOP}"/>')
        lines.append(f'<text x="{x:.5g}" y="{TOP - 9}" text-anchor="middle">{token}</text>')
    return lines


def _row_axis(rows: int, height: int) -> list[str]:
    middle = TOP + height / 2
    lines = [
        f'<text x="18" y="{middle:g}" text-anchor="middle"'
        f' transform="rotate(-90 18 {middle:g})">query row q, in tokens</text>'
    ]
    for token in _ticks(rows, height // 40):
        y = TOP + height * token / rows
        lines.append(f'<path class="frame" d="M{LEFT - 5} {y:.5g}H{LEFT}"/>')
        lines.append(f'<text x="{LEFT - 9}" y="{y + 4:.5g}" text-anchor="end">{token}</text>')
    return lines


def _ticks(length: int, most: int) -> list[int]:
    """0 and multiples of a power of two, at most so many and the end of them all."""
    step = 1
    while length / step > max(1, most):
        step *= 2
    return list(range(0, length + 1, step))


def _legend(tile_map: TileMap, is_mixed: bool) -> list[tuple[int | None, str]]:
    texts = {
        TileKind.SKIP: "skip: no pair attends",
        TileKind.PARTIAL: "partial: the mask is evaluated pair by pair",
        TileKind.FULL: "full: every pair attends",
    }
    lines: list[tuple[int | None, str]] = []
    about = "" if tile_map.has_all_tiles else "about "
    for kind, text in texts.items():
        share = tile_map.count(kind) / tile_map.tiles
        lines.append((kind, f"{text} ({about}{tile_map.count(kind):,} tiles, {share:.1%})"))
    if is_mixed:
        lines.append((MIXED, "neighbouring tiles of several kinds"))
    about = "" if tile_map.has_all_pairs else "about "
    lines.append((None, f"{about}{tile_map.wasted_share:.1%} of the computed pairs do not attend"))
    return lines
