"""forward_mma: fp16 and bf16 on the tensor cores of every GPU since sm_80, FlashAttention-2's way.

One block per (batch, head, query tile).  Each warp owns 16 or 32 rows and keeps their scores,
weights and row state in registers; q, k and v lie in shared memory, where keys and values
arrive by asynchronous copies while the tile before them is worked on.

Source: Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, final

from attngen import resources
from attngen.analysis.tile_classes import classify_tiles
from attngen.codegen.expr import float_literal
from attngen.codegen.formulas import Formula
from attngen.codegen.forward_context import ForwardContext, forward_context, head_dims
from attngen.codegen.mask_parts import MaskParts, find_mask_parts, is_dear_per_pair
from attngen.codegen.mask_text import print_mask
from attngen.codegen.render import render
from attngen.codegen.score_parts import cost_of_pair
from attngen.codegen.score_text import print_scores
from attngen.codegen.staged_reads import StagedRead, choose_staged, staged_bytes
from attngen.codegen.tiles import TileFormulas, pair_by_pair, tile_formulas
from attngen.ir.attention import Attention
from attngen.ir.program import (
    Launch,
    Program,
    TileProgram,
    grid_of,
)
from attngen.ir.schedule import Schedule
from attngen.ir.types import Element
from attngen.kernels.base import (
    KernelFamily,
    SharedArray,
    Strided,
    total_bytes,
    vary,
    why_too_large,
)
from attngen.kernels.tensor_cores import (
    CHEAP_SCORE,
    DTYPES,
    bound_words,
    describe,
    folds_scale,
    has_bounded_tiles,
    loop_reasons,
    most_growth,
    problem_reasons,
    summarise_keys_ahead,
    tile_kv_reasons,
)
from attngen.passes.loop_nest import build_loop_nest
from attngen.targets.base import Feature, Target

__all__ = ["FAMILY", "Context", "ForwardMma"]

_COPY_BYTES: Final = 16
_ELEMENT: Final = 2
_WARPS_WANTED: Final = 8
_TILES_Q: Final = (16, 32, 64, 128, 256)
_WARPS: Final = (1, 2, 4, 8)
_STAGES: Final = (1, 2)
_OUTER_DIMS: Final = ("batch", "heads", "tokens")
_GROUP_WARPS: Final = 8
"""Warps of a block that summarises keys; they share the tiles of a group."""

PREPASS_KEYS: Final = 4 << 10
"""Keys beyond which a launch of its own summarises them.

