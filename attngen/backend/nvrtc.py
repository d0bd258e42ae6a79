"""CUDA text in, machine code out: NVRTC through `cuda-bindings`, with or without a GPU.

The same text, target, options and NVRTC give the same bytes: the file name that the
compiler sees is fixed, and nothing of the machine reaches the output.  Compiling releases
the GIL, so a thread pool compiles in parallel.

Importing this module imports nothing of CUDA; the compiler is loaded at the first use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import field
from functools import cache
from typing import Any, Literal, Protocol, TypeAlias, final

from attngen import targets
from attngen.backend.errors import (
    ArchNotSupported,
    CompilerFailed,
    CompilerMessage,
    CudaCompileError,
    HeaderMissing,
    OptionRejected,
    ToolchainMissing,
)
from attngen.diagnostics.diagnostic import AttnError
from attngen.disk_cache import make_key, open_cache
from attngen.record import record
from attngen.targets import Target

__all__ = [
    "FIXED_OPTIONS",
    "Compiled",
    "Compiler",
    "Emit",
    "Outcome",
    "Spills",
    "compile_cuda",
    "describe_compiler",
    "errors_from_log",
    "load_nvrtc",
    "nvrtc_version",
    "select_target",
    "spills_from_log",
]

Emit: TypeAlias = Literal["cubin", "ptx"]

FILE_NAME = "kernel.cu"  # what the compiler calls the text outside of `#line` markers

# --fmad=false: a product and a sum are fused only where the text says ag_fma, so that full
# and partial tiles, the executor and every target round alike.
# -v, --warn-on-spills: registers, stack and spills are reported in the log; ptxas takes one
# option at a time.
FIXED_OPTIONS = (
    "--std=c++17",
    "--fmad=false",
    "--ptxas-options=-v",
    "--ptxas-options=--warn-on-spills",
)

_PACKAGES = "'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"


@final
@record
class Compiled:
    """Machine code (or PTX text) and what the compiler said about it."""

    binary: bytes = field(repr=False)
    log: str = field(repr=False)
    compiler_version: str  # with the build number, "13.5.37"
    target: str
    emit: Emit


@final
@record
class Outcome:
    """One run of the compiler: `status` is NVRTC's name for the result."""

    status: str
    binary: bytes
    log: str


class Compiler(Protocol):
    """The part of NVRTC that attngen uses; tests put a fake in its place."""

    def version(self) -> tuple[int, int]:
        """Major and minor version."""

    def build(self) -> str:
        """Version with build number: two builds of one version may emit other code."""

    def supported_archs(self) -> tuple[int, ...]:
        """The architectures it knows, as plain numbers: 90 stands for sm_90 and sm_90a."""

    def run(self, source: str, file_name: str, options: tuple[str, ...], emit: Emit) -> Outcome:
        """Compile one text; a rejected text is an outcome, not an exception."""


