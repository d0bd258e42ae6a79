"""What can go wrong while schedules are timed (A47x)."""

from __future__ import annotations

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = ["NothingTimed", "TimingProcessFailed"]


class NothingTimed(Diagnostic):
    """Every candidate was refused, wrong or lost; each with its reason."""

    code = "A471"
    title = "no schedule of `{attention}` could be timed on {device}"
    label = "{reasons}"
    hint = "the compiler's own choice is used as before; `attngen run` proves it"
    attention: str
    device: str
    reasons: str


class TimingProcessFailed(Diagnostic):
    """The process that times did not start, or could not put the arrays on its device."""

    code = "A472"
    title = "the process that times schedules cannot work: {reason}"
    hint = "smaller sizes need less memory; `attngen doctor` says what is installed"
    reason: str
