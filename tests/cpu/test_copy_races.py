"""Races of asynchronous copies against their definition: random programs, judged pair by pair.

A copy lasts from its start to the wait for its group.  Two events race when they touch one byte,
at least one writes, and neither is over before the other begins: for one thread by the order of
its program, else by a barrier that both take part in.  A matrix is read by all lanes of a warp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from attngen.cpu.faults import Fault
from tests.cpu.host_kernels import ALL_LANDINGS, ALL_MODES, Case
from tests.cpu.test_race_detector import race_of

Build = Callable[..., Path]

THREADS, WARPS, PLACES = 96, 3, 4  # places of 16 bytes
READ, WRITE, COPY, READ16, WRITE_BY_ADDRESS = 1, 2, 3, 4, 5
KINDS = (READ, WRITE, COPY, READ16, WRITE_BY_ADDRESS)
SIZES = {READ: 4, WRITE: 4, COPY: 16, READ16: 16, WRITE_BY_ADDRESS: 4}
NO_BARRIER, WARP, BLOCK = 0, 1, 2
IN_MATRIX, IN_ACCESS, IN_WAIT = 0, 1, 2  # the order within a step


@dataclass(frozen=True)
class Event:
    """What happens to some bytes, by one thread, or by all lanes of a warp (thread is None)."""

    thread: int | None
    warp: int
    first: tuple[int, int]  # (step, place in the step) where it begins
    last: tuple[int, int]
    is_write: bool
    bytes: range


@dataclass(frozen=True)
class Program:
    """What every thread does; waits and barriers as in kernels/mma_accesses.cu."""

    accesses: np.ndarray  # [steps, threads]
    waits: np.ndarray  # [steps, threads]
    matrices: np.ndarray  # [steps, warps]
    barriers: np.ndarray  # [steps, warps]

    @staticmethod
    def random(rng: np.random.Generator) -> Program:
        # Few threads, mostly of one warp, few places, so that much meets.
        steps = int(rng.integers(2, 7))
        threads = rng.choice([0, 1, 2, 31, 32, 64], size=3, replace=False)
        accesses = np.zeros((steps, THREADS), np.int32)
        waits = np.zeros((steps, THREADS), np.int32)
        for _ in range(int(rng.integers(2, 8))):
            kind = int(rng.choice(KINDS, p=[0.2, 0.1, 0.4, 0.2, 0.1]))
            index = int(rng.integers(PLACES * 16 // SIZES[kind]))
            step = int(rng.integers(steps))
            thread = int(rng.choice(threads))
            accesses[step, thread] = kind + 8 * index
            if kind == COPY:  # wait in time, mostly
                waits[min(step + int(rng.integers(2)), steps - 1), thread] = rng.choice(
                    [0, 1, 2, 3, 4], p=[0.1, 0.1, 0.5, 0.2, 0.1]
                )
        matrices = rng.integers(1, PLACES + 1, size=(steps, WARPS))
        matrices[rng.random((steps, WARPS)) < 0.9] = 0
        barriers = rng.choice([NO_BARRIER, WARP], size=(steps, WARPS))
        barriers[rng.random(steps) < 0.5] = BLOCK
        return Program(accesses, waits, matrices.astype(np.int32), barriers.astype(np.int32))

    def events(self) -> Iterator[Event]:
        steps = len(self.accesses)
        for step, warp in zip(*np.nonzero(self.matrices), strict=True):
            place = 16 * (int(self.matrices[step, warp]) - 1)
            at = (int(step), IN_MATRIX)
            yield Event(None, int(warp), at, at, False, range(place, place + 16))
        for thread in range(THREADS):
            open_copies: list[tuple[int, tuple[int, int], range]] = []  # group, start, bytes
            groups = 0
            for step in range(steps + 1):  # behind the last one, all are waited for
                access = int(self.accesses[step, thread]) if step < steps else 0
                kind, index = access % 8, access // 8
                size = SIZES.get(kind, 0)
                touched, at = range(index * size, index * size + size), (step, IN_ACCESS)
                if kind == COPY:
                    open_copies.append((groups, at, touched))
                elif kind:
                    is_write = kind in (WRITE, WRITE_BY_ADDRESS)
                    yield Event(thread, thread // 32, at, at, is_write, touched)
                wait = int(self.waits[step, thread]) if step < steps else 2
                groups += wait > 0
                landed = groups - (wait - 2) if wait >= 2 else 0
                for group, start, places in open_copies:
                    if group < landed:
                        yield Event(thread, thread // 32, start, (step, IN_WAIT), True, places)
                open_copies = [c for c in open_copies if c[0] >= landed]

    def is_over_before(self, a: Event, b: Event) -> bool:
        if a.thread is not None and a.thread == b.thread:
            return a.last < b.first
        for step in range(a.last[0], b.first[0]):
            of_a = self.barriers[step, a.warp]
            if of_a == BLOCK or (of_a == WARP and a.warp == b.warp):
                return True
        return False

    def has_race(self) -> bool:
        return any(
            (a.is_write or b.is_write)
            and set(a.bytes) & set(b.bytes)
            and not self.is_over_before(a, b)
            and not self.is_over_before(b, a)
            for a, b in combinations(self.events(), 2)
        )

    def case(self) -> Case:
        return Case(
            "mma_accesses",
            {
                "accesses": self.accesses,
                "waits": self.waits,
                "matrices": self.matrices,
                "barriers": self.barriers,
                "source": np.zeros(PLACES * 4, np.uint32),
                "steps": len(self.accesses),
            },
            {},
            grid=1,
            threads=THREADS,
            shared_bytes=PLACES * 16,
        )


@pytest.mark.parametrize("landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower())
@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
def test_races_of_copies(mode: object, landing: object, build: Build) -> None:
    rng = np.random.default_rng(8)
    library = build("mma_accesses")
    races = 0
    for _ in range(400):
        program = Program.random(rng)
        expected = Fault.SHARED_RACE if program.has_race() else None
        races += expected is not None
        found = race_of(program.case(), library, mode=mode, landing=landing, workers=1)
        assert found is expected, program
    assert 100 < races < 300  # the programs are neither all wrong nor all right