def compile_cuda(
    source: str,
    *,
    name: str,
    target: Target,
    options: tuple[str, ...] = (),
    emit: Emit = "cubin",
    compiler: Compiler | None = None,
) -> Compiled:
    """Compile one CUDA text for one target.

    `name` is what an error calls the text; it does not reach the binary.

    Errors:  A501 no NVRTC; A502 it does not know the target; A503 the text is wrong;
             A504 a header is missing; A505 an option is wrong; A506 the compiler broke.
    """
    compiler = compiler or load_nvrtc()
    _require_arch(compiler, target)
    arch = target.cubin_option if emit == "cubin" else target.ptx_option
    all_options = (arch, *FIXED_OPTIONS, *options)
    outcome = compiler.run(source, FILE_NAME, all_options, emit)
    if outcome.status != "NVRTC_SUCCESS":
        raise _explain_failure(outcome, name, target, all_options, compiler)
    log = _drop_timings(outcome.log)
    return Compiled(outcome.binary, log, compiler.build(), target.name, emit)


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC that is installed.

    Errors:  A501 when there is none.
    """
    return load_nvrtc().version()


def describe_compiler(compiler: Compiler) -> str:
    """The compiler as errors name it: "NVRTC 13.5"."""
    major, minor = compiler.version()
    return f"NVRTC {major}.{minor}"


def select_target(capability: tuple[int, int], *, compiler: Compiler | None = None) -> Target:
    """The target to compile for, so that a GPU of this compute capability runs the result.

    Errors:  A492 when no target runs there; A502 when the compiler does not know it.
    """
    compiler = compiler or load_nvrtc()
    target = targets.for_capability(capability, compiler=describe_compiler(compiler))
    _require_arch(compiler, target)
    return target


# ---- the compiler's log ------------------------------------------------------------------

# kernel.cu(3): error: identifier "y" is undefined
_FRONT_END = (
    r"(?m)^(?P<file>\S.*?)\((?P<line>\d+)\): "
    r"(?:catastrophic |fatal |internal )?error(?: #[\w-]+)?: (?P<text>.*)$"
)
# ptxas application ptx input, line 21; error   : Unknown modifier '.bar'
_ASSEMBLER = r"(?m)^ptxas (?:[^\n,]*, line (?P<line>\d+); )?(?:error|fatal)\s*: (?P<text>.*)$"
_MISSING_HEADER = r'(?:could not|cannot) open source file "(?P<header>[^"]*)"'
_SPILLS = (
    r"Function properties for (?P<kernel>\S+)\s*\n[^\n]*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_TIMING = r"(?m)^ptxas info\s*: Compile time = .*\n?"


@final
@record
class Spills:
    """Registers that did not fit and went through local memory."""

    store_bytes: int
    load_bytes: int


def errors_from_log(log: str) -> tuple[CompilerMessage, ...]:
    """The errors in a compiler log, in its order; warnings are left out.

    With `#line N "spec.attn"` in the text, `file` and `line` are those of the user's text.
    """
    found: list[tuple[int, CompilerMessage]] = []
    for match in re.finditer(_FRONT_END, log):
        message = CompilerMessage(match["file"], int(match["line"]), match["text"])
        found.append((match.start(), message))
    for match in re.finditer(_ASSEMBLER, log):
        if found and match["text"].startswith("Ptx assembly aborted"):
            continue  # says no more than the errors before it
        where = f" (line {match['line']} of the PTX)" if match["line"] else ""
        message = CompilerMessage(None, None, f"ptxas: {match['text']}{where}")
        found.append((match.start(), message))
    return tuple(message for _, message in sorted(found, key=lambda item: item[0]))


def spills_from_log(log: str) -> dict[str, Spills]:
    """Bytes spilled by each function that the log reports; only the log knows them."""
    return {
        match["kernel"]: Spills(int(match["stores"]), int(match["loads"]))
        for match in re.finditer(_SPILLS, log)
    }


def _drop_timings(log: str) -> str:
    """The log without the assembler's times, which differ from run to run."""
    return re.sub(_TIMING, "", log)


# ---- failures ----------------------------------------------------------------------------


def _require_arch(compiler: Compiler, target: Target) -> None:
    supported = compiler.supported_archs()
    if target.sm_number not in supported:
        listed = ", ".join(f"sm_{arch}" for arch in sorted(supported))
        error = ArchNotSupported(None, describe_compiler(compiler), target.name, listed)
        raise AttnError(error)


def _explain_failure(
    outcome: Outcome, name: str, target: Target, options: tuple[str, ...], compiler: Compiler
) -> AttnError:
    described = describe_compiler(compiler)
    log = outcome.log
    first_line = log.partition("\n")[0] or outcome.status
    if outcome.status == "NVRTC_ERROR_INVALID_OPTION":
        return AttnError(OptionRejected(None, described, first_line, options))
    header = re.search(_MISSING_HEADER, log)
    if header:
        folders = [re.sub(r"^(-I|--include-path=)", "", o) for o in options if _is_include(o)]
        searched = ", ".join(folders) or "nothing, because no include path was passed"
        return AttnError(HeaderMissing(None, name, header["header"], searched, log))
    messages = errors_from_log(log)
    if outcome.status == "NVRTC_ERROR_COMPILATION":
        first = str(messages[0]) if messages else first_line
        error = CudaCompileError(None, name, target.name, described, first, messages, log)
        return AttnError(error)
    return AttnError(CompilerFailed(None, name, described, outcome.status, first_line, log))


