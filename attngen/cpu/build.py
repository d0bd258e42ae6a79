"""Compile a generated kernel for the CPU, once: text in, shared object in a cache out.

A library's name is a digest of everything that decides what is in it (the kernel's text, the
host headers, the compiler and its flags), and its last bytes are a digest of the others.  So a
file that is whole is right, a damaged one is built anew, and processes that build the same
kernel at the same time only do some work twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import final

from attngen.cpu.errors import (
    CpuBuildFailed,
    CpuBuildTooSlow,
    CpuCacheUnusable,
    NoCppCompiler,
)
from attngen.diagnostics.diagnostic import AttnError
from attngen.options import settings

__all__ = ["BUILD_LIMIT_S", "CppCompiler", "build_library", "find_compiler", "host_headers"]

BUILD_LIMIT_S = 300.0  # zig builds parts of the C library the first time

# Contraction off: the text says where a multiply and an add are one operation (ag_fma).
# Aliasing off: kernels see one buffer as arrays of several types.
# Sanitize: the header takes the place of the compiler's own library, which is not linked.
_COMPILE_FLAGS = (
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fsanitize=bounds,signed-integer-overflow,integer-divide-by-zero,shift,float-cast-overflow",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
    "-w",
    "-g0",  # zig would write down the folder
    "-DAG_HOST",
)
# What only some compilers know; the first set that a compiler accepts is used.
_COMPILER_FLAGS = (
    # g++: an array at the end of a struct does not go on behind it; and no variable gets the
    # place of another, so that one which is not set is still the NaN of a fresh stack.
    ("-fsanitize=bounds-strict", "-fstack-reuse=none"),
    # clang++: a local variable that is not set is a NaN.
    ("-ftrivial-auto-var-init=pattern",),
)
_LINK_FLAGS = ("-shared", "-pthread")
_SOURCE, _OBJECT, _LIBRARY = "kernel.cu", "kernel.o", "kernel.so"
# Included in this order, before the kernel; the last one costs 0.1 s, so only where it is needed.
_HEADERS = ("host.h", "host_mma.h", "host_wgmma.h")
_NEEDS_WGMMA = "struct alignas(64) ag_tensor_map"  # in templates/common/wgmma.cuh
_SEAL_BYTES = hashlib.sha256().digest_size
_SEARCHED = ("g++", "clang++", "c++")
_ERROR_LINES = 8


@final
@dataclass(frozen=True, slots=True)
class CppCompiler:
    """A command that compiles C++17, and what it says it is."""

    command: tuple[str, ...]
    version: str

    @property
    def name(self) -> str:
        return shlex.join(self.command)

    @property
    def linker(self) -> tuple[str, ...]:
        """The command that links: zig's for C, since its own C++ library, which it would build
        first and for a minute and a half, is not needed."""
        return (*self.command[:-1], "cc") if "ziglang" in self.command else self.command


def find_compiler(requested: str | None = None) -> CppCompiler:
    """The compiler that was asked for, else the first of g++, clang++, c++ and ziglang's.

    `requested` is a command line such as `g++-12` or `ccache clang++`; left out, CXX's.
    Errors:  A541 when there is none, or the requested one does not run.
    """
    requested = requested or settings().cxx
    candidates = [tuple(shlex.split(requested))] if requested else _candidates()
    for command in candidates:
        version = _version_of(command)
        if version is not None:
            return CppCompiler(command, version)
    tried = ", ".join(shlex.join(c) for c in candidates)
    raise AttnError(NoCppCompiler(span=None, tried=tried))


def _candidates() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [(name,) for name in _SEARCHED]
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "c++"))
    return found


@lru_cache
def _version_of(command: tuple[str, ...]) -> str | None:
    """What `command --version` prints first; None when it does not run."""
    if not command or shutil.which(command[0]) is None:
        return None
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n", 1)[0].strip()


def host_headers(text: str = _NEEDS_WGMMA) -> dict[str, str]:
    """The headers that a kernel's text is compiled behind; all of them for no text."""
    folder = files("attngen.cpu")
    names = _HEADERS if _NEEDS_WGMMA in text else _HEADERS[:-1]
    return {name: folder.joinpath(name).read_text(encoding="utf-8") for name in names}


