"""What of a mask is bounds of keys: the split means the same, and finds what it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.analysis.key_bounds import MaskSplit, as_phase, pieces_of_pattern, split_mask
from attngen.ir.attention import Attention
from attngen.ir.expr import Compare, Const, Expr, Logical, LogicalOp, Not, Symbol
from attngen.ir.printer import print_expr
from attngen.ir.traverse import children, symbols
from attngen.passes.fold_constants import fold_expr
from tests.analysis.masks import AFFINE, PERIODIC, TRUTHS, build, make_tensors, pairs
from tests.analysis.masks import symbols as known_symbols


def shown(split: MaskSplit) -> tuple[str | None, list[str]]:
    bounds = None if split.bounds is None else print_expr(fold_expr(split.bounds))
    return bounds, [print_expr(e) for e in split.rest]


@pytest.mark.parametrize(
    ("mask", "bounds", "rest"),
    [
        ("kv <= qpos", "kv < qpos + 1", []),
        ("kv > q - w", "not kv < q - w + 1", []),
        ("kv == q", "kv < q + 1 and not kv < q", []),
        ("kv - q <= 3 and keep[b, kv]", "kv < q + 4", ["keep[b, kv]"]),
        ("kv // 4 < plen[b]", "kv < plen[b] * 4", []),
        ("2 - kv <= q", "not kv < 2 - (q + 1) + 1", []),
        ("kv <= q or kv < plen[b]", "kv < max(q + 1, plen[b])", []),
        ("kv <= q and kv >= q - 3 and kv < w", "kv < min(q + 1, w) and not kv < q - 3", []),
        ("abs(kv - q) <= 2 or q < 3", "kv < q + 3 and not kv < q - 2 or q < 3", []),
        ("max(kv, q) < 7", "kv < 7 and q < 7", []),
        # Conditions on the row come with bounds; those that read a tensor for each row do not.
        ("q < 5 and kv < 9 and ids[b, q] > 0", "kv < 9 and q < 5", ["ids[b, q] > 0"]),
        ("kv < ids[b, q]", None, ["kv < ids[b, q]"]),
        ("kv < 3 or keep[b, kv]", None, ["kv < 3 or keep[b, kv]"]),
        # Patterns: the same again after a few pieces of 8 keys.
        ("kv % 2 == 0 and kv < 3", "kv < 3 and kv % 2 == 0", []),
        ("abs(q - kv) % 3 == 0", "(q - kv) % 3 == 0", []),
        ("abs(q - kv) % 3 == 1", None, ["abs(q - kv) % 3 == 1"]),
        ("kv // 4 % 3 != q % 3 or kv < 2", "kv < 2 or kv // 4 % 3 != q % 3", []),
        ("abs(q % 32 - kv % 32) <= 3", "abs(q % 32 - kv % 32) <= 3", []),
        ("kv % 72 == 0", None, ["kv % 72 == 0"]),
        ("kv % 2 == ids[b, q] and kv < 3", "kv < 3", ["kv % 2 == ids[b, q]"]),
        # As many as a row can be asked.
        (
            "kv % 64 == 0 and kv % 40 == q % 3 and kv < w",
            "kv < w and kv % 40 == q % 3",
            ["kv % 64 == 0"],
        ),
        # Phases: a limit after each of some hundred keys.
        ("kv % 128 < w", "kv % 128 < w", []),
        ("(kv - w) % 200 <= q % 200", "(kv - w) % 200 < q % 200 + 1", []),
        ("(q - kv) % 200 < w", "not (-(q - kv) - 1) % 200 < 200 - w", []),
        ("kv // 32 % 8 == 2", "kv % 256 < 96 and not kv % 256 < 64", []),
        ("kv % 256 // 32 < w", "kv % 256 < w * 32", []),
        ("2 * kv % 256 < w", None, ["2 * kv % 256 < w"]),
        ("kv % 127 < w", None, ["kv % 127 < w"]),
        ("kv + kv < q", None, ["kv + kv < q"]),
        ("kv * 1.0 < 3.0 and q < 5", None, ["float(kv) * 1.0 < 3.0 and q < 5"]),
    ],
)
def test_bounds(mask: str, bounds: str | None, rest: list[str]) -> None:
    assert shown(split_mask(build(mask))) == (bounds, rest)


def test_a_limit_that_may_leave_64_bits_is_rest() -> None:
    split = split_mask(
        build("kv + far[b] < x and kv < 9", "tensor far : int64[B]\n    param x : int")
    )
    assert shown(split) == ("kv < 9", ["kv + far[b] < x"])


def is_bounds(e: Expr) -> bool:
    """Whether an expression is made of limits, phases and patterns, and of conditions on rows."""
    match e:
        case _ if as_phase(e) is not None or pieces_of_pattern(e) is not None:
            return True
        case Logical() | Not():
            return all(map(is_bounds, children(e)))
        case Compare(_, Symbol("kv"), limit):
            return "kv" not in symbols(limit)
        case _:
            return "kv" not in symbols(e)


def together(attention: Attention, split: MaskSplit) -> Attention:
    """The variant with its mask put together again."""
    terms = (split.bounds or Const(True), *split.rest)
    return replace(attention, mask=Logical(LogicalOp.AND, terms))


@settings(max_examples=600, deadline=None)
@given(
    mask=st.one_of(
        TRUTHS, AFFINE, st.tuples(AFFINE, TRUTHS).map(lambda t: f"({t[0]}) and ({t[1]})")
    ),
    seed=st.integers(0, 2**16),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 13)),
    w=st.integers(1, 9),
)
def test_the_split_means_the_same(mask: str, seed: int, shape: tuple[int, int], w: int) -> None:
    check_split(mask, seed, shape, w)


@settings(max_examples=300, deadline=None)
@given(mask=PERIODIC, start=st.integers(0, 999), w=st.integers(1, 9))
def test_what_begins_and_ends_again(mask: str, start: int, w: int) -> None:
    check_split(mask, start, (start + 7, start + 450), w)


def check_split(mask: str, seed: int, shape: tuple[int, int], w: int) -> None:
    """Compare a mask with what it is split into, at the last rows and keys of a problem."""
    attention = build(mask)
    split = split_mask(attention)
    if attention.mask is None or split.bounds is None:
        return
    assert is_bounds(split.bounds)
    tensors: dict[str, Any] = make_tensors(np.random.default_rng(seed), *shape, is_sorted=False)
    rows, keys = (np.arange(n)[-500:] for n in shape)
    known = known_symbols(*shape, w, b=1, h=1)
    expected = pairs(attention, known, tensors, rows, keys)
    assert (pairs(together(attention, split), known, tensors, rows, keys) == expected).all()
