"""Tile classes against enumeration: `may` false and `all` true are proofs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.analysis.tile_classes import TileClasses, classify_tiles, key_may_attend
from attngen.analysis.tile_map import summarise_box
from attngen.ir.expr import Expr
from attngen.ir.semantics import evaluate
from tests.analysis.masks import (
    DATA,
    FAR,
    TRUTHS,
    B,
    build,
    make_far,
    make_tensors,
    pairs,
    symbols,
)


def tile_symbols(
    classes: TileClasses, known: dict[str, Any], tensors: dict[str, Any], rows: Any, keys: Any
) -> dict[str, Any]:
    """What a kernel would know of a tile: its ends and its summaries."""
    shift = known["Skv"] - known["Sq"]
    at = {**known, "q": rows, "kv": keys, "qpos": rows + shift}
    tile = {
        **known,
        "q_first": rows[0], "q_last": rows[-1],
        "qpos_first": rows[0] + shift, "qpos_last": rows[-1] + shift,
        "kv_first": keys[0], "kv_last": keys[-1],
    }  # fmt: skip
    for summary in (*classes.row_summaries, *classes.key_summaries):
        values = np.asarray(evaluate(summary.value, at, tensors).data).astype(np.int64)
        tile[f"{summary.name}_low"], tile[f"{summary.name}_high"] = values.min(), values.max()
    for box in classes.box_summaries:

        def value(e: Expr, at: dict[str, Any] = tile) -> Any:
            return evaluate(e, at, tensors).data

        tile |= summarise_box(box, tensors[box.value.tensor], value)
    return tile


def judge(
    mask: str,
    Sq: int,
    Skv: int,
    tq: int,
    tk: int,
    w: int,
    seed: int,
    is_sorted: bool,
    more: str = "",
    tensors: dict[str, Any] | None = None,
) -> tuple[int, int]:
    """Check every tile; how many were neither proved empty nor full though they are."""
    attention = build(mask, more)
    classes = classify_tiles(attention)
    drawn = make_tensors(np.random.default_rng(seed), Sq, Skv, is_sorted)
    tensors = {**drawn, **(tensors or {})}
    missed_empty = missed_full = 0
    for b in range(B):
        known = symbols(Sq, Skv, w, b, 0)
        for q0 in range(0, Sq, tq):
            rows = np.arange(q0, min(q0 + tq, Sq))
            for k0 in range(0, Skv, tk):
                keys = np.arange(k0, min(k0 + tk, Skv))
                tile = tile_symbols(classes, known, tensors, rows, keys)
                may = bool(evaluate(classes.may, tile, tensors).data)
                everywhere = bool(evaluate(classes.all, tile, tensors).data)
                right = pairs(attention, known, tensors, rows, keys)
                assert may or not right.any(), f"skipped a tile that attends: {mask} {q0} {k0}"
                assert not everywhere or right.all(), f"called a tile full: {mask} {q0} {k0}"
                missed_empty += may and not right.any()
                missed_full += not everywhere and bool(right.all())
    return missed_empty, missed_full


# ---- masks that must come out exact ---------------------------------------------------------

EXACT = {
    "causal": "causal",
    "causal, top left": "causal(top_left)",
    "window": "window(left = w, right = 0)",
    "two-sided window": "window(left = 3, right = w)",
    "prefix": "kv <= qpos or kv < plen[b]",
    "chunks": "kv // 8 == qpos // 8 and kv <= qpos",
    "sorted documents, causal": "doc[b, qpos] == doc[b, kv] and kv <= qpos",
}


@pytest.mark.parametrize("name", EXACT)
def test_common_masks_are_classified_exactly(name: str) -> None:
    for Sq, Skv in ((40, 40), (17, 43), (43, 17)):
        if "doc[" in EXACT[name] and Sq > Skv:
            continue
        missed = judge(EXACT[name], Sq, Skv, 8, 8, 5, seed=Sq, is_sorted=True)
        allowed = (2, 2) if "doc" in name or "window" in name or "prefix" in name else (0, 0)
        assert missed <= allowed, f"{name}: {missed}"


def test_a_value_that_no_key_changes_is_no_summary() -> None:
    """`plen[b]` is one number; a comparison with it needs no look at the keys."""
    classes = classify_tiles(build("kv <= qpos or kv < plen[b]"))
    assert classes.key_summaries == classes.row_summaries == ()


def exact(mask: str, far: Any, start: Any, ids: Any = None) -> tuple[int, int]:
    """What is missed of 32 rows and keys in tiles of 8; documents are as long, or `ids`."""
    documents = np.broadcast_to(np.arange(32) // 8 if ids is None else ids, (B, 32))
    arrays = {"far": far, "start": start, "ids": documents, "doc": documents}
    return judge(mask, 32, 32, 8, 8, 3, seed=0, is_sorted=True, more=FAR, tensors=arrays)


NEAR = "abs(q - start[ids[b, q]] - (kv - start[doc[b, kv]])) < 5"
PAGED = "far[b, kv // 8] * 8 + kv % 8 <= q"


def test_pages_in_any_order_are_exact() -> None:
    pages = np.broadcast_to(np.array([2, 0, 3, 1] + [0] * 28), (B, 32))
    assert exact(PAGED, pages, np.zeros(4, int)) == (0, 0)


def test_a_page_out_of_reach_decides_nothing() -> None:
    """Values that a kernel cannot hold are not known, and others are."""
    pages = np.broadcast_to(np.array([2**40, 0, -(2**40), 1] + [0] * 28), (B, 32))
    missed_empty, missed_full = exact(PAGED, pages, np.zeros(4, int))
    assert (missed_empty, missed_full) == (4 * B, 4 * B)


@pytest.mark.parametrize("test", ["q - start[ids[b, q]] >= kv - start[doc[b, kv]]", NEAR])
def test_positions_that_restart_are_exact(test: str) -> None:
    """Documents that begin inside of a tile, too: their starts cancel."""
    far = np.zeros((B, 32), int)
    for cuts in (8, 5):
        ids = np.minimum(np.arange(32) // cuts, 3)
        mask = f"ids[b, q] == doc[b, kv] and {test}"
        assert exact(mask, far, np.arange(4) * cuts, ids) == (0, 0)


def test_digits_put_together_anew_are_exact() -> None:
    """Places in a picture of 4 x 8 whose points are in Morton order, 2 x 4 to a tile."""

    def place(i: str) -> tuple[str, str]:
        return (
            f"({i} % 2 + {i} // 4 % 2 * 2 + {i} // 16 % 2 * 4 + {i} // 64 % 2 * 8)",
            f"({i} // 2 % 2 + {i} // 8 % 2 * 2 + {i} // 32 % 2 * 4 + {i} // 128 % 2 * 8)",
        )

    (qx, qy), (kx, ky) = place("q"), place("kv")
    mask = f"abs({qx} - {kx}) <= 1 and abs({qy} - {ky}) <= 1"
    assert exact(mask, np.zeros((B, 32), int), np.zeros(4, int)) == (0, 0)
    classes = classify_tiles(build(mask))
    assert (len(classes.row_summaries), len(classes.key_summaries)) == (2, 2)


@pytest.mark.parametrize("mask", ["table[q // 4, kv // 4]", "causal and table[q // 4, kv // 4]"])
@pytest.mark.parametrize("tile", [(4, 4), (3, 5), (8, 6), (16, 7)])
def test_a_table_of_blocks_is_exact_for_any_tile(mask: str, tile: tuple[int, int]) -> None:
    assert judge(mask, 37, 41, *tile, 1, seed=3, is_sorted=False)[0] <= 2 * ("causal" in mask)


def test_of_a_large_box_nothing_is_known() -> None:
    missed_empty, _ = judge("table[q, kv]", 40, 40, 40, 40, 1, seed=0, is_sorted=False)
    assert missed_empty == 0
    classes = classify_tiles(build("table[q, kv]"))
    (box,) = classes.box_summaries
    ends = {"q_first": 0, "q_last": 8, "kv_first": 0, "kv_last": 7}
    for table, rows, right in ((True, 7, (1, 1)), (False, 7, (0, 0)), (True, 8, (0, 1))):
        tile = {**ends, "q_last": rows}
        found = summarise_box(
            box, np.full((9, 9), table), lambda e, at=tile: evaluate(e, at, {}).data
        )
        assert (found["box0_low"], found["box0_high"]) == right


# ---- random masks are sound ------------------------------------------------------------------


@settings(max_examples=300)
@given(
    mask=TRUTHS,
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    tile=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    w=st.integers(1, 9),
    seed=st.integers(0, 99),
    is_sorted=st.booleans(),
)
def test_random_masks_are_sound(
    mask: str, shape: tuple[int, int], tile: tuple[int, int], w: int, seed: int, is_sorted: bool
) -> None:
    judge(mask, *shape, *tile, w, seed, is_sorted)


@settings(max_examples=300)
@given(
    mask=DATA,
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    tile=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 99),
    is_sorted=st.booleans(),
    is_wide=st.booleans(),
)
def test_what_is_read_is_sound_beyond_32_bits(
    mask: str,
    shape: tuple[int, int],
    tile: tuple[int, int],
    seed: int,
    is_sorted: bool,
    is_wide: bool,
) -> None:
    far = make_far(np.random.default_rng(seed), *shape, is_wide=is_wide)
    judge(mask, *shape, *tile, 3, seed, is_sorted, FAR, far)


@settings(max_examples=200)
@given(
    mask=TRUTHS,
    shape=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    w=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_dead_keys_are_seen_by_no_row(mask: str, shape: tuple[int, int], w: int, seed: int) -> None:
    attention = build(mask)
    may = key_may_attend(attention)
    if may is None:
        return
    Sq, Skv = shape
    tensors = make_tensors(np.random.default_rng(seed), Sq, Skv, False)
    for b in range(B):
        known = symbols(Sq, Skv, w, b, 0)
        keys = np.arange(Skv)
        alive = np.broadcast_to(evaluate(may, {**known, "kv": keys}, tensors).data, (Skv,))
        seen = pairs(attention, known, tensors, np.arange(Sq), keys).any(axis=0)
        assert (alive | ~seen).all()


@pytest.mark.parametrize(
    ("mask", "dead"),
    [
        ("keep[b, kv] and causal", "~keep"),
        ("causal(top_left)", "kv >= Sq"),
        ("window(left = 2)", "kv < Skv - Sq - 2"),
        ("kv < plen[b] or kv == 0", "(kv >= plen) & (kv > 0)"),
    ],
)
def test_dead_keys_are_found(mask: str, dead: str) -> None:
    Sq, Skv = 9, 14
    attention = build(mask)
    tensors = make_tensors(np.random.default_rng(1), Sq, Skv, False)
    may = key_may_attend(attention)
    assert may is not None
    kv = np.arange(Skv)
    known = {**symbols(Sq, Skv, 1, 1, 0), "kv": kv}
    alive = np.broadcast_to(evaluate(may, known, tensors).data, (Skv,))
    names = {"kv": kv, "Sq": Sq, "Skv": Skv, "keep": tensors["keep"][1], "plen": tensors["plen"][1]}
    assert (~alive == eval(dead, names)).all()
