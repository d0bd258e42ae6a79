"""How good tuning is: its winner beside the best of all, the default, and the cost model's choice.

    python -m benchmarks.tuning [--suite forward,variants,lengths,examples]
        [--cells 'forward-causal-*'] [--budget SECONDS] [--ahead] [--whole] [--out DIR]
        [--records DIR]
    python -m benchmarks.tuning --device cpu

In every cell a search runs as `attngen tune` does it, and then an exhaustive one
(`tuning_sweep.py`): every schedule that the resource formulas admit is timed, the slow ones not
for long; what is left out is said there.  The winner of the first, the three fastest of the second,
the default and the model's choice are then timed anew, in turns, until their ratios are known.
The suite `lengths` tunes one causal attention for six lengths and says how long that takes;
`examples` tunes the files of `examples/` for their records.

The tuned schedule is the one that a lookup takes from the records of the search.

One JSON object a line, as soon as it is known: first the environment, then a record for each cell,
at the end a summary:

| field | |
|---|---|
| `tuned`, `exhaustive`, `default`, `model` | schedule, and `ms` of the fresh timing |
| `best` | the fastest of all in the fresh timing |
| `tuned_over_best` | time of the tuned schedule over that of `best`; goal 1.03 |
| `model_over_best` | the same of the model's choice; goal 1.10 in 80 % of the cells |
| `tuned_s` | seconds of the search, with the start of its process, exams and compiling |
| `exhaustive_s` | of a search that times every candidate to the end; goal ten times as long |
| `computed` | whether `exhaustive_s` is computed (`to_the_end_s`) or measured (`--whole`) |
| `swept_s` | seconds of the sweep |
| `timed`, `swept` | schedules with a time, of the search and of the sweep |
| `compiled` | schedules that the search compiled |
| `candidates` | schedules that the formulas admit |
| `best_rank` | the exhaustive winner's place in the model's order, from 1 |
| `best_predicted` | its predicted time over the shortest that is predicted |
| `drift` | the default's median in the last third of the fresh rounds over that in the first |
| `clocks` | clock, power and temperature after the cell |
| `lost` | schedules that were wrong or did harm, with the reason |

`--ahead` compiles on all processors but two while other cells are timed.  What compiling takes is
counted all the same: for each search, as many kernels as it wanted, side by side on all processors,
each as long as the mean of all.  `--records` keeps what the fresh timing found as tuning records;
for `lengths` and `examples`, what the search found.  `--whole` times every candidate to the end.

`--summary FILE…` says the claims of several files together.

`--device cpu` is a dry run with tiny shapes: its times mean nothing.  Compiled kernels come from
the disk cache where it has them; an empty folder as ATTNGEN_CACHE_DIR counts compiling in
`lengths`, too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import attngen
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.schedule import Schedule
from attngen.record import record
from attngen.tuning.lookup import Question
from attngen.tuning.model_choice import choose_by_model
from attngen.tuning.problem import Problem
from attngen.tuning.search import Findings, Measured, Plan, Search, Stage, name_of, shortlist
from attngen.tuning.space import describe
from attngen.tuning.store import Store
from attngen.tuning.timing import LostError, Race, RacePlan
from attngen.tuning.tune import Machine, contents_of, cuda_machine, host_machine
from attngen.tuning.winner import find_winner
from attngen.tuning.worker import Worker
from benchmarks import environment
from benchmarks.attention import RESULTS, Results, choose_path, fits
from benchmarks.cells import Cell, shrink
from benchmarks.tuning_ahead import Ahead, Now, Ready, Supply, processors, waves_s
from benchmarks.tuning_jobs import SUITES, Example, Job, Task, make_tasks, unlike
from benchmarks.tuning_sweep import (
    Admitted,
    Seat,
    Thresholds,
    describe_lost,
    is_plain,
    race_all,
    sweep,
    to_the_end_s,
)

__all__ = ["Effort", "Laboratory", "main", "summary", "wanted_ahead"]

Record: TypeAlias = dict[str, Any]

_EXAMPLE: Final = "forward-causal-d128-s4096"
_FRESH: Final = RacePlan(min_rounds=12, max_rounds=24, sample_ms=15.0, warm_ms=300.0, drops=False)
_TO_THE_END: Final = RacePlan(drops=False)
_DRY: Final = RacePlan(min_rounds=2, max_rounds=2, sample_ms=0.0, warm_ms=0.0)
_BRIEF: Final = RacePlan(min_rounds=8, max_rounds=16)
_ORDERS_AHEAD: Final = 1.25
"""Orders of tiles that are predicted to be so near to the best are compiled ahead."""


@final
@record(kw_only=True)
class Effort:
    """How much is tried.

    brief:       the plan for examples.
    is_whole:    every candidate is timed to the end.
    processors:  that compiling is counted for.
    store:       where records are kept.
    """

    plan: Plan
    brief: Plan
    fresh: RacePlan
    thresholds: Thresholds
    is_whole: bool = False
    processors: int = 1
    store: Store | None = None


def wanted_ahead(job: Job, task: Task, effort: Effort) -> list[Schedule]:
    """What is compiled ahead: what the search begins with, and what the sweep will time."""
    ranked = job.model.rank(job.space.candidates)
    plan = effort.brief if isinstance(task, Example) else effort.plan
    wanted = dict.fromkeys(shortlist(ranked, job.space.default, plan.most - plan.beside))
    if isinstance(task, Cell) and task.suite != "lengths":
        least = ranked[0][1].us
        for schedule, prediction in ranked:
            near = effort.thresholds.within if is_plain(schedule) else _ORDERS_AHEAD
            if effort.is_whole or prediction.us <= near * least:
                wanted[schedule] = None
    return list(wanted)[: effort.thresholds.most]


@final
class Laboratory:
    """One process that times, and what is measured in it, cell by cell."""

    def __init__(self, machine: Machine, effort: Effort, supply: Supply) -> None:
        self._machine, self._effort, self._supply = machine, effort, supply
        self._worker: Worker | None = None
        self._wake_s = 0.0
        self._slow: dict[str, Mapping[Schedule, float]] = {}

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def measure_cell(self, cell: Cell) -> Record:
        """Both searches of a cell, and a fresh timing of what they chose.

        Errors:  AttnError, those of `tune`.
        """
        ready = self._supply.ready(cell)
        job, effort = ready.job, self._effort
        seat, open_s = self._open(ready)
        builder = self._machine.make_builder(job.subject)
        tuned, search_s = self._search(job, seat, effort.plan)
        if effort.is_whole:
            swept = race_all(job, seat, builder, _TO_THE_END)
        else:
            swept = sweep(job, seat, builder, effort.thresholds, self._slow.get(job.op))
            self._slow[job.op] = {**self._slow.get(job.op, {}), **swept.ratios}
        chosen = {
            "tuned": self._looked_up(tuned, job),
            "exhaustive": swept.fastest[0] if swept.fastest else job.space.default,
            "default": job.space.default,
            "model": self._choose_unmeasured(job),
        }
        race, admitted = self._time_anew(job, seat, (*chosen.values(), *swept.fastest))
        self._keep(race, admitted, job, swept.seconds)
        times = {s: race.times(name_of(s)).ms for s in admitted if name_of(s) in race.samples}
        best = min(times, key=lambda s: times[s], default=None)

        def over_best(schedule: Schedule) -> float | None:
            ms = times.get(schedule)
            return None if ms is None or best is None else round(ms / times[best], 4)

        exam_s, candidates = seat.exam_s / max(1, seat.exams), len(job.space.candidates)
        ranked = job.model.rank(job.space.candidates)
        first = len(shortlist(ranked, job.space.default, effort.plan.most - effort.plan.beside))
        compiled = len(tuned.measured) + len(_refused(tuned))
        tuned_by = (first, max(0, compiled - first))
        whole_s = swept.seconds
        if not effort.is_whole:
            whole_s = to_the_end_s(job, swept, _TO_THE_END, exam_s)
        place = next(i for i, (s, _) in enumerate(ranked) if s == chosen["exhaustive"])
        return {
            **asdict(cell),
            "cell": cell.name,
            **{name: {"schedule": describe(s), "ms": times.get(s)} for name, s in chosen.items()},
            "best": best and {"schedule": describe(best), "ms": times[best]},
            **{f"{name}_over_best": over_best(s) for name, s in chosen.items()},
            "tuned_s": round(self._with_start(ready, open_s, tuned_by) + search_s, 2),
            "exhaustive_s": round(self._with_start(ready, open_s, (candidates,)) + whole_s, 1),
            "computed": not effort.is_whole,
            "search_s": round(search_s, 2),
            "swept_s": round(swept.seconds, 2),
            "open_s": round(open_s, 2),
            "exams_made_s": round(ready.seconds, 2),
            "exam_s": round(exam_s, 4),
            "compile_s": self._supply.compile_s and round(self._supply.compile_s, 3),
            "wake_s": round(self._wake_s, 2),
            "timed": len(tuned.measured),
            "compiled": compiled,
            "swept": len(swept.ms),
            "spilled": swept.spilled,
            "candidates": candidates,
            "best_rank": place + 1,
            "best_predicted": round(ranked[place][1].us / max(ranked[0][1].us, 1e-9), 3),
            "drift": _drift(race),
            "clocks": self._clocks(),
            "lost": _lost(tuned) | describe_lost(swept),
            "ratios": {describe(s): round(r, 4) for s, r in _first(swept.ratios, 40)},
        }

    def measure_alone(self, task: Task) -> Record:
        """One search, without anything to compare it with."""
        start = time.perf_counter()
        ready = self._supply.ready(task)
        job, effort = ready.job, self._effort
        seat, _ = self._open(ready)
        opened_s = time.perf_counter() - start
        is_example = isinstance(task, Example)
        found, search_s = self._search(job, seat, effort.brief if is_example else effort.plan)
        if effort.store is not None:
            effort.store.add(contents_of(found, job.subject, job.call, self._machine))
        best, default = found.best, found.default
        return {
            **asdict(task),
            "cell": task.name,
            "tuned": best and {"schedule": describe(best.schedule), "ms": best.times.ms},
            "default": default and {"ms": default.times.ms},
            "tuned_s": round(opened_s + search_s, 2),
            "timed": len(found.measured),
            "clocks": self._clocks(),
            "lost": _lost(found),
        }

    def _open(self, ready: Ready) -> tuple[Seat, float]:
        """A seat with the calls of a job on the device, and how long their arrays took."""
        if self._worker is None:
            start = time.perf_counter()
            make, patience = self._machine.make_bench, self._machine.patience
            self._worker = Worker(make, tuple, patience)  # without exams, to time its start
            self._worker.prepare()
            self._wake_s = time.perf_counter() - start
        start = time.perf_counter()
        self._worker.reopen(lambda: ready.exams)
        return Seat(self._worker, f"{ready.job.op[:16]} "), time.perf_counter() - start

    def _with_start(self, ready: Ready, open_s: float, kernels: Sequence[int]) -> float:
        """Seconds until candidates can be examined: while the first are compiled, exams are made,
        the process starts beside, and their arrays come to the GPU; the others are compiled behind
        the first race."""
        compile_s, count = self._supply.compile_s, self._effort.processors
        first, *others = (waves_s(number, compile_s, count) for number in kernels)
        return max(first, max(self._wake_s, ready.seconds) + open_s) + sum(others)

    def _search(self, job: Job, seat: Seat, plan: Plan) -> tuple[Findings, float]:
        start = time.perf_counter()
        builder = self._machine.make_builder(job.subject)
        name = job.subject.attention.name
        found = Search(name, job.space, job.model, builder, seat, plan).run()
        if found.is_interrupted:
            raise KeyboardInterrupt
        return found, time.perf_counter() - start

    def _looked_up(self, found: Findings, job: Job) -> Schedule:
        """What a lookup takes from the records of a search."""
        winner = find_winner(contents_of(found, job.subject, job.call, self._machine).records)
        if winner is not None:
            return winner.schedule
        return job.space.default if found.best is None else found.best.schedule

    def _choose_unmeasured(self, job: Job) -> Schedule:
        """What a lookup without records answers."""
        attention, call = job.subject.attention, job.call
        assert attention.dtype is not None
        problem = Problem.of(attention.dtype.name, call.sizes, self._machine.device.sm_count)
        question = Question(job.op, problem, self._machine.device, job.subject.schedule)
        return choose_by_model(attention, question) or job.space.default

    def _time_anew(
        self, job: Job, seat: Seat, schedules: Sequence[Schedule]
    ) -> tuple[Race, dict[Schedule, Admitted]]:
        """A race in which nobody drops out, of schedules that are right in all exams."""
        builder = self._machine.make_builder(job.subject)
        admitted: dict[Schedule, Admitted] = {}
        for schedule in dict.fromkeys(schedules):
            build = builder.build(schedule)
            with suppress(LostError):
                admitted[schedule] = Admitted(build, seat.check(name_of(schedule), build))
        names = tuple(name_of(schedule) for schedule in admitted)
        race = Race(seat, names, self._effort.fresh, reference=name_of(job.space.default))
        for _ in race.rounds():
            pass
        return race, admitted

    def _keep(
        self, race: Race, admitted: Mapping[Schedule, Admitted], job: Job, seconds: float
    ) -> None:
        """What the fresh timing found, as records."""
        if self._effort.store is None or self._worker is None:
            return
        measured = tuple(
            Measured(a.build, a.verdict, race.times(name), race.ratio(name), None)
            for s, a in admitted.items()
            if (name := name_of(s)) in race.samples
        )
        found = Findings(
            space=job.space,
            predictions={m.schedule: job.model.predict(m.schedule) for m in measured},
            measured=measured,
            discarded=(),
            mode=self._worker.mode,
            seconds=seconds,
        )
        self._effort.store.add(contents_of(found, job.subject, job.call, self._machine))

    def _clocks(self) -> object:
        return environment.read_clocks() if self._machine.driver is not None else None


def summary(records: Sequence[Record]) -> Record:
    """The claims in numbers; None where no cell was measured."""
    cells = [r for r in records if r.get("tuned_over_best") is not None]
    lengths = [r for r in records if r.get("suite") == "lengths" and "tuned_s" in r]
    shares = [r["tuned_s"] / r["exhaustive_s"] for r in cells]
    measured = [s for s, r in zip(shares, cells, strict=True) if not r["computed"]]
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
        "tuned_over_exhaustive_s": _rounded(shares, statistics.median),
        "tuned_over_exhaustive_s_worst": _rounded(shares, max),
        "tuned_over_exhaustive_s_measured": [round(s, 4) for s in measured],
        "lengths": len(lengths),
        "lengths_s": round(sum(r["tuned_s"] for r in lengths), 1),
    }


def _rounded(values: Sequence[float], by: Callable[[Sequence[float]], float]) -> float | None:
    return round(by(values), 4) if values else None


def _drift(race: Race) -> float | None:
    """By how much the GPU became slower between the first and the last third of the rounds."""
    samples = race.samples.get(race.reference or "", [])
    third = len(samples) // 3
    if third == 0:
        return None
    return round(statistics.median(samples[-third:]) / statistics.median(samples[:third]), 4)


def _refused(found: Findings) -> list[object]:
    """What was compiled and has no time."""
    stages = (Stage.COMPILER, Stage.EXAM, Stage.RACE)
    return [d for d in found.discarded if d.stage in stages]


def _first(ratios: Mapping[Schedule, float], most: int) -> list[tuple[Schedule, float]]:
    return sorted(ratios.items(), key=lambda one: one[1])[:most]


def _lost(found: Findings) -> dict[str, str]:
    stages = (Stage.EXAM, Stage.RACE)
    return {describe(d.schedule): d.reason for d in found.discarded if d.stage in stages}


# ---- the command -----------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 when a cell failed."""
    start = time.monotonic()
    given = _parse(arguments)
    if given.summary:
        lines = (line for path in given.summary for line in path.read_text("utf-8").splitlines())
        found = summary([json.loads(line) for line in lines])
        print("\n".join(f"{key:34}{value}" for key, value in found.items()))
        return 0
    is_dry = given.device == "cpu"
    try:
        machine = host_machine() if is_dry else cuda_machine(0)
    except AttnError as error:
        raise SystemExit(error.diagnostics[0].message()) from None
    tasks = _chosen(unlike(make_tasks(given.suite)), given.cells)
    if not tasks:
        raise SystemExit(f"no cell is named {given.cells}; names are like {_EXAMPLE}")
    name = "cpu" if is_dry else _gpu_name()
    effort = _dry_effort() if is_dry else _effort(given)
    if is_dry:
        tasks = tuple(shrink(t) if isinstance(t, Cell) else t for t in tasks)
        print("Dry run on the CPU: tiny shapes, times without meaning, not for benchmarks/results")
    path = None
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = choose_path(given.out, f"{environment.file_stem(name)}-tuning")
    supply: Supply = Now(machine.device)
    if given.ahead:
        make = machine.make_builder
        count = max(1, given.processors - 2)
        wanted = partial(wanted_ahead, effort=effort)
        supply = Ahead(tasks, machine.device, make, wanted, count)
    try:
        with nullcontext() if path is None else path.open("w", encoding="utf-8") as file:
            results = Results(file)
            results.write(_describe(name, machine, given))
            with Laboratory(machine, effort, supply) as laboratory:
                left_out = _run(tasks, laboratory, given.budget, start, results)
            results.write({**summary(results.records), "left_out": left_out})
    finally:
        supply.close()
    print("  ".join(f"{key} {value}" for key, value in results.records[-1].items()))
    return int(any("reason" in r for r in results.records))


