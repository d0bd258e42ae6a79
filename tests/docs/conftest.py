"""Pages run as in a fresh process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import attngen


@pytest.fixture(autouse=True)
def fresh_reference() -> Iterator[None]:
    """`attngen.reference` is the function, also where a test has imported the submodule before."""
    names = vars(attngen)
    before = names.pop("reference", None)
    yield
    names.pop("reference", None)
    if before is not None:
        names["reference"] = before
