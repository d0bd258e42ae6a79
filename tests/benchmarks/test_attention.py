"""The command, as a dry run on the CPU: inputs, checks, rounds, files and table."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from attngen.bench.machines import NumpyMachine
from attngen.bench.timing import Plan
from benchmarks import attention, environment
from benchmarks.attention import RESULTS, Results, choose_path, fits, main, make_lanes, run_cells
from benchmarks.cells import make_cells, shrink
from benchmarks.cold import measure_cold
from benchmarks.peers import PEERS
from benchmarks.report import read_records
from benchmarks.run_cell import DeviceLostError

DRY = ["--device", "cpu"]
PLAN = Plan(min_rounds=1, max_rounds=1, sample_ms=0.0)


def run(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The records and the table of one dry run."""
    main([*DRY, "--out", str(folder), *arguments])
    (file,) = folder.glob("*.jsonl")
    (table,) = folder.glob("*.md")
    assert table.stem == file.stem
    return read_records(file.read_text(encoding="utf-8")), table.read_text(encoding="utf-8")


def test_every_suite_runs_to_its_table(tmp_path: Path) -> None:
    patterns = "forward-*-d64-s2048,gqa-causal-*-s4096,variants-*"
    records, table = run(tmp_path, "--cells", patterns, "--peers", "attngen,fa2,fa3,cudnn")
    first, *cells, last = records
    assert first["suite"] == "environment"
    assert first.keys() >= {"gpu", "date", "versions", "missing", "clocks", "plan", "driver"}
    assert last == {
        "suite": "end",
        "seconds": last["seconds"],
        "clocks": environment.read_clocks(),
        "left_out": [],
        "lost": None,
    }
    own = [r for r in cells if r["peer"] == "attngen"]
    assert {r["suite"] for r in own} == {"forward", "gqa", "variants"}
    assert len(own) == 2 + 1 + 12
    assert all(r["ms"] > 0 and r["max_err"] < 0.1 for r in own)
    for heading in ("# Attention on cpu", "## Forward", "## Grouped", "## Variants"):
        assert heading in table


def test_a_cold_start_is_timed_in_processes_of_its_own(tmp_path: Path) -> None:
    records, table = run(tmp_path, "--suite", "cold", "--peers", "attngen")
    _, found, _ = records
    assert found["suite"] == "cold"
    assert min(found["ms"], found["new_length_ms"], found["cached_ms"]) > 0
    assert found["max_err"] < 0.1
    assert "## Cold start" in table


def test_every_peer_has_a_line_or_is_listed_as_missing(tmp_path: Path) -> None:
    records, _ = run(tmp_path, "--cells", "variants-window-*")
    spoken = {r["peer"] for r in records if "peer" in r} | set(records[0]["missing"])
    assert spoken == set(PEERS)


def test_several_schedules_are_compared(tmp_path: Path) -> None:
    lines = "kernel forward_simt; tile q = 16"
    arguments = ["--schedule", lines, "--schedule", "auto", "--peers", "attngen"]
    records, _ = run(tmp_path, "--cells", "forward-full-d64-s1024", *arguments)
    assert [(r["lane"], r["schedule"]) for r in records[1:-1]] == [
        (f"attngen: {lines}", lines),
        ("attngen: auto", None),
    ]


def test_a_dry_run_never_writes_to_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(RESULTS.iterdir())
    with pytest.raises(SystemExit):
        main([*DRY, "--out", str(RESULTS)])
    assert "does not write to benchmarks/results" in capsys.readouterr().err
    main([*DRY, "--cells", "forward-full-d64-s1024", "--peers", "attngen"])
    printed = capsys.readouterr().out
    assert "times without meaning" in printed
    assert "# Attention on cpu" in printed
    assert sorted(RESULTS.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "backward"], "'backward' is none of forward, gqa"),
        (["--peers", "attngen,fa5"], "'fa5' is none of attngen, fa2"),
    ],
)
def test_unknown_names_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*DRY, *arguments])
    assert words in capsys.readouterr().err


def test_no_cell_of_that_name() -> None:
    with pytest.raises(SystemExit, match="no cell is named forward-d64"):
        main([*DRY, "--cells", "forward-d64"])


def test_the_exit_code_says_whether_attngen_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*DRY, "--cells", "forward-full-d64-s1024", "--peers", "attngen"]
    assert main(arguments) == 0
    assert main([*arguments, "--schedule", "kernel of_nobody"]) == 1

    def lose(*_: object) -> list[dict[str, Any]]:
        raise DeviceLostError("attngen left the GPU in an error")

    monkeypatch.setattr(attention, "run_cell", lose)
    assert main(arguments) == 1


def test_a_budget_ends_between_cells() -> None:
    machine = NumpyMachine()
    lanes, _ = make_lanes(["attngen"], machine, ["auto"])
    cells = [shrink(cell) for cell in make_cells(["forward"])[:6]]

    def clock() -> Iterator[float]:
        yield 0.0
        for n in range(6):  # each cell takes 10 s
            yield from (10.0 * n, 10.0 * n + 10.0)

    results = Results(None)
    left_out = run_cells(cells, lanes, machine, PLAN, 35.0, results, now=clock().__next__)
    assert left_out == tuple(c.name for c in cells[3:])
    assert [r["cell"] for r in results.records] == [c.name for c in cells[:3]]


def test_a_cell_begins_only_if_one_like_the_longest_still_fits() -> None:
    assert fits(1e9, 1e9, None)
    assert fits(20.0, 10.0, 30.0)
    assert not fits(20.1, 10.0, 30.0)


def test_lines_are_there_before_the_run_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("w", encoding="utf-8") as file:
        results = Results(file)
        results.write({"suite": "environment"})
        results.write({"suite": "forward", "ms": 1.5})
        assert [json.loads(x)["suite"] for x in path.read_text().splitlines()] == [
            "environment",
            "forward",
        ]


def test_results_are_json_that_everybody_reads() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Results(io.StringIO()).write({"max_err": float("nan")})


def test_files_are_named_by_date_and_gpu_and_never_overwritten(tmp_path: Path) -> None:
    day = datetime(2026, 11, 30, tzinfo=UTC)
    assert environment.file_stem("NVIDIA H200", day) == "2026-11-30-h200"
    stem = environment.file_stem("NVIDIA GeForce RTX 4090", day)
    assert stem == "2026-11-30-geforce-rtx-4090"
    names = []
    for _ in range(3):
        path = choose_path(tmp_path, stem)
        path.touch()
        names.append(path.name)
    assert names == [f"{stem}.jsonl", f"{stem}-2.jsonl", f"{stem}-3.jsonl"]


def test_clocks_are_read_as_nvidia_smi_prints_them() -> None:
    assert environment.parse_clocks("1980, 3201, 1980, 700.00, 76.49, [N/A]") == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "max_sm_mhz": 1980.0,
        "power_limit_w": 700.0,
        "power_w": 76.49,
        "temperature_c": None,
    }


def test_a_peer_that_cannot_start_cold_is_recorded_with_its_reason() -> None:
    (cell,) = make_cells(["cold"])
    found = measure_cold(shrink(cell), "fa3", NumpyMachine())
    assert found["ms"] is None
    assert "flash_attn_interface" in found["reason"]
