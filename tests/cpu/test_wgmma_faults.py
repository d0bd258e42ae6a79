"""Mistakes with the instructions of sm_90a, planted one at a time, and how they are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attngen.cpu.build import CppCompiler
from attngen.cpu.errors import CpuLaunchRefused
from attngen.cpu.faults import Fault
from attngen.cpu.run import Landing, Mode
from attngen.diagnostics.diagnostic import AttnError
from tests.cpu.host_kernels import ALL_LANDINGS, Case
from tests.cpu.planted import RACE, RACE_OR_UNWRITTEN, Planted, fault_of
from tests.cpu.test_wgmma_forward import Forward
from tests.cpu.test_wgmma_instructions import matrices_case, products_case, ring_case
from tests.cpu.variants import build_variants


def forward_case() -> Case:
    return Forward(100, 60, causal=True).case


def product_case() -> Case:
    return products_case(64, "bf16", 128, 128, False)


CASES = {
    "wgmma_ring": ring_case,
    "wgmma_matrices": matrices_case,
    "wgmma_products": product_case,
    "wgmma_forward": forward_case,
}
LAST_WAIT = "    ag_wgmma_wait<0>();\n    ag_pin(y);\n"
AGAIN = "    ag_wgmma_registers_bf16<kHighB, kMajorB>(y, a, low_b, true);\n    ag_wgmma_commit();\n"

PLANTED = [
    # Barriers in memory.
    Planted(
        "every lane arrives where one is counted",
        "wgmma_ring",
        "if (lane == 0) ag_barrier_arrive(",
        "ag_barrier_arrive(",
        {Fault.BARRIER_PROTOCOL, Fault.SHARED_RACE},
    ),
    Planted(
        "an arrival too many is counted",
        "wgmma_ring",
        "ag_barrier_init(shared + kEmpty + 8 * i, 4)",
        "ag_barrier_init(shared + kEmpty + 8 * i, 5)",
        {Fault.DEADLOCK},
        "lacks 1 arrivals and 0 bytes of phase 0",
    ),
    Planted(
        "the producer waits for the wrong parity",
        "wgmma_ring",
        "int stage = 0, parity = 1;",
        "int stage = 0, parity = 0;",
        {Fault.DEADLOCK},
        "in ag_barrier_wait at kernel.cu:",
    ),
    Planted(
        "the consumer waits for the wrong parity",
        "wgmma_ring",
        "int stage = 0, parity = 0;",
        "int stage = 0, parity = 1;",
        RACE_OR_UNWRITTEN | {Fault.DEADLOCK},
        "which it has not waited for",
    ),
    Planted(
        "a parity that does not change",
        "wgmma_ring",
        "ag_barrier_wait(shared + kFull + 8 * stage, parity);",
        "ag_barrier_wait(shared + kFull + 8 * stage, 0);",
        {Fault.SHARED_RACE, Fault.DEADLOCK, Fault.BARRIER_PROTOCOL},
    ),
    Planted(
        "a parity that is none",
        "wgmma_ring",
        "ag_barrier_wait(shared + kFull + 8 * stage, parity);",
        "ag_barrier_wait(shared + kFull + 8 * stage, parity + 2);",
        {Fault.BARRIER_PROTOCOL},
        "neither 0 nor 1",
    ),
    Planted(
        "too many bytes are expected",
        "wgmma_ring",
        "8 * stage, kTileBytes);\n        ag_tensor_load",
        "8 * stage, kTileBytes + 16);\n        ag_tensor_load",
        {Fault.DEADLOCK},
        "lacks 0 arrivals and 16 bytes of phase 0",
    ),
    Planted(
        "too few bytes are expected",
        "wgmma_ring",
        "8 * stage, kTileBytes);\n        ag_tensor_load",
        "8 * stage, kTileBytes - 16);\n        ag_tensor_load",
        {Fault.DEADLOCK},
        "lacks 0 arrivals and -16 bytes of phase 0",
    ),
    Planted(
        "the bytes of one of two loads are expected",
        "wgmma_forward",
        "ag_barrier_arrive_expect(full + 8 * at.stage, kStageBytes);",
        "ag_barrier_arrive_expect(full + 8 * at.stage, kStageBytes / 2);",
        {Fault.BARRIER_PROTOCOL, Fault.SHARED_RACE},
    ),
    Planted(
        "a barrier that nobody has made",
        "wgmma_ring",
        "ag_barrier_init(shared + kEmpty + 8 * i, 4);",
        "",
        {Fault.BARRIER_PROTOCOL},
        "where nobody has made one",
    ),
    Planted(
        "a barrier that is made twice",
        "wgmma_ring",
        "ag_barrier_init(shared + kEmpty + 8 * i, 4);",
        "ag_barrier_init(shared + kEmpty, 4);",
        {Fault.BARRIER_PROTOCOL},
        "where there is one",
    ),
    Planted(
        "a barrier for nobody",
        "wgmma_ring",
        "ag_barrier_init(shared + kEmpty + 8 * i, 4);",
        "ag_barrier_init(shared + kEmpty + 8 * i, 0);",
        {Fault.BARRIER_PROTOCOL},
        "for 0 arrivals",
    ),
    Planted(
        "a barrier that is not aligned",
        "wgmma_ring",
        "kFull = 0,",
        "kFull = 4,",
        {Fault.MISALIGNED},
    ),
    Planted(
        "barriers are used before others know of them",
        "wgmma_ring",
        "    ag_sync();\n    if (ag_warp_group() == 0)",
        "    if (ag_warp_group() == 0)",
        {Fault.SHARED_RACE, Fault.BARRIER_PROTOCOL},
    ),
    Planted(
        "no fence behind the inits",
        "wgmma_ring",
        "        ag_barrier_init_fence();\n",
        "",
        {Fault.MISSING_FENCE},
        "with no ag_barrier_init_fence behind it",
    ),
    Planted(
        "a load that nobody waits for",
        "wgmma_ring",
        "step < args.steps; ++step) {\n        ag_barrier_wait(shared + kEmpty",
        "step <= args.steps; ++step) {\n        ag_barrier_wait(shared + kEmpty",
        {Fault.UNFINISHED_COPY},
        "nobody has waited for the tensor load of thread 0",
    ),
    Planted(
        "a stage is given back before all lanes have read it",
        "wgmma_ring",
        "        ag_sync_warp();\n        if (lane == 0) ag_barrier_arrive",
        "        if (lane == 0) ag_barrier_arrive",
        RACE,
        "which thread",
    ),
    # Barriers by number.
    Planted(
        "two counts at one barrier",
        "wgmma_ring",
        "ag_named_arrive(2, 128)",
        "ag_named_arrive(2, 96)",
        {Fault.BARRIER_PROTOCOL, Fault.DEADLOCK},
        "threads, but thread",
    ),
    Planted(
        "a number that ag_sync has",
        "wgmma_ring",
        "ag_named_sync(1, 128)",
        "ag_named_sync(0, 128)",
        {Fault.BARRIER_PROTOCOL},
        "numbers are 1 to 15",
    ),
    Planted(
        "half a warp is counted",
        "wgmma_ring",
        "ag_named_sync(1, 128)",
        "ag_named_sync(1, 112)",
        {Fault.BARRIER_PROTOCOL},
        "whole warps",
    ),
    Planted(
        "half a warp arrives",
        "wgmma_ring",
        "else ag_named_arrive(2, 128);",
        "else if (lane < 16) ag_named_arrive(2, 128);",
        {Fault.DIVERGENT_WARP},
    ),
    Planted(
        "a count that is never reached",
        "wgmma_ring",
        "ag_named_sync(1, 128)",
        "ag_named_sync(1, 160)",
        {Fault.DEADLOCK},
        "128 of 160 threads are at barrier 1",
    ),
    Planted(
        "a warp that comes twice",
        "wgmma_ring",
        "if (warp == 0) ag_named_sync(2, 128); else",
        "if (warp == 0) ag_sync_warp(); else",
        RACE_OR_UNWRITTEN | {Fault.BARRIER_PROTOCOL},
    ),
    # Registers.
    Planted(
        "a number of registers that is no multiple of 8",
        "wgmma_ring",
        "ag_registers_decrease<56>",
        "ag_registers_decrease<60>",
        {Fault.REGISTER_COUNT},
        "a multiple of 8 from 24 to 256",
    ),
    Planted(
        "a decrease to more than there are",
        "wgmma_forward",
        "ag_registers_decrease<40>",
        "ag_registers_decrease<176>",
        {Fault.REGISTER_COUNT},
        "has 168 registers",
    ),
    Planted(
        "more registers than there are",
        "wgmma_forward",
        "ag_registers_decrease<40>",
        "ag_registers_decrease<48>",
        {Fault.DEADLOCK},
        "ag_registers_increase",
    ),
    # Fences between the two ways to shared memory.
    Planted(
        "no fence before a store",
        "wgmma_ring",
        "        ag_async_fence();\n",
        "",
        {Fault.MISSING_FENCE},
        "with no ag_async_fence behind it and before the barrier",
    ),
    Planted(
        "a fence behind the barrier, by who stores",
        "wgmma_ring",
        "        ag_async_fence();\n        if (warp == 0) ag_named_sync(2, 128);",
        "        if (warp == 0) ag_named_sync(2, 128), ag_async_fence();",
        {Fault.MISSING_FENCE},
    ),
    Planted(
        "no fence before a product",
        "wgmma_products",
        "    ag_async_fence();\n",
        "",
        {Fault.MISSING_FENCE},
        "multiplies byte",
    ),
    Planted(
        "no barrier before a product",
        "wgmma_products",
        "    ag_async_fence();\n    ag_sync();\n",
        "    ag_async_fence();\n",
        RACE_OR_UNWRITTEN,
        "wrote with no barrier between",
    ),
    # Tensor copies.
    Planted(
        "a tile that is overwritten while it is stored",
        "wgmma_ring",
        "        if (warp == 0 && ag_elect()) ag_tensor_store_wait_read<0>();\n",
        "",
        RACE,
        "which a tensor store may still read",
    ),
    Planted(
        "a store that is not waited for",
        "wgmma_ring",
        "    if (warp == 0 && ag_elect()) ag_tensor_store_wait<0>();\n",
        "",
        {Fault.UNFINISHED_COPY},
        "its tensor store is still on its way",
    ),
    Planted(
        "a store that is in no group",
        "wgmma_ring",
        "            ag_tensor_store_commit();\n",
        "",
        RACE,
    ),
    Planted(
        "a box that is not at a multiple of 128",
        "wgmma_ring",
        "kTiles = 1024,",
        "kTiles = 1024 + 64,",
        {Fault.MISALIGNED},
        "which is no multiple of 128",
    ),
    Planted(
        "a box outside shared memory",
        "wgmma_ring",
        "kTiles = 1024,",
        "kTiles = 8192,",
        {Fault.SHARED_BOUNDS},
        "loads a box of 2048 bytes",
    ),
    Planted(
        "a store to an input",
        "wgmma_ring",
        "ag_tensor_store(args.to,",
        "ag_tensor_store(args.from,",
        {Fault.READ_ONLY},
        "of from",
    ),
    # Products.
    Planted(
        "no fence before the first product",
        "wgmma_products",
        "    ag_wgmma_fence();\n",
        "",
        {Fault.MISSING_FENCE},
        "with no ag_wgmma_fence since the beginning",
    ),
    Planted(
        "no fence before a product behind a wait",
        "wgmma_products",
        LAST_WAIT,
        LAST_WAIT + AGAIN + "    ag_wgmma_wait<0>();\n",
        {Fault.MISSING_FENCE},
        "with no ag_wgmma_fence since the last wait",
    ),
    Planted(
        "accumulators that change behind the fence",
        "wgmma_products",
        LAST_WAIT,
        LAST_WAIT
        + "    ag_wgmma_fence();\n    y[3] += 1.0f;\n"
        + AGAIN
        + "    ag_wgmma_wait<0>();\n",
        {Fault.MISSING_FENCE},
        "has changed accumulators since the last ag_wgmma_fence",
    ),
    Planted(
        "an A that changes behind the fence",
        "wgmma_products",
        LAST_WAIT,
        LAST_WAIT + "    ag_wgmma_fence();\n    a[1] ^= 1;\n" + AGAIN + "    ag_wgmma_wait<0>();\n",
        {Fault.MISSING_FENCE},
        "has changed A since the last ag_wgmma_fence",
    ),
    Planted(
        "accumulators that are written in flight",
        "wgmma_products",
        "    ag_wgmma_wait<1>();\n",
        "    if (i == 77) y[5] = 0.0f;\n    ag_wgmma_wait<1>();\n",
        {Fault.REGISTERS_IN_FLIGHT},
        "thread 77 of block 0 has changed accumulators of the product at kernel.cu:",
    ),
    Planted(
        "an A that is written in flight",
        "wgmma_products",
        "    ag_wgmma_wait<1>();\n",
        "    if (i == 77) a[2] ^= 1;\n    ag_wgmma_wait<1>();\n",
        {Fault.REGISTERS_IN_FLIGHT},
        "thread 77 of block 0 has changed A of the product at kernel.cu:",
    ),
    Planted(
        "shared memory that is written while a product reads it",
        "wgmma_products",
        "    ag_wgmma_wait<1>();\n",
        "    ag_shared_store4(shared + args.b + i * 16, 0);\n    ag_wgmma_wait<1>();\n",
        RACE,
        "which a product of warp group 0 may still read",
    ),
    Planted(
        "a product that is never waited for",
        "wgmma_products",
        "    ag_wgmma_wait<0>();\n",
        "",
        {Fault.UNFINISHED_COPY},
        "a product of its warp group is in flight",
    ),
    Planted(
        "a matrix that begins inside of what is exchanged",
        "wgmma_products",
        "ag_matrix_low(shared + args.b,",
        "ag_matrix_low(shared + args.b + 128,",
        {Fault.MISALIGNED},
        "in the middle of what a swizzle of 128 bytes exchanges",
    ),
    Planted(
        "a matrix outside shared memory",
        "wgmma_products",
        "ag_matrix_low(shared + args.b,",
        "ag_matrix_low(shared + args.b + 4096,",
        {Fault.SHARED_BOUNDS},
        "multiplies 16 bytes at byte",
    ),
    Planted(
        "shared memory that nobody has written",
        "wgmma_products",
        "w < args.words;",
        "w < args.words - 64;",
        {Fault.UNINITIALISED_READ},
    ),
    Planted(
        "lanes with different matrices",
        "wgmma_products",
        "kMajorB>(x, low_a, low_b, true);",
        "kMajorB>(x, low_a, low_b + (i == 99), true);",
        {Fault.DIVERGENT_WARP},
        "with another matrix",
    ),
    Planted(
        "a warp that leaves a product out",
        "wgmma_products",
        "    ag_wgmma_commit();\n    ag_wgmma_wait<1>();\n",
        "    if (i >= 32) ag_wgmma_commit();\n    ag_wgmma_wait<1>();\n",
        {Fault.DIVERGENT_WARP},
        "of its warp group is in ag_wgmma_",
    ),
    Planted(
        "a warp that ends before a product",
        "wgmma_products",
        "    ag_wgmma_fence();\n",
        "    if (i >= 96) return;\n    ag_wgmma_fence();\n",
        {Fault.ENDED_LANE},
    ),
    Planted(
        "half a warp group",
        "wgmma_products",
        "constexpr int kThreads = 128",
        "constexpr int kThreads = 64",
        {Fault.DIVERGENT_WARP},
        "its warp group has only 64 threads",
    ),
    # Matrices to shared memory.
    Planted(
        "a row that is not aligned",
        "wgmma_matrices",
        "ag_store_matrices(shared + kPlain + lane * 16",
        "ag_store_matrices(shared + kPlain + 4 + lane * 16",
        {Fault.MISALIGNED},
    ),
    Planted(
        "a row that another lane has written",
        "wgmma_matrices",
        "    ag_sync_warp();\n    ag_shared_load16(r, shared + kPlain + lane * 16)",
        "    ag_shared_load16(r, shared + kPlain + (lane ^ 1) * 16)",
        RACE,
    ),
]


OTHERS = {  # bodies of further tests
    "late": Planted(
        "",
        "wgmma_matrices",
        "    const bool before",
        "    if (ag_thread() == 0)\n"
        "        for (int i = 0; i < 64; ++i) ag_barrier_arrive(barrier);\n"
        "    if (lane == 5) ag_barrier_wait(barrier, 0);\n    const bool before",
        set(),
    ),
    "cluster": Planted(
        "", "wgmma_matrices", "multicast(1,", "multicast(3,", set(), "other blocks of a cluster"
    ),
    "rank": Planted(
        "",
        "wgmma_matrices",
        "_multicast(1, shared + kRows, args.rows, barrier, 0, 0, 0, 0);",
        "(shared + kRows, args.rows, barrier, 0, 0, 0);",
        set(),
        "at 3 coordinates of a tensor of 4",
    ),
    "map": Planted(
        "",
        "wgmma_matrices",
        "args.rows, barrier",
        "*(const ag_tensor_map*)args.given, barrier",
        set(),
        "not made for a CPU",
    ),
    "early_read": Planted(
        "", "wgmma_products", "    ag_wgmma_wait<1>();\n    ag_pin(x);\n", "    ag_pin(x);\n", set()
    ),
    "right": Planted("", "wgmma_ring", "kStages = 2", "kStages = 2", set()),
}
KEYS = {str(i): planted for i, planted in enumerate(PLANTED)} | OTHERS


@pytest.fixture(scope="module")
def library_of(
    compiler: CppCompiler, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The library with every planted variant of a kernel."""
    cache = tmp_path_factory.mktemp("libraries")

    def build(kernel: str) -> Path:
        bodies = {key: p.body() for key, p in KEYS.items() if p.kernel == kernel}
        return build_variants(kernel, bodies, cache_dir=cache, compiler=compiler)

    return build


