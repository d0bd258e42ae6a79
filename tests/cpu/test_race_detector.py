"""The race detector against its definition: random accesses and barriers, judged pair by pair.

Two accesses to one byte, at least one of them a write, by different threads race unless a barrier
that both threads take part in lies between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from attngen.cpu.errors import CpuRunFault
from attngen.cpu.faults import Fault
from attngen.diagnostics.diagnostic import AttnError
from tests.cpu.host_kernels import ALL_MODES, Case

Build = Callable[..., Path]

THREADS, WARPS, BYTES = 96, 3, 16
READ, WRITE = 1, 2
NONE, WARP, BLOCK, SHUFFLE = 0, 1, 2, 3  # a shuffle lets other lanes run, and orders nothing


@dataclass(frozen=True)
class Access:
    block: int
    step: int
    thread: int
    kind: int
    log2_size: int
    index: int

    @property
    def code(self) -> int:
        return self.kind + 4 * self.log2_size + 16 * self.index

    @property
    def bytes(self) -> range:
        size = 1 << self.log2_size
        return range(self.index * size, self.index * size + size)


@dataclass(frozen=True)
class Program:
    """What every thread does; `barriers[block, step, warp]` follows the accesses of a step."""

    accesses: tuple[Access, ...]
    barriers: np.ndarray

    @staticmethod
    def random(rng: np.random.Generator, *, blocks: int, sizes: tuple[int, ...]) -> Program:
        # Few threads, mostly of one warp, few places and few writes, so that much meets.
        steps, count = int(rng.integers(2, 5)), int(rng.integers(2, 10))
        threads = rng.choice([0, 1, 2, 3, 31, 32, 64], size=4, replace=False)
        accesses = {}
        for _ in range(count):
            log2_size = int(rng.choice(sizes))
            access = Access(
                block=int(rng.integers(blocks)),
                step=int(rng.integers(steps)),
                thread=int(rng.choice(threads)),
                kind=WRITE if rng.random() < 0.2 else READ,
                log2_size=log2_size,
                index=int(rng.integers(4 >> log2_size)),
            )
            accesses[access.block, access.step, access.thread] = access
        barriers = rng.choice([NONE, SHUFFLE, WARP], size=(blocks, steps, WARPS))
        barriers[rng.random((blocks, steps)) < 0.15] = BLOCK
        return Program(tuple(accesses.values()), barriers)

    def is_ordered(self, a: Access, b: Access) -> bool:
        """Whether a barrier for both threads lies between two accesses of one block."""
        first, last = sorted((a.step, b.step))
        for step in range(first, last):
            of_a = self.barriers[a.block, step, a.thread // 32]
            if of_a == BLOCK or (of_a == WARP and a.thread // 32 == b.thread // 32):
                return True
        return False

    def has_race(self) -> bool:
        return any(
            WRITE in (a.kind, b.kind)
            and set(a.bytes) & set(b.bytes)
            and (a.block, a.thread) != (b.block, b.thread)
            and (a.block != b.block or not self.is_ordered(a, b))
            for a, b in combinations(self.accesses, 2)
        )

    def case(self, *, is_global: bool) -> Case:
        blocks, steps, _ = self.barriers.shape
        table = np.zeros((blocks, steps, THREADS), np.int32)
        for access in self.accesses:
            table[access.block, access.step, access.thread] = access.code
        return Case(
            "accesses",
            {
                "accesses": table,
                "barriers": self.barriers.astype(np.int32),
                "global": np.zeros(BYTES, np.uint8),
                "steps": steps,
                "is_global": int(is_global),
            },
            {},
            grid=blocks,
            threads=THREADS,
            shared_bytes=BYTES,
            writable=("global",),
        )


def race_of(case: Case, library: Path, **options: object) -> Fault | None:
    try:
        case.launch(library, **options)
    except AttnError as error:
        (diagnostic,) = error.diagnostics
        assert isinstance(diagnostic, CpuRunFault)
        return diagnostic.fault
    return None


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("sizes", [(2,), (1,), (0, 1, 2)], ids=["words", "halves", "mixed"])
def test_shared_memory(sizes: tuple[int, ...], mode: object, build: Build) -> None:
    rng = np.random.default_rng(5)
    races = 0
    for _ in range(300):
        program = Program.random(rng, blocks=1, sizes=sizes)
        expected = Fault.SHARED_RACE if program.has_race() else None
        races += expected is not None
        found = race_of(program.case(is_global=False), build("accesses"), mode=mode, workers=1)
        assert found is expected, program
    assert 60 < races < 240  # the programs are neither all wrong nor all right


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("blocks", [1, 3])
def test_global_memory(blocks: int, mode: object, build: Build) -> None:
    rng = np.random.default_rng(6)
    races = 0
    for _ in range(300):
        program = Program.random(rng, blocks=blocks, sizes=(0, 1, 2))
        expected = Fault.GLOBAL_RACE if program.has_race() else None
        races += expected is not None
        found = race_of(program.case(is_global=True), build("accesses"), mode=mode, workers=2)
        assert found is expected, program
    assert 60 < races < 280
