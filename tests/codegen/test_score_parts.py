"""What score lines compute once for a block, or once for a lane's keys of a tile."""

from __future__ import annotations

import pytest

import attngen
from attngen.codegen.score_parts import cost_of_pair, find_score_parts, growth_of
from attngen.ir.attention import Attention
from attngen.ir.printer import print_expr

DECLARED = """
    param     c : float
    param     n : int where 1 <= n <= 99
    tensor    slope : float[Hq]
    tensor    bias : float[Hq, Sq, Skv]
"""


def variant(*scores: str, mask: str = "true") -> Attention:
    lines = "\n".join(f"    score {line}" for line in scores)
    return attngen.compile_text(f"attention a {{{DECLARED}{lines}\n    mask {mask}\n}}\n").attention


@pytest.mark.parametrize(
    ("score", "fixed", "bases"),
    [
        ("s + slope[h] * (kv - qpos)", ["slope[h]"], [("kv - qpos", 1)]),
        ("s + exp(c) * (2 * qpos - 3 * kv)", ["exp(c)"], [("2 * qpos - 3 * kv", -3)]),
        ("s + c * kv", [], [("kv", 1)]),
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
def test_parts(score: str, fixed: list[str], bases: list[tuple[str, int]]) -> None:
    parts = find_score_parts(variant(score))
    assert [print_expr(e) for e in parts.fixed] == fixed
    assert [(print_expr(b.node.operand), b.growth) for b in parts.bases] == bases


def test_what_the_mask_computes_as_well_stays_where_it_is() -> None:
    let = "    let d = (kv - qpos) * c\n"
    text = f"attention a {{{DECLARED}{let}    score s + d\n    mask d < 9.0\n}}\n"
    attention = attngen.compile_text(text).attention
    assert find_score_parts(attention).bases == ()


@pytest.mark.parametrize(
    ("score", "growth"),
    [("kv", 1), ("q", 0), ("-kv", -1), ("kv * 4 - q", 4), ("kv + kv", 2), ("kv // 2", None)],
)
def test_growth(score: str, growth: int | None) -> None:
    (line,) = variant(f"s + ({score})").scores
    operand = line.right.operand  # type: ignore[union-attr]
    assert growth_of(operand) == growth


def test_cost() -> None:
    assert cost_of_pair(variant("s + slope[h] * (kv - qpos)")) == 3
    assert cost_of_pair(variant("s + (q - kv)")) == 2
    assert cost_of_pair(variant("c * tanh(s / c)")) > 3
    assert cost_of_pair(variant("s + bias[h, q, kv]")) > 3
