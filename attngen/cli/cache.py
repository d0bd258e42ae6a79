"""`attngen cache`: tuning records, listed, merged, checked again and pruned.

A source is a folder of records, as `tuned/` of the repository, or a file of them.  Whatever comes
from elsewhere is data: lines that are no records are counted and left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from attngen.cli.console import note, progress, say, say_json, table
from attngen.cli.errors import BadOption, CannotRead, CannotWrite
from attngen.cli.files import write_together
from attngen.diagnostics.diagnostic import AttnError
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.measurement import Definition, Record
from attngen.tuning.problem import Problem
from attngen.tuning.store import (
    MAX_FILE_BYTES,
    Contents,
    Store,
    merge,
    open_stores,
    parse_lines,
    repository_store,
    user_store,
)
from attngen.tuning.winner import find_tied, find_winner

__all__ = ["command"]

F = TypeVar("F", bound=Callable[..., Any])

SHOWN_DIGITS: Final = 12
_LEAST_DIGITS: Final = 4
_NAME: Final = re.compile(r"^attention (\w{1,40})\b", re.MULTILINE)


@click.group("cache", invoke_without_command=True, epilog="Example:  attngen cache verify tuned")
@click.pass_context
def command(context: click.Context) -> None:
    """Tuning records: list them, share them, and check them without a GPU.

    Records decide what a schedule leaves open.  Some come with attngen, others are in the
    user's cache directory.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def sources_argument(function: F) -> F:
    return click.argument(
        "sources", nargs=-1, type=click.Path(path_type=Path), metavar="[SOURCE]..."
    )(function)


def device_option(function: F) -> F:
    return click.option(
        "--device", metavar="NAME", help="Only records of this class of GPU, as h200."
    )(function)


def into_option(function: F) -> F:
    return click.option(
        "--into", type=click.Path(path_type=Path), metavar="FOLDER",
        help="Where to put them.  Default: the user's cache directory.",
    )(function)  # fmt: skip


# ---- what there is -----------------------------------------------------------------------


@command.command("path")
def show_path() -> int:
    """Say where records are looked for, and what this machine's GPU is called."""
    lines = [("attngen's own", str(repository_store()))]
    own = user_store()
    lines.append(("yours", "turned off by ATTNGEN_CACHE" if own is None else str(own)))
    lines += [(f"GPU {i}", _name(device)) for i, device in enumerate(_gpus())]
    for line in table(lines, indent=0):
        say(line)
    return 0


@command.command("list", epilog="Example:  attngen cache list tuned --device h200")
@sources_argument
@device_option
@click.option("--json", "as_json", is_flag=True, help="Write the same for tools.")
def show_list(sources: tuple[Path, ...], device: str | None, as_json: bool) -> int:
    """List the operations that records are known of, by class of GPU."""
    found = _read(sources, device)
    if as_json:
        say_json({"format": "attngen-cache-list/1", "operations": [*map(_summary, _groups(found))]})
        return 0
    rows = [("device", "operation", "", "problems", "records")]
    for summary in map(_summary, _groups(found)):
        device_name = ", ".join(summary["aliases"]) or summary["device"]
        counts = str(summary["problems"]), str(summary["records"])
        rows.append((device_name, summary["name"], summary["op"][:SHOWN_DIGITS], *counts))
    _say_table(rows)
    return 0


@command.command("show", epilog="Example:  attngen cache show causal --device h200")
@click.argument("what")
@sources_argument
@device_option
def show_records(what: str, sources: tuple[Path, ...], device: str | None) -> int:
    """Show the records of an operation, fastest first.

    WHAT is the name of an operation, or the beginning of its digest or of a record's id.  In
    front of a record, * marks the winner of its problem and = what is tied with it.
    """
    found = _read(sources, device)
    chosen = [group for group in _groups(found) if _is_meant(what, group)]
    if not chosen:
        raise AttnError(
            BadOption(None, "WHAT", what, "there is no such record", "see `attngen cache list`")
        )
    for group in chosen:
        first = group.records[0]
        say(f"{_name_of(group)} {first.op[:SHOWN_DIGITS]} on {_name(first.device)}")
        for problem, records in _problems(group.records):
            say(f"  {problem}")
            for line in table([_HEAD, *_rows(records)], indent=4):
                say(line)
    return 0


