"""Right kernels run, in every scheduling mode, and give the right answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attngen.cpu.run import Mode
from tests.cpu.host_kernels import ALL_MODES, CASES, attention_case, diffuse_case, reduce_case

Build = Callable[..., Path]


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("name", CASES)
def test_runs_in_every_mode(name: str, mode: Mode, build: Build) -> None:
    CASES[name]().run(build(name), mode=mode, seed=3)


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_agree(seed: int, build: Build) -> None:
    attention_case(1, 64, 100).run(build("attention"), mode=Mode.RANDOM, seed=seed)


@pytest.mark.parametrize("workers", [1, 2, 5, 64])
def test_any_number_of_workers(workers: int, build: Build) -> None:
    case = reduce_case(blocks=9)
    case.run(build("reduce"), workers=workers)


def test_is_right_without_checks(build: Build) -> None:
    attention_case().run(build("attention"), check=False)


def test_the_same_library_runs_again_and_again(build: Build) -> None:
    library = build("diffuse")
    for _ in range(20):
        diffuse_case().run(library)


def test_an_empty_grid_does_nothing(build: Build) -> None:
    case = reduce_case(blocks=1)
    case.grid = 0
    assert case.launch(build("reduce")).switches == 0


def test_counts_what_the_threads_did(build: Build) -> None:
    case = diffuse_case()
    report = case.launch(build("diffuse"), workers=1)
    threads, blocks, steps = 96, 2, 5
    assert report.global_loads == report.global_stores == threads * blocks
    assert report.shared_writes == threads * blocks * (1 + steps)
    assert report.shared_reads == threads * blocks * (1 + 3 * steps)
    assert report.index_reads == threads * blocks
    assert report.notes == 0  # no integers in shared memory
    assert report.meetings == blocks * 2 * steps
    # At each barrier all but the last thread hand over, and so does each that ends.
    assert report.switches >= (threads - 1) * blocks * 2 * steps


def test_counts_where_a_warp_meets(build: Build) -> None:
    """Five shuffles in each of four warps, a barrier, and five more in the first warp."""
    case = reduce_case(blocks=7)
    report = case.launch(build("reduce"))
    assert report.meetings == 7 * (5 * 4 + 1 + 5)


def test_many_small_blocks(build: Build) -> None:
    case = reduce_case(blocks=2000)
    case.run(build("reduce"))
    assert np.isfinite(case.arguments["out"]).all()
