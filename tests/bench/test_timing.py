"""Rounds, with timers that say what they are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import cycle

from attngen.bench.timing import Plan, measure


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