def _effort(given: argparse.Namespace) -> Effort:
    return Effort(
        plan=Plan(budget_s=given.each),
        brief=Plan(most=22, beside=8, budget_s=given.each, race=_BRIEF, final=None),
        fresh=_FRESH,
        thresholds=Thresholds(within=given.within, carry=given.carry, orders=given.orders),
        is_whole=given.whole,
        processors=given.processors,
        store=None if given.records is None else Store(given.records),
    )


def _dry_effort() -> Effort:
    plan = Plan(most=2, beside=1, budget_s=None, race=_DRY, final=None)
    return Effort(plan=plan, brief=plan, fresh=_DRY, thresholds=Thresholds(most=3))


def _run(
    tasks: Sequence[Task],
    laboratory: Laboratory,
    budget_s: float | None,
    start: float,
    results: Results,
) -> tuple[str, ...]:
    """Measure the tasks in order; the names of those that the budget left out.

    The budget began at `start`.
    """
    longest = 0.0
    for number, task in enumerate(tasks):
        began = time.monotonic()
        if not fits(began - start, longest, budget_s):
            return tuple(t.name for t in tasks[number:])
        try:
            if isinstance(task, Example) or task.suite == "lengths":
                found = laboratory.measure_alone(task)
            else:
                found = laboratory.measure_cell(task)
        except AttnError as error:
            found = {"suite": task.suite, "cell": task.name, "reason": str(error).splitlines()[0]}
        took = time.monotonic() - began
        results.write({**found, "took_s": round(took, 1)})
        print(_progress(found), flush=True)
        longest = max(longest, took) if number else 0.0  # the first one waits for its kernels
    return ()


