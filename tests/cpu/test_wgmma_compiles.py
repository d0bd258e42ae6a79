"""What the CPU runs is also what NVRTC takes for sm_90a: no warnings, no spills; no GPU needed."""

from __future__ import annotations

import re

import pytest

from attngen import targets
from attngen.backend.nvrtc import compile_cuda, spills_from_log
from tests.cpu.host_kernels import device_functions, kernel_text

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

SM_90A = targets.get("sm_90a")
KERNELS = ("wgmma_boxes", "wgmma_forward", "wgmma_matrices", "wgmma_products", "wgmma_ring")

# One kernel for each width.
PRODUCT = """
AG_KERNEL(128, multiply_{n}, Args) {{
    constexpr ag_u32 kHigh = ag_matrix_high(kSwizzle128, 1024);
    ag_u32 a[4];
    float d[{n} / 2];
    for (int e = 0; e < 4; ++e) a[e] = ag_load(args.a + ag_thread() * 4 + e);
    ag_wgmma_fence();
    ag_wgmma_shared_{element}<kHigh, kHigh, {major}>(d, args.low, args.low, false);
    ag_wgmma_registers_{element}<kHigh, {major}>(d, a, args.low, true);
    ag_wgmma_commit();
    ag_wgmma_wait<0>();
    ag_pin(d);
    for (int i = 0; i < {n} / 2; ++i) ag_store(args.out + i, d[i]);
}}
"""
ARGS = "struct Args { float* out; const ag_u32* a; int low; };\n"


def warnings_of(log: str) -> list[str]:
    return [line for line in log.splitlines() if re.search(r"C75\d\d|warning", line)]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles(name: str) -> None:
    compiled = compile_cuda(kernel_text(name), target=SM_90A, name=name)
    assert warnings_of(compiled.log) == []
    assert [s for s in spills_from_log(compiled.log).values() if s.store_bytes] == []


@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_every_product_compiles(element: str) -> None:
    widths = range(8, 257, 8)
    text = "".join(f"constexpr int kColumns = {n};" for n in widths)  # what is looked for
    text = device_functions("wgmma_", f"ag_wgmma_shared_{element}<{text}") + ARGS
    for n in widths:
        major = "kMajorK" if n % 16 else "kMajorMN"
        text += PRODUCT.format(n=n, element=element, major=major)
    compiled = compile_cuda(text, target=SM_90A, name="every_product")
    assert warnings_of(compiled.log) == []
