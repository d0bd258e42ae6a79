"""What can go wrong when a kernel is built for, or run on, a CPU (A541 to A544, A641, A941)."""

from __future__ import annotations

from pathlib import Path

from attngen.cpu.faults import Fault
from attngen.diagnostics.diagnostic import Diagnostic

__all__ = [
    "CpuBuildFailed",
    "CpuBuildTooSlow",
    "CpuCacheUnusable",
    "CpuLaunchRefused",
    "CpuRunFault",
    "NoCppCompiler",
]


class NoCppCompiler(Diagnostic):
    """Nothing that compiles C++17 was found, or the compiler that was asked for is not there."""

    code = "A541"
    title = "no C++ compiler to run a kernel on the CPU"
    label = "tried {tried}"
    hint = "install g++ or clang++, or `pip install ziglang`, or name one in CXX"
    tried: str


class CpuBuildFailed(Diagnostic):
    """The compiler did not accept the kernel's text, or could not be run to its end."""

    code = "A542"
    title = "the C++ compiler rejects the kernel"
    label = "{compiler}: {lines}"
    hint = "generated text always compiles: this is a bug in attngen, or in an edited kernel"
    compiler: str
    lines: str


class CpuCacheUnusable(Diagnostic):
    """The folder for built kernels cannot be written."""

    code = "A543"
    title = "cannot store a built kernel in {directory}"
    label = "{reason}"
    hint = "name another folder in ATTNGEN_CACHE_DIR"
    directory: Path
    reason: str


class CpuBuildTooSlow(Diagnostic):
    """The compiler did not end in time and was stopped."""

    code = "A544"
    title = "the C++ compiler was stopped after {seconds} seconds"
    label = "{compiler}"
    compiler: str
    seconds: float


class CpuRunFault(Diagnostic):
    """The host header saw the kernel do something that is wrong on a GPU too."""

    code = "A641"
    title = "kernel `{kernel}` is at fault: {fault}"
    label = "{text}"
    hint = "this is a bug in attngen, or in an edited kernel; the outputs are not to be used"
    kernel: str
    fault: Fault
    text: str


class CpuLaunchRefused(Diagnostic):
    """The launch does not fit the kernel: the caller and the kernel's text disagree."""

    code = "A941"
    title = "kernel `{kernel}` cannot be launched on the CPU"
    label = "{text}"
    hint = "this is a bug in attngen"
    kernel: str
    text: str
