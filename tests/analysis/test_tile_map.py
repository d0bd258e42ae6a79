"""The tile map against every pair of small problems, and its limits on large ones."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.analysis import tile_map as module
from attngen.analysis.tile_map import MIXED, TileKind, TileMap, map_tiles
from attngen.frontend.check import check
from attngen.frontend.load import load_text
from attngen.ir.attention import Attention
from attngen.ir.semantics import evaluate

SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "Dqk": 8, "Dv": 8}
MASKS = {
    "all": "true",
    "causal": "causal",
    "window": "window(left = w, right = 1)",
    "chunks": "kv // 8 == qpos // 8",
    "per head": "kv <= qpos + h and kv >= hkv",
    "documents": "kv <= qpos and doc[b, kv] == ids[b, q]",
    "padding": "keep[b, kv]",
    "prefix": "causal or kv < plen[b]",
    "blocks": "table[q // 4, kv // 4]",
    "floats": "q / 2 < kv * 0.5",
    "opposites": "kv < qpos and kv > qpos",
    "dilated": "(qpos - kv) % 3 == 0",
}


def build(mask: str, lengths: str = "") -> Attention:
    text = f"""attention t {{
    param     w : int where 1 <= w <= 9
    tensor    doc : int32[B, Skv]
    tensor    ids : int32[B, Sq]
    tensor    keep : bool[B, Skv]
    tensor    plen : int32[B]
    tensor    table : bool[NR, NC]
    {lengths}
    mask      {mask}
}}
"""
    return check(load_text(text)).attention


def tensors_of(Sq: int, Skv: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "doc": np.sort(rng.integers(0, 3, (2, Skv)), 1),
        "ids": np.sort(rng.integers(0, 3, (2, Sq)), 1),
        "keep": rng.random((2, Skv)) < 0.8,
        "plen": rng.integers(0, Skv + 1, 2),
        "table": rng.random((Sq // 4 + 1, Skv // 4 + 1)) < 0.5,
    }


def sizes_of(Sq: int, Skv: int) -> dict[str, int]:
    return {**SIZES, "Sq": Sq, "Skv": Skv, "NR": Sq // 4 + 1, "NC": Skv // 4 + 1}


def map_of(attention: Attention, Sq: int, Skv: int, tile: tuple[int, int], **where: Any) -> TileMap:
    seed, w = where.pop("seed", 0), where.pop("w", 3)
    return map_tiles(
        attention,
        tile_q=tile[0],
        tile_kv=tile[1],
        sizes=sizes_of(Sq, Skv),
        params={"w": w},
        tensors=tensors_of(Sq, Skv, seed),
        **where,
    )


def attending(
    attention: Attention, Sq: int, Skv: int, rows: int, keys: int, w: int, seed: int, b: int, h: int
) -> Any:
    """The mask at every pair of a sequence with so many rows and keys."""
    if attention.mask is None:
        return np.ones((rows, keys), bool)
    q, kv = np.arange(rows)[:, None], np.arange(keys)[None, :]
    names = {**sizes_of(Sq, Skv), "Sq": rows, "Skv": keys, "w": w, "b": b, "h": h, "hkv": h // 2}
    at = {name: np.int64(x) for name, x in names.items()} | {"q": q, "kv": kv}
    at["qpos"] = q + keys - rows
    value = evaluate(attention.mask, at, tensors_of(Sq, Skv, seed)).data
    return np.broadcast_to(value, (rows, keys))


def compare(found: TileMap, right: Any) -> None:
    """Every tile and every count against the pairs."""
    assert (found.rows, found.keys) == right.shape
    n_q, n_kv = -(-right.shape[0] // found.tile_q), -(-right.shape[1] // found.tile_kv)
    assert found.kinds.shape == (n_q, n_kv)
    assert found.has_all_tiles
    assert found.has_all_pairs
    pairs = dict.fromkeys(TileKind, 0)
    seen = missed_skip = missed_full = 0
    for i in range(n_q):
        for j in range(n_kv):
            rows, keys = (
                slice(n * t, (n + 1) * t) for n, t in ((i, found.tile_q), (j, found.tile_kv))
            )
            tile, kind = right[rows, keys], TileKind(found.kinds[i, j])
            pairs[kind] += tile.size
            assert kind is not TileKind.SKIP or not tile.any()
            assert kind is not TileKind.FULL or tile.all()
            if kind is TileKind.PARTIAL:
                seen += int(tile.sum())
                missed_skip += not tile.any()
                missed_full += bool(tile.all())
    assert {kind: found.pairs(kind) for kind in TileKind} == pairs
    assert sum(found.count(kind) for kind in TileKind) == n_q * n_kv == found.tiles
    assert found.attending == seen
    assert found.counted_pairs == pairs[TileKind.PARTIAL]
    assert (found.missed_skip, found.missed_full) == (missed_skip, missed_full)
    computed = pairs[TileKind.PARTIAL] + pairs[TileKind.FULL]
    wasted = (computed - int(right.sum())) / computed if computed else 0.0
    assert found.wasted_share == pytest.approx(wasted)


@given(
    mask=st.sampled_from(sorted(MASKS)),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    tile=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    w=st.integers(1, 9),
    seed=st.integers(0, 99),
    b=st.integers(0, 1),
    h=st.integers(0, 3),
)
def test_every_tile_and_every_count(
    mask: str, shape: tuple[int, int], tile: tuple[int, int], w: int, seed: int, b: int, h: int
) -> None:
    attention = build(MASKS[mask])
    found = map_of(attention, *shape, tile, w=w, seed=seed, b=b, h=h)
    compare(found, attending(attention, *shape, *shape, w, seed, b, h))


@pytest.mark.parametrize("h", range(4))
def test_every_head_knows_its_own(h: int) -> None:
    attention = build("kv <= qpos + 3 * h and kv >= 2 * hkv")
    found = map_of(attention, 20, 20, (4, 4), h=h)
    compare(found, attending(attention, 20, 20, 20, 20, 3, 0, 0, h))


def test_a_tile_that_is_cut_short_is_known_as_well() -> None:
    """Nothing past its end counts: the last tiles of rows and keys are full."""
    attention = build("kv < plen[b] + 0 * q and q < plen[b]")
    tensors = tensors_of(13, 13, 0) | {"plen": np.array([13, 0])}
    found = map_tiles(
        attention, tile_q=8, tile_kv=8, sizes=sizes_of(13, 13), params={"w": 3}, tensors=tensors
    )
    assert (found.kinds == TileKind.FULL).all()


def test_a_map_in_small() -> None:
    found = map_of(build("causal"), 16, 32, (2, 2))
    whole = found.cells(8, 16)
    assert (whole.step_q, whole.step_kv) == (1, 1)
    assert (whole.kinds == found.kinds).all()
    half = found.cells(7, 8)
    assert (half.step_q, half.step_kv) == (2, 2)
    assert half.kinds.tolist() == [[2] * (4 + i) + [MIXED] + [0] * (3 - i) for i in range(4)]
    few = found.cells(2, 5)
    assert (few.step_q, few.step_kv) == (4, 4)
    assert few.kinds.tolist() == [[2, 2, MIXED, 0], [2, 2, 2, MIXED]]


@pytest.mark.parametrize(
    "mask", ["causal", "doc[b, kv] == ids[b, q]", "kv >= Skv - w or q < Sq - 9"]
)
def test_lengths_end_the_map(mask: str) -> None:
    lengths = "length q = plen[b] // 2, kv = plen[b]"
    attention, plen = build(mask, lengths), tensors_of(30, 41, 5)["plen"]
    assert plen[0] != plen[1]
    for b in (0, 1):
        found = map_of(attention, 30, 41, (4, 8), seed=5, b=b)
        rows, keys = int(plen[b]) // 2, int(plen[b])
        compare(found, attending(attention, 30, 41, rows, keys, 3, 5, b, 0))


def test_a_causal_map() -> None:
    found = map_of(build("causal"), 8, 12, (2, 4))
    assert found.kinds.tolist() == [[2, 1, 0], [2, 1, 0], [2, 2, 1], [2, 2, 1]]
    assert found.attending == 2 * (1 + 2 + 3 + 4)
    assert found.wasted_share == pytest.approx(12 / (4 * 8 + 6 * 8))


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_no_rows_or_keys(shape: tuple[int, int]) -> None:
    found = map_of(build("causal"), *shape, (4, 4))
    assert found.kinds.size == found.tiles == found.computed == 0
    assert found.wasted_share == 0.0
    assert found.has_all_pairs


def test_tiles_are_classified_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not divide the map, along both axes."""
    attention = build(MASKS["documents"])
    right = attending(attention, 61, 83, 61, 83, 3, 0, 0, 0)
    for at_once in (1, 7, 30, 1000):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        compare(map_of(attention, 61, 83, (3, 4)), right)


