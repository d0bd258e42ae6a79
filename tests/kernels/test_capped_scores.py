"""Scores between two ends: those that fall with q.k, and what log-sum-exp shows of functions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngen
from attngen.oracle.dense import Reference

FAMILIES = {"forward_mma": "sm_80", "forward_wgmma": "sm_90a"}


def compute(lines: str, family: str, q: Any, k: Any, v: Any) -> tuple[Any, Any, Reference]:
    """o, lse and what is right, in bf16."""
    text = f"attention a {{\n{lines}\noutput o, lse\n}}\n"
    schedule, arch = f"kernel {family}", FAMILIES[family]
    kernel = attngen.compile_text(text, engine="cpu", arch=arch, schedule=schedule)
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    o, lse = kernel(q, k, v)
    return o, lse, attngen.reference(kernel.unit, q, k, v, dtype="bf16")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "lines",
    [
        "scale -0.125\nscore softcap(s, 1000.0)",
        "score softcap(-s, 1000.0)",
        "score 2000.0 * sigmoid(-s / 500.0)",
        "scale 0.125\nscore softcap(s, 1000.0)",
    ],
)
def test_scores_that_fall_with_the_product(lines: str, family: str, host_compiler: None) -> None:
    """What is the largest product is the smallest score, then."""
    q = np.full((1, 1, 128, 64), 1.25)
    k = np.full((1, 1, 512, 64), 10.0)
    k[:, :, 256:] = -10.0
    v = np.random.default_rng(0).standard_normal((1, 1, 512, 64))
    o, lse, right = compute(f"{lines}\nmask kv >= 0", family, q, k, v)
    assert np.isfinite(np.asarray(lse)).all()
    assert right.accepts_o(o).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cap", [20, 30, 50, 100, 1000])
def test_small_scores_beside_a_cap(family: str, cap: int, host_compiler: None) -> None:
    rng = np.random.default_rng(3)
    q = 0.01 * rng.standard_normal((1, 2, 130, 64))
    k, v = rng.standard_normal((2, 1, 1, 200, 64))
    o, lse, right = compute(f"score softcap(s, {cap}.0)", family, q, k, v)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
