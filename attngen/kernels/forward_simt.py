"""forward_simt: any dtype, head dims 1 to 256, every pass and both loop orders, on every GPU.

One block per (batch, head, query tile), or per (batch, head) when keys are the outer loop.
Eight lanes share a query row.  Tiles of q, k, v lie in shared memory as float32.  It is the
kernel to read first, and the one that runs what no faster family takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, final

from attngen.codegen.expr import ExprPrinter
from attngen.codegen.forward_context import ForwardContext, forward_context, head_dims
from attngen.codegen.render import render
from attngen.ir.attention import Attention
from attngen.ir.program import (
    Launch,
    Node,
    Op,
    Program,
    Step,
    TileProgram,
    Workspace,
    grid_of,
    walk,
)
from attngen.ir.schedule import LoopOrder, Normalize, Schedule
from attngen.ir.types import BF16, FP16, FP32, Element
from attngen.kernels.base import (
    KernelFamily,
    SharedArray,
    Strided,
    total_bytes,
    vary,
    why_too_large,
)
from attngen.passes.barriers import SharedUse, place_barriers
from attngen.passes.loop_nest import build_loop_nest
from attngen.record import record
from attngen.targets.base import Feature, Target

__all__ = ["FAMILY", "Context", "ForwardSimt"]

LANES: Final = 8
LARGEST_HEAD_DIM: Final = 256
LARGEST_TILE_KV: Final = 1024
"""The end of the last tile of 2^31 keys would not fit 32 bits beyond it."""
_FLOAT: Final = 4
_OTHER_REGISTERS: Final = 90
"""Row state, addresses and counters of a thread: what the texts in `generated/` take."""
_TEMPLATE: Final = "forward_simt.cu.j2"
_TEMPLATES: Final = (_TEMPLATE, "common/attention.cu.j2", "common/device.cuh")


_SHARED_USE: Final = SharedUse(
    writes={
        Op.LOAD_QUERY: frozenset({"query"}),
        Op.LOAD_KEY: frozenset({"key"}),
        Op.LOAD_VALUE: frozenset({"value"}),
        Op.STORE_STATE: frozenset({"state"}),  # lane 0 writes m and l for all lanes of a row
    },
    reads={
        Op.SCORES: frozenset({"query", "key"}),
        Op.ACCUMULATE: frozenset({"value"}),
        Op.LOAD_STATE: frozenset({"state"}),
    },
)
"""What all threads of a block share.  `p` is not here: it stays within a warp."""


@final
@dataclass(frozen=True, slots=True)
class Context(ForwardContext):
    """Every name that templates/forward_simt.cu.j2 and its macros use."""

    lanes: int
    shared: tuple[SharedArray, ...]
    normalized: bool
    rescales: bool
    raise_max: str
    rescale: str
    weight: str
    output: str
    lse: str
    ops: frozenset[str]
    query_tiles_in_grid: bool
    body: tuple[Node, ...]


@final
@record
class ForwardSimt:
    name: str = "forward_simt"
    templates: tuple[str, ...] = _TEMPLATES
    dtypes: tuple[Element, ...] = (FP16, BF16, FP32)
    features: tuple[Feature, ...] = ()
    operand_alignment: int = 1
    stand_in: str | None = None

    def reasons_against(
        self, attention: Attention, schedule: Schedule, target: Target
    ) -> tuple[str, ...]:
        reasons = []
        if schedule.splits not in (None, 1):
            reasons.append("it does not split keys over blocks")
        if schedule.stages not in (None, 1):
            reasons.append("it has no pipeline, so `stages` must be 1")
        if schedule.has_order:
            reasons.append("its steps have one order, so `overlap` stays `auto`")
        if schedule.tile_q is not None and not (
            schedule.tile_q % 4 == 0 and 4 <= schedule.tile_q <= 128
        ):
            reasons.append(f"`tile q` must be a multiple of 4 up to 128, not {schedule.tile_q}")
        if schedule.tile_kv is not None and not (
            schedule.tile_kv % LANES == 0 and LANES <= schedule.tile_kv <= LARGEST_TILE_KV
        ):
            reasons.append(
                f"`tile kv` must be a multiple of {LANES} up to {LARGEST_TILE_KV}, not"
                f" {schedule.tile_kv}"
            )
        if not reasons:
            reasons += self._resource_reasons(attention, schedule, target)
        return tuple(reasons)

    def _resource_reasons(
        self, attention: Attention, schedule: Schedule, target: Target
    ) -> list[str]:
        complete = self.complete(attention, schedule, target)
        arrays = self.shared_arrays(attention, complete)
        if schedule.warps not in (None, _warps(complete)):
            return [f"a query tile of {complete.tile_q} rows has {_warps(complete)} warps"]
        too_large = why_too_large(arrays, target)
        return [] if too_large is None else [too_large]

    def complete(self, attention: Attention, schedule: Schedule, target: Target) -> Schedule:
        """Tiles of 16 rows and 32 keys, halved along keys until they fit the target."""
        complete = replace(
            schedule,
            kernel=self.name,
            tile_q=schedule.tile_q or 16,
            tile_kv=schedule.tile_kv or 32,
            stages=1,
            splits=1,
        )
        while (
            schedule.tile_kv is None
            and _tile_kv(complete) > LANES
            and total_bytes(self.shared_arrays(attention, complete)) > target.shared_bytes_per_block
        ):
            complete = replace(complete, tile_kv=_tile_kv(complete) // 2)
        return replace(complete, warps=_warps(complete))

    def candidates(self, schedule: Schedule) -> Iterator[Schedule]:
        named = replace(schedule, kernel=self.name)
        yield from vary(named, tile_q=(8, 16, 32, 64), tile_kv=(16, 32, 64, 128))

    def registers(self, attention: Attention, schedule: Schedule) -> int:
        """A lane has every eighth element of an output row."""
        return _OTHER_REGISTERS + head_dims(attention)[1] // LANES

    def shared_arrays(self, attention: Attention, schedule: Schedule) -> tuple[SharedArray, ...]:
        qk, v = head_dims(attention)
        tile_q, tile_kv = _tile_q(schedule), _tile_kv(schedule)
        shapes = (
            ("query", tile_q * (qk + 1), "[kTileQ][kRow]"),
            ("key", tile_kv * (qk + 1), "[kTileKv][kRow]"),
            ("value", tile_kv * v, "[kTileKv][kHeadDimV]"),
            ("p", tile_q * tile_kv, "[kTileQ][kTileKv]"),
        )
        arrays, offset = [], 0
        for name, count, shape in shapes:
            size = -(-count * _FLOAT // 16) * 16
            arrays.append(SharedArray(name, offset, count, size, shape))
            offset += size
        return tuple(arrays)

    def lower(self, attention: Attention, schedule: Schedule) -> Program:
        body = place_barriers(build_loop_nest(attention.row_state, schedule), _SHARED_USE)
        rows: tuple[str | int, ...] = ("B", "Hq", "rows")
        state = (
            Workspace("state_m", rows),
            Workspace("state_l", rows),
            Workspace("state_acc", (*rows, "Dv")),
        )
        tiles = TileProgram(_tile_q(schedule), _tile_kv(schedule), body)
        launch = Launch(
            kernel=f"{attention.name}_forward",
            family=self.name,
            tiles=tiles,
            grid=grid_of(tiles),
            threads=_tile_q(schedule) * LANES,
            shared_bytes=total_bytes(self.shared_arrays(attention, schedule)),
            workspaces=state if schedule.loop is LoopOrder.KV_Q else (),
        )
        return Program(attention, schedule, (launch,))

    def why_slower(self, attention: Attention) -> str | None:
        return None

    def why_unaligned(self, operands: Mapping[str, Strided]) -> str | None:
        return None

    def render(
        self,
        program: Program,
        target: Target,
        *,
        is_checked: bool = False,
        is_aligned: bool = True,
    ) -> str:
        """The one text, which takes any address and stride."""
        context = self.context(program, target, is_checked=is_checked)
        return render(_TEMPLATE, context, name=context.name)

    def context(self, program: Program, target: Target, *, is_checked: bool = False) -> Context:
        """Everything the template places; all decisions are made here."""
        attention, schedule, launch = program.attention, program.schedule, program.main
        printer = ExprPrinter(attention)
        state = attention.row_state
        per_thread = {"m": "state.m", "l": "state.l", "acc": "state.acc[i]", "s": "s[i]"}
        per_thread |= {"m_old": "m_old", "sink": "sink"}
        normalized = schedule.normalize is Normalize.EVERY_TILE and state.running_max
        output = state.output_of_normalized if normalized else state.output
        ops = {n.op.value for n in walk(launch.tiles.body) if isinstance(n, Step)}
        shared = forward_context(
            program,
            target,
            printer,
            templates=_TEMPLATES,
            schedule=_describe(schedule),
            is_checked=is_checked,
        )
        return Context(
            **shared.values(),
            lanes=LANES,
            shared=self.shared_arrays(attention, schedule),
            normalized=normalized,
            rescales="rescale_sum" in ops or "rescale_acc" in ops,
            raise_max=printer.print_row_formula(state.raise_max, {"m_old": "m_old", "m": "m"}),
            rescale=printer.print_row_formula(state.rescale, per_thread),
            weight=printer.print_row_formula(state.weight, per_thread),
            output=printer.print_row_formula(output, per_thread),
            lse="" if state.lse is None else printer.print_row_formula(state.lse, per_thread),
            ops=frozenset(ops),
            query_tiles_in_grid=schedule.loop is LoopOrder.Q_KV,
            body=launch.tiles.body,
        )


def _tile_q(schedule: Schedule) -> int:
    assert schedule.tile_q is not None, "complete the schedule first"
    return schedule.tile_q


def _tile_kv(schedule: Schedule) -> int:
    assert schedule.tile_kv is not None, "complete the schedule first"
    return schedule.tile_kv


def _warps(schedule: Schedule) -> int:
    return _tile_q(schedule) * LANES // 32


def _describe(schedule: Schedule) -> str:
    return (
        f"loop {schedule.loop.value}; passes {schedule.passes.value}; normalize"
        f" {schedule.normalize.value}; tile q = {schedule.tile_q}, kv = {schedule.tile_kv}"
    )


FAMILY: Final = ForwardSimt()

if TYPE_CHECKING:
    _: KernelFamily = FAMILY
