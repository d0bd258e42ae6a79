"""What equalities make shorter, and z3's proof that it is the same mask."""

from __future__ import annotations

import numpy as np
import pytest
import z3
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.analysis.equalities import use_equalities
from attngen.ir.attention import Attention
from attngen.ir.printer import print_expr
from attngen.ir.traverse import postorder
from tests.analysis.masks import DATA, FAR, B, build, make_far, make_tensors, pairs, symbols
from tests.analysis.solver import Formula, to_formula

SAME = "ids[b, q] == doc[b, kv]"


def shown(attention: Attention) -> str:
    assert attention.mask is not None
    return print_expr(attention.mask)


def is_same(attention: Attention) -> bool:
    """z3's proof that both masks say the same of every pair, whatever is read."""
    names: dict[str, Formula] = {}
    masks = [attention.mask, use_equalities(attention).mask]
    first, second = (to_formula(mask, names) for mask in masks if mask is not None)
    solver = z3.Solver()
    solver.set("timeout", 10_000)
    solver.add(first != second)
    return bool(solver.check() == z3.unsat)


@pytest.mark.parametrize(
    ("mask", "short"),
    [
        (
            f"{SAME} and q - start[ids[b, q]] >= kv - start[doc[b, kv]]",
            f"{SAME} and q >= kv",
        ),
        (
            f"abs(q - start[ids[b, q]] - (kv - start[doc[b, kv]])) < 5 and {SAME}",
            f"abs(q - kv) < 5 and {SAME}",
        ),
        (
            f"keep[b, kv] or {SAME} and start[doc[b, kv]] + 2 <= start[ids[b, q]] + kv",
            f"keep[b, kv] or {SAME} and 2 <= kv",
        ),
        (
            f"{SAME} and (q < 4 or kv - start[doc[b, kv]] <= q - start[ids[b, q]])",
            f"{SAME} and (q < 4 or kv <= q)",
        ),
        ("q == kv and ago[b, q] - ago[b, kv] >= q - kv", "q == kv and 0 >= 0"),
    ],
)
def test_what_cancels(mask: str, short: str) -> None:
    attention = build(mask, FAR)
    assert shown(use_equalities(attention)).replace("\n", " ") == short
    assert is_same(attention)


@pytest.mark.parametrize(
    "mask",
    [
        "kv <= q",
        SAME,
        f"{SAME} and kv <= q",
        f"{SAME} and far[b, kv] <= ago[b, q]",
        f"{SAME} or q - start[ids[b, q]] >= kv - start[doc[b, kv]]",
        f"not ({SAME}) and start[ids[b, q]] >= start[doc[b, kv]]",
        "ids[b, q] <= doc[b, kv] and start[ids[b, q]] <= start[doc[b, kv]]",
    ],
)
def test_what_stays(mask: str) -> None:
    attention = build(mask, FAR)
    assert use_equalities(attention) is attention


def test_a_mask_of_many_parts_stays() -> None:
    many = " or ".join(f"(kv == {i} and q - start[ids[b, q]] >= {i})" for i in range(99))
    attention = build(f"{SAME} and q - start[ids[b, q]] >= kv - start[doc[b, kv]] or {many}", FAR)
    assert attention.mask is not None
    assert len(list(postorder(attention.mask))) > 512
    assert use_equalities(attention) is attention


@settings(max_examples=200)
@given(mask=DATA, other=DATA, seed=st.integers(0, 99), is_wide=st.booleans())
def test_it_is_the_same_mask(mask: str, other: str, seed: int, is_wide: bool) -> None:
    attention = build(f"{SAME} and {mask} or {other} and {SAME}", FAR)
    rng = np.random.default_rng(seed)
    tensors = {**make_tensors(rng, 9, 13, False), **make_far(rng, 9, 13, is_wide=is_wide)}
    for b in range(B):
        known = symbols(9, 13, 3, b, 0)
        found, right = (
            pairs(each, known, tensors, np.arange(9), np.arange(13))
            for each in (use_equalities(attention), attention)
        )
        np.testing.assert_array_equal(found, right)
