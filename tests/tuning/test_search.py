"""Searches with simulated times, and whole ones on the CPU with candidates that do harm."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from attngen import targets
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.schedule import Schedule
from attngen.targets.errors import UnknownTarget
from attngen.tuning.bench import HostBench
from attngen.tuning.build import Build
from attngen.tuning.call import Call
from attngen.tuning.cost_model import CostModel, Prediction
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.exam import Verdict
from attngen.tuning.measurement import Resources
from attngen.tuning.search import Findings, Plan, Progress, Search, Stage, shortlist
from attngen.tuning.space import Space, collect
from attngen.tuning.timing import LostError, RacePlan
from attngen.tuning.worker import Patience, Worker

from .candidates import BREAKS, BrokenBuilder, call_of, exams_of, simt, subject_of
from .problems import CAUSAL, specialised

H200 = DeviceClass.named("h200")
CALL = Call({"B": 1, "Hq": 16, "Hkv": 16, "Sq": 8192, "Skv": 8192, "Dqk": 128, "Dv": 128}, {}, {})


class Simulation:
    """A builder, a stand and a clock: the time of a schedule is what a function says."""

    mode = "graph"

    def __init__(
        self,
        law: Callable[[Schedule], float],
        *,
        spills: Callable[[Schedule], bool] = lambda s: False,
        noise: float = 0.01,
        build_s: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.built: list[Schedule] = []
        self.samples = 0
        self.is_closed = self.is_prepared = False
        self.seconds = 0.0
        self.interrupt_at: int | None = None
        self._law, self._spills, self._noise, self._build_s = law, spills, noise, build_s
        self._random = random.Random(seed)
        self._by_name: dict[str, Schedule] = {}
        self._lock = threading.Lock()

    def now(self) -> float:
        return self.seconds

    def build(self, schedule: Schedule) -> Build:
        with self._lock:
            self.built.append(schedule)
            self.seconds += self._build_s
        resources = Resources(
            registers=168, spill_bytes=int(self._spills(schedule)), shared_bytes=1
        )
        return Build(schedule, cast(Any, None), b"", "0" * 64, resources, "13.5")

    def prepare(self) -> None:
        self.is_prepared = True

    def check(self, name: str, build: Build) -> Verdict:
        assert self.is_prepared
        self._by_name[name] = build.schedule
        if self._law(build.schedule) <= 0:
            raise LostError("it computes nothing")
        return Verdict(1e-3, 0.5)

    def sample(self, name: str, repeats: int) -> float:
        self.samples += 1
        if self.samples == self.interrupt_at:
            raise KeyboardInterrupt
        ms = self._law(self._by_name[name]) * (1 + self._noise * abs(self._random.gauss(0, 1)))
        self.seconds += ms * repeats / 1e3
        return ms

    def close(self) -> None:
        self.is_closed = True


class Throttled(Simulation):
    """A GPU that is fast after a rest, and a sixth slower after some tenths of a second of load."""

    def __init__(self, law: Callable[[Schedule], float], *, noise: float, seed: int) -> None:
        super().__init__(law, noise=noise, seed=seed)
        self._heat = 0.0

    def build(self, schedule: Schedule) -> Build:
        with self._lock:
            self._heat = 0.0
        return super().build(schedule)

    def sample(self, name: str, repeats: int) -> float:
        ms = super().sample(name, repeats) * (1 + 0.15 * self._heat)
        share = min(1.0, ms * repeats / 400)
        self._heat += (1 - self._heat) * share
        return ms


def search(simulation: Simulation, plan: Plan | None = None, tell: Any = None) -> Findings:
    attention = specialised(CAUSAL, "bf16", (128, 128))
    space = collect(attention, Schedule(), targets.get("sm_90a"))
    model = CostModel(attention, CALL, H200)
    plan = plan or Plan(budget_s=None, compilers=2)
    more = {} if tell is None else {"tell": tell}
    found = Search(
        "causal", space, model, simulation, simulation, plan, now=simulation.now, **more
    ).run()
    assert simulation.is_closed
    return found


def near_to(q: int, kv: int, stages: int = 2) -> Callable[[Schedule], float]:
    """Milliseconds that grow with the distance from a best schedule of forward_wgmma."""

    def law(s: Schedule) -> float:
        if s.kernel != "forward_wgmma":
            return 3.0
        far = abs((s.tile_q or 0) - q) / 640 + abs((s.tile_kv or 0) - kv) / 640
        return 1.0 + far + 0.05 * abs((s.stages or 0) - stages)

    return law


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("q", "kv", "stages"), [(128, 160, 2), (192, 80, 2), (128, 112, 3)])
def test_the_fastest_is_found_through_noise(q: int, kv: int, stages: int, seed: int) -> None:
    law = near_to(q, kv, stages)
    found = search(Simulation(law, seed=seed))
    assert found.best is not None
    fastest = min(law(s) for s in found.space.candidates)
    assert law(found.best.schedule) <= 1.03 * fastest


def test_a_setting_that_the_model_does_not_see_is_found_beside_the_winner() -> None:
    found = search(Simulation(near_to(128, 128, 3), noise=0.002))
    assert found.best is not None
    assert found.best.schedule.stages == 3


def test_every_order_of_the_winner_is_tried() -> None:
    def law(s: Schedule) -> float:
        gain = 0.95 if (s.late_values, s.early_weights, s.late_keys) == (0, 128, True) else 1.0
        return gain * near_to(128, 128)(s)

    simulation = Simulation(law, noise=0.002)
    found = search(simulation)
    assert found.best is not None
    assert found.best.schedule.late_keys
    mine = [s for s in simulation.built if (s.tile_q, s.tile_kv, s.stages) == (128, 128, 2)]
    assert len([s for s in mine if s.kernel == "forward_wgmma"]) == 8


@pytest.mark.parametrize("seed", range(8))
def test_a_clock_that_falls_names_no_beaten_winner(seed: int) -> None:
    # The default is the best; the same with three stages takes 7 % longer, and all else more.
    def law(s: Schedule) -> float:
        if (s.kernel, s.tile_q, s.tile_kv) != ("forward_wgmma", 128, 128):
            return 1.2 + 0.001 * (s.tile_kv or 0)
        return 1.0 if s.stages == 2 else 1.07

    plan = Plan(budget_s=None, compilers=2, race=RacePlan(warm_ms=0.0))
    found = search(Throttled(law, noise=0.003, seed=seed), plan)
    assert found.best is not None
    assert found.best.schedule == found.space.default
    times = {m.schedule.stages: m.times.ms for m in found.measured if law(m.schedule) < 1.1}
    assert times[3] / times[2] == pytest.approx(1.07, abs=0.015)  # beaten after a few rounds


def test_nobody_is_recorded_as_faster_than_who_beat_it() -> None:
    def law(s: Schedule) -> float:
        if (s.kernel, s.tile_q, s.tile_kv) != ("forward_wgmma", 128, 128):
            return 1.3
        if (s.late_values, s.early_weights, s.late_keys) == (48, 64, False):
            return 0.98
        return 1.0 if s.stages == 2 and not s.has_order else 1.04

    class Unlucky(Simulation):
        """The default meets a slow clock in the first rounds of every race."""

        rounds = 0

        def sample(self, name: str, repeats: int) -> float:
            ms = super().sample(name, repeats)
            if law(self._by_name[name]) != 1.0:
                return ms
            self.rounds = 0 if repeats > 50 else self.rounds + 1  # the warm-up comes first
            return ms * (1.08 if self.rounds <= 7 else 1.0)

    found = search(Unlucky(law, noise=0.002))
    assert found.best is not None
    assert law(found.best.schedule) == 0.98
    beaten = [m for m in found.measured if law(m.schedule) == 1.04]
    assert len(beaten) > 5
    assert all(m.remark is not None for m in beaten)
    assert [m.ratio.ms for m in beaten] == pytest.approx([1.04] * len(beaten), abs=0.01)


@pytest.mark.parametrize(("gain", "is_chosen"), [(0.985, True), (0.995, False), (1.004, False)])
def test_the_default_yields_to_what_is_clearly_faster(gain: float, is_chosen: bool) -> None:
    def law(s: Schedule) -> float:
        if (s.kernel, s.tile_q, s.tile_kv) != ("forward_wgmma", 128, 128):
            return 1.2
        return 1.0 if s.stages == 2 else gain if s.stages == 3 else 1.2

    for seed in range(5):
        found = search(Throttled(law, noise=0.006, seed=seed))
        assert found.best is not None
        assert (found.best.schedule.stages == 3) == is_chosen


def test_every_schedule_has_a_time_or_a_reason() -> None:
    found = search(Simulation(near_to(128, 160)))
    timed, discarded = ({x.schedule for x in each} for each in (found.measured, found.discarded))
    assert not timed & discarded
    rejected = {r.schedule for r in found.space.rejected}
    assert timed | discarded == {*found.space.candidates} | rejected
    assert all(d.reason for d in found.discarded)


def test_the_default_is_in_the_race_to_the_end_however_slow() -> None:
    law = near_to(128, 160)
    default = search(Simulation(law)).space.default
    found = search(Simulation(lambda s: 9.0 if s == default else law(s)))
    assert found.default is not None
    assert found.default.schedule == default
    assert found.best is not None
    assert found.default.remark is None
    assert found.default.times.samples == found.best.times.samples


def test_what_is_wrong_or_spills_is_never_timed() -> None:
    law = near_to(128, 160)

    def wrong(s: Schedule) -> float:
        return -1.0 if s.tile_kv == 160 else law(s)

    found = search(Simulation(wrong, spills=lambda s: s.tile_kv == 144))
    assert found.best is not None
    stages = {(d.schedule.tile_kv, d.stage) for d in found.discarded}
    assert {(160, Stage.EXAM), (144, Stage.COMPILER)} <= stages
    assert not {m.schedule.tile_kv for m in found.measured} & {144, 160}


def test_a_default_that_spills_is_timed_all_the_same() -> None:
    found = search(Simulation(near_to(128, 160), spills=lambda s: True))
    assert [m.schedule for m in found.measured] == [found.space.default]


def test_nothing_left_is_an_error_that_lists_every_reason() -> None:
    with pytest.raises(AttnError) as caught:
        search(Simulation(lambda s: -1.0))
    (found,) = caught.value.diagnostics
    assert found.code == "A471"
    assert "causal" in found.message()
    assert (found.label_text() or "").count("it computes nothing") > 10


def test_a_candidate_that_does_not_compile_costs_only_itself() -> None:
    simulation = Simulation(near_to(128, 160))
    build = simulation.build

    def refuse(schedule: Schedule) -> Build:
        if schedule.tile_kv == 160:
            raise AttnError(UnknownTarget(None, "sm_1", "sm_80", None))
        return build(schedule)

    simulation.build = refuse  # type: ignore[method-assign]
    found = search(simulation)
    refused = [d.reason for d in found.discarded if d.stage is Stage.COMPILER]
    assert refused
    assert set(refused) == {"unknown target `sm_1`"}
    assert found.best is not None


def test_the_budget_ends_a_race_and_what_was_measured_is_kept() -> None:
    plan = Plan(budget_s=2.0, compilers=1, race=RacePlan(min_rounds=2000, max_rounds=2000))
    simulation = Simulation(near_to(128, 160), build_s=0.02)
    found = search(simulation, plan)
    assert found.best is not None
    assert 1.5 < simulation.seconds < 2.5
    assert found.best.times.samples < 2000


def test_who_is_checked_for_too_long_leaves_no_time_for_the_others() -> None:
    simulation = Simulation(near_to(128, 160), build_s=0.0)
    check = simulation.check

    def check_slowly(name: str, build: Build) -> Verdict:
        simulation.seconds += 2.0
        return check(name, build)

    simulation.check = check_slowly  # type: ignore[method-assign]
    found = search(simulation, Plan(most=18, beside=0, budget_s=12.0, compilers=2))
    assert len(found.measured) == 3  # 6 of 12 seconds are for compiling and checking
    assert found.default is not None
    late = [d for d in found.discarded if d.stage is Stage.BUDGET]
    assert len(late) > 10


def test_who_compiles_for_too_long_is_left_behind() -> None:
    simulation, is_over = Simulation(near_to(128, 160)), threading.Event()
    build = simulation.build

    def build_slowly(schedule: Schedule) -> Build:
        if schedule.tile_kv == 160:
            is_over.wait()
        return build(schedule)

    simulation.build = build_slowly  # type: ignore[method-assign]
    simulation._build_s = 0.0
    try:
        found = search(simulation, Plan(most=18, beside=0, budget_s=2.0, compilers=30))
    finally:
        is_over.set()
    left = {d.schedule.tile_kv for d in found.discarded if d.stage is Stage.BUDGET}
    assert left == {160}
    assert found.best is not None


@pytest.mark.parametrize("sample", [1, 2, 30, 90])
def test_an_interrupt_keeps_what_was_measured(sample: int) -> None:
    simulation = Simulation(near_to(128, 160))
    simulation.interrupt_at = sample
    found = search(simulation)
    assert found.is_interrupted
    assert bool(found.measured) == (sample > 2)
    assert simulation.samples == sample


def test_progress_says_the_best_so_far() -> None:
    heard: list[Progress] = []
    plan = Plan(budget_s=60.0, compilers=2)
    found = search(Simulation(near_to(128, 160)), plan, tell=heard.append)
    assert found.best is not None
    assert heard[0].best is None
    assert heard[-1].best is not None
    assert heard[-1].best[0].without_order() == found.best.schedule.without_order()
    spent = [p.spent for p in heard]
    assert spent == sorted(spent, key=lambda s: s or 0.0)
    assert any("compiled" in p.doing for p in heard)
    assert any("round" in p.doing for p in heard)


def test_a_plan_bounds_what_is_compiled() -> None:
    simulation = Simulation(near_to(128, 112, 3))
    search(simulation, Plan(most=9, beside=3, budget_s=None, compilers=2))
    assert 6 < len(simulation.built) == len(set(simulation.built)) <= 9


def prediction(us: float) -> Prediction:
    return Prediction(us, {})


def test_a_shortlist_has_the_default_every_family_and_then_the_best() -> None:
    def wgmma(kv: int, stages: int = 2) -> Schedule:
        return Schedule(kernel="forward_wgmma", tile_q=128, tile_kv=kv, stages=stages, warps=8)

    mma = Schedule(kernel="forward_mma", tile_q=128, tile_kv=64, stages=2, warps=4)
    slow = simt(16, 32)
    times: Mapping[Schedule, float] = {
        wgmma(176): 1.0, wgmma(176, 3): 1.0, wgmma(160): 1.1, wgmma(144): 1.2, mma: 1.9,
        wgmma(32): 2.5, slow: 99.0,
    }  # fmt: skip
    ranked = [(s, prediction(us)) for s, us in times.items()]
    assert shortlist(ranked, wgmma(32), 5) == [
        wgmma(32), wgmma(176), mma, wgmma(160), wgmma(144),
    ]  # fmt: skip
    assert shortlist(ranked, mma, 1) == [mma]
    assert shortlist(ranked, mma, 9) == [mma, wgmma(176), wgmma(160), wgmma(144)]  # no further one


def test_a_shortlist_has_the_best_of_each_height_and_what_is_beside_the_default() -> None:
    def wgmma(q: int, kv: int, stages: int = 2, **order: Any) -> Schedule:
        return Schedule(
            kernel="forward_wgmma", tile_q=q, tile_kv=kv, stages=stages, warps=q // 16, **order
        )

    late = wgmma(128, 64, late_values=0, early_weights=64, late_keys=True)
    widths = [wgmma(128, kv) for kv in range(176, 63, -16)]
    high, higher = wgmma(192, 64), wgmma(256, 64)
    times = {s: 1.0 + 0.01 * i for i, s in enumerate(widths)}
    times |= {late: 1.07, wgmma(128, 64, 3): 1.07, high: 1.15, higher: 1.3}
    ranked = [(s, prediction(us)) for s, us in sorted(times.items(), key=lambda one: one[1])]
    default = wgmma(128, 64)
    assert shortlist(ranked, default, 16) == [
        default, wgmma(128, 176), high, wgmma(128, 160), wgmma(128, 144), wgmma(128, 128), late,
        wgmma(128, 80), wgmma(128, 64, 3),
    ]  # fmt: skip


def test_a_default_that_leads_is_looked_beside_once() -> None:
    simulation = Simulation(near_to(128, 128), noise=0.002)
    found = search(simulation)
    assert found.best is found.default is not None
    assert len(simulation.built) <= Plan().most - Plan().beside


# ---- on the CPU ------------------------------------------------------------------------------


@pytest.mark.usefixtures("host_compiler")
def test_a_search_survives_every_kind_of_harm() -> None:
    subject, call = subject_of(), call_of()
    good = (simt(16, 32), simt(8, 32))
    broken = dict(zip(_schedules(), BREAKS.values(), strict=False))
    space = Space(good[0], (*good, *broken), (), (), "sm_80")
    model = CostModel(subject.attention, call, DeviceClass.named("a100-80g"))
    stand = Worker(
        HostBench, lambda: exams_of(subject, call), Patience(open_s=60, check_s=6, sample_s=6)
    )
    plan = Plan(
        takes_all=True, beside=0, budget_s=None, compilers=2,
        race=RacePlan(min_rounds=2, max_rounds=2, sample_ms=0.0, warm_ms=0.0), final=None,
    )  # fmt: skip
    found = Search("causal", space, model, BrokenBuilder(subject, broken), stand, plan).run()
    assert {m.schedule for m in found.measured} == set(good)
    assert {d.schedule: d.stage for d in found.discarded} == dict.fromkeys(broken, Stage.EXAM)
    assert stand.restarts == 3  # endless, crashing, exiting


def _schedules() -> list[Schedule]:
    return [simt(q, kv) for q in (8, 16, 32) for kv in (8, 16, 24)]
