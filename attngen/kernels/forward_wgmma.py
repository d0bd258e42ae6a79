"""forward_wgmma: fp16 and bf16 on Hopper: tensor copies, wgmma, warp groups with roles.

A block stays on its multiprocessor and walks query tiles.  One warp group lists the key tiles
that each of them sees, and loads; two or three others have 64 query rows each and keep scores,
weights and row state in registers.

Source: the schedule is that of Shah et al., "FlashAttention-3", 2024, section 3, with steps
that run on over the ends of query tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, final

from attngen import resources
from attngen.analysis.key_bounds import split_mask
from attngen.analysis.tile_classes import classify_tiles
from attngen.codegen.expr import float_literal
from attngen.codegen.formulas import Formula
from attngen.codegen.forward_context import ForwardContext, forward_context, head_dims
from attngen.codegen.mask_parts import (
    MaskParts,
    find_mask_parts,
    gives_rows_all_keys,
    is_dear_per_pair,
    is_dear_to_classify,
)
from attngen.codegen.mask_text import print_mask
from attngen.codegen.render import render
from attngen.codegen.score_parts import cost_of_pair
from attngen.codegen.score_text import ScoreText, print_scores
from attngen.codegen.staged_reads import (
    Pattern,
    StagedRead,
    choose_staged,
    find_staged_reads,
    find_tile_boxes,
    is_taken_ahead,
    staged_bytes,
)
from attngen.codegen.tiles import TileFormulas, pair_by_pair, tile_formulas
from attngen.ir.attention import Attention
from attngen.ir.expr import Expr, Load, Symbol
from attngen.ir.program import (
    Launch,
    MoreThan,
    Program,
    TensorBox,
    TileProgram,
    grid_of,
)
from attngen.ir.schedule import Schedule
from attngen.ir.traverse import postorder
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
from attngen.record import record
from attngen.targets import sm_90a
from attngen.targets.base import Feature, Target

__all__ = ["FAMILY", "Context", "ForwardWgmma"]

_GROUP_ROWS: Final = 64
"""Rows of a product of a warp group."""
_COLUMNS: Final = 64
"""Columns of a box: 128 bytes, what a swizzle spans at most."""
_ROW_BYTES: Final = 128
_ELEMENT: Final = 2
_COPY_BYTES: Final = 16
_BARRIER: Final = 8
_STAGES: Final = 2
_SHARED_BYTES: Final = sm_90a.TARGET.shared_bytes_per_block  # no other target has wgmma
_MARGIN: Final = 8.0
"""Powers of two that `margin` is, so that a row's maximum seldom rises past it."""
_PIECES: Final = 4
"""Pieces of lists on their way: what is being worked on, and enough ahead of it."""
_PIECE_BYTES: Final = 48
_BOUNDED_BYTES: Final = 16
_PART_KEYS: Final = 16
"""Keys of a part of a product with v."""
_LANE_SHARE: Final = 2
"""Keys of a row for each weight of a lane, which has two rows and a quarter of the columns."""
_LATE_PARTS: Final = 3
"""Parts of a product with v that are started when the row maxima are known.

Measured on an H200 (D 64 and 128, 128 and 176 keys): 3 gain 3 to 8 % over none; at D 256 any lose.
So they do where more is computed before the maxima are known, since a warp group that waits for
them holds up the other one: none gain 8 to 14 % with most scores and dear masks.
"""
_REGISTERS: Final[Mapping[int, tuple[int, int]]] = {2: (40, 232), 3: (32, 160)}
"""By the number of warp groups that compute: registers of a thread that serves, and computes.

Together those of a multiprocessor, 512 or 504 for a thread of each group; with 24 the lane that
loads spills.
"""
_LEAST_LISTING, _MOST_LISTING = 72, 88
"""Of a thread that serves, where the lists are of a dear mask: with fewer some of them spill."""
_SCORES_BESIDE_MASK: Final = 32
"""What score lines take of a thread that computes, where a dear mask takes some, too."""
_SPARE_REGISTERS: Final = 16
"""What is left above the estimate for warp groups that compute, where another warp needs some."""
_MOST_STAGED: Final = 144 << 10
"""Bytes of shared memory for what score lines take from there: a tile of fp32, D up to 64."""
_OTHER_REGISTERS: Final = 32
"""Row state, addresses and counters of a thread that computes."""
_SUMMARY_WARPS: Final = 8

