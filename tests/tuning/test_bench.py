"""Benches: what is checked, what is timed, and the GPU's one on a GPU that is the CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen.backend import launch
from attngen.ir.schedule import Schedule
from attngen.tuning.bench import CudaBench, HostBench
from attngen.tuning.build import Build, CudaBuilder
from attngen.tuning.call import Call, Subject, in_bhsd, make_operands
from attngen.tuning.exam import WrongError, judge, make_exam, ragged_lengths
from attngen.tuning.space import collect

from .candidates import BREAKS, BrokenBuilder, call_of, exams_of, simt, subject_of
from .pretend_gpu import PretendCupy, PretendDriver
from .problems import DOCUMENTS

SCHEDULE = simt(16, 32)


@pytest.fixture
def bench_of(monkeypatch: pytest.MonkeyPatch, host_compiler: None) -> Any:
    """`bench_of(subject, calls, schedule)`: a GPU's bench with a candidate loaded."""

    def make(
        subject: Subject,
        calls: Sequence[Call],
        schedule: Schedule = SCHEDULE,
        harm: str | None = None,
        **options: Any,
    ) -> tuple[CudaBench, PretendDriver]:
        breaks = {} if harm is None else {schedule: BREAKS[harm]}
        build = CudaBuilder(subject).build(schedule)
        on_host = BrokenBuilder(subject, breaks).build(schedule)
        assert isinstance(build.code, bytes)
        assert isinstance(on_host.code, Path)
        driver = PretendDriver({build.code: on_host.code})
        monkeypatch.setitem(sys.modules, "cupy", PretendCupy(driver, **options))
        monkeypatch.setattr(launch, "load_driver", lambda: driver)
        bench = CudaBench(0)
        bench.open([make_exam(subject, call) for call in calls])
        bench.load("it", build)
        return bench, driver

    return make


def test_a_gpu_checks_and_times_a_replayed_graph(bench_of: Any) -> None:
    bench, driver = bench_of(subject_of(), (call_of(40), call_of(37, H=1)))
    assert 0 < bench.check("it").bound_ratio <= 1
    before = driver.started
    assert bench.sample("it", 3) == 1.0  # launches between the events, over the calls
    assert driver.started - before == 1 + 1 + 3  # the first run, one that is not timed, and three
    assert bench.sample("it", 5) == 1.0
    assert bench.mode == "graph"
    assert not bench.is_lost()


def test_what_cannot_be_captured_is_started_each_time(bench_of: Any) -> None:
    bench, driver = bench_of(subject_of(), (call_of(40),), can_capture=False)
    bench.check("it")
    before = driver.started
    assert bench.sample("it", 4) == 1.0
    assert driver.started - before == 1 + 1 + 4
    assert bench.mode == "events"


def test_other_calls_take_the_place_of_the_first_and_what_is_loaded_stays(bench_of: Any) -> None:
    subject = subject_of()
    bench, driver = bench_of(subject, (call_of(40),))
    bench.check("it")
    bench.sample("it", 1)
    longer, small = call_of(64, B=2), call_of(37, H=1)
    bench.open([make_exam(subject, call) for call in (longer, small)])
    assert 0 < bench.check("it").bound_ratio <= 1
    before = driver.started
    assert 0 < bench.check("it", 1).bound_ratio <= 1
    assert driver.started - before == 1  # the second exam alone
    assert bench.sample("it", 3) == 1.0


@pytest.mark.parametrize("harm", ["wrong", "wrong on ragged", "half of the rows", "nothing"])
def test_a_gpu_finds_what_is_wrong(bench_of: Any, harm: str) -> None:
    bench, _ = bench_of(subject_of(), (call_of(64), call_of(37, H=1)), harm=harm)
    with pytest.raises(WrongError):
        bench.check("it")


