"""A schedule becomes a kernel that another process can run; where it cannot, the reason is kept."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Protocol, final

from attngen import options
from attngen.backend.nvrtc import spills_from_log
from attngen.compiler import Rendered, lower_schedule, render_lowered
from attngen.engines.cuda_engine import compile_rendered, digest_code, resources_of
from attngen.ir.schedule import Schedule
from attngen.record import record
from attngen.tuning.call import Subject
from attngen.tuning.measurement import Resources

__all__ = ["Build", "Builder", "CudaBuilder", "HostBuilder"]


@final
@record(eq=False)
class Build:
    """A compiled schedule.

    code:      a cubin; for the CPU the path of a library.
    sass:      the digest of the machine code.
    compiler:  its version, or "cpu".
    """

    schedule: Schedule
    rendered: Rendered
    code: bytes | Path
    sass: str
    resources: Resources
    compiler: str

    @property
    def reason_against(self) -> str | None:
        """What the compiler's report says against timing it."""
        spilled = self.resources.spill_bytes
        return f"the compiler spills {spilled} bytes a thread" if spilled else None


class Builder(Protocol):
    """Threads share one."""

    def build(self, schedule: Schedule) -> Build:
        """Compile a complete schedule.  Errors:  AttnError, whatever the compiler says."""


@final
class CudaBuilder:
    """For a GPU; none is needed here."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def build(self, schedule: Schedule) -> Build:
        rendered = _render(self._subject, schedule)
        compiled = compile_rendered(rendered)
        found = resources_of(rendered, compiled)
        spills = spills_from_log(compiled.log).values()
        resources = Resources(
            registers=found.registers,
            spill_bytes=sum(each.store_bytes + each.load_bytes for each in spills),
            shared_bytes=found.shared_bytes + rendered.launch.shared_bytes,
        )
        sass = digest_code(rendered, compiled)
        version = compiled.compiler_version
        return Build(schedule, rendered, compiled.binary, sass, resources, version)


@final
class HostBuilder:
    """For the CPU, which runs the same text; its times mean nothing."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def build(self, schedule: Schedule) -> Build:
        from attngen.cpu.build import build_library

        rendered = _render(self._subject, schedule)
        folder = options.host_cache_dir()
        library = build_library(rendered.source, cache_dir=folder, optimization=0)
        resources = Resources(registers=0, spill_bytes=0, shared_bytes=rendered.launch.shared_bytes)
        sass = sha256(library.read_bytes()).hexdigest()
        return Build(schedule, rendered, library, sass, resources, "cpu")


def _render(subject: Subject, schedule: Schedule) -> Rendered:
    return render_lowered(lower_schedule(subject.attention, schedule, subject.target))
