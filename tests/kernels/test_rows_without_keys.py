"""Tiles of rows that see no key, and staged values: copies are over before what they bring is used.

Before such rows are written, what was started for them has to be over.

With the race detector, in an early and a late landing of asynchronous copies.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.cpu.build import build_library
from attngen.cpu.run import Mode
from tests.goldens import GOLDENS, make_problem
from tests.gpu.verify_goldens import reference_of
from tests.judge import Trial, run_part

NAMES = ("causal_bf16_d128", "causal_fp16_d128_wgmma", "t5_bf16_d64_wgmma")


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_keys(name: str, tmp_path: Path, host_compiler: None) -> None:
    """300 causal rows over 20 keys: two tiles of 128 rows have no key at all."""
    golden = next(g for g in GOLDENS if g.name == name)
    rendered, problem = golden.render(), make_problem(golden, 300, 20)
    right = reference_of(golden, problem)
    trial = Trial(rendered, problem, right, "whole")
    library = build_library(rendered.source, cache_dir=tmp_path)
    for mode in (Mode.RING, Mode.EAGER, Mode.EAGER_LAST):
        (o, _, _), _ = run_part(golden, trial, library, (0, 20), mode)
        assert right.accepts_o(o).all()
