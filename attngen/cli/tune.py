"""`attngen tune`: find the fastest schedules for some shapes, and keep what was measured."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, final

import click

from attngen.backend.launch import load_driver
from attngen.cli.console import note, say
from attngen.cli.errors import BadOption, CannotRead, CannotWrite, NoGpuToTune
from attngen.cli.files import require_file, require_writable, write_together
from attngen.cli.option_types import (
    SHAPE,
    ParamType,
    consts_option,
    dtype_option,
    head_dim_option,
    schedule_option,
    seed_option,
    set_option,
    spec_argument,
    unique,
)
from attngen.cli.tune_jobs import Job, Request
from attngen.cli.tune_output import Bar, say_findings, say_ranking, show_bars
from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.load import load_file
from attngen.frontend.schedule_text import override_schedule
from attngen.ir.digest import digest_operation
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.measurement import Record
from attngen.tuning.replay import Replay
from attngen.tuning.report import Section, render_page
from attngen.tuning.search import Plan, Progress, Search
from attngen.tuning.space import collect
from attngen.tuning.store import Store, parse_lines, user_store
from attngen.tuning.tune import Machine, contents_of, cuda_machine, host_machine, tune

__all__ = ["command"]

DEFAULT_DEVICE: Final = "h200"
"""Of a dry run on a machine without a GPU."""


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
@set_option
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
@seed_option
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
    request = Request(unit, unique("-D", consts), dtype, head_dim, unique("--set", values), seed)
    chosen = _part(shapes or ({},), shard)
    if dry_run or replay is not None:
        records = () if replay is None else _read_records(replay)
        known = _known_device(device, records)
        jobs = [request.job(shape, known) for shape in chosen]
        if dry_run:
            for job in jobs:
                say_ranking(job)
            return 0
        plan = Plan(most=most, budget_s=None)
        sections = [_replay(job, records, plan) for job in jobs]
        _write_report(report, spec, sections)
        return 0
    machines = _open_machines(device)
    store = _open_store(folder)
    for shape in chosen:
        request.job(shape, machines[0].device)  # what is wrong with one is said before any is tuned
    run = _Run(request, machines, store, budget, most)
    sections = run.all(chosen)
    _write_report(report, spec, sections)
    if run.is_interrupted:
        raise KeyboardInterrupt
    return 1 if run.has_failed else 0


# ---- what is asked for -----------------------------------------------------------------------


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
        self,
        request: Request,
        machines: Sequence[Machine],
        store: Store | None,
        budget_s: float,
        most: int,
    ) -> None:
        self.is_interrupted = self.has_failed = False
        self._request = request
        self._machines, self._store, self._most = machines, store, most
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def all(self, shapes: Sequence[Mapping[str, int]]) -> list[Section]:
        """What was found for each; what failed is said, and raised where everything did."""
        waiting: queue.SimpleQueue[tuple[int, Mapping[str, int]]] = queue.SimpleQueue()
        for numbered in enumerate(shapes):
            waiting.put(numbered)
        count = len(self._machines)
        each_s = self._budget_s * count / max(len(shapes), count)
        found: dict[int, Section] = {}
        errors: list[AttnError] = []
        context = click.get_current_context()

        def work(machine: Machine, bar: Bar) -> None:
            with context.scope(cleanup=False):  # notes ask it how to show themselves
                while not self._stop.is_set():
                    try:
                        number, shape = waiting.get_nowait()
                    except queue.Empty:
                        return
                    try:
                        job = self._request.job(shape, machine.device)
                        found[number] = self._one(job, machine, each_s, bar)
                    except AttnError as error:
                        errors.append(error)

        with show_bars(count) as bars, ThreadPoolExecutor(count) as pool:
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

    def _one(self, job: Job, machine: Machine, budget_s: float, bar: Bar) -> Section:
        def tell(doing: Progress) -> None:
            if self._stop.is_set():
                raise KeyboardInterrupt
            bar.update(job, doing)

        usual = Plan()
        beside = usual.beside * self._most // usual.most
        plan = Plan(most=self._most, beside=beside, budget_s=budget_s)
        findings = tune(job.subject, (job.call, job.ragged), machine, plan, tell)
        contents = contents_of(findings, job.subject, job.call, machine)
        section = Section(job.title, findings, job.model.roof())
        with self._lock:
            say_findings(job, findings, section.roof)
            if self._store is not None and contents.records:
                try:
                    self._store.add(contents)
                except OSError as error:
                    raise AttnError(
                        CannotWrite(None, str(self._store), error.strerror or str(error))
                    ) from None
                say(f"  kept      {len(contents.records)} records in {self._store}")
        return section


def _replay(job: Job, records: Sequence[Record], plan: Plan) -> Section:
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
    say_findings(job, findings, section.roof)
    return section


def _read_records(path: Path) -> tuple[Record, ...]:
    require_file(path)
    contents = parse_lines(path.read_bytes())
    for text in contents.notes:
        note(f"{path}: {text}")
    if not contents.records:
        raise AttnError(CannotRead(None, str(path), "it holds no tuning records"))
    return contents.records


def _write_report(path: Path | None, spec: Path, sections: Sequence[Section]) -> None:
    if path is None:
        return
    write_together({path: render_page(f"Tuning {spec.name}", sections).encode()})
    say(f"report    {path}")