SPREAD_KEYS: Final = 2 << 10
"""Keys beyond which each query tile is a block of its own, where some rows may see all keys and
most see few: the GPU hands such tiles out better than an order does that does not know them
(docs/performance.md)."""

PREPASS_KEYS: Final = 4 << 10
"""Keys beyond which a launch of its own summarises them.

One warp lists tiles for a whole block, and must not be what the others wait for: reading keys
itself it needs about 500 clocks for each key tile, a third of a step.  An estimate.
"""
_TEMPLATE: Final = "forward_wgmma.cu.j2"
_TEMPLATES: Final = (
    _TEMPLATE,
    "common/attention.cu.j2",
    "common/tiles.cu.j2",
    "common/key_tiles.cu.j2",
    "common/staged.cu.j2",
    "common/wgmma.cu.j2",
    "common/device.cuh",
    "common/mma.cuh",
    "common/reads.cuh",
    "common/staged.cuh",
    "common/wgmma.cuh",
)
_FEATURES: Final = (Feature.MBARRIER, Feature.TMA, Feature.SETMAXNREG, Feature.WGMMA)
_OUTER_DIMS: Final = ("batch", "heads", "tokens")
_MOST_STRIDE: Final = 2**40


@final
@record
class StepOrder:
    """In which order a step does what may be done in more than one.

    early:           parts of the product with v, of 16 keys each, that are started before the row
                     maxima are looked for.
    ahead:           weights of a lane that are found before that product is over.
    frees_key_late:  the keys are given back when the row maxima are known, and not as soon as
                     they have been multiplied.
    """

    early: int
    ahead: int
    frees_key_late: bool


@final
@dataclass(frozen=True, slots=True)
class Context(ForwardContext):
    """Every name that templates/forward_wgmma.cu.j2 and its macros use."""

    mma: str
    wgmma: str
    product_element: str
    tiles: TileFormulas
    has_bounded: bool
    bound_words: int
    piece_bytes: int
    shared: tuple[SharedArray, ...]
    groups: int
    queries: int
    stages: int
    pieces: int
    order: StepOrder
    serving_registers: int
    computing_registers: int
    blocks_qk: int
    blocks_v: int
    staging: str
    staged_bytes: int
    scores_all: bool
    clears: bool
    longest_first: bool
    folds_scale: bool
    shifts_weights: bool
    lowers_weights: bool
    margin: str
    growth: Formula | None
    takes_parts: bool
    takes_rows: bool
    reads_parts: bool
    masks_ahead: bool
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
    """One choice of rows, keys and stages."""

    q: int
    kv: int
    stages: int = _STAGES

    @property
    def groups(self) -> int:
        """Warp groups that compute."""
        return self.q // _GROUP_ROWS


