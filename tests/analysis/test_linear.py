"""Linear forms against evaluation: the same value, and within its bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.analysis.cubes import floor_divide
from attngen.analysis.linear import Atoms
from attngen.ir.expr import Compare, Expr
from attngen.ir.semantics import evaluate
from tests.analysis.masks import INTS, build, make_tensors
from tests.analysis.masks import symbols as sizes_and_params


def integer(text: str) -> tuple[Atoms, Expr]:
    attention = build(f"({text}) != kv + 123456789")
    assert isinstance(attention.mask, Compare)
    return Atoms(attention), attention.mask.left


def values(e: Expr, Sq: int, Skv: int, w: int, seed: int) -> Any:
    """Its value at every pair of a small problem."""
    q, kv = np.arange(Sq)[:, None], np.arange(Skv)[None, :]
    at = {**sizes_and_params(Sq, Skv, w, 1, 0), "q": q, "kv": kv, "qpos": q + Skv - Sq}
    tensors = make_tensors(np.random.default_rng(seed), Sq, Skv, False)
    return np.broadcast_to(evaluate(e, at, tensors).data, (Sq, Skv))


@settings(max_examples=300)
@given(
    text=INTS,
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    w=st.integers(1, 9),
    divisor=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_a_form_keeps_the_value_and_bounds_it(
    text: str, shape: tuple[int, int], w: int, divisor: int, seed: int
) -> None:
    atoms, e = integer(text)
    form = atoms.linear(e)
    expected = values(e, *shape, w, seed)
    assert (values(atoms.expr(form), *shape, w, seed) == expected).all()
    assert atoms.least(form) <= expected.min()
    assert atoms.most(form) >= expected.max()
    quotient = atoms.expr(floor_divide(atoms, form, divisor))
    assert (values(quotient, *shape, w, seed) == expected // divisor).all()


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("qpos - q - Skv + Sq", 0, 0),
        ("q // 8 * 8 - q", -7, 0),
        ("q - q // 8 * 8", 0, 7),
        ("qpos // 4 * 8 - 2 * qpos", -6, 0),
        ("q // 2 - q // 3", 0, None),
        ("abs(w) - w", -8, 8),
        ("w * 2 - 2 * w", 0, 0),
        ("doc[b, q] - doc[b, q]", 0, 0),
        ("q % 1", 0, 0),
    ],
)
def test_bounds_see_that_lengths_and_quotients_cancel(
    text: str, least: int, most: int | None
) -> None:
    atoms, e = integer(text)
    form = atoms.linear(e)
    assert atoms.least(form) == least
    assert most is None or atoms.most(form) == most


def test_a_position_is_written_as_one_symbol() -> None:
    for text in ("qpos", "q + Skv - Sq", "2 * qpos", "qpos + w - Sq + Sq"):
        atoms, e = integer(text)
        assert "qpos" in atoms.names(atoms.expr(atoms.linear(e)))
    for text in ("q + Skv", "q - Sq + 2 * Skv", "2 * q + Skv - Sq"):
        atoms, e = integer(text)
        assert "qpos" not in atoms.names(atoms.expr(atoms.linear(e)))
