"""A kernel's rms error is at most 1.25 of the NumPy executor's at the same schedule."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngen
from tests.goldens import GOLDENS, Golden, make_problem
from tests.gpu.verify_goldens import reference_of

LIMIT = 1.25


def rms(found: Any, right: np.ndarray) -> float:
    """Over the elements that are numbers."""
    o = found[0] if isinstance(found, tuple) else found
    error = (o.astype(np.float64) - right)[np.isfinite(right)]
    return float(np.sqrt(np.mean(error**2)))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: g.file)
def test_a_golden_rounds_no_worse_than_the_executor(golden: Golden, host_compiler: None) -> None:
    tiles = golden.render().launch.tiles
    problem = make_problem(golden, tiles.tile_q + 5, 2 * tiles.tile_kv + 5)
    right = reference_of(golden, problem).o
    operands = problem.q, problem.k, problem.v
    of_kernel = rms(golden.kernel("cpu")(*operands, **problem.named), right)
    of_executor = rms(golden.kernel("numpy")(*operands, **problem.named), right)
    assert of_kernel <= LIMIT * of_executor


@pytest.mark.parametrize("kernel", ["forward_simt", "forward_mma"])
def test_scores_far_from_zero(kernel: str, host_compiler: None) -> None:
    """One product is far larger than the others, whose digits a long sum would lose (case O11)."""
    rng = np.random.default_rng(0)
    q, k = (
        np.concatenate([np.full((1, 1, n, 1), far), rng.standard_normal((1, 1, n, 127))], -1)
        for n, far in ((64, 448.0), (256, -1880.0))
    )
    v = rng.standard_normal((1, 1, 256, 128))
    operands = tuple(x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    text = "attention far { output o }\n"
    right = attngen.reference(attngen.compile_text(text).unit, *operands).o
    found = {
        engine: rms(attngen.compile_text(text, engine=engine, schedule=schedule)(*operands), right)
        for engine, schedule in (("cpu", f"kernel {kernel}"), ("numpy", None))
    }
    assert found["cpu"] <= LIMIT * found["numpy"]
