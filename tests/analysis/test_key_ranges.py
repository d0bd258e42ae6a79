"""Key and query ranges against enumeration: no pair that attends lies outside of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.analysis.key_ranges import (
    MOST_RANGES,
    Range,
    derive_key_ranges,
    derive_query_ranges,
)
from attngen.ir.attention import Attention
from attngen.ir.semantics import evaluate
from tests.analysis.masks import AFFINE, TRUTHS, B, build, make_tensors, pairs
from tests.analysis.masks import symbols as sizes_and_params


def tiles_of(count: int, size: int) -> tuple[Any, Any]:
    """First and last position of each tile."""
    first = np.arange(0, count, size)
    return first, np.minimum(first + size, count) - 1


def inside(
    ranges: tuple[Range, ...], known: dict[str, Any], tensors: dict[str, Any], count: int
) -> Any:
    """Whether each of `count` positions lies in a range, for each tile; checks their order."""
    tiles = max(np.size(x) for x in known.values())
    covered = np.zeros((tiles, count), bool)
    reached = np.zeros(tiles, np.int64)
    previous = np.zeros(tiles, np.int64)
    for r in ranges:
        begin, end = (
            np.broadcast_to(evaluate(e, known, tensors).data, (tiles,)) for e in (r.begin, r.end)
        )
        assert (begin >= previous).all(), "ranges ascend"
        assert (begin >= reached).all(), "ranges do not overlap"
        assert (end <= count).all(), "ranges end inside of the sequence"
        at = np.arange(count)
        covered |= (begin[:, None] <= at) & (at < end[:, None])
        previous, reached = begin, np.maximum(reached, end)
    return covered


def seen_and_covered(
    attention: Attention,
    shape: tuple[int, int],
    size: int,
    w: int,
    seed: int,
    *,
    transposed: bool = False,
) -> list[tuple[Any, Any]]:
    """For each b: positions that some pair of the tile uses, and those in its ranges."""
    Sq, Skv = shape
    ranges = (derive_query_ranges if transposed else derive_key_ranges)(attention).ranges
    assert len(ranges) <= MOST_RANGES
    tensors = make_tensors(np.random.default_rng(seed), Sq, Skv, False)
    first, last = tiles_of(Skv if transposed else Sq, size)
    found = []
    for b in range(B):
        known = sizes_and_params(Sq, Skv, w, b, 0)
        if transposed:
            tile = {"kv_first": first, "kv_last": last}
        else:
            tile = {"q_first": first, "q_last": last}
            tile |= {f"qpos_{end}": tile[f"q_{end}"] + Skv - Sq for end in ("first", "last")}
        right = pairs(attention, known, tensors, np.arange(Sq), np.arange(Skv))
        right = right.T if transposed else right
        seen = np.logical_or.reduceat(right, first, axis=0)
        found.append((seen, inside(ranges, {**known, **tile}, tensors, right.shape[1])))
    return found


# ---- random masks are sound ------------------------------------------------------------------

PROBLEMS = {
    "shape": st.tuples(st.integers(1, 20), st.integers(1, 20)),
    "size": st.integers(1, 9),
    "w": st.integers(1, 9),
    "seed": st.integers(0, 99),
}


@settings(max_examples=500)
@given(mask=st.one_of(TRUTHS, AFFINE), **PROBLEMS)
def test_no_key_that_is_seen_is_left_out(
    mask: str, shape: tuple[int, int], size: int, w: int, seed: int
) -> None:
    for seen, covered in seen_and_covered(build(mask), shape, size, w, seed):
        assert (covered | ~seen).all(), mask


@settings(max_examples=500)
@given(mask=st.one_of(TRUTHS, AFFINE), **PROBLEMS)
def test_no_row_that_sees_is_left_out(
    mask: str, shape: tuple[int, int], size: int, w: int, seed: int
) -> None:
    for seen, covered in seen_and_covered(build(mask), shape, size, w, seed, transposed=True):
        assert (covered | ~seen).all(), mask


@settings(max_examples=300)
@given(
    mask=st.one_of(TRUTHS, AFFINE),
    shape=st.tuples(st.integers(1, 12), st.integers(0, 8)).map(lambda t: (t[0], sum(t))),
    w=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_rows_that_cannot_be_empty_are_not(
    mask: str, shape: tuple[int, int], w: int, seed: int
) -> None:
    attention = build(mask)
    if derive_key_ranges(attention).may_have_empty_row:
        return
    Sq, Skv = shape
    tensors = make_tensors(np.random.default_rng(seed), Sq, Skv, False)
    for b in range(B):
        known = sizes_and_params(Sq, Skv, w, b, 0)
        assert pairs(attention, known, tensors, np.arange(Sq), np.arange(Skv)).any(axis=1).all()
