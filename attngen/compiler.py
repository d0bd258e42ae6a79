"""The compiler, as the list of its stages.

    load        text                          → Unit (syntax tree, library, imports)
    check       Unit                          → Attention (what), Schedule (how)
    specialize  Attention, dtype, head dims   → Attention with nothing left open
    run_passes  Attention                     → Attention, folded
    choose      Attention, Schedule, Target   → kernel family, complete Schedule, notes
    lower       Attention, Schedule           → Program (loop nests, grids, workspaces)
    render      Program, layout class         → CUDA text

The layout class says whether the text takes q, k and v of any address and stride, or those that
can be copied 16 bytes at a time.  What follows (NVRTC, the CPU run, the NumPy executor) takes a
`Rendered`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from attngen.codegen.arguments import ArgumentLayout, layout_arguments
from attngen.compiler_errors import FamilyRefuses
from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.internal import require_valid
from attngen.frontend.check import Checked
from attngen.ir.attention import Attention
from attngen.ir.program import Launch, Program, TileProgram, grid_of
from attngen.ir.schedule import Schedule
from attngen.ir.types import Element
from attngen.ir.verify import verify_program
from attngen.kernels import all_families
from attngen.kernels.base import KernelFamily
from attngen.passes.loop_nest import build_loop_nest
from attngen.passes.pipeline import Observer, run_passes
from attngen.passes.specialize import specialize
from attngen.record import record
from attngen.targets.base import Target

__all__ = [
    "Lowered", "Rendered", "choose_family", "lower_program", "lower_schedule", "plan_for_numpy",
    "reasons_against", "render_lowered", "render_program",
]  # fmt: skip


@final
@record
class Lowered:
    """A program and the family that renders it, before the layout class is known."""

    program: Program
    family: KernelFamily
    target: Target
    notes: tuple[str, ...]
    """What the user should know: why a faster family does not take this."""


@final
@record
class Rendered:
    """A program and its CUDA text, ready for any of the three ways to run it."""

    program: Program
    target: Target
    source: str
    arguments: ArgumentLayout
    notes: tuple[str, ...]
    """Those of `Lowered`."""

    @property
    def launch(self) -> Launch:
        """The one that writes the outputs."""
        return self.program.main


def render_program(
    checked: Checked,
    dtype: Element,
    head_dims: tuple[int, int],
    target: Target,
    *,
    schedule: Schedule | None = None,
) -> Rendered:
    """Compile one specialisation down to its CUDA text for aligned operands.

    schedule:  takes the place of what the variant's blocks say for the target.
    Units:     `head_dims` is (Dqk, Dv).
    Errors:    those of `lower_program`.
    """
    return render_lowered(lower_program(checked, dtype, head_dims, target, schedule=schedule))


def lower_program(
    checked: Checked,
    dtype: Element,
    head_dims: tuple[int, int],
    target: Target,
    *,
    family: str | None = None,
    schedule: Schedule | None = None,
    observe: Observer | None = None,
) -> Lowered:
    """Compile one specialisation down to its loop nest.

    family:    one that has to run it, with tiles of its own, whatever the schedule says.
    schedule:  takes the place of what the variant's blocks say for the target.
    Units:   `head_dims` is (Dqk, Dv).
    Errors:  A452 the family (or every one) refuses the problem.
    """
    attention = run_passes(specialize(checked.attention, dtype, *head_dims), observe)
    schedule = schedule or checked.schedule_for(target.name)
    if family is not None:
        schedule = replace(schedule.with_free_tiles(), kernel=family)
    _, schedule, notes = choose_family(attention, schedule, target)
    return replace(lower_schedule(attention, schedule, target), notes=notes)


def lower_schedule(attention: Attention, schedule: Schedule, target: Target) -> Lowered:
    """The loop nest of a complete schedule, which its family takes."""
    assert schedule.kernel is not None, "complete the schedule first"
    family = all_families()[schedule.kernel]
    program = family.lower(attention, schedule)
    require_valid(f"lowering for `{family.name}`", verify_program(program))
    return Lowered(program, family, target, ())


def render_lowered(
    lowered: Lowered, *, is_checked: bool = False, is_aligned: bool = True
) -> Rendered:
    """The CUDA text for one layout class.

    A checked one reports reads outside of a tensor, and so looks at every pair: nothing is
    summarised ahead.
    """
    program, target = lowered.program, lowered.target
    if is_checked:
        program = program.without_optional()
    source = lowered.family.render(program, target, is_checked=is_checked, is_aligned=is_aligned)
    dtype = program.attention.dtype
    assert dtype is not None
    arguments = layout_arguments(
        program.attention,
        dtype,
        program.workspaces,
        program.boxes,
        program.tile_boxes,
        has_tickets=program.hands_out_tiles,
        is_checked=is_checked,
    )
    return Rendered(program, target, source, arguments, lowered.notes)


def plan_for_numpy(checked: Checked, dtype: Element, head_dims: tuple[int, int]) -> Program:
    """The loop nest of a variant for the NumPy executor, which takes any schedule and tile."""
    attention = run_passes(specialize(checked.attention, dtype, *head_dims))
    schedule = checked.schedule_for("numpy")
    tile_q, tile_kv = schedule.tile_q or 64, schedule.tile_kv or 64
    tiles = TileProgram(tile_q, tile_kv, build_loop_nest(attention.row_state, schedule))
    launch = Launch(f"{attention.name}_forward", "numpy", tiles, grid_of(tiles), 1, 0, ())
    complete = replace(schedule, tile_q=tile_q, tile_kv=tile_kv)
    return Program(attention, complete, (launch,))


def choose_family(
    attention: Attention, schedule: Schedule, target: Target
) -> tuple[KernelFamily, Schedule, tuple[str, ...]]:
    """The family that runs a problem, its complete schedule, and what the user should know.

    A family that the schedule names must take all of it.  Otherwise the best family that takes
    everything is chosen; where none does, the best one with tiles of its own.  The best comes
    first, and behind the others where it says itself that it is slower.
    """
    families = all_families()
    if schedule.kernel is not None:
        named = families[schedule.kernel]
        if reasons := named.reasons_against(attention, schedule, target):
            raise AttnError(FamilyRefuses(None, named.name, target.name, "; ".join(reasons)))
        return named, named.complete(attention, schedule, target), ()
    candidates = [
        f
        for f in families.values()
        if attention.dtype in f.dtypes and target.features.issuperset(f.features)
    ]
    candidates.sort(key=lambda family: family.why_slower(attention) is not None)
    notes: list[str] = []
    for family in candidates:
        reasons = family.reasons_against(attention, schedule, target)
        if not reasons:
            return family, family.complete(attention, schedule, target), tuple(notes)
        notes.append(f"{family.name} on {target.name} does not take it: {'; '.join(reasons)}")
    free = schedule.with_free_tiles()
    for family in candidates:
        reasons = family.reasons_against(attention, free, target)
        if not reasons:
            complete = family.complete(attention, free, target)
            tile = f"tile q = {complete.tile_q}, kv = {complete.tile_kv}"
            return family, complete, (*notes, f"{family.name} runs it with {tile} instead")
    last = candidates[-1]
    raise AttnError(FamilyRefuses(None, last.name, target.name, "; ".join(reasons)))


def reasons_against(attention: Attention, schedule: Schedule, target: Target) -> tuple[str, ...]:
    """Why a complete schedule, from anywhere, cannot run a problem; empty when it can."""
    family = all_families().get(schedule.kernel or "")
    if family is None:
        return (f"there is no kernel family `{schedule.kernel}`",)
    if attention.dtype not in family.dtypes or not target.features.issuperset(family.features):
        return (f"{family.name} is not made for this element type or target",)
    return family.reasons_against(attention, schedule, target)
