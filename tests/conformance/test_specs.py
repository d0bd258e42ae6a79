"""The compiler accepts every conformance text, and refuses large head dims by their number."""

from __future__ import annotations

import pytest

from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.check import check
from attngen.frontend.load import load_text

from .cases import Case, numeric_cases
from .specs import all_specs, arguments, source


@pytest.mark.parametrize("case", numeric_cases(), ids=str)
def test_text_is_accepted(case: Case) -> None:
    for spec in all_specs(case):
        unit = load_text(source(case, spec), name=f"{case}.attn")
        consts = arguments(case.inputs(), spec).consts if spec.consts else {}
        if case.error is None:
            assert check(unit, consts=consts).attention.name == case.id.lower()
            continue
        with pytest.raises(AttnError, match=case.error):
            check(unit, consts=consts)
