"""What a tuner may try: complete, supported, each once; the rest with its reason."""

from __future__ import annotations

from collections import Counter

import pytest

from attngen import targets
from attngen.compiler import choose_family, lower_schedule, render_lowered
from attngen.ir.schedule import Schedule
from attngen.kernels import all_families
from attngen.kernels.base import vary
from attngen.tuning.space import Space, collect, describe

from .problems import CAUSAL, DOCUMENTS, FULL, specialised

CASES = [
    (FULL, "bf16", (64, 64), "sm_90a"),
    (CAUSAL, "bf16", (256, 256), "sm_90a"),
    (DOCUMENTS, "fp16", (128, 128), "sm_86"),
    (CAUSAL, "fp32", (40, 40), "sm_80"),
]
each_case = pytest.mark.parametrize(("text", "dtype", "dims", "arch"), CASES)


def space_of(text: str, dtype: str, dims: tuple[int, int], arch: str) -> Space:
    return collect(specialised(text, dtype, dims), Schedule(), targets.get(arch))


@each_case
def test_a_candidate_is_complete_and_supported(
    text: str, dtype: str, dims: tuple[int, int], arch: str
) -> None:
    attention, target = specialised(text, dtype, dims), targets.get(arch)
    space = collect(attention, Schedule(), target)
    assert len(set(space.candidates)) == len(space.candidates) > 10
    for schedule in space.candidates:
        assert schedule.kernel is not None
        family = all_families()[schedule.kernel]
        assert family.reasons_against(attention, schedule, target) == ()
        assert family.complete(attention, schedule, target) == schedule


@each_case
def test_the_default_is_the_first_candidate(
    text: str, dtype: str, dims: tuple[int, int], arch: str
) -> None:
    attention, target = specialised(text, dtype, dims), targets.get(arch)
    space = collect(attention, Schedule(), target)
    _, chosen, _ = choose_family(attention, Schedule(), target)
    assert space.candidates[0] == space.default == chosen


@each_case
def test_every_offer_of_a_family_is_a_candidate_or_rejected_with_a_reason(
    text: str, dtype: str, dims: tuple[int, int], arch: str
) -> None:
    space = space_of(text, dtype, dims, arch)
    refused = {name for name, reason in space.refusals if reason}
    known = {*space.candidates, *(r.schedule for r in space.rejected)}
    found = Counter(s.kernel for s in known if not s.has_order)
    for name, family in all_families().items():
        offered = len({s for s in family.candidates(Schedule()) if not s.has_order})
        # Completing may give two offers the same schedule, and the default may be none of them.
        assert (name in refused and not found[name]) or offered <= found[name] <= offered + 1
    assert all(r.reason for r in space.rejected)


def test_a_reason_shows_the_sum() -> None:
    space = space_of(CAUSAL, "bf16", (256, 256), "sm_90a")
    reasons = [r.reason for r in space.rejected if r.schedule.kernel == "forward_wgmma"]
    assert any("KiB; sm_90a allows 227 KiB per block" in reason for reason in reasons)
    assert any("registers a thread" in reason for reason in reasons)


def test_what_the_schedule_fixes_stays() -> None:
    attention, target = specialised(CAUSAL), targets.get("sm_90a")
    fixed = Schedule(kernel="forward_mma", tile_kv=32)
    space = collect(attention, fixed, target)
    assert {(s.kernel, s.tile_kv) for s in space.candidates} == {("forward_mma", 32)}
    assert len({s.tile_q for s in space.candidates}) > 2


def test_a_family_that_cannot_is_named_with_its_reason() -> None:
    space = space_of(CAUSAL, "bf16", (64, 64), "sm_80")
    assert space.refusals == (("forward_wgmma", "sm_80 has no tma, setmaxnreg, wgmma"),)


def test_vary_leaves_alone_what_is_fixed() -> None:
    found = list(vary(Schedule(tile_q=64), tile_q=(16, 32), stages=(1, 2)))
    assert [(s.tile_q, s.stages) for s in found] == [(64, 1), (64, 2)]


def test_a_candidate_renders() -> None:
    attention, target = specialised(CAUSAL), targets.get("sm_90a")
    for schedule in collect(attention, Schedule(), target).candidates[:40:13]:
        program = render_lowered(lower_schedule(attention, schedule, target)).program
        assert program.main.family == schedule.kernel
        assert program.main.tiles.tile_kv == schedule.tile_kv


def test_a_schedule_in_words() -> None:
    schedule = Schedule(kernel="forward_mma", tile_q=64, tile_kv=48, stages=1, warps=4)
    assert describe(schedule) == "forward_mma 64 x 48, 1 stage, 4 warps"
