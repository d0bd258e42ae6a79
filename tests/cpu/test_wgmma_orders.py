"""Races under barriers in memory and by number, against their definition: random programs.

Two accesses of one element by different threads race when one of them writes and neither is known
to the other thread when it makes its own.  What a thread knows it hands on where it arrives, and
learns where it waits.  A tensor store reads; and of the last write of each element, its thread has
to know a fence that the writer has made behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attngen.cpu.errors import CpuRunFault
from attngen.cpu.faults import Fault
from attngen.cpu.run import Landing, Mode
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.types import ELEMENTS as ELEMENT_TYPES
from tests.cpu.host_kernels import ALL_LANDINGS, Case
from tests.cpu.test_wgmma_instructions import tensor_map

Build = Callable[..., Path]
Array = npt.NDArray[Any]

THREADS, WARPS, ELEMENTS, MOST_STEPS = 128, 4, 8, 12
READ, WRITE, FENCE, STORE = 1, 2, 3, 7  # a store is a 3 with an element
STORED = range(2)  # those of the elements that programs use which a store reads
ARRIVES, WAITS, SYNCS, COMES, WARP, BLOCK = 1, 2, 4, 8, 16, 32


@dataclass(frozen=True)
class Program:
    """The tables of kernels/wgmma_orders.cu."""

    accesses: Array  # [steps, threads]
    meets: Array  # [steps, threads]

    @staticmethod
    def random(rng: np.random.Generator) -> Program:
        # Few threads and few elements, so that much meets.
        steps = int(rng.integers(2, MOST_STEPS + 1))
        actors = rng.choice([0, 1, 31, 32, 64, 65, 96, 127], size=4, replace=False)
        accesses = np.zeros((steps, THREADS), np.int32)
        meets = np.zeros((steps, THREADS), np.int32)
        for _ in range(int(rng.integers(2, 7))):
            kind = rng.choice([READ, WRITE, FENCE, STORE], p=[0.3, 0.35, 0.2, 0.15])
            at = int(rng.integers(steps)), int(rng.choice(actors))
            accesses[at] = kind + (4 * int(rng.integers(2)) if kind in (READ, WRITE) else 0)
            if kind == WRITE and at[0] + 1 < steps and rng.random() < 0.5:
                accesses[at[0] + 1, at[1]] = FENCE
        by_warp = meets.reshape(steps, WARPS, 32)
        for step in range(steps):
            match rng.integers(6):
                case 0 | 1 | 2:  # some hand on, and some learn
                    meets[step, rng.choice(actors, rng.integers(1, 3), replace=False)] |= ARRIVES
                    meets[step, rng.choice(actors, rng.integers(1, 3), replace=False)] |= WAITS
                case 3:
                    kinds = rng.choice([0, SYNCS, COMES], WARPS, p=[0.3, 0.4, 0.3])
                    by_warp[step] |= kinds[:, None] if SYNCS in kinds else 0
                case 4:
                    by_warp[step, rng.random(WARPS) < 0.5] |= WARP
                case 5:
                    by_warp[step] |= BLOCK if rng.random() < 0.3 else 0
        return Program(accesses, meets)

    def has_fault(self) -> bool:
        """Whether two accesses race, or a store reads what was written with no fence."""
        known = np.zeros((THREADS, THREADS), int)  # of each thread: so many steps of every other
        fenced = np.zeros_like(known)  # the same, as far as fences make them ready for a store
        done: list[tuple[int, int, bool, int]] = []  # step, thread, whether it writes, element
        for step, (accesses, meets) in enumerate(zip(self.accesses, self.meets, strict=True)):
            for thread in map(int, np.flatnonzero(accesses)):
                code = int(accesses[thread])
                if code == FENCE:
                    fenced[thread, thread] = step
                    continue
                writes = code % 4 == WRITE
                for element in STORED if code == STORE else (code // 4,):
                    before = [access for access in done if access[3] == element]
                    if any(
                        other != thread and (writes or wrote) and known[thread, other] <= at
                        for at, other, wrote, _ in before
                    ):
                        return True
                    last = next(((at, u) for at, u, wrote, _ in reversed(before) if wrote), None)
                    if code == STORE and last and fenced[thread, last[1]] <= last[0]:
                        return True
                    done.append((step, thread, writes, element))
            known[range(THREADS), range(THREADS)] = step + 1
            for table in (known, fenced):
                learn(table, meets & ARRIVES, meets & WAITS)
                learn(table, meets & (SYNCS | COMES), meets & SYNCS)
                for warp in range(WARPS):
                    lanes = np.where(np.arange(THREADS) // 32 == warp, meets & WARP, 0)
                    learn(table, lanes, lanes)
                learn(table, meets & BLOCK, meets & BLOCK)
        return False

    def case(self) -> Case:
        arrivals = np.count_nonzero(self.meets & ARRIVES, axis=1).astype(np.int32)
        out = np.zeros((THREADS, 4), np.int32)
        return Case(
            "wgmma_orders",
            {
                "out": tensor_map("out", out, (4, 1), element=ELEMENT_TYPES["int32"]),
                "accesses": self.accesses,
                "meets": self.meets,
                "arrivals": np.maximum(arrivals, 1),
                "named": np.count_nonzero(self.meets & (SYNCS | COMES), axis=1).astype(np.int32),
                "steps": len(self.accesses),
            },
            {},
            grid=1,
            threads=THREADS,
            shared_bytes=ELEMENTS * 4 + MOST_STEPS * 8,
            writable=("out",),
            tensors={"out": out},
        )


def learn(known: Array, givers: Array, takers: Array) -> None:
    """What any of the givers knows, all takers know from now on."""
    if givers.any():
        known[takers != 0] = np.maximum(known[takers != 0], known[givers != 0].max(0))


@pytest.mark.parametrize("landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower())
@pytest.mark.parametrize(
    "mode", [Mode.EAGER, Mode.EAGER_LAST, Mode.RANDOM], ids=lambda m: m.name.lower()
)
def test_orders(mode: Mode, landing: Landing, build: Build) -> None:
    rng = np.random.default_rng(12)
    library = build("wgmma_orders")
    wrong = 0
    found: set[Fault | None] = set()
    for _ in range(300):
        program = Program.random(rng)
        is_wrong = program.has_fault()
        wrong += is_wrong
        fault = fault_in(program.case(), library, mode=mode, landing=landing, workers=1)
        assert (fault is not None) == is_wrong, (fault, program)
        found.add(fault)
    assert 75 < wrong < 225  # the programs are neither all wrong nor all right
    assert found == {None, Fault.SHARED_RACE, Fault.MISSING_FENCE}


def fault_in(case: Case, library: Path, **options: Any) -> Fault | None:
    try:
        case.launch(library, **options)
    except AttnError as error:
        (diagnostic,) = error.diagnostics
        assert isinstance(diagnostic, CpuRunFault), diagnostic
        return diagnostic.fault
    return None
