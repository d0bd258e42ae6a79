"""Records for tests: one to vary, and how hypothesis varies it."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

from hypothesis import strategies as st

from attngen.ir.schedule import Schedule
from attngen.tuning.device_class import DeviceClass
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

H200 = DeviceClass.named("h200")
H100 = DeviceClass.named("h100-sxm")
A100 = DeviceClass.named("a100-80g")

SIZES = {"B": 2, "Hq": 16, "Hkv": 16, "Sq": 4096, "Skv": 4096, "Dqk": 128, "Dv": 128}


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


OP = digest("op")


def problem(**sizes: int) -> Problem:
    return Problem.of("bf16", {**SIZES, **sizes}, H200.sm_count)


def times(median: float, spread: float = 0.4, **others: Any) -> Measurement:
    """A measurement whose interval is so much wide on both sides."""
    usual: dict[str, Any] = {"count": 20, "mode": Mode.GRAPH, "l2": L2.WARM}
    return Measurement(
        median_us=median, low_us=median - spread, high_us=median + spread, **{**usual, **others}
    )


def make_record(median: float = 400.0, tile: tuple[int, int] = (128, 128), **others: Any) -> Record:
    """A record as it is read from a file; `others` replace its fields."""
    q, kv = tile
    usual = Record(
        op=OP,
        device=H200,
        problem=problem(),
        schedule=Schedule(tile_q=q, tile_kv=kv, stages=2, warps=8, splits=1, kernel="forward_mma"),
        is_default=False,
        sass=digest(f"code {tile}"),
        source=digest(f"text {tile}"),
        resources=Resources(registers=168, spill_bytes=0, shared_bytes=1024 * q),
        times=times(median),
        checked=Checked(max_error=0.002, bound_ratio=0.25, seed=7),
        environment=Environment(nvrtc="13.0.88", driver="580.159.04"),
        provenance={"at": "2026-11-29T19:40:00Z", "sm_mhz": 1980},
    )
    return replace(usual, **others)


def _measurement(low: int, below: int, above: int, count: int, mode: Mode, l2: L2) -> Measurement:
    """From tenths of a microsecond, as a file has them."""
    return Measurement(
        low_us=low / 10,
        median_us=(low + below) / 10,
        high_us=(low + below + above) / 10,
        count=count,
        mode=mode,
        l2=l2,
    )


measurements = st.builds(
    _measurement,
    st.integers(1, 100),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from(Mode),
    st.sampled_from(L2),
)

records = st.builds(
    make_record,
    tile=st.tuples(st.sampled_from([64, 128]), st.sampled_from([64, 128])),
    times=measurements,
    op=st.sampled_from([OP, digest("another op")]),
    device=st.sampled_from([H200, H100]),
    problem=st.sampled_from([problem(), problem(Skv=8192)]),
    sass=st.sampled_from([digest("code"), digest("other code")]),
    environment=st.sampled_from(
        [Environment(nvrtc="13.0.88", driver="580"), Environment(nvrtc="13.5.37", driver="580")]
    ),
    provenance=st.sampled_from([{}, {"host": "one"}, {"host": "two"}]),
)
"""From a small world, so that records of the same thing meet."""
