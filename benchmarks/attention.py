"""attngen beside every installed peer: one process, the same inputs, interleaved.

    python -m benchmarks.attention [--suite forward,variants,gqa,cold] [--peers attngen,fa3,cudnn]
        [--cells 'forward-causal-d128-*'] [--budget SECONDS] [--out DIR] [--schedule "…"]…
    python -m benchmarks.attention --device cpu

writes `<date>-<gpu>.jsonl`, one JSON object a line as it is measured: first the environment, then a
record for every cell and peer, at the end the clocks again and what was left out.  A table in
Markdown is put beside it; `python -m benchmarks.report FILE` makes it anew.

Every result is checked against the float64 oracle before it is timed.  A peer that is missing or
refuses a cell has a line that says why.  Several `--schedule` compare attngen with itself; `auto`
leaves the choice to attngen.  `--device cpu` is a dry run with tiny shapes: its times mean nothing,
and it never writes to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import attngen
from attngen.bench.machines import Machine, open_machine
from attngen.bench.timing import Plan
from benchmarks import environment
from benchmarks.cells import SUITES, Cell, make_cells, select_cells, shrink
from benchmarks.cold import measure_cold
from benchmarks.peers import DEFAULT_SCHEDULE, PEERS, make_peer
from benchmarks.report import render_report
from benchmarks.run_cell import DeviceLostError, Lane, run_cell

__all__ = ["Results", "choose_path", "describe_run", "fits", "main", "make_lanes", "run_cells"]

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
_EXAMPLE: Final = "forward-causal-d128-s4096"
_DRY_PLAN: Final = Plan(min_rounds=2, max_rounds=2, sample_ms=0.0)


class Results:
    """JSON lines, written and flushed one by one, and kept for the report."""

    def __init__(self, file: TextIO | None) -> None:
        self.records: list[dict[str, Any]] = []
        self._file = file

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))
        if self._file is not None:
            print(json.dumps(record, allow_nan=False), file=self._file, flush=True)


def make_lanes(
    names: Sequence[str], machine: Machine, schedules: Sequence[str]
) -> tuple[tuple[Lane, ...], dict[str, str]]:
    """What is timed, and why each of the other peers is missing."""
    lanes: list[Lane] = []
    missing: dict[str, str] = {}
    for name in names:
        reason = make_peer(name, machine).missing()
        if reason is not None:
            missing[name] = reason
        elif name == "attngen":
            lanes += [_own_lane(text, machine, len(schedules)) for text in schedules]
        else:
            lanes.append(Lane(name, make_peer(name, machine)))
    return tuple(lanes), missing


def run_cells(
    cells: Sequence[Cell],
    lanes: Sequence[Lane],
    machine: Machine,
    plan: Plan,
    budget_s: float | None,
    results: Results,
    *,
    seed: int = 0,
    now: Callable[[], float] = time.monotonic,
) -> tuple[str, ...]:
    """Run the cells in order; the names of those that the budget left out.

    budget_s:  no cell begins that would probably end later, judging by the longest so far.
    Errors:    DeviceLostError.
    """
    start, longest = now(), 0.0
    for number, cell in enumerate(cells):
        began = now()
        if not fits(began - start, longest, budget_s):
            return tuple(c.name for c in cells[number:])
        for line in _run_any(cell, lanes, machine, plan, seed):
            results.write(line)
            print(_progress(line), flush=True)
        longest = max(longest, now() - began)
    return ()


def fits(elapsed_s: float, longest_s: float, budget_s: float | None) -> bool:
    """Whether another cell, as long as the longest so far, ends within the budget."""
    return budget_s is None or elapsed_s + longest_s <= budget_s


def choose_path(folder: Path, stem: str) -> Path:
    """`<stem>.jsonl`, or the next number behind it when that is taken."""
    path, number = folder / f"{stem}.jsonl", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.jsonl"
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 when attngen fails in a cell or the device was lost."""
    given = _parse(arguments)
    try:
        machine = open_machine(given.device)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    is_dry = machine.kind == "cpu"
    cells = select_cells(make_cells(given.suite, given.dtype), given.cells)
    if not cells:
        raise SystemExit(f"no cell is named {given.cells}; names are like {_EXAMPLE}")
    if is_dry:
        cells = tuple(shrink(cell) for cell in cells)
        print("Dry run on the CPU: tiny shapes, times without meaning, not for benchmarks/results")
    lanes, missing = make_lanes(given.peers, machine, given.schedule or [DEFAULT_SCHEDULE])
    for name, reason in missing.items():
        print(f"{name}: missing: {reason}")
    path = None
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = choose_path(given.out, environment.file_stem(machine.name))
    with nullcontext() if path is None else path.open("w", encoding="utf-8") as file:
        results = Results(file)
        plan = _DRY_PLAN if is_dry else Plan()
        results.write(describe_run(machine, missing, plan, given.seed))
        is_lost = _run_to_the_end(cells, lanes, machine, plan, given, results)
    report = render_report(results.records)
    if path is None:
        print(report)
    else:
        path.with_suffix(".md").write_text(report, encoding="utf-8")
        print(f"{path.name} and its table are written")
    return int(is_lost or any(_is_own_failure(record) for record in results.records))


