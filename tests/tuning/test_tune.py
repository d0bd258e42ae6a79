"""From a text to records: a whole search on the CPU, and what of it is written down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.ir.digest import digest_operation
from attngen.ir.schedule import Schedule
from attngen.tuning.build import CudaBuilder
from attngen.tuning.cost_model import CostModel
from attngen.tuning.exam import make_exam, shrink
from attngen.tuning.measurement import Record, parse_line
from attngen.tuning.search import Findings, Plan
from attngen.tuning.store import EMPTY, user_store
from attngen.tuning.timing import RacePlan
from attngen.tuning.tune import contents_of, host_machine, improve, tune
from attngen.tuning.winner import find_winner

from .candidates import call_of, subject_of
from .problems import DOCUMENTS

QUICK = Plan(
    most=3, beside=1, budget_s=None, compilers=2,
    race=RacePlan(min_rounds=2, max_rounds=2, sample_ms=0.0, warm_ms=0.0), final=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def found(host_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    subject = replace(subject_of(), schedule=Schedule(tile_q=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return tune(subject, (call_of(40), call_of(21, H=1)), host_machine(), QUICK)


def test_a_search_on_the_cpu_times_right_schedules(found: Findings) -> None:
    assert 2 <= len(found.measured) <= 3
    assert found.default is not None
    for one in found.measured:
        assert one.schedule.tile_q == 8
        assert 0 < one.verdict.bound_ratio <= 1
        assert one.times.samples == 2
    assert found.mode == "events"


def test_times_of_the_cpu_are_no_records(found: Findings) -> None:
    assert contents_of(found, subject_of(), call_of(40), host_machine()) == EMPTY


def test_a_record_says_what_was_measured(found: Findings) -> None:
    subject, call = subject_of(), call_of(40)
    contents = contents_of(found, subject, call, replace(host_machine(), driver="13.0"))
    assert [r.schedule for r in contents.records] == [m.schedule for m in found.measured]
    (definition,) = contents.definitions
    assert definition.op == digest_operation(subject.attention)
    assert "mask" in definition.text
    for one, measured in zip(contents.records, found.measured, strict=True):
        again = parse_line(one.line().encode())
        assert isinstance(again, Record)
        assert again.id == one.id
        assert again.problem.q_tokens == 40
        assert again.times.median_us == pytest.approx(1e3 * measured.times.ms, abs=0.06)
    winner = find_winner(contents.records)
    assert winner is not None


def test_predictions_are_kept_beside_the_times(found: Findings) -> None:
    model = CostModel(subject_of().attention, call_of(40), host_machine().device)
    for one in found.measured:
        assert found.predictions[one.schedule].us == pytest.approx(model.predict(one.schedule).us)


@pytest.mark.usefixtures("host_compiler")
def test_a_program_that_tunes_keeps_its_records() -> None:
    subject = replace(subject_of(), schedule=Schedule(tile_q=8, tile_kv=16))
    machine = replace(host_machine(), driver="13.0")
    contents = improve(subject, call_of(24), machine, seconds=600)
    assert [r.schedule.tile_kv for r in contents.records] == [16]
    store = user_store()
    assert store is not None
    ((_, _, kept),) = store.files()
    assert [r.id for r in kept.records] == [r.id for r in contents.records]


def test_a_ragged_call_has_the_beginning_of_the_tensors() -> None:
    subject = subject_of(DOCUMENTS, "bf16")
    doc = (np.arange(2000) // 50).astype(np.int32)[None].repeat(3, axis=0)
    call = replace(call_of(2000, B=3, H=4), tensors={"doc": doc})
    ragged = shrink(subject, call)
    assert ragged.tensors["doc"].shape == (1, 389)
    assert (ragged.sizes["B"], ragged.sizes["Hq"], ragged.sizes["Sq"]) == (1, 1, 389)
    assert make_exam(subject, ragged).o.shape[:2] == (1, 1)


def test_a_subject_has_the_texts_and_the_digest_of_a_kernel() -> None:
    kernel = attngen.compile_text(DOCUMENTS)
    subject = subject_of(DOCUMENTS, "bf16")
    rendered = kernel.render("sm_80", dtype="bf16", head_dim=16)
    assert digest_operation(rendered.program.attention) == digest_operation(subject.attention)
    schedule = rendered.program.schedule
    assert CudaBuilder(subject).build(schedule).rendered.source == rendered.source
