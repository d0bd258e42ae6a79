"""The winner: the fastest, and among those that noise cannot tell apart always the same one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.schedule import Schedule
from attngen.tuning.measurement import L2, Mode, Record, Resources
from attngen.tuning.winner import find_tied, find_winner

from .records import make_record, records, times

FAST, SLOW = (64, 64), (128, 128)


def winning_tile(*candidates: Record) -> Any:
    won = find_winner(candidates)
    assert won is not None
    return won.schedule.tile_q, won.schedule.tile_kv


def test_nothing_has_no_winner() -> None:
    assert find_winner([]) is None


@pytest.mark.parametrize(
    ("median", "spread", "is_tied"),
    [
        (400.0, 0.1, True),
        (404.0, 0.1, True),  # 1 %
        (404.1, 0.1, False),
        (406.0, 6.0, True),  # within the joint interval of both medians
        (406.1, 0.1, False),
        (409.0, 50.0, False),  # beyond 2 % no noise ties
    ],
)
def test_the_tie_band(median: float, spread: float, is_tied: bool) -> None:
    best = make_record(tile=FAST, times=times(400.0, 0.1))
    other = make_record(tile=SLOW, times=times(median, spread))
    assert (other in find_tied([best, other])) is is_tied


def used(**resources: int) -> Resources:
    usual = {"registers": 168, "spill_bytes": 0, "shared_bytes": 4096}
    return Resources(**{**usual, **resources})


def ordered(early_weights: int) -> Schedule:
    """One tile, whose steps differ in their order alone."""
    return replace(
        make_record().schedule, late_values=0, early_weights=early_weights, late_keys=True
    )


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (make_record(402.0, schedule=ordered(128)), make_record(400.0, schedule=ordered(64))),
        (make_record(400.0, FAST, resources=used(spill_bytes=8)), make_record(402.0, SLOW)),
        (make_record(400.0, FAST, resources=used(shared_bytes=8192)),
         make_record(402.0, SLOW, resources=used())),
        (make_record(400.0, SLOW, resources=used()), make_record(402.0, FAST, resources=used())),
        (make_record(410.0, FAST, resources=used()), make_record(400.0, SLOW)),
        (make_record(400.0, FAST, resources=used()),
         make_record(403.0, SLOW, is_default=True, resources=used(spill_bytes=8))),
        (make_record(405.0, FAST, is_default=True, resources=used()), make_record(400.0, SLOW)),
    ],
    ids=["the faster of those that need the same", "fewest spills", "least shared memory",
         "smallest tile", "fastest, beyond the band",
         "the default", "faster than the default, beyond the band"],
)  # fmt: skip
def test_the_order_among_candidates(worse: Record, better: Record) -> None:
    assert find_winner([worse, better]) == find_winner([better, worse]) == better


def test_times_of_different_kinds_are_not_compared() -> None:
    graph = [make_record(400.0 + i, (64, 64 + i)) for i in range(2)]
    events = make_record(tile=SLOW, times=times(100.0, mode=Mode.EVENTS))
    cold = make_record(tile=SLOW, times=times(200.0, l2=L2.COLD))
    assert winning_tile(*graph, events, cold) == (64, 64)


@given(st.lists(records, max_size=12), st.randoms())
def test_the_same_records_have_the_same_winner(found: list[Record], random: Any) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert find_winner(shuffled) == find_winner(found)
    assert find_winner([*shuffled, *found]) == find_winner(found)


@given(st.lists(records, min_size=1, max_size=12))
def test_the_winner_is_no_more_than_2_percent_behind(found: list[Record]) -> None:
    alike = [
        replace(each, times=replace(each.times, mode=Mode.GRAPH, l2=L2.WARM)) for each in found
    ]
    won = find_winner(alike)
    assert won is not None
    assert won.times.median_us <= 1.02 * min(each.times.median_us for each in alike) + 1e-9
