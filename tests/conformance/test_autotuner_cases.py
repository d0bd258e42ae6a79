"""The cases about autotuners, O42 and O43, with kernels that run on the CPU.

What of O43 concerns the key of a record is in `tests/tuning/test_lookup.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attngen.compiler import reasons_against
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.schedule import Schedule
from attngen.tuning.bench import HostBench
from attngen.tuning.cost_model import CostModel
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.search import Findings, Plan, Search, Stage
from attngen.tuning.space import Rejection, Space
from attngen.tuning.timing import RacePlan
from attngen.tuning.worker import Patience, Worker
from tests.tuning.candidates import BREAKS, BrokenBuilder, call_of, exams_of, simt, subject_of

PLAN = Plan(
    takes_all=True, beside=0, budget_s=None, compilers=2,
    race=RacePlan(min_rounds=2, max_rounds=2, sample_ms=0.0, warm_ms=0.0), final=None,
)  # fmt: skip

GOOD = (simt(16, 32), simt(8, 32))
NO_COMPILE, ENDLESS, HALF, NOTHING, RAGGED = (simt(q, 16) for q in (8, 16, 24, 32, 40))
BROKEN = {
    NO_COMPILE: lambda text: text + "\nint f( {",
    ENDLESS: BREAKS["endless"],
    HALF: BREAKS["half of the rows"],
    NOTHING: BREAKS["nothing"],
    RAGGED: BREAKS["wrong on ragged"],
}
TOO_LARGE, NO_TILE, NO_MULTIPLE = simt(64, 1024), simt(0, 32), simt(10, 32)

pytestmark = pytest.mark.usefixtures("host_compiler")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / "autotuner"
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(folder))


def search(*offered: Schedule) -> Findings:
    """A search over exactly these; what the formulas refuse is rejected, as `collect` does."""
    subject, call = subject_of(dim=256), call_of(64, dim=256)
    reasons = {s: reasons_against(subject.attention, s, subject.target) for s in offered}
    fitting = tuple(s for s, why in reasons.items() if not why)
    rejected = tuple(Rejection(s, "; ".join(why)) for s, why in reasons.items() if why)
    space = Space(fitting[0], fitting, rejected, (), "sm_80")
    model = CostModel(subject.attention, call, DeviceClass.named("a100-80g"))
    patience = Patience(open_s=60, check_s=10, sample_s=10)
    stand = Worker(HostBench, lambda: exams_of(subject, call), patience)
    builder = BrokenBuilder(subject, BROKEN)
    return Search("causal_attention", space, model, builder, stand, PLAN).run()


def test_o42_bad_candidates_cost_only_themselves_and_have_a_reason() -> None:
    bad = (TOO_LARGE, NO_TILE, NO_MULTIPLE, NO_COMPILE, ENDLESS)
    found = search(*GOOD, *bad)
    assert {m.schedule for m in found.measured} == set(GOOD)
    assert {d.schedule: d.stage for d in found.discarded} == {
        TOO_LARGE: Stage.RESOURCES, NO_TILE: Stage.RESOURCES, NO_MULTIPLE: Stage.RESOURCES,
        NO_COMPILE: Stage.COMPILER, ENDLESS: Stage.EXAM,
    }  # fmt: skip
    reasons = {d.schedule: d.reason for d in found.discarded}
    assert "KiB; sm_80 allows 163 KiB per block" in reasons[TOO_LARGE]
    assert reasons[NO_MULTIPLE] == "`tile q` must be a multiple of 4 up to 128, not 10"
    assert reasons[NO_TILE].endswith("not 0")
    assert reasons[NO_COMPILE] == "the C++ compiler rejects the kernel"
    assert reasons[ENDLESS] == "it did not end within 10 s"


def test_o42_with_no_good_candidate_the_error_lists_every_one() -> None:
    with pytest.raises(AttnError) as caught:
        search(NOTHING, NO_COMPILE)
    (error,) = caught.value.diagnostics
    listed = error.label_text() or ""
    assert error.code == "A471"
    for schedule in (NOTHING, NO_COMPILE):
        assert f"forward_simt {schedule.tile_q} x {schedule.tile_kv}" in listed
    assert "are not written" in listed
    assert "the C++ compiler rejects the kernel" in listed


def test_o43_a_partial_writer_an_idle_one_and_one_wrong_on_ragged_lengths_are_rejected() -> None:
    found = search(GOOD[0], HALF, NOTHING, RAGGED)
    assert [m.schedule for m in found.measured] == [GOOD[0]]
    assert {d.schedule: d.stage for d in found.discarded} == dict.fromkeys(
        (HALF, NOTHING, RAGGED), Stage.EXAM
    )


def test_o43_the_default_is_usable_after_a_failed_search() -> None:
    with pytest.raises(AttnError):
        search(NOTHING)
    found = search(replace(GOOD[0], tile_kv=8))
    assert found.best is not None
