"""How good tuning is: its winner beside the best of all, the default, and the cost model's choice.

    python -m benchmarks.tuning [--suite forward,variants,lengths] [--cells 'forward-causal-*']
        [--budget SECONDS] [--within inf] [--ahead] [--part 1/2] [--out DIR] [--records DIR]
    python -m benchmarks.tuning --device cpu

In every cell a search runs as `attngen tune` does it, and then an exhaustive one: every schedule
that the families' resource formulas admit, each timed to the end.  `--within 1.5` leaves out those
that the model predicts to take more than 1.5 times the best, which saves most of the time; then
`exhaustive_s` is not that of a whole search, and the goal for times is not judged by it; `--orders`
says the same of those that differ from another in the order inside a step alone.  The
winners of both, the default and the model's choice are then timed anew, in turns, until their
ratios are known.  The suite `lengths` tunes one causal attention for six lengths and says how long
that takes.

The tuned schedule is the one that a lookup takes from the records of the search.

One JSON object a line: first the environment, then a record for each cell, at the end a summary:

| field | |
|---|---|
| `tuned`, `exhaustive`, `default`, `model` | schedule, and `ms` of the fresh timing |
| `tuned_over_best` | time of the tuned schedule over that of the fastest of the four; goal 1.03 |
| `model_over_best` | the same of the model's choice; goal 1.10 in 80 % of the cells |
| `tuned_s`, `exhaustive_s` | seconds that the searches took; goal a tenth |
| `timed`, `exhaustive_timed` | schedules with a time |
| `candidates`, `tried` | schedules that the formulas admit, and those of the exhaustive search |
| `best_rank` | the exhaustive winner's place in the model's order, from 1 |
| `best_predicted` | its predicted time over the shortest that is predicted |
| `drift` | the default's median in the last third of the fresh rounds over that in the first |
| `clocks` | clock, power and temperature after the cell |
| `lost` | schedules that were wrong or did harm, with the reason |

`--ahead` compiles what will be tried first, on all processors, so that compiling counts in neither
search (which favours the exhaustive one).  `--part 1/2` takes every second operation, for two GPUs
side by side.  `--records` keeps what the searches measured as tuning records.

`--device cpu` is a dry run with tiny shapes: its times mean nothing.  Compiled kernels come from
the disk cache where it has them; an empty folder as ATTNGEN_CACHE_DIR counts compiling, too.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import attngen
from attngen import targets
from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.check import check
from attngen.frontend.load import load_text
from attngen.ir.digest import digest_operation
from attngen.ir.schedule import Schedule
from attngen.ir.types import FLOATING
from attngen.record import record
from attngen.tuning.build import Builder
from attngen.tuning.call import Call, Subject
from attngen.tuning.cost_model import CostModel
from attngen.tuning.exam import make_exam
from attngen.tuning.lookup import Question
from attngen.tuning.model_choice import choose_by_model
from attngen.tuning.problem import Problem
from attngen.tuning.search import Findings, Plan, Search, Stage, shortlist
from attngen.tuning.space import Space, collect, describe
from attngen.tuning.store import Store
from attngen.tuning.timing import Race, RacePlan
from attngen.tuning.tune import Machine, contents_of, cuda_machine, host_machine, tune
from attngen.tuning.winner import find_winner
from attngen.tuning.worker import Worker
from benchmarks import environment
from benchmarks.attention import RESULTS, Results, choose_path, fits
from benchmarks.cells import Cell, make_cells, select_cells, shrink
from benchmarks.variants import make_variant

__all__ = [
    "LENGTHS", "Effort", "Job", "compile_ahead", "main", "make_job", "measure_cell", "select_part",
    "summary",
]  # fmt: skip

Record: TypeAlias = dict[str, Any]

SUITES: Final = ("forward", "variants", "lengths")
LENGTHS: Final = tuple(
    Cell("lengths", "causal", "bf16", 16384 // S, S, 16, 16, 128, 128)
    for S in (512, 1024, 2048, 4096, 8192, 16384)
)
_EXAMPLE: Final = "forward-causal-d128-s4096"
_RAGGED: Final = 389
_FRESH: Final = RacePlan(min_rounds=15, max_rounds=40, sample_ms=20.0, warm_ms=1000.0, drops=False)
_DRY: Final = RacePlan(min_rounds=2, max_rounds=2, sample_ms=0.0, warm_ms=0.0)
_PART: Final = re.compile(r"(\d{1,3})/(\d{1,3})")


@final
@record(eq=False)
class Job:
    """A cell as the tuner takes it."""

    subject: Subject
    call: Call
    ragged: Call
    space: Space
    model: CostModel


@final
@record(kw_only=True)
class Effort:
    """How much is tried.

    within:  schedules that are predicted to take at most so many times the best are all tried.
    orders:  the same for those that differ from another one in the order inside a step alone.
    most:    and at most so many.
    store:   where records are kept.
    """

    plan: Plan
    fresh: RacePlan
    within: float
    orders: float = math.inf
    most: int = 1 << 10
    store: Store | None = None


def make_job(cell: Cell, machine: Machine, ragged_tokens: int = _RAGGED) -> Job:
    """The cell's variant, and the same at a length that no tile divides."""
    small = replace(cell, B=1, S=ragged_tokens, Hq=cell.Hq // cell.Hkv, Hkv=1)
    target = targets.get(machine.device.arch)
    unit = load_text(make_variant(cell).text)
    checked = check(unit, dtype=cell.dtype)
    subject = Subject.of(unit, checked, FLOATING[cell.dtype], (cell.D, cell.Dv), target)
    # A variant's text may hold numbers that follow the length, so the ragged call has this text.
    call, ragged = _call(cell, subject), _call(small, subject)
    space = collect(subject.attention, subject.schedule, target)
    return Job(subject, call, ragged, space, CostModel(subject.attention, call, machine.device))


def _call(cell: Cell, subject: Subject) -> Call:
    variant = make_variant(cell)
    sizes = {
        "B": cell.B, "Hq": cell.Hq, "Hkv": cell.Hkv, "Sq": cell.S, "Skv": cell.S,
        "Dqk": cell.D, "Dv": cell.Dv,
    }  # fmt: skip
    for tensor in subject.attention.tensors:
        for dim, size in zip(tensor.dims, variant.tensors[tensor.name].shape, strict=True):
            sizes[str(dim.size)] = size
    return Call(sizes, {}, variant.tensors, layout="bshd")


def measure_cell(cell: Cell, machine: Machine, effort: Effort) -> Record:
    """Both searches of a cell, and a fresh timing of what they chose.

    Errors:  AttnError, those of `tune`.
    """
    job = make_job(cell, machine)
    tuned, tuned_s = _timed(lambda: tune(job.subject, (job.call, job.ragged), machine, effort.plan))
    everything, exhaustive_s = _timed(lambda: _try_all(job, machine, effort))
    fastest = everything.measured[0].schedule if everything.measured else job.space.default
    chosen = {
        "tuned": _keep(tuned, job, machine, effort),
        "exhaustive": fastest,
        "default": job.space.default,
        "model": _choose_unmeasured(job, machine),
    }
    _keep(everything, job, machine, effort)
    race, names = _time_anew(job, machine, set(chosen.values()), effort.fresh)
    times = {names[name]: race.times(name).ms for name in race.samples}
    best_ms = min(times.values(), default=None)
    ranked = job.model.rank(job.space.candidates)
    place = next(i for i, (schedule, _) in enumerate(ranked) if schedule == fastest)

    def over_best(name: str) -> float | None:
        ms = times.get(chosen[name])
        return None if ms is None or best_ms is None else round(ms / best_ms, 4)

    return {
        **asdict(cell),
        "cell": cell.name,
        **{name: {"schedule": describe(s), "ms": times.get(s)} for name, s in chosen.items()},
        "tuned_over_best": over_best("tuned"),
        "default_over_best": over_best("default"),
        "model_over_best": over_best("model"),
        "tuned_s": round(tuned_s, 2),
        "exhaustive_s": round(exhaustive_s, 2),
        "timed": len(tuned.measured),
        "exhaustive_timed": len(everything.measured),
        "candidates": len(job.space.candidates),
        "tried": len(everything.space.candidates),
        "best_rank": place + 1,
        "best_predicted": round(ranked[place][1].us / max(ranked[0][1].us, 1e-9), 3),
        "drift": _drift(race),
        "clocks": environment.read_clocks() if machine.driver is not None else None,
        "lost": _lost(tuned) | _lost(everything),
    }


def measure_length(cell: Cell, machine: Machine, effort: Effort) -> Record:
    """One search, without anything to compare it with."""
    job = make_job(cell, machine)
    found, seconds = _timed(lambda: tune(job.subject, (job.call, job.ragged), machine, effort.plan))
    _keep(found, job, machine, effort)
    best, default = found.best, found.default
    return {
        **asdict(cell),
        "cell": cell.name,
        "tuned": best and {"schedule": describe(best.schedule), "ms": best.times.ms},
        "default": default and {"ms": default.times.ms},
        "tuned_s": round(seconds, 2),
        "timed": len(found.measured),
        "lost": _lost(found),
    }


def summary(records: Sequence[Record]) -> Record:
    """The claims in numbers; None where no cell was measured."""
    cells = [r for r in records if r.get("tuned_over_best") is not None]
    lengths = [r for r in records if r.get("suite") == "lengths" and "tuned_s" in r]
    whole = [r["tuned_s"] / r["exhaustive_s"] for r in cells if r["tried"] == r["candidates"]]
    if not cells:
        within = model_within = worst = None
    else:
        worst = max(r["tuned_over_best"] for r in cells)
        within = sum(r["tuned_over_best"] <= 1.03 for r in cells) / len(cells)
        model_within = sum(r["model_over_best"] <= 1.10 for r in cells) / len(cells)
    return {
        "suite": "summary",
        "cells": len(cells),
        "tuned_worst": worst,
        "tuned_within_3_percent": within,
        "model_within_10_percent": model_within,
        "tuned_over_exhaustive_s": statistics.median(whole) if whole else None,
        "lengths": len(lengths),
        "lengths_s": round(sum(r["tuned_s"] for r in lengths), 1),
    }


def _choose_unmeasured(job: Job, machine: Machine) -> Schedule:
    """What a lookup without records answers."""
    attention, call = job.subject.attention, job.call
    assert attention.dtype is not None
    problem = Problem.of(attention.dtype.name, call.sizes, machine.device.sm_count)
    op = digest_operation(attention)
    question = Question(op, problem, machine.device, job.subject.schedule)
    return choose_by_model(attention, question) or job.space.default


def _near(job: Job, effort: Effort) -> tuple[Schedule, ...]:
    """The default, and what is predicted to be fast enough for the exhaustive search."""
    ranked = job.model.rank(job.space.candidates)
    least = ranked[0][1].us

    def is_far(schedule: Schedule, us: float) -> bool:
        orders = effort.orders if schedule.has_order else math.inf
        return us > min(effort.within, orders) * least

    far = {s for s, p in ranked if is_far(s, p.us)} - {job.space.default}
    return tuple(s for s in job.space.candidates if s not in far)[: effort.most]


def _try_all(job: Job, machine: Machine, effort: Effort) -> Findings:
    """A search that leaves out nothing but what is predicted to be too far behind."""
    space = replace(job.space, candidates=_near(job, effort))
    race = replace(effort.plan.race, drops=False)
    plan = replace(effort.plan, takes_all=True, beside=0, budget_s=None, race=race)
    stand, builder = _open_stand(job, machine), machine.make_builder(job.subject)
    return Search(job.subject.attention.name, space, job.model, builder, stand, plan).run()


def _time_anew(
    job: Job, machine: Machine, schedules: set[Schedule], plan: RacePlan
) -> tuple[Race, dict[str, Schedule]]:
    """A race in which nobody drops out, and who is who in it."""
    builder = machine.make_builder(job.subject)
    names = {describe(schedule): schedule for schedule in sorted(schedules, key=describe)}
    with _open_stand(job, machine) as stand:
        for name, schedule in names.items():
            stand.check(name, builder.build(schedule))
        race = Race(stand, tuple(names), plan, reference=describe(job.space.default))
        for _ in race.rounds():
            pass
    return race, names


def _drift(race: Race) -> float | None:
    """By how much the GPU became slower between the first and the last third of the rounds."""
    samples = race.samples.get(race.reference or "", [])
    third = len(samples) // 3
    if third == 0:
        return None
    return round(statistics.median(samples[-third:]) / statistics.median(samples[:third]), 4)


def _keep(found: Findings, job: Job, machine: Machine, effort: Effort) -> Schedule:
    """Keep what was measured; the schedule that a lookup would choose by it."""
    contents = contents_of(found, job.subject, job.call, machine)
    if effort.store is not None:
        effort.store.add(contents)
    winner = find_winner(contents.records)
    if winner is not None:
        return winner.schedule
    return job.space.default if found.best is None else found.best.schedule


def compile_ahead(cells: Sequence[Cell], machine: Machine, effort: Effort) -> int:
    """Fill the disk cache with what the cells will try, on all processors; how many it were."""
    wanted: dict[tuple[str, Schedule], Callable[[], object]] = {}
    for cell in cells:
        job = make_job(cell, machine)
        builder = machine.make_builder(job.subject)
        ranked = job.model.rank(job.space.candidates)
        tried = dict.fromkeys(shortlist(ranked, job.space.default, effort.plan.most))
        if cell.suite != "lengths":
            tried |= dict.fromkeys(_near(job, effort))
        op = digest_operation(job.subject.attention)
        for schedule in tried:
            wanted.setdefault((op, schedule), partial(_build, builder, schedule))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(build) for build in wanted.values()]:
            future.result()
    return len(wanted)


