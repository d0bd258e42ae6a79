"""`attngen tune`: find the fastest schedules for some shapes, and keep what was measured."""

from __future__ import annotations

import queue
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import click

from attngen import targets
from attngen.backend.launch import load_driver
from attngen.cli.console import is_fancy, note, rich_console, say, table
from attngen.cli.errors import BadOption, CannotRead, CannotWrite, NoGpuToTune
from attngen.cli.files import require_file, require_writable, write_together
from attngen.cli.option_types import (
    LIST_ASSIGNMENT,
    SHAPE,
    ParamType,
    consts_option,
    dtype_option,
    head_dim_option,
    schedule_option,
    spec_argument,
    unique,
)
from attngen.cli.problem import Problem as CheckedProblem
from attngen.cli.problem import make_problem
from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.check import check
from attngen.frontend.load import Unit, load_file
from attngen.frontend.schedule_text import override_schedule
from attngen.ir.attention import SIZES, Attention
from attngen.ir.digest import digest_operation
from attngen.record import record
from attngen.tuning.call import Call, Subject
from attngen.tuning.cost_model import CostModel, Roof
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.exam import ragged_lengths
from attngen.tuning.measurement import Record
from attngen.tuning.problem import Problem
from attngen.tuning.replay import Replay
from attngen.tuning.report import Section, render_page
from attngen.tuning.search import Findings, Plan, Progress, Search, Stage
from attngen.tuning.space import collect, describe
from attngen.tuning.store import Store, parse_lines, user_store
from attngen.tuning.tune import Machine, contents_of, cuda_machine, host_machine, tune

__all__ = ["command"]

DEFAULT_SIZES: Final[Mapping[str, int]] = {"B": 1, "Hq": 16, "Sq": 4096}
DEFAULT_DEVICE: Final = "h200"
"""Of a dry run on a machine without a GPU."""
_SHOWN: Final = 24


@final
class _Duration(ParamType):
    """`60s`, `2m`, or seconds alone."""

    name = "SECONDS"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*([sm]?)\s*", value)
        if match is None or not float(match[1]):
            self.fail(f"{value!r} is no duration, as in 60s or 2m", param, ctx)
        return float(match[1]) * (60 if match[2] == "m" else 1)


@final
class _Shard(ParamType):
    """`2/4`: the second of four parts."""

    name = "I/N"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"{value!r} is no part, as in 1/4", param, ctx)
        return int(match[1]), int(match[2])


@click.command(
    "tune",
    epilog="Example:  attngen tune causal.attn --shapes B=1,Hq=16,Sq=4096 --shapes"
    " B=1,Hq=16,Sq=16384 --dtype bf16 --head-dim 128 --budget 60s",
)
@spec_argument
@click.option(
    "--shapes", type=SHAPE, multiple=True,
    help="Sizes of a call to tune for: B, Hq, Hkv, Sq, Skv.  May be repeated.",
)  # fmt: skip
@dtype_option
@head_dim_option
@consts_option
@click.option(
    "--set", "values", type=LIST_ASSIGNMENT, multiple=True,
    help="A value for a param, or one for a whole tensor.  May be repeated.",
)  # fmt: skip
@schedule_option
@click.option(
    "--device", metavar="NAME", default="auto", show_default=True,
    help="auto: every GPU that can be seen; cuda:1: one of them; cpu: a rehearsal, whose times"
    " mean nothing; h200: for --dry-run.",
)  # fmt: skip
@click.option(
    "--budget", type=_Duration(), default="60s", show_default=True,
    help="Time for all shapes together.",
)  # fmt: skip
@click.option(
    "--most", type=click.IntRange(1), default=Plan().most, show_default=True,
    help="Schedules that are compiled for a shape.",
)  # fmt: skip
@click.option("--shard", type=_Shard(), help="Tune only one part of the shapes, for job arrays.")
@click.option("--dry-run", is_flag=True, help="Rank by the cost model; nothing is compiled or run.")
@click.option(
    "--replay", type=click.Path(path_type=Path), metavar="FILE.jsonl",
    help="Search with recorded times in place of a GPU.",
)  # fmt: skip
@click.option(
    "--report", type=click.Path(path_type=Path), metavar="FILE.html",
    help="Write what was found as a page with pictures.",
)  # fmt: skip
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path), metavar="DIR",
    help="Where records are kept.  Default: your cache directory.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, help="For inputs that are made up.")
