"""Integers near the ends of their types, large scores, and what must not reach a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngen
from attngen.diagnostics.diagnostic import AttnError

TOKENS = 40


def operands(rows: int = TOKENS, keys: int = TOKENS, Hq: int = 1, D: int = 16) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (1, Hq, rows, D), (1, 1, keys, D), (1, 1, keys, D)
    return [rng.standard_normal(s).astype(np.float16) for s in shapes]


def assert_right(
    body: str,
    given: list[np.ndarray],
    *,
    schedule: str = "",
    function_error: float = 0.0,
    **named: Any,
) -> np.ndarray:
    """o of a variant that is `body`, in the bound with its LSE."""
    kernel = attngen.compile_text(
        f"attention a {{\n{body}\noutput o, lse\n}}\n",
        engine="cpu",
        schedule=f"kernel forward_mma; {schedule}",
    )
    tensors = {n: x for n, x in named.items() if isinstance(x, np.ndarray)}
    params = {n: x for n, x in named.items() if n not in tensors}
    right = attngen.reference(
        kernel.unit, *given, tensors=tensors, params=params, function_error=function_error
    )
    o, lse = kernel(*given, **named)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
    result: np.ndarray = o
    return result


@pytest.mark.parametrize(
    "mask",
    [
        "x[b, kv] - x[b, qpos] == 0",
        "x[b, kv] + x[b, kv] == 2",
        "2 * x[b, kv] == x[b, qpos] + 1",
        "-x[b, kv] == x[b, qpos] - 1",
        "x[b, kv] + kv == x[b, qpos] + qpos",
        "abs(x[b, kv] - x[b, qpos]) <= 0 and kv <= qpos",
        "t[q // 8, x[b, kv]]",
    ],
)
def test_tiles_of_int64_are_unknown_rather_than_wrong(mask: str, host_compiler: None) -> None:
    x = (np.arange(TOKENS) % 3 == 0).astype(np.int64)[None]
    t = np.arange(10).reshape(5, 2) % 3 != 0
    declared = "tensor x : int64[B, Skv]\ntensor t : bool[N, M]\n"
    assert_right(f"{declared}mask {mask}", operands(), x=x, t=t)


@pytest.mark.parametrize(
    ("mask", "p"),
    [("doc[b, kv] * p >= qpos", 2**33), ("t[(q * kv) % p]", 5), ("doc[b, kv] + p > qpos", -5)],
)
def test_params_without_a_range(mask: str, p: int, host_compiler: None) -> None:
    doc = (np.arange(TOKENS) % 2).astype(np.int32)[None]
    t = np.array([True, False, True, True, False])
    declared = "param p : int\ntensor doc : int32[B, Skv]\ntensor t : bool[N]\n"
    assert_right(f"{declared}mask {mask}", operands(), doc=doc, t=t, p=p)


def test_a_tile_with_more_keys_than_bits_is_refused() -> None:
    text = "attention a {\ntensor doc : int32[B, Skv]\nmask doc[b, qpos] == doc[b, kv]\n}\n"
    kernel = attngen.compile_text(text, schedule="kernel forward_mma; tile q = 64, kv = 208")
    with pytest.raises(AttnError, match="at most 128"):
        kernel.render(dtype="fp16", head_dim=16)


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0, 1200.0])
def test_large_scores(size: float, host_compiler: None) -> None:
    q = np.full((1, 1, 16, 64), size, np.float16)
    k = q.copy()
    k[0, 0, ::2] -= np.float16(size / 256)
    assert_right("", [q, k, operands(16, 16, D=64)[2]])


@pytest.mark.parametrize("cap", [1.0, 50.0, 1000.0])
@pytest.mark.parametrize("size", [0.01, 0.1, 1.0, 10.0])
def test_softcap_of_small_and_large_scores(cap: float, size: float, host_compiler: None) -> None:
    q, k, v = operands(64, 5, D=64)
    body = f"score softcap(s, {cap})"
    # A tanh that is multiplied by a small cap is short, and errs by 2^-21.
    error = cap * 2.0**-21 if cap < 100.0 else 0.0
    given = [(q * np.float16(size)).astype(np.float16), k, v]
    assert_right(body, given, function_error=error)


def test_distances_that_grow_fast(host_compiler: None) -> None:
    q, k, v = operands()
    assert_right("score where((100000007 * (kv - qpos) + 3) * 1.0 == 3.0, s + 6.0, s)", [q, k, v])
    assert_right("score s + 0.001 * (7 * kv - 3 * qpos)", [q, k, v])


def test_a_value_that_no_row_of_the_tile_sees_reaches_none(host_compiler: None) -> None:
    q, k, v = operands(256, 266)
    v[0, 0, 150] = np.nan  # row 140 is the first to see it, and is in the tile from 128 on
    kernel = attngen.compile_text("attention a {\nmask causal\n}\n", engine="cpu")
    o = kernel(q, k, v).astype(np.float32)
    assert np.isfinite(o[0, 0, :128]).all()
    assert np.isnan(o[0, 0, 140:]).all()


def test_an_empty_row_is_zero_whatever_others_see(host_compiler: None) -> None:
    q, k, v = operands()
    v[0, 0, 3] = np.inf
    kernel = attngen.compile_text(
        "attention a {\nmask causal and q != 10\noutput o, lse\n}\n", engine="cpu"
    )
    o, lse = kernel(q, k, v)
    assert (o[0, 0, 10] == 0).all()
    assert lse[0, 0, 10] == -np.inf


def test_many_heads_that_share_keys(host_compiler: None) -> None:
    small = "tile q = 16, kv = 16; warps 1"  # that each block is short
    assert_right("", operands(1, 1, Hq=66_000, D=8), schedule=small)
