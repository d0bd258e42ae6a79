"""The benchmark of the tuner: a dry run to the end, a sweep of simulated times, and the claims."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attngen.ir.schedule import Schedule
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.search import Plan, name_of
from attngen.tuning.timing import RacePlan
from attngen.tuning.tune import host_machine
from attngen.tuning.worker import Worker
from benchmarks.attention import RESULTS
from benchmarks.cells import make_cells, shrink
from benchmarks.tuning import Effort, main, summary, wanted_ahead
from benchmarks.tuning_ahead import Ahead
from benchmarks.tuning_jobs import LENGTHS, Example, Job, make_job, make_tasks, unlike
from benchmarks.tuning_offline import main as offline
from benchmarks.tuning_offline import read, replay
from benchmarks.tuning_sweep import Seat, Thresholds, is_plain, race_all, sweep, to_the_end_s
from tests.tuning.test_search import Simulation

H200 = DeviceClass.named("h200")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*-tuning.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("host_compiler")
def test_a_dry_run_measures_cells_and_sums_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    cells = "forward-causal-d64-s1024,forward-causal-d64-s2048"
    out = str(tmp_path / "out")
    assert main(["--device", "cpu", "--out", out, "--cells", cells, "--ahead"]) == 0
    environment, cell, longer, last = lines_of(tmp_path / "out")
    assert environment["whole"] is False
    assert environment["device"].startswith("sm_80")
    for each in (cell, longer):
        assert each["swept"] == 3 < each["candidates"]
        assert 1 <= each["best_rank"] <= each["candidates"]
        assert each["tuned"]["ms"] > 0
        assert each["timed"] >= 1
        assert each["lost"] == {}
        assert each["exhaustive_s"] > each["swept_s"] / 2
        assert each["computed"] is True
        names = ("tuned", "exhaustive", "default", "model")
        assert min(each[f"{name}_over_best"] for name in names) == 1
    assert (last["suite"], last["cells"]) == ("summary", 2)
    assert last["left_out"] == []
    (path,) = (tmp_path / "out").glob("*.jsonl")
    capsys.readouterr()
    assert main(["--summary", str(path), str(path)]) == 0
    assert re.search(r"^cells +4$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.usefixtures("host_compiler")
def test_a_dry_run_of_a_length_compiles_when_it_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    out = str(tmp_path / "out")
    assert main(["--device", "cpu", "--out", out, "--cells", "lengths-causal-d128-s512"]) == 0
    _, length, last = lines_of(tmp_path / "out")
    assert length["tuned"]["ms"] > 0
    assert last["lengths"] == 1
    assert last["lengths_s"] == round(length["tuned_s"], 1)


def test_the_budget_leaves_cells_out(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path), "--budget", "-1"]) == 0
    last = lines_of(tmp_path)[-1]
    assert last["cells"] == 0
    examples = len(make_tasks(("examples",)))
    assert len(last["left_out"]) == 30 + 11 + 6 + examples  # a causal call is in both grids


def test_the_summary_counts_cells() -> None:
    def cell(tuned: float, model: float, **others: Any) -> dict[str, Any]:
        return {
            "suite": "forward", "tuned_over_best": tuned, "model_over_best": model,
            "tuned_s": 2.0, "exhaustive_s": 40.0, "computed": True, **others,
        }  # fmt: skip

    length = {"suite": "lengths", "tuned_s": 11.5}
    cells = [cell(1.0, 1.2), cell(1.05, 1.0, exhaustive_s=10.0, computed=False)]
    found = summary([*cells, length, length, {"reason": "it failed"}])
    assert found["tuned_worst"] == 1.05
    assert found["tuned_within_3_percent"] == found["model_within_10_percent"] == 0.5
    assert found["tuned_over_exhaustive_s"] == 0.125
    assert found["tuned_over_exhaustive_s_worst"] == 0.2
    assert found["tuned_over_exhaustive_s_measured"] == [0.2]
    assert (found["lengths"], found["lengths_s"]) == (2, 23.0)
    assert summary([])["tuned_over_exhaustive_s"] is None


@pytest.mark.parametrize("cell", make_cells(("variants",)), ids=lambda c: c.variant)
def test_every_variant_is_a_job_with_a_ragged_call(cell: Any) -> None:
    job = make_job(shrink(cell), host_machine().device)
    assert job.call.sizes["Sq"] == 64
    assert job.ragged.sizes["Sq"] == 389
    assert job.call.layout == job.ragged.layout == "bshd"
    assert len(job.space.candidates) > 10
    assert job.model.predict(job.space.default).us > 0


@pytest.mark.parametrize("task", make_tasks(("examples",)), ids=lambda t: t.name)
def test_every_example_is_a_job(task: Any) -> None:
    job = make_job(replace(task, tokens=256), H200)
    assert job.call.sizes["Sq"] == (49 if task.name == "examples-swin_shifted" else 256)
    assert job.space.default in job.space.candidates


def test_lengths_of_an_operation_ascend_and_no_call_comes_twice() -> None:
    tasks = unlike(make_tasks(("forward", "variants", "lengths")))
    assert len(tasks) == 30 + 11 + 6
    forward = [t for t in tasks if t.suite == "forward"]
    for first in range(0, 30, 5):
        group = forward[first : first + 5]
        assert len({(t.variant, t.D) for t in group}) == 1
        assert [t.S for t in group] == [1024, 2048, 4096, 8192, 16384]
    assert {cell.B * cell.S for cell in LENGTHS} == {16384}


# ---- without a GPU -------------------------------------------------------------------------


RECORDED = RESULTS / "2026-11-30-h200-tuning-2.jsonl"


def test_a_search_of_recorded_times_is_near_the_best_after_a_tenth_of_the_time() -> None:
    cells = {r.cell["cell"]: r for r in read([RECORDED])}
    assert len(cells) == 18
    for name in ("forward-causal-d128-s4096", "forward-full-d256-s4096"):
        recorded = cells[name]
        for seed in range(3):
            run = replay(recorded, Plan(budget_s=None, compilers=1), 16, seed)
            assert run.found.best is not None
            assert recorded.behind(run.found.best.schedule) <= 1.03
            assert len(run.found.measured) == run.compiled <= Plan().most
            assert run.seconds <= 0.1 * recorded.exhaustive_s(16)


def test_what_no_record_lists_is_slower_than_what_it_does() -> None:
    recorded = read([RECORDED])[0]
    ratios = recorded.cell["ratios"].values()
    behind = [recorded.behind(s) for s in recorded.job.space.candidates]
    assert min(behind) == 1.0
    assert sum(ratio >= max(ratios) for ratio in behind) > len(behind) - len(ratios)


def test_offline_figures_are_said_for_each_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert offline([str(RECORDED), "--seeds", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["cell", "compiled", "behind"]
    assert len(lines) == 18


# ---- the sweep -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job() -> Job:
    cells = {c.name: c for c in make_cells(("forward",))}
    return make_job(cells["forward-causal-d128-s4096"], H200)


class OnRagged(Simulation):
    """Also remembers who sat which exams."""

    def __init__(self, law: Callable[[Schedule], float], **options: Any) -> None:
        super().__init__(law, **options)
        self.sat: dict[int, list[str]] = {0: [], 1: []}

    def check(self, name: str, build: Any, first: int = 0) -> Any:
        self.sat[first].append(name)
        return super().check(name, build)


def seat_of(simulation: Simulation) -> Any:
    simulation.is_prepared = True
    return simulation


def law_of(job: Job, best: Schedule, gain: float = 0.94) -> Callable[[Schedule], float]:
    def law(schedule: Schedule) -> float:
        ms = job.model.predict(schedule).us / 1e3
        return min(ms, 0.5) * gain if schedule == best else max(ms, 0.5)

    return law


@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_finds_an_order_that_no_model_knows(job: Job, seed: int) -> None:
    orders = [s for s in job.space.candidates if not is_plain(s)]
    best = orders[7 * seed + 5]
    if job.model.predict(best).us > 540:
        best = next(s for s in orders if job.model.predict(s).us < 500)
    simulation = OnRagged(law_of(job, best), noise=0.006, seed=seed)
    found = sweep(job, seat_of(simulation), simulation, Thresholds())
    assert found.fastest[0] == best
    assert found.ratios[best] == 1
    assert len(found.fastest) == 3
    assert simulation.sat[0] == [name_of(s) for s in found.fastest]
    tried = {s.kernel for s in found.ms}
    assert tried == {"forward_wgmma", "forward_mma"}


def test_what_was_slow_at_the_length_before_is_not_tried(job: Job) -> None:
    best = job.space.default
    simulation = OnRagged(law_of(job, best))
    slow = {s: 1.6 for s in job.space.candidates if s.kernel == "forward_mma"}
    found = sweep(job, seat_of(simulation), simulation, Thresholds(), slow)
    assert {s.kernel for s in found.ms} == {"forward_wgmma"}


def test_the_fastest_of_a_sweep_is_right_in_all_exams(job: Job) -> None:
    best = job.space.candidates[3]
    simulation = OnRagged(law_of(job, best))
    check = simulation.check

    def refuse(name: str, build: Any, first: int = 0) -> Any:
        verdict = check(name, build, first)
        if first == 0 and build.schedule == best:
            from attngen.tuning.timing import LostError

            raise LostError("it is wrong at this length")
        return verdict

    simulation.check = refuse  # type: ignore[method-assign]
    found = sweep(job, seat_of(simulation), simulation, Thresholds())
    assert best not in found.fastest
    assert found.lost[best] == "it is wrong at this length"


def test_a_whole_race_times_everything(job: Job) -> None:
    space = replace(job.space, candidates=job.space.candidates[:20])
    small = replace(job, space=space)
    simulation = OnRagged(law_of(job, job.space.default))
    plan = RacePlan(min_rounds=3, max_rounds=3, drops=False)
    found = race_all(small, seat_of(simulation), simulation, plan)
    assert set(found.ms) == set(space.candidates)
    assert len(simulation.sat[0]) == 20
    computed = to_the_end_s(small, found, plan, exam_s=1.0)
    assert computed > 20


def test_a_seat_names_candidates_by_operation() -> None:
    asked: list[Any] = []

    class Recorder:
        mode = "graph"

        def check(self, *values: Any) -> str:
            asked.append(values)
            return "right"

        def sample(self, *values: Any) -> float:
            asked.append(values)
            return 1.0

    worker: Worker = Recorder()  # type: ignore[assignment]
    one, other = Seat(worker, "a "), Seat(worker, "b ")
    build: Any = object()
    one.check("x", build)
    other.check("x", build, 1)
    other.sample("x", 2)
    assert asked == [("a x", build, 0), ("b x", build, 1), ("b x", 2)]
    assert (one.exams, other.exams) == (1, 0)


# ---- what is made ahead --------------------------------------------------------------------


def test_what_a_cell_tries_is_wanted_ahead(job: Job) -> None:
    cell = next(t for t in make_tasks(("forward",)) if t.name == "forward-causal-d128-s4096")
    plan = Plan(most=8, beside=2)
    effort = Effort(plan=plan, brief=plan, fresh=RacePlan(), thresholds=Thresholds())
    wanted = wanted_ahead(job, cell, effort)
    assert wanted[0] == job.space.default
    assert len(wanted) == len(set(wanted)) > 100
    assert {s for s in wanted if is_plain(s)} >= {
        s for s in job.space.candidates if is_plain(s) and s.kernel != "forward_simt"
    }
    assert len(wanted_ahead(job, Example("examples-causal"), effort)) <= 6


@pytest.mark.usefixtures("host_compiler")
def test_a_task_that_cannot_be_made_says_so_when_it_is_asked_for() -> None:
    from attngen.diagnostics.diagnostic import AttnError

    machine = host_machine()
    good, bad = Example("examples-full", 16), Example("examples-nothing", 16)
    ahead = Ahead((bad, good), machine.device, machine.make_builder, lambda job, task: (), 2)
    try:
        with pytest.raises(AttnError):
            ahead.ready(bad)
        assert ahead.ready(good).job.call.sizes["Sq"] == 16
    finally:
        ahead.close()
