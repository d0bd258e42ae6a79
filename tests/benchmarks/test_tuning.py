"""The benchmark of the tuner: a dry run to the end, and the claims in numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from attngen.tuning.device_class import DeviceClass
from attngen.tuning.search import Plan
from attngen.tuning.timing import RacePlan
from attngen.tuning.tune import host_machine
from benchmarks.cells import make_cells, shrink
from benchmarks.tuning import (
    LENGTHS,
    Effort,
    compile_ahead,
    main,
    make_job,
    select_part,
    summary,
)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*-tuning.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("host_compiler")
def test_a_dry_run_measures_a_cell_and_sums_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    cells = "forward-causal-d64-s1024,lengths-causal-d128-s512"
    assert main(["--device", "cpu", "--out", str(tmp_path), "--cells", cells]) == 0
    environment, cell, length, last = lines_of(tmp_path)
    assert environment["within"] is None
    assert cell["tried"] == 3 < cell["candidates"]
    assert 1 <= cell["best_rank"] <= cell["candidates"]
    assert environment["device"].startswith("sm_80")
    assert cell["tuned"]["ms"] > 0
    assert cell["timed"] >= 1
    assert cell["exhaustive_timed"] >= 2
    assert cell["lost"] == {}
    assert min(cell[f"{name}_over_best"] for name in ("tuned", "default", "model")) >= 1
    assert length["tuned"]["ms"] > 0
    assert (last["suite"], last["cells"], last["lengths"]) == ("summary", 1, 1)
    assert last["left_out"] == []


def test_the_budget_leaves_cells_out(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path), "--budget", "-1"]) == 0
    last = lines_of(tmp_path)[-1]
    assert last["cells"] == 0
    assert len(last["left_out"]) == 30 + 12 + 6


def test_the_summary_counts_cells() -> None:
    def cell(tuned: float, model: float) -> dict[str, Any]:
        return {
            "suite": "forward", "tuned_over_best": tuned, "model_over_best": model,
            "tuned_s": 2.0, "exhaustive_s": 40.0, "candidates": 140, "tried": 140,
        }  # fmt: skip

    length = {"suite": "lengths", "tuned_s": 11.5}
    found = summary([cell(1.0, 1.2), cell(1.05, 1.0), length, length, {"reason": "it failed"}])
    assert found["tuned_worst"] == 1.05
    assert found["tuned_within_3_percent"] == found["model_within_10_percent"] == 0.5
    assert found["tuned_over_exhaustive_s"] == 0.05
    assert (found["lengths"], found["lengths_s"]) == (2, 23.0)
    part = summary([cell(1.0, 1.2) | {"tried": 34}])
    assert part["tuned_over_exhaustive_s"] is None  # what was left out was not searched


@pytest.mark.parametrize("cell", make_cells(("variants",)), ids=lambda c: c.variant)
def test_every_variant_is_a_job_with_a_ragged_call(cell: Any) -> None:
    job = make_job(shrink(cell), host_machine())
    assert job.call.sizes["Sq"] == 64
    assert job.ragged.sizes["Sq"] == 389
    assert job.call.layout == job.ragged.layout == "bshd"
    assert len(job.space.candidates) > 10
    assert job.model.predict(job.space.default).us > 0


def test_two_parts_share_the_operations() -> None:
    cells = make_cells(("forward",))
    parts = [select_part(cells, (number, 2)) for number in (1, 2)]
    assert sorted(c.name for part in parts for c in part) == sorted(c.name for c in cells)
    operations = [{(c.variant, c.D) for c in part} for part in parts]
    assert not operations[0] & operations[1]
    assert [len(part) for part in parts] == [15, 15]


def test_what_a_cell_tries_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    class Recorder:
        def build(self, schedule: Any) -> None:
            built.append(schedule)

    cell = replace(make_cells(("forward",))[0], S=1024)
    machine = replace(
        host_machine(),
        device=DeviceClass.named("h200"),
        make_builder=lambda subject: cast(Any, Recorder()),
    )
    plan = Plan(most=8, beside=2)
    effort = Effort(plan=plan, fresh=RacePlan(), within=1.1, orders=1.0)
    job = make_job(cell, machine)
    assert compile_ahead((cell, replace(cell, S=2048)), machine, effort) == len(built)
    assert job.space.default in built
    assert len(built) == len(set(built)) > 8


def test_six_lengths_have_the_same_tokens() -> None:
    assert {cell.B * cell.S for cell in LENGTHS} == {16384}
    assert len(LENGTHS) == 6
