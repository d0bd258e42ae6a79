"""What can be wrong with a target (A49x)."""

from __future__ import annotations

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = ["NoTargetForGpu", "UnknownDevice", "UnknownTarget"]


class UnknownTarget(Diagnostic):
    """A name that is no target of attngen."""

    code = "A491"
    title = "unknown target `{name}`"
    label = "the targets are {supported}"
    hint = "did you mean `{closest}`?"
    name: str
    supported: str
    closest: str | None


class NoTargetForGpu(Diagnostic):
    """A GPU that no cubin of attngen runs on; there is no PTX to fall back to."""

    code = "A492"
    title = "no target runs on a GPU of compute capability {capability}"
    label = "attngen makes machine code for {supported}; the compiler is {compiler}"
    hint = "`attngen compile --arch` makes files for other machines; this GPU cannot run them"
    capability: str
    compiler: str
    supported: str


class UnknownDevice(Diagnostic):
    """A name that stands for no GPU whose properties attngen knows."""

    code = "A493"
    title = "unknown device `{name}`"
    label = "the known ones are {known}"
    hint = "{advice}"
    name: str
    known: str
    advice: str