@final
@dataclass(frozen=True, slots=True)
class ForwardWgmma:
    name: str = "forward_wgmma"
    templates: tuple[str, ...] = _TEMPLATES
    dtypes: tuple[Element, ...] = DTYPES
    features: tuple[Feature, ...] = _FEATURES
    operand_alignment: int = _COPY_BYTES
    stand_in: str | None = "forward_mma"

    def reasons_against(
        self, attention: Attention, schedule: Schedule, target: Target
    ) -> tuple[str, ...]:
        reasons = [*_problem_reasons(attention, target), *_schedule_reasons(attention, schedule)]
        if not reasons:
            reasons += self._resource_reasons(attention, schedule, target)
        return tuple(reasons)

    def _resource_reasons(
        self, attention: Attention, schedule: Schedule, target: Target
    ) -> list[str]:
        complete = self.complete(attention, schedule, target)
        tile, reasons = _tile(complete), list(_order_reasons(complete))
        arrays = self.shared_arrays(attention, complete)
        if (too_large := why_too_large(arrays, target)) is not None:
            reasons.append(too_large)
        most = _most_registers(attention, tile)
        if _registers(attention, tile) > most:
            reasons.append(
                f"64 rows and {tile.kv} keys need about {_registers(attention, tile)} registers a"
                f" thread; of {tile.groups} warp groups each has {most}"
            )
        return reasons

    def complete(self, attention: Attention, schedule: Schedule, target: Target) -> Schedule:
        """The default for the head dims, or the nearest smaller one that fits."""
        candidates = [_completed(schedule, tile) for tile in _defaults(attention)]
        fitting = [c for c in candidates if self._fits(attention, c, target)]
        return _complete_order(attention, (fitting or candidates[-1:])[0])

    def _fits(self, attention: Attention, schedule: Schedule, target: Target) -> bool:
        tile = _tile(schedule)
        boxes = find_tile_boxes(_staged(attention, tile), attention, tile.q, tile.kv)
        if not all(box.swizzle for box in boxes):
            return False  # rows of 16 bytes, one by one
        shared = total_bytes(self.shared_arrays(attention, schedule))
        has_registers = _registers(attention, tile) <= _most_registers(attention, tile)
        return has_registers and shared <= target.shared_bytes_per_block

    def candidates(self, schedule: Schedule) -> Iterator[Schedule]:
        tiles = tuple(
            vary(
                replace(schedule, kernel=self.name),
                tile_q=tuple(_GROUP_ROWS * groups for groups in _REGISTERS),
                tile_kv=range(32, 257, 16),
                stages=(2, 3, 4),
            )
        )
        yield from tiles
        for offered in tiles:
            yield from _orders(offered)

    def registers(self, attention: Attention, schedule: Schedule) -> int:
        return _registers(attention, _tile(schedule))

    def shared_arrays(self, attention: Attention, schedule: Schedule) -> tuple[SharedArray, ...]:
        """Blocks of 64 columns of q, k and v, then lists and barriers."""
        tile = _tile(schedule)
        return _arrays(attention, tile, _queries(attention, tile))

    def lower(self, attention: Attention, schedule: Schedule) -> Program:
        tile = _tile(schedule)
        tiles = TileProgram(tile.q, tile.kv, build_loop_nest(attention.row_state, schedule))
        last = self.shared_arrays(attention, schedule)[-1]
        launch = Launch(
            kernel=f"{attention.name}_forward",
            family=self.name,
            tiles=tiles,
            grid=grid_of(tiles),
            threads=128 * (tile.groups + 1),
            shared_bytes=last.offset + last.bytes,
            workspaces=(),
            is_persistent=True,
            hands_out_tiles=_is_longest_first(attention),
            spread=(MoreThan("keys", SPREAD_KEYS),) if gives_rows_all_keys(attention) else (),
            boxes=(
                TensorBox("q", _COLUMNS, _GROUP_ROWS),
                TensorBox("k", _COLUMNS, tile.kv),
                TensorBox("v", _COLUMNS, tile.kv),
            ),
            tile_boxes=find_tile_boxes(_staged(attention, tile), attention, tile.q, tile.kv),
        )
        ahead = summarise_keys_ahead(
            attention, self.name, tile.q, tile.kv, warps=_SUMMARY_WARPS, least_keys=PREPASS_KEYS
        )
        return Program(attention, schedule, (*ahead, launch))

    def why_slower(self, attention: Attention) -> str | None:
        """Masks that `forward_mma` is faster with, on an H200 (docs/performance.md).

        Those that read a tensor for each pair, unless a table of blocks decides most tiles.
        """
        is_dear = is_dear_per_pair(attention) and not _takes_parts(attention)
        if is_dear and not classify_tiles(attention).box_summaries:
            return "its mask is evaluated anew for each pair"
        return None

    def why_unaligned(self, operands: Mapping[str, Strided]) -> str | None:
        """The first thing that keeps a tensor map from describing q, k or v."""
        for name, array in operands.items():
            if 0 in array.shape:
                continue  # nothing of it is copied
            if array.pointer % _COPY_BYTES:
                return f"`{name}` begins at an address that is no multiple of {_COPY_BYTES} bytes"
            if array.shape[-1] > 1 and array.strides[-1] != 1:
                return f"the elements of a row of `{name}` are {array.strides[-1]} apart, not 1"
            for dim, size, stride in zip(_OUTER_DIMS, array.shape, array.strides, strict=False):
                stride_bytes = stride * _ELEMENT
                if size > 1 and stride_bytes % _COPY_BYTES:
                    return (
                        f"`{name}` has a stride of {stride_bytes} bytes along its {dim}, no"
                        f" multiple of {_COPY_BYTES}"
                    )
                if size > 1 and not 0 < stride_bytes < _MOST_STRIDE:
                    return (
                        f"`{name}` has a stride of {stride_bytes} bytes along its {dim}, and tensor"
                        " maps have strides above 0 and below 2^40"
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
        """The CUDA text; there is one only for operands that a tensor map describes."""
        if not is_aligned:
            raise ValueError("another family stands in for such operands")
        context = self.context(program, target, is_checked=is_checked)
        return render(_TEMPLATE, context, name=context.name)

    def context(self, program: Program, target: Target, *, is_checked: bool = False) -> Context:
        """Everything the template places; all decisions are made here."""
        attention, schedule = program.attention, program.schedule
        assert attention.dtype is not None
        tile, state = _tile(schedule), attention.row_state
        staged = () if is_checked else _staged(attention, tile)
        shifts_weights = _shifts_weights(attention)
        scores = print_scores(
            attention,
            is_checked=is_checked,
            is_dear=cost_of_pair(attention) > CHEAP_SCORE,
            takes_unit=shifts_weights,
            most_growth=most_growth(attention, tile.kv),
            staged=staged,
        )
        printer = scores.printer
        names = {"m": "m", "l": "l", "acc": "1.0f", "sink": "sink", "s": "s"}
        qk, v = head_dims(attention)
        tiles = pair_by_pair(attention) if is_checked else tile_formulas(attention)
        # What is computed ahead is read at pairs that a mask skips, which a check must not report.
        parts = None if is_checked else _mask_parts(attention)
        takes_parts = parts is not None and _takes_parts(attention)
        reads_parts = parts is not None and _reads(*_ahead_of_pairs(parts))
        mask = None
        if parts is not None:
            first, in_words = len(scores.fixed), takes_parts and reads_parts
            mask = print_mask(attention, parts, first, in_words=in_words)
        serving, computing = _split_registers(attention, tile)
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
            in_boxes=True,
            reads_at_once=True,
        )
        return Context(
            **shared.values(),
            mma=resources.template_source("common/mma.cuh"),
            wgmma=resources.template_source("common/wgmma.cuh"),
            product_element=attention.dtype.name,
            tiles=tiles,
            has_bounded=has_bounded_tiles(mask, tiles, scores),
            bound_words=bound_words(schedule),
            piece_bytes=_piece_bytes(attention),
            shared=self.shared_arrays(attention, schedule),
            groups=tile.groups,
            queries=_queries(attention, tile),
            stages=tile.stages,
            pieces=_PIECES,
            order=_order_of(attention, schedule),
            serving_registers=serving,
            computing_registers=computing,
            blocks_qk=_blocks(qk),
            blocks_v=_blocks(v),
            staging=resources.template_source("common/staged.cuh") if staged else "",
            staged_bytes=staged_bytes(staged, tile.q, tile.kv, in_boxes=True),
            scores_all=scores.is_for_all,
            clears=_clears(attention, tiles),
            longest_first=_is_longest_first(attention),
            folds_scale=folds_scale(attention),
            shifts_weights=shifts_weights,
            lowers_weights=attention.dtype.weight_scale > 1.0,
            margin=_margin(attention, scores),
            growth=scores.growth,
            takes_parts=takes_parts,
            takes_rows=parts is not None and parts.reads and is_dear_per_pair(attention),
            reads_parts=reads_parts,
            masks_ahead=is_dear_per_pair(attention) and not takes_parts,
            weight_exponent=float_literal(math.log2(attention.dtype.weight_scale)),
            unscale_weights=float_literal(1.0 / attention.dtype.weight_scale),
            prepass="".join(launch.kernel for launch in program.launches[:-1]),
            group_warps=_SUMMARY_WARPS,
            weight=printer.print_row_formula(state.weight, names),
            output=printer.print_row_formula(state.output, names),
            lse="" if state.lse is None else printer.print_row_formula(state.lse, names),
        )


