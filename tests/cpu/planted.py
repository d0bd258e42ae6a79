"""Kernels with one mistake each, for the tests that it is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from attngen.cpu.errors import CpuRunFault
from attngen.cpu.faults import Fault
from attngen.diagnostics.diagnostic import AttnError
from tests.cpu.host_kernels import Case, body_of

RACE = {Fault.SHARED_RACE}
RACE_OR_UNWRITTEN = {Fault.SHARED_RACE, Fault.UNINITIALISED_READ}


def fault_of(case: Case, library: Path, **options: object) -> CpuRunFault:
    """The fault that a run ends in."""
    with pytest.raises(AttnError) as caught:
        case.launch(library, **options)
    (diagnostic,) = caught.value.diagnostics
    assert isinstance(diagnostic, CpuRunFault), diagnostic
    return diagnostic


@dataclass(frozen=True)
class Planted:
    """A kernel, a change to its text, and what must be found.

    A missing barrier shows as a race or, when the writer has not run yet, as an unwritten read.
    """

    name: str
    kernel: str
    old: str
    new: str
    faults: set[Fault]
    says: str = ""

    def body(self) -> str:
        body = body_of(self.kernel)
        assert body.count(self.old) == 1, self.old
        return body.replace(self.old, self.new)