@lru_cache
def _machine_flags() -> tuple[str, ...]:
    """What the processor has: `fma` for ag_fma, which is exact either way but a call without it,
    and `f16c` to widen fp16."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    found = flags[1].split() if flags else []
    return tuple(f"-m{name}" for name in ("fma", "f16c") if name in found)


@lru_cache
def _compiler_flags(command: tuple[str, ...]) -> tuple[str, ...]:
    """The first set of `_COMPILER_FLAGS` that a compiler accepts."""
    with tempfile.TemporaryDirectory(prefix="attngen-probe-") as folder:
        Path(folder, "probe.cpp").write_text("", encoding="utf-8")
        for flags in _COMPILER_FLAGS:
            with contextlib.suppress(AttnError):
                _call((*command, *flags, "-c", "probe.cpp", "-o", "probe.o"), folder, 60.0)
                return flags
    return ()


def build_library(
    text: str,
    *,
    cache_dir: Path,
    compiler: CppCompiler | None = None,
    optimization: int = 1,
    limit_s: float = BUILD_LIMIT_S,
) -> Path:
    """The shared object of a kernel's text, built unless `cache_dir` has it already.

    optimization: the compiler's -O.  1 takes three times as long to build as 0 and runs three times
                  as fast; 2 takes twice as long as 1 and runs a sixth faster.
    Errors:  A541 no compiler; A542 with the compiler's own error lines; A543 when the folder
             cannot be written; A544 after `limit_s` seconds.
    """
    compiler = compiler or find_compiler()
    headers = host_headers(text)
    flags = (
        *_COMPILE_FLAGS,
        *_machine_flags(),
        *_compiler_flags(compiler.command),
        f"-O{optimization}",
    )
    library = cache_dir / f"{_digest(text, headers, compiler, (*flags, *_LINK_FLAGS))}.so"
    if _is_whole(library):
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache_dir) as folder:
            Path(folder, _SOURCE).write_text(text, encoding="utf-8")
            for name, header in headers.items():
                Path(folder, name).write_text(header, encoding="utf-8")
            # Relative names, so that neither messages nor the library depend on the folder.
            included = [part for name in headers for part in ("-include", name)]
            sources = (*included, "-x", "c++", "-c", _SOURCE, "-o", _OBJECT)
            _call((*compiler.command, *flags, *sources), folder, limit_s)
            _call((*compiler.linker, *_LINK_FLAGS, _OBJECT, "-o", _LIBRARY), folder, limit_s)
            _seal(Path(folder, _LIBRARY))
            os.replace(Path(folder, _LIBRARY), library)
    except OSError as error:
        raise AttnError(CpuCacheUnusable(None, cache_dir, str(error))) from error
    return library


def _seal(library: Path) -> None:
    """Put a digest behind a shared object, where loaders do not look."""
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_SEAL_BYTES]).digest() == content[-_SEAL_BYTES:]


def _digest(
    text: str, headers: Mapping[str, str], compiler: CppCompiler, flags: Sequence[str]
) -> str:
    digest = hashlib.sha256()
    for part in (text, *headers.values(), *compiler.command, compiler.version, *flags):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


def _call(command: Sequence[str], folder: str, limit_s: float) -> None:
    """Run the compiler in `folder`; what it complains of becomes a diagnostic."""
    name = command[0]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},  # messages in English
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise AttnError(CpuBuildTooSlow(None, name, limit_s)) from error
    except OSError as error:
        raise AttnError(CpuBuildFailed(None, name, str(error))) from error
    if done.returncode != 0:
        lines = _error_lines(done.stderr) or [f"exit status {done.returncode}"]
        raise AttnError(CpuBuildFailed(None, name, "\n".join(lines)))


def _error_lines(log: str) -> list[str]:
    """The lines that say what is wrong; the end of the log when none is marked."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror:|undefined reference", line)]
    return errors[:_ERROR_LINES] or lines[-_ERROR_LINES:]
