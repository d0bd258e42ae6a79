"""Many variants of one kernel in one library, because the device functions take most of a build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attngen.cpu.build import CppCompiler, build_library
from tests.cpu.host_kernels import device_functions

__all__ = ["build_variants"]


def build_variants(
    name: str, bodies: Mapping[str, str], *, cache_dir: Path, compiler: CppCompiler
) -> Path:
    """The library of kernels `NAME_KEY`, one for each body; compiled quickly, for they run once."""
    text = device_functions(name, "".join(bodies.values()))
    for key, body in bodies.items():
        head = f", {name}, "
        assert body.count(head) == 1
        text += f"namespace {name}_{key}_ {{\n{body.replace(head, f', {name}_{key}, ')}}}\n"
    return build_library(text, cache_dir=cache_dir, compiler=compiler, optimization=0)
