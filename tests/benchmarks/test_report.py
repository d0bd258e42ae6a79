"""Tables from records that were made up for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import geometric_mean, main, make_rows, read_records, render_report


def timed(cell: str, peer: str, ms: float, **more: Any) -> dict[str, Any]:
    made = {"suite": "forward", "cell": cell, "peer": peer, "lane": peer, "ms": ms}
    return {**made, "tflops": 100.0 / ms, "rms_err": 1e-3, "mask_ms": None, **more}


def refused(cell: str, peer: str, reason: str) -> dict[str, Any]:
    return {
        "suite": "forward",
        "cell": cell,
        "peer": peer,
        "lane": peer,
        "ms": None,
        "reason": reason,
    }


ENVIRONMENT = {
    "suite": "environment",
    "gpu": "NVIDIA H200",
    "date": "2026-11-30T10:00:00Z",
    "versions": {"torch": "2.11.0", "attngen": "0.1.0"},
    "clocks": {"sm_mhz": 1980.0, "power_w": None},
    "missing": {"fa4": "flash_attn.cute: ModuleNotFoundError: No module named 'flash_attn'"},
}
END = {"suite": "end", "seconds": 9.0, "clocks": None, "left_out": [], "lost": None}
RECORDS: list[dict[str, Any]] = [
    ENVIRONMENT,
    timed("forward-full-d64-s1024", "attngen", 0.5, rms_err=2e-3),
    timed("forward-full-d64-s1024", "fa3", 0.4),
    timed("forward-full-d64-s1024", "cudnn", 1.0, rms_err=1e-3),
    timed("forward-full-d64-s2048", "attngen", 0.8),
    timed("forward-full-d64-s2048", "fa3", 1.0),
    refused("forward-full-d64-s2048", "cudnn", "no kernel"),
    refused("forward-full-d64-s4096", "attngen", "wrong: 0.5 off"),
    timed("forward-full-d64-s4096", "fa3", 2.0),
    END,
]


def line_of(report: str, begin: str) -> list[str]:
    (line,) = (x for x in report.splitlines() if x.startswith(f"| {begin} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_speeds_ratio_and_best_peer_of_a_cell() -> None:
    report = render_report(RECORDS)
    assert line_of(report, "cell") == [
        *("cell", "attngen", "fa3", "cudnn", "best peer", "attngen / best", "error / SDPA's")
    ]
    assert line_of(report, "forward-full-d64-s1024") == [
        *("forward-full-d64-s1024", "200.0", "250.0", "100.0", "fa3", "0.800", "2.00")
    ]
    assert line_of(report, "forward-full-d64-s2048") == [
        *("forward-full-d64-s2048", "125.0", "100.0", "–", "fa3", "1.250", "–")
    ]
    assert line_of(report, "forward-full-d64-s4096") == [
        *("forward-full-d64-s4096", "–", "50.0", "–", "fa3", "–", "–")
    ]


def test_mean_and_smallest_are_over_the_cells_that_both_ran() -> None:
    assert (
        "attngen / best peer over 2 of 3 cells: geometric mean 1.000, smallest 0.800"
        " (forward-full-d64-s1024)."
    ) in render_report(RECORDS)


def test_missing_peers_and_refusals_are_listed_with_their_reason() -> None:
    report = render_report(RECORDS)
    assert "- fa4: flash_attn.cute: ModuleNotFoundError" in report
    assert "- cudnn: no kernel (forward-full-d64-s2048)" in report
    assert "- attngen: wrong: 0.5 off (forward-full-d64-s4096)" in report


def test_a_report_of_attngen_alone() -> None:
    alone = [r for r in RECORDS if r.get("peer", "attngen") == "attngen"]
    report = render_report(alone)
    assert line_of(report, "cell") == [
        *("cell", "attngen", "best peer", "attngen / best", "error / SDPA's")
    ]
    assert "No cell has both attngen and another peer." in report


def test_several_schedules_are_columns_and_the_fastest_counts() -> None:
    cell = "forward-full-d64-s1024"
    records = [
        timed(cell, "attngen", 0.5, lane="attngen: kernel forward_mma"),
        timed(cell, "attngen", 0.25, lane="attngen: auto"),
        timed(cell, "fa3", 0.5),
    ]
    (row,) = make_rows(records, "forward")
    assert row.own is records[1]
    assert row.best_other is records[2]
    assert row.ratio == 2.0
    assert line_of(render_report(records), "cell")[1:4] == [
        *("attngen: auto", "attngen: kernel forward_mma", "fa3")
    ]


def test_suites_do_not_mix() -> None:
    other: dict[str, Any] = timed(
        "variants-alibi-d128-s8192", "attngen", 1.0, suite="variants", mask_ms=2.5
    )
    report = render_report([*RECORDS, other])
    assert report.index("## Forward") < report.index("## Variants") < report.index("## Mask")
    assert len(make_rows([*RECORDS, other], "forward")) == 3
    assert [row.cell for row in make_rows([*RECORDS, other], "variants")] == [other["cell"]]
    assert line_of(report.split("## Mask building")[1], other["cell"])[1:] == [
        *("attngen", "2.50", "1.000")
    ]


def test_cold_starts_have_a_table_of_their_own() -> None:
    cold = {"suite": "cold", "cell": "cold-causal-d128-s4096"}
    found = {"ms": 10900.4, "new_length_ms": 1400.0, "cached_ms": None}
    records: list[dict[str, Any]] = [
        {**cold, "peer": "flex", "lane": "flex", **found},
        {**cold, "peer": "fa4", "lane": "fa4", "ms": None, "reason": "its process ended with 1: x"},
    ]
    report = render_report(records)
    assert line_of(report, "flex") == ["flex", "10900", "1400.0", "–"]
    assert "- fa4: its process ended with 1: x (cold-causal-d128-s4096)" in report


def test_how_a_run_ended_is_said() -> None:
    assert "ended from outside" not in render_report(RECORDS)
    assert "ended from outside" in render_report(RECORDS[:-1])
    left_out = {**END, "left_out": ["gqa-full-d128-s4096", "gqa-full-d128-s8192"]}
    report = render_report([*RECORDS[:-1], left_out])
    assert "time was used up: gqa-full-d128-s4096, gqa-full-d128-s8192." in report
    lost = render_report([*RECORDS[:-1], {**END, "lost": "fa3 left the GPU in an error"}])
    assert "ended early: fa3 left the GPU in an error." in lost


def test_environment_is_shown() -> None:
    report = render_report(RECORDS)
    assert report.startswith("# Attention on NVIDIA H200\n")
    assert line_of(report, "packages") == ["packages", "attngen 0.1.0, torch 2.11.0"]
    assert line_of(report, "clocks at the start") == ["clocks at the start", "sm_mhz 1980"]


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([3.0]) == pytest.approx(3.0)
    assert geometric_mean([]) is None
    assert geometric_mean([1.0, 2.0, 4.0]) == pytest.approx(math.prod([1, 2, 4]) ** (1 / 3))


def test_a_line_that_was_cut_off_is_left_out() -> None:
    whole = "\n".join(map(json.dumps, RECORDS)) + "\n"
    assert read_records(whole) == RECORDS
    assert read_records(whole[:-20]) == RECORDS[:-1]
    assert read_records("") == []


def test_the_command_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "2026-11-30-h200.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)) + "\n", encoding="utf-8")
    main([str(file)])
    assert capsys.readouterr().out == render_report(RECORDS)
    main([str(file), "--out", str(tmp_path / "table.md")])
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == render_report(RECORDS)
