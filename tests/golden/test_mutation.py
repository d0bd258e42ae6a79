"""The CPU run notices every missing barrier and shuffle.

`python -m tests.mutation` tries every mutant.
"""

from __future__ import annotations

from functools import partial

import pytest

from attngen.cpu.mutate import MutantKind, Verdict, mutants, run_mutants
from tests.goldens import GOLDENS, Golden
from tests.mutation import check_library

NAMES = ("ragged_prefill_bf16_d20_v12", "causal_fp32_d24_v20_keys_outside")
SMALL = [g for g in GOLDENS if g.name in NAMES]


@pytest.mark.parametrize("golden", SMALL, ids=lambda g: g.name)
def test_every_missing_barrier_and_shuffle_is_noticed(golden: Golden, host_compiler: None) -> None:
    text = golden.path.read_text(encoding="utf-8")
    chosen = [m for m in mutants(text) if m.kind in (MutantKind.BARRIER, MutantKind.SHUFFLE)]
    assert len(chosen) >= 5
    outcomes = run_mutants(text, chosen, partial(check_library, golden.name), jobs=2)
    assert [o for o in outcomes if o.verdict is Verdict.SURVIVED] == []