def test_of_many_pairs_some_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = build("window(left = 40)")
    whole = map_of(attention, 900, 900, (8, 8))
    monkeypatch.setattr(module, "MAX_PAIRS", 60 * 64)
    found = map_of(attention, 900, 900, (8, 8))
    assert found.counted == 60 < whole.counted
    assert found.has_all_tiles
    assert not found.has_all_pairs
    assert (found.kinds == whole.kinds).all()
    assert found.wasted_share == pytest.approx(whole.wasted_share, rel=0.1)


def test_of_many_tiles_some_are_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = build("causal")
    whole = map_of(attention, 3000, 4000, (8, 8))
    monkeypatch.setattr(module, "MAX_ALONG", 100)
    monkeypatch.setattr(module, "MAX_TILES", 5000)
    found = map_of(attention, 3000, 4000, (8, 8))
    assert found.kinds.shape == (50, 100)
    assert not found.has_all_tiles
    assert not found.has_all_pairs
    assert found.tiles == whole.tiles
    assert (found.kinds == whole.kinds[np.ix_(found.q_tiles, found.kv_tiles)]).all()
    for kind in (TileKind.SKIP, TileKind.FULL):
        assert found.count(kind) == pytest.approx(whole.count(kind), rel=0.05)
        assert found.pairs(kind) == pytest.approx(whole.pairs(kind), rel=0.05)


