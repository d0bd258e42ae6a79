"""How expressions change from key to key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.analysis.growth import KEYS, ROWS, Growth, find_growth_of, growth_of
from attngen.ir.expr import Compare, Expr
from attngen.ir.semantics import evaluate
from tests.analysis.masks import INTS, PERIODIC, build, make_tensors
from tests.analysis.masks import symbols as known_symbols


def integer(text: str) -> Expr:
    mask = build(f"{text} < 5").mask
    assert isinstance(mask, Compare)
    return mask.left


@pytest.mark.parametrize(
    ("text", "growth"),
    [
        ("kv", Growth(1, 1)),
        ("q + w", Growth(1, 0)),
        ("-kv", Growth(1, -1)),
        ("kv * 4 - q", Growth(1, 4)),
        ("kv + kv", Growth(1, 2)),
        ("kv // 2", Growth(2, 1)),
        ("6 * kv // 4", Growth(2, 3)),
        ("(q - kv) % 6", Growth(6, 0)),
        ("4 * kv % 6", Growth(3, 0)),
        ("kv // 4 % 3", Growth(12, 0)),
        ("kv % 4 + kv % 6", Growth(12, 0)),
        ("kv % 4 + kv", Growth(4, 4)),
        ("abs(q % 3 - kv % 3)", Growth(3, 0)),
        ("doc[b, kv % 4]", Growth(4, 0)),
        ("abs(kv)", None),
        ("kv * kv", None),
        ("kv * w", None),
        ("kv % w", None),
        ("doc[b, kv]", None),
    ],
)
def test_growth_from_key_to_key(text: str, growth: Growth | None) -> None:
    e = integer(text)
    assert find_growth_of(e, KEYS) == growth
    assert growth_of(e) == (growth.gain if growth and growth.steps == 1 else None)


def test_growth_from_row_to_row() -> None:
    assert growth_of(integer("2 * q - qpos + kv"), ROWS) == 1


@settings(max_examples=400, deadline=None)
@given(text=INTS, mask=PERIODIC, seed=st.integers(0, 99), w=st.integers(1, 9))
def test_expressions_grow_as_is_said(text: str, mask: str, seed: int, w: int) -> None:
    Sq, Skv = 5, 1900
    tensors = make_tensors(np.random.default_rng(seed), Sq, Skv, is_sorted=False)
    at: dict[str, Any] = known_symbols(Sq, Skv, w, b=1, h=1)
    at |= {"q": np.int64(3), "kv": np.arange(Skv), "qpos": np.int64(3 + Skv - Sq)}
    for e in (build(f"{text} < kv").mask, build(mask).mask):
        nodes = [] if e is None else [e.left if isinstance(e, Compare) else e]
        for node in nodes:
            growth = find_growth_of(node)
            if growth is not None and growth.steps < Skv:
                value = np.broadcast_to(evaluate(node, at, tensors).data, (Skv,)).astype(np.int64)
                gained = value[growth.steps :] - value[: -growth.steps]
                assert (gained == growth.gain).all()
