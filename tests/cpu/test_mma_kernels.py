"""Tensor-core kernels on the CPU: right ones in every mode and landing, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attngen.cpu.errors import CpuRunFault
from attngen.cpu.faults import Fault
from attngen.cpu.run import Landing, Mode
from attngen.diagnostics.diagnostic import AttnError
from tests.cpu.host_kernels import (
    ALL_LANDINGS,
    ALL_MODES,
    Case,
    body_of,
    for_element,
    gemm_case,
    kernel_text,
)
from tests.cpu.planted import RACE, RACE_OR_UNWRITTEN, Planted, fault_of
from tests.cpu.test_mma_instructions import matrices_case, products_case, scalars_case

Build = Callable[..., Path]

each_mode = pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
each_landing = pytest.mark.parametrize(
    "landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower()
)


@each_mode
@each_landing
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_gemm(element: str, mode: Mode, landing: Landing, build: Build) -> None:
    library = build("mma_gemm", for_element(body_of("mma_gemm"), element))
    case = gemm_case(element=element)
    case.run(library, mode=mode, landing=landing, seed=5)
    assert case.report is not None
    assert case.report.shared_wavefronts == case.report.shared_wavefronts_least > 0


@each_landing
@pytest.mark.parametrize("sizes", [(1, 8, 8), (64, 64, 32), (65, 128, 40), (7, 200, 1000)])
def test_gemm_of_any_size(sizes: tuple[int, int, int], landing: Landing, build: Build) -> None:
    gemm_case(*sizes).run(build("mma_gemm"), landing=landing)


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_agree(seed: int, build: Build) -> None:
    gemm_case(64, 64, 96).run(build("mma_gemm"), mode=Mode.RANDOM, seed=seed)


@each_landing
def test_is_right_without_checks(landing: Landing, build: Build) -> None:
    gemm_case().run(build("mma_gemm"), check=False, landing=landing)


# ---- planted faults ---------------------------------------------------------------------------

PLANTED = [
    # Copies, and who waits for them.
    Planted("no wait", "mma_gemm", "ag_copy_wait<1>();", "", RACE_OR_UNWRITTEN),
    Planted(
        "a wait that is too weak by one",
        "mma_gemm",
        "ag_copy_wait<1>();",
        "ag_copy_wait<2>();",
        RACE_OR_UNWRITTEN,
    ),
    Planted(
        "copies that are in no group",
        "mma_gemm",
        "load(args, shared, row0, column0, 0);\n    ag_copy_commit();",
        "load(args, shared, row0, column0, 0);",
        RACE_OR_UNWRITTEN,
    ),
    Planted(
        "copies of the loop that are in no group",
        "mma_gemm",
        "k0 + kStep);\n        ag_copy_commit();",
        "k0 + kStep);",
        RACE_OR_UNWRITTEN,
    ),
    Planted(
        "one step too many is loaded",
        "mma_gemm",
        "if (k0 + kStep < args.depth) load",
        "load",
        {Fault.UNFINISHED_COPY},
        "its copy is still on its way",
    ),
    Planted(
        "no barrier behind the wait",
        "mma_gemm",
        "ag_sync();  // this step has arrived",
        "",
        RACE_OR_UNWRITTEN,
    ),
    Planted(
        "a wait behind the barrier",
        "mma_gemm",
        "ag_copy_wait<1>();\n        ag_sync();  // this step has arrived",
        "ag_sync();\n        ag_copy_wait<1>();",
        RACE,
    ),
    Planted(
        "only a warp barrier behind the wait",
        "mma_gemm",
        "ag_sync();  // this step has arrived",
        "ag_sync_warp();",
        RACE_OR_UNWRITTEN,
    ),
    Planted(
        "no barrier before a stage is overwritten",
        "mma_gemm",
        "ag_sync();  // nobody reads it any more",
        "",
        RACE,
        "ag_sync between",
    ),
    Planted(
        "two threads copy to one place",
        "mma_gemm",
        "stage + place_a(row, chunk), from",
        "stage + place_a(row, chunk / 2), from",
        RACE,
    ),
    Planted(
        "the same place is copied to twice",
        "mma_gemm",
        "ag_copy_async(stage + place_a(row, chunk), from, is_there);",
        "ag_copy_async(stage + place_a(row, chunk), from, is_there);\n"
        "        ag_copy_async(stage + place_a(row, chunk), from, is_there);",
        RACE,
        "where its own copy at kernel.cu:",
    ),
    Planted(
        "a thread reads what it copies",
        "mma_matrices",
        "    ag_copy_wait<0>();\n",
        "    ag_u32 early[4];\n    ag_shared_load16(early, shared + lane * 16);\n"
        "    ag_copy_wait<0>();\n",
        RACE,
        "of shared memory, where its own copy at kernel.cu:",
    ),
    Planted(
        "a thread overwrites what it copies",
        "mma_matrices",
        "    ag_copy_commit();\n",
        "    ag_shared_store4(shared + lane * 16 + 8, 0);\n    ag_copy_commit();\n",
        RACE,
        ", in no group, is still on its way",
    ),
    Planted(
        "the source of a copy is overwritten",
        "mma_matrices",
        "    ag_copy_commit();\n",
        "    ag_copy_commit();\n    ag_store((ag_u32*)args.matrices + lane * 4 + 1, 7);\n",
        {Fault.READ_ONLY, Fault.GLOBAL_RACE},
    ),
    # Addresses.
    Planted(
        "a source that is not aligned",
        "mma_gemm",
        "args.a + (row0 + row) * args.depth + k0 + chunk * 8;",
        "args.a + (row0 + row) * args.depth + k0 + chunk * 8 + 4;",
        {Fault.MISALIGNED},
        "copies 16 bytes from global memory",
    ),
    Planted(
        "a source that is not aligned, for zeros",
        "mma_gemm",
        "ag_copy_async(stage + place_a(row, chunk), from, is_there)",
        "ag_copy_async(stage + place_a(row, chunk), from + !is_there, is_there)",
        {Fault.MISALIGNED},
    ),
    Planted(
        "a destination that is not aligned",
        "mma_gemm",
        "ag_copy_async(stage + place_a(row, chunk), from",
        "ag_copy_async(stage + place_a(row, chunk) + 8, from",
        {Fault.MISALIGNED, Fault.SHARED_BOUNDS},
        "writes 16 bytes at byte",
    ),
    Planted(
        "a destination outside, for zeros",
        "mma_gemm",
        "ag_copy_async(stage + place_a(row, chunk), from",
        "ag_copy_async(stage + place_a(row, chunk) + !is_there * 16384, from",
        {Fault.SHARED_BOUNDS},
        "of shared memory, which has 16384",
    ),
    Planted(
        "rows past the end",
        "mma_gemm",
        "row0 + row < args.rows && k0",
        "k0",
        {Fault.GLOBAL_BOUNDS},
        "of a, which has 27200 bytes",
    ),
    Planted(
        "a place taken for an address",
        "mma_gemm",
        "ag_shared_address(buffer, 0)",
        "0",
        {Fault.SHARED_BOUNDS},
        "at byte -",
    ),
    Planted(
        "a row of a matrix that is not aligned",
        "mma_gemm",
        "ag_load_matrices(a[i], stage + ",
        "ag_load_matrices(a[i], stage + 4 + ",
        {Fault.MISALIGNED},
        "reads 16 bytes at byte",
    ),
    Planted(
        "a word that is not aligned",
        "mma_matrices",
        "ag_shared_store4(copy + ",
        "ag_shared_store4(copy + 2 + ",
        {Fault.MISALIGNED},
        "writes 4 bytes at byte",
    ),
    Planted(
        "a store of 16 bytes that is not aligned",
        "mma_matrices",
        "ag_store16(args.plain + lane * 4",
        "ag_store16(args.plain + lane * 4 + 1",
        {Fault.MISALIGNED},
        "of plain",
    ),
    Planted(
        "a store of 16 bytes past the end",
        "mma_matrices",
        "ag_store16(args.plain + lane * 4",
        "ag_store16(args.plain + lane * 8",
        {Fault.GLOBAL_BOUNDS},
        "of plain, which has 512 bytes",
    ),
    Planted(
        "a row of a matrix that nobody has written",
        "mma_matrices",
        "ag_load_matrices(r, shared + ",
        "ag_load_matrices(r, copy + ",
        {Fault.UNINITIALISED_READ},
        "of shared memory",
    ),
    # Who has to meet.
    Planted(
        "lanes at different matrices",
        "mma_gemm",
        "            ag_load_matrices(a[i], stage",
        "            if (lane < 16)\n                ag_load_matrices(a[i], stage);\n"
        "            else\n                ag_load_matrices(a[i], stage",
        {Fault.DIVERGENT_WARP},
        "is in ag_load_matrices, but thread",
    ),
    Planted(
        "matrices plain for some lanes and transposed for others",
        "mma_matrices",
        "    ag_load_matrices(r, shared",
        "    if (lane < 7) ag_load_matrices_transposed(r, shared); else ag_load_matrices(r, shared",
        {Fault.DIVERGENT_WARP},
        "ag_load_matrices_transposed",
    ),
    Planted(
        "lanes that leave a product out",
        "mma_products",
        "    ag_mma<Element>",
        "    if (c[0] > 0.0f) ag_mma<Element>",
        {Fault.ENDED_LANE},
        "ag_mma",
    ),
    Planted(
        "a lane that leaves a vote out",
        "mma_scalars",
        "    ag_store(args.positive + i, ag_ballot(vote > 0));",
        "    if (i % 32 != 9) ag_store(args.positive + i, ag_ballot(vote > 0));",
        {Fault.DIVERGENT_WARP},
        "ag_ballot",
    ),
    Planted(
        "a shuffle from a lane that does not exist",
        "mma_scalars",
        "ag_shuffle(vote, lane)",
        "ag_shuffle(vote, lane + 1)",
        {Fault.SHUFFLE_LANE},
        "shuffles from lane 32",
    ),
    Planted(
        "a lane that leaves a shuffle out",
        "mma_scalars",
        "    ag_store(args.rotated + i, ag_shuffle(vote, lane));",
        "    if (i % 32 != 9) ag_store(args.rotated + i, ag_shuffle(vote, lane));",
        {Fault.DIVERGENT_WARP},
        "ag_shuffle",
    ),
    Planted(
        "a warp of 16 lanes",
        "mma_products",
        "constexpr int kThreads = 32",
        "constexpr int kThreads = 16",
        {Fault.DIVERGENT_WARP},
        "its warp has only 16 lanes",
    ),
    # A matrix is read by all lanes of its warp.
    Planted(
        "a matrix before all lanes have written it",
        "mma_matrices",
        "    ag_sync_warp();\n    ag_u32 r[4];",
        "    ag_u32 r[4];",
        RACE,
        "with no ag_sync_warp or ag_sync between",
    ),
    Planted(
        "a matrix of which each lane has written the row that it names",
        "mma_matrices",
        "    ag_u32 r[4];\n",
        "    ag_u32 r[4];\n"
        "    for (int i = 0; i < 4; ++i) ag_shared_store4(copy + lane * 16 + i * 4, i);\n"
        "    ag_load_matrices(r, copy + lane * 16);\n",
        RACE,
        "with no ag_sync_warp or ag_sync between",
    ),
    Planted(
        "a matrix that is overwritten without a barrier",
        "mma_matrices",
        "ag_shared_store4(copy + i * 128",
        "ag_shared_store4(shared + i * 128",
        RACE,
        "which thread",
    ),
]

CASES = {
    "mma_gemm": gemm_case,
    "mma_matrices": matrices_case,
    "mma_products": lambda: products_case("bf16"),
    "mma_scalars": scalars_case,
}


@each_mode
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_fault_is_found(planted: Planted, mode: Mode, build: Build) -> None:
    library = build(planted.kernel, planted.body())
    texts = set()
    for landing in ALL_LANDINGS:
        case = CASES[planted.kernel]()
        if "kThreads = 16" in planted.new:
            case.threads = 16
        found = fault_of(case, library, mode=mode, landing=landing, seed=11, workers=1)
        assert found.fault in planted.faults, found.text
        if found.fault is not Fault.UNINITIALISED_READ or len(planted.faults) == 1:
            assert planted.says in found.text
        texts.add(found.text)
    assert len(texts) == 1  # the landing makes no difference


@each_landing
@pytest.mark.parametrize(
    ("exchange", "used"),
    [
        (" ^ row / 2 % 4", "stage + place_a(row, chunk)"),
        (" ^ row % 8", "kBytesA + place_b(k * 16 + lane % 16"),
    ],
)
def test_chunks_exchanged_on_one_side_only(
    exchange: str, used: str, landing: Landing, build: Build
) -> None:
    body = body_of("mma_gemm")
    assert body.count(used) == 1
    name = "place_a" if "place_a" in used else "place_b"
    function = next(line for line in body.splitlines() if f"AG_DEVICE ag_u32 {name}(" in line)
    other = function.replace(name, "other").replace(exchange, "")
    body = body.replace(used, used.replace(name, "other")).replace(function, f"{function}\n{other}")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        gemm_case().run(build("mma_gemm", body), landing=landing)


@each_landing
def test_the_source_of_a_copy_may_not_be_written(landing: Landing, build: Build) -> None:
    store = "    ag_store((ag_u32*)args.matrices + lane * 4 + 1, 7);\n"
    wait = "    ag_copy_wait<0>();\n"
    body = body_of("mma_matrices")
    for before, after, expected in (
        (wait, store + wait, Fault.GLOBAL_RACE),  # in between
        (wait, wait + store, None),  # by its own thread, behind the wait
        (wait, wait + store.replace("lane * 4", "(lane ^ 1) * 4"), Fault.GLOBAL_RACE),
        (wait, wait + "    ag_sync();\n" + store.replace("lane * 4", "(lane ^ 1) * 4"), None),
        (
            wait,
            "    ag_sync();\n" + store.replace("lane * 4", "(lane ^ 1) * 4") + wait,
            Fault.GLOBAL_RACE,
        ),
    ):
        case = matrices_case()
        case.writable = ("matrices",)
        case.arguments["is_valid"][...] = 1  # type: ignore[index]
        library = build("mma_matrices", body.replace(before, after))
        found = None
        try:
            case.launch(library, landing=landing)
        except AttnError as error:
            (diagnostic,) = error.diagnostics
            assert isinstance(diagnostic, CpuRunFault)
            found = diagnostic.fault
        assert found is expected, after


def test_the_message_names_the_copy(build: Build) -> None:
    body = body_of("mma_matrices").replace("    ag_copy_wait<0>();\n", "")
    found = fault_of(matrices_case(), build("mma_matrices", body), mode=Mode.RING)
    lines = kernel_text("mma_matrices", body).splitlines()
    copy = next(i for i, text in enumerate(lines, 1) if text.startswith("    ag_copy_async("))
    load = next(i for i, text in enumerate(lines, 1) if text.startswith("    ag_load_matrices(r"))
    row = int(np.asarray(matrices_case().arguments["rows"])[0])
    assert found.text == (
        f"kernel.cu:{load}: thread 0 of block 0 reads byte {row * 16} of shared memory, where "
        f"the copy of thread {row} at kernel.cu:{copy} is still on its way"
    )


def test_addresses_are_checked_without_checks(build: Build) -> None:
    planted = next(p for p in PLANTED if p.name == "rows past the end")
    library = build(planted.kernel, planted.body())
    assert fault_of(gemm_case(), library, check=False).fault is Fault.GLOBAL_BOUNDS


# ---- wavefronts -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(
    ("swizzles", "kinds", "ratio", "least"),
    [
        (1, "reads_matrices", 1, 2 * 8 * 4),
        (0, "reads_matrices", 8, 2 * 8 * 4),
        (1, "reads_chunks", 1, 2 * 8 * 4),
        (0, "reads_chunks", 8, 2 * 8 * 4),
        (1, "writes_words", 1, 2 * 32),
        (0, "writes_words", 32, 2 * 32),
    ],
)
def test_wavefronts(
    swizzles: int, kinds: str, ratio: float, least: int, mode: Mode, build: Build
) -> None:
    names = ("reads_matrices", "reads_chunks", "writes_words")
    case = Case(
        "mma_banks",
        {
            "sum": np.zeros(64, np.uint32),
            "swizzles": swizzles,
            **{name: int(name == kinds) for name in names},
        },
        {},
        grid=1,
        threads=64,
        shared_bytes=64 * 128,
        writable=("sum",),
    )
    report = case.launch(build("mma_banks"), mode=mode)
    assert report.shared_wavefronts_least == least
    assert report.shared_wavefronts / report.shared_wavefronts_least == ratio
