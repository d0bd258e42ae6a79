"""Every numeric case on the NumPy executor and on the CPU run of the CUDA text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pytest

import attngen
from attngen.diagnostics.diagnostic import AttnError

from .cases import Case, Inputs, numeric_cases
from .expected import Answer, expected
from .specs import SPECS, arguments, source

Engine = Literal["numpy", "cpu"]
ENGINES: tuple[Engine, ...] = ("numpy", "cpu")
SMALL_BLOCKS = "tile q = 16, kv = 16; warps 1"
"""Where a case asks for tens of thousands of blocks, what each of them does is short."""


def run(case: Case, inputs: Inputs, engine: Engine) -> tuple[Any, Any]:
    """o and lse of the rows that the case compares, as float64."""
    spec = SPECS[case.id]
    given = arguments(inputs, spec)
    kernel = attngen.compile_text(
        source(case, spec),
        name=f"{case}.attn",
        engine=engine,
        consts=given.consts,
        schedule=SMALL_BLOCKS if case.id == "O35" else None,
    )
    named = {**given.tensors, **given.params}
    if case.rows is None:
        o, lse = kernel(inputs.q, inputs.k, inputs.v, **named)
        return o.astype(np.float64), lse.astype(np.float64)
    # Sampled rows of a giant problem: one launch each, indices stay those of the whole problem.
    parts = []
    for row in case.rows:
        part = kernel.partial(inputs.q, inputs.k, inputs.v, q_range=(row, row + 1), **named)
        parts.append(part.finalize())
    return (np.concatenate([np.asarray(part[i]) for part in parts], axis=2) for i in (0, 1))


@lru_cache(maxsize=2)  # both engines are asked one after the other
def problem_of(case: str) -> tuple[Inputs, Answer]:
    found = CASES[case]
    inputs = found.inputs()
    return inputs, expected(found, inputs)


CASES = {str(case): case for case in numeric_cases()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", numeric_cases(), ids=str)
def test_case(case: Case, engine: Engine, host_compiler: None) -> None:
    if case.error is not None:
        with pytest.raises(AttnError, match=rf"head dim \w+ = {case.error}\b"):
            run(case, case.inputs(), engine)
        return
    inputs, right = problem_of(str(case))
    o, lse = run(case, inputs, engine)
    assert case.tolerance.accepts(o, right.o).all()
    assert case.lse_tolerance.accepts(lse, right.lse).all()
