"""What the kernel families for tensor cores share: what they refuse, and keys summarised ahead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from attngen.analysis.key_bounds import WORD_KEYS
from attngen.analysis.ranges import compile_time_ranges, infer_ranges
from attngen.codegen.forward_context import head_dims
from attngen.codegen.mask_text import MaskText
from attngen.codegen.score_text import ScoreText
from attngen.codegen.tiles import TileFormulas, find_key_sets
from attngen.ir.attention import Attention
from attngen.ir.program import (
    Axis,
    CeilDiv,
    Launch,
    Loop,
    MoreThan,
    Op,
    Step,
    TileProgram,
    Workspace,
)
from attngen.ir.schedule import LoopOrder, Normalize, Passes, Schedule
from attngen.ir.types import BF16, FP16, Element
from attngen.targets.base import Feature, Target

__all__ = [
    "CHEAP_SCORE",
    "DTYPES",
    "bound_words",
    "describe",
    "folds_scale",
    "has_bounded_tiles",
    "loop_reasons",
    "most_growth",
    "problem_reasons",
    "summarise_keys_ahead",
    "tile_kv_reasons",
]

DTYPES: Final[tuple[Element, ...]] = (FP16, BF16)
CHEAP_SCORE: Final = 3
"""Operations of a score that is linear in the distance."""

_LARGEST_HEAD_DIM: Final = 256
_MOST_AHEAD: Final = 128
"""Keys of a tile: a lane keeps a bit for each of its pairs in a row, in 32 bits."""
_MOST_GROWN: Final = 256.0
"""What an addend may gain within a tile where products get it: they err by 2^-13 then."""
_TILES_AT_ONCE: Final = 32
"""Key tiles that a warp classifies together, one a lane; so many are a group."""


def problem_reasons(
    attention: Attention, target: Target, features: tuple[Feature, ...], multiple: int
) -> Iterator[str]:
    """Why a problem is out of the question; head dims are multiples of `multiple`."""
    missing = [f.name.lower() for f in features if f not in target.features]
    if missing:
        yield f"{target.name} has no {', '.join(missing)}"
    if attention.dtype not in DTYPES:
        found = "an open dtype" if attention.dtype is None else attention.dtype.name
        yield f"tensor cores multiply fp16 or bf16 here, not {found}"
    for dim in sorted(set(head_dims(attention))):
        if dim % multiple or dim > _LARGEST_HEAD_DIM:
            limits = f"multiples of {multiple} up to {_LARGEST_HEAD_DIM}"
            yield f"head dims are {limits}, which {dim} is not"


def loop_reasons(attention: Attention, schedule: Schedule) -> Iterator[str]:
    """What keeps a schedule from being FlashAttention-2's loop over all keys of a query tile."""
    has_max = attention.row_state.running_max
    if schedule.loop is not LoopOrder.Q_KV:
        yield "its query tiles are outside: `loop q, kv`"
    if has_max and schedule.passes is not Passes.FUSED:
        yield "it walks the keys once: `passes fused`"
    if has_max and schedule.normalize is not Normalize.LAST:
        yield "it divides at the end: `normalize last`"
    if schedule.splits not in (None, 1):
        yield "it does not split keys over blocks"
    if schedule.has_order:
        yield "its steps have one order, so `overlap` stays `auto`"


def tile_kv_reasons(schedule: Schedule, *, masks_ahead: bool) -> Iterator[str]:
    """What is wrong with the keys of a tile.

    masks_ahead:  the mask of a tile is found before its scores.
    """
    tile_kv = schedule.tile_kv or 16
    if tile_kv % 16 or tile_kv > 256:
        yield f"`tile kv` is a multiple of 16 up to 256, not {tile_kv}"
    if masks_ahead and tile_kv > _MOST_AHEAD:
        yield f"`tile kv` is at most {_MOST_AHEAD} where a mask is found ahead of the scores"


def folds_scale(attention: Attention) -> bool:
    """Whether exp2 can take the scale: there is nothing between, and no order is turned round."""
    if attention.scores or not attention.row_state.running_max:
        return False
    symbols = compile_time_ranges(attention)
    found = infer_ranges((attention.scale,), symbols, attention)[id(attention.scale)]
    return not found.nan and found.low > 0 and found.high < math.inf


def most_growth(attention: Attention, tile_kv: int) -> float:
    """By which an addend may grow from key to key at most, for products to get what it gains.

    q.k is then rounded as a number of the size of what was gained, which weights of bf16 hide.
    """
    assert attention.dtype is not None
    is_rounded = attention.dtype.weight_scale == 1.0 and attention.row_state.running_max
    return _MOST_GROWN / tile_kv if is_rounded else 0.0


def summarise_keys_ahead(
    attention: Attention, family: str, tile_q: int, tile_kv: int, *, warps: int, least_keys: int
) -> tuple[Launch, ...]:
    """The launch that summarises keys, one block for each group of tiles; () without summaries.

    It pays where several query tiles would read the same keys: with one, as in decoding, each key
    is read once either way.

    warps:       of a block.
    least_keys:  there is such a launch beyond so many.
    """
    sets = find_key_sets(attention)
    if sets is None:
        return ()
    groups = CeilDiv("keys", _TILES_AT_ONCE * tile_kv)
    body = Loop(Axis.KV, True, (Step(Op.SUMMARISE_KEYS),))
    launch = Launch(
        kernel=f"{attention.name}_summarise_keys",
        family=family,
        tiles=TileProgram(tile_q, tile_kv, (Loop(Axis.BATCH_HEAD, True, (body,)),)),
        grid=(*sets.dims, groups),
        threads=32 * warps,
        shared_bytes=4 * warps * sets.ends,
        workspaces=(
            Workspace("key_ends", (*sets.dims, sets.ends, _TILES_AT_ONCE + 1, groups), "int32"),
        ),
        when=(MoreThan("keys", least_keys), MoreThan("rows", tile_q)),
    )
    return (launch,)


def describe(schedule: Schedule) -> str:
    """A complete schedule in the words of the header."""
    return (
        f"loop {schedule.loop.value}; passes {schedule.passes.value}; normalize"
        f" {schedule.normalize.value}; tile q = {schedule.tile_q}, kv = {schedule.tile_kv};"
        f" stages {schedule.stages}; warps {schedule.warps}"
    )


def bound_words(schedule: Schedule) -> int:
    """Words of one bit for each key of a lane in a tile."""
    assert schedule.tile_kv is not None, "complete the schedule first"
    return -(-schedule.tile_kv // WORD_KEYS)


def has_bounded_tiles(mask: MaskText | None, tiles: TileFormulas, scores: ScoreText) -> bool:
    """Whether some tiles are a class of their own, in which bounds of keys alone decide.

    A polynomial for scores near 0 leaves no room for a third kind of step.
    """
    has_rest = mask is not None and mask.bounds is not None and tiles.rest is not None
    return has_rest and scores.near is None