def test_captured_tensors_workspaces_and_another_layout(bench_of: Any) -> None:
    """Documents of 4200 keys, which a launch ahead summarises."""
    subject = subject_of(DOCUMENTS, "bf16", 16)
    sizes = {"B": 1, "Hq": 1, "Hkv": 1, "Sq": 200, "Skv": 4200, "Dqk": 16, "Dv": 16}
    doc = (np.arange(4200) // 50).astype(np.int32)[None]
    call = Call(sizes, {}, {"doc": doc}, layout="bshd")
    space = collect(subject.attention, Schedule(kernel="forward_mma"), subject.target)
    bench, driver = bench_of(subject, (call,), space.default)
    assert 0 < bench.check("it").bound_ratio <= 1
    before = driver.started
    bench.sample("it", 1)
    assert driver.started - before == 2 * 3  # two launches a call


@pytest.mark.usefixtures("host_compiler")
def test_the_cpu_takes_both_layouts() -> None:
    subject = subject_of()
    for layout in ("bhsd", "bshd"):
        bench = HostBench()
        call = replace(call_of(40, B=2), layout=layout)
        bench.open([make_exam(subject, call)])
        bench.load("it", BrokenBuilder(subject, {}).build(SCHEDULE))
        assert 0 < bench.check("it").bound_ratio <= 1
        assert bench.sample("it", 1) > 0


# ---- exams -----------------------------------------------------------------------------------


def test_a_judge_wants_every_element_and_no_nan() -> None:
    subject = subject_of(dtype="bf16")
    exam, _ = exams_of(subject, call_of(8))
    right = exam.o.astype(np.float32)
    import ml_dtypes

    found = right.astype(ml_dtypes.bfloat16)
    assert len(exam.rows) == 8
    assert judge(found, exam).bound_ratio <= 1
    for value, words in ((np.nan, "1 of 256 elements are not written"), (99.0, "as far off")):
        broken = found.copy()
        broken[0, 1, 3, 4] = value
        with pytest.raises(WrongError, match=words):
            judge(broken, exam)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_judge_finds_both_kinds_of_nan_and_passes_infinity_on(dtype: str, sign: int) -> None:
    import ml_dtypes

    types = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
    exam, _ = exams_of(subject_of(dtype=dtype), call_of(8))
    found = exam.o.astype(np.float32).astype(types[dtype])
    assert judge(found, exam).bound_ratio <= 1
    for value, words in ((np.nan, "1 of 256 elements"), (np.inf, "as far off")):
        broken = found.copy()
        broken[0, 1, 3, 4] = np.copysign(np.float32(value), sign)
        with pytest.raises(WrongError, match=words):
            judge(broken, exam)
    turned = np.ascontiguousarray(found.swapaxes(1, 2)).swapaxes(1, 2)
    assert judge(turned, exam).bound_ratio <= 1


def test_ragged_lengths_are_short_and_keep_the_ratio_of_heads() -> None:
    sizes = {"B": 4, "Hq": 32, "Hkv": 8, "Sq": 8192, "Skv": 200, "Dqk": 64, "Dv": 64}
    found = ragged_lengths(sizes)
    assert {n: found[n] for n in ("B", "Hq", "Hkv", "Sq", "Skv")} == {
        "B": 1, "Hq": 4, "Hkv": 1, "Sq": 389, "Skv": 200,
    }  # fmt: skip
    assert all(389 % tile for tile in range(16, 257, 16))


def test_operands_are_the_same_in_every_process_and_have_no_equal_rows() -> None:
    call = call_of(2048, H=16, dim=64)
    one, two = make_operands("bf16", call), make_operands("bf16", call)
    for name in "qkv":
        assert (one[name] == two[name]).all()
        rows = one[name].reshape(-1, 64)
        assert len(np.unique(rows, axis=0)) == len(rows) > (1 << 20) // 64
    assert not (one["k"] == one["v"]).all()
    other = make_operands("bf16", replace(call, seed=1))
    assert not (one["q"] == other["q"]).all()


def test_a_layout_is_a_view() -> None:
    from attngen.backend.device import view

    array = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    seen = in_bhsd(view(array, "q"), "bshd")
    turned = array.swapaxes(1, 2)
    assert seen.shape == turned.shape
    assert seen.strides == tuple(s // 4 for s in turned.strides)


def test_a_build_that_spills_is_refused() -> None:
    build = CudaBuilder(subject_of()).build(SCHEDULE)
    assert isinstance(build, Build)
    assert build.reason_against is None
    assert build.resources.registers > 16
    spilling = replace(build, resources=replace(build.resources, spill_bytes=8))
    assert spilling.reason_against == "the compiler spills 8 bytes a thread"
