"""Tuning on a real GPU: candidates that fault, hang or are wrong cost only themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attngen import targets
from attngen.backend.nvrtc import compile_cuda
from attngen.frontend.check import check
from attngen.frontend.load import load_text
from attngen.ir.schedule import Schedule
from attngen.ir.types import BF16
from attngen.tuning.build import Build, CudaBuilder
from attngen.tuning.call import Call, Subject
from attngen.tuning.exam import make_exam, shrink
from attngen.tuning.measurement import Mode
from attngen.tuning.search import Plan
from attngen.tuning.space import collect
from attngen.tuning.store import Store
from attngen.tuning.timing import LostError
from attngen.tuning.tune import contents_of, cuda_machine, tune
from attngen.tuning.worker import Patience, Worker

from .test_launch import explain_missing_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(explain_missing_gpu() is not None, reason=str(explain_missing_gpu())),
]

CAUSAL = "attention causal {\n    mask causal\n}\n"
SIZES = {"B": 1, "Hq": 4, "Hkv": 4, "Sq": 1000, "Skv": 1000, "Dqk": 64, "Dv": 64}
START = "_forward, Args) {"
STORE = "ag_store(row + d *"


@pytest.fixture(scope="module")
def subject() -> Subject:
    unit = load_text(CAUSAL)
    target = targets.get(cuda_machine(0).device.arch)
    return Subject.of(unit, check(unit), BF16, (64, 64), target)


def broken(build: Build, old: str, new: str) -> Build:
    """The same with another text; it has to hold the old one once."""
    source = build.rendered.source
    assert source.count(old) == 1
    source = source.replace(old, new)
    target = build.rendered.target
    code = compile_cuda(source, name="broken.cu", target=target).binary
    return replace(build, rendered=replace(build.rendered, source=source), code=code)


HARM: dict[str, tuple[Callable[[Build], Build], str]] = {
    "out of bounds": (lambda b: broken(b, STORE, "ag_store(row + (1ll << 40) + d *"), ""),
    "endless": (lambda b: broken(b, START, f"{START} for (volatile int i = 0; i < 1; i = 0);"),
                "it did not end within"),
    "nothing": (lambda b: broken(b, START, f"{START} return;"), "are not written"),
    "wrong": (lambda b: broken(b, "ag_from_float<Element>(o)", "ag_from_float<Element>(1.5f * o)"),
              "as far off as is allowed"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_harm_costs_only_the_candidate_that_does_it(subject: Subject, harm: str) -> None:
    import cupy

    mine = cupy.asarray(list(range(1000)))
    call = Call(SIZES, {}, {})
    machine = cuda_machine(0)
    builder = CudaBuilder(subject)
    fixed = Schedule(kernel="forward_simt")
    space = collect(subject.attention, fixed, subject.target)
    good, other = (builder.build(schedule) for schedule in space.candidates[:2])
    change, words = HARM[harm]
    exams = [make_exam(subject, call), make_exam(subject, shrink(subject, call))]
    with Worker(machine.make_bench, lambda: exams, Patience(check_s=8)) as worker:
        assert worker.check("good", good).bound_ratio <= 1
        assert worker.sample("good", 3) > 0
        with pytest.raises(LostError, match=words):
            worker.check("broken", change(good))
        assert worker.check("other", other).bound_ratio <= 1
        assert worker.sample("good", 3) > 0
        assert worker.restarts == int(harm in ("out of bounds", "endless"))
    assert cupy.asnumpy(mine).sum() == 499500


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_search_finds_right_schedules_and_keeps_records(
    subject: Subject, layout: Any, tmp_path: Path
) -> None:
    call = Call(SIZES, {}, {}, layout=layout)
    machine = cuda_machine(0)
    found = tune(subject, (call, shrink(subject, call)), machine, Plan(most=8, beside=2))
    assert found.failure is None
    assert found.best is not None
    assert found.default is not None
    assert found.best.times.ms <= found.default.times.ms
    assert all(m.verdict.bound_ratio <= 1 for m in found.measured)
    contents = contents_of(found, subject, call, machine)
    assert {r.times.mode for r in contents.records} == {Mode.GRAPH}
    store = Store(tmp_path)
    store.add(contents)
    ((device, _, kept),) = store.files()
    assert device == machine.device
    assert len(kept.records) == len(found.measured)