def _build(builder: Builder, schedule: Schedule) -> None:
    with suppress(AttnError):  # the search meets it again, and says it
        builder.build(schedule)


def _open_stand(job: Job, machine: Machine) -> Worker:
    calls = job.call, job.ragged
    return Worker(
        machine.make_bench, lambda: [make_exam(job.subject, c) for c in calls], machine.patience
    )


def _lost(found: Findings) -> dict[str, str]:
    stages = (Stage.EXAM, Stage.RACE)
    return {describe(d.schedule): d.reason for d in found.discarded if d.stage in stages}


def _timed(do: Callable[[], Findings]) -> tuple[Findings, float]:
    start = time.perf_counter()
    found = do()
    if found.is_interrupted:
        raise KeyboardInterrupt
    return found, time.perf_counter() - start


# ---- the command -----------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 when a cell failed."""
    start = time.monotonic()
    given = _parse(arguments)
    is_dry = given.device == "cpu"
    try:
        machine = host_machine() if is_dry else cuda_machine(0)
    except AttnError as error:
        raise SystemExit(error.diagnostics[0].message()) from None
    cells = select_part(select_cells(_cells(given.suite), given.cells), given.part)
    if not cells:
        raise SystemExit(
            f"no cell is named {given.cells}; names are like forward-causal-d128-s4096"
        )
    store = None if given.records is None else Store(given.records)
    plan = Plan(budget_s=given.each)
    effort = Effort(plan=plan, fresh=_FRESH, within=given.within, orders=given.orders, store=store)
    name = "cpu" if is_dry else _gpu_name()
    if is_dry:
        cells = tuple(shrink(cell) for cell in cells)
        plan = Plan(most=2, beside=1, budget_s=None, race=_DRY, final=None)
        effort = Effort(plan=plan, fresh=_DRY, within=given.within, most=3)
        print("Dry run on the CPU: tiny shapes, times without meaning, not for benchmarks/results")
    path = None
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = choose_path(given.out, f"{environment.file_stem(name)}-tuning")
    with nullcontext() if path is None else path.open("w", encoding="utf-8") as file:
        results = Results(file)
        results.write(_describe(name, machine, given))
        if given.ahead:
            count = compile_ahead(cells, machine, effort)
            print(f"compiled {count} kernels ahead in {time.monotonic() - start:.0f} s", flush=True)
        left_out = _run(cells, machine, effort, given.budget, start, results)
        results.write({**summary(results.records), "left_out": left_out})
    print("  ".join(f"{key} {value}" for key, value in results.records[-1].items()))
    return int(any("reason" in r for r in results.records))