def _chosen(tasks: Sequence[Task], patterns: str | None) -> tuple[Task, ...]:
    """The tasks whose name matches one of the comma-separated shell patterns; None: all."""
    each = ("*",) if patterns is None else patterns.split(",")
    return tuple(t for t in tasks if any(fnmatchcase(t.name, pattern) for pattern in each))


def _progress(found: Mapping[str, Any]) -> str:
    begin = f"{found['cell']:32}"
    if "reason" in found:
        return f"{begin}{found['reason']}"
    schedule = (found["tuned"] or {}).get("schedule", "nothing was timed")
    ratio = found.get("tuned_over_best")
    over = "" if ratio is None else f"{ratio:8.3f} of the best"
    model = "" if ratio is None else f", the model {found['model_over_best']:.3f}"
    return f"{begin}{found['tuned_s']:7.1f} s  {schedule}{over}{model}"


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
        "carry": given.carry,
        "orders": given.orders,
        "whole": given.whole,
        "ahead": given.ahead,
        "used_processors": given.processors,
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
    thresholds = Thresholds()
    parser.add_argument("--within", type=float, default=thresholds.within)
    parser.add_argument("--carry", type=float, default=thresholds.carry)
    parser.add_argument("--orders", type=float, default=thresholds.orders)
    parser.add_argument("--whole", action="store_true", help="time all candidates to the end")
    parser.add_argument("--ahead", action="store_true", help="compile while others are timed")
    parser.add_argument("--processors", type=int, default=processors(), metavar="N")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--records", type=Path, metavar="DIR", help="where records are kept")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE", help="only of these")
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


if __name__ == "__main__":
    raise SystemExit(main())
