"""Counters for launches whose blocks get query tiles as they ask for them.

A launch finds its two counters at 0 and leaves them at 0, so launches that follow each other share
them, and no launch ahead has to clear them.  Those that may run at the same time must not: each
stream has its own, and so has every launch that a CUDA graph captures, since a graph may be
replayed on any stream.  What shares them still is one captured launch in two executions of its
graph at once, as two instances of it: these would write the same outputs, too, and are not allowed.

Counters are never given back: a stream may be gone while its work is not, and a graph stays.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol, final

__all__ = ["TicketDriver", "Tickets"]

_BYTES: Final = 8  # two int32
_PLACES: Final = 4096
_PER_THREAD: Final = 2  # CU_STREAM_PER_THREAD: one handle, a stream for each thread


class TicketDriver(Protocol):
    """The part of CUDA that counters need; memory is that of the current device."""

    def is_capturing(self, stream: int) -> bool: ...
    def stream_id(self, stream: int) -> int:
        """What no other stream of the process has, not even one with the same handle later."""
        ...

    def allocate_zeros(self, size: int) -> int:
        """The address of so many bytes, which are zeros by now."""
        ...


@final
class Tickets:
    """The counters of one kernel on one device, which is the current one; threads may share it."""

    def __init__(self, driver: TicketDriver) -> None:
        self._driver = driver
        self._next = driver.allocate_zeros(_PLACES * _BYTES)
        self._end = self._next + _PLACES * _BYTES
        self._of_streams: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def find(self, stream: int) -> int:
        """The address of a launch's counters; 0 when all are taken, for tiles that are dealt."""
        if self._driver.is_capturing(stream):
            with self._lock:
                return self._take()
        thread = threading.get_ident() if stream == _PER_THREAD else 0
        name = self._driver.stream_id(stream), thread
        found = self._of_streams.get(name)
        if found is None:
            with self._lock:
                found = self._of_streams.get(name)
                if found is None:
                    found = self._of_streams[name] = self._take()
        return found

    def _take(self) -> int:
        if self._next == self._end:
            return 0
        self._next += _BYTES
        return self._next - _BYTES
