"""Key and query ranges against enumeration: no pair that attends lies outside of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.analysis.key_ranges import (
    MOST_RANGES,
    Range,
    derive_key_ranges,
    derive_query_ranges,
)
from attngen.ir.attention import Attention
from attngen.ir.printer import print_expr
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import symbols
from attngen.passes.fold_constants import fold_expr
from tests.analysis.masks import AFFINE, TRUTHS, B, build, make_tensors, pairs
from tests.analysis.masks import symbols as sizes_and_params


def tiles_of(count: int, size: int, start: int = 0) -> tuple[Any, Any]:
    """First and last position of each tile, from the position `start` on."""
    first = np.arange(start, count, size)
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
    count = Skv if transposed else Sq
    first, last = tiles_of(count, size, seed % min(size, max(count, 1)))
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


@settings(max_examples=400)
@given(mask=st.one_of(TRUTHS, AFFINE), **PROBLEMS)
def test_no_key_that_is_seen_is_left_out(
    mask: str, shape: tuple[int, int], size: int, w: int, seed: int
) -> None:
    for seen, covered in seen_and_covered(build(mask), shape, size, w, seed):
        assert (covered | ~seen).all(), mask


@settings(max_examples=400)
@given(mask=st.one_of(TRUTHS, AFFINE), **PROBLEMS)
def test_no_row_that_sees_is_left_out(
    mask: str, shape: tuple[int, int], size: int, w: int, seed: int
) -> None:
    for seen, covered in seen_and_covered(build(mask), shape, size, w, seed, transposed=True):
        assert (covered | ~seen).all(), mask


@settings(max_examples=200)
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


# ---- masks that must come out exact -----------------------------------------------------------

EXACT = {
    "no mask": ("true", 1),
    "nothing": ("false", 0),
    "causal": ("causal", 1),
    "causal, top left": ("causal(top_left)", 1),
    "window": ("window(left = w - 1)", 1),
    "two-sided window": ("window(left = 3, right = w)", 1),
    "prefix": ("prefix(plen[b])", 1),
    "key padding by length": ("kv < plen[b]", 1),
    "chunks": ("chunked(8)", 1),
    "chunks, causal": ("causal and chunked(8)", 1),
    "chunks of a param": ("chunked(w)", 1),
    "sink and window": ("causal and (kv < 3 or window(left = w - 1))", 2),
    "sink of a param and window": ("causal and (kv < w or window(left = 4))", 2),
    "global keys at both ends": ("kv < 2 or kv >= Skv - 3 or abs(kv - qpos) <= w", 3),
    "global rows": ("abs(kv - qpos) <= w or q < 5 or kv < 2", 2),
    "neighborhood of one axis": ("neighborhood(qpos, kv, Skv, 5)", 1),
    "blocks of a block window": ("abs(qpos // 4 - kv // 4) <= 1", 1),
    "not causal": ("not causal", 1),
    "away from the diagonal": ("abs(kv - qpos) > 4", 2),
    "one half or the other": ("(qpos >= Skv // 2) == (kv >= Skv // 2)", 2),
    "half by half": ("where(qpos < plen[b], kv < plen[b], kv <= qpos)", 1),
    "some batches only": ("b == 0 or causal", 1),
}


@pytest.mark.parametrize("name", EXACT)
def test_named_masks_have_exact_key_ranges(name: str) -> None:
    mask, most = EXACT[name]
    attention = build(mask)
    assert len(derive_key_ranges(attention).ranges) <= most
    for shape in ((40, 40), (17, 43), (43, 17), (1, 20), (5, 1), (5, 0)):
        if "neighborhood" in mask and shape[0] != shape[1]:
            continue
        for size in (1, 7, 8):
            for seen, covered in seen_and_covered(attention, shape, size, w=5, seed=shape[0]):
                assert (covered == seen).all(), (shape, size)


@pytest.mark.parametrize(
    "name", [n for n in EXACT if n not in ("global keys at both ends", "neighborhood of one axis")]
)
def test_named_masks_have_exact_query_ranges(name: str) -> None:
    attention = build(EXACT[name][0])
    for shape in ((40, 40), (17, 43), (43, 17), (1, 20), (5, 1)):
        for size in (1, 7, 8):
            found = seen_and_covered(attention, shape, size, w=5, seed=shape[0], transposed=True)
            for seen, covered in found:
                assert (covered == seen).all(), (shape, size)


@pytest.mark.parametrize(
    "mask",
    [
        "kv <= q % 4 + 3", "kv >= q % 5 + 3", "kv <= q // 2 - q % 5", "kv <= q % 7 // -3 + 8",
        "kv >= q % 7 // -3 + 9", "kv <= clamp(q, q % 4, 9 - q)", "kv >= max(q % 9 // 2 + 2, 7 - q)",
        "kv <= q % w + q % 3 * 2", "kv >= q % 8 * -2 + 20", "abs(kv - q % 6) <= 2",
        "kv <= where(b == 0, q % 4, 3 - q)", "kv >= where(q % 3 == 1, q % 4 + 2, 9 - q)",
    ],
)  # fmt: skip
def test_limits_that_rise_and_fall_are_bounded_term_by_term(mask: str) -> None:
    attention = build(mask)
    for size in (1, 3, 8):
        for seen, covered in seen_and_covered(attention, (24, 30), size, w=5, seed=2):
            assert (covered | ~seen).all()
            assert covered.sum() < covered.size or size == 8


def test_ranges_are_the_rest_of_the_mask_where_a_part_depends_on_data() -> None:
    causal = derive_key_ranges(build("causal")).ranges
    for part in ("document(doc)", "keep[b, kv]", "dilated(2)", "table[q // 4, kv // 4]"):
        ranges = derive_key_ranges(build(f"causal and {part}")).ranges
        assert [texts(r) for r in ranges] == [texts(r) for r in causal]


def texts(r: Range) -> tuple[str, str]:
    return print_expr(fold_expr(r.begin)), print_expr(fold_expr(r.end))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("causal", [("0", "qpos_last + 1")]),
        ("window(left = w - 1)", [("max(0, qpos_first - w + 1)", "qpos_last + 1")]),
        ("prefix(plen[b])", [("0", "max(min(Skv, plen[b]), qpos_last + 1)")]),
        ("causal and chunked(8)", [("max(0, qpos_first // 8 * 8)", "qpos_last + 1")]),
        ("document(doc) and causal", [("0", "qpos_last + 1")]),
        (
            "kv + qpos <= w and kv - qpos <= w",
            [("0", "min(Skv, w - qpos_first + 1, qpos_last + w + 1, w + 1)")],
        ),
    ],
)
def test_ranges_are_a_few_integer_operations(mask: str, expected: list[tuple[str, str]]) -> None:
    assert [texts(r) for r in derive_key_ranges(build(mask)).ranges] == expected


def test_a_range_names_only_what_its_mask_depends_on() -> None:
    for mask, names in (
        ("causal", {"qpos_last"}),
        ("kv < plen[b]", {"Skv", "b"}),
        ("kv < w * (h + 1)", {"Skv", "w", "h"}),
    ):
        (r,) = derive_key_ranges(build(mask)).ranges
        assert symbols(r.begin, r.end) == names


@pytest.mark.parametrize(
    ("mask", "may"),
    [
        ("causal", False),
        ("causal(top_left)", False),
        ("window(left = w - 1)", False),
        ("window(left = w - 5)", True),
        ("prefix(plen[b])", False),
        ("causal and chunked(8)", False),
        ("causal and document(doc)", False),
        ("causal and dilated(w)", False),
        ("kv < 1 or doc[b, kv] == 3", False),
        ("kv == Skv - 1", False),
        ("kv < plen[b]", True),
        ("keep[b, kv]", True),
        ("kv < qpos", True),
        ("qpos < 5 and causal", True),
        ("not (kv > qpos)", False),
        ("where(b == 0, causal, kv == 0)", False),
        ("where(b == 0, causal, kv == w)", True),
        ("kv / 2.0 <= qpos / 2.0", True),
    ],
)
def test_whether_a_row_can_be_empty(mask: str, may: bool) -> None:
    assert derive_key_ranges(build(mask)).may_have_empty_row is may


@pytest.mark.parametrize(
    ("mask", "part", "words"),
    [
        ("causal and keep[b, kv]", "keep[b, kv]", "reads a tensor at every row or key"),
        ("kv + doc[b, kv] < 5", "kv + doc[b, kv] < 5", "reads a tensor"),
        ("dilated(2)", "(qpos - kv) % 2 == 0", "at regular distances"),
        ("kv / 2 < 5.0", "float(kv) / 2.0 < 5.0", "compares floats"),
        ("kv * plen[b] < q", "kv * plen[b] < q", "declare it `where 1 <= …`"),
        ("kv * n + q < n", "kv * n + q < n", "declare the range"),
        ("kv * q < 9", "kv * q < 9", "with each of `q` and `kv` once"),
    ],
)
def test_notes_say_which_part_sets_no_limit_and_why(mask: str, part: str, words: str) -> None:
    notes = derive_key_ranges(build(mask, "param n : int")).notes
    assert any(f"`{part}`" in note and words in note for note in notes), notes


def test_masks_that_are_used_whole_have_no_notes() -> None:
    for mask, _ in EXACT.values():
        assert not derive_key_ranges(build(mask)).notes, mask


# ---- integers of any size ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [
        "kv < n", "n <= kv", "kv // 8 <= n", "kv // 8 > n", "kv - qpos <= n", "qpos - kv < n",
        "min(n, qpos) >= kv", "2 * kv <= n", "abs(kv - qpos) <= n", "kv <= n // 3 and q < n",
        "where(n > 5, kv <= n, kv >= n)", "clamp(n, 0, Skv) <= kv", "q <= n or kv < 2",
        "kv <= n - plen[b] * 1073741824",
    ],
)  # fmt: skip
def test_params_of_any_size_leave_no_key_out(mask: str) -> None:
    attention = build(mask, "param n : int")
    ranges = derive_key_ranges(attention).ranges
    Sq, Skv = 9, 30
    first, last = tiles_of(Sq, 4)
    for n in (-(2**63) + 1, -(2**48), -5, 0, 7, 40, 2**48 + 1, 2**62, 2**63 - 1):
        known = {**sizes_and_params(Sq, Skv, 1, 0, 0), "n": np.int64(n)}
        tile = {"q_first": first, "q_last": last}
        tile |= {f"qpos_{end}": tile[f"q_{end}"] + Skv - Sq for end in ("first", "last")}
        tensors = {"plen": np.array([2**29])}
        right = pairs(attention, known, tensors, np.arange(Sq), np.arange(Skv))
        seen = np.logical_or.reduceat(right, first, axis=0)
        covered = inside(ranges, {**known, **tile}, tensors, Skv)
        assert (covered | ~seen).all(), n
