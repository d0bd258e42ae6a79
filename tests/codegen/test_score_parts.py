"""What score lines compute once for a block, or once for a lane's keys of a tile."""

from __future__ import annotations

import pytest

import attngen
from attngen.codegen.score_parts import (
    Base,
    cost_of_pair,
    find_addend,
    find_growth,
    find_score_parts,
)
from attngen.ir.attention import Attention
from attngen.ir.expr import ToFloat
from attngen.ir.printer import print_expr
from attngen.ir.traverse import postorder

DECLARED = """
    param     c : float
    param     n : int where 1 <= n <= 99
    tensor    slope : float[Hq]
    tensor    bias : float[Hq, Sq, Skv]
"""


def variant(*scores: str, mask: str = "true") -> Attention:
    lines = "\n".join(
        f"    {line}" if line.startswith("scale") else f"    score {line}" for line in scores
    )
    return attngen.compile_text(f"attention a {{{DECLARED}{lines}\n    mask {mask}\n}}\n").attention


@pytest.mark.parametrize(
    ("score", "fixed", "bases"),
    [
        ("s + slope[h] * (kv - qpos)", ["slope[h]"], [("kv - qpos", 1, "slope[h]")]),
        ("s + exp(c) * (2 * qpos - 3 * kv)", ["exp(c)"], [("2 * qpos - 3 * kv", -3, "exp(c)")]),
        ("s + c * kv", [], [("kv", 1, "c")]),
        ("s - (kv - q) * c", [], [("kv - q", 1, "c")]),
        ("s + (kv - q)", [], [("kv - q", 1, None)]),
        ("s + s * (kv - q)", [], [("kv - q", 1, None)]),
        ("where(kv == q, s, s + slope[h] * kv)", [], [("kv", 1, None)]),
        ("s * (1.0 + c / 3.0)", ["1.0 + c / 3.0"], []),
        ("s + c * (kv // 2)", [], []),
        ("s + c * abs(kv - qpos)", [], []),
        ("s + bias[h, q, kv]", [], []),
        ("c * tanh(s / c)", [], []),
        # What is read only where a pair asks for it is not read ahead.
        ("where(kv == q, s, s + slope[h])", [], []),
        ("where(kv == q, s, s + log(c))", ["log(c)"], []),
    ],
)
def test_parts(score: str, fixed: list[str], bases: list[tuple[str, int, str | None]]) -> None:
    parts = find_score_parts(variant(score))
    assert [print_expr(e) for e in parts.fixed] == fixed
    assert [describe(base) for base in parts.bases] == bases


def describe(base: Base) -> tuple[str, int, str | None]:
    """The integer that grows, by how much, and the factor."""
    (grown,) = (n for n in postorder(base.node) if isinstance(n, ToFloat))
    factor = None if base.factor is None else print_expr(base.factor)
    return print_expr(grown.operand), base.growth, factor


@pytest.mark.parametrize(
    ("scores", "addend"),
    [
        (["s + c"], "c"),
        (["c * kv + s"], "c * float(kv)"),
        (["s - bias[h, q, kv]", "s * 2.0"], "-bias[h, q, kv]"),
        (["s + c + 2.0 * kv"], "c + 2.0 * float(kv)"),
        (["c + s - bias[h, q, kv]"], "c - bias[h, q, kv]"),
        (["s + c + s"], None),
        (["c + 2.0"], None),
        (["c + 2.0 * kv - 1.0"], None),
        (["s + s"], None),
        (["s + c * s"], None),
        (["c - s"], None),
        (["s * 2.0", "s + c"], None),
        (["where(q == kv, s + c, s)"], None),
        ([], None),
    ],
)
def test_addend(scores: list[str], addend: str | None) -> None:
    found = find_addend(variant(*scores))
    assert (None if found is None else print_expr(found)) == addend


def test_what_the_mask_computes_as_well_stays_where_it_is() -> None:
    let = "    let d = (kv - qpos) * c\n"
    text = f"attention a {{{DECLARED}{let}    score s + d\n    mask d < 9.0\n}}\n"
    attention = attngen.compile_text(text).attention
    assert find_score_parts(attention).bases == ()


@pytest.mark.parametrize(
    ("scores", "growth"),
    [
        (["s + (kv - qpos)"], "4.0"),
        (["s - (2 * kv - q)"], "-8.0"),
        (["s + 0.25 * (kv - qpos) + bias[h, q, 0]"], None),
        (["s + 0.25 * (kv - qpos) + c"], "0.25 * 4.0"),
        (["s - 0.5 * (qpos - kv) + (kv - q)"], "0.5 * 4.0 + 4.0"),
        (["s + exp(-1.0 * h) * kv"], "exp(-1.0 * float(h)) * 4.0"),
        # More than the limit, or not known to be less.
        (["s + (3 * kv - q)"], None),
        (["s + c * (kv - q)"], None),
        (["s + slope[h] * (kv - q)"], None),
        # What does not grow evenly, or not at all.
        (["s + abs(kv - qpos)"], None),
        (["s + (kv - q) + kv // 2"], None),
        (["s + c * q"], None),
        (["s + (kv - q)", "s * 2.0"], None),
        (["s * 2.0 + (kv - q)"], None),
        ([], None),
    ],
)
def test_growth_of_the_addend(scores: list[str], growth: str | None) -> None:
    attention = variant("scale 0.25", *scores)
    found = find_growth(attention, find_score_parts(attention), 2.0)
    assert (None if found is None else print_expr(found)) == growth


def test_an_addend_may_not_grow_where_the_scale_is_unknown() -> None:
    for scale in ("c", "-0.25", "0.25 * slope[h]"):
        attention = variant(f"scale {scale}", "s + (kv - q)")
        assert find_growth(attention, find_score_parts(attention), 2.0) is None


def test_nothing_grows_where_nothing_may() -> None:
    attention = variant("scale 0.25", "s + (kv - q) - (kv - qpos)")
    assert find_growth(attention, find_score_parts(attention), 1.0) is not None
    assert find_growth(attention, find_score_parts(attention), 0.0) is None


def test_slopes_of_alibi_are_known_to_be_small() -> None:
    attention = variant("scale 0.25", "alibi(s)")
    assert find_growth(attention, find_score_parts(attention), 1.001) is not None
    assert find_growth(attention, find_score_parts(attention), 0.99) is None


def test_cost() -> None:
    assert cost_of_pair(variant("s + slope[h] * (kv - qpos)")) == 2
    assert cost_of_pair(variant("s + (q - kv)")) == 2
    assert cost_of_pair(variant("c * tanh(s / c)")) > 3
    assert cost_of_pair(variant("s + bias[h, q, kv]")) > 3
