"""z3 proves for lengths, params and tiles of any size that ranges miss no pair and are in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
import z3

from attngen.analysis.key_ranges import derive_key_ranges, derive_query_ranges
from attngen.ir.attention import Attention
from tests.analysis.masks import build
from tests.analysis.solver import Formula, to_formula

MASKS = {
    "causal": "causal",
    "causal, top left": "causal(top_left)",
    "window": "window(left = w - 1)",
    "two-sided window": "window(left = 3, right = w)",
    "prefix": "prefix(plen[b])",
    "chunks, causal": "causal and chunked(64)",
    "sink and window": "causal and (kv < w or window(left = 127))",
    "dilated window": "window(left = 62) and dilated(2)",
    "global keys and rows": "abs(kv - qpos) <= w or q < 5 or kv < 2",
    "documents, causal": "causal and document(doc)",
    "longformer": "abs(kv - qpos) <= 256 or keep[b, kv]",
    "blocks": "qpos // 64 < 2 or kv // 64 < 2 or abs(qpos // 64 - kv // 64) <= 1",
    "neighborhood of one axis": "neighborhood(qpos, kv, Skv, 7)",
    "block diffusion": (
        "kv >= Skv // 2 and (qpos // 16 > kv // 16 or qpos >= Skv // 2) or qpos // 16 == kv // 16"
    ),
    "crossing limits": "kv <= qpos and kv + qpos <= Skv",
    "positions that restart": (
        "doc[b, qpos] == doc[b, kv]"
        " and abs(qpos - plen[doc[b, qpos]] - (kv - plen[doc[b, kv]])) < 8"
    ),
    "where": "where(qpos < plen[b], kv < plen[b], kv <= qpos)",
}


def attends(attention: Attention, names: dict[str, Formula]) -> Formula:
    """That the pair (q, kv) lies in a tile of both axes, and attends."""
    q, kv, Sq, Skv = (names.setdefault(n, z3.Int(n)) for n in ("q", "kv", "Sq", "Skv"))
    tile = {n: z3.Int(n) for n in ("q_first", "q_last", "kv_first", "kv_last")}
    shift = Skv - Sq
    names |= tile
    names |= {"qpos": q + shift}
    names |= {f"qpos_{end}": tile[f"q_{end}"] + shift for end in ("first", "last")}
    longest = 2**31 - 1
    assert attention.mask is not None
    mask = to_formula(attention.mask, names)
    return z3.And(
        tile["q_first"] >= 0, tile["q_first"] <= q, q <= tile["q_last"], tile["q_last"] < Sq,
        tile["kv_first"] >= 0, tile["kv_first"] <= kv, kv <= tile["kv_last"], tile["kv_last"] < Skv,
        Sq <= longest, Skv <= longest, names.setdefault("w", z3.Int("w")) >= 1, names["w"] <= 9,
        mask,
    )  # fmt: skip


@pytest.mark.parametrize("axis", ["kv", "q"])
@pytest.mark.parametrize("name", MASKS)
def test_no_pair_is_left_out_for_any_length(name: str, axis: str) -> None:
    attention = build(MASKS[name])
    derive = derive_key_ranges if axis == "kv" else derive_query_ranges
    names: dict[str, Formula] = {}
    solver = z3.Solver()
    solver.add(attends(attention, names))
    at = names[axis]
    ends = [
        (to_formula(r.begin, names), to_formula(r.end, names)) for r in derive(attention).ranges
    ]
    left_out = z3.And(*(z3.Or(at < begin, at >= end) for begin, end in ends))
    overlaps = [z3.Or(b < a, b < end) for (a, end), (b, _) in pairwise(ends)]
    assert solver.check() == z3.sat, "some pair attends"
    solver.add(z3.Or(left_out, *overlaps))
    assert solver.check() == z3.unsat


def test_the_solver_finds_a_range_that_is_one_key_short() -> None:
    attention = build("causal")
    names: dict[str, Formula] = {}
    solver = z3.Solver()
    solver.add(attends(attention, names))
    (r,) = derive_key_ranges(attention).ranges
    solver.add(names["kv"] >= to_formula(r.end, names) - 1)
    assert solver.check() == z3.sat


@pytest.mark.parametrize("mask", ["kv / 2 < 5.0", "floor(kv / 2) < 5"])
def test_what_has_no_integer_formula_is_said(mask: str) -> None:
    found = build(mask).mask
    assert found is not None
    with pytest.raises(ValueError, match="no integer formula for"):
        to_formula(found, {})