def _margin(attention: Attention, scores: ScoreText) -> str:
    """How far above a row's maximum the number lies that its scores are relative to, in units of
    the score; empty where it is the maximum, which only a polynomial's question makes worth it.

    That asks for the score of the largest |q.k|, so scores have to grow with q.k.  Weights of fp16
    have no room for it.
    """
    assert attention.dtype is not None
    has_room = attention.dtype.weight_scale == 1.0 and "row_max" not in attention.outputs
    if scores.near is None or scores.unit is None or not has_room:
        return ""
    if scores.near.coefficients[0].startswith("-"):
        return ""
    return float_literal(_MARGIN / (scores.unit.unit * math.log2(math.e)))


# ---- what it takes -------------------------------------------------------------------------


def _problem_reasons(attention: Attention, target: Target) -> Iterator[str]:
    yield from problem_reasons(attention, target, _FEATURES, multiple=16)
    qk, v = head_dims(attention)
    if _blocks(v) > _blocks(qk):
        yield f"rows of v are not wider than those of q and k, but {v} is above {qk}"


def _schedule_reasons(attention: Attention, schedule: Schedule) -> Iterator[str]:
    yield from loop_reasons(attention, schedule.without_order())
    if schedule.stages is not None and not 2 <= schedule.stages <= 4:
        yield "`stages` is 2, 3 or 4"
    if schedule.tile_q not in (None, *(_GROUP_ROWS * groups for groups in _REGISTERS)):
        yield f"`tile q` is 128 or 192, not {schedule.tile_q}"
    yield from tile_kv_reasons(schedule, masks_ahead=is_dear_per_pair(attention))
    if schedule.warps is not None and schedule.warps * 16 != schedule.tile_q:
        yield "each warp has 16 rows of `tile q`"


