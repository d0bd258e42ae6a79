"""Row states over parts of a problem: ranges, logical indices, merging (O25)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.api import Kernel
from attngen.partial import PartialState

from .texts import (
    FULL,
    HQ,
    PLAIN,
    SIGMOID,
    SINK,
    SKV,
    SQ,
    B,
    D,
    catch,
    draw,
    make_qkv,
    make_tensors,
    words,
)

SINKS = np.array([-np.inf, 0.0, 5.0, 100.0], np.float32)
BOTH = ("numpy", "cpu")


def merge_all(states: list[PartialState]) -> PartialState:
    total = states[0]
    for state in states[1:]:
        total = total.merge(state)
    return total


def cut(size: int, *places: int) -> list[tuple[int, int]]:
    """The half-open ranges between some places, the empty ones included."""
    return list(itertools.pairwise((0, *sorted(places), size)))


@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize(
    ("text", "named"),
    [(PLAIN, {}), (SINK, {"sink": SINKS}), (SIGMOID, {}), (FULL, make_tensors())],
    ids=["softmax", "sink", "sigmoid", "tensors"],
)
def test_any_cut_of_the_keys_gives_the_whole(
    engine: Any, text: str, named: dict[str, Any], host_compiler: None
) -> None:
    kernel = attngen.compile_text(text, engine=engine)
    q, k, v = make_qkv()
    found = kernel(q, k, v, return_lse=text is not SIGMOID, **named)
    right, right_lse = found if isinstance(found, tuple) else (found, None)
    for places in ((), (10,), (0, 21), (3, 3, 17), (1, 2, 5, 13, 20)):
        parts = [kernel.partial(q, k, v, kv_range=r, **named) for r in cut(SKV, *places)]
        for order in (parts, parts[::-1]):
            o, lse = merge_all(order).finalize()
            assert np.allclose(o, right, atol=2e-6, rtol=2e-6)
            assert (lse is None) == (right_lse is None)
            assert right_lse is None or np.allclose(lse, right_lse, atol=2e-6, rtol=2e-6)
    assert kernel.compilations == 1


@pytest.mark.parametrize(
    "schedule", ["passes three", "passes two", "loop kv, q", "normalize every_tile"]
)
def test_a_state_does_not_depend_on_the_schedule(schedule: str) -> None:
    q, k, v = make_qkv()
    kernels = [
        attngen.compile_text(SINK, engine="numpy", schedule=lines)
        for lines in ("tile q = 8, kv = 8", f"{schedule}; tile q = 4, kv = 4")
    ]
    one, two = (kernel.partial(q, k, v, kv_range=(2, 19), sink=SINKS) for kernel in kernels)
    for name in ("m", "l", "acc", "sink"):
        assert np.allclose(getattr(one, name), getattr(two, name), atol=1e-6, rtol=1e-6)
    mixed = (
        kernels[0]
        .partial(q, k, v, kv_range=(0, 9), sink=SINKS)
        .merge(kernels[1].partial(q, k, v, kv_range=(9, SKV), sink=SINKS))
    )
    right, right_lse = kernels[0](q, k, v, sink=SINKS)
    o, lse = mixed.finalize()
    assert np.allclose(o, right, atol=2e-6)
    assert np.allclose(lse, right_lse, atol=2e-6)


def test_merge_is_associative_and_has_an_identity() -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    q, k, v = make_qkv()
    k = 30 * k  # far apart maxima
    a, b, c = (kernel.partial(q, k, v, kv_range=r) for r in cut(SKV, 6, 14))
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert np.array_equal(left.m, right.m)
    assert np.allclose(left.l, right.l, rtol=1e-6)
    assert np.allclose(left.acc, right.acc, rtol=1e-5, atol=1e-6)
    nothing = kernel.partial(q, k, v, kv_range=(7, 7))
    assert np.isneginf(nothing.m).all()
    assert not nothing.l.any()
    assert not nothing.acc.any()
    for merged in (a.merge(nothing), nothing.merge(a)):
        assert all(np.array_equal(getattr(merged, n), getattr(a, n)) for n in ("m", "l", "acc"))
    o, lse = nothing.merge(nothing).finalize()
    assert not o.any()
    assert np.isneginf(lse).all()


def test_a_sink_joins_once() -> None:
    kernel = attngen.compile_text(SINK, engine="numpy")
    q, k, v = make_qkv()
    parts = [kernel.partial(q, k, v, kv_range=r, sink=SINKS) for r in cut(SKV, 5, 11)]
    sink = (SINKS + np.arange(B, dtype=np.float32)[:, None])[..., None]
    assert all(np.array_equal(part.sink, sink) for part in parts)
    right, right_lse = kernel(q, k, v, sink=SINKS)
    o, lse = merge_all(parts).finalize()
    assert np.allclose(o, right, atol=1e-6)
    assert np.allclose(lse, right_lse, atol=1e-6)
    assert np.isclose(lse[:, 3], 100 + np.arange(B)[:, None]).all()


# ---- ranges, and arrays that hold only a range -------------------------------------------


@pytest.mark.parametrize("engine", BOTH)
def test_rows_and_keys_keep_their_logical_indices(engine: Any, host_compiler: None) -> None:
    kernel = attngen.compile_text(FULL, engine=engine)
    q, k, v = make_qkv()
    named = make_tensors()
    right, right_lse = kernel(q, k, v, **named)
    for rows in ((0, 9), (2, 7), (8, 9), (4, 4)):
        here = slice(*rows)
        cut_out = kernel.partial(q, k, v, q_range=rows, **named)
        held = kernel.partial(q[:, :, here], k, v, q_range=rows, Sq=SQ, **named)
        for part in (cut_out, held):
            o, lse = part.finalize()
            assert np.allclose(o, right[:, :, here], atol=1e-6)
            assert np.allclose(lse, right_lse[:, :, here], atol=1e-6)
        parts = [
            kernel.partial(
                q[:, :, here], k[:, :, slice(*keys)], v[:, :, slice(*keys)],
                q_range=rows, kv_range=keys, Sq=SQ, Skv=SKV, **named,
            )
            for keys in cut(SKV, 8, 8, 15)
        ]  # fmt: skip
        o, lse = merge_all(parts).finalize()
        assert np.allclose(o, right[:, :, here], atol=2e-6)
        assert np.allclose(lse, right_lse[:, :, here], atol=2e-6)
    assert kernel.compilations == 1


def test_the_lengths_of_the_whole_problem_place_the_rows() -> None:
    """Bottom-right alignment is that of the problem, not that of the arrays."""
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    q, k, v = make_qkv()
    last = kernel.partial(q[:, :, -1:], k, v, q_range=(8, 9), Sq=9).finalize()[0]
    first = kernel.partial(q[:, :, -1:], k, v, q_range=(0, 1), Sq=9).finalize()[0]
    alone = kernel(q[:, :, -1:], k, v)
    assert np.allclose(last, alone, atol=1e-6)
    assert not np.allclose(first, alone, atol=1e-2)


@pytest.mark.parametrize("name", ["q_range", "kv_range"])
@pytest.mark.parametrize(
    "value",
    [(-1, 3), (5, 3), (0, 22), (22, 22), (0.0, 3), (0, None), 3, (1, 2, 3), "ab", (True, 2)],
    ids=repr,
)
def test_what_is_no_range(name: str, value: Any) -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    error = catch(kernel.partial, *make_qkv(), **{name: value})
    assert error.code in ("A631", "A632")
    assert name in error.message()


def test_ranges_may_be_numpys_integers() -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    found = kernel.partial(*make_qkv(), kv_range=[np.int64(2), np.uint8(7)], Sq=np.int32(SQ))
    assert np.array_equal(found.m, kernel.partial(*make_qkv(), kv_range=(2, 7)).m)


def test_ranges_that_do_not_fit_the_arrays() -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    q, k, v = make_qkv()
    error = catch(kernel.partial, q, k, v, kv_range=(0, 20), Skv=100)
    assert (
        words(error) == "argument `k` has shape (2, 2, 21, 8)\nexpected 20 tokens, as kv_range says"
    )
    error = catch(kernel.partial, q, k, v, Skv=100)
    assert words(error) == (
        "argument `k` has shape (2, 2, 21, 8)\n"
        "expected Skv = 100 tokens, or a kv_range that says which it holds"
    )
    error = catch(kernel.partial, q, k, v, q_range=(95, 104), Sq=100)
    assert words(error) == "q_range is [95, 104), which is not a range of [0, 100)"
    for wrong in (-1, 2.5, "100", True):
        assert catch(kernel.partial, q, k, v, Sq=wrong).code == "A632"
    assert catch(kernel.partial, q, k, v, q_range=(0, 9), Sq=2**31).code == "A629"


def test_captured_tensors_are_those_of_the_whole_problem() -> None:
    kernel = attngen.compile_text(FULL, engine="numpy")
    q, k, v = make_qkv()
    named = make_tensors()
    named["doc"] = named["doc"][:, :10]
    error = catch(kernel.partial, q, k[:, :, :10], v[:, :, :10], kv_range=(0, 10), Skv=SKV, **named)
    assert error.message() == "argument `doc` has shape (2, 10)"
    assert "Skv = 21" in words(error)


# ---- states that do not belong together --------------------------------------------------


def test_only_states_of_the_same_rows_merge() -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    q, k, v = make_qkv()
    one = kernel.partial(q, k, v)
    others: list[tuple[Kernel, Any, Any]] = [
        (kernel, q[:, :, :1], k),
        (kernel, q[:, :2], k),
        (kernel, q[:1], k[:1]),
    ]
    for other_kernel, other_q, other_k in others:
        other = other_kernel.partial(other_q, other_k, other_k)
        error = catch(one.merge, other)
        assert error.code == "A634"
        assert "(2, 4, 9)" in words(error)
    sigmoid = attngen.compile_text(SIGMOID, engine="numpy").partial(q, k, v)
    assert "sigmoid" in words(catch(one.merge, sigmoid))
    narrow = kernel.partial(q, k, draw(B, 2, SKV, 3))
    assert "head dim 3" in words(catch(one.merge, narrow))


def test_a_state_is_always_float32() -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    state = kernel.partial(*make_qkv(np.float16))
    o, lse = state.finalize()
    assert {x.dtype for x in (state.m, state.l, state.acc, o, lse)} == {np.dtype(np.float32)}
    assert state.acc.shape == (B, HQ, SQ, D)
