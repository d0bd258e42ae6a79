"""What a mask or a score costs: variants beside causal attention of the same kernel, in turns.

    python -m benchmarks.beside_causal [--variants alibi,relative,prefix_lm] [--rounds N]
        [--schedule "kernel forward_mma"]… [--out benchmarks/results/FILE.jsonl]
    python -m benchmarks.beside_causal --device cpu

Cells of `benchmarks.attention` run one behind the other, and the clock of a GPU at its power limit
moves by several per cent from one to the next.  Here each variant has causal attention beside it:
both calls are timed in turns in one process.  The whole is done `--rounds` times, in new arrays.

One JSON object a line, first the environment: `variant`, `schedule`, `B, S, Hq, D`, `ms`,
`causal_ms`, and `of_causal`, the ratio of TFLOP/s over visible pairs (1: the variant is free).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from attngen.bench.machines import Machine, open_machine
from attngen.bench.timing import Plan
from benchmarks.attention import describe_run
from benchmarks.cells import Cell, make_cells, shrink
from benchmarks.peers import make_peer
from benchmarks.run_cell import Lane, Ready, make_expected, make_inputs, make_ready, measure_ready
from benchmarks.run_cell import tflops as tflops_of
from benchmarks.variants import attended_pairs, make_variant

__all__ = ["main", "measure_beside"]

_VARIANTS: Final = ("alibi", "relative", "prefix_lm")
_SCHEDULES: Final = ("kernel forward_mma", "auto")
_DRY: Final = Plan(min_rounds=2, max_rounds=2, sample_ms=0.0)
_PLAN: Final = Plan(min_rounds=15, max_rounds=40, sample_ms=10.0)


def measure_beside(
    cell: Cell, lane: Lane, machine: Machine, plan: Plan, seed: int
) -> dict[str, Any]:
    """A variant's cell and its plain causal one, timed in turns.

    Errors:  RefusedError where a result is wrong; DeviceLostError.
    """
    cells = {"own": cell, "causal": replace(cell, variant="causal")}
    ready: dict[str, Ready] = {}
    for name, each in cells.items():
        variant = make_variant(each)
        inputs = make_inputs(each, variant, machine, seed)
        expected = make_expected(each, variant, inputs, machine, seed)
        ready[name] = make_ready(lane, each, variant, inputs, expected, machine)
    times = measure_ready(ready, plan)
    speed = {
        name: tflops_of(each, attended_pairs(each, make_variant(each)), times[name].ms)
        for name, each in cells.items()
    }
    return {
        "suite": "beside_causal",
        "variant": cell.variant,
        "schedule": lane.schedule or "auto",
        "kernel": ready["own"].prepared.kernel,
        **{key: getattr(cell, key) for key in ("dtype", "B", "S", "Hq", "Hkv", "D", "Dv")},
        "ms": round(times["own"].ms, 5),
        "causal_ms": round(times["causal"].ms, 5),
        "of_causal": round(speed["own"] / speed["causal"], 4),
        "samples": times["own"].samples,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside_causal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--variants", default=",".join(_VARIANTS))
    parser.add_argument("--schedule", action="append", metavar="LINES")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    machine = open_machine(given.device)
    wanted = given.variants.split(",")
    cells = {cell.variant: cell for cell in make_cells(("variants",))}
    if unknown := [name for name in wanted if name not in cells]:
        parser.error(f"no variant is named {unknown[0]}; there are {', '.join(cells)}")
    is_dry = machine.kind == "cpu"
    plan = _DRY if is_dry else _PLAN
    with nullcontext() if given.out is None else given.out.open("w", encoding="utf-8") as file:
        lines = [describe_run(machine, {}, plan, 0)]
        for text in given.schedule or _SCHEDULES:
            schedule = None if text == "auto" else text
            lane = Lane("attngen", make_peer("attngen", machine, schedule), schedule)
            for name in wanted:
                cell = shrink(cells[name]) if is_dry else cells[name]
                found = [
                    measure_beside(cell, lane, machine, plan, seed) for seed in range(given.rounds)
                ]
                lines += found
                ratio = median(each["of_causal"] for each in found)
                print(f"{name:12}{text:24}{ratio:6.3f} of causal", flush=True)
        for line in lines:
            print(json.dumps(line), file=file or sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
