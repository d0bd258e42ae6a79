"""Races between simulated candidates: noise, ties, drift, disturbed samples, and losses."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.tuning.timing import (
    LostError,
    Race,
    RacePlan,
    ReplayTimer,
    Times,
    interval_of_median,
    rotate,
    summarize,
)

Law = Callable[[int], float]
"""Milliseconds by how many samples of the whole race came before."""

PLAN: Final = RacePlan(min_rounds=9, max_rounds=40, warm_ms=0.0)


class SimulatedTimer:
    """Every candidate has a law; noise is a part of its time."""

    def __init__(self, laws: Mapping[str, Law], noise: float = 0.0, seed: int = 0) -> None:
        self.log: list[tuple[str, int]] = []
        self._laws, self._noise = laws, noise
        self._random = random.Random(seed)

    def sample(self, name: str, repeats: int) -> float:
        self.log.append((name, repeats))
        ms = self._laws[name](len(self.log))
        return ms * (1 + self._noise * abs(self._random.gauss(0, 1)))


def always(ms: float) -> Law:
    return lambda number: ms


def run(timer: SimulatedTimer, plan: RacePlan = PLAN, *, reference: str | None = None) -> Race:
    race = Race(timer, tuple(timer._laws), plan, reference=reference)
    for _ in race.rounds():
        pass
    return race


def test_rounds_are_interleaved_and_everybody_is_first_equally_often() -> None:
    timer = SimulatedTimer(dict.fromkeys("abc", always(1.0)))
    run(timer, RacePlan(min_rounds=6, max_rounds=6, tolerance=0.0, warm_ms=0.0))
    warm = timer.log[:6]  # in the first round each is asked twice: how often, and the sample
    rounds = [[n for n, _ in timer.log[i : i + 3]] for i in range(6, len(timer.log), 3)]
    assert [name for name, _ in warm] == list("aabbcc")
    assert len(rounds) == 5
    assert all(sorted(names) == list("abc") for names in rounds)
    assert Counter(names[0] for names in rounds) == {"a": 1, "b": 2, "c": 2}


def test_a_sample_is_filled_with_as_many_calls_as_fit() -> None:
    timer = SimulatedTimer({"short": always(0.1), "long": always(80.0)})
    run(timer, RacePlan(min_rounds=1, max_rounds=1, sample_ms=5.0, warm_ms=0.0))
    assert timer.log == [("short", 1), ("short", 50), ("long", 1), ("long", 1)]


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_wins_through_noise(seed: int) -> None:
    laws = {f"c{i}": always(1 + 0.03 * i) for i in range(12)}
    race = run(SimulatedTimer(laws, noise=0.02, seed=seed))
    assert race.leader == "c0"
    assert "c0" not in race.outs


@pytest.mark.parametrize("seed", range(20))
def test_who_is_as_fast_is_not_beaten(seed: int) -> None:
    race = run(SimulatedTimer(dict.fromkeys("abcd", always(1.0)), noise=0.01, seed=seed))
    assert len(race.running) >= 3
    assert len(race.samples[race.running[0]]) >= PLAN.min_rounds


def test_the_slow_drop_out_early_and_the_kept_one_never() -> None:
    timer = SimulatedTimer({"best": always(1.0), "slow": always(1.4), "default": always(2.0)})
    race = run(timer, reference="default")
    assert race.outs == {"slow": "beaten after 2 rounds: 1.40 times the fastest"}
    assert len(race.samples["default"]) == len(race.samples["best"]) == PLAN.min_rounds


def test_where_nobody_drops_out_everybody_is_timed_to_the_end() -> None:
    timer = SimulatedTimer({"best": always(1.0), "slow": always(9.0)})
    race = run(timer, RacePlan(min_rounds=7, max_rounds=7, drops=False))
    assert race.outs == {}
    assert [len(found) for found in race.samples.values()] == [7, 7]


def test_a_disturbed_sample_puts_nobody_out() -> None:
    # The first sample of b, the fourth of all, falls into a moment when everything takes thrice.
    timer = SimulatedTimer({"a": always(1.0), "b": lambda n: 3.0 if n == 4 else 0.9})
    assert run(timer).leader == "b"


def test_the_hopeless_drop_out_after_two_launches() -> None:
    laws = {"best": always(1.0), "slow": always(1.6), "fair": always(1.4), "default": always(9.0)}
    timer = SimulatedTimer(laws)
    race = run(timer, replace(PLAN, hopeless=1.5), reference="default")
    assert race.outs["slow"] == "beaten in its first launches: 1.60 times the fastest"
    assert race.firsts == {"slow": 1.6}
    assert race.outs["fair"].startswith("beaten after")
    assert race.running == ("best", "default")
    assert [name for name, _ in timer.log].count("slow") == 2


def test_a_disturbed_launch_is_not_hopeless() -> None:
    timer = SimulatedTimer({"a": always(1.0), "b": lambda n: 3.0 if n == 3 else 0.9})
    race = run(timer, replace(PLAN, hopeless=1.5))
    assert race.leader == "b"
    assert race.firsts == {}


def test_a_candidate_that_degrades_loses_its_lead() -> None:
    timer = SimulatedTimer({"steady": always(1.0), "hot": lambda n: 0.8 if n < 8 else 1.3})
    race = run(timer)
    assert race.leader == "steady"
    assert len(race.samples["hot"]) == len(race.samples["steady"]) >= PLAN.min_rounds


def test_a_clock_that_falls_changes_no_order() -> None:
    laws: dict[str, Law] = {
        name: (lambda n, ms=ms: ms * (1 + 0.01 * n)) for name, ms in (("a", 1.00), ("b", 1.04))
    }
    race = run(SimulatedTimer(laws, noise=0.002))
    assert race.leader == "a"
    assert race.outs["b"].startswith("beaten")


def falling(ms: float) -> Law:
    """Fast for twenty samples, and then 15 % slower."""
    return lambda n: ms * (1.0 if n < 20 else 1.15)


@pytest.mark.parametrize("seed", range(10))
def test_who_dropped_out_while_the_clock_was_high_is_not_the_fastest(seed: int) -> None:
    laws = {"default": falling(1.0), "beaten": falling(1.07), "slow": falling(1.4)}
    timer = SimulatedTimer(laws, noise=0.003, seed=seed)
    race = run(timer, RacePlan(min_rounds=20, warm_ms=0.0), reference="default")
    assert race.outs["beaten"].startswith("beaten")
    medians = {name: summarize(samples).ms for name, samples in race.samples.items()}
    assert min(medians, key=medians.__getitem__) != "default"  # what its own rounds would say
    times = {name: race.times(name) for name in laws}
    assert min(times, key=lambda name: times[name].ms) == race.leader == "default"
    assert times["beaten"].ms / times["default"].ms == pytest.approx(1.07, abs=0.01)
    assert times["default"].high_ms - times["default"].low_ms < 0.01 * times["default"].ms


def test_a_drifting_clock_keeps_no_race_from_ending() -> None:
    def drifts(number: int) -> float:
        return 1 + 0.005 * number

    race = run(SimulatedTimer({"a": drifts, "b": drifts}, noise=0.001))
    assert len(race.samples["a"]) == PLAN.min_rounds


def test_the_reference_runs_before_the_first_round() -> None:
    timer = SimulatedTimer({"a": always(1.0), "b": always(0.5)})
    run(timer, RacePlan(min_rounds=1, max_rounds=1, warm_ms=300.0), reference="b")
    assert timer.log[:2] == [("b", 1), ("b", 600)]


def test_where_the_reference_is_lost_another_takes_its_place() -> None:
    def falls(number: int) -> float:
        if number > 12:
            raise LostError("it hung")
        return 3.0

    laws = {"reference": falls, "a": always(2.0), "b": always(2.004)}
    race = run(SimulatedTimer(laws), reference="reference")
    assert race.outs == {"reference": "it hung"}
    assert race.reference == "a"
    assert race.ratio("b").ms == pytest.approx(1.002)
    assert race.times("b").ms == pytest.approx(2.004)


def test_a_loss_is_only_that_candidate_s() -> None:
    def falls(number: int) -> float:
        if number > 9:
            raise LostError("it hung")
        return 1.0

    race = run(SimulatedTimer({"good": always(1.01), "lost": falls}))
    assert race.outs == {"lost": "it hung"}
    assert race.leader == "good"
    assert len(race.samples["good"]) == PLAN.min_rounds


def test_a_race_that_is_stopped_keeps_its_samples() -> None:
    timer = SimulatedTimer({"a": always(1.0), "b": always(1.0)})
    race = Race(timer, ("a", "b"), PLAN)
    for number, _ in enumerate(race.rounds()):
        if number == 4:
            break
    assert {name: len(found) for name, found in race.samples.items()} == {"a": 3, "b": 2}


def test_nobody_to_time_is_no_error() -> None:
    race = run(SimulatedTimer({}))
    assert race.leader is None
    assert rotate((), 3) == ()


def test_replayed_times_have_the_recorded_median() -> None:
    times = {"a": Times(1.0, 0.9, 1.2, 9), "b": Times(1.5, 1.5, 1.5, 9)}
    timer = ReplayTimer(times)
    race = Race(timer, ("a", "b", "unknown"), PLAN, reference="b")
    for _ in race.rounds():
        pass
    assert race.leader == "a"
    assert summarize(race.samples["a"]).ms == 1.0
    assert race.outs == {"unknown": "there is no recorded time of it"}


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_the_median_lies_in_its_interval(samples: list[float]) -> None:
    times = summarize(samples)
    assert min(samples) <= times.low_ms <= times.ms <= times.high_ms <= max(samples)
    assert times.samples == len(samples)


@pytest.mark.parametrize("n", range(9, 61))
def test_the_interval_holds_the_median_with_95_percent_or_little_more(n: int) -> None:
    low, high = interval_of_median([float(i) for i in range(n)])
    # The true median lies between samples i and j when i < X <= j, X the number of samples below.
    inside = sum(math.comb(n, x) for x in range(int(low) + 1, int(high) + 1)) / 2**n
    assert 0.95 <= inside <= 0.99
