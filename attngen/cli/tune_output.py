"""What `attngen tune` says: what was found, what a dry run predicts, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from attngen.cli.console import is_fancy, note, rich_console, say, table
from attngen.cli.tune_jobs import Job
from attngen.tuning.cost_model import Roof
from attngen.tuning.search import Findings, Progress, Stage
from attngen.tuning.space import collect, describe

__all__ = ["Bar", "say_findings", "say_ranking", "show_bars"]

_SHOWN: Final = 24
"""Lines of a ranking."""


def say_findings(job: Job, found: Findings, roof: Roof) -> None:
    say((job.title, "bold"))
    best, default = found.best, found.default
    if best is None:
        say("  nothing was timed")
        return
    rows = [["  fastest", describe(best.schedule), *_times(best.times.ms, roof), ""]]
    if default is not None and default is not best:
        slower = f"{default.times.ms / best.times.ms - 1:.1%} longer"
        row = ["  default", describe(default.schedule), *_times(default.times.ms, roof), slower]
        rows.append(row)
    elif default is best:
        rows[0][-1] = "the default"
    for line in table(rows, indent=0):
        say(line)
    counts = [f"{len(found.measured)} timed"]
    for stage, words in (
        (Stage.COMPILER, "refused after compiling"),
        (Stage.EXAM, "wrong or harmful"),
        (Stage.RACE, "lost while timed"),
        (Stage.BUDGET, "left out"),
    ):
        number = sum(d.stage is stage for d in found.discarded)
        if number:
            counts.append(f"{number} {words}")
    say(f"  in {found.seconds:.0f} s  {', '.join(counts)}")
    for left in found.discarded:
        if left.stage in (Stage.EXAM, Stage.RACE):
            note(f"{describe(left.schedule)}: {left.reason}")
    if found.failure is not None:
        note(f"it ended early: {found.failure.diagnostics[0].message()}")


def _times(ms: float, roof: Roof) -> list[str]:
    return [f"{ms:.4g} ms", f"{roof.tflops(1e3 * ms):.3g} TFLOP/s"]


def say_ranking(job: Job) -> None:
    """The candidates of a dry run with what they are predicted to spend, then the rejections."""
    subject = job.subject
    # The model cannot tell orders apart: they would only repeat each line.
    space = collect(subject.attention, subject.schedule, subject.target, with_orders=False)
    model = job.model
    ranked = model.rank(space.candidates)
    say((job.title, "bold"), f"  on {job.device.name}")
    say("predicted, in microseconds; nothing was compiled or run")
    shown = ranked[:_SHOWN]
    terms = [name for name in ranked[0][1].terms if any(p.terms[name] >= 0.05 for _, p in shown)]
    rows = [["", "us", "schedule", *terms]]
    chosen = model.choose(space.default, space.candidates)
    for number, (schedule, found) in enumerate(shown):
        mark = ("default" if schedule == space.default else "") or str(number + 1)
        words = [mark, f"{found.us:.1f}", describe(schedule)]
        rows.append([*words, *(f"{found.terms[name]:.1f}" for name in terms)])
    for line in table(rows):
        say(line)
    if len(ranked) > _SHOWN:
        say(f"  and {len(ranked) - _SHOWN} more")
    say(f"chosen without a measurement: {describe(chosen)}")
    say()
    say(f"{len(space.rejected)} do not fit {job.device.arch}")
    for family, reason in space.refusals:
        say(f"  {family}: {reason}")
    for line in table([[describe(r.schedule), r.reason] for r in space.rejected]):
        say(line)


# ---- progress --------------------------------------------------------------------------------


class Bar:
    """Progress that nobody sees."""

    def update(self, job: Job, doing: Progress) -> None:
        """Say what is being done for a job."""


@final
class _RichBar(Bar):
    def __init__(self, shown: Any, number: int) -> None:
        self._shown = shown
        self._task = shown.add_task("making inputs", total=1.0, best="", name=f"GPU {number}")

    def update(self, job: Job, doing: Progress) -> None:
        best = ""
        if doing.best is not None:
            schedule, ms = doing.best
            best = f"{ms:.4g} ms  {describe(schedule)}"
        self._shown.update(
            self._task, description=doing.doing, completed=doing.spent or 0.0, best=best
        )


@contextmanager
def show_bars(count: int) -> Iterator[list[Bar]]:
    """A bar for each machine, where somebody sits at a terminal."""
    if not is_fancy(sys.stderr):
        yield [Bar() for _ in range(count)]
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.fields[name]}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[best]}", style="green"),
    )
    with RichProgress(*columns, console=rich_console(sys.stderr), transient=True) as shown:
        yield [_RichBar(shown, number) for number in range(count)]
