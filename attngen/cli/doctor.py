"""`attngen doctor`: what is installed, and what each missing part would give."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, TypeAlias, final

import click

from attngen import __version__
from attngen.cli.console import Piece, say, say_json
from attngen.diagnostics.diagnostic import AttnError

__all__ = ["command"]

State: TypeAlias = Literal["here", "missing", "broken"]


@final
@dataclass(frozen=True, slots=True)
class Part:
    """One thing that attngen uses: its state, and what to do when it is not here."""

    name: str
    state: State
    found: str
    """What is there, or why not."""
    gives: str
    """What attngen can do with it."""
    fix: str | None = None


@click.command("doctor", epilog="Example:  attngen doctor")
@click.option("--json", "as_json", is_flag=True, help="Write the same for tools.")
def command(as_json: bool) -> int:
    """Say what is installed, what each missing part would give, and how to get it.

    The exit code is 0, whatever is missing: every part is optional for something.
    """
    parts = [_look(name, check) for name, check in CHECKS.items()]
    if as_json:
        say_json({"format": "attngen-doctor/1", "parts": [asdict(part) for part in parts]})
        return 0
    width = max(len(part.name) for part in parts)
    styles = {"here": "green", "missing": "yellow", "broken": "red"}
    for part in parts:
        state: Piece = (f"{part.state:<7}", styles[part.state])
        say(f"{part.name:<{width}}  ", state, f"  {part.found}")
        if part.state != "here":
            say(f"{'':<{width}}           would give: {part.gives}")
            if part.fix is not None:
                say(f"{'':<{width}}           {part.fix}")
    return 0


def _look(name: str, check: Callable[[], Part]) -> Part:
    """A check that fails says so and does not stop the others."""
    try:
        return check()
    except AttnError as error:
        first = error.diagnostics[0]
        reason = f"{first.message()}; {first.label_text() or ''}".rstrip("; ")
        return Part(name, "broken", reason, _GIVES[name], first.hint_text())
    except Exception as error:  # a broken package may raise anything when it is imported
        reason = " ".join(str(error).split()) or type(error).__name__
        return Part(name, "broken", f"{type(error).__name__}: {reason}", _GIVES[name])


_GIVES: Final = {
    "Python": "everything",
    "attngen": "everything",
    "NVRTC": "cubins for every architecture, with or without a GPU; registers and spills",
    "CuPy": "kernels on a GPU",
    "GPU": "`attngen run --device cuda`, and calls with arrays of CuPy and PyTorch",
    "C++ compiler": "the generated CUDA text on the CPU: `attngen run --device cpu`",
    "islpy": "exact analysis of masks, for tiles that can be skipped",
    "PyTorch": "calls with torch tensors",
    "cache": "compiled kernels that are there the next time",
}


def _python() -> Part:
    found = f"{platform.python_version()}, {sys.executable}"
    return Part("Python", "here", found, _GIVES["Python"])


def _attngen() -> Part:
    import attngen

    folder = Path(attngen.__file__).parent
    return Part("attngen", "here", f"{__version__}, {folder}", _GIVES["attngen"])


def _nvrtc() -> Part:
    from attngen import targets
    from attngen.backend.nvrtc import load_nvrtc

    fix = "pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"
    try:
        compiler = load_nvrtc()
    except AttnError as error:
        first = error.diagnostics[0]
        return Part("NVRTC", "missing", first.label_text() or "", _GIVES["NVRTC"], fix)
    known = compiler.supported_archs()
    able = [t.name for t in targets.all_targets() if t.sm_number in known]
    unable = [t.name for t in targets.all_targets() if t.sm_number not in known]
    cannot = f"; too old for {', '.join(unable)}" if unable else ""
    return Part(
        "NVRTC", "here", f"{compiler.build()}, for {', '.join(able)}{cannot}", _GIVES["NVRTC"]
    )


def _cupy() -> Part:
    versions = [
        f"{name} {version}"
        for name in ("cupy", "cupy-cuda13x", "cupy-cuda12x")
        if (version := _version(name)) is not None
    ]
    if not versions and find_spec("cupy") is None:
        return Part("CuPy", "missing", "", _GIVES["CuPy"], "pip install 'attngen[cupy]'")
    return Part("CuPy", "here", ", ".join(versions) or "installed", _GIVES["CuPy"])


def _gpu() -> Part:
    if find_spec("cupy") is None:
        return Part("GPU", "missing", "not looked for without CuPy", _GIVES["GPU"])
    from attngen.backend.launch import load_driver
    from attngen.targets import for_capability

    try:
        driver = load_driver()
    except AttnError as error:
        first = error.diagnostics[0]
        return Part("GPU", "missing", first.message(), _GIVES["GPU"], first.hint_text())
    if driver.count_devices() == 0:
        return Part("GPU", "missing", "the driver sees none", _GIVES["GPU"])
    import cupy

    devices = []
    for index in range(driver.count_devices()):
        name = cupy.cuda.runtime.getDeviceProperties(index)["name"]
        shown = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
        try:
            target = for_capability(driver.capability(index)).name
        except AttnError:
            target = "no target"
        devices.append(f"{shown} ({target})")
    found = f"{', '.join(devices)}; driver for CUDA {driver.describe_version()}"
    return Part("GPU", "here", found, _GIVES["GPU"])


def _cpp() -> Part:
    from attngen.cpu.build import find_compiler

    try:
        compiler = find_compiler()
    except AttnError as error:
        first = error.diagnostics[0]
        fix = "install g++ or clang++, or pip install ziglang"
        return Part(
            "C++ compiler", "missing", first.label_text() or "", _GIVES["C++ compiler"], fix
        )
    return Part("C++ compiler", "here", compiler.version, _GIVES["C++ compiler"])


def _islpy() -> Part:
    version = _version("islpy")
    if version is None:
        return Part("islpy", "missing", "", _GIVES["islpy"], "pip install islpy")
    return Part("islpy", "here", version, _GIVES["islpy"])


def _torch() -> Part:
    version = _version("torch")
    if version is None:
        return Part("PyTorch", "missing", "", _GIVES["PyTorch"], "pip install torch")
    return Part("PyTorch", "here", version, _GIVES["PyTorch"])


def _cache() -> Part:
    from attngen.backend.cache import open_cache

    cache = open_cache()
    if cache is None:
        fix = "unset ATTNGEN_CACHE to turn it on"
        return Part("cache", "missing", "turned off", _GIVES["cache"], fix)
    folder = cache.directory.parent
    count, size = _measure(folder)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        fix = "name another folder in ATTNGEN_CACHE_DIR"
        found = f"{folder} cannot be written"
        return Part("cache", "broken", found, _GIVES["cache"], fix)
    return Part("cache", "here", f"{folder}, {count} files, {size / 1e6:.1f} MB", _GIVES["cache"])


def _measure(folder: Path) -> tuple[int, int]:
    """Files below a folder, and their bytes."""
    count = size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue  # another process has just removed it
            count += 1
    return count, size


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


CHECKS: Final[dict[str, Callable[[], Part]]] = {
    "Python": _python,
    "attngen": _attngen,
    "NVRTC": _nvrtc,
    "CuPy": _cupy,
    "GPU": _gpu,
    "C++ compiler": _cpp,
    "islpy": _islpy,
    "PyTorch": _torch,
    "cache": _cache,
}
