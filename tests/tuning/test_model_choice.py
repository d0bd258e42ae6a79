"""The last grade of a lookup: the cost model's schedule for a problem that nobody measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

import attngen
from attngen import targets
from attngen.api import Tune
from attngen.ir.schedule import Schedule
from attngen.tuning import model_choice
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.lookup import Grade, Question, open_lookup
from attngen.tuning.model_choice import choose_by_model, nominal_call
from attngen.tuning.problem import LayoutClass, Problem
from attngen.tuning.space import collect

from .problems import CAUSAL, DOCUMENTS, specialised

H200 = DeviceClass.named("h200")
SIZES = {"B": 2, "Hq": 32, "Hkv": 8, "Sq": 4096, "Skv": 4096, "Dqk": 128, "Dv": 128}


def question(problem: Problem | None = None, wanted: Schedule | None = None) -> Question:
    asked = problem or Problem.of("bf16", SIZES, H200.sm_count)
    return Question("0" * 64, asked, H200, wanted or Schedule())


@pytest.mark.parametrize("B", [1, 4, 32])
@pytest.mark.parametrize("S", [64, 300, 4096, 16384])
def test_a_nominal_call_is_one_of_its_problem(B: int, S: int) -> None:
    problem = Problem.of("bf16", {**SIZES, "B": B, "Sq": S, "Skv": S}, H200.sm_count)
    call = nominal_call(specialised(CAUSAL, "bf16", (128, 128)), problem, H200)
    assert call is not None
    again = Problem.of("bf16", call.sizes, H200.sm_count)
    assert (again.q_tokens, again.kv_tokens, again.group) == (
        problem.q_tokens, problem.kv_tokens, problem.group,
    )  # fmt: skip
    assert 0.5 <= again.waves / problem.waves <= 2


def test_declared_heads_stay() -> None:
    text = "attention a {\n    heads q = 12, kv = 4\n    mask kv <= qpos\n}\n"
    problem = Problem.of("bf16", {**SIZES, "Hq": 12, "Hkv": 4}, H200.sm_count)
    call = nominal_call(specialised(text, "bf16", (128, 128)), problem, H200)
    assert call is not None
    assert (call.sizes["Hq"], call.sizes["Hkv"]) == (12, 4)


def test_where_the_model_says_nothing() -> None:
    causal = specialised(CAUSAL, "bf16", (128, 128))
    asked = question().problem
    assert choose_by_model(specialised(DOCUMENTS, "bf16", (128, 128)), question()) is None
    open_param = "attention a {\n    param w : int\n    mask kv <= qpos + w\n}\n"
    assert choose_by_model(specialised(open_param, "bf16", (128, 128)), question()) is None
    for other in (replace(asked, layout=LayoutClass.ANY), replace(asked, kv_tokens=1 << 20)):
        assert choose_by_model(causal, question(other)) is None
    impossible = Schedule(kernel="forward_wgmma", tile_q=40)
    assert choose_by_model(causal, question(wanted=impossible)) is None


def test_a_default_stays_unless_the_model_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = specialised(CAUSAL, "bf16", (128, 128))
    space = collect(causal, Schedule(), targets.get("sm_90a"))
    assert choose_by_model(causal, question()) == space.default
    tried: list[Schedule] = []

    class Sure:
        def __init__(self, *_: object) -> None: ...

        def choose(self, default: Schedule, schedules: list[Schedule]) -> Schedule:
            tried.extend(schedules)
            return schedules[-1]

    monkeypatch.setattr(model_choice, "CostModel", Sure)
    assert choose_by_model(causal, question()) == tried[-1]
    assert all((s.tile_q or 0) >= 64 and (s.tile_kv or 0) >= 64 for s in tried)


def test_a_kernel_without_records_asks_the_model_unless_only_records_count() -> None:
    shape = {name: SIZES[name] for name in ("B", "Hq", "Hkv", "Sq", "Skv")}
    for only_records, grade in ((False, Grade.MODEL), (True, Grade.DEFAULT)):
        open_lookup().forget()
        tune: Tune = "cached" if only_records else "auto"
        kernel = attngen.compile_text(CAUSAL, dtype="bf16", head_dim=80, tune=tune)
        assert kernel.find_schedule(H200, shape).grade is grade