def _run(
    cells: Sequence[Cell],
    machine: Machine,
    effort: Effort,
    budget_s: float | None,
    start: float,
    results: Results,
) -> tuple[str, ...]:
    """Measure the cells in order; the names of those that the budget left out.

    The budget began at `start`.
    """
    longest = 0.0
    for number, cell in enumerate(cells):
        began = time.monotonic()
        if not fits(began - start, longest, budget_s):
            return tuple(c.name for c in cells[number:])
        measure = measure_length if cell.suite == "lengths" else measure_cell
        try:
            found = measure(cell, machine, effort)
        except AttnError as error:
            found = {"suite": cell.suite, "cell": cell.name, "reason": str(error).splitlines()[0]}
        results.write(found)
        print(_progress(found), flush=True)
        longest = max(longest, time.monotonic() - began)
    return ()


def _cells(suites: Sequence[str]) -> tuple[Cell, ...]:
    made: tuple[Cell, ...] = ()
    for suite in suites:
        made += LENGTHS if suite == "lengths" else make_cells((suite,))
    return made


def select_part(cells: Sequence[Cell], part: tuple[int, int]) -> tuple[Cell, ...]:
    """Every n-th operation, with all its lengths, so that no kernel is compiled in two parts."""
    operations = dict.fromkeys((cell.variant, cell.D) for cell in cells)
    number, count = part
    mine = set(list(operations)[number - 1 :: count])
    return tuple(cell for cell in cells if (cell.variant, cell.D) in mine)