# ---- tiles ---------------------------------------------------------------------------------


def _defaults(attention: Attention) -> tuple[_Tile, ...]:
    """Tiles for the head dims, the ones to prefer first.

    Measured on an H200 for plain scores, with and without a causal mask, but with the kernel of
    another text; where more is computed for each pair, registers are left for it.
    """
    qk, v = head_dims(attention)
    largest, is_bare = max(qk, v), _is_bare(attention)
    smaller = (_Tile(128, 64), _Tile(128, 48), _Tile(128, 32), _Tile(128, 16))
    wider = (_Tile(128, 128), _Tile(128, 112), _Tile(128, 96))
    if largest <= 64:
        # A third warp group leaves few registers to those that compute, and to those that serve.
        is_plain = is_bare and not attention.scores and attention.sink is None
        rows = 192 if is_plain and attention.mask is None else 128
        return (_Tile(rows, 128), *wider, *smaller)
    if largest <= 128:
        wide = is_bare and attention.mask is None and not attention.scores
        return (_Tile(128, 176 if wide else 128), *wider, *smaller)
    if largest <= 192:
        return (_Tile(128, 128 if v <= 128 else 112), *wider[1:], *smaller)
    return (_Tile(128, 80), *smaller) if is_bare else smaller


def _is_bare(attention: Attention) -> bool:
    """Whether a pair's score is its product and a few additions, behind at most a cheap mask."""
    is_cheap = cost_of_pair(attention) <= CHEAP_SCORE
    return is_cheap and attention.row_state.running_max and not is_dear_per_pair(attention)


def _completed(schedule: Schedule, tile: _Tile) -> Schedule:
    tile_q = schedule.tile_q or tile.q
    return replace(
        schedule,
        kernel="forward_wgmma",
        tile_q=tile_q,
        tile_kv=schedule.tile_kv or tile.kv,
        stages=schedule.stages or tile.stages,
        warps=tile_q // 16,
        splits=1,
    )


