"""Recorded times in place of a device: a search that needs no GPU, and always goes the same way.

It compiles nothing and runs nothing.  What has no record is lost when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from attngen.compiler import lower_schedule, render_lowered
from attngen.ir.schedule import Schedule
from attngen.tuning.build import Build
from attngen.tuning.call import Subject
from attngen.tuning.exam import Verdict
from attngen.tuning.measurement import Record, Resources
from attngen.tuning.timing import LostError, ReplayTimer, Times

__all__ = ["Replay"]

_NOTHING: Final = Resources(registers=0, spill_bytes=0, shared_bytes=0)


@final
class Replay:
    """Builder and stand of a search: the records of one problem."""

    def __init__(self, subject: Subject, records: Iterable[Record]) -> None:
        self._subject = subject
        self._records: dict[Schedule, Record] = {}
        for one in sorted(records, key=lambda r: (r.times.count, r.id)):
            self._records[one.schedule] = one  # of several, the one with the most samples
        self._timer = ReplayTimer({})
        modes = {one.times.mode.value for one in self._records.values()}
        self.mode = min(modes, default="graph")

    def build(self, schedule: Schedule) -> Build:
        lowered = lower_schedule(self._subject.attention, schedule, self._subject.target)
        rendered = render_lowered(lowered)
        found = self._records.get(schedule)
        if found is None:
            return Build(schedule, rendered, b"", "", _NOTHING, "")
        version = found.environment.nvrtc
        return Build(schedule, rendered, b"", found.sass, found.resources, version)

    def prepare(self) -> None:
        """There is nothing to make ready."""

    def check(self, name: str, build: Build) -> Verdict:
        found = self._records.get(build.schedule)
        if found is None:
            raise LostError("there is no recorded time of it")
        times = found.times
        self._timer.add(
            name,
            Times(1e-3 * times.median_us, 1e-3 * times.low_us, 1e-3 * times.high_us, times.count),
        )
        return Verdict(found.checked.max_error, found.checked.bound_ratio)

    def sample(self, name: str, repeats: int) -> float:
        return self._timer.sample(name, repeats)

    def close(self) -> None:
        """There is nothing to end."""
