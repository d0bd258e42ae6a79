"""The attention gym's functions, unmodified, against PyTorch's eager FlexAttention."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("attn_gym", reason="the attention gym (attn-gym) is not installed")

from tests.flex.gym import CASES, Case, functions_of_the_gym, split_page, table, verdict


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_function(case: Case) -> None:
    assert verdict(case) == "passed"


def test_no_function_is_left_out() -> None:
    covered = {case.name.split("(")[0].split(".")[-1] for case in CASES}
    assert covered == set(functions_of_the_gym())


def test_the_table_is_current() -> None:
    assert split_page()[1] == table(), "run `python -m tests.flex.gym`"
