"""One cell: every peer prepared and checked, and those that are right timed side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeAlias, final

from attngen.bench.machines import Machine, Timer
from attngen.bench.timing import Plan, Times, measure
from attngen.record import record
from benchmarks.cells import Cell
from benchmarks.check import Expected, Verdict, choose_rows, compute_expected, judge
from benchmarks.peers import Inputs, Peer, Prepared, RefusedError
from benchmarks.variants import Variant, attended_pairs, make_variant

__all__ = [
    "DeviceLostError",
    "Lane",
    "Ready",
    "check_once",
    "describe_error",
    "make_expected",
    "make_inputs",
    "make_ready",
    "measure_ready",
    "run_cell",
    "tflops",
]

Record: TypeAlias = dict[str, Any]

_OTHERS_LIMIT: Final = 4.0
"""The oracle's bound is attngen's promise.  Who promises nothing is wrong beyond four times it."""


class DeviceLostError(Exception):
    """After a fault in a kernel the GPU does nothing more for this process."""


@final
@record(eq=False)
class Lane:
    """A peer as it is timed; attngen has one lane for each schedule."""

    name: str
    peer: Peer
    schedule: str | None = None


@final
@record(eq=False)
class Ready:
    """A lane whose result is right."""

    prepared: Prepared
    verdict: Verdict
    timer: Timer
    facts: Record


def run_cell(
    cell: Cell, lanes: Sequence[Lane], machine: Machine, plan: Plan, seed: int = 0
) -> list[Record]:
    """One record for each lane: its time, or `ms` None and the reason.

    Errors:  DeviceLostError.
    """
    variant = make_variant(cell)
    inputs = make_inputs(cell, variant, machine, seed)
    expected = make_expected(cell, variant, inputs, machine, seed)
    ready: dict[str, Ready] = {}
    records: dict[str, Record] = {}
    for lane in lanes:
        about = _about(cell, variant, lane)
        try:
            ready[lane.name] = make_ready(lane, cell, variant, inputs, expected, machine)
        except RefusedError as refusal:
            records[lane.name] = {**about, "ms": None, "reason": str(refusal)}
        except Exception as error:  # a library's own errors have no common base
            records[lane.name] = {**about, "ms": None, "reason": describe_error(error)}
            _require_device(machine, lane)
    times = measure_ready(ready, plan)
    pairs = attended_pairs(cell, variant)
    for lane in lanes:
        if lane.name in ready:
            about = _about(cell, variant, lane)
            records[lane.name] = about | _result(cell, ready[lane.name], times[lane.name], pairs)
    return [records[lane.name] for lane in lanes]


def make_inputs(cell: Cell, variant: Variant, machine: Machine, seed: int) -> Inputs:
    """Normally distributed q, k, v, and what the variant captures."""
    q = machine.randn((cell.B, cell.S, cell.Hq, cell.D), cell.dtype, 3 * seed)
    k = machine.randn((cell.B, cell.S, cell.Hkv, cell.D), cell.dtype, 3 * seed + 1)
    v = machine.randn((cell.B, cell.S, cell.Hkv, cell.Dv), cell.dtype, 3 * seed + 2)
    tensors = {name: machine.asarray(host) for name, host in variant.tensors.items()}
    tables = {name: machine.asarray(host) for name, host in variant.tables.items()}
    return Inputs(q, k, v, tensors, tables)


def make_expected(
    cell: Cell, variant: Variant, inputs: Inputs, machine: Machine, seed: int
) -> Expected:
    """The right answer for a sample of rows, from the very values that the peers get."""
    q, k, v = (machine.asnumpy(x) for x in (inputs.q, inputs.k, inputs.v))
    rows = choose_rows(cell.B, cell.Hq, cell.S, seed)
    return compute_expected(variant.text, (q, k, v), variant.tensors, cell.dtype, rows)


def check_once(
    prepared: Prepared, is_own: bool, expected: Expected, machine: Machine
) -> tuple[Verdict, Any]:
    """Call once and judge; the verdict and the library's output.

    Errors:  RefusedError when the result is wrong, with how far.
    """
    output = prepared.call()
    result = prepared.read(output)
    if not machine.is_finite(result):
        raise RefusedError("wrong: its output is not finite, or not written everywhere")
    verdict = judge(machine.asnumpy(result[:, expected.rows]), expected)
    limit = 1.0 if is_own else _OTHERS_LIMIT
    if not verdict.bound_ratio <= limit:
        raise RefusedError(
            f"wrong: {verdict.max_err:.2g} off, {verdict.bound_ratio:.2g} times the bound"
        )
    return verdict, output


def tflops(cell: Cell, pairs: float, ms: float) -> float:
    """10^12 floating point operations a second: two products of 2 D and 2 Dv for each pair.

    pairs:  of a row and a key, over all sequences, for one head.
    """
    return 2.0 * cell.Hq * pairs * (cell.D + cell.Dv) / (ms * 1e9)


def describe_error(error: BaseException) -> str:
    """The kind of an error and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def make_ready(
    lane: Lane,
    cell: Cell,
    variant: Variant,
    inputs: Inputs,
    expected: Expected,
    machine: Machine,
) -> Ready:
    """A lane behind its first call, when its result is right.

    Errors:  RefusedError, and a library's own.
    """
    start = time.perf_counter()
    prepared = lane.peer.prepare(cell, variant, inputs)
    prepared.call()  # compiles where the library does so at the first call
    machine.synchronize()
    prepare_ms = (time.perf_counter() - start) * 1e3
    poisoned = _poison_output(prepared, cell, machine)
    verdict, output = check_once(prepared, lane.peer.name == "attngen", expected, machine)
    facts = {
        "prepare_ms": round(prepare_ms, 1),
        "poisoned": machine.address(output) in poisoned,
    }
    return Ready(prepared, verdict, machine.timer(prepared.call), facts)


