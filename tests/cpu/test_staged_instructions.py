"""The instructions of common/staged.cuh on the CPU: values, what is read, order, banks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attngen.codegen.staged_reads import Pattern, StagedRead, _pitch
from attngen.cpu.faults import Fault
from attngen.cpu.run import Mode
from attngen.ir.expr import Const
from tests.cpu.host_kernels import ALL_LANDINGS, ALL_MODES, Case, body_of
from tests.cpu.planted import fault_of

Build = Callable[..., Path]
Array = npt.NDArray[Any]

LANES = np.arange(32)
CHUNK = 16  # bytes of one copy

each_mode = pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
each_landing = pytest.mark.parametrize(
    "landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower()
)


# ---- copies and elements ------------------------------------------------------------------------


def staged_case(last: int = CHUNK, there: int | None = None) -> Case:
    """Every number of bytes of 16; of the last lane's part `last` are copied and `there` exist."""
    rng = np.random.default_rng(3)
    sizes = (LANES % (CHUNK + 1)).astype(np.int32)
    sizes[-1] = last
    whole = rng.integers(1, 256, (32, CHUNK), dtype=np.uint8)
    parts = np.where(np.arange(CHUNK) < sizes[:, None], whole, 0).astype(np.uint8)
    words = rng.integers(1, 1 << 32, 32, dtype=np.uint32)
    even = np.where(LANES % 2 == 0, words, 0).astype(np.uint32)
    is_there = np.arange(64) % 3 != 0
    small = rng.integers(1, 256, 64, dtype=np.uint8)
    halves = rng.integers(1, 1 << 16, 64, dtype=np.uint16)
    floats = rng.standard_normal(64).astype(np.float32)
    return Case(
        "mma_staged",
        {
            "parts": whole.ravel()[: 31 * CHUNK + (last if there is None else there)],
            "sizes": sizes,
            "words": words,
            "bytes": small,
            "halves": halves,
            "floats": floats,
            "parts_back": np.empty((32, CHUNK // 4), np.uint32),
            "words_back": np.empty(32, np.uint32),
            "staged_back": np.empty(32, np.uint32),
            "bytes_back": np.empty(64, np.int32),
            "halves_back": np.empty(64, np.int32),
            "floats_back": np.empty(64, np.float32),
        },
        {
            "parts_back": parts.view(np.uint32),
            "words_back": even,
            "staged_back": even,
            "bytes_back": np.where(is_there, small, 0),
            "halves_back": np.where(is_there, halves, 0),
            "floats_back": floats,
        },
        grid=1,
        threads=32,
        shared_bytes=1216,
    )


@each_landing
@each_mode
def test_values(mode: object, landing: object, build: Build) -> None:
    staged_case().run(build("mma_staged"), mode=mode, landing=landing)


@pytest.mark.parametrize("last", range(CHUNK + 1))
def test_a_part_reads_no_byte_behind_it(last: int, build: Build) -> None:
    library = build("mma_staged")
    staged_case(last).run(library)  # its array ends there
    if last:
        found = fault_of(staged_case(last, last - 1), library)
        assert found.fault is Fault.GLOBAL_BOUNDS


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("+ 16 * lane, args.parts", "+ 16 * lane + 8, args.parts", Fault.MISALIGNED),
        ("args.parts + 16 * lane", "args.parts + 15 * lane", Fault.MISALIGNED),
        ("shared + kWords + 4 * lane", "shared + kWords + 4 * lane + 2", Fault.MISALIGNED),
        ("shared + kHalves + 2 * i", "shared + kHalves + 2 * i + 1", Fault.MISALIGNED),
        ("kFloats + 8 * next)", "kFloats + 8 * (next / 2) + 4)", Fault.MISALIGNED),
        ("shared + kBytes + i", "shared + kFilled + i", Fault.SHARED_BOUNDS),
        ("    ag_copy_wait<0>();\n", "", Fault.SHARED_RACE),
        ("<0>();\n    ag_sync_warp();\n", "<0>();\n", Fault.SHARED_RACE),
    ],
    ids=[
        "part to an odd address", "part from an odd address", "word", "element", "pair",
        "outside", "no wait", "no barrier",
    ],
)  # fmt: skip
def test_faults(old: str, new: str, fault: Fault, build: Build) -> None:
    body = body_of("mma_staged")
    assert body.count(old) == 1
    assert fault_of(staged_case(), build("mma_staged", body.replace(old, new))).fault is fault


# ---- arrivals behind copies ---------------------------------------------------------------------


