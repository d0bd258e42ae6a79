"""NVRTC takes forward_simt in every schedule, dtype and kind of weights, and spills nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attngen import targets
from attngen.backend.cubin import read_resources
from attngen.backend.nvrtc import compile_cuda, spills_from_log

from .family import DTYPES, SCHEDULES, Variant, every_variant, join

REGISTERS_PER_SM = 65536  # CUDA C++ Programming Guide, "Technical Specifications", every target

every_target = pytest.mark.parametrize("target", ["sm_80", "sm_120"])


@every_target
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_compiles_without_spills(dtype: str, target: str) -> None:
    small: dict[str, Any] = {"tile": (4, 8), "head_dim": (2, 3)}  # the assembler unrolls less
    variants = [replace(v, **small) for v in every_variant() if v.dtype == dtype]
    rendered = [variant.render(target) for variant in variants]
    compiled = compile_cuda(join(rendered), name="family.cu", target=targets.get(target))
    resources = read_resources(compiled.binary)
    spills = spills_from_log(compiled.log)
    assert set(resources) == {one.launch.kernel for one in rendered} <= set(spills)
    for one in rendered:
        found, spilled = resources[one.launch.kernel], spills[one.launch.kernel]
        assert (spilled.store_bytes, spilled.load_bytes, found.stack_bytes) == (0, 0, 0)
        assert found.max_threads == one.launch.threads
        assert found.params[0].size == one.arguments.size


@every_target
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_largest_head_dim_fits(dtype: str, target: str) -> None:
    """With the family's own tiles and the workspace: what a thread holds is largest there."""
    variant = Variant(0, dtype, "sink", SCHEDULES[-1], tile=(16, 32), head_dim=(256, 256))
    rendered = variant.render(target)
    compiled = compile_cuda(rendered.source, name="large.cu", target=targets.get(target))
    found = read_resources(compiled.binary)[rendered.launch.kernel]
    spilled = spills_from_log(compiled.log)[rendered.launch.kernel]
    assert (spilled.store_bytes, spilled.load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.registers * rendered.launch.threads <= REGISTERS_PER_SM
    assert found.registers <= 255
    assert rendered.launch.shared_bytes <= targets.get(target).shared_bytes_per_block
    assert found.shared_bytes <= 1024  # all of it is asked for at the launch