def command(
    spec: Path,
    shapes: tuple[Mapping[str, int], ...],
    dtype: str | None,
    head_dim: tuple[int, int] | None,
    consts: tuple[tuple[str, Any], ...],
    values: tuple[tuple[str, Any], ...],
    schedule: str | None,
    device: str,
    budget: float,
    most: int,
    shard: tuple[int, int] | None,
    dry_run: bool,
    replay: Path | None,
    report: Path | None,
    folder: Path | None,
    seed: int,
) -> int:
    """Find the fastest schedule for each of some shapes, and keep what was measured.

    Candidates are ranked by a cost model, compiled, compared with the float64 oracle, and timed in
    turns in a process of their own, on every GPU that can be seen.  Ctrl-C ends the search; what
    was measured by then is kept.
    """
    require_file(spec)
    if report is not None:
        require_writable(report)
    unit = load_file(spec)
    if schedule is not None:
        unit = override_schedule(unit, schedule)
    request = _Request(unit, unique("-D", consts), dtype, head_dim, unique("--set", values), seed)
    chosen = _part(shapes or ({},), shard)
    if dry_run or replay is not None:
        records = () if replay is None else _read_records(replay)
        known = _known_device(device, records)
        jobs = [request.job(shape, known) for shape in chosen]
        if dry_run:
            for job in jobs:
                _say_ranking(job)
            return 0
        plan = Plan(most=most, budget_s=None)
        sections = [_replay(job, records, plan) for job in jobs]
        _write_report(report, spec, sections)
        return 0
    machines = _open_machines(device)
    store = _open_store(folder)
    jobs = [request.job(shape, machines[0].device) for shape in chosen]
    run = _Run(machines, store, budget, most)
    sections = run.all(jobs)
    _write_report(report, spec, sections)
    if run.is_interrupted:
        raise KeyboardInterrupt
    return 1 if run.has_failed else 0


# ---- what is asked for -----------------------------------------------------------------------


@final
@record(eq=False)
class _Job:
    """One shape: the call to time, and a ragged one that has to be right as well."""

    subject: Subject
    call: Call
    ragged: Call
    device: DeviceClass

    @property
    def model(self) -> CostModel:
        return CostModel(self.subject.attention, self.call, self.device)

    @property
    def problem(self) -> Problem:
        dtype = self.subject.attention.dtype
        assert dtype is not None
        return Problem.of(dtype.name, self.call.sizes, self.device.sm_count)

    @property
    def title(self) -> str:
        dims = self.call.sizes["Dqk"], self.call.sizes["Dv"]
        head_dim = str(dims[0]) if dims[0] == dims[1] else f"{dims[0]}, {dims[1]}"
        dtype = self.subject.attention.dtype
        assert dtype is not None
        return f"{self.subject.attention.name}  {dtype.name}, head dim {head_dim}, {self.call.name}"


@final
@record(eq=False)
class _Request:
    """The command line, without its shapes."""

    unit: Unit
    consts: Mapping[str, Any]
    dtype: str | None
    head_dim: tuple[int, int] | None
    values: Mapping[str, Any]
    seed: int

    def job(self, shape: Mapping[str, int], device: DeviceClass) -> _Job:
        """Errors:  those of `make_problem`, and whatever is wrong with the text."""
        checked = check(self.unit, consts=self.consts, dtype=self.dtype, head_dim=self.head_dim)

        problem = self._problem(checked.attention, shape)
        ragged = ragged_lengths(problem.sizes)
        small = self._problem(checked.attention, _open_sizes(ragged, checked.attention))
        dims = problem.sizes["Dqk"], problem.sizes["Dv"]
        target = targets.get(device.arch)
        subject = Subject.of(self.unit, checked, problem.dtype, dims, target, self.consts)
        return _Job(subject, self._call(problem), self._call(small), device)

    def _problem(self, attention: Attention, sizes: Mapping[str, int]) -> CheckedProblem:
        return make_problem(
            attention, shape=sizes, values=self.values, inputs={}, defaults=DEFAULT_SIZES,
            seed=self.seed,
        )  # fmt: skip

    def _call(self, problem: CheckedProblem) -> Call:
        tensors = {name: given.array for name, given in problem.tensors.items()}
        return Call(problem.sizes, problem.params, tensors, seed=self.seed)


