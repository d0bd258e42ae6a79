"""What a tuner can try for one problem, and what it cannot, each with its reason.

Nothing is compiled here: the resource formulas of the kernel families decide.
"""

from __future__ import annotations

from typing import final

from attngen.compiler import choose_family
from attngen.ir.attention import Attention
from attngen.ir.schedule import Schedule
from attngen.kernels import all_families
from attngen.record import record
from attngen.targets.base import Target

__all__ = ["Rejection", "Space", "collect", "describe"]


@final
@record
class Rejection:
    """A schedule that is not tried any further, and why."""

    schedule: Schedule
    reason: str


@final
@record
class Space:
    """Complete schedules for one attention on one target.

    default:     what runs where nothing is tuned; it is the first candidate.
    candidates:  what can be compiled, each once.
    rejected:    what a family offers and its resource formulas refuse.
    refusals:    families that take none of it, by name, and why.
    target:      its name.
    """

    default: Schedule
    candidates: tuple[Schedule, ...]
    rejected: tuple[Rejection, ...]
    refusals: tuple[tuple[str, str], ...]
    target: str


def collect(
    attention: Attention, schedule: Schedule, target: Target, *, with_orders: bool = True
) -> Space:
    """Every schedule that the families offer; what `schedule` fixes stays.

    with_orders:  whether those are offered, too, that differ in the order inside a step alone,
                  which no model tells apart.
    Errors:  A452 where no family takes the problem.
    """
    _, default, _ = choose_family(attention, schedule, target)
    candidates = {default: None}  # an ordered set
    rejected: list[Rejection] = []
    refusals: list[tuple[str, str]] = []
    refused: set[Schedule] = set()
    for name, family in all_families().items():
        if schedule.kernel not in (None, name):
            continue
        if reasons := family.reasons_against(attention, schedule.with_free_tiles(), target):
            refusals.append((name, "; ".join(reasons)))
            continue
        for offered in family.candidates(schedule):
            is_order = offered.has_order and not schedule.has_order  # of one that came before
            if is_order and not (with_orders and offered.without_order() not in refused):
                continue
            reasons = family.reasons_against(attention, offered, target)
            complete = family.complete(attention, offered, target)
            if reasons:
                refused.add(offered)
                rejected.append(Rejection(complete, "; ".join(reasons)))
            else:
                candidates[complete] = None
    return Space(default, tuple(candidates), tuple(rejected), tuple(refusals), target.name)


def describe(schedule: Schedule) -> str:
    """A complete schedule in short: `forward_wgmma 128 x 176, 2 stages, 8 warps`."""
    order = ""
    if schedule.has_order:
        keys = "late" if schedule.late_keys else "early"
        order = f", overlap {schedule.late_values}/{schedule.early_weights}/{keys}"
    return (
        f"{schedule.kernel} {schedule.tile_q} x {schedule.tile_kv}, {schedule.stages}"
        f" stage{'' if schedule.stages == 1 else 's'}, {schedule.warps} warps{order}"
    )
