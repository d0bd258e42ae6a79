"""Score lines near 0 as polynomials: how far they err, and where they are taken."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.codegen.near_scores import ENOUGH, ERROR, MOST_TERMS, find_near
from attngen.codegen.score_text import NearText, print_scores
from attngen.ir.types import BF16

SCALE = 128.0**-0.5


def power_of(cap: float) -> float:
    """cap tanh(s / cap) = 2 cap sigmoid2(s power) - cap."""
    return 2.0 / math.log(2.0) / cap


@pytest.mark.parametrize("scale", [SCALE, -0.5, 3.0])
@pytest.mark.parametrize("cap", [17.0, 20.0, 30.0, 50.0, 500.0])
def test_error(cap: float, scale: float) -> None:
    near = find_near(power_of(cap), scale)
    assert near is not None
    assert len(near.coefficients) <= MOST_TERMS
    assert near.limit * abs(scale) >= 0.99 * ENOUGH
    x = np.linspace(-near.limit, near.limit, 20001).astype(np.float32)
    y, p = x * x, np.float32(0.0)
    for c in reversed(near.coefficients):
        p = p * y + np.float32(c)
    found = (x.astype(np.float64) * p + 0.5).astype(np.float32)
    right = 0.5 + np.tanh(x.astype(np.float64) * scale / cap) / 2.0
    assert np.abs(found - right).max() <= ERROR + 2.0**-24


@pytest.mark.parametrize(("cap", "scale"), [(5.0, SCALE), (30.0, 0.0), (30.0, 1e-25)])
def test_too_few_scores_are_near(cap: float, scale: float) -> None:
    assert find_near(power_of(cap), scale) is None


def near_of(*lines: str, is_dear: bool = True) -> NearText | None:
    body = "".join(f"    {line}\n" for line in lines)
    declared = "    param cap : float\n    tensor slope : float[Hq]\n"
    kernel = attngen.compile_text(f"attention a {{\n{declared}{body}}}\n")
    attention = replace(kernel.attention, dtype=BF16)
    text = print_scores(attention, is_checked=False, is_dear=is_dear, takes_unit=True)
    return text.near


@pytest.mark.parametrize(
    ("is_near", "lines"),
    [
        (True, ("scale 0.125", "score softcap(s, 30.0)")),
        (True, ("scale 0.125", "score softcap(s, 30.0) * 0.5 + 1.0")),
        (True, ("scale 0.125", "score 100.0 * sigmoid(s / 20.0)")),
        (False, ("scale 0.125", "score softcap(s, 3.0)")),
        (False, ("scale 0.125", "score softcap(s, cap)")),
        (False, ("scale 0.125", "score softcap(s + 1.0, 30.0)")),
        (False, ("scale 0.125", "score softcap(s, 30.0) + slope[h]")),
        (False, ("scale 0.125", "score -softcap(s, 30.0)")),
        (False, ("scale 0.125", "score softcap(s, 30.0)", "score softcap(s, 20.0)")),
        (False, ("scale 0.125", "score s * slope[h]", "score softcap(s, 20.0)")),
        (False, ("scale cap", "score softcap(s, 30.0)")),
    ],
)
def test_where(is_near: bool, lines: tuple[str, ...]) -> None:
    assert (near_of(*lines) is not None) == is_near
    assert near_of(*lines, is_dear=False) is None
