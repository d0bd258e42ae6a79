"""How much a score can change with what its lines compute."""

from __future__ import annotations

import math

import pytest

import attngen
from attngen.analysis.sensitivity import find_reach
from attngen.ir.expr import Call
from attngen.ir.traverse import postorder

NONE = math.inf
"""No bound."""


def slope_of(function: str, *scores: str) -> float:
    """The slope of the one call of a function."""
    lines = "\n".join(f"    score {line}" for line in scores)
    declared = "    param cap : float\n    param c : float where 1.0 <= c <= 64.0\n"
    declared += "    tensor t : float[Skv]\n"
    attention = attngen.compile_text(f"attention a {{\n{declared}{lines}\n}}\n").attention
    calls = (n for n in postorder(*attention.scores) if isinstance(n, Call))
    (found,) = (n for n in calls if n.function == function)
    return find_reach(attention).slope[id(found)]


@pytest.mark.parametrize(
    ("scores", "slope"),
    [
        (["tanh(s)"], 1.0),
        (["-30.0 * tanh(s / 30.0)"], 30.0),
        (["tanh(s) / 4.0"], 0.25),
        (["c * tanh(s / c)"], 64.0),
        (["cap * tanh(s / cap)"], NONE),
        (["s * tanh(s)"], NONE),
        (["t[kv] * tanh(s)"], NONE),
        (["tanh(s) / (kv - q)"], NONE),
        (["30.0 * tanh(s / 30.0)", "2.0 * s + 1.0"], 60.0),
        (["30.0 * tanh(s / 30.0)", "s + exp2(s)"], 30.0 * (1.0 + 2.0**30 * math.log(2.0))),
        (["where(kv < q, 5.0 * tanh(s), s)"], 5.0),
        (["where(tanh(s) < 0.5, 1.0, s)"], NONE),
        (["where(floor(tanh(s)) == kv, 1.0, s)"], NONE),
        (["max(3.0 * tanh(s), 0.0)"], 3.0),
        (["abs(tanh(s)) + clamp(s, 0.0, 1.0)"], 1.0),
        (["s + 0.0 * tanh(s)"], 0.0),
    ],
)
def test_slope(scores: list[str], slope: float) -> None:
    found = slope_of("tanh", *scores)
    if slope == NONE:
        assert found >= 2.0**126  # as far as float32 goes
    else:
        assert found == pytest.approx(slope, rel=1e-5)


def test_a_value_that_is_used_twice_counts_twice() -> None:
    text = "attention a {\n    let x = tanh(s)\n    score 2.0 * x + 3.0 * x\n}\n"
    attention = attngen.compile_text(text).attention
    (found,) = (n for n in postorder(*attention.scores) if isinstance(n, Call))
    assert find_reach(attention).slope[id(found)] == 5.0


def test_values_of_a_line_are_those_of_the_line_before() -> None:
    attention = attngen.compile_text(
        "attention a {\n    score 30.0 * tanh(s / 30.0)\n    score log(s + 31.0)\n}\n"
    ).attention
    reach = find_reach(attention)
    line = attention.scores[1]
    assert isinstance(line, Call)
    operand = reach.values[id(line.arguments[0])]
    assert operand.low == pytest.approx(1.0, abs=1e-4)
    assert operand.high == pytest.approx(61.0, abs=1e-4)
    assert reach.slope[id(attention.scores[0])] == pytest.approx(1.0, abs=1e-4)