def _poison_output(prepared: Prepared, cell: Cell, machine: Machine) -> frozenset[int]:
    """Make sure that an element which the next call does not write is NaN.

    A library that always returns the same array has it filled; any other allocates its output,
    most likely where an array of the same size was freed.  Returns the poisoned addresses.
    """
    first = prepared.call()
    address = machine.address(first)
    second = prepared.call()
    if second is first:
        machine.poison(first)
        return frozenset({address})
    del first, second
    return machine.poison_free_memory((cell.B, cell.S, cell.Hq, cell.Dv), cell.dtype)


def measure_ready(ready: Mapping[str, Ready], plan: Plan) -> dict[str, Times]:
    """Times of all lanes, in turns.

    Errors:  DeviceLostError.
    """
    try:
        return measure({name: found.timer for name, found in ready.items()}, plan)
    except Exception as error:  # every call went well before: this is a fault on the device
        raise DeviceLostError(f"while timing: {describe_error(error)}") from error


def _about(cell: Cell, variant: Variant, lane: Lane) -> Record:
    return {
        **asdict(cell),
        "cell": cell.name,
        "mask": variant.mask_name,
        "peer": lane.peer.name,
        "lane": lane.name,
    }


def _result(cell: Cell, ready: Ready, times: Times, pairs: float) -> Record:
    mask_ms = ready.prepared.mask_ms
    return {
        "kernel": ready.prepared.kernel,
        "schedule": ready.prepared.schedule,
        "mode": ready.timer.mode,
        "ms": _significant(times.ms),
        "low_ms": _significant(times.low_ms),
        "high_ms": _significant(times.high_ms),
        "samples": times.samples,
        "tflops": _significant(tflops(cell, pairs, times.ms)),
        "max_err": _significant(ready.verdict.max_err),
        "rms_err": _significant(ready.verdict.rms_err),
        "bound_ratio": _significant(ready.verdict.bound_ratio),
        "mask_ms": None if mask_ms is None else _significant(mask_ms),
        **ready.facts,
    }


def _significant(value: float) -> float:
    """Five digits; the last of them says nothing any more."""
    return float(f"{value:.5g}")


def _require_device(machine: Machine, lane: Lane) -> None:
    try:
        machine.synchronize()
    except Exception as error:
        raise DeviceLostError(
            f"{lane.name} left the GPU in an error: {describe_error(error)}"
        ) from error
