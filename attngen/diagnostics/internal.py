"""A9xx: bugs in attngen.  They say so, and what to send."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.diagnostics.diagnostic import AttnError, Diagnostic

__all__ = ["InvalidModule", "require_valid"]


class InvalidModule(Diagnostic):
    code = "A901"
    title = "bug in attngen: {stage} left an invalid module behind: {violations}"
    hint = "please report it with the .attn file that shows it"
    stage: str
    violations: str


def require_valid(stage: str, violations: Sequence[str]) -> None:
    """Raise A901 unless a verifier found nothing."""
    if violations:
        raise AttnError(InvalidModule(None, stage, "; ".join(violations)))
