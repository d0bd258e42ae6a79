"""Tile classes against enumeration: `may` false and `all` true are proofs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.analysis.tile_classes import TileClasses, classify_tiles, key_may_attend
from attngen.frontend.check import check
from attngen.frontend.load import load_text
from attngen.ir.attention import Attention
from attngen.ir.semantics import evaluate

B, Hq = 2, 2


def build(mask: str) -> Attention:
    declarations = """
    param     w : int where 1 <= w <= 9
    tensor    doc : int32[B, Skv]
    tensor    ids : int32[B, Sq]
    tensor    keep : bool[B, Skv]
    tensor    plen : int32[B]
    tensor    table : bool[NR, NC]
    """
    text = f"attention t {{\n{declarations}\n    mask {mask}\n}}\n"
    return check(load_text(text)).attention


def make_tensors(rng: np.random.Generator, Sq: int, Skv: int, is_sorted: bool) -> dict[str, Any]:
    doc, ids = rng.integers(0, 4, (B, Skv)), rng.integers(0, 4, (B, Sq))
    return {
        "doc": np.sort(doc, 1) if is_sorted else doc,
        "ids": np.sort(ids, 1) if is_sorted else ids,
        "keep": rng.random((B, Skv)) < 0.7,
        "plen": rng.integers(0, Skv + 1, B),
        "table": rng.random((Sq // 4 + 1, Skv // 4 + 1)) < 0.5,
    }


def symbols(Sq: int, Skv: int, w: int, b: int, h: int) -> dict[str, Any]:
    sizes = {"B": B, "Hq": Hq, "Hkv": 1, "Sq": Sq, "Skv": Skv, "Dqk": 8, "Dv": 8}
    sizes |= {"NR": Sq // 4 + 1, "NC": Skv // 4 + 1}
    return {name: np.int64(x) for name, x in {**sizes, "w": w, "b": b, "h": h, "hkv": 0}.items()}


def pairs(
    attention: Attention, known: dict[str, Any], tensors: dict[str, Any], rows: Any, keys: Any
) -> Any:
    """The mask, pair by pair; one that is always true is left out by the checker."""
    if attention.mask is None:
        return np.ones((len(rows), len(keys)), bool)
    q, kv = np.asarray(rows)[:, None], np.asarray(keys)[None, :]
    at = {**known, "q": q, "kv": kv, "qpos": q + known["Skv"] - known["Sq"]}
    value = evaluate(attention.mask, at, tensors).data
    return np.broadcast_to(value, (len(rows), len(keys)))


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
    return tile


def judge(
    mask: str, Sq: int, Skv: int, tq: int, tk: int, w: int, seed: int, is_sorted: bool
) -> tuple[int, int]:
    """Check every tile; how many were neither proved empty nor full though they are."""
    attention = build(mask)
    classes = classify_tiles(attention)
    tensors = make_tensors(np.random.default_rng(seed), Sq, Skv, is_sorted)
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


# ---- random masks are sound ------------------------------------------------------------------

_NUMBERS = ["w", "Skv", "b", "plen[b]", "-3", "0", "1", "7"]
_LEAVES = ["q", "kv", "qpos", "doc[b, kv]", "ids[b, q]", *_NUMBERS]
_INTS = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["2", "-3", "w"])).map(lambda t: f"({t[0]} * {t[1]})"),
        st.tuples(
            inner,
            st.sampled_from(["//", "%"]),
            st.sampled_from(["3", "4", "-2", "w", "(Skv // 2)", "plen[b]"]),
        ).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        inner.map(lambda x: f"abs({x})"),
        inner.map(lambda x: f"clamp({x}, -2, 20)"),
        st.tuples(inner, inner, inner).map(lambda t: f"where({t[0]} < {t[1]}, {t[1]}, {t[2]})"),
        inner.map(lambda x: f"floor(({x}) / 4)"),
    ),
    max_leaves=5,
)
_TRUTHS = st.recursive(
    st.one_of(
        st.tuples(_INTS, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), _INTS).map(
            lambda t: f"{t[0]} {t[1]} {t[2]}"
        ),
        st.sampled_from(["keep[b, kv]", "table[q // 4, kv // 4]", "causal", "window(left = w)"]),
        st.tuples(_INTS, _INTS).map(lambda t: f"({t[0]}) / 2 < ({t[1]}) * 0.5"),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda x: f"not ({x})"),
        st.tuples(inner, inner, inner).map(lambda t: f"where({t[0]}, {t[1]}, {t[2]})"),
    ),
    max_leaves=4,
)


@settings(max_examples=300)
@given(
    mask=_TRUTHS,
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


@settings(max_examples=200)
@given(
    mask=_TRUTHS,
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
