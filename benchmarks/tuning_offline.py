"""The tuner's search against recorded sweeps, without a GPU: what it would compile, take and find.

    python -m benchmarks.tuning_offline benchmarks/results/2026-11-30-h200-tuning-2.jsonl

For each cell that `benchmarks.tuning` has measured, searches run as they are in the package, each
with noise of its own.  A schedule takes what the sweep recorded as its ratio; a record lists the 40
fastest, and what is not among them takes at least as long as the last of these, or what is
predicted.  So a search can find nothing that the sweep has not found.

Each sample strays by 0.8 % and, on top, falls into one of two states of the clock that are 7 %
apart and last for ten samples on average: intervals of that width are in the records.

| column | |
|---|---|
| `compiled` | the most schedules of a search, of those that the formulas admit |
| `behind` | recorded time of the winner over the best recorded: the median and the worst search |
| `old` | time of the search over that of an exhaustive one, as recorded |
| `share` | the same, computed here: the median and the worst search |
| `seconds` | of the search, the median |

What is computed:

- compiling goes in waves on all processors, each kernel as long as the recorded mean;
- beside the first wave the process wakes, exams are made, and arrays come to the GPU (`_START_S`);
- exams of candidates take as long as recorded, and samples as long as they say;
- the exhaustive search is the recorded one, with exams made as fast as here.  The records counted
  minutes for these: all threads of the linear algebra, which waited for each other in 14 processes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, cast, final

from attngen.ir.schedule import Schedule
from attngen.record import record
from attngen.tuning.build import Build
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.exam import Verdict
from attngen.tuning.measurement import Resources
from attngen.tuning.search import Findings, Plan, Search
from attngen.tuning.space import describe
from benchmarks.tuning_ahead import waves_s
from benchmarks.tuning_jobs import Job, make_job, make_tasks

__all__ = ["Recorded", "Stand", "main", "replay"]

Record: TypeAlias = Mapping[str, Any]

_WAKE_S, _EXAMS_S, _OPEN_S = 1.4, 1.7, 0.4
"""Until the process has its GPU; made exams, on one processor; arrays onto the GPU."""
_START_S: Final = max(_WAKE_S, _EXAMS_S) + _OPEN_S
"""Until the first candidate can be checked; exams are made while the process wakes."""
_STARTED_S: Final = 1.74
"""What the records added for the start of the process."""
_STRAY: Final = 0.008
_STATES: Final = 1.0, 1.07
_STAY: Final = 0.9
"""How likely the clock is to stay as it is until the next sample."""
_ASKED_MS: Final = 0.2
"""To ask another process for a sample."""
_NOTHING: Final = Resources(registers=0, spill_bytes=0, shared_bytes=0)


@final
class Recorded:
    """A cell's record, and the time of each of its schedules."""

    def __init__(self, cell: Record, job: Job) -> None:
        self.cell, self.job = cell, job
        ratios: Mapping[str, float] = cell["ratios"]
        listed = {describe(s): s for s in job.space.candidates}
        self._ratios = {listed[name]: r for name, r in ratios.items() if name in listed}
        self._last = max(self._ratios.values())
        fastest = min(self._ratios, key=lambda s: self._ratios[s])
        self._model_us = job.model.predict(fastest).us
        default = job.space.default
        self._scale = cell["default"]["ms"] / self.behind(default)

    def behind(self, schedule: Schedule) -> float:
        """Its time over the fastest."""
        known = self._ratios.get(schedule)
        if known is not None:
            return known
        return max(self._last, self.job.model.predict(schedule).us / self._model_us)

    def ms(self, schedule: Schedule) -> float:
        return float(self._scale * self.behind(schedule))

    def exhaustive_s(self, processors: int) -> float:
        """With exams that take as long as here."""
        cell = self.cell
        compiling_s = waves_s(cell["candidates"], cell["compile_s"], processors)
        started_s = _STARTED_S + cell["exams_made_s"]
        whole_s = cell["exhaustive_s"] - max(compiling_s, started_s)
        return float(max(compiling_s, _START_S) + whole_s)