def case_of(key: str) -> Case:
    case = CASES[KEYS[key].kernel]()
    case.kernel += f"_{key}"
    return case


@pytest.mark.parametrize("key", [str(i) for i in range(len(PLANTED))], ids=lambda k: KEYS[k].name)
def test_planted_fault_is_found(key: str, library_of: Callable[[str], Path]) -> None:
    planted = KEYS[key]
    library = library_of(planted.kernel)
    texts = []
    for mode in (Mode.RING, Mode.EAGER_LAST, Mode.RANDOM):
        for landing in ALL_LANDINGS:
            case = case_of(key)
            if "kThreads = 64" in planted.new:
                case.threads = 64
            found = fault_of(case, library, mode=mode, landing=landing, seed=11, workers=1)
            assert found.fault in planted.faults, found.text
            texts.append(found.text)
    assert any(planted.says in text for text in texts), texts


def test_accumulators_that_are_read_in_flight(library_of: Callable[[str], Path]) -> None:
    library = library_of("wgmma_products")
    case_of("early_read").run(library, landing=Landing.EARLY)  # as lucky as a GPU may be
    with pytest.raises(AssertionError, match="from_shared"):
        case_of("early_read").run(library, landing=Landing.LATE)


def test_a_wait_that_comes_a_phase_too_late(library_of: Callable[[str], Path]) -> None:
    found = fault_of(case_of("late"), library_of("wgmma_matrices"))
    assert found.fault is Fault.BARRIER_PROTOCOL
    assert "waits for phase 0 of the barrier at byte 2048, which is in phase 2" in found.text


@pytest.mark.parametrize("key", ["cluster", "rank", "map"])
def test_a_load_that_cannot_be_run(key: str, library_of: Callable[[str], Path]) -> None:
    with pytest.raises(AttnError) as caught:
        case_of(key).launch(library_of("wgmma_matrices"))
    (diagnostic,) = caught.value.diagnostics
    assert isinstance(diagnostic, CpuLaunchRefused)
    assert KEYS[key].says in diagnostic.text


def test_a_load_outside_its_array(library_of: Callable[[str], Path]) -> None:
    case = case_of("right")
    case.tensors = {**case.tensors, "from": case.tensors["from"][:-1]}
    found = fault_of(case, library_of("wgmma_ring"))
    assert found.fault is Fault.GLOBAL_BOUNDS
    assert "of from, which has" in found.text


def test_missing_bytes_are_found_without_checks(library_of: Callable[[str], Path]) -> None:
    key = next(k for k, p in KEYS.items() if p.name == "too many bytes are expected")
    found = fault_of(case_of(key), library_of("wgmma_ring"), check=False)
    assert found.fault is Fault.DEADLOCK
    assert "lacks 0 arrivals and 16 bytes" in found.text
