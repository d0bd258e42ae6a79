"""What can be wrong with a traced Python function (A26x)."""

from __future__ import annotations

from typing import final

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = [
    "DecidesPython",
    "NotExpressible",
    "NotTraceable",
    "UnreadableCapture",
    "WrongResult",
]


@final
class NotExpressible(Diagnostic):
    """`torch.cumsum(score, 0)`."""

    code = "A261"
    title = "{what} cannot be expressed in the language"
    label = "{reason}"
    hint = "{advice}"
    what: str
    reason: str
    advice: str | None = None


@final
class DecidesPython(Diagnostic):
    """`if q_idx > 3:`, `range(kv_idx)`."""

    code = "A262"
    title = "Python needs the value of a traced {kind} here"
    label = "it differs from pair to pair, and is not known while the function is traced"
    hint = "{advice}"
    kind: str
    advice: str


@final
class NotTraceable(Diagnostic):
    """`flex_attention(q, k, v, mask_mod=3)`, or a function of three arguments."""

    code = "A263"
    title = "`{argument}` is no function of {parameters}"
    label = "it is {found}"
    hint = "{advice}"
    argument: str
    parameters: str
    found: str
    advice: str | None = None


@final
class WrongResult(Diagnostic):
    """A `mask_mod` that returns a number."""

    code = "A264"
    title = "`{argument}` returns {found}; expected {expected}"
    label = "{pointed}"
    hint = "{advice}"
    argument: str
    found: str
    expected: str
    advice: str | None = None
    pointed: str = "this is returned"


@final
class UnreadableCapture(Diagnostic):
    """A captured tensor of float64."""

    code = "A265"
    title = "the captured tensor `{name}` cannot be read: {reason}"
    label = "it is used here"
    hint = "{advice}"
    name: str
    reason: str
    advice: str | None