@final
class Stand:
    """Builder, stand and clock of a search."""

    mode = "graph"

    def __init__(self, recorded: Recorded, processors: int, seed: int) -> None:
        self.waves: list[int] = []
        self.busy_s = 0.0
        self._recorded, self._processors = recorded, processors
        self._random = random.Random(seed)
        self._state = 0
        self._names: dict[str, Schedule] = {}

    @property
    def seconds(self) -> float:
        cell = self._recorded.cell
        first, *others = (waves_s(n, cell["compile_s"], self._processors) for n in self.waves)
        return float(max(first, _START_S) + sum(others) + self.busy_s)

    def prepare(self) -> None:
        """Each step that compiles begins like this."""
        self.waves.append(0)

    def build(self, schedule: Schedule) -> Build:
        return Build(schedule, cast(Any, None), b"", "", _NOTHING, "")

    def check(self, name: str, build: Build) -> Verdict:
        self.waves[-1] += 1
        self.busy_s += self._recorded.cell["exam_s"]
        self._names[name] = build.schedule
        return Verdict(0.0, 0.0)

    def sample(self, name: str, repeats: int) -> float:
        if self._random.random() > _STAY:
            self._state = 1 - self._state
        stray = self._random.gauss(1.0, _STRAY)
        ms = self._recorded.ms(self._names[name]) * _STATES[self._state] * stray
        self.busy_s += 1e-3 * (ms * (repeats + 1) + _ASKED_MS)
        return ms

    def close(self) -> None:
        """There is nothing to end."""


@final
@record(eq=False)
class Replayed:
    """A search, what it compiled, and the seconds that it would have taken."""

    found: Findings
    compiled: int
    seconds: float


def replay(recorded: Recorded, plan: Plan, processors: int, seed: int) -> Replayed:
    job = recorded.job
    stand = Stand(recorded, processors, seed)
    name = job.subject.attention.name
    found = Search(name, job.space, job.model, stand, stand, plan).run()
    return Replayed(found, sum(stand.waves), stand.seconds)


def read(paths: Iterable[Path]) -> list[Recorded]:
    """The cells of these files that list ratios, each as its task makes it now."""
    cells = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if one.get("ratios"):
                cells[one["cell"]] = one
    device = DeviceClass.named("h200")
    tasks = [t for t in make_tasks(("forward", "variants")) if t.name in cells]
    return [Recorded(cells[t.name], make_job(t, device)) for t in tasks]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning_offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="searches of each cell")
    parser.add_argument("--processors", type=int, default=16, metavar="N")
    parser.add_argument("--most", type=int, default=Plan().most)
    parser.add_argument("--beside", type=int, default=Plan().beside)
    given = parser.parse_args(arguments)
    plan = replace(Plan(budget_s=None, compilers=1), most=given.most, beside=given.beside)
    print(f"{'cell':32}{'compiled':>12}{'behind':>16}{'old':>8}{'share':>16}{'seconds':>9}")
    for recorded in read(given.files):
        cell = recorded.cell
        runs = [replay(recorded, plan, given.processors, seed) for seed in range(given.seeds)]
        whole_s = recorded.exhaustive_s(given.processors)
        behind = [recorded.behind(r.found.best.schedule) for r in runs if r.found.best]
        shares = [r.seconds / whole_s for r in runs]
        compiled = f"{max(r.compiled for r in runs)} of {cell['candidates']}"
        print(
            f"{cell['cell']:32}{compiled:>12}"
            f"{statistics.median(behind):8.3f}{max(behind):8.3f}"
            f"{cell['tuned_s'] / cell['exhaustive_s']:8.2f}"
            f"{statistics.median(shares):8.3f}{max(shares):8.3f}"
            f"{statistics.median(r.seconds for r in runs):9.1f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
