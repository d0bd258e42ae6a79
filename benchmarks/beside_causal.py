"""What a mask or a score costs: variants beside causal attention of the same kernel, in turns.

    python -m benchmarks.beside_causal [--variants alibi,relative,prefix_lm] [--rounds N]
        [--schedule "kernel forward_mma"]… [--out DIR]
    python -m benchmarks.beside_causal --device cpu

Cells of `benchmarks.attention` run one behind the other, and the clock of a GPU at its power limit
moves by several per cent from one to the next.  Here each variant has causal attention beside it:
both calls are timed in turns in one process.  The whole is done `--rounds` times, in new arrays.

Writes `<date>-<gpu>-beside-causal.jsonl`, one JSON object a line as it is measured, first the
environment: `variant`, `schedule`, `B, S, Hq, D`, `ms`, `causal_ms`, and `of_causal`, the ratio of
TFLOP/s over visible pairs (1: the variant is free).  Where a result is wrong, `ms` is null and
`reason` says how wrong.  `--device cpu` is a dry run with tiny shapes: its times mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from attngen.bench.machines import Machine, open_machine
from attngen.bench.timing import Plan
from benchmarks import environment
from benchmarks.attention import RESULTS, Results, choose_path, describe_run
from benchmarks.cells import Cell, make_cells, shrink
from benchmarks.peers import RefusedError, make_peer
from benchmarks.run_cell import (
    Lane,
    make_expected,
    make_inputs,
    make_ready,
    measure_ready,
    tflops,
)
from benchmarks.variants import attended_pairs, make_variant

__all__ = ["main", "measure_beside", "of_causal"]

_VARIANTS: Final = "alibi,relative,prefix_lm"
_SCHEDULES: Final = ("kernel forward_mma", "auto")
_DRY_PLAN: Final = Plan(min_rounds=2, max_rounds=2, sample_ms=0.0)
_PLAN: Final = Plan(min_rounds=15, max_rounds=40, sample_ms=10.0)


def of_causal(cell: Cell, ms: float, causal_ms: float) -> float:
    """TFLOP/s of a variant's cell over those of its causal one, over the pairs that each sees."""

    def speed(cell: Cell, ms: float) -> float:
        return tflops(cell, attended_pairs(cell, make_variant(cell)), ms)

    return speed(cell, ms) / speed(replace(cell, variant="causal"), causal_ms)


def measure_beside(
    cell: Cell, lane: Lane, machine: Machine, plan: Plan, seed: int
) -> dict[str, Any]:
    """A variant's cell and its causal one, timed in turns.

    Errors:  DeviceLostError.
    """
    about = {**asdict(cell), "suite": "beside_causal", "schedule": lane.schedule or "auto"}
    ready = {}
    for each in (cell, replace(cell, variant="causal")):
        variant = make_variant(each)
        inputs = make_inputs(each, variant, machine, seed)
        expected = make_expected(each, variant, inputs, machine, seed)
        try:
            ready[each.variant] = make_ready(lane, each, variant, inputs, expected, machine)
        except RefusedError as refusal:
            return {**about, "ms": None, "reason": f"{each.variant}: {refusal}"}
    times = measure_ready(ready, plan)
    own, causal = times[cell.variant], times["causal"]
    return {
        **about,
        "kernel": ready[cell.variant].prepared.kernel,
        "ms": round(own.ms, 5),
        "causal_ms": round(causal.ms, 5),
        "of_causal": round(of_causal(cell, own.ms, causal.ms), 4),
        "samples": own.samples,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 when a result was wrong."""
    given = _parse(arguments)
    try:
        machine = open_machine(given.device)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    is_dry = machine.kind == "cpu"
    plan = _DRY_PLAN if is_dry else _PLAN
    path = None
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = choose_path(given.out, f"{environment.file_stem(machine.name)}-beside-causal")
    with nullcontext() if path is None else path.open("w", encoding="utf-8") as file:
        results = Results(file)
        results.write(describe_run(machine, {}, plan, 0))
        for text in given.schedule or _SCHEDULES:
            schedule = None if text == "auto" else text
            lane = Lane("attngen", make_peer("attngen", machine, schedule), schedule)
            for wanted in given.variants:
                cell, found = shrink(wanted) if is_dry else wanted, []
                for seed in range(given.rounds):
                    found.append(measure_beside(cell, lane, machine, plan, seed))
                    results.write(found[-1])
                print(f"{cell.variant:12}{text:24}{_summary(found)}", flush=True)
    return int(any("reason" in line for line in results.records))


def _summary(found: Sequence[Mapping[str, Any]]) -> str:
    reasons = [line["reason"] for line in found if "reason" in line]
    if reasons:
        return str(reasons[0])
    return f"{median(line['of_causal'] for line in found):6.3f} of causal"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside_causal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--variants", type=_cells, default=_VARIANTS)
    parser.add_argument("--schedule", action="append", metavar="LINES")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error("there is at least one round")
    if given.out is None and given.device == "cuda":
        given.out = RESULTS
    is_dry = given.device == "cpu"
    if is_dry and given.out is not None and given.out.resolve().is_relative_to(RESULTS):
        parser.error("a dry run does not write to benchmarks/results")
    return given


def _cells(text: str) -> tuple[Cell, ...]:
    known = {cell.variant: cell for cell in make_cells(("variants",)) if cell.variant != "causal"}
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return tuple(known[name] for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
