"""Files of the command line: read with clear errors, written whole or not at all."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from attngen.cli.errors import CannotRead, CannotWrite
from attngen.diagnostics.diagnostic import AttnError

__all__ = ["read_text", "require_file", "require_writable", "write_together"]

MAX_BYTES: Final = 1 << 20
"""A larger file is no `.attn` file."""


def require_file(path: Path) -> None:
    """Errors:  A712 when this is no file that can be read; it names a file that can."""
    try:
        if path.is_dir():
            advice = _first_spec(path)
            raise AttnError(CannotRead(None, str(path), "it is a directory", advice))
        if not path.exists():
            raise AttnError(
                CannotRead(None, str(path), "there is no such file", _closest_file(path))
            )
        if not path.is_file():
            raise AttnError(CannotRead(None, str(path), "it is no ordinary file"))
    except OSError as error:
        raise AttnError(CannotRead(None, str(path), _reason(error))) from None
    except ValueError:  # a null character in the path
        raise AttnError(CannotRead(None, repr(str(path)), "there is no such file")) from None


def read_text(path: Path) -> str:
    """The text of a `.attn` file.

    Errors:  A712 not there, not readable, too large, or not UTF-8.
    """
    require_file(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise AttnError(CannotRead(None, str(path), f"it has more than {MAX_BYTES} bytes"))
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except OSError as error:
        reason = _reason(error)
    raise AttnError(CannotRead(None, str(path), reason))


def write_together(files: Mapping[Path, bytes]) -> None:
    """Write several files: all of them, or, when one cannot be written, none.

    Each is written under a temporary name beside its place and renamed.  A symbolic link
    stays one, and a file that is replaced keeps its permissions.

    Errors:  A713; every file then holds what it held before.
    """
    staged: list[tuple[Path, Path]] = []  # temporary, final
    replaced: list[tuple[Path, bytes | None]] = []
    path = Path()
    try:
        for path, content in files.items():
            staged.append((_stage(path, content), path.resolve()))
        for temporary, path in staged:
            before = path.read_bytes() if path.exists() else None
            os.replace(temporary, path)
            replaced.append((path, before))
    except (OSError, ValueError) as error:
        for target, content_before in reversed(replaced):
            _restore(target, content_before)
        raise AttnError(CannotWrite(None, str(path), _reason(error))) from None
    finally:
        for temporary, _ in staged:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Errors:  A713 when a file cannot be written there, so that nobody works in vain."""
    try:
        target = path.resolve()
        folder = target.parent
        if target.is_dir():
            reason = "it is a directory"
        elif not folder.is_dir():
            reason = f"there is no folder {folder}"
        elif not os.access(target if target.exists() else folder, os.W_OK):
            reason = "it is write-protected"
        else:
            return
    except (OSError, ValueError) as error:
        reason = _reason(error)
    raise AttnError(CannotWrite(None, str(path), reason))


def _stage(path: Path, content: bytes) -> Path:
    """The content in a new file beside `path`."""
    target = path.resolve()
    if target.is_dir():
        raise IsADirectoryError(21, "it is a directory")
    if target.exists() and not target.is_file():
        raise OSError(22, "it is no ordinary file")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(13, "it is write-protected")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name[:100]}.{uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return temporary


def _restore(path: Path, before: bytes | None) -> None:
    with suppress(OSError):
        if before is None:
            path.unlink(missing_ok=True)
        else:
            os.replace(_stage(path, before), path)


def _reason(error: OSError | ValueError) -> str:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return reason[:1].lower() + reason[1:]


def _first_spec(folder: Path) -> str | None:
    specs = sorted(path.name for path in folder.glob("*.attn"))
    return f"it holds {', '.join(specs[:4])}" + (", …" if specs[4:] else "") if specs else None


def _closest_file(path: Path) -> str | None:
    """Advice that names a file in the same folder which may be meant."""
    with suppress(OSError):
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
        wanted = [path.name, f"{path.name}.attn"]
        exact = next((name for name in wanted if name in names), None)
        close = difflib.get_close_matches(path.name, sorted(names), n=1, cutoff=0.7)
        found = exact or next(iter(close), None)
        if found is not None:
            return f"did you mean `{path.with_name(found)}`?"
    return None
