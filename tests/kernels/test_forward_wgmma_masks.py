"""Random masks through forward_wgmma on the CPU: lists of key tiles, classes and dead keys at work.

Keys and values that a mask itself takes away from every row hold NaN.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attngen.cpu.build import build_library
from tests.analysis.masks import AFFINE, TRUTHS

from .family import join
from .test_forward_mma_masks import Problem, check, compile_mask

SCHEDULE = "kernel forward_wgmma; tile q = 128, kv = 16"
SIZES = ((140, 140, True), (1, 70, False), (37, 600, False))
"""(rows, keys, sorted documents); 600 keys are more tiles of 16 than a warp has lanes."""


@settings(max_examples=1, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(TRUTHS | AFFINE, min_size=8, max_size=8, unique=True))
def test_random_masks(tmp_path_factory: Any, host_compiler: None, masks: list[str]) -> None:
    compiled = [compile_mask(i, mask, SCHEDULE, "sm_90a") for i, mask in enumerate(masks)]
    text = join([rendered for _, rendered in compiled])
    library = build_library(text, cache_dir=tmp_path_factory.mktemp("masks"), optimization=1)
    for mask, (kernel, rendered) in zip(masks, compiled, strict=True):
        for size in SIZES:
            check(f"{mask} at {size}", kernel, rendered, library, Problem(*size))