A launch costs a few microseconds whatever there is to read, while every block without it reads what
the mask says of keys once more.  At 8192 keys an H200 is 4 to 12 % faster with it
(docs/performance.md); with fewer it has not been measured.
"""
_TEMPLATE: Final = "forward_mma.cu.j2"
_TEMPLATES: Final = (
    _TEMPLATE,
    "common/attention.cu.j2",
    "common/tiles.cu.j2",
    "common/staged.cu.j2",
    "common/device.cuh",
    "common/mma.cuh",
    "common/staged.cuh",
)
_FEATURES: Final = (Feature.CP_ASYNC, Feature.LDMATRIX, Feature.BF16_MMA)


@final
@dataclass(frozen=True, slots=True)
class Context(ForwardContext):
    """Every name that templates/forward_mma.cu.j2 and its macros use."""

    mma: str
    tiles: TileFormulas
    has_bounded: bool
    bound_words: int
    shared: tuple[SharedArray, ...]
    warps: int
    stages: int
    width_qk: int
    width_v: int
    key_bytes: int
    value_bytes: int
    staging: str
    staged_bytes: int
    scores_all: bool
    query_in_registers: bool
    is_aligned: bool
    folds_scale: bool
    growth: Formula | None
    masks_ahead: bool
    lowers_weights: bool
    weight_exponent: str
    unscale_weights: str
    prepass: str
    group_warps: int
    weight: str
    output: str
    lse: str


@final
@dataclass(frozen=True, slots=True)
class _Tile:
    """One choice of rows, keys, warps and stages."""

    q: int
    kv: int
    warps: int
    stages: int


@final
@dataclass(frozen=True, slots=True)
class ForwardMma:
    name: str = "forward_mma"
    templates: tuple[str, ...] = _TEMPLATES
    dtypes: tuple[Element, ...] = DTYPES
    features: tuple[Feature, ...] = _FEATURES
    operand_alignment: int = _COPY_BYTES
    stand_in: str | None = None

    def reasons_against(
        self, attention: Attention, schedule: Schedule, target: Target
    ) -> tuple[str, ...]:
        reasons = [
            *problem_reasons(attention, target, _FEATURES, multiple=8),
            *_schedule_reasons(attention, schedule),
        ]
        if not reasons:
            reasons += self._resource_reasons(attention, schedule, target)
        return tuple(reasons)

    def _resource_reasons(
        self, attention: Attention, schedule: Schedule, target: Target
    ) -> list[str]:
        complete = self.complete(attention, schedule, target)
        tile = _tile(complete)
        reasons = []
        if tile.q not in (16 * tile.warps, 32 * tile.warps):
            reasons.append(
                f"{tile.warps} warps of 16 or 32 rows are not a query tile of {tile.q} rows"
            )
            return reasons
        arrays = self.shared_arrays(attention, complete)
        if (too_large := why_too_large(arrays, target)) is not None:
            reasons.append(too_large)
        if _registers(attention, tile) > target.registers_per_thread:
            reasons.append(
                f"a warp's {tile.q // tile.warps} rows and {tile.kv} keys need about"
                f" {_registers(attention, tile)} registers a thread; {target.name} has"
                f" {target.registers_per_thread}"
            )
        return reasons

    def complete(self, attention: Attention, schedule: Schedule, target: Target) -> Schedule:
        """The default for the head dims, or the nearest smaller one that fits.

        Eight warps should find room on a multiprocessor; where no default lets them, the first
        that fits at all.
        """
        candidates = [_completed(schedule, tile) for tile in _defaults(attention)]
        fitting = [c for c in candidates if self._fits(attention, c, target)]
        roomy = [c for c in fitting if self._leaves_room(attention, c, target)]
        return (roomy or fitting or candidates[-1:])[0]

    def candidates(self, schedule: Schedule) -> Iterator[Schedule]:
        """Warps follow from the rows: 32 or 16 each."""
        named = replace(schedule, kernel=self.name)
        tiles = vary(named, tile_q=_TILES_Q, tile_kv=range(16, 129, 16), stages=_STAGES)
        for one in tiles:
            rows = one.tile_q or 0
            warps = tuple(w for w in (rows // 32, rows // 16) if w in _WARPS)
            yield from vary(one, warps=warps)

    def registers(self, attention: Attention, schedule: Schedule) -> int:
        return _registers(attention, _tile(schedule))

    def _fits(self, attention: Attention, schedule: Schedule, target: Target) -> bool:
        tile = _tile(schedule)
        if tile.q == 32 * tile.warps and is_dear_per_pair(attention) and target.registers_kept:
            return False  # measured: with 32 rows a warp the compiler keeps them, and spills
        shared = total_bytes(self.shared_arrays(attention, schedule))
        registers = _registers(attention, tile) + target.registers_kept
        return shared <= target.shared_bytes_per_block and registers <= target.registers_per_thread

    def _leaves_room(self, attention: Attention, schedule: Schedule, target: Target) -> bool:
        blocks = -(-_WARPS_WANTED // _tile(schedule).warps)
        shared = total_bytes(self.shared_arrays(attention, schedule))
        return blocks * (shared + target.shared_bytes_reserved) <= target.shared_bytes_per_sm

    def shared_arrays(self, attention: Attention, schedule: Schedule) -> tuple[SharedArray, ...]:
        """Rows of 16-byte chunks; at the end the output takes the place of all of them."""
        tile = _tile(schedule)
        qk, v = (_pitch(width) for width in _widths(attention))
        stages = "" if tile.stages == 1 else f"[{tile.stages}]"
        key, value = tile.stages * tile.kv * qk, tile.stages * tile.kv * v
        shapes = (
            (
                "query",
                max(tile.q * qk, tile.q * v - key - value),
                "[kTileQ][kWidthQk], and the output at the end",
            ),
            ("key", key, f"{stages}[kTileKv][kWidthQk]"),
            ("value", value, f"{stages}[kTileKv][kWidthV]"),
            *_staged_array(attention, tile),
            *_board(attention, tile),
        )
        placed, offset = [], 0
        for name, size, shape in shapes:
            placed.append(SharedArray(name, offset, size // _ELEMENT, size, shape))
            offset += size
        return tuple(placed)

    def lower(self, attention: Attention, schedule: Schedule) -> Program:
        tile = _tile(schedule)
        tiles = TileProgram(tile.q, tile.kv, build_loop_nest(attention.row_state, schedule))
        launch = Launch(
            kernel=f"{attention.name}_forward",
            family=self.name,
            tiles=tiles,
            grid=grid_of(tiles),
            threads=32 * tile.warps,
            shared_bytes=total_bytes(self.shared_arrays(attention, schedule)),
            workspaces=(),
        )
        ahead = summarise_keys_ahead(
            attention, self.name, tile.q, tile.kv, warps=_GROUP_WARPS, least_keys=PREPASS_KEYS
        )
        return Program(attention, schedule, (*ahead, launch))

    def why_slower(self, attention: Attention) -> str | None:
        return None

    def why_unaligned(self, operands: Mapping[str, Strided]) -> str | None:
        """The first thing that keeps rows of q, k or v from being copied 16 bytes at a time.

        Rows past the last one are copied, too, as zeros, from an address that must be aligned;
        so the stride of a single token counts, while that of a single batch or head does not.
        """
        for name, array in operands.items():
            if array.pointer % _COPY_BYTES:
                return f"`{name}` begins at an address that is no multiple of {_COPY_BYTES} bytes"
            if array.shape[-1] > 1 and array.strides[-1] != 1:
                return f"the elements of a row of `{name}` are {array.strides[-1]} apart, not 1"
            for dim, size, stride in zip(_OUTER_DIMS, array.shape, array.strides, strict=False):
                is_walked = size > 1 or dim == "tokens"
                if is_walked and stride * _ELEMENT % _COPY_BYTES:
                    return (
                        f"`{name}` has a stride of {stride * _ELEMENT} bytes along its {dim},"
                        f" no multiple of {_COPY_BYTES}"
                    )
        return None

    def render(
        self,
        program: Program,
        target: Target,
        *,
        is_checked: bool = False,
        is_aligned: bool = True,
    ) -> str:
        """The CUDA text; without `is_aligned` it takes q, k and v at any address and stride."""
        context = self.context(program, target, is_checked=is_checked, is_aligned=is_aligned)
        return render(_TEMPLATE, context, name=context.name)

    def context(
        self,
        program: Program,
        target: Target,
        *,
        is_checked: bool = False,
        is_aligned: bool = True,
    ) -> Context:
        """Everything the template places; all decisions are made here."""
        attention, schedule = program.attention, program.schedule
        assert attention.dtype is not None
        tile, state = _tile(schedule), attention.row_state
        staged = () if is_checked else _staged(attention, tile)
        scores = print_scores(
            attention,
            is_checked=is_checked,
            is_dear=cost_of_pair(attention) > CHEAP_SCORE,
            takes_unit=True,
            most_growth=most_growth(attention, tile.kv),
            staged=staged,
        )
        printer = scores.printer
        # What is computed ahead is read at pairs that a mask skips, which a check must not report.
        parts = None if is_checked else _mask_parts(attention)
        mask = None if parts is None else print_mask(attention, parts, len(scores.fixed))
        names = {"m": "m", "l": "l", "acc": "1.0f", "sink": "sink", "s": "s"}
        width_qk, width_v = _widths(attention)
        tiles = pair_by_pair(attention) if is_checked else tile_formulas(attention)
        shared = forward_context(
            program,
            target,
            printer,
            templates=_TEMPLATES,
            schedule=describe(schedule),
            is_checked=is_checked,
            scores=scores,
            mask=mask,
            staged=staged,
        )
        return Context(
            **shared.values(),
            mma=resources.template_source("common/mma.cuh"),
            tiles=tiles,
            has_bounded=has_bounded_tiles(mask, tiles, scores),
            bound_words=bound_words(schedule),
            shared=self.shared_arrays(attention, schedule),
            warps=tile.warps,
            stages=tile.stages,
            width_qk=width_qk,
            width_v=width_v,
            key_bytes=tile.kv * _pitch(width_qk),
            value_bytes=tile.kv * _pitch(width_v),
            staging=resources.template_source("common/staged.cuh") if staged else "",
            staged_bytes=staged_bytes(staged, tile.q, tile.kv),
            scores_all=scores.is_for_all,
            query_in_registers=_query_in_registers(attention, tile, target),
            is_aligned=is_aligned,
            folds_scale=folds_scale(attention),
            growth=scores.growth,
            masks_ahead=is_dear_per_pair(attention),
            lowers_weights=attention.dtype.weight_scale > 1.0,
            weight_exponent=float_literal(math.log2(attention.dtype.weight_scale)),
            unscale_weights=float_literal(1.0 / attention.dtype.weight_scale),
            prepass="".join(launch.kernel for launch in program.launches[:-1]),
            group_warps=_GROUP_WARPS,
            weight=printer.print_row_formula(state.weight, names),
            output=printer.print_row_formula(state.output, names),
            lse="" if state.lse is None else printer.print_row_formula(state.lse, names),
        )


# ---- what it takes -------------------------------------------------------------------------


def _schedule_reasons(attention: Attention, schedule: Schedule) -> Iterator[str]:
    yield from loop_reasons(attention, schedule)
    if schedule.stages not in (None, *_STAGES):
        yield "`stages` is 1 or 2"
    if schedule.tile_q not in (None, *_TILES_Q):
        yield f"`tile q` is a power of 2 from 16 to 256, not {schedule.tile_q}"
    yield from tile_kv_reasons(schedule, masks_ahead=is_dear_per_pair(attention))
    if schedule.warps not in (None, *_WARPS):
        yield "`warps` is 1, 2, 4 or 8"


# ---- tiles ---------------------------------------------------------------------------------


def _defaults(attention: Attention) -> tuple[_Tile, ...]:
    """Tiles for the head dims, the ones to prefer first; with them no golden spills.

    32 rows a warp read keys and values from shared memory half as often as 16, but leave
    registers for nothing else.  The order for head dims 64 and 128 is what an H200 measured
    (docs/performance.md).
    """
    largest, is_bare = max(_widths(attention)), _is_bare(attention)
    is_dear = is_dear_per_pair(attention)
    smaller: tuple[_Tile, ...]
    if largest > 128:
        smaller = (_Tile(128, 32, 8, 2), _Tile(64, 32, 4, 1), _Tile(64, 16, 4, 1))
        return (_Tile(128, 64, 8, 2), *smaller) if is_bare else smaller
    if largest <= 64:
        return (_Tile(128, 64, 4, 2), _Tile(64, 64, 4, 2)) if is_bare else (_Tile(64, 64, 4, 2),)
    smaller = (_Tile(64, 48, 4, 2), _Tile(64, 48, 4, 1))
    if is_bare and is_dear:
        return (_Tile(128, 64, 4, 2), *smaller)
    if is_bare:
        wider = (_Tile(128, 64, 4, 2), _Tile(128, 48, 4, 2), _Tile(128, 48, 4, 1))
        return (*wider, *smaller)
    return smaller if is_dear else (_Tile(64, 64, 4, 2), *smaller)


def _is_bare(attention: Attention) -> bool:
    """Whether a pair's score is its product and a few additions, and rows in shared memory have
    the simplest layout.

    Its mask is cheap or found ahead, without a read for each pair and without parts of the head.
    """
    extras = (attention.sink, attention.length_q, attention.length_kv)
    has_extras = any(e is not None for e in extras)
    qk, v = _widths(attention)
    is_simple = qk == v and (qk % 64 == 0 or qk <= 32)
    is_cheap = cost_of_pair(attention) <= CHEAP_SCORE
    parts = find_mask_parts(attention)
    is_light = parts is not None and not parts.reads and not parts.fixed
    is_masked = is_light or not is_dear_per_pair(attention)
    return is_simple and is_cheap and is_masked and not has_extras


def _completed(schedule: Schedule, tile: _Tile) -> Schedule:
    tile_q = schedule.tile_q or tile.q
    warps = schedule.warps
    if warps is None:
        rows = 32 if tile_q == tile.q == 32 * tile.warps else 16
        warps = max(1, tile_q // rows)
    return replace(
        schedule,
        kernel="forward_mma",
        tile_q=tile_q,
        tile_kv=schedule.tile_kv or tile.kv,
        stages=schedule.stages or tile.stages,
        warps=warps,
        splits=1,
    )


def _tile(schedule: Schedule) -> _Tile:
    q, kv, warps, stages = schedule.tile_q, schedule.tile_kv, schedule.warps, schedule.stages
    if q is None or kv is None or warps is None or stages is None:
        raise ValueError("complete the schedule first")
    return _Tile(q, kv, warps, stages)


def _widths(attention: Attention) -> tuple[int, int]:
    """Columns of q and k, and of v, in shared memory: matrix products take 16 at a time."""
    qk, v = head_dims(attention)
    return -(-qk // 16) * 16, -(-v // 16) * 16


def _pitch(width: int) -> int:
    """Bytes from one row to the next; see `Layout` in the template."""
    return width * _ELEMENT + (_COPY_BYTES if width % 64 == 0 else 0)


_WIDEST_WITH_READS: Final = 128
"""Columns; beyond, `block_sparse` spills registers on sm_80 and sm_90a."""

_MARGIN: Final = 64
"""Registers to be left when the query stays in registers.