def _is_include(option: str) -> bool:
    return option.startswith(("-I", "--include-path="))


# ---- NVRTC itself ------------------------------------------------------------------------


@cache
def load_nvrtc() -> Compiler:
    """The NVRTC that is installed, loaded once per process.

    Errors:  A501 when `cuda-bindings` or the library is missing; looked for again next time.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _report_missing("the Python package `cuda.bindings`", error) from None
    try:
        return _Nvrtc(nvrtc)
    except (RuntimeError, OSError) as error:
        raise _report_missing("the library `libnvrtc`", error) from None


def _report_missing(looked_for: str, error: Exception) -> AttnError:
    reason = str(error).partition("\n")[0]
    return AttnError(ToolchainMissing(None, looked_for, reason, _PACKAGES))


@final
class _Nvrtc:
    """NVRTC through `cuda.bindings.nvrtc`."""

    def __init__(self, api: Any) -> None:
        self._api = api
        major, minor = self._call(api.nvrtcVersion)
        self._version = (int(major), int(minor))  # loads the library
        self._build: str | None = None

    def version(self) -> tuple[int, int]:
        return self._version

    def build(self) -> str:
        if self._build is None:
            library = _identify_library()
            disk = None if library is None else open_cache("compilers", ".build")
            if library is None or disk is None:
                self._build = self._ask_for_build()
            else:
                key = make_key("attngen-compiler/1", *library)
                build = disk.load_or_build(key, lambda: self._ask_for_build().encode())
                self._build = build.decode()
        return self._build

    def _ask_for_build(self) -> str:
        # NVRTC reports no build number; the head of any PTX that it writes has it.
        text = self.run("", FILE_NAME, (), "ptx").binary.decode("ascii", "replace")
        found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
        return found[1] if found else ".".join(map(str, self._version))

    def supported_archs(self) -> tuple[int, ...]:
        (archs,) = self._call(self._api.nvrtcGetSupportedArchs)
        return tuple(int(arch) for arch in archs)

    def run(self, source: str, file_name: str, options: tuple[str, ...], emit: Emit) -> Outcome:
        api = self._api
        text, visible_name = source.encode(), file_name.encode()
        (program,) = self._call(api.nvrtcCreateProgram, text, visible_name, 0, None, None)
        try:
            encoded = [option.encode() for option in options]
            (result,) = api.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._fetch(program, api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog)
            readable = log.rstrip(b"\0").decode("utf-8", "replace")
            if result != api.nvrtcResult.NVRTC_SUCCESS:
                return Outcome(result.name, b"", readable)
            if emit == "cubin":
                binary = self._fetch(program, api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN)
            else:
                binary = self._fetch(program, api.nvrtcGetPTXSize, api.nvrtcGetPTX).rstrip(b"\0")
            return Outcome(result.name, binary, readable)
        finally:
            api.nvrtcDestroyProgram(program)

    def _fetch(self, program: Any, get_size: Callable[..., Any], get: Callable[..., Any]) -> bytes:
        (size,) = self._call(get_size, program)
        buffer = bytearray(size)
        self._call(get, program, buffer)
        return bytes(buffer)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
        """Call one NVRTC function whose failure would mean that NVRTC is broken."""
        result, *values = function(*arguments)
        if result != self._api.nvrtcResult.NVRTC_SUCCESS:
            name = getattr(function, "__name__", "NVRTC")
            error = CompilerFailed(None, FILE_NAME, "NVRTC", result.name, f"in {name}", "")
            raise AttnError(error)
        return tuple(values)


def _identify_library() -> tuple[str, ...] | None:
    """What differs between two builds of NVRTC that were ever installed here."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        if path is None:
            return None
        facts = os.stat(path)
    except (RuntimeError, OSError):
        return None
    return path, str(facts.st_size), str(facts.st_mtime_ns)
