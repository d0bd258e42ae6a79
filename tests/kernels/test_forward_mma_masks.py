"""Random masks through forward_mma on the CPU: ranges, tile classes and dead keys at work together.

Keys and values that a mask itself takes away from every row hold NaN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import attngen
from attngen import targets
from attngen.backend.device import view
from attngen.binding import bind
from attngen.compiler import Rendered, lower_program, render_lowered
from attngen.cpu.build import build_library
from attngen.cpu.run import Mode
from attngen.engines.cpu_engine import run_on_host
from attngen.engines.outputs import Outputs
from attngen.ir.types import FLOATING
from tests.analysis.masks import AFFINE, PERIODIC, TRUTHS, make_tensors
from tests.judge import poison_dead_keys

from .family import join

HEADS = (2, 1)
SCHEDULE = "kernel forward_mma; tile q = 16, kv = 16; warps 1"
SIZES = ((20, 20, True), (1, 70, False), (40, 23, True), (37, 600, False))
"""(rows, keys, sorted documents); 600 keys are more tiles of 16 than a warp has lanes."""

RECURRING = (
    "(q - kv) % 2 == 0 and abs(q - kv) <= 30",
    "abs(q - kv) % 3 == 0 or kv < 5",
    "abs(q % 150 - kv % 150) <= w",
    "(q - kv) % 130 < w and kv <= qpos",
    "abs(q // 10 - kv // 10) <= 1 and abs(q % 10 - kv % 10) <= 2",
    "kv % 32 < w or kv // 16 % 16 == q % 16",
)
"""Masks under which keys of a row begin and end again and again, and no pair is asked."""
RECURRING_AND_MORE = (
    "kv % 128 < 96 and doc[b, kv] == ids[b, q]",
    "kv // 3 % 4 != q % 4 and keep[b, kv]",
)


def compile_mask(
    number: int,
    mask: str,
    schedule: str = SCHEDULE,
    target: str = "sm_80",
    head_dim: int = 16,
    more: str = "",
) -> tuple[attngen.Kernel, Rendered]:
    text = f"""attention m{number} {{
    param     w : int where 1 <= w <= 9
    tensor    doc : int32[B, Skv]
    tensor    ids : int32[B, Sq]
    tensor    keep : bool[B, Skv]
    tensor    plen : int32[B]
    tensor    table : bool[NR, NC]
    {more}
    mask      {mask}
    output    o, lse
}}
"""
    kernel = attngen.compile_text(text, engine="cpu", schedule=schedule)
    dtype = FLOATING["fp16"]
    lowered = lower_program(kernel.checked, dtype, (head_dim, head_dim), targets.get(target))
    return kernel, render_lowered(lowered)


class Problem:
    """q, k, v and what the masks read; the fields that `poison_dead_keys` takes."""

    def __init__(self, rows: int, keys: int, is_sorted: bool) -> None:
        rng = np.random.default_rng((rows, keys))
        shapes = (2, HEADS[0], rows, 16), (2, HEADS[1], keys, 16), (2, HEADS[1], keys, 16)
        self.q, self.k, self.v = (rng.standard_normal(s).astype(np.float16) for s in shapes)
        self.tensors = make_tensors(rng, rows, keys, is_sorted)
        self.tensors = {n: np.ascontiguousarray(_as_declared(x)) for n, x in self.tensors.items()}
        self.params = {"w": int(rng.integers(1, 10))}
        self.named: dict[str, Any] = {**self.tensors, **self.params}


def _as_declared(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == bool else x.astype(np.int32)


@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(TRUTHS | AFFINE, min_size=24, max_size=24, unique=True))
def test_random_masks(tmp_path_factory: Any, host_compiler: None, masks: list[str]) -> None:
    check_all(masks, tmp_path_factory.mktemp("masks"), SCHEDULE)


@settings(max_examples=1, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(PERIODIC, min_size=12, max_size=12, unique=True))
def test_masks_that_begin_and_end_again(
    tmp_path_factory: Any, host_compiler: None, masks: list[str]
) -> None:
    wide = "kernel forward_mma; tile q = 16, kv = 144; warps 1"  # a word and a part of one
    check_all(RECURRING, tmp_path_factory.mktemp("wide"), wide)
    check_all([*RECURRING_AND_MORE, *masks], tmp_path_factory.mktemp("masks"), SCHEDULE)


def check_all(masks: Any, folder: Path, schedule: str, target: str = "sm_80") -> None:
    """Compare each with the oracle at all sizes."""
    compiled = [compile_mask(i, mask, schedule, target) for i, mask in enumerate(masks)]
    text = join([rendered for _, rendered in compiled])
    library = build_library(text, cache_dir=folder, optimization=0)
    for mask, (kernel, rendered) in zip(masks, compiled, strict=True):
        for size in SIZES:
            check(f"{mask} at {size}", kernel, rendered, library, Problem(*size))


def check(
    where: str, kernel: attngen.Kernel, rendered: Rendered, library: Path, problem: Problem
) -> None:
    operands = problem.q, problem.k, problem.v
    right = attngen.reference(
        kernel.unit, *operands, tensors=problem.tensors, params=problem.params, dtype="fp16"
    )
    attention = rendered.program.attention
    poison_dead_keys(attention, problem)  # type: ignore[arg-type]
    tensors = {n: view(x, n) for n, x in problem.tensors.items()}
    views = (view(x, n) for n, x in zip("qkv", operands, strict=True))
    binding = bind(attention, *views, tensors, problem.params)
    o = np.full(problem.q.shape, np.nan, np.float16)
    lse = np.full(problem.q.shape[:3], np.nan, np.float32)
    outputs = Outputs(o=view(o, "o", is_output=True), lse=view(lse, "lse", is_output=True))
    run_on_host(rendered, binding, outputs, library, mode=Mode.EAGER_LAST, check=True)
    assert right.accepts_o(o).all(), where
    assert right.accepts_lse(lse).all(), where
