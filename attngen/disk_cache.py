"""What takes long to make, kept on disk for any number of processes, threads and machines.

An entry is one file, named by the digest of everything that determines its content.  It is
written under a temporary name in its own folder and renamed, so that it is whole or absent;
it carries a checksum over its key and content, so that a damaged entry, or one under another
entry's name, is noticed, made again and replaced.

The cache is a convenience: a directory that cannot be read or written, or that disappears,
costs a warning and the time to make the content, never an error.  Two processes that miss at
the same time both make it; threads of one process wait for each other.

Like a folder of Python modules, the directory holds code that is run here, so nobody else
should be able to write to it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import final

from attngen.options import settings

__all__ = [
    "CacheWarning", "DiskCache", "find_directory", "lock_folder", "make_key", "open_cache",
    "write_whole",
]  # fmt: skip

KERNELS = "kernels"

_SCHEMA = "attngen-cache/1"  # changes when the meaning of a key or the layout of a file does
_TEMPORARY = ".tmp-"
_ATTEMPTS = 3  # to write into a directory that somebody else deletes
_LOCK = ".lock"
_PATIENCE_SECONDS = 60.0  # a writer keeps a lock for milliseconds
_ABANDONED_AFTER_SECONDS = 3600.0  # a temporary file this old was left by a killed process


class CacheWarning(UserWarning):
    """Something is wrong with the disk cache; the result is right, only slower to get."""


def make_key(*parts: str) -> str:
    """The name of an entry: equal exactly when all parts are."""
    return sha256(json.dumps((_SCHEMA, *parts)).encode()).hexdigest()


def open_cache(folder: str = KERNELS, suffix: str = ".entry") -> DiskCache | None:
    """One folder of the cache that the environment asks for; None where it is turned off."""
    directory = find_directory()
    return None if directory is None else _open_folder(directory, folder, suffix)


def find_directory() -> Path | None:
    """The directory of the cache that the environment asks for; None where it is turned off."""
    chosen = settings()
    if not chosen.is_cache_on:
        return None
    return (chosen.cache_dir or _find_user_directory()).absolute()


@cache
def _open_folder(directory: Path, folder: str, suffix: str) -> DiskCache:
    """One object per folder, so that its threads wait for each other and it warns once."""
    return DiskCache(directory, folder, suffix)


def _find_user_directory() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("attngen", appauthor=False)


@final
class DiskCache:
    """Blobs by key in one folder; safe for threads and processes, whole entries only.

    Only the folder of kernels warns: one warning is enough, and the rest is made quickly.
    """

    def __init__(self, directory: Path, folder: str = KERNELS, suffix: str = ".entry") -> None:
        self.directory = directory / folder
        self._suffix = suffix
        self._is_quiet = folder != KERNELS
        self._building: dict[tuple[int, str], threading.Lock] = {}
        self._warned: dict[str, object] = {}

    def load_or_build(self, key: str, build: Callable[[], bytes]) -> bytes:
        """The content under `key`, built and stored when it is not there.

        Threads that ask for one key build it once.  What `build` raises is passed on.
        """
        found = self.load(key)
        if found is not None:
            return found
        # The process id keeps a forked child from waiting for a thread that it does not have.
        place = (os.getpid(), key)
        with self._building.setdefault(place, threading.Lock()):
            try:
                found = self.load(key)
                if found is not None:
                    return found
                content = build()
                self.store(key, content)
                return content
            finally:
                self._building.pop(place, None)

    def load(self, key: str) -> bytes | None:
        """The content under `key`; None, with a warning, when it is damaged."""
        path = self.find_path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("directory", f"the cache {self.directory} cannot be read: {error}")
            return None
        content = _check(key, data)
        if content is None:
            self.warn_damaged(key)
        return content

    def store(self, key: str, content: bytes) -> bool:
        """Put `content` under `key`, replacing what is there; False where that is impossible."""
        header = f"{_SCHEMA} {_checksum(key, content)}\n".encode()
        path = self.find_path(key)
        for _ in range(_ATTEMPTS):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, header + content)
                return True
            except FileNotFoundError:
                continue  # somebody deletes the directory at this moment; make it once more
            except OSError as error:
                if isinstance(error, FileExistsError) and not path.parent.is_file():
                    continue  # likewise, between `mkdir` and its look at what is there
                if self.load(key) == content:
                    return True  # somebody else has just stored the same
                self._warn("directory", f"the cache {self.directory} is not used: {error}")
                return False
        return False

    def find_path(self, key: str) -> Path:
        """Where the entry of `key` is, or would be."""
        return self.directory / key[:2] / f"{key}{self._suffix}"

    def warn_damaged(self, key: str) -> None:
        """Tell the user, once, that an entry cannot be used."""
        self._warn(key, f"the cache entry {self.find_path(key)} is damaged; making it again")

    def _warn(self, about: str, text: str) -> None:
        if self._is_quiet:
            return
        token = object()
        if self._warned.setdefault(about, token) is token:  # one thread only gets its own back
            warnings.warn(text, CacheWarning, stacklevel=4)


def write_whole(path: Path, data: bytes) -> None:
    """Make `path` hold `data` in one step; nothing is left behind when that fails.

    A process that is killed meanwhile leaves a temporary file, which a later call removes.
    """
    from uuid import uuid4

    _remove_abandoned(path.parent)
    temporary = path.parent / f"{_TEMPORARY}{uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Be the only one of all processes and threads that changes a folder.

    The lock ends with the process that has it, however that ends.  It is on a file, which is
    removed while it is still locked: so whoever waited for a file that is gone waits for the
    next one.

    Errors:  OSError where the folder cannot be written, or somebody keeps the lock for a minute.
    """
    path, deadline = folder / _LOCK, time.monotonic() + _PATIENCE_SECONDS
    while True:
        with path.open("ab") as file:
            while not _try_lock(file.fileno()):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT, "another process keeps it locked", str(path)
                    )
                time.sleep(random.uniform(0.001, 0.004))
            if not _is_at(path, file.fileno()):
                continue
            try:
                yield
            finally:
                with suppress(OSError):  # Windows keeps a file that is open
                    path.unlink()
            return


def _try_lock(descriptor: int) -> bool:
    """Whether the file is now locked, until it is closed."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_abandoned(folder: Path) -> None:
    """Delete the temporary files of processes that were killed while writing."""
    oldest = time.time() - _ABANDONED_AFTER_SECONDS
    for path in folder.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # gone already, or another user's
            if path.stat().st_mtime < oldest:
                path.unlink()


def _checksum(key: str, content: bytes) -> str:
    return sha256(key.encode() + b"\n" + content).hexdigest()


def _check(key: str, data: bytes) -> bytes | None:
    """The content of an entry's file; None unless it is whole and stored under this key."""
    header, newline, content = data.partition(b"\n")
    expected = f"{_SCHEMA} {_checksum(key, content)}".encode()
    return content if newline and header == expected else None
