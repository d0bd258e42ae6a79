"""The oracle gives the right answer of every numeric case, and not that of its usual bug."""

from __future__ import annotations

import numpy as np
import pytest

from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.load import load_text
from attngen.oracle.dense import Reference, reference
from attngen.oracle.errors import IndexOutside, WrongHeads, WrongShape, WrongValue

from .cases import Case, Inputs, Tolerance, numeric_cases, records
from .expected import expected, has_bug
from .specs import SPECS, Spec, all_specs, arguments, source

EXACT = Tolerance(1e-6, 1e-6)
"""Both sides compute in float64; only literals such as 0.02 are rounded, to float32."""


def run(case: Case, spec: Spec, inputs: Inputs) -> Reference:
    unit = load_text(source(case, spec), name=f"{case}.attn")
    given = arguments(inputs, spec)
    return reference(
        unit,
        inputs.q,
        inputs.k,
        inputs.v,
        tensors=given.tensors,
        params=given.params,
        consts=given.consts,
        rows=case.rows,
    )


def test_every_numeric_case_has_a_spec() -> None:
    assert {r["id"] for r in records() if r["kind"] == "numeric"} == set(SPECS)


@pytest.mark.parametrize("case", numeric_cases(), ids=str)
def test_case(case: Case) -> None:
    inputs = case.inputs()
    right = expected(case, inputs)
    for spec in all_specs(case):
        found = run(case, spec, inputs)
        assert found.lse is not None
        assert (found.visible == right.visible).all()
        assert EXACT.accepts(found.o, right.o).all()
        assert EXACT.accepts(found.lse, right.lse).all()
        assert found.accepts_o(right.o).all()
        assert found.accepts_lse(right.lse).all()


@pytest.mark.parametrize("id_", [r["id"] for r in records() if has_bug(r)])
def test_the_usual_bug_is_told_apart(id_: str) -> None:
    told_apart = False
    for case in numeric_cases(id_):
        inputs = case.inputs()
        wrong = expected(case, inputs, bug=True)
        found = run(case, SPECS[id_], inputs)
        told_apart |= not case.tolerance.accepts(wrong.o, found.o).all()
    assert told_apart


# ---- what the cases say in words --------------------------------------------------------


def test_head_counts_that_do_not_divide() -> None:
    case = numeric_cases("O08")[0]
    unit = load_text(source(case))
    q, k = np.zeros((1, 6, 1, 128)), np.zeros((1, 4, 256, 128))
    with pytest.raises(AttnError) as error:
        reference(unit, q, k, k)
    assert error.value.diagnostics == (WrongHeads(None, 6, 4),)


def test_a_cap_of_zero_is_refused() -> None:
    case = numeric_cases("O14")[0]
    inputs = case.inputs()
    unit = load_text(source(case))
    with pytest.raises(AttnError) as error:
        reference(unit, inputs.q, inputs.k, inputs.v, params={"cap": 0.0})
    assert isinstance(error.value.diagnostics[0], WrongValue)


def test_an_unmasked_read_outside_names_the_tensor() -> None:
    case = numeric_cases("O22")[0]
    inputs = case.inputs()
    spec = Spec("tensor buf : float[L]\nscore s + buf[kv]", tensors={"buf": "buf"})
    with pytest.raises(AttnError) as error:
        run(case, spec, inputs)
    (found,) = error.value.diagnostics
    assert isinstance(found, IndexOutside)
    assert (found.tensor, found.index, found.size) == ("buf", 127, 127)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((4, 33, 70), True), ((4, 1, 70), True), ((4, 34, 70), False), ((2, 4, 32, 70), False)],
)
def test_a_bias_is_aligned_to_the_right(shape: tuple[int, ...], fits: bool) -> None:
    case = numeric_cases("O23")[0]
    inputs = case.inputs()
    unit = load_text(source(case))
    bias = {"bias": np.zeros(shape, np.float32)}
    if fits:
        reference(unit, inputs.q, inputs.k, inputs.v, tensors=bias)
        return
    with pytest.raises(AttnError) as error:
        reference(unit, inputs.q, inputs.k, inputs.v, tensors=bias)
    assert isinstance(error.value.diagnostics[0], WrongShape)


def test_partial_results_merge_by_natural_logarithms() -> None:
    case = numeric_cases("O25")[0]
    inputs = case.inputs()
    unit = load_text(source(case))
    parts = [
        reference(unit, inputs.q, inputs.k, inputs.v, kv_range=keys)
        for keys in ((0, 90), (90, 200))
    ]
    whole = np.logaddexp(*(np.asarray(part.lse) for part in parts))
    weights = [np.exp(part.lse - whole) for part in parts]
    merged = sum(w[..., None] * p.o for w, p in zip(weights, parts, strict=True))
    right = expected(case, inputs)
    assert EXACT.accepts(merged, right.o).all()
    assert EXACT.accepts(whole, right.lse).all()


def test_a_mask_as_formula_and_as_captured_array_agree() -> None:
    """O05 at a size that fits into a test: the same mask, materialised."""
    (case,) = numeric_cases("O05")
    small = Case(
        case.id,
        case.variant,
        {**case.record, "oracle_rows": None},
        {**case.dims, "Sq": 300, "Skv": 300},
    )
    inputs = small.inputs()
    q, kv = np.arange(300)[:, None], np.arange(300)
    keep = (kv <= q) & ((q * 7 + kv * 13) % 5 < 3)
    unit = load_text(source(small, Spec("tensor keep : uint8[Sq, Skv]\nmask keep[q, kv] != 0")))
    tensors = {"keep": keep.astype(np.uint8)}
    found = reference(unit, inputs.q, inputs.k, inputs.v, tensors=tensors)
    assert EXACT.accepts(found.o, expected(small, inputs).o).all()
