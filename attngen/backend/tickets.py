"""Counters for launches whose blocks get query tiles as they ask for them.

A launch finds its two counters at 0 and leaves them at 0, so launches that follow each other share
them, and no launch ahead has to clear them.  Those that may run at the same time must not: each
stream has its own, and so has every launch that a CUDA graph captures, since graphs may be replayed
anywhere.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol, final

__all__ = ["TicketDriver", "Tickets"]

_BYTES: Final = 8  # two int32
_PLACES: Final = 1024


class TicketDriver(Protocol):
    """The part of CUDA that counters need; calls are for the current device."""

    def is_capturing(self, stream: int) -> bool: ...
    def stream_id(self, stream: int) -> int:
        """What no other stream of the process has, not even one with the same handle later."""
        ...

    def allocate_zeros(self, size: int) -> int:
        """The address of so many bytes on the current device, which are zeros by now."""
        ...


@final
class Tickets:
    """The counters of one kernel on one device; threads may share it."""

    def __init__(self, driver: TicketDriver) -> None:
        self._driver = driver
        self._next = driver.allocate_zeros(_PLACES * _BYTES)
        self._end = self._next + _PLACES * _BYTES
        self._of_streams: dict[int, int] = {}
        self._lock = threading.Lock()

    def find(self, stream: int) -> int:
        """The address of a launch's counters; 0 when all are taken, for a fixed order of tiles."""
        if self._driver.is_capturing(stream):
            with self._lock:
                return self._take()
        name = self._driver.stream_id(stream)
        found = self._of_streams.get(name)
        if found is None:
            with self._lock:
                found = self._of_streams.get(name) or self._take()
                self._of_streams[name] = found
        return found

    def _take(self) -> int:
        if self._next == self._end:
            return 0
        self._next += _BYTES
        return self._next - _BYTES
