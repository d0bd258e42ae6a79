"""What operators and methods become, and that it means what it meant in Python."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.flex import flex_attention, from_python

ROWS, KEYS, HEADS = 6, 8, 2


def mask_line(mask_mod: Callable[..., Any]) -> str:
    return _line(from_python(mask_mod=mask_mod), "mask")


def score_line(score_mod: Callable[..., Any]) -> str:
    return _line(from_python(score_mod), "score")


def _line(text: str, statement: str) -> str:
    (line,) = [each for each in text.splitlines() if each.startswith(f"    {statement} ")]
    return line.split(None, 1)[1]


MASKS = [
    (lambda b, h, q, kv: q >= kv, "q >= kv"),
    (lambda b, h, q, kv: ~(q > kv) & (h != 0), "not q > kv and h != 0"),
    (lambda b, h, q, kv: (q > 1) & (kv > 1) & (b > 1), "q > 1 and kv > 1 and b > 1"),
    (lambda b, h, q, kv: (q > 1) ^ (kv > 1), "(q > 1) != (kv > 1)"),
    (lambda b, h, q, kv: 3 - q > kv, "3 - q > kv"),
    (lambda b, h, q, kv: q // 4 == kv % 3, "q // 4 == kv % 3"),
    (lambda b, h, q, kv: q / 4 >= kv, "q / 4 >= kv"),
    (lambda b, h, q, kv: math.floor(q / 4) == kv, "1.0 * floor(q / 4) == kv"),
    (lambda b, h, q, kv: divmod(q, 4)[1] == 0, "q % 4 == 0"),
    (lambda b, h, q, kv: abs(q - kv) < 4, "abs(q - kv) < 4"),
    (lambda b, h, q, kv: (q - kv).abs() < 4, "abs(q - kv) < 4"),
    (lambda b, h, q, kv: q.clamp(1, 3) == kv, "clamp(q, 1, 3) == kv"),
    (lambda b, h, q, kv: q.clamp(min=1) == kv, "max(q, 1) == kv"),
    (lambda b, h, q, kv: q.clamp(max=3) == kv, "min(q, 3) == kv"),
    (lambda b, h, q, kv: (q & 3) == 0, "q % 4 == 0"),
    (lambda b, h, q, kv: (q >> 2) == kv, "q // 4 == kv"),
    (lambda b, h, q, kv: (q & 12) == kv, "q // 4 % 4 * 4 == kv"),
    (lambda b, h, q, kv: (q << 1 | 1) == kv, "q * 2 + 1 == kv"),
    (lambda b, h, q, kv: (q & -4) == kv, "q - q % 4 == kv"),
    (lambda b, h, q, kv: (q > kv) + 1 == 2, "where(q > kv, 1, 0) + 1 == 2"),
    (lambda b, h, q, kv: q.new_ones(()) == kv, "1 == kv"),
    (lambda b, h, q, kv: (q > 1) | False, "q > 1"),
    (lambda b, h, q, kv: True & (q > 1), "q > 1"),
]

SCORES = [
    (lambda s, b, h, q, kv: s * 2, "s * 2"),
    (lambda s, b, h, q, kv: -s, "-s"),
    (lambda s, b, h, q, kv: s**2 + s**-1, "s**2 + 1.0 / s**1"),
    (lambda s, b, h, q, kv: s**0.5, "sqrt(s)"),
    (lambda s, b, h, q, kv: s * 2.0 ** -(h + 1), "s * exp2(-(h + 1))"),
    (lambda s, b, h, q, kv: s * 0.5**h, "s * exp2(h * log2(0.5))"),
    (lambda s, b, h, q, kv: s.tanh() * 30.0, "tanh(s) * 30.0"),
    (lambda s, b, h, q, kv: s + (q > kv), "s + where(q > kv, 1, 0)"),
    (lambda s, b, h, q, kv: (q > kv).float() * s, "1.0 * where(q > kv, 1, 0) * s"),
    (lambda s, b, h, q, kv: s // 2, "1.0 * floor(s / 2)"),
    (lambda s, b, h, q, kv: s % 2, "s - 2 * (1.0 * floor(s / 2))"),
    (lambda s, b, h, q, kv: s.relu(), "max(s, 0)"),
    (lambda s, b, h, q, kv: s + float("-inf"), "s + -inf"),
    (lambda s, b, h, q, kv: s + np.float32(0.1), "s + 0.1"),
    (lambda s, b, h, q, kv: s + np.int64(3), "s + 3"),
    (lambda s, b, h, q, kv: q - kv, "q - kv"),
    (lambda s, b, h, q, kv: np.tanh(s) + np.float32(2) * s, "tanh(s) + 2.0 * s"),
    (lambda s, b, h, q, kv: np.where(q > kv, s, 0.0), "where(q > kv, s, 0.0)"),
    (lambda s, b, h, q, kv: np.clip(s, -1, 1), "clamp(s, -1, 1)"),
    (lambda s, b, h, q, kv: np.power(s, 2) + np.abs(q), "s**2 + abs(q)"),
    (lambda s, b, h, q, kv: s + table[3], "s + table[3]"),
]


@pytest.mark.parametrize(("function", "line"), MASKS)
def test_mask_lines(function: Callable[..., Any], line: str) -> None:
    assert mask_line(function) == line


@pytest.mark.parametrize(("function", "line"), SCORES)
def test_score_lines(function: Callable[..., Any], line: str) -> None:
    assert score_line(function) == line


def test_what_changes_nothing_is_left_out() -> None:
    text = from_python(lambda s, b, h, q, kv: s, lambda b, h, q, kv: True)
    assert text == "attention flex {\n    output    o\n}\n"


# ---- names -------------------------------------------------------------------------------

table = np.arange(8, dtype=np.int32)


def test_a_shared_expression_has_the_name_of_its_variable() -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = abs(q_idx - kv_idx) * 2
        return (distance > 2) & (distance < 8)

    text = from_python(mask_mod=mask_mod)
    assert "    let       distance = abs(q - kv) * 2\n" in text
    assert _line(text, "mask") == "distance > 2 and distance < 8"


def test_names_of_captured_arrays() -> None:
    nonlocal_table = table[:4]

    def mask_mod(
        b: Any, h: Any, q: Any, kv: Any, default: Any = table[:3], *, only: Any = table[:2]
    ) -> Any:
        return (table[kv] + nonlocal_table[q % 4] + default[b] + only[h]) > 3

    text = from_python(mask_mod=mask_mod)
    assert _line(text, "mask") == "table[kv] + nonlocal_table[q % 4] + default[b] + only[h] > 3"
    dims = [line.split("[")[1] for line in text.splitlines() if "tensor" in line]
    assert dims == ["Skv]", "nonlocal_table_len]", "B]", "Hq]"]


def test_partial_and_nested_functions() -> None:
    def inner(index: Any, ids: Any) -> Any:
        return ids[index]

    def mask_mod(ids: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return inner(q, ids) == functools.partial(inner, ids=ids)(kv)

    assert mask_line(functools.partial(mask_mod, table)) == "ids[q] == ids[kv]"


def test_a_name_that_is_taken() -> None:
    q, s, erf = table, table[:4], table[:3]
    text = from_python(lambda s_, b, h, i, j: s_ + q[i] + s[h] + erf[b])
    assert _line(text, "score") == "s + my_q[q] + my_s[h] + my_erf[b]"


def test_one_array_under_two_names_is_one_tensor() -> None:
    other = table
    text = from_python(mask_mod=lambda b, h, q, kv: other[q] == table[kv])
    assert text.count("tensor ") == 1


def test_an_array_that_is_not_read_is_no_tensor() -> None:
    wide = np.zeros((2, 3))  # float64, which no kernel reads
    text = from_python(mask_mod=lambda b, h, q, kv: q % wide.shape[1] == kv)
    assert text == from_python(mask_mod=lambda b, h, q, kv: q % 3 == kv)


def test_rows_are_written_out() -> None:
    spans = np.zeros((3, 2), np.int32)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        begin, end = spans[b]
        return (begin <= kv) & (kv < end) | (spans[b] == kv).any()

    assert mask_line(mask_mod) == (
        "spans[b, 0] <= kv and kv < spans[b, 1] or spans[b, 0] == kv or spans[b, 1] == kv"
    )
    assert "spans : int32[B, 2]" in from_python(mask_mod=mask_mod)


def test_a_long_row() -> None:
    """It is cut into lets, since the parser takes 150 levels."""
    weights = np.arange(512, dtype=np.float32).reshape(1, 512) / 512

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return weights[b].sum() + (weights[b] > 2).any()

    q = k = v = np.ones((1, 1, 1, 4), np.float32)
    _, lse = flex_attention(q, k, v, score_mod, return_lse=True, engine="numpy")
    np.testing.assert_allclose(lse, weights.sum(), rtol=1e-5)
    assert from_python(score_mod).count("    let ") == 5


def test_indices_from_the_end_and_dimensions_left_out() -> None:
    cube = np.zeros((2, 3, 4), np.float32)

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + cube[b, -1, q] + cube[..., 0, kv][b] + cube[:, 1][b].sum()

    words = " ".join(from_python(score_mod).split())
    assert "s + cube[b, 2, q] + cube[b, 0, kv] + (cube[b, 1, 0] + cube[b, 1, 1]" in words


# ---- meaning -----------------------------------------------------------------------------

_LEAVES = ["q", "kv", "h", "b", "ids[q % 5]", "ids[kv % 5]", "3", "1", "7"]
_INT_OPS = ["({} + {})", "({} - {})", "({} * {})", "({} // 3 + {})", "({} % 4 - {})",
            "({} // -2 + {})", "({} % -3 + {})", "(abs({}) - {})", "(({} & 6) + {})",
            "(({} & -3) + {})", "(({} | 5) - {})", "(({} ^ 3) - {})", "({} + ({} >> 1))",
            "(-{} + {})"]  # fmt: skip
_TRUTHS = ["(0 * q + {} < {})", "(0 * q + {} >= {})", "(0 * q + {} == {})",
           "(0 * q + {} != {})", "(1.5 * q + {} <= {})", "(q / 4 + {} > {})"]  # fmt: skip
_JOINS = ["({} & {})", "({} | {})", "({} ^ {})", "({} & ~{})", "(({} * 1 + {}) > 1)"]

integers = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.builds(str.format, st.sampled_from(_INT_OPS), inner, inner),
    max_leaves=6,
)
truths = st.recursive(
    st.builds(str.format, st.sampled_from(_TRUTHS), integers, integers),
    lambda inner: st.builds(str.format, st.sampled_from(_JOINS), inner, inner),
    max_leaves=4,
)


@settings(max_examples=60)
@given(truths)
def test_random_masks_mean_what_they_meant(text: str) -> None:
    names = {"ids": np.array([4, 0, -7, 2, 9])}
    mask_mod = eval(f"lambda b, h, q, kv: {text} & (q > -1)", names)
    q = np.zeros((2, HEADS, ROWS, 4), np.float32)
    k = np.zeros((2, HEADS, KEYS, 4), np.float32)
    v = np.broadcast_to(np.eye(KEYS, dtype=np.float32), (2, HEADS, KEYS, KEYS))
    indices = np.ogrid[0:2, 0:HEADS, 0:ROWS, 0:KEYS]
    expected = np.broadcast_to(mask_mod(*indices), (2, HEADS, ROWS, KEYS))
    o = flex_attention(q, k, v, mask_mod=mask_mod, engine="numpy")
    np.testing.assert_array_equal(o > 0, expected)
