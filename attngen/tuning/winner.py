"""The winner of some measurements, derived again each time and never stored.

Candidates that are within the noise of the fastest one are tied, and a fixed order decides among
them; else two runs, or two machines, would choose differently.  All comparisons are of integers
(tenths of a microsecond), so that the same records give the same winner everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attngen.tuning.measurement import L2, Measurement, Mode, Record

__all__ = ["find_tied", "find_winner"]


def find_winner(records: Iterable[Record]) -> Record | None:
    """The record whose schedule to use, of records of one problem; None where there is none."""
    return min(find_tied(records), key=_order, default=None)


def find_tied(records: Iterable[Record]) -> list[Record]:
    """The fastest record, and those that cannot be told apart from it."""
    comparable = _comparable(list(records))
    if not comparable:
        return []
    best = min(comparable, key=lambda record: (_tenths(record.times.median_us), record.id))
    return [record for record in comparable if _is_tied(record.times, best.times)]


def _comparable(records: Sequence[Record]) -> list[Record]:
    """Those that were timed in one way: the most frequent one, else the first by name."""
    ways = Counter(map(_way, records))
    chosen = min(ways, key=lambda way: (-ways[way], way[0].value, way[1].value), default=None)
    return [record for record in records if _way(record) == chosen]


def _way(record: Record) -> tuple[Mode, L2]:
    return record.times.mode, record.times.l2


def _is_tied(times: Measurement, best: Measurement) -> bool:
    """Within 1 %, or within the joint interval of both medians, and never beyond 2 %.

    Two medians with half widths h and g differ by chance up to sqrt(h^2 + g^2).
    """
    base = _tenths(best.median_us)
    behind = _tenths(times.median_us) - base
    is_noise = 4 * behind**2 <= _width(times) ** 2 + _width(best) ** 2
    return 100 * behind <= base or (is_noise and 50 * behind <= base)


def _width(times: Measurement) -> int:
    return _tenths(times.high_us) - _tenths(times.low_us)


def _tenths(us: float) -> int:
    return round(10 * us)


def _order(record: Record) -> tuple[object, ...]:
    """Among equals: what runs where nothing is tuned, as `attngen tune` says it; no spills, little
    shared memory, a small tile; of those that need the same, the faster."""
    schedule = record.schedule
    tile = (schedule.tile_q or 0) * (schedule.tile_kv or 0)
    used = record.resources
    small = used.spill_bytes, used.shared_bytes, tile
    faster = _tenths(record.times.median_us), repr(schedule), record.id
    return not record.is_default, small, faster
