"""The kernels that run on the CPU are also what NVRTC takes: the same text, no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.host_kernels import NAMES, kernel_text

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")


def compile_cubin(text: str, arch: str) -> bytes:
    """Machine code for one architecture; the log is the assertion's message."""

    def call(function: str, *arguments: object) -> tuple[Any, ...]:
        status, *results = getattr(nvrtc, function)(*arguments)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (function, status)
        return tuple(results)

    try:
        (program,) = call("nvrtcCreateProgram", text.encode(), b"kernel.cu", 0, [], [])
    except RuntimeError as error:
        pytest.skip(f"the NVRTC library is not installed: {error}")
    options = [f"--gpu-architecture={arch}".encode(), b"-std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = call("nvrtcGetProgramLogSize", program)
        log = b" " * size
        call("nvrtcGetProgramLog", program, log)
        pytest.fail(log.decode())
    (size,) = call("nvrtcGetCUBINSize", program)
    cubin: bytes = b" " * size
    call("nvrtcGetCUBIN", program, cubin)
    call("nvrtcDestroyProgram", program)
    return cubin


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_a_gpu(name: str, arch: str) -> None:
    if name.startswith("wgmma_") and arch != "sm_90a":
        pytest.skip("its instructions are those of sm_90a")
    assert compile_cubin(kernel_text(name), arch)[:4] == b"\x7fELF"