def _progress(found: Mapping[str, Any]) -> str:
    begin = f"{found['cell']:32}"
    if "reason" in found:
        return f"{begin}{found['reason']}"
    schedule = (found["tuned"] or {}).get("schedule", "nothing was timed")
    ratio = found.get("tuned_over_best")
    over = "" if ratio is None else f"{ratio:8.3f} of the best"
    return f"{begin}{found['tuned_s']:7.1f} s  {schedule}{over}"


def _describe(name: str, machine: Machine, given: argparse.Namespace) -> Record:
    return {
        "suite": "environment",
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "gpu": name,
        "device": machine.device.name,
        **environment.describe_machine(),
        "versions": {**environment.installed_versions(), "attngen": attngen.__version__},
        "clocks": environment.read_clocks(),
        "within": given.within if math.isfinite(given.within) else None,
        "orders": given.orders if math.isfinite(given.orders) else None,
        "ahead": given.ahead,
        "part": "{}/{}".format(*given.part),
        "each": given.each,
    }


def _gpu_name() -> str:
    from attngen.backend.launch import load_driver

    return load_driver().traits(0).name


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", type=_names, default=SUITES, metavar=",".join(SUITES))
    parser.add_argument("--cells", metavar="PATTERNS", help="names, with * and ?, by commas")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for everything")
    parser.add_argument("--each", type=float, default=20.0, metavar="SECONDS", help="for a search")
    parser.add_argument("--within", type=float, default=math.inf)
    parser.add_argument("--orders", type=float, default=math.inf, help="--within for `overlap`")
    parser.add_argument("--ahead", action="store_true", help="compile before anything is timed")
    parser.add_argument("--part", type=_fraction, default=(1, 1), metavar="I/N")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--records", type=Path, metavar="DIR", help="where records are kept")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    if given.out is None and given.device == "cuda":
        given.out = RESULTS
    is_dry = given.device == "cpu" and given.out is not None
    if is_dry and given.out.resolve().is_relative_to(RESULTS):
        parser.error("a dry run does not write to benchmarks/results")
    return given


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in SUITES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SUITES)}")
    return names


def _fraction(text: str) -> tuple[int, int]:
    found = _PART.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1/2")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    raise SystemExit(main())
