"""One cell, from inputs to records, with peers that are right, wrong, or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attngen.bench.machines import Array, Machine, NumpyMachine, Timer
from attngen.bench.timing import Plan
from benchmarks.cells import Cell
from benchmarks.peers import Inputs, Peer, Prepared, RefusedError, make_peer
from benchmarks.run_cell import DeviceLostError, Lane, run_cell, tflops
from benchmarks.variants import Variant

CELL = Cell("variants", "window", "bf16", B=2, S=64, Hq=4, Hkv=2, D=16, Dv=16)
PLAN = Plan(min_rounds=2, max_rounds=2, sample_ms=0.0)
FIELDS = {
    *("suite", "peer", "kernel", "dtype", "B", "S", "Hq", "Hkv", "D", "Dv", "mask", "variant"),
    *("ms", "tflops", "max_err", "low_ms", "high_ms", "samples", "mode", "bound_ratio", "rms_err"),
}


class Altered:
    """attngen under another name, with something done to its output."""

    def __init__(
        self, machine: Machine, alter: Callable[[Array], Array], name: str = "fa3"
    ) -> None:
        self.name = name
        self._alter = alter
        self._own = make_peer("attngen", machine, None)

    def missing(self) -> str | None:
        return None

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        prepared = self._own.prepare(cell, variant, inputs)
        return Prepared(lambda: self._alter(prepared.call()), prepared.read, "altered")


class Raising:
    name = "fa4"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def missing(self) -> str | None:
        return None

    def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
        raise self._error


def run_one(peer: Peer, machine: Machine | None = None) -> dict[str, Any]:
    (found,) = run_cell(CELL, [Lane(peer.name, peer)], machine or NumpyMachine(), PLAN)
    return found


def test_a_right_result_is_timed_and_recorded() -> None:
    found = run_one(make_peer("attngen", NumpyMachine(), None))
    assert found.keys() >= FIELDS
    assert 0 < found["low_ms"] <= found["ms"] <= found["high_ms"]
    assert 0 < found["rms_err"] <= found["max_err"] < 0.05
    assert 0 < found["bound_ratio"] <= 1
    assert found["poisoned"] is True
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_work_is_counted_over_the_pairs_that_attend() -> None:
    found = run_one(make_peer("attngen", NumpyMachine(), None))
    window = 8
    pairs = sum(min(row + 1, window) for row in range(CELL.S))
    flops = CELL.B * CELL.Hq * pairs * (2 * CELL.D + 2 * CELL.Dv)
    assert found["tflops"] == pytest.approx(flops / (found["ms"] * 1e-3) / 1e12, rel=1e-3)


def test_the_convention_of_the_field_is_4_b_h_s_s_d() -> None:
    cell = Cell("forward", "full", "bf16", B=2, S=8192, Hq=16, Hkv=16, D=128, Dv=128)
    assert tflops(cell, 2 * 8192**2, 1.0) == pytest.approx(4 * 2 * 16 * 8192**2 * 128 / 1e9)


@pytest.mark.parametrize("name", ["attngen", "fa3"])
def test_a_wrong_result_is_not_timed(name: str) -> None:
    def alter(output: Array) -> Array:
        return output + np.asarray(0.25, output.dtype)

    found = run_one(Altered(NumpyMachine(), alter, name))
    assert found["ms"] is None
    assert found["reason"].startswith("wrong: ")
    assert "times the bound" in found["reason"]


def test_the_bound_holds_for_attngen_and_four_times_it_for_others() -> None:
    """bf16 outputs of size 1 are allowed 2^-8 at least; 2^-6 is more than that."""

    def alter(output: Array) -> Array:
        wide = output.astype(np.float32)
        return np.where(np.abs(wide) > 0.3, wide * (1 + 2.0**-6), wide)

    own, other = (run_one(Altered(NumpyMachine(), alter, name)) for name in ("attngen", "fa3"))
    assert own["ms"] is None
    assert other["ms"] is not None
    assert 1 < other["bound_ratio"] <= 4


def test_a_row_that_is_not_written_is_noticed() -> None:
    """A library with an output of its own, of which it forgets one row after the first calls."""

    class Forgetful(Altered):
        def prepare(self, cell: Cell, variant: Variant, inputs: Inputs) -> Prepared:
            prepared = self._own.prepare(cell, variant, inputs)
            right = prepared.call().copy()
            output = right.copy()

            def call() -> Array:
                output[:, :37], output[:, 38:] = right[:, :37], right[:, 38:]
                return output

            return Prepared(call, prepared.read, "forgetful")

    found = run_one(Forgetful(NumpyMachine(), lambda output: output))
    assert found["ms"] is None
    assert "not written everywhere" in found["reason"]


def test_refusals_and_errors_are_recorded_with_their_reason() -> None:
    refused = run_one(Raising(RefusedError("no windows here")))
    assert (refused["ms"], refused["reason"]) == (None, "no windows here")
    failed = run_one(Raising(NotImplementedError("head dim\nand much more")))
    assert failed["reason"] == "NotImplementedError: head dim"


def test_records_keep_the_order_of_the_lanes() -> None:
    machine = NumpyMachine()
    lanes = [
        Lane("attngen: auto", make_peer("attngen", machine, None)),
        Lane("fa4", Raising(RefusedError("no"))),
        Lane("fa3", Altered(machine, lambda output: output)),
    ]
    found = run_cell(CELL, lanes, machine, PLAN)
    assert [r["lane"] for r in found] == ["attngen: auto", "fa4", "fa3"]
    assert [r["ms"] is None for r in found] == [False, True, False]


def test_a_lost_device_ends_the_run() -> None:
    class Lost(NumpyMachine):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(DeviceLostError, match="fa4 left the GPU in an error: RuntimeError"):
        run_one(Raising(RuntimeError("launch failed")), Lost())


def test_a_fault_while_timing_ends_the_run() -> None:
    class FailingTimer:
        mode = "eager"

        def __call__(self, repeats: int) -> float:
            raise RuntimeError("an illegal memory access was encountered")

    class Failing(NumpyMachine):
        def timer(self, call: Callable[[], Array]) -> Timer:
            return FailingTimer()

    machine = Failing()
    with pytest.raises(DeviceLostError, match="while timing: RuntimeError: an illegal"):
        run_one(make_peer("attngen", machine, None), machine)


def test_grouped_queries_and_a_schedule_reach_the_kernel() -> None:
    peer = make_peer("attngen", NumpyMachine(), "kernel forward_simt; tile q = 16, kv = 16")
    (found,) = run_cell(CELL, [Lane("attngen", peer)], NumpyMachine(), PLAN)
    assert found["schedule"] == "kernel forward_simt; tile q = 16, kv = 16"
    assert found["ms"] > 0
