"""Scores that are added while q.k is scaled, in both families for tensor cores."""

from __future__ import annotations

import numpy as np
import pytest

import attngen

ROWS, KEYS, D = 40, 70, 16
TARGETS = {"forward_mma": "sm_80", "forward_wgmma": "sm_90a"}
SCORES = (
    # Far below 0: nothing may be taken relative to 0 before a row has a maximum.
    "s - 1000.0",
    "s - 30.0 * kv",
    # What grows from key to key, upwards and downwards, with a factor and without.
    "s + (q - kv)",
    "s - (2 * kv - q)",
    "s + 0.5 * (q - kv)",
    "s - c * (3 * kv - q)",
    "c * (kv - q) + s",
    "s + slope[h] * (q - 2 * kv)",
    "s - bias[h, q, kv]",
)


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("score", SCORES)
def test_score(score: str, family: str, host_compiler: None) -> None:
    text = f"""attention a {{
    param     c : float
    tensor    slope : float[Hq]
    tensor    bias : float[Hq, Sq, Skv]
    score     {score}
    output    o, lse
}}
"""
    rng = np.random.default_rng(0)
    shapes = (1, 2, ROWS, D), (1, 1, KEYS, D), (1, 1, KEYS, D)
    q, k, v = (rng.standard_normal(s).astype(np.float16) for s in shapes)
    given = {
        "slope": np.array([0.25, 0.75], np.float32),
        "bias": rng.standard_normal((2, ROWS, KEYS)).astype(np.float32),
    }
    kernel = attngen.compile_text(
        text,
        engine="cpu",
        arch=TARGETS[family],
        schedule=f"kernel {family}; tile kv = 32",
    )
    used = {t.name for t in kernel.attention.tensors}
    tensors = {n: x for n, x in given.items() if n in used}
    params = {"c": 0.375} if kernel.attention.params else {}
    right = attngen.reference(kernel.unit, q, k, v, tensors=tensors, params=params)
    o, lse = kernel(q, k, v, **tensors, **params)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
