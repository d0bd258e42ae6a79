"""Building kernels for the CPU; without a C++ compiler these tests are skipped and say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attngen.cpu.build import CppCompiler, build_library, find_compiler
from attngen.diagnostics.diagnostic import AttnError
from tests.cpu.host_kernels import kernel_text


@pytest.fixture(scope="session")
def compiler() -> CppCompiler:
    try:
        return find_compiler()
    except AttnError as error:
        pytest.skip(error.diagnostics[0].message())


@pytest.fixture(scope="session")
def build(compiler: CppCompiler, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`build(name)` or `build(name, changed_body)`: the library of one of `kernels/`."""
    cache = tmp_path_factory.mktemp("libraries")

    def build_kernel(name: str, body: str | None = None) -> Path:
        text = kernel_text(name, body)
        return build_library(text, cache_dir=cache, compiler=compiler, optimization=1)

    return build_kernel
