"""A kernel beside a golden that asks its functions about random tiles and keys.

A kernel asks about few tiles, and a wrong answer often changes nothing: the tile is far from the
edge that was moved, or it is visited though it could be skipped.  So the answers are compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from attngen.codegen.tiles import TileFormulas, tile_formulas
from attngen.compiler import Rendered

__all__ = ["has_tiles", "probe_of", "with_probe"]

_DRAWS: Final = 800
"""Tiles that each thread asks about."""

_DRAW: Final = """
struct Draws {
    ag_u32 bits;
    AG_DEVICE int below(int n) {
        bits ^= bits << 13;
        bits ^= bits >> 17;
        bits ^= bits << 5;
        return (int)(bits % (ag_u32)n);
    }
    // A checksum of answers, in which two wrong ones do not make up for each other.
    AG_DEVICE int mixed(int answer) { return (int)(((ag_u32)answer + 1) * (bits | 1)); }
};
"""


def has_tiles(rendered: Rendered) -> bool:
    return "AG_DEVICE Tile ends_of_rows(" in rendered.source


def with_probe(rendered: Rendered, text: str) -> str:
    """The golden's text, or a mutant of it, and the kernel behind it."""
    return (
        text + _kernel(tile_formulas(rendered.program.attention)) if has_tiles(rendered) else text
    )


def probe_of(rendered: Rendered) -> Rendered:
    """The golden as if the kernel were all it launches."""
    launch = replace(
        rendered.launch,
        kernel="probe_tiles",
        threads=32,
        shared_bytes=128,
        workspaces=rendered.program.workspaces,  # members of the argument struct
        is_persistent=False,
    )
    return replace(rendered, program=replace(rendered.program, launches=(launch,)))


def _kernel(tiles: TileFormulas) -> str:
    """Lengths, the rows and keys of a tile, all of them small more often than not; a key."""
    asks = [
        "answers[lane()] = draws.mixed(tile_may_attend(args, at, tile));",
        "answers[lane()] = draws.mixed(tile_attends_everywhere(args, at, tile));",
    ]
    if tiles.rest is not None:
        asks.append("answers[lane()] = draws.mixed(tile_attends_within_bounds(args, at, tile));")
    fills = []
    for s in (*tiles.row_summaries, *tiles.key_summaries):
        low, more = (2, 1) if s.most == "1" else (5, 3)  # truth values, or numbers
        fills.append(f"tile.{s.name}_low = draws.below({low});")
        fills.append(f"tile.{s.name}_high = tile.{s.name}_low + draws.below({more});")
    for box in tiles.boxes:
        fills.append(f"find_{box.name}(args, at, tile);")
        asks.append(f"answers[lane()] = draws.mixed(tile.{box.name}_low);")
        asks.append(f"answers[lane()] = draws.mixed(tile.{box.name}_high);")
    if tiles.ranges is not None:
        asks.append("const int end = last_key_end(args, at, tile, at.Skv);")
        asks.append("answers[lane()] = draws.mixed(end);")
        if tiles.ranges.skips:
            asks.append(
                "if (kv < end) answers[lane()] = draws.mixed(next_key(args, at, tile, kv, end));"
            )
    if tiles.key_may is not None:
        asks.append("at.kv = kv; answers[lane()] = draws.mixed(key_may_attend(args, at));")
    body = "\n".join(f"        {line}" for line in (*fills, *asks))
    return f"""{_DRAW}
AG_KERNEL(32, probe_tiles, Args) {{
    AG_SHARED_MEMORY(memory);
    ag_shared<int> answers(memory, 0, 32);
    Position at = place_head(args, ag_block() % (args.B * args.Hq));
    Draws draws = {{2463534242u + 32u * ag_block() + lane()}};
    for (int n = 0; n < {_DRAWS}; ++n) {{
        at.Sq = 1 + draws.below(1 + draws.below(args.Sq));
        at.Skv = 1 + draws.below(1 + draws.below(args.Skv));
        const int q = draws.below(at.Sq), kv = draws.below(at.Skv);
        const int rows = draws.below(1 + draws.below(1 + draws.below(kTileQ)));
        const int keys = draws.below(1 + draws.below(1 + draws.below(16 * kTileKv)));
        Tile tile = ends_of_rows(at, q, ag_min(q + rows, at.Sq - 1));
        tile.kv_first = kv;
        tile.kv_last = ag_min(kv + keys, at.Skv - 1);
{body}
    }}
}}
"""