def traced_peak(Sq: int, Skv: int, mask: str) -> int:
    attention, tensors = build(mask), tensors_of(Sq, Skv, 0)
    sizes = sizes_of(Sq, Skv)
    tracemalloc.start()
    try:
        map_tiles(attention, tile_q=64, tile_kv=64, sizes=sizes, params={"w": 3}, tensors=tensors)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mask", ["causal", MASKS["documents"], "floor(kv / 2) <= floor(qpos / 2)"])
def test_no_array_of_all_pairs(mask: str) -> None:
    """8192 times 32768 pairs are 256 MiB as truth values; their 65536 tiles take a byte each."""
    peak = traced_peak(8192, 32768, mask)
    assert peak < 4 * 2**20


def test_128k_tokens() -> None:
    attention = check(load_text("attention t {\n    mask causal\n}\n")).attention
    sizes = SIZES | {"Sq": 131072, "Skv": 131072}
    found = map_tiles(attention, tile_q=64, tile_kv=64, sizes=sizes, params={}, tensors={})
    assert found.kinds.shape == (2048, 2048)
    assert found.count(TileKind.PARTIAL) == 2048
    assert found.count(TileKind.FULL) == 2048 * 2047 // 2
    assert found.has_all_pairs
    assert found.attending == 2048 * (64 * 65 // 2)
