"""What can go wrong while a kernel is chosen: A45x."""

from __future__ import annotations

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = ["FamilyRefuses"]


class FamilyRefuses(Diagnostic):
    code = "A452"
    title = "kernel `{kernel}` cannot run this on {target}: {reasons}"
    hint = "leave the setting to the compiler (`auto`), or choose another kernel"
    kernel: str
    target: str
    reasons: str