def _open_sizes(sizes: Mapping[str, int], attention: Attention) -> dict[str, int]:
    """The sizes of a call; what is declared stays as it is."""
    declared = {"Hq": attention.heads_q, "Hkv": attention.heads_kv}
    fixed = {name: value for name, value in declared.items() if value is not None}
    return {**{name: sizes[name] for name in SIZES}, **fixed}


def _part(
    shapes: Sequence[Mapping[str, int]], shard: tuple[int, int] | None
) -> list[Mapping[str, int]]:
    """Every n-th shape, beginning with the i-th."""
    i, n = shard or (1, 1)
    return list(shapes[i - 1 :: n])


def _known_device(name: str, records: Sequence[Record]) -> DeviceClass:
    """The class that a dry run or a replay is for: as asked, of the records, of this machine."""
    if name not in ("auto", "cpu"):
        return DeviceClass.named(name)
    if records:
        return records[0].device
    try:
        return cuda_machine(0).device
    except AttnError:
        return DeviceClass.named(DEFAULT_DEVICE)


def _open_machines(name: str) -> list[Machine]:
    """Where to time.  Errors:  A721 there is no GPU, and what can be done without."""
    if name == "cpu":
        note("on the CPU this is a rehearsal: times mean nothing, and no record is kept")
        return [host_machine()]
    try:
        count = load_driver().count_devices()
    except AttnError as error:
        raise AttnError(NoGpuToTune(None, error.diagnostics[0].message())) from None
    found = re.fullmatch(r"cuda:(\d{1,3})", name)
    if found is not None and int(found[1]) < count:
        return [cuda_machine(int(found[1]))]
    if name not in ("auto", "cuda"):
        problem = f"this machine has {count} GPUs, and none of this name"
        advice = "auto, cuda:0 or cpu; a name such as h200 is for --dry-run and --replay"
        raise AttnError(BadOption(None, "--device", name, problem, advice))
    if count == 0:
        raise AttnError(NoGpuToTune(None, "there is no CUDA device"))
    return [cuda_machine(index) for index in range(count)]


def _open_store(folder: Path | None) -> Store | None:
    if folder is not None:
        return Store(folder)
    own = user_store()
    if own is None:
        note("the cache is turned off by ATTNGEN_CACHE: records are shown, and not kept")
    return own


# ---- searching -------------------------------------------------------------------------------


