"""The benchmark of the tuner: a dry run to the end, and the claims in numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attngen.tuning.tune import host_machine
from benchmarks.cells import make_cells, shrink
from benchmarks.tuning import LENGTHS, main, make_job, summary


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
            "tuned_s": 2.0, "exhaustive_s": 40.0,
        }  # fmt: skip

    length = {"suite": "lengths", "tuned_s": 11.5}
    found = summary([cell(1.0, 1.2), cell(1.05, 1.0), length, length, {"reason": "it failed"}])
    assert found["tuned_worst"] == 1.05
    assert found["tuned_within_3_percent"] == found["model_within_10_percent"] == 0.5
    assert found["tuned_over_exhaustive_s"] == 0.05
    assert (found["lengths"], found["lengths_s"]) == (2, 23.0)


@pytest.mark.parametrize("cell", make_cells(("variants",)), ids=lambda c: c.variant)
def test_every_variant_is_a_job_with_a_ragged_call(cell: Any) -> None:
    job = make_job(shrink(cell), host_machine())
    assert job.call.sizes["Sq"] == 64
    assert job.ragged.sizes["Sq"] == 389
    assert job.call.layout == job.ragged.layout == "bshd"
    assert len(job.space.candidates) > 10
    assert job.model.predict(job.space.default).us > 0


def test_six_lengths_have_the_same_tokens() -> None:
    assert {cell.B * cell.S for cell in LENGTHS} == {16384}
    assert len(LENGTHS) == 6
