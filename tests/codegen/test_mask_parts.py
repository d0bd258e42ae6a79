"""What masks compute once for a block, a row or a key, and that nothing else changes."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.codegen.mask_parts import MaskParts, find_mask_parts
from attngen.codegen.mask_text import print_mask
from attngen.ir.expr import Expr, LogicalOp, Role, Symbol, expr_type
from attngen.ir.printer import print_expr
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import rewrite, symbols
from tests.analysis.masks import AFFINE, TRUTHS, build, make_tensors, pairs
from tests.analysis.masks import symbols as known_symbols

ROWS, KEYS = 9, 13
MORE = "tensor wide : int64[B, Skv]"


def parts_of(mask: str, more: str = "") -> MaskParts:
    parts = find_mask_parts(build(mask, more))
    assert parts is not None
    return parts


def shown(e: Expr | None) -> str | None:
    return None if e is None else print_expr(e)


NEAR = "abs(q % w - kv % w) <= 1"


@pytest.mark.parametrize(
    ("mask", "bounds", "of_row", "of_key", "pair"),
    [
        ("kv <= q + 1", "kv < q + 2", None, None, None),
        ("keep[b, kv]", None, None, "keep[b, kv]", None),
        ("ids[b, q] > 0", None, "ids[b, q] > 0", None, None),
        ("kv % 2 <= q or keep[b, kv] or w > 3", None, "w > 3", "keep[b, kv]", "kv % 2 <= q"),
        ("w > 3 and (kv <= q and q > 2)", "kv < q + 1 and w > 3 and q > 2", None, None, None),
        ("q < 4 and (kv <= q or keep[b, kv])", None, "q < 4", None, "keep[b, kv] or kv <= q"),
        ("kv > q - 5 and keep[b, kv]", "not kv < max(q, 4) - 4", None, "keep[b, kv]", None),
        ("kv <= q and (q < 4 or keep[b, kv])", "kv < q + 1", "q < 4", "keep[b, kv]", None),
        (NEAR, None, None, None, NEAR),
    ],
)
def test_terms(
    mask: str, bounds: str | None, of_row: str | None, of_key: str | None, pair: str | None
) -> None:
    parts = parts_of(mask)
    found = (parts.bounds, parts.of_row, parts.of_key, parts.pair)
    assert tuple(map(shown, found)) == (bounds, of_row, of_key, pair)


@pytest.mark.parametrize(
    ("mask", "rows", "keys"),
    [
        ("causal and document(doc)", ["doc[b, qpos]"], ["doc[b, kv]"]),
        ("kv % w <= q + 1 - w", [], ["kv % w"]),
        (NEAR, ["q % w"], ["kv % w"]),
        # Comparing a part costs no more than a part of its own would.
        ("kv < q or (q % w == kv % w and q % w < 2)", ["q % w"], ["kv % w"]),
        # The read depends on both, its indices do not.
        ("table[q // 4, kv // 4]", ["q // 4"], ["kv // 4"]),
        ("kv == q or (keep[b, kv] and kv < q)", [], ["keep[b, kv]"]),
    ],
)
def test_parts(mask: str, rows: list[str], keys: list[str]) -> None:
    parts = parts_of(mask)
    assert [print_expr(e) for e in parts.rows] == rows
    assert [print_expr(e) for e in parts.keys] == keys


def test_what_depends_on_the_head_alone() -> None:
    parts = parts_of("kv <= qpos or kv < plen[b]")
    assert [print_expr(e) for e in parts.fixed] == ["plen[b]"]
    assert shown(parts.bounds) == "kv < max(qpos + 1, plen[b])"
    assert parts.rest is None
    parts = parts_of("kv % 2 == 0 and kv + ids[b, q] < plen[b] * 3")
    assert [print_expr(e) for e in parts.fixed] == ["plen[b] * 3"]
    assert shown(parts.whole.pair) == shown(parts.rest)
    assert parts.whole.cost > parts.cost


def test_few_parts() -> None:
    many = " or ".join(f"doc[b, kv - {i}] == ids[b, q - {i}]" for i in range(6))
    parts = parts_of(f"kv <= q and ({many})")
    assert (len(parts.rows), len(parts.keys)) == (4, 4)
    assert parts.reads


@pytest.mark.parametrize("count", [9, 300])
def test_a_mask_that_had_better_skip(count: int) -> None:
    many = " or ".join(f"table[q + {i}, kv + {i}]" for i in range(count))
    assert find_mask_parts(build(many)) is None


def test_data_that_may_lead_beyond_64_bits() -> None:
    assert find_mask_parts(build("keep[b, kv] and wide[b, kv] // plen[b] > q", MORE)) is None
    assert parts_of("keep[b, kv] and wide[b, kv] > q", MORE).keys != ()


def test_sums_and_products_of_data_wrap_around() -> None:
    """A part is computed at keys that no pair asks for, where C++ leaves an overflow undefined."""
    mask = "keep[b, kv] and wide[b, kv] * 2 > q"
    attention = build(mask, MORE)
    text = print_mask(attention, parts_of(mask, MORE), 0)
    assert [part.formula.text for part in text.keys] == [
        "(ag_i64)((unsigned long long)read_wide(args, at.b, at.kv) * (unsigned long long)2)"
    ]


def test_what_an_equality_makes_shorter() -> None:
    mask = "doc[b, q] == doc[b, kv] and q - plen[doc[b, q]] >= kv - plen[doc[b, kv]]"
    parts = parts_of(mask)
    assert shown(parts.bounds) == "kv < q + 1"
    assert shown(parts.pair) == "doc[b, q] == doc[b, kv]"


def test_text() -> None:
    attention = build("causal and document(doc)")
    text = print_mask(attention, parts_of("causal and document(doc)"), 0)
    assert text.pair is not None
    assert text.pair.text == "row.r0 == key.k0"
    assert text.bounds is not None
    assert text.bounds.words.text == (
        "(at.qpos >= 0) ? keys_before(ag_min(at.qpos + 1, kv_end), kv0) : 0"
    )
    assert [part.c_type for part in (*text.rows, *text.keys)] == ["int", "int"]


def test_text_of_what_begins_again() -> None:
    mask = "(kv % 128 < q or abs(q - kv) % 3 != 0) and not kv % 16 == w"
    bounds = print_mask(build(mask), parts_of(mask), 0).bounds
    assert bounds is not None
    assert bounds.words.text == (
        "keys_before(kv_end, kv0) & "
        "(keys_in_phase((int)(at.kv & 127), 128, at.q) | pattern0) & ~pattern1"
    )
    assert bounds.has_phases
    assert [(p.attends.text, p.pieces) for p in bounds.patterns] == [
        ("ag_mod(at.q - at.kv, 3) != 0", 3),
        ("(at.kv & 15) == args.p_w", 2),
    ]
    assert bounds.patterns[0].doublings(176) == bounds.patterns[0].doublings(128) == (6, 12, 24)
    assert bounds.patterns[0].doublings(48) == (6,)
    assert bounds.patterns[1].doublings(16) == ()


def test_bounds_that_turn_out_to_be_no_bounds() -> None:
    mask = "kv % 1 == 0 and keep[b, kv]"
    bounds = print_mask(build(mask), parts_of(mask), 0).bounds
    assert bounds is not None
    assert bounds.words.text == "(true) ? keys_before(kv_end, kv0) : 0"


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("keep[b, kv]", "keys_attend"),
        ("keep[b, kv] and ids[b, q] > 0", "((row_says ? ~0u : 0) & keys_attend)"),
        ("keep[b, kv] or kv % 4 == q % 4", "(keys_attend | pattern0)"),
        ("keep[b, kv] or kv >= q", "(keys_attend | ~keys_before(at.q, kv0))"),
        ("keep[b, kv] or kv * kv < q", None),
        ("keep[b, kv] and kv < w", None),
    ],
)
def test_text_of_all_in_words(mask: str, words: str | None) -> None:
    text = print_mask(build(mask), parts_of(mask), 0, in_words=True)
    if words is None:
        assert text.bounds is None or not text.bounds.takes_says
        return
    assert text.bounds is not None
    assert text.bounds.words.text == f"keys_before(kv_end, kv0) & {words}"
    assert text.pair is None
    assert not text.asks_pairs


# ---- the same value at every pair ----------------------------------------------------------------


def in_parts(parts: MaskParts, at: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """The mask, from values of its parts that are computed with nothing but what they may see."""
    rows = {n: x for n, x in at.items() if n != "kv"}
    keys = {n: x for n, x in at.items() if n not in ("q", "qpos")}
    heads = {n: x for n, x in rows.items() if n in keys}
    values: dict[str, Any] = {}
    named: dict[int, Expr] = {}
    for nodes, seen in ((parts.fixed, heads), (parts.rows, rows), (parts.keys, keys)):
        for e in nodes:
            name = f"part{len(values)}"
            values[name] = evaluate(e, seen, tensors).data
            named[id(e)] = Symbol(name, Role.INDEX, expr_type(e))

    def value(e: Expr | None, seen: dict[str, Any]) -> Any:
        if e is None:
            return None
        short = rewrite(e, lambda node: named.get(id(node), node))
        return evaluate(short, {**seen, **values}, tensors).data

    terms = [value(parts.of_row, rows), value(parts.of_key, keys), value(parts.pair, at)]
    join = np.logical_or if parts.op is LogicalOp.OR else np.logical_and
    found = [x for x in terms if x is not None]
    rest = reduce(join, found) if found else True
    bounds = True if parts.bounds is None else value(parts.bounds, at)
    return np.logical_and(bounds, rest)


@settings(max_examples=150)
@given(TRUTHS | AFFINE, st.integers(0, 3), st.booleans())
def test_parts_give_the_same_mask(mask: str, seed: int, is_sorted: bool) -> None:
    attention = build(mask)
    parts = find_mask_parts(attention)
    if parts is None:
        return
    rng = np.random.default_rng(seed)
    tensors = make_tensors(rng, ROWS, KEYS, is_sorted)
    known = known_symbols(ROWS, KEYS, int(rng.integers(1, 10)), b=1, h=0)
    q, kv = np.arange(ROWS)[:, None], np.arange(KEYS)[None, :]
    at = {**known, "q": q, "kv": kv, "qpos": q + known["Skv"] - known["Sq"]}
    found = np.broadcast_to(in_parts(parts, at, tensors), (ROWS, KEYS))
    np.testing.assert_array_equal(found, pairs(attention, known, tensors, q[:, 0], kv[0]))
    assert "kv" not in symbols(*parts.rows)
    assert not symbols(*parts.keys) & {"q", "qpos"}