def _run_to_the_end(
    cells: Sequence[Cell],
    lanes: Sequence[Lane],
    machine: Machine,
    plan: Plan,
    given: argparse.Namespace,
    results: Results,
) -> bool:
    """Run the cells, and write how it ended; whether the device was lost."""
    start = time.monotonic()
    left_out: tuple[str, ...] = ()
    lost: str | None = None
    try:
        left_out = run_cells(cells, lanes, machine, plan, given.budget, results, seed=given.seed)
    except DeviceLostError as error:
        lost = str(error)
        print(lost)
    results.write(
        {
            "suite": "end",
            "seconds": round(time.monotonic() - start, 1),
            "clocks": environment.read_clocks(),
            "left_out": left_out,
            "lost": lost,
        }
    )
    return lost is not None


def _run_any(
    cell: Cell, lanes: Sequence[Lane], machine: Machine, plan: Plan, seed: int
) -> list[dict[str, Any]]:
    if cell.suite != "cold":
        found = run_cell(cell, lanes, machine, plan, seed)
        clocks = environment.read_clocks() or {}
        warm: dict[str, Any] = {
            name: clocks[name] for name in ("sm_mhz", "temperature_c") if name in clocks
        }
        return [{**record, **warm} for record in found]
    return [
        {**measure_cold(cell, lane.peer.name, machine, lane.schedule), "lane": lane.name}
        for lane in lanes
    ]


def _is_own_failure(record: Mapping[str, Any]) -> bool:
    return record.get("peer") == "attngen" and record["ms"] is None


def _own_lane(text: str, machine: Machine, count: int) -> Lane:
    """attngen with a schedule, which its name says when there are several."""
    schedule = None if text == "auto" else text
    name = "attngen" if count == 1 else f"attngen: {text}"
    return Lane(name, make_peer("attngen", machine, schedule), schedule)


def describe_run(
    machine: Machine, missing: Mapping[str, str], plan: Plan, seed: int
) -> dict[str, Any]:
    """The first line of a results file: what a time depends on beside the code."""
    return {
        "suite": "environment",
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "gpu": machine.name,
        **environment.describe_machine(),
        "versions": {**environment.installed_versions(), "attngen": attngen.__version__},
        "commit": _commit(),
        "clocks": environment.read_clocks(),
        "missing": dict(missing),
        "plan": asdict(plan),
        "seed": seed,
    }


def _commit() -> str | None:
    """The commit of this checkout, with a mark when it was changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _progress(record: Mapping[str, Any]) -> str:
    begin = f"{record['cell']:32}{record['lane']:24}"
    if record["ms"] is None:
        return f"{begin}{record['reason']}"
    if "tflops" in record:
        return f"{begin}{record['ms']:10.4f} ms{record['tflops']:9.1f} TFLOP/s"
    return f"{begin}{record['ms']:10.0f} ms"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", type=_names_of(SUITES), default=SUITES)
    parser.add_argument("--peers", type=_names_of(PEERS), default=PEERS)
    parser.add_argument("--cells", metavar="PATTERNS", help="names, with * and ?, by commas")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--schedule", action="append", metavar="LINES")
    parser.add_argument("--budget", type=float, metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.out is None and given.device == "cuda":
        given.out = RESULTS
    if given.device == "cpu" and given.out is not None and _is_in_results(given.out):
        parser.error("a dry run does not write to benchmarks/results")
    return given


def _is_in_results(folder: Path) -> bool:
    return folder.resolve().is_relative_to(RESULTS)


def _names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    raise SystemExit(main())
