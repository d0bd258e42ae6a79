"""Rounds, medians and their intervals, with timers that say what they are told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.bench.timing import Plan, interval_of_median, measure, rotate, summarize


class FakeTimer:
    """Takes the given times in turn, and writes down who was asked when."""

    mode = "eager"

    def __init__(self, name: str, times: Iterator[float], log: list[tuple[str, int]]) -> None:
        self.name, self.times, self.log = name, times, log

    def __call__(self, repeats: int) -> float:
        self.log.append((self.name, repeats))
        return next(self.times)


def test_rounds_are_interleaved_and_everybody_is_first_equally_often() -> None:
    log: list[tuple[str, int]] = []
    names = ("a", "b", "c")
    timers = {n: FakeTimer(n, cycle([1.0, 2.0]), log) for n in names}
    measure(timers, Plan(min_rounds=6, max_rounds=6, tolerance=0.0))
    rounds = [log[i : i + 3] for i in range(3, len(log), 3)]  # the first three choose the repeats
    assert len(rounds) == 6
    assert all(sorted(name for name, _ in r) == sorted(names) for r in rounds)
    assert Counter(r[0][0] for r in rounds) == {"a": 2, "b": 2, "c": 2}


def test_a_sample_is_filled_with_as_many_calls_as_fit() -> None:
    log: list[tuple[str, int]] = []
    timers = {
        "short": FakeTimer("short", cycle([0.1]), log),
        "long": FakeTimer("long", cycle([80.0]), log),
    }
    measure(timers, Plan(min_rounds=1, max_rounds=1, sample_ms=5.0))
    assert log[2:] == [("short", 50), ("long", 1)]


def test_rounds_end_when_every_median_is_settled() -> None:
    log: list[tuple[str, int]] = []
    steady = {"steady": FakeTimer("steady", cycle([1.0]), log)}
    assert measure(steady, Plan())["steady"].samples == Plan().min_rounds
    both = steady | {"restless": FakeTimer("restless", cycle([1.0, 2.0]), log)}
    found = measure(both, Plan())
    assert found["steady"].samples == found["restless"].samples == Plan().max_rounds


def test_nobody_to_time_is_no_error() -> None:
    assert measure({}, Plan()) == {}
    assert rotate((), 3) == ()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_the_median_lies_in_its_interval(samples: list[float]) -> None:
    times = summarize(samples)
    assert min(samples) <= times.low_ms <= times.ms <= times.high_ms <= max(samples)
    assert times.samples == len(samples)


@pytest.mark.parametrize("n", range(Plan().min_rounds, Plan().max_rounds + 1))
def test_the_interval_holds_the_median_with_95_percent_or_little_more(n: int) -> None:
    low, high = interval_of_median([float(i) for i in range(n)])
    # The true median lies between samples i and j when i < X <= j, X the number of samples below.
    inside = sum(math.comb(n, x) for x in range(int(low) + 1, int(high) + 1)) / 2**n
    assert 0.95 <= inside <= 0.99