def arrive_case() -> Case:
    given = np.random.default_rng(4).standard_normal(64).astype(np.float32)
    return Case(
        "wgmma_staged",
        {"given": given, "out": np.empty(32, np.float32)},
        {"out": given[:32] + given[32:]},
        grid=1,
        threads=64,
        shared_bytes=512,
    )


@each_landing
@each_mode
def test_who_waits_for_the_barrier_sees_copies_and_stores(
    mode: object, landing: object, build: Build
) -> None:
    arrive_case().run(build("wgmma_staged"), mode=mode, landing=landing)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"    ag_barrier_wait(barrier, 0);\n": ""}, {Fault.SHARED_RACE, Fault.UNINITIALISED_READ}),
        (
            {"    ag_copy_arrive(barrier);\n": "", "init(barrier, 64)": "init(barrier, 32)"},
            {Fault.SHARED_RACE, Fault.UNFINISHED_COPY},
        ),
        (
            {"    ag_copy_arrive(barrier);\n": "    ag_barrier_arrive(barrier);\n"},
            {Fault.SHARED_RACE, Fault.UNFINISHED_COPY},
        ),
        ({"    ag_copy_arrive(barrier);\n": ""}, {Fault.DEADLOCK, Fault.UNFINISHED_COPY}),
    ],
    ids=[
        "a reader does not wait", "nobody arrives behind copies", "arrives before copies",
        "lacks arrivals",
    ],
)  # fmt: skip
def test_who_does_not_wait_is_found(
    changes: dict[str, str], faults: set[Fault], build: Build
) -> None:
    body = body_of("wgmma_staged")
    for old, new in changes.items():
        assert body.count(old) == 1
        body = body.replace(old, new)
    library = build("wgmma_staged", body)
    for mode in (Mode.RING, Mode.EAGER_LAST):
        assert fault_of(arrive_case(), library, mode=mode).fault in faults


# ---- banks --------------------------------------------------------------------------------------


def pitch_of(element_bytes: int, keys: int) -> int:
    return _pitch(StagedRead(Const(0), Pattern.TILE, element_bytes), keys)


def places_of_pairs(element_bytes: int, pitch: int) -> Array:
    """What a warp reads of a tile at once: 8 rows, and of each four pairs of keys."""
    return LANES // 4 * pitch + LANES % 4 * 2 * element_bytes


def places_in_box(element_bytes: int, span: int) -> Array:
    """The same of a box that a tensor copy has brought, with rows of `span` bytes."""
    places = places_of_pairs(element_bytes, span)
    return places ^ (places >> 3 & span - 16)


@pytest.mark.parametrize(
    ("places", "element_bytes", "is_pair", "wavefronts", "least"),
    [
        (LANES, 1, False, 1, 1),  # four lanes want a word
        (LANES * 0, 1, False, 1, 1),
        (LANES * 4 + 3, 1, False, 1, 1),
        (LANES * 128 + LANES % 4, 1, False, 32, 1),
        (LANES * 2, 2, False, 1, 1),
        (LANES * 64, 2, False, 16, 1),
        (LANES * 4, 4, False, 1, 1),
        (LANES * 2, 1, True, 1, 1),
        (LANES * 8, 4, True, 2, 2),  # 8 bytes a lane: half a warp at a time
        *(
            (places_of_pairs(size, pitch_of(size, keys)), size, True, n, n)
            for size, n in ((1, 1), (2, 1), (4, 2))
            for keys in (32, 64, 128)
        ),
        (places_of_pairs(2, 128), 2, True, 8, 1),  # without what a row has more
        *((places_in_box(1, span), 1, True, 1, 1) for span in (16, 32, 64, 128)),
        *((places_in_box(2, span), 2, True, 1, 1) for span in (32, 64, 128)),
        (places_in_box(4, 128), 4, True, 4, 2),  # every chunk of a row has one of the next row's
    ],
)
def test_wavefronts(
    places: Array, element_bytes: int, is_pair: bool, wavefronts: int, least: int, build: Build
) -> None:
    for writes in (0, 1) if not is_pair and len(set(places)) > 1 else (0,):
        case = Case(
            "mma_banks_staged",
            {
                "places": places.astype(np.int32),
                "sum": np.empty(32, np.int32),
                "bytes": element_bytes,
                "is_pair": int(is_pair),
                "writes": writes,
            },
            {},
            grid=1,
            threads=32,
            shared_bytes=4096,
            writable=("sum",),
        )
        report = case.launch(build("mma_banks_staged"))
        assert (report.shared_wavefronts, report.shared_wavefronts_least) == (wavefronts, least)