_HEAD: Final = (
    "", "us", "interval", "count", "schedule", "registers", "spills", "shared", "NVRTC", "id",
)  # fmt: skip


def _rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """The records of one problem, fastest first."""
    won, tied = find_winner(records), {record.id for record in find_tied(records)}
    for each in sorted(records, key=lambda record: (record.times.median_us, record.id)):
        times, used = each.times, each.resources
        mark = "*" if each == won else "=" if each.id in tied else ""
        yield (
            mark,
            f"{times.median_us:.1f}",
            f"{times.low_us:.1f} to {times.high_us:.1f}",
            f"{times.count} {times.mode.value}, {times.l2.value}",
            _describe(each),
            str(used.registers),
            str(used.spill_bytes),
            f"{used.shared_bytes / 1024:.1f} KiB",
            each.environment.nvrtc,
            each.id,
        )


def _describe(found: Record) -> str:
    """`forward_mma 64x32, stages 2, warps 4`."""
    schedule = found.schedule
    words = [f"{schedule.kernel} {schedule.tile_q}x{schedule.tile_kv}"]
    words += [
        f"{name} {value}"
        for name, value in (("stages", schedule.stages), ("warps", schedule.warps))
        if value is not None
    ]
    if schedule.has_order:
        keys = "late" if schedule.late_keys else "early"
        words.append(f"overlap {schedule.late_values}/{schedule.early_weights}/{keys}")
    return ", ".join(words)


# ---- moving records ----------------------------------------------------------------------


@command.command("merge", epilog="Example:  attngen cache merge ours theirs --into tuned")
@sources_argument
@click.option(
    "--into", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Where to put them.  Default: the one source itself, in its canonical form.",
)  # fmt: skip
def merge_sources(sources: tuple[Path, ...], into: Path | None) -> int:
    """Merge records: a union, in which more samples of the same thing win.

    The order of the sources does not matter.  With one folder and nothing else it brings that
    folder into its canonical form, as after a merge by git.
    """
    if not sources:
        raise click.UsageError("name the sources to merge")
    if into is None:
        if len(sources) > 1 or not sources[0].is_dir():
            raise click.UsageError("name the folder to put them with --into")
        into = sources[0]
        _rewrite(Store(into), lambda found: merge(found), _read(sources, None))
    else:
        _add(into, _read(sources, None))
    return 0


@command.command("import", epilog="Example:  attngen cache import tuned.jsonl")
@sources_argument
@into_option
def import_sources(sources: tuple[Path, ...], into: Path | None) -> int:
    """Take records from elsewhere into the user's cache directory.

    Nothing in them is run.  What is no record is counted and left out.
    """
    if not sources:
        raise click.UsageError("name what to import: folders, or files of records")
    _add(into or _own_folder(), _read(sources, None))
    return 0


@command.command("export", epilog="Example:  attngen cache export --device h200 -o h200.jsonl")
@sources_argument
@device_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Default: stdout."
)
def export_records(sources: tuple[Path, ...], device: str | None, output: Path | None) -> int:
    """Write records and their definitions as one text, a line each, sorted."""
    text = _read(sources, device).text()
    if output is None:
        click.echo(text, nl=False)
    else:
        write_together({output: text})
        say(f"{output}  {text.count(b'schema')} lines")
    return 0


