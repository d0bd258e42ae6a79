"""Planted faults: each is found in every scheduling mode, and named as what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attngen.cpu.errors import CpuLaunchRefused
from attngen.cpu.faults import Fault
from attngen.cpu.run import MemoryRange, Mode
from attngen.diagnostics.diagnostic import AttnError
from tests.cpu.host_kernels import (
    ALL_MODES,
    CASES,
    Case,
    body_of,
    kernel_text,
    reduce_case,
    transpose_case,
)
from tests.cpu.planted import RACE, RACE_OR_UNWRITTEN, Planted, fault_of

Build = Callable[..., Path]

PLANTED = [
    # Missing barriers in shared memory.
    Planted("block barrier: read after write", "transpose", "ag_sync();", "", RACE_OR_UNWRITTEN),
    Planted(
        "block barrier in a loop: read after write",
        "diffuse",
        "ag_sync();  // written",
        "// written",
        RACE_OR_UNWRITTEN,
    ),
    Planted(
        "block barrier in a loop: write after read",
        "diffuse",
        "ag_sync();  // read",
        "// read",
        RACE,
        "with no ag_sync",
    ),
    Planted(
        "block barrier is only a warp barrier",
        "diffuse",
        "ag_sync();  // read",
        "ag_sync_warp();  // read",
        RACE,
        "with no ag_sync between",
    ),
    Planted(
        "two threads write one element",
        "diffuse",
        "cells[i] = mean",
        "cells[i / 2] = mean",
        RACE,
        "writes element",
    ),
    Planted(
        "warp barrier: read after write",
        "rotate",
        "ag_sync_warp();  // all have written",
        "",
        RACE_OR_UNWRITTEN,
    ),
    Planted(
        "warp barrier: write after read",
        "rotate",
        "ag_sync_warp();  // all have read",
        "",
        RACE,
        "with no ag_sync_warp or ag_sync between",
    ),
    Planted(
        "a shuffle is no barrier",
        "rotate",
        "ag_sync_warp();  // all have read",
        "next = ag_shuffle_xor(next, 0);",
        RACE,
    ),
    Planted(
        "all lanes read, and then one of them writes",
        "rotate",
        "float next = mine[(lane + 1) % 32];",
        "float next = ag_shuffle_xor(mine[0], 0);\n"
        "        if (lane == 31 && turn == 0) mine[0] = next;",
        RACE,
        "writes element 0",
    ),
    Planted(
        "a warp barrier does not reach the other warp",
        "rotate",
        "ag_thread() / 32 * 32 * 4, 32",
        "0, 64",
        RACE_OR_UNWRITTEN,
        "with no ag_sync between",
    ),
    Planted("halves, then a word", "halves", "ag_sync();\n    if", "if", RACE_OR_UNWRITTEN),
    Planted(
        "a word, then halves",
        "halves",
        "    ag_sync();\n    ag_store(args.out",
        "    ag_store(args.out",
        RACE,
    ),
    # Unwritten memory.
    Planted(
        "an element nobody writes",
        "reduce",
        "if (lane == 0) partial",
        "if (lane == 0 && warp != 2) partial",
        {Fault.UNINITIALISED_READ},
        "reads element 2 of the shared array at byte 0",
    ),
    # Addresses.
    Planted(
        "past the end of a shared array",
        "transpose",
        "buffer, 0, kTile * (kTile + 1)",
        "buffer, 0, kTile * kTile",
        {Fault.SHARED_BOUNDS},
        "of the shared array at byte 0, which has 1024 elements",
    ),
    Planted(
        "before a shared array",
        "diffuse",
        "left = ag_mod(i - 1, kThreads)",
        "left = i - 1",
        {Fault.SHARED_BOUNDS},
        "element -1",
    ),
    Planted(
        "a shared array outside the buffer",
        "reduce",
        "buffer, 0, kWarps",
        "buffer, 4, kWarps",
        {Fault.SHARED_BOUNDS},
        "bytes 4 to 20 of a buffer of 16",
    ),
    Planted(
        "a misaligned shared array",
        "reduce",
        "buffer, 0, kWarps",
        "buffer, 2, kWarps - 1",
        {Fault.MISALIGNED},
        "at byte 2",
    ),
    Planted(
        "a load past the end",
        "transpose",
        "row0 + y < args.rows && column0 + x < args.columns",
        "column0 + x < args.columns",
        {Fault.GLOBAL_BOUNDS},
        "of in, which has 9240 bytes",
    ),
    Planted(
        "a store past the end",
        "transpose",
        "column0 + y < args.columns && row0 + x < args.rows",
        "row0 + x < args.rows",
        {Fault.UNINITIALISED_READ, Fault.GLOBAL_BOUNDS},
    ),
    Planted(
        "a load at no array",
        "reduce",
        "args.in + ag_block()",
        "(const float*)nullptr + ag_block()",
        {Fault.GLOBAL_BOUNDS},
    ),
    Planted(
        "a misaligned load",
        "halves",
        "half[i] = ag_load(args.in + i);",
        "half[i] = ag_load(args.in + i);\n    ag_load((const int*)(args.in + 1));",
        {Fault.MISALIGNED},
        "byte 2 of in",
    ),
    Planted(
        "a store of a smaller type",
        "reduce",
        "ag_store(args.out + ag_block(), total)",
        "ag_store((ag_u16*)(args.out + ag_block()), 0)",
        {Fault.MISALIGNED},
        "2 byte(s) of out, whose elements have 4",
    ),
    Planted(
        "a write to an input",
        "reduce",
        "ag_store(args.out + ag_block(), total)",
        "ag_store((float*)args.in + ag_block(), total)",
        {Fault.READ_ONLY},
        "of in, which is read-only",
    ),
    # What the compiler itself checks.
    Planted(
        "past the end of a local array",
        "attention",
        "for (int j = 0; j < kPer; ++j) acc[i][j] = 0.0f;",
        "for (int j = 0; j <= kPer; ++j) acc[i][j] = 0.0f;",
        {Fault.LOCAL_BOUNDS},
        "outside a local array",
    ),
    Planted(
        "a sum that is too large",
        "reduce",
        "sum = warp_sum(sum);",
        "sum = warp_sum(sum) + (float)(args.count + 2147483647);",
        {Fault.INTEGER},
        "adds",
    ),
    Planted(
        "a product that is too large",
        "reduce",
        "sum = warp_sum(sum);",
        "sum = warp_sum(sum) + (float)(args.count * 2147483647);",
        {Fault.INTEGER},
        "multiplies",
    ),
    Planted(
        "a division by zero",
        "reduce",
        "sum = warp_sum(sum);",
        "sum = warp_sum(sum) + (float)(args.count / ag_block());",
        {Fault.INTEGER},
        "divides",
    ),
    Planted(
        "a shift that is too far",
        "reduce",
        "sum = warp_sum(sum);",
        "sum = warp_sum(sum) + (float)(1 << args.count);",
        {Fault.INTEGER},
        "shifts",
    ),
    Planted(
        "a float that no integer holds",
        "reduce",
        "sum = warp_sum(sum);",
        "sum = warp_sum(sum) + (float)(int)(args.count * 1e30f);",
        {Fault.INTEGER},
        "of a float",
    ),
    # Global memory between threads.
    Planted(
        "global: read after write",
        "workspace",
        "ag_sync();\n    float other",
        "float other",
        {Fault.GLOBAL_RACE},
        "with no ag_sync",
    ),
    Planted(
        "global: write after read",
        "workspace",
        "ag_sync();\n    ag_store(mine + i, other",
        "ag_store(mine + i, other",
        {Fault.GLOBAL_RACE},
    ),
    Planted(
        "global: the other warp",
        "workspace",
        "i ^ 1",
        "i ^ 32",
        {Fault.GLOBAL_RACE},
        "with no ag_sync between",
    ),
    Planted(
        "global: two threads write one element",
        "workspace",
        "args.out + ag_block() * kThreads + i,",
        "args.out + ag_block() * kThreads + i / 2,",
        {Fault.GLOBAL_RACE},
        "of out, which thread",
    ),
    Planted(
        "global: two blocks write one element",
        "workspace",
        "args.out + ag_block() * kThreads",
        "args.out",
        {Fault.GLOBAL_RACE},
        "of block",
    ),
    Planted(
        "global: a block reads what another writes",
        "workspace",
        "ag_load(mine + (i ^ 1))",
        "ag_load(args.work + (i ^ 1))",
        {Fault.GLOBAL_RACE},
        "block",
    ),
    # Barriers and collectives that not everybody reaches.
    Planted(
        "a barrier in two places",
        "reduce",
        "ag_sync();",
        "if (warp == 1)\n        ag_sync();\n    else\n        ag_sync();",
        {Fault.DIVERGENT_BARRIER},
        "waits in ag_sync, but thread",
    ),
    Planted(
        "a barrier that one warp leaves out",
        "diffuse",
        "ag_sync();  // read",
        "if (i < 64) ag_sync();  // read",
        {Fault.DIVERGENT_BARRIER, Fault.ENDED_LANE, *RACE},
    ),
    Planted(
        "a thread that ends before the barrier",
        "reduce",
        "ag_sync();",
        "if (ag_thread() == 70) return;\n    ag_sync();",
        {Fault.ENDED_LANE},
        "ag_sync",
    ),
    Planted(
        "lanes at different shuffles",
        "reduce",
        "sum = warp_sum(sum);",
        "if (lane < 16) sum = warp_sum(sum);\n    else sum += ag_shuffle_xor(sum, 1);",
        {Fault.DIVERGENT_WARP},
        "ag_shuffle_xor at",
    ),
    Planted(
        "lanes at a shuffle and at a warp barrier",
        "reduce",
        "sum = warp_sum(sum);",
        "if (lane < 16) sum = warp_sum(sum);\n    else ag_sync_warp();",
        {Fault.DIVERGENT_WARP},
        "ag_sync_warp",
    ),
    Planted(
        "a lane that ends before the shuffle",
        "reduce",
        "sum = warp_sum(sum);",
        "if (lane == 5) return;\n    sum = warp_sum(sum);",
        {Fault.ENDED_LANE},
        "ag_shuffle_xor",
    ),
    Planted(
        "lanes of a warp at a shuffle and at the block's barrier",
        "reduce",
        "    ag_sync();\n",
        "    if (lane < 16) ag_sync();\n    else ag_shuffle_xor(sum, 1);\n",
        {Fault.DEADLOCK},
        "in ag_sync at kernel.cu:",
    ),
    Planted(
        "a shuffle across the end of the warp",
        "reduce",
        "int mask = 16;",
        "int mask = 32;",
        {Fault.SHUFFLE_LANE},
        "with mask 32",
    ),
]


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_fault_is_found(planted: Planted, mode: Mode, build: Build) -> None:
    library = build(planted.kernel, planted.body())
    found = fault_of(CASES[planted.kernel](), library, mode=mode, seed=11)
    assert found.fault in planted.faults, found.text
    if found.fault is not Fault.UNINITIALISED_READ or len(planted.faults) == 1:
        assert planted.says in found.text


def test_the_message_names_place_thread_and_access(build: Build) -> None:
    body = body_of("rotate").replace("ag_sync_warp();  // all have read", "")
    found = fault_of(CASES["rotate"](), build("rotate", body), mode=Mode.EAGER)
    line = kernel_text("rotate", body).splitlines().index("        mine[lane] = next;") + 1
    assert found.text == (
        f"kernel.cu:{line}: thread 0 of block 0 writes element 0 of the shared array at byte 0, "
        "which thread 31 read with no ag_sync_warp or ag_sync between"
    )
    assert found.message().endswith("is at fault: a race in shared memory")


def test_of_several_failing_blocks_the_first_is_reported(build: Build) -> None:
    body = body_of("reduce").replace("sum = warp_sum(sum);", "if (ag_block() >= 5) return;")
    case = reduce_case(blocks=40)
    body = body.replace(
        "    ag_sync();", "    if (ag_block() == 4 && warp == 0) return;\n    ag_sync();"
    )
    library = build("reduce", body)
    for _ in range(10):
        assert "of block 4 " in fault_of(case, library, workers=4).text


def test_a_local_array_that_is_not_set_is_nan(build: Build) -> None:
    old = "for (int j = 0; j < kPer; ++j) acc[i][j] = 0.0f;"
    body = body_of("attention").replace(old, old.replace("j = 0", "j = 1"))
    case = CASES["attention"]()
    case.launch(build("attention", body))
    assert np.isnan(case.arguments["out"]).any()


def test_line_directives_move_the_reported_place(build: Build) -> None:
    body = body_of("transpose").replace("    ag_sync();\n", '#line 7 "causal.attn"\n')
    found = fault_of(transpose_case(), build("transpose", body))
    assert found.text.startswith(("causal.attn:7:", "causal.attn:8:", "causal.attn:9:"))


def test_addresses_are_checked_without_checks(build: Build) -> None:
    planted = next(p for p in PLANTED if p.name == "a load past the end")
    library = build(planted.kernel, planted.body())
    assert fault_of(transpose_case(), library, check=False).fault is Fault.GLOBAL_BOUNDS


def test_races_are_let_pass_without_checks(build: Build) -> None:
    body = body_of("diffuse").replace("ag_sync();  // read by the neighbours", "")
    CASES["diffuse"]().launch(build("diffuse", body), check=False)


def test_an_element_is_not_kept_in_a_variable(build: Build) -> None:
    body = body_of("rotate").replace("float next = mine", "auto next = mine")
    with pytest.raises(AttnError) as caught:
        build("rotate", body)
    assert caught.value.diagnostics[0].code == "A542"


# ---- launches that do not fit ---------------------------------------------------------------


def refusal_of(case: Case, library: Path, **options: object) -> str:
    with pytest.raises(AttnError) as caught:
        case.launch(library, **options)
    (diagnostic,) = caught.value.diagnostics
    assert isinstance(diagnostic, CpuLaunchRefused)
    return diagnostic.text


def test_another_number_of_threads_is_refused(build: Build) -> None:
    case = reduce_case()
    case.threads = 64
    assert refusal_of(case, build("reduce")) == (
        "the kernel has 128 threads a block (at most 1024), launched with 64"
    )


def test_other_arguments_are_refused(build: Build) -> None:
    case = reduce_case()
    case.arguments["more"] = np.zeros(1)
    assert "arguments take 24 bytes, 32 were given" in refusal_of(case, build("reduce"))


def test_an_unknown_kernel_is_refused(build: Build) -> None:
    case = reduce_case()
    case.kernel = "produce"
    assert "produce_cpu" in refusal_of(case, build("reduce"))


def test_more_memory_than_there_is_is_refused(build: Build) -> None:
    case = reduce_case()
    huge = MemoryRange(1 << 20, 1 << 62, is_writable=True)
    assert "memory ran out" in refusal_of(case, build("reduce"), ranges=[huge])
