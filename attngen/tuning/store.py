"""Records on disk, in folders that anybody may copy, merge and check in.

    tuned/<device class>/<digest of the operation>.jsonl

One file holds everything that is known about one operation on one class of GPU: its definition and
its records, one a line, sorted.  The repository has such a folder, which is never written here;
the user's cache directory has another.

Merging is a union.  Where two records measure the same thing, the one with more samples stays, and
between equals the bytes decide, so neither order nor repetition matters.  Git may merge two
versions of a file line by line (`merge=union` in `.gitattributes`): the next reader merges the
records again.

Readers never wait.  A writer takes a lock, reads the file, merges, and replaces it as a whole.  A
process that is killed leaves the old file or the new one, and its lock goes with it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, final

from attngen import resources
from attngen.disk_cache import find_directory, lock_folder, write_whole
from attngen.record import record
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.measurement import Definition, Record, Rejected, parse_line

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "EMPTY", "MAX_FILE_BYTES", "Contents", "Store", "merge", "open_stores", "parse_lines",
    "repository_store", "user_store",
]  # fmt: skip

MAX_FILE_BYTES: Final = 1 << 23
"""About 10,000 records; a larger file is not read."""

_SUFFIX: Final = ".jsonl"
_OP: Final = re.compile(r"[0-9a-f]{64}")


@final
@record
class Contents:
    """What some lines say, in canonical order.

    foreign:  lines of another version, which are kept as they are.
    notes:    what was wrong with other lines, which are left out.
    """

    records: tuple[Record, ...] = ()
    definitions: tuple[Definition, ...] = ()
    foreign: tuple[bytes, ...] = ()
    notes: tuple[str, ...] = ()

    def text(self) -> bytes:
        """The lines of a file, each with its end; the notes are no part of it."""
        lines = {definition.line().encode() for definition in self.definitions}
        lines |= {found.line().encode() for found in self.records}
        return b"".join(line + b"\n" for line in sorted({*lines, *self.foreign}))

    def of(self, device: DeviceClass, op: str) -> Contents:
        """The part that belongs into one file; a note says what does not."""
        inside = tuple(r for r in self.records if r.device == device and r.op == op)
        defined = tuple(d for d in self.definitions if d.op == op)
        strange = len(self.records) - len(inside) + len(self.definitions) - len(defined)
        notes = (f"{_count(strange, 'line')} of another operation or device",) if strange else ()
        return Contents(inside, defined, self.foreign, self.notes + notes)


EMPTY: Final = Contents()

Change: TypeAlias = Callable[[Contents], Contents]


def merge(*parts: Contents) -> Contents:
    """The union, in canonical order: commutative, associative, idempotent."""
    records: dict[str, Record] = {}
    definitions: dict[str, Definition] = {}
    for part in parts:
        for found in part.records:
            key = found.key
            known = records.setdefault(key, found)
            if known is not found and _support(found) > _support(known):
                records[key] = found
        for definition in part.definitions:
            known_text = definitions.setdefault(definition.op, definition)
            if definition.text < known_text.text:
                definitions[definition.op] = definition
    return Contents(
        tuple(records[key] for key in sorted(records)),
        tuple(definitions[op] for op in sorted(definitions)),
        tuple(sorted({line for part in parts for line in part.foreign})),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def parse_lines(data: bytes) -> Contents:
    """What a text from anywhere says; a line that says nothing becomes a note."""
    if len(data) > MAX_FILE_BYTES:
        return Contents(notes=(f"it has more than {MAX_FILE_BYTES} bytes, and is not read",))
    records: list[Record] = []
    definitions: list[Definition] = []
    foreign: list[bytes] = []
    notes: list[str] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        match parse_line(line):
            case Record() as found:
                records.append(found)
            case Definition() as definition:
                definitions.append(definition)
            case Rejected(reason, is_foreign):
                notes.append(f"line {number}: {reason}")
                if is_foreign:
                    foreign.append(line.strip())
    return merge(Contents(tuple(records), tuple(definitions), tuple(foreign), tuple(notes)))


@final
class Store:
    """One folder of records; threads and processes may share it."""

    def __init__(self, folder: Path | Traversable) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def read(self, device: DeviceClass, op: str) -> Contents:
        """What is known about an operation on a class of GPU; notes name the file."""
        place = f"{self}/{device.name}/{op[:12]}….jsonl"
        try:
            data = self.folder.joinpath(device.name, op + _SUFFIX).read_bytes()
        except (FileNotFoundError, KeyError):  # the latter in an archive
            return EMPTY
        except OSError as error:
            return Contents(notes=(f"{place}: {error.strerror}",))
        found = parse_lines(data).of(device, op)
        notes = tuple(f"{place}: {note}" for note in found.notes)
        return Contents(found.records, found.definitions, found.foreign, notes)

    def devices(self) -> tuple[DeviceClass, ...]:
        """The classes of GPU of which there are records, by name."""
        found = (DeviceClass.parse(name) for name in _list(self.folder))
        return tuple(device for device in found if device is not None)

    def operations(self, device: DeviceClass) -> tuple[str, ...]:
        """The digests of the operations that are known on a class of GPU, sorted."""
        names = _list(self.folder.joinpath(device.name))
        ops = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        return tuple(op for op in ops if _OP.fullmatch(op))

    def files(self) -> Iterator[tuple[DeviceClass, str, Contents]]:
        """Everything, file by file."""
        for device in self.devices():
            for op in self.operations(device):
                yield device, op, self.read(device, op)

    def add(self, contents: Contents) -> None:
        """Merge records, and the definitions of their operations, into the folder.

        Errors:  OSError where it cannot be written; what was there is there still.
        """
        for device, op in sorted({(r.device.name, r.op) for r in contents.records}):
            own = _own(contents, device, op)
            self.update(own.records[0].device, op, partial(merge, own))

    def update(self, device: DeviceClass, op: str, change: Change) -> None:
        """Replace what one file holds by what `change` makes of it; nothing left removes it.

        Errors:  OSError where it cannot be written, or holds more than is read.
        """
        assert isinstance(self.folder, Path), "the records in an archive are never written"
        path = self.folder / device.name / (op + _SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.folder):
            before = path.read_bytes() if path.exists() else b""
            if len(before) > MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, "it has more records than are read", str(path))
            after = change(parse_lines(before).of(device, op)).text()
            if len(after) > max(MAX_FILE_BYTES, len(before)):
                raise OSError(errno.EFBIG, "it has no room; `attngen cache prune`", str(path))
            if not after:
                path.unlink(missing_ok=True)
            elif after != before:
                write_whole(path, after)


def repository_store() -> Store:
    """The records that come with attngen."""
    return Store(resources.tuned_folder())


def user_store() -> Store | None:
    """The records in the user's cache directory; None where the cache is turned off."""
    directory = find_directory()
    return None if directory is None else Store(directory / "tuned")


def open_stores() -> tuple[Store, ...]:
    """All that are looked into."""
    own = user_store()
    return (repository_store(),) if own is None else (repository_store(), own)


def _support(found: Record) -> tuple[int, str]:
    """Which of two measurements of the same thing stays: the larger one."""
    return found.times.count, found.line()


def _own(contents: Contents, device: str, op: str) -> Contents:
    records = tuple(r for r in contents.records if r.device.name == device and r.op == op)
    return Contents(records, tuple(d for d in contents.definitions if d.op == op))


def _list(folder: Path | Traversable) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    except OSError:  # it cannot be read, or has just been removed
        return []


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
