"""Problems: every call is in exactly one, and only what a schedule depends on tells them apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.tuning.problem import EXACT_TOKENS, LayoutClass, Problem

SIZES = {"B": 2, "Hq": 32, "Hkv": 8, "Sq": 4096, "Skv": 4096, "Dqk": 128, "Dv": 128}


def problem(dtype: str = "bf16", sm_count: int = 132, **sizes: Any) -> Problem:
    layout = sizes.pop("layout", LayoutClass.ALIGNED)
    return Problem.of(dtype, {**SIZES, **sizes}, sm_count, layout=layout)


def test_the_text_of_a_problem() -> None:
    assert str(problem(Sq=5000, Skv=5000)) == "bf16 d128 gqa4 4096x4096 waves 32"
    assert str(problem(Dqk=192, layout=LayoutClass.ANY)) == (
        "bf16 d192/128 gqa4 4096x4096 waves 16 any layout"
    )


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(0, 0), (1, 1), (127, 127), (128, 128), (129, 256), (256, 256), (362, 256), (363, 512),
     (4096, 4096), (5792, 4096), (5793, 8192), (1 << 20, 1 << 20)],
)  # fmt: skip
def test_buckets_of_a_length(tokens: int, bucket: int) -> None:
    assert problem(Skv=tokens).kv_tokens == bucket
    assert problem(Sq=tokens).q_tokens == bucket


@given(st.integers(EXACT_TOKENS + 1, 2**31 - 1))
def test_a_long_length_is_near_its_bucket(tokens: int) -> None:
    bucket = problem(Skv=tokens).kv_tokens
    assert bucket & (bucket - 1) == 0
    assert bucket == 256 or bucket**2 <= 2 * tokens**2 <= 4 * bucket**2


@pytest.mark.parametrize(
    ("sizes", "waves"),
    [({"B": 1, "Hq": 132, "Sq": 1}, 1.0), ({"B": 1, "Hq": 136, "Sq": 1}, 2.0),
     ({"B": 1, "Hq": 132, "Sq": 129}, 2.0), ({"B": 1, "Hq": 1, "Sq": 1}, 1 / 16),
     ({"B": 0}, 1 / 16), ({"B": 4096}, 64.0)],
)  # fmt: skip
def test_waves(sizes: dict[str, int], waves: float) -> None:
    assert problem(Hkv=1, **sizes).waves == waves


@pytest.mark.parametrize(
    "other",
    [problem("fp16"), problem(Dqk=64), problem(Dv=64), problem(layout=LayoutClass.ANY),
     problem(Sq=1), problem(Skv=100)],
)  # fmt: skip
def test_problems_that_say_nothing_about_each_other(other: Problem) -> None:
    assert problem().distance(other) is None
    assert other.distance(problem()) is None


@pytest.mark.parametrize(
    ("other", "distance"),
    [(problem(), 0), (problem(Skv=8192), 1), (problem(Sq=8192, Skv=8192, B=1), 2),
     (problem(Hkv=16), 1), (problem(B=8), 2)],
)  # fmt: skip
def test_distance_counts_doublings(other: Problem, distance: float) -> None:
    assert problem().distance(other) == other.distance(problem()) == distance
