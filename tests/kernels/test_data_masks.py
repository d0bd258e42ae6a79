"""Masks of what is read along rows and along keys, through tensor-core kernels on the CPU.

Elements lie at and beyond the ends of the 32 bits of a summary, and beyond what a sum can hold
where a mask skips it.  Keys and values that no row sees hold NaN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import attngen
from attngen.cpu.build import build_library
from tests.analysis.masks import DATA, FAR, make_far

from .family import join
from .test_forward_mma_masks import Problem, check, compile_mask

FAMILIES = {
    "forward_mma": ("kernel forward_mma; tile q = 16, kv = 16; warps 1", "sm_80"),
    "forward_wgmma": ("kernel forward_wgmma; tile q = 128, kv = 16", "sm_90a"),
}
SIZES = ((20, 20, True), (40, 23, False), (37, 600, True))
MASKS = (
    "far[b, kv] * 8 + kv % 8 <= qpos",
    "ids[b, q] == doc[b, kv] and q - start[ids[b, q]] >= kv - start[doc[b, kv]]",
    "ids[b, q] == doc[b, kv] and abs(q - start[ids[b, q]] - (kv - start[doc[b, kv]])) < 9"
    " or kv < w",
    "abs(q % 2 + q // 4 % 2 * 2 + q // 16 % 2 * 4 + q // 64 % 2 * 8"
    " - (kv % 2 + kv // 4 % 2 * 2 + kv // 16 % 2 * 4 + kv // 64 % 2 * 8)) <= 1",
    "far[b, kv] == ago[b, q] or kv == q",
)
SKIPPED = "kv <= q and (far[b, kv] < 99 and -(far[b, kv] * 3) - 1 < ago[b, q] or keep[b, kv])"


def make_problem(size: tuple[int, int, bool], *, is_wide: bool) -> Problem:
    problem = Problem(*size)
    far = make_far(np.random.default_rng(size[:2]), *size[:2], is_wide=is_wide)
    problem.tensors |= far
    problem.named |= far
    return problem


def check_all(masks: Any, family: str, folder: Path) -> None:
    schedule, target = FAMILIES[family]
    compiled = [compile_mask(i, m, schedule, target, more=FAR) for i, m in enumerate(masks)]
    text = join([rendered for _, rendered in compiled])
    library = build_library(text, cache_dir=folder, optimization=0)
    for mask, (kernel, rendered) in zip(masks, compiled, strict=True):
        for number, size in enumerate(SIZES):
            problem = make_problem(size, is_wide=number != 0)
            check(f"{mask} at {size}", kernel, rendered, library, problem)


@pytest.mark.parametrize("family", FAMILIES)
def test_masks(family: str, tmp_path: Path, host_compiler: None) -> None:
    check_all(MASKS, family, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=1, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(masks=st.lists(DATA, min_size=12, max_size=12, unique=True))
def test_random_masks(
    tmp_path_factory: Any, host_compiler: None, family: str, masks: list[str]
) -> None:
    check_all(masks, family, tmp_path_factory.mktemp("masks"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sum_that_a_mask_skips_may_leave_64_bits(
    family: str, tmp_path: Path, host_compiler: None
) -> None:
    schedule, target = FAMILIES[family]
    kernel, rendered = compile_mask(0, SKIPPED, schedule, target, more=FAR)
    library = build_library(rendered.source, cache_dir=tmp_path, optimization=0)
    problem = make_problem(SIZES[1], is_wide=False)
    problem.tensors["far"][:, ::3] = 2**63 - 1
    check(SKIPPED, kernel, rendered, library, problem)


EMPTY = """attention a {
    tensor never : bool[Skv]
    tensor none : int32[N]
    mask kv <= q or never[kv] and none[(q + kv) % 3] == 0
    output o, lse
}
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_read_of_an_empty_tensor(family: str, host_compiler: None) -> None:
    schedule, arch = FAMILIES[family]
    kernel = attngen.compile_text(EMPTY, engine="cpu", arch=arch, schedule=schedule)
    q, k, v = np.random.default_rng(4).standard_normal((3, 1, 1, 40, 16)).astype(np.float16)
    tensors = {"never": np.zeros(40, bool), "none": np.zeros(0, np.int32)}
    assert "ag_load_if(args.t_none" in kernel.render(arch, dtype="fp16", head_dim=16).source
    right = attngen.reference(kernel.unit, q, k, v, tensors=tensors)
    o, lse = kernel(q, k, v, **tensors)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