@final
class _Run:
    """All shapes, shared out among the GPUs; the time is shared out among the shapes."""

    def __init__(
        self, machines: Sequence[Machine], store: Store | None, budget_s: float, most: int
    ) -> None:
        self.is_interrupted = self.has_failed = False
        self._machines, self._store, self._most = machines, store, most
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def all(self, jobs: Sequence[_Job]) -> list[Section]:
        """What was found for each; what failed is said, and the first failure raised at the end."""
        waiting: queue.SimpleQueue[tuple[int, _Job]] = queue.SimpleQueue()
        for numbered in enumerate(jobs):
            waiting.put(numbered)
        each_s = self._budget_s * len(self._machines) / max(len(jobs), len(self._machines))
        found: dict[int, Section] = {}
        errors: list[AttnError] = []

        def work(machine: Machine, bar: _Bar) -> None:
            while not self._stop.is_set():
                try:
                    number, job = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    found[number] = self._one(job, machine, each_s, bar)
                except AttnError as error:
                    errors.append(error)

        with _bars(len(self._machines)) as bars, ThreadPoolExecutor(len(self._machines)) as pool:
            pairs = zip(self._machines, bars, strict=True)
            futures = [pool.submit(work, machine, bar) for machine, bar in pairs]
            try:
                for future in futures:
                    future.result()
            except KeyboardInterrupt:
                self.is_interrupted = True
                self._stop.set()
        if errors and not found:
            raise errors[0]
        self.has_failed = bool(errors)
        for error in errors:
            note(error.diagnostics[0].message())
        return [found[number] for number in sorted(found)]

    def _one(self, job: _Job, machine: Machine, budget_s: float, bar: _Bar) -> Section:
        def tell(doing: Progress) -> None:
            if self._stop.is_set():
                raise KeyboardInterrupt
            bar.update(job, doing)

        plan = Plan(most=self._most, beside=min(Plan().beside, self._most // 4), budget_s=budget_s)
        findings = tune(job.subject, (job.call, job.ragged), machine, plan, tell)
        contents = contents_of(findings, job.subject, job.call, machine)
        section = Section(job.title, findings, job.model.roof())
        with self._lock:
            _say_findings(job, findings, section.roof)
            if self._store is not None and contents.records:
                try:
                    self._store.add(contents)
                except OSError as error:
                    raise AttnError(
                        CannotWrite(None, str(self._store), error.strerror or str(error))
                    ) from None
                say(f"  kept      {len(contents.records)} records in {self._store}")
        return section


def _replay(job: _Job, records: Sequence[Record], plan: Plan) -> Section:
    """A search with recorded times.  Errors:  A712 there are none of this problem."""
    op, problem = digest_operation(job.subject.attention), job.problem
    mine = [r for r in records if r.op == op and r.problem == problem and r.device == job.device]
    if not mine:
        others = sorted({str(r.problem) for r in records if r.op == op})
        reason = f"it has no record of {problem} on {job.device.name} for this attention"
        advice = f"it has some of {'; '.join(others)}" if others else None
        raise AttnError(CannotRead(None, "--replay", reason, advice))
    space = collect(job.subject.attention, job.subject.schedule, job.subject.target)
    stand = Replay(job.subject, mine)
    name = job.subject.attention.name
    findings = Search(name, space, job.model, stand, stand, plan).run()
    section = Section(job.title, findings, job.model.roof())
    _say_findings(job, findings, section.roof)
    return section


def _read_records(path: Path) -> tuple[Record, ...]:
    require_file(path)
    contents = parse_lines(path.read_bytes())
    for text in contents.notes:
        note(f"{path}: {text}")
    if not contents.records:
        raise AttnError(CannotRead(None, str(path), "it holds no tuning records"))
    return contents.records


# ---- what is said ----------------------------------------------------------------------------


def _say_findings(job: _Job, found: Findings, roof: Roof) -> None:
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
        (Stage.BUDGET, "left out by the budget"),
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
    return [f"{ms:.4g} ms", f"{roof.tflops(1e3 * ms):.0f} TFLOP/s"]


def _say_ranking(job: _Job) -> None:
    """The candidates of a dry run with what they are predicted to spend, then the rejections."""
    space = collect(job.subject.attention, job.subject.schedule, job.subject.target)
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


def _write_report(path: Path | None, spec: Path, sections: Sequence[Section]) -> None:
    if path is None:
        return
    write_together({path: render_page(f"Tuning {spec.name}", sections).encode()})
    say(f"report    {path}")


# ---- progress --------------------------------------------------------------------------------


class _Bar:
    """Progress that nobody sees."""

    def update(self, job: _Job, doing: Progress) -> None:
        """Say what is being done for a job."""


@final
class _RichBar(_Bar):
    def __init__(self, shown: Any, number: int) -> None:
        self._shown = shown
        self._task = shown.add_task("making inputs", total=1.0, best="", name=f"GPU {number}")

    def update(self, job: _Job, doing: Progress) -> None:
        best = ""
        if doing.best is not None:
            schedule, ms = doing.best
            best = f"{ms:.4g} ms  {describe(schedule)}"
        self._shown.update(
            self._task, description=doing.doing, completed=doing.spent or 0.0, best=best
        )


@contextmanager
def _bars(count: int) -> Iterator[list[_Bar]]:
    """A bar for each machine, where somebody sits at a terminal."""
    if not is_fancy(sys.stderr):
        yield [_Bar() for _ in range(count)]
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