With fewer left (32 rows a warp at head dim 64) an H200 is 3 to 9 % slower, though nothing spills.
"""

_MOST_STAGED: Final = 48 << 10
"""Bytes of shared memory for what score lines take from there: half of what the smallest have."""

_OTHER_REGISTERS: Final = 60
"""Operands of the products on their way, row state, addresses and counters."""

_AHEAD_REGISTERS: Final = 3
"""What a mask that is found ahead takes of them: as many more as still fit where nothing spills."""


def _registers(attention: Attention, tile: _Tile) -> int:
    """About how many registers a thread needs: its scores and its part of the output."""
    _, width_v = _widths(attention)
    rows = tile.q // tile.warps
    ahead = _AHEAD_REGISTERS if is_dear_per_pair(attention) else 0
    return rows * (tile.kv + width_v) // 32 + _OTHER_REGISTERS + ahead


def _query_in_registers(attention: Attention, tile: _Tile, target: Target) -> bool:
    """Whether the query stays in registers, too, and is read from shared memory once."""
    width_qk, _ = _widths(attention)
    rows = tile.q // tile.warps
    registers = _registers(attention, tile) + rows * width_qk // 64 + target.registers_kept
    return registers <= target.registers_per_thread - _MARGIN


def _mask_parts(attention: Attention) -> MaskParts | None:
    """What is computed ahead of a pair's mask: of rows and keys if it is found ahead.

    Reads of many pairs at once take registers, of which the widest output leaves none.
    """
    parts = find_mask_parts(attention)
    if parts is None:
        return None
    if not is_dear_per_pair(attention):
        return parts.whole if parts.fixed or parts.bounds else None
    is_wide = max(_widths(attention)) > _WIDEST_WITH_READS
    return None if parts.reads and is_wide else parts


def _staged(attention: Attention, tile: _Tile) -> tuple[StagedRead, ...]:
    return choose_staged(attention, tile.q, tile.kv, tile.stages, _MOST_STAGED)


def _staged_array(attention: Attention, tile: _Tile) -> Iterator[tuple[str, int, str]]:
    """What score lines read of tensors, a step ahead: name, bytes, shape."""
    if (one := staged_bytes(_staged(attention, tile), tile.q, tile.kv)) > 0:
        yield "staged", tile.stages * one, f"{'' if tile.stages == 1 else '[2]'}[kStagedBytes]"


def _board(attention: Attention, tile: _Tile) -> tuple[tuple[str, int, str], ...]:
    """What threads of a block tell each other: name, bytes, shape; `Board` in the template."""
    threads = 32 * tile.warps
    rows = len(classify_tiles(attention).row_summaries)
    bits = 16 * tile.q if is_dear_per_pair(attention) else 0
    arrays = (
        ("heads", 16, "addresses of the head's keys and values"),
        ("place", 32, "of the block, and the keys that are not listed yet"),
        ("list", 8 * (threads + 1), "[2][kThreads + 1], key tiles"),
        ("counts", 4 * tile.warps, "[kWarps], key tiles"),
        ("attending", bits, "[2 * kSlabs][kThreads], pairs"),
        ("ends", 8 * rows * tile.warps, f"[{2 * rows}][kWarps], of rows"),
    )
    return tuple(array for array in arrays if array[1])


FAMILY: Final = ForwardMma()

if TYPE_CHECKING:
    _: KernelFamily = FAMILY
