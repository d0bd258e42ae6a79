"""Scores of 16-bit elements take quick forms of functions; everything else the accurate ones."""

from __future__ import annotations

import pytest

import attngen
from attngen.codegen.expr import ExprPrinter


def printed(score: str, *, is_quick: bool, mask: str = "true") -> tuple[str, str]:
    """The C++ text of a score line, and of the mask."""
    text = f"attention a {{\n    param cap : float\n    score {score}\n    mask {mask}\n}}\n"
    attention = attngen.compile_text(text).attention
    printer = ExprPrinter(attention, is_quick=is_quick)
    (line,) = attention.scores
    of_mask = "" if attention.mask is None else printer.print(attention.mask).text
    return printer.print(line).text, of_mask


@pytest.mark.parametrize(
    ("score", "quick", "accurate"),
    [
        ("tanh(s)", "ag_tanh_quick(s)", "ag_tanh(s)"),
        ("sigmoid(s)", "ag_sigmoid2_quick(s * 1.442695f)", "ag_sigmoid(s)"),
        ("sigmoid(s * 2.0 + 1.0)", "ag_sigmoid2_quick(ag_fma(s, 2.88539f, 1.442695f))", None),
        ("s / cap", "s * (1.0f / args.p_cap)", "s / args.p_cap"),
        ("s / (1.0 + kv)", "s * ag_reciprocal_approx(1.0f + (float)at.kv)", None),
        ("cap / s", "args.p_cap * ag_reciprocal_approx(s)", "args.p_cap / s"),
        ("s * exp(s)", "s * ag_exp2_quick(s * 1.442695f)", "s * ag_exp(s)"),
        ("s * exp2(s)", "s * ag_exp2_quick(s)", "s * ag_exp2(s)"),
        ("log(s)", "ag_log(s)", "ag_log(s)"),
        ("abs(s - 1.0)", "ag_abs_quick(s - 1.0f)", "ag_abs(s - 1.0f)"),
        ("3.0 - (s * 4.0 - 1.0) / 2.0", "ag_fma(s, -2.0f, 3.5f)", None),
        ("-(s / 4.0)", "s * -0.25f", "-(s / 4.0f)"),
        ("2.0 - abs(s)", "2.0f - ag_abs_quick(s)", None),
        ("s * 1e30 * 1e-30", "s * 1e+30f * 1e-30f", None),
        ("s * s * 2.0 + 1.0", "ag_fma(s * s, 2.0f, 1.0f)", None),
        ("s * s + 1.0", "ag_fma(s, s, 1.0f)", None),
        ("s * cap + 1.0", "ag_fma(s, args.p_cap, 1.0f)", "s * args.p_cap + 1.0f"),
        ("cap - s * 2.0", "ag_fma(-s, 2.0f, args.p_cap)", "args.p_cap - s * 2.0f"),
        ("s * cap - s * cap", "s * args.p_cap - s * args.p_cap", None),
        ("s + tanh(cap)", "s + ag_tanh(args.p_cap)", "s + ag_tanh(args.p_cap)"),
        ("s + 1.0 / cap", "s + 1.0f / args.p_cap", "s + 1.0f / args.p_cap"),
    ],
)
def test_text(score: str, quick: str, accurate: str | None) -> None:
    assert printed(score, is_quick=True)[0] == quick
    if accurate is not None:
        assert printed(score, is_quick=False)[0] == accurate


def test_a_mask_is_decided_accurately() -> None:
    _, mask = printed("tanh(s)", is_quick=True, mask="tanh(cap) / 2.0 < kv")
    assert mask == "ag_tanh(args.p_cap) / 2.0f < (float)at.kv"
