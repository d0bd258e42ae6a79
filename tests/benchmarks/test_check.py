"""A wrong result is noticed, wherever it is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attngen
from benchmarks.check import Expected, choose_rows, compute_expected, judge

TEXT = "attention causal_attention {\n    mask causal\n}\n"


@pytest.fixture(scope="module")
def expected() -> Expected:
    random = np.random.default_rng(0)
    q = random.standard_normal((2, 32, 4, 16))
    k, v = random.standard_normal((2, 2, 32, 2, 16))
    return compute_expected(TEXT, (q, k, v), {}, "bf16", choose_rows(2, 4, 32, 0))


@given(st.integers(1, 4), st.integers(1, 128), st.integers(1, 1 << 15), st.integers(0, 9))
def test_rows_hold_the_first_and_the_last_and_some_more(B: int, Hq: int, S: int, seed: int) -> None:
    rows = choose_rows(B, Hq, S, seed)
    assert rows[0] == 0
    assert rows[-1] == S - 1
    assert (np.diff(rows) > 0).all()
    assert min(S, 4) <= len(rows) <= 64


def test_other_seeds_check_other_rows() -> None:
    assert list(choose_rows(1, 16, 8192, 0)) != list(choose_rows(1, 16, 8192, 1))


def test_the_right_answer_is_that_of_the_whole_oracle() -> None:
    random = np.random.default_rng(1)
    q, k, v = random.standard_normal((3, 1, 24, 2, 8))
    found = compute_expected(TEXT, (q, k, v), {}, "fp16", np.array([0, 5, 23]))
    whole = attngen.reference(
        attngen.load_text(TEXT), *(x.transpose(0, 2, 1, 3) for x in (q, k, v)), dtype="fp16"
    )
    np.testing.assert_allclose(found.o, whole.o[:, :, [0, 5, 23]], atol=1e-14)
    np.testing.assert_allclose(found.bound, whole.bound[:, :, [0, 5, 23]], rtol=1e-12)


def test_the_right_answer_is_right(expected: Expected) -> None:
    verdict = judge(expected.o.transpose(0, 2, 1, 3), expected)
    assert (verdict.max_err, verdict.rms_err, verdict.bound_ratio) == (0.0, 0.0, 0.0)


@given(st.data())
def test_one_element_decides(expected: Expected, data: st.DataObject) -> None:
    at = tuple(data.draw(st.integers(0, n - 1)) for n in expected.o.shape)
    found = expected.o.copy()
    found[at] += 3 * expected.bound[at]
    verdict = judge(found.transpose(0, 2, 1, 3), expected)
    assert verdict.bound_ratio == pytest.approx(3.0, rel=1e-6)
    assert verdict.max_err == pytest.approx(3 * expected.bound[at], rel=1e-6)


def test_nan_is_infinitely_far(expected: Expected) -> None:
    found = expected.o.copy()
    found[1, 0, 2, 3] = np.nan
    verdict = judge(found.transpose(0, 2, 1, 3), expected)
    assert verdict.max_err == verdict.bound_ratio == np.inf