def _tile(schedule: Schedule) -> _Tile:
    q, kv, stages = schedule.tile_q, schedule.tile_kv, schedule.stages
    if q is None or kv is None or stages is None:
        raise ValueError("complete the schedule first")
    return _Tile(q, kv, stages)


def _queries(attention: Attention, tile: _Tile) -> int:
    """Query tiles in shared memory at once: with two, the next one is there when it begins."""
    return 2 if total_bytes(_arrays(attention, tile, 2)) <= _SHARED_BYTES else 1


def _arrays(attention: Attention, tile: _Tile, queries: int) -> tuple[SharedArray, ...]:
    qk, v = (_blocks(dim) * _ROW_BYTES for dim in head_dims(attention))
    staged = staged_bytes(_staged(attention, tile), tile.q, tile.kv, in_boxes=True)
    blocks = [
        ("Query", queries * tile.q * qk, "[kQueries][kGroups][kBlocksQk][64][64]"),
        ("Key", tile.stages * tile.kv * qk, "[kStages][kBlocksQk][kTileKv][64]"),
        ("Value", tile.stages * tile.kv * v, "[kStages][kBlocksV][kTileKv][64]"),
    ]
    if staged:
        blocks.append(("Staged", tile.stages * staged, "[kStages][kStagedBytes]"))
    placed, offset = [], 0
    for name, size, shape in blocks:
        placed.append(SharedArray(name, offset, size // _ELEMENT, size, shape))
        offset += size
    size = _PIECES * _piece_bytes(attention)
    placed.append(SharedArray("Pieces", offset, size, size, "[kPieces][kPieceBytes]"))
    offset += size
    for name, count, shape in _barriers(tile, queries, is_staged=staged > 0):
        placed.append(SharedArray(name, offset, count, _BARRIER * count, shape))
        offset += _BARRIER * count
    return tuple(placed)


def _piece_bytes(attention: Attention) -> int:
    """Of one piece, with a place for what is bounded where the mask leaves something to ask."""
    split = split_mask(attention)
    is_split = split.bounds is not None and bool(split.rest)
    return _PIECE_BYTES + (_BOUNDED_BYTES if is_split else 0)


def _staged(attention: Attention, tile: _Tile) -> tuple[StagedRead, ...]:
    return choose_staged(attention, tile.q, tile.kv, tile.stages, _MOST_STAGED, in_boxes=True)


def _barriers(tile: _Tile, queries: int, *, is_staged: bool) -> tuple[tuple[str, int, str], ...]:
    """Name, number and shape of the barriers in shared memory."""
    stages, groups, pieces = "[kStages]", "[kQueries][kGroups]", "[kPieces]"
    of_reads = (("StagedFull", tile.stages, stages), ("StagedEmpty", tile.stages, stages))
    return (
        ("QueryFull", queries * tile.groups, groups),
        ("QueryEmpty", queries * tile.groups, groups),
        ("KeyFull", tile.stages, stages),
        ("KeyEmpty", tile.stages, stages),
        ("ValueRaw", tile.stages, stages),
        ("ValueFull", tile.stages, stages),
        ("ValueEmpty", tile.stages, stages),
        *(of_reads if is_staged else ()),
        ("PieceFull", _PIECES, pieces),
        ("PieceEmpty", _PIECES, pieces),
    )


def _blocks(dim: int) -> int:
    return -(-dim // _COLUMNS)


def _registers(attention: Attention, tile: _Tile) -> int:
    """About how many a thread needs: its part of the output, its scores, rounded weights."""
    _, v = head_dims(attention)
    is_both = bool(attention.scores) and is_dear_per_pair(attention)
    more = _SCORES_BESIDE_MASK if is_both else 0
    if _scores_read_pairs(attention, tile):
        # Addresses and elements on their way: the least with which no default spills.
        more = max(more, tile.kv * 5 // 4)
    else:
        staged = _staged(attention, tile)
        ahead = sum(map(is_taken_ahead, staged))
        on_their_way = tile.kv * 2 // 5 if len(staged) > ahead else 0  # likewise
        more = max(more, ahead * tile.kv // 4, on_their_way)
    return v // 2 + tile.kv // 2 + tile.kv // 4 + _OTHER_REGISTERS + more


def _most_registers(attention: Attention, tile: _Tile) -> int:
    """Of a thread that computes, at most."""
    serving, computing = _REGISTERS[tile.groups]
    if tile.groups != 2 or not _serves_much(attention, tile):
        return computing
    return (serving + 2 * computing - _LEAST_LISTING) // 2 - 8  # with none to spare some spill


def _split_registers(attention: Attention, tile: _Tile) -> tuple[int, int]:
    """Registers of a thread that serves, and of one that computes.

    A mask that is more than a window takes many to classify tiles.
    """
    serving, computing = _REGISTERS[tile.groups]
    if tile.groups != 2 or not _serves_much(attention, tile):
        return serving, computing
    wanted = -(-(_registers(attention, tile) + _SPARE_REGISTERS) // 8) * 8
    together = serving + 2 * computing
    least = _MOST_LISTING if _stages_values(attention, tile) else _LEAST_LISTING
    serving = max(least, min(_MOST_LISTING, together - 2 * wanted))
    return serving, (together - serving) // 2


def _serves_much(attention: Attention, tile: _Tile) -> bool:
    """Whether a serving warp needs more registers: to classify a dear mask, or for values."""
    return is_dear_to_classify(attention) or _stages_values(attention, tile)


def _stages_values(attention: Attention, tile: _Tile) -> bool:
    """Whether values are computed ahead, beside tiles, which tensor copies bring."""
    return any(read.pattern is not Pattern.TILE for read in _staged(attention, tile))


def _order(attention: Attention, tile: _Tile) -> StepOrder:
    """The fastest of those that were measured on an H200 (docs/performance.md).

    They differ in what waits for what by a few instructions, and more in how the compiler then
    mixes a step's instructions; so no rule is known that would find them.
    """
    parts, weights = tile.kv // 16, tile.kv // 2
    largest = max(head_dims(attention))
    is_dear = bool(attention.scores) or is_dear_per_pair(attention)
    is_middle = 64 < largest <= 128
    is_masked = attention.mask is not None and not is_dear and is_middle
    has_late = not (is_dear or is_masked or largest > 128 or parts <= _LATE_PARTS + 1)
    is_whole = is_dear or (attention.mask is None and is_middle)
    # With all of them ahead, what a lane takes of staged tiles leaves 128 keys a register short.
    has_tiles = any(read.pattern is Pattern.TILE for read in _staged(attention, tile))
    whole = weights - _PART_KEYS // _LANE_SHARE if has_tiles else weights
    return StepOrder(
        early=parts - _LATE_PARTS if has_late else parts,
        ahead=whole if is_whole else parts // 2 * 8,
        frees_key_late=is_dear or is_masked or largest > 128,
    )


def _order_of(attention: Attention, schedule: Schedule) -> StepOrder:
    """That of a complete schedule, whose numbers count keys."""
    tile = _tile(schedule)
    late, weights, frees_late = schedule.late_values, schedule.early_weights, schedule.late_keys
    if late is None or weights is None or frees_late is None:
        return _order(attention, tile)
    return StepOrder((tile.kv - late) // _PART_KEYS, weights // _LANE_SHARE, frees_late)


def _complete_order(attention: Attention, schedule: Schedule) -> Schedule:
    """All of the order, where some of it is given; nothing where it is what the rule says."""
    if not schedule.has_order:
        return schedule
    tile = _tile(schedule)
    rule = _order(attention, tile)
    late, weights, frees_late = schedule.late_values, schedule.early_weights, schedule.late_keys
    complete = replace(
        schedule,
        late_values=tile.kv - _PART_KEYS * rule.early if late is None else late,
        early_weights=_LANE_SHARE * rule.ahead if weights is None else weights,
        late_keys=rule.frees_key_late if frees_late is None else frees_late,
    )
    is_usual = _order_of(attention, complete) == rule
    return complete.without_order() if is_usual else complete


def _orders(schedule: Schedule) -> Iterator[Schedule]:
    """The orders that differ in time in a way that nobody can predict (docs/performance.md)."""
    kv = schedule.tile_kv
    assert kv is not None
    some = kv // _PART_KEYS // 2 * _PART_KEYS
    yield from vary(
        schedule,
        late_values=(0, _LATE_PARTS * _PART_KEYS) if kv > (_LATE_PARTS + 1) * _PART_KEYS else (0,),
        early_weights=(some, kv),
        late_keys=(False, True),
    )


def _order_reasons(schedule: Schedule) -> Iterator[str]:
    """What is wrong with the order of a complete schedule."""
    late, weights, kv = schedule.late_values, schedule.early_weights, _tile(schedule).kv
    if late is not None and (late % _PART_KEYS or late > kv - _PART_KEYS):
        yield f"`overlap values` is a multiple of 16 below `tile kv`, {kv}, not {late}"
    if weights is not None and (weights % _PART_KEYS or weights > kv):
        yield f"`overlap weights` is a multiple of 16 up to `tile kv`, {kv}, not {weights}"


def _is_longest_first(attention: Attention) -> bool:
    """Whether the order of query tiles matters: some are longer, or heads read the same tiles.

    Then several heads are worked on at a time, and such a tile is in the L2 cache for all but one.
    """
    return attention.mask is not None or any(map(_is_shared, find_staged_reads(attention)))


def _is_shared(read: StagedRead) -> bool:
    """Whether all heads copy the same tiles."""
    is_tile = read.pattern is Pattern.TILE
    names = {node.name for node in postorder(read.node) if isinstance(node, Symbol)}
    return is_tile and not names & {"h", "hkv"}


def _clears(attention: Attention, tiles: TileFormulas) -> bool:
    """Whether a tile may hold keys that count as zeros, beside those past the ends of arrays."""
    parts = (attention.length_kv, tiles.ranges, tiles.key_may)
    return any(part is not None for part in parts)


def _shifts_weights(attention: Attention) -> bool:
    """Whether a weight is one multiplication and addition, and a power.

    With scores that are a product and an addend it would spill registers at head dim 128.
    """
    is_dear = cost_of_pair(attention) > CHEAP_SCORE
    return folds_scale(attention) or (attention.row_state.running_max and is_dear)


def _mask_parts(attention: Attention) -> MaskParts | None:
    """What is computed ahead of a pair's mask; of rows and keys only where a mask is dear."""
    parts = find_mask_parts(attention)
    if parts is None or is_dear_per_pair(attention):
        return parts
    return parts.whole if parts.fixed or parts.bounds else None


def _ahead_of_pairs(parts: MaskParts) -> tuple[Expr, ...]:
    """What is computed for rows and keys."""
    says = (parts.of_row, parts.of_key)
    return (*parts.rows, *parts.keys, *(e for e in says if e is not None))


def _takes_parts(attention: Attention) -> bool:
    """Whether a mask that is dear for each pair is not any more, once its parts are known."""
    parts = find_mask_parts(attention)
    return is_dear_per_pair(attention) and parts is not None and not parts.reads


def _reads(*nodes: Expr) -> bool:
    """Whether any of these reads a captured tensor."""
    return any(isinstance(node, Load) for node in postorder(*nodes))


def _scores_read_pairs(attention: Attention, tile: _Tile) -> bool:
    """Whether a score line reads a captured tensor anew for rows or keys, and not from a copy."""
    staged = {id(node) for read in _staged(attention, tile) for node in postorder(read.node)}
    return any(
        isinstance(node, Symbol) and node.name in ("q", "qpos", "kv")
        for load in postorder(*attention.scores)
        if isinstance(load, Load) and id(load) not in staged
        for node in postorder(load)
    )


FAMILY: Final = ForwardWgmma()

if TYPE_CHECKING:
    _: KernelFamily = FAMILY
