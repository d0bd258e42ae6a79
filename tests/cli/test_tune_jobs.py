"""What is tuned for: calls that can be run, whatever the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen.api import Kernel
from attngen.cli.tune_jobs import DEFAULT_SIZES, Job, Request
from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.load import Unit, load_file, load_text
from attngen.tuning.call import make_operands
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.exam import make_exam, make_exams

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))
H200 = DeviceClass.named("h200")
TABLE = "tensor t : float[31]\nscore s + t[qpos - kv + 15]"


def job_of(unit: Unit, defaults: dict[str, int], **shape: int) -> Job:
    return Request(unit, {}, None, None, {}, 0).job(shape, H200, defaults)


def text(body: str) -> Unit:
    return load_text(f"attention a {{\n{body}\n}}\n")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_calls_of_an_example_read_nothing_outside_of_its_tensors(path: Path) -> None:
    unit = load_file(path)
    job = job_of(unit, {"B": 2, "Hq": 2, "Sq": 70})
    kernel = Kernel(unit, dtype=job.problem.dtype, engine="numpy")  # which checks every read
    for call in (job.call, job.ragged):
        operands = make_operands(job.problem.dtype, call)
        given: dict[str, Any] = {**operands, **call.tensors, **call.params}
        kernel(**given)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_tuned_at_the_usual_sizes(path: Path) -> None:
    job = job_of(load_file(path), {**DEFAULT_SIZES, "Sq": 1024})
    assert job.call.sizes["Sq"] == (49 if path.stem == "swin_shifted" else 1024)
    assert len(make_exams(job.subject, (job.call, job.ragged))) == 2


def test_a_text_for_short_sequences_gets_more_of_them() -> None:
    job = job_of(text(TABLE), {"B": 1, "Hq": 2, "Sq": 1600})
    assert (job.call.sizes["B"], job.call.sizes["Sq"], job.call.sizes["Skv"]) == (100, 16, 16)
    assert job.ragged.sizes["Sq"] == 16


def test_a_guarded_read_shortens_nothing() -> None:
    guarded = "tensor t : float[100]\nscore s + where(kv < 100, t[kv], 0.0)"
    assert job_of(text(guarded), {"B": 1, "Hq": 2, "Sq": 300}).call.sizes["Sq"] == 300
    masked = "tensor t : float[100]\nmask kv < 100\nscore s + t[kv]"
    assert job_of(text(masked), {"B": 1, "Hq": 2, "Sq": 300}).call.sizes["Sq"] == 300


def test_sizes_that_were_asked_for_are_refused_with_those_that_fit() -> None:
    with pytest.raises(AttnError) as caught:
        job_of(text(TABLE), {"B": 1, "Hq": 2, "Sq": 8}, Sq=17)
    (found,) = caught.value.diagnostics
    assert found.code == "A722"
    assert "Sq 17, Skv 17" in found.message()
    assert "`t` is read outside of its shape (31,)" in found.message()
    assert "at most 16" in (found.hint_text() or "")


def test_what_no_length_makes_right_is_refused_without_advice() -> None:
    with pytest.raises(AttnError) as caught:
        job_of(text("tensor t : float[4]\nscore s + t[kv + 9]"), {"B": 1, "Hq": 2, "Sq": 8})
    (found,) = caught.value.diagnostics
    assert (found.code, found.hint_text()) == ("A722", None)


def test_lengths_of_sequences_count() -> None:
    body = "tensor n : int32[B]\ntensor t : float[Skv]\nlength kv = n[b]\nscore s + t[Skv - 1 - kv]"
    assert job_of(text(body), {"B": 3, "Hq": 2, "Sq": 40}).call.sizes["Sq"] == 40


def test_a_ragged_call_that_is_not_valid_is_no_exam() -> None:
    body = "tensor t : float[2000]\nscore s + t[1800 - Skv + kv]"
    job = job_of(text(body), {"B": 1, "Hq": 1, "Sq": 800})
    calls = job.call, job.ragged
    assert len(make_exams(job.subject, calls)) == 2
    # 1800 keys before the last: with 389 there are none
    early = job_of(text("tensor t : float[2000]\nscore s + t[Skv - 500 + kv]"),
                   {"B": 1, "Hq": 1, "Sq": 800})  # fmt: skip
    assert len(make_exams(early.subject, (early.call, early.ragged))) == 1
    with pytest.raises(AttnError, match="A656"):
        make_exam(early.subject, early.ragged)
    assert np.isfinite(make_exam(early.subject, early.call).o).all()
