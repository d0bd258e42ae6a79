"""How long it takes to find the schedule of a call.

    python -m benchmarks.lookup [--records 48]

    first     reading and checking a file of so many records, and choosing the winner
    again     the same question once more
    kernel    what a full call asks: its problem, the question, and the answer once more

Prints the median and the lowest of many repeats, in microseconds.  A steady call
(`benchmarks/steady_call.py`) asks nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import attngen
from attngen.ir.schedule import Schedule
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.lookup import Lookup, Question
from attngen.tuning.measurement import (
    L2,
    Checked,
    Environment,
    Measurement,
    Mode,
    Record,
    Resources,
)
from attngen.tuning.problem import Problem
from attngen.tuning.store import Contents, Store

REPEATS = 50
SHAPE = {"B": 2, "Hq": 16, "Hkv": 16, "Sq": 4096, "Skv": 4096}
CAUSAL = "attention causal {\n    mask kv <= qpos\n}\n"


def make_records(count: int, device: DeviceClass) -> list[Record]:
    """Made-up records of one problem, as a tuning run leaves them."""
    problem = Problem.of("bf16", {**SHAPE, "Dqk": 128, "Dv": 128}, device.sm_count)
    usual = Record(
        op="0" * 64,
        device=device,
        problem=problem,
        schedule=Schedule(tile_q=64, tile_kv=64, stages=1, warps=4, kernel="forward_mma"),
        is_default=False,
        sass="0" * 64,
        source="0" * 64,
        resources=Resources(registers=168, spill_bytes=0, shared_bytes=65536),
        times=Measurement(
            median_us=400.0, low_us=399.0, high_us=401.0, count=20, mode=Mode.GRAPH, l2=L2.WARM
        ),
        checked=Checked(max_error=0.002, bound_ratio=0.25, seed=0),
        environment=Environment(nvrtc="13.0.88", driver="580.159.04"),
        provenance={},
    )
    return [replace(usual, sass=f"{i:064x}") for i in range(count)]


def measure(label: str, call: Callable[[], object], calls: int) -> None:
    times = [t / calls * 1e6 for t in timeit.repeat(call, number=calls, repeat=REPEATS)]
    print(f"{label:<8} {median(times):10.1f} {min(times):10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=48)
    count = parser.parse_args().records
    device = DeviceClass.named("h200")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ATTNGEN_CACHE_DIR"] = folder
        records = make_records(count, device)
        store = Store(Path(folder) / "tuned")
        store.add(Contents(tuple(records)))
        question = Question(records[0].op, records[0].problem, device, Schedule())
        lookup = Lookup([store])
        kernel = attngen.compile_text(CAUSAL, dtype="bf16", head_dim=128)

        def first() -> None:
            lookup.forget()
            lookup.find(question, lambda schedule: ())

        print(f"{count} records\n{'':<8} {'median us':>10} {'lowest us':>10}")
        measure("first", first, 1)
        measure("again", lambda: lookup.find(question, lambda schedule: ()), 500)
        measure("kernel", lambda: kernel.find_schedule(device, SHAPE), 500)


if __name__ == "__main__":
    main()