@command.command("prune", epilog="Example:  attngen cache prune --keep 4")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option(
    "--keep", type=click.IntRange(1), default=8, show_default=True,
    help="So many of the fastest records of each problem.",
)  # fmt: skip
@click.option("--stale", is_flag=True, help="Also leave out what `verify` calls stale.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune_folder(folder: Path | None, keep: int, stale: bool, dry_run: bool) -> int:
    """Remove records that decide nothing; the winner of each problem stays, and what is tied.

    Default: those in the user's cache directory.
    """
    store = Store(folder or _own_folder())
    found = merge(*(part for _, _, part in store.files()))
    gone: set[str] = set()
    if stale:  # first: one that is fast and stale takes no place from another
        gone = {record.id for record, verdict in _verify(found, found.records) if verdict.is_stale}
    left = tuple(record for record in found.records if record.id not in gone)
    gone |= {record.id for record in _to_prune(left, keep)}
    if dry_run:
        say(f"{_count(len(gone), 'record')} would go")
    else:
        _rewrite(store, partial(_without, ids=gone), found)
    return 0


def _to_prune(records: Sequence[Record], keep: int) -> Iterator[Record]:
    for _, alike in _by_place(records):
        tied = {record.id for record in find_tied(alike)}
        rest = sorted(
            (record for record in alike if record.id not in tied),
            key=lambda record: (record.times.median_us, record.id),
        )
        yield from rest[max(0, keep - len(tied)) :]


def _without(found: Contents, ids: set[str]) -> Contents:
    """The contents without some records; a definition goes with the last of its records."""
    records = tuple(record for record in found.records if record.id not in ids)
    return Contents(records, found.definitions if records else (), found.foreign)


# ---- checking without a GPU --------------------------------------------------------------


@command.command("verify", epilog="Example:  attngen cache verify tuned")
@sources_argument
@device_option
@click.option("--all", "every", is_flag=True, help="Check the records that lose, too.")
def verify_sources(sources: tuple[Path, ...], device: str | None, every: bool) -> int:
    """Compile the winners again, and compare the machine code with what was timed.

    This needs no GPU.  A record is valid, stale (the same compiler makes other code today, or
    its schedule does not fit any more), or unknown (another compiler, and other code).

    The exit code is 1 when a winner is stale.
    """
    from attngen.cli.verify_records import State

    found = _read(sources, device)
    winners = {won.id for _, alike in _by_place(found.records) if (won := find_winner(alike))}
    chosen = [record for record in found.records if every or record.id in winners]
    stale_winners = 0
    counts: Counter[State] = Counter()
    rows: list[tuple[str, ...]] = []
    for record, verdict in _verify(found, chosen):
        counts[verdict.state] += 1
        is_winner = record.id in winners
        stale_winners += is_winner and verdict.state is State.STALE
        if verdict.reason:
            what = f"{_definition_name(found, record.op)} {record.problem}"
            loser = "" if is_winner else ", no winner"
            rows.append((verdict.state.value + loser, record.id, what, verdict.reason))
    for line in table(rows, indent=0):
        say(line)
    say(", ".join(f"{counts[state]} {state.value}" for state in State))
    return 1 if stale_winners else 0


def _verify(found: Contents, records: Iterable[Record]) -> list[tuple[Record, Any]]:
    """Each record with its verdict; compiled side by side."""
    from attngen.cli.verify_records import verify_record

    definitions = {definition.op: definition for definition in found.definitions}
    chosen = list(records)
    with progress(f"compiling {_count(len(chosen), 'kernel')}"), ThreadPoolExecutor() as pool:
        verdicts = pool.map(lambda r: verify_record(r, definitions.get(r.op)), chosen)
        return list(zip(chosen, verdicts, strict=True))


# ---- reading and writing -----------------------------------------------------------------


def _read(sources: Sequence[Path], device: str | None) -> Contents:
    """What some sources hold, or, without any, what lookups see.  What is wrong is noted.

    Errors:  A493 the device; A712 a source that is not there.
    """
    wanted = None if device is None else DeviceClass.named(device)
    if sources:
        parts = [part for source in sources for part in _parts(source)]
    else:
        parts = [part for store in open_stores() for _, _, part in store.files()]
    found = merge(*parts)
    for text in found.notes:
        note(text)
    records = tuple(r for r in found.records if wanted is None or r.device == wanted)
    used = {record.op for record in records}
    definitions = tuple(d for d in found.definitions if wanted is None or d.op in used)
    return Contents(records, definitions, found.foreign)


def _parts(source: Path) -> Iterator[Contents]:
    if source.is_dir():
        yield from (part for _, _, part in Store(source).files())
        return
    try:
        with source.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise AttnError(CannotRead(None, str(source), reason[:1].lower() + reason[1:])) from None
    found = parse_lines(data)
    notes = tuple(f"{source}: {text}" for text in found.notes)
    yield Contents(found.records, found.definitions, found.foreign, notes)


def _add(folder: Path, found: Contents) -> None:
    store = Store(folder)
    before = _counted(store)
    _guard(folder, lambda: store.add(found))
    new = _counted(store) - before
    say(f"{folder}  {_count(len(found.records), 'record')} read, {new} new")


def _rewrite(store: Store, change: Callable[[Contents], Contents], found: Contents) -> None:
    """Change every file of a folder."""
    folder = Path(str(store.folder))
    places = sorted({(r.device.name, r.op): r.device for r in found.records}.items())
    for (_, op), device in places:
        _guard(folder, partial(store.update, device, op, change))
    left = _counted(store)
    gone = len(found.records) - left
    say(f"{folder}  {_count(left, 'record')}" + (f", {gone} removed" if gone else ""))


def _guard(folder: Path, write: Callable[[], None]) -> None:
    """Errors:  A713 where the folder cannot be written."""
    try:
        write()
    except OSError as error:
        reason = error.strerror or str(error)
        raise AttnError(CannotWrite(None, str(folder), reason[:1].lower() + reason[1:])) from None


def _counted(store: Store) -> int:
    return sum(len(found.records) for _, _, found in store.files())


def _own_folder() -> Path:
    """Errors:  A711 where the cache is turned off."""
    own = user_store()
    if own is None:
        problem, advice = "the cache is turned off by ATTNGEN_CACHE", "name a folder"
        raise AttnError(BadOption(None, "--into", "", problem, advice))
    return Path(str(own.folder))


# ---- words -------------------------------------------------------------------------------


def _groups(found: Contents) -> Iterator[Contents]:
    """The parts by class of GPU and operation, in the order of their names."""
    places = sorted({(r.device.name, r.op): r.device for r in found.records}.items())
    for (_, op), device in places:
        part = found.of(device, op)
        yield Contents(part.records, part.definitions)


def _problems(records: Iterable[Record]) -> Iterator[tuple[Problem, list[Record]]]:
    """Records of one operation on one class of GPU, by problem."""
    found: dict[Problem, list[Record]] = {}
    for each in records:
        found.setdefault(each.problem, []).append(each)
    for problem in sorted(found, key=_in_order):
        yield problem, found[problem]


def _in_order(problem: Problem) -> tuple[Any, ...]:
    return problem.dtype, problem.head_dims, problem.q_tokens, problem.kv_tokens, str(problem)


def _by_place(records: Iterable[Record]) -> Iterator[tuple[Problem, list[Record]]]:
    """The same for records of everything."""
    found: dict[tuple[str, str], list[Record]] = {}
    for each in records:
        found.setdefault((each.device.name, each.op), []).append(each)
    for place in sorted(found):
        yield from _problems(found[place])


def _summary(group: Contents) -> dict[str, Any]:
    first = group.records[0]
    return {
        "device": first.device.name,
        "aliases": list(first.device.aliases),
        "name": _name_of(group),
        "op": first.op,
        "problems": len({record.problem for record in group.records}),
        "records": len(group.records),
    }


def _is_meant(what: str, group: Contents) -> bool:
    if what == _name_of(group):
        return True
    digests = (group.records[0].op, *(record.id for record in group.records))
    return len(what) >= _LEAST_DIGITS and any(digest.startswith(what) for digest in digests)


def _name_of(group: Contents) -> str:
    return _definition_name(group, group.records[0].op)


def _definition_name(found: Contents, op: str) -> str:
    """The name in an operation's definition; its digest where there is none."""
    texts: Iterator[Definition] = (each for each in found.definitions if each.op == op)
    match = next((m for d in texts if (m := _NAME.search(d.text))), None)
    return op[:SHOWN_DIGITS] if match is None else match[1]


def _name(device: DeviceClass) -> str:
    return f"{device.name} ({', '.join(device.aliases)})" if device.aliases else device.name


def _gpus() -> list[DeviceClass]:
    """The GPUs of this machine; none where there is no driver."""
    from attngen.backend.device import cuda_device
    from attngen.backend.launch import load_driver

    try:
        count = load_driver().count_devices()
        return [DeviceClass.of(cuda_device(index)) for index in range(count)]
    except (AttnError, RuntimeError):  # no GPU, or a driver that does not tell
        return []


def _say_table(rows: Sequence[Sequence[str]]) -> None:
    if len(rows) == 1:
        note("there are no records")
        return
    for line in table(rows, indent=0):
        say(line)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
