"""Races under barriers in memory and by number, against their definition: random programs.

Two accesses of one element by different threads race when one of them writes and neither is known to the
other thread when it makes its own.  What a thread knows it hands on where it arrives, and learns where it
waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attngen.cpu.faults import Fault
from tests.cpu.host_kernels import ALL_MODES, Case
from tests.cpu.test_race_detector import race_of

Build = Callable[..., Path]
Array = npt.NDArray[Any]

THREADS, WARPS, ELEMENTS, MOST_STEPS = 128, 4, 8, 12
READ, WRITE = 1, 2
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
            kind = READ if rng.random() < 0.6 else WRITE
            at = int(rng.integers(steps)), int(rng.choice(actors))
            accesses[at] = kind + 4 * int(rng.integers(2))
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

    def has_race(self) -> bool:
        known = np.zeros((THREADS, THREADS), int)  # of each thread: so many steps of every other
        done: list[tuple[int, int, int, int]] = []  # step, thread, kind, element
        for step, (accesses, meets) in enumerate(zip(self.accesses, self.meets, strict=True)):
            for thread in np.flatnonzero(accesses):
                kind, element = int(accesses[thread]) % 4, int(accesses[thread]) // 4
                for other_step, other, other_kind, other_element in done:
                    if (
                        other != thread
                        and other_element == element
                        and WRITE in (kind, other_kind)
                        and known[thread, other] <= other_step
                    ):
                        return True
                done.append((step, int(thread), kind, element))
            known[range(THREADS), range(THREADS)] = step + 1
            learn(known, meets & ARRIVES, meets & WAITS)
            learn(known, meets & (SYNCS | COMES), meets & SYNCS)
            for warp in range(WARPS):
                lanes = np.arange(THREADS) // 32 == warp
                learn(known, meets & WARP & (lanes * WARP), meets & WARP & (lanes * WARP))
            learn(known, meets & BLOCK, meets & BLOCK)
        return False

    def case(self) -> Case:
        arrivals = np.count_nonzero(self.meets & ARRIVES, axis=1).astype(np.int32)
        return Case(
            "wgmma_orders",
            {
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
        )


def learn(known: Array, givers: Array, takers: Array) -> None:
    """What any of the givers knows, all takers know from now on."""
    if givers.any():
        known[takers != 0] = np.maximum(known[takers != 0], known[givers != 0].max(0))


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
def test_races_under_barriers(mode: object, build: Build) -> None:
    rng = np.random.default_rng(12)
    library = build("wgmma_orders")
    races = 0
    for _ in range(400):
        program = Program.random(rng)
        expected = Fault.SHARED_RACE if program.has_race() else None
        races += expected is not None
        assert race_of(program.case(), library, mode=mode, workers=1) is expected, program
    assert 100 < races < 300  # the programs are neither all wrong nor all right
