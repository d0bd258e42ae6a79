"""Short forms of functions in score lines: where they are taken, and how far they err."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.codegen.quick_functions import ERRORS, SHARE, find_short_calls
from attngen.codegen.score_text import ScoreText, ScoreUnit, print_scores
from attngen.ir.attention import Attention
from attngen.ir.expr import Call
from attngen.ir.interval import Interval
from attngen.ir.traverse import postorder
from attngen.ir.types import BF16, FP16, Element


def variant(*lines: str, dtype: Element = BF16) -> Attention:
    declared = "    param cap : float\n    tensor slope : float[Hq]\n"
    text = "".join(f"    {line}\n" for line in lines)
    attention = attngen.compile_text(f"attention a {{\n{declared}{text}}}\n").attention
    return replace(attention, dtype=dtype)


def printed(*lines: str, dtype: Element = BF16) -> ScoreText:
    attention = variant(*lines, dtype=dtype)
    return print_scores(attention, is_checked=False, is_dear=True, takes_unit=True)


# ---- where ---------------------------------------------------------------------------------


LN_2 = math.log(2.0)


@pytest.mark.parametrize(
    ("score", "text", "unit"),
    [
        ("30.0 * tanh(s / 30.0)", "ag_sigmoid2_quick(s * (scale * 0.09617967f))", (60.0, -30.0)),
        (
            "cap * tanh(s / cap)",
            "args.p_cap * ag_tanh_quick(s * scale * (1.0f / args.p_cap))",
            None,
        ),
        ("1e6 * tanh(s / 1e6)", "ag_tanh_quick(s * (scale * 1e-06f))", (1e6, 0.0)),
        (
            "log(max(s, 0.0) + 1.0)",
            "ag_log2_approx(ag_max(s * scale, 0.0f) + 1.0f)",
            (LN_2, 0.0),
        ),
        ("log(s) + 1.0", "ag_log2_quick(s * scale)", (LN_2, 1.0)),
        ("log(s + 1.0)", "ag_log2_approx(ag_fma(s, scale, 1.0f))", (LN_2, 0.0)),
        ("log(s * s + 1.0)", "ag_log2_approx(ag_fma(s * scale, s * scale, 1.0f))", (LN_2, 0.0)),
        ("log(s + 1.0 - 1.0)", "ag_log2_quick(s * scale)", (LN_2, 0.0)),
        (
            "s * (1.0 - 3.0 * exp(-abs(s)))",
            "s * scale * ag_fma(ag_exp2_approx(ag_abs_quick(s * scale) * -1.442695f), -3.0f, 1.0f)",
            None,
        ),
        (
            "s * (s - exp(-abs(s)))",
            "s * scale * (s * scale - ag_exp2_quick(ag_abs_quick(s * scale) * -1.442695f))",
            None,
        ),
        (
            "s * (1.0 - s * exp(-abs(s)))",
            "s * scale * ag_fma(-(s * scale), "
            "ag_exp2_quick(ag_abs_quick(s * scale) * -1.442695f), 1.0f)",
            None,
        ),
        ("4.0 * sigmoid(s) - 2.0", "ag_sigmoid2_quick(s * (scale * 1.442695f))", (4.0, -2.0)),
        (
            "2.0 - 4.0 * sigmoid(s)",
            "ag_fma(ag_sigmoid2_quick(s * (scale * 1.442695f)), -4.0f, 2.0f)",
            None,
        ),
        (
            "exp(min(s, 0.0))",
            "ag_exp2_approx(ag_min(s * scale, 0.0f) * 1.442695f)",
            (1.0, 0.0),
        ),
        ("exp(s)", "ag_exp2_quick(s * (scale * 1.442695f))", (1.0, 0.0)),
        ("2.0 * s", "s * (scale * 2.0f)", None),
        ("s * slope[h] * 2.0", "s * scale * fixed.c0", (2.0, 0.0)),
    ],
)
def test_text(score: str, text: str, unit: tuple[float, float] | None) -> None:
    found = printed(f"score {score}")
    assert found.is_raw
    if unit is None:
        assert found.unit is None
    else:
        assert found.unit is not None
        assert (found.unit.unit, found.unit.zero) == pytest.approx(unit)
    assert found.lines[-1].text == text


def test_sigmoid_weights_take_the_score_itself() -> None:
    found = printed("score 30.0 * tanh(s / 30.0)", "weights sigmoid")
    assert found.unit is None
    assert found.lines[0].text.startswith("ag_fma(ag_sigmoid2_quick(")


def test_a_let_takes_the_product_as_well() -> None:
    found = printed("let x = s / 2.0", "score x * tanh(x)")
    assert found.is_raw
    assert [v.text for v in found.lines[0].variables] == ["s * (scale * 0.5f)"]


def test_what_a_function_of_its_own_takes_is_the_score() -> None:
    found = printed(
        "tensor t : float[Skv]", "let x = s + t[kv]", "score where(kv < q, x * x, s / 2.0)"
    )
    assert not found.is_raw
    assert "let_x(args, at, s)" in found.lines[0].text


def test_only_the_first_line_takes_the_product() -> None:
    found = printed("score s / 2.0", "score tanh(s)")
    assert [one.text for one in found.lines] == [
        "s * (scale * 0.5f)",
        "ag_sigmoid2_quick(s * 2.88539f)",
    ]
    assert found.unit == ScoreUnit(2.0, -1.0)


@pytest.mark.parametrize(
    ("cap", "dtype", "is_short"),
    [(50.0, FP16, True), (128.0, FP16, True), (129.0, FP16, False), (129.0, BF16, True),
     (1024.0, BF16, True), (1025.0, BF16, False)],
)  # fmt: skip
def test_short_forms_cost_a_share_of_the_rounding(
    cap: float, dtype: Element, is_short: bool
) -> None:
    attention = variant(f"score softcap(s, {cap})", dtype=dtype)
    assert bool(find_short_calls(attention)) == is_short
    assert (cap * 2.0**-21 <= dtype.unit * SHARE) == is_short


def test_short_forms_share_what_they_may_cost() -> None:
    attention = variant("score 100.0 * tanh(s)", "score s + 100.0 * tanh(s / 3.0)", dtype=FP16)
    assert len(find_short_calls(attention)) == 1  # what the first errs by becomes 34 times as much
    attention = variant("score 100.0 * tanh(s) + 100.0 * tanh(s / 3.0)", dtype=FP16)
    short = find_short_calls(attention)
    calls = [n for n in postorder(*attention.scores) if isinstance(n, Call)]
    assert [id(n) in short for n in calls] == [True, False]


def test_fp32_has_no_short_forms() -> None:
    attention = variant("score tanh(s)")
    assert find_short_calls(replace(attention, dtype=None)) == {}


# ---- how far -------------------------------------------------------------------------------

EX2, RCP, LG2 = 2.0**-22, 2.0**-23, 2.0**-22
"""Errors that the PTX manual states: relative; LG2 is absolute between 1/2 and 2."""


def single(x: object) -> np.ndarray:
    """Rounded to float32, with subnormals flushed, as float64."""
    with np.errstate(over="ignore", under="ignore"):
        y = np.asarray(x, np.float64).astype(np.float32).astype(np.float64)
    return np.where(np.abs(y) < 2.0**-126, 0.0, y)


def exp2_approx(x: np.ndarray, sign: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return single(np.exp2(x) * (1.0 + sign * EX2))


def sigmoid2(x: np.ndarray, signs: tuple[float, ...]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return single(1.0 / single(1.0 + exp2_approx(-x, signs[0])) * (1.0 + signs[1] * RCP))


def log2_approx(x: np.ndarray, sign: float) -> np.ndarray:
    exact = np.log2(x)
    error = np.where((x > 0.5) & (x < 2.0), LG2, np.abs(exact) * LG2)
    return single(exact + sign * error)


LOG2_E = float(np.float32(1.442695))
SIGNS = tuple(itertools.product((-1.0, 1.0), repeat=2))


def dense(low: float, high: float) -> np.ndarray:
    """float32 numbers between, as many near 0 as far from it."""
    inside = np.linspace(low, high, 400_001)
    near = np.geomspace(2.0**-100, max(abs(low), abs(high)), 200_001)
    points = np.concatenate([inside, near, -near])
    return single(points[(points >= low) & (points <= high)])


def test_tanh() -> None:
    x = dense(-100.0, 100.0)
    worst = 0.0
    for signs in SIGNS:
        short = 2.0 * sigmoid2(single(x * float(np.float32(2.88539))), signs) - 1.0
        worst = max(worst, float(np.abs(short - np.tanh(x)).max()))
    bound = ERRORS["tanh"](Interval(-math.inf, math.inf))
    assert bound / 4 < worst <= bound


@pytest.mark.parametrize("cap", [1.0, 15.0, 30.0, 50.0, 64.0])
def test_a_softcap_with_all_its_constants(cap: float) -> None:
    """As the kernel computes it: x is q.k, and the sum of the exponent is one operation."""
    scale = float(np.float32(0.08838835))
    x = dense(-200.0 * cap, 200.0 * cap)
    factor = single(scale * float(np.float32(2.88539008 / cap)))
    right = cap * np.tanh(x * scale / cap)
    for signs in SIGNS:
        short = 2.0 * cap * sigmoid2(single(x * factor), signs) - cap
        assert np.abs(short - right).max() <= cap * 2.0**-21
        # Beside it the weight's factor is rounded: 2^-24 of an exponent of up to 2 cap log2(e).
        assert cap * (2.0**-21 + 2.0**-23) <= FP16.unit / 8 * cap / 64


@pytest.mark.parametrize("top", [0.0, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("name", ["exp", "exp2"])
def test_powers(name: str, top: float) -> None:
    x = dense(-120.0, top)
    factor, right = (LOG2_E, np.exp(x)) if name == "exp" else (1.0, np.exp2(x))
    bound = ERRORS[name](Interval(-math.inf, top))
    for sign in (-1.0, 1.0):
        found = np.abs(exp2_approx(single(x * factor), sign) - right).max()
        assert found <= bound
        assert found > bound / 16


@pytest.mark.parametrize(("low", "high"), [(1.0, 3e38), (0.5, 2.0), (0.9, 1.1), (1e-30, 1e-3)])
@pytest.mark.parametrize("name", ["log", "log2"])
def test_logarithms(name: str, low: float, high: float) -> None:
    x = single(np.geomspace(low, high, 500_001))
    x = x[(x > 0) & (x < 3.4e38)]
    right = np.log(x) if name == "log" else np.log2(x)
    factor = float(np.float32(math.log(2.0))) if name == "log" else 1.0
    bound = ERRORS[name](Interval(low, high))
    for sign in (-1.0, 1.0):
        found = np.abs(log2_approx(x, sign) * factor - right).max()
        assert bound / 8 < found <= bound


def test_a_logarithm_of_any_number_is_bounded() -> None:
    assert ERRORS["log"](Interval(-math.inf, math.inf, nan=True)) <= FP16.unit * SHARE
    assert ERRORS["log"](Interval(1.0, 2.0**127)) <= FP16.unit * SHARE
    assert ERRORS["exp"](Interval(-math.inf, math.inf)) == math.inf


def test_sigmoid() -> None:
    x = dense(-100.0, 100.0)
    right = 1.0 / (1.0 + np.exp(-x))
    for signs in SIGNS:
        found = sigmoid2(single(x * LOG2_E), signs)
        assert np.abs(found - right).max() <= 2.0**-22
