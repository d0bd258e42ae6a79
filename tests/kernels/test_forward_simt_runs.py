"""forward_simt's text on the CPU, in every schedule, dtype and kind of weights.

Sizes lie around the tiles; the race detector is on; threads run in two orders, which must give
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.cpu.build import build_library
from attngen.cpu.run import Mode
from attngen.engines.cpu_engine import run_on_host

from .family import DTYPES, Variant, every_variant, join, prepare

MODES = (Mode.EAGER, Mode.EAGER_LAST)
"""A warp as far as it goes: its writes come early for the others, or late."""

Libraries = Callable[[str], tuple[Path, dict[Variant, Any]]]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory, host_compiler: None) -> Libraries:
    """The library of all kernels of one dtype, and their texts."""
    folder = tmp_path_factory.mktemp("family")

    @cache
    def build(dtype: str) -> tuple[Path, dict[Variant, Any]]:
        rendered = {v: v.render("sm_80") for v in every_variant() if v.dtype == dtype}
        text = join(list(rendered.values()))
        return build_library(text, cache_dir=folder, optimization=0), rendered

    return build


@pytest.mark.parametrize("weights", ["softmax", "sink", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_is_within_the_bound(dtype: str, weights: str, libraries: Libraries) -> None:
    library, rendered = libraries(dtype)
    for variant, one in rendered.items():
        if variant.weights != weights:
            continue
        for rows, keys in variant.sizes():
            call = prepare(variant, one, rows, keys)
            results = []
            for mode in MODES:
                run_on_host(one, call.binding, call.outputs, library, mode=mode, check=True)
                results.append({n: x.tobytes() for n, x in call.written.items()})
            assert results[0] == results[1], f"{variant}: the bits depend on the order of threads"
            right = attngen.reference(
                variant.kernel().unit, *call.operands, tensors=call.tensors, dtype=dtype
            )
            where = f"{variant} at {rows} rows, {keys} keys"
            assert right.accepts_o(call.written["o"]).all(), where
            if weights != "sigmoid":
                assert right.accepts_lse(call.written["lse"]).all(), where
                finite = np.isfinite(right.row_max)
                found = call.written["row_max"]
                np.testing.assert_array_equal(np.isneginf(found), ~finite, err_msg=where)
                error = np.abs(found[finite] - right.row_max[finite])
                assert (error <= right.lse_bound[finite] + 2.0**-20).all(), where


@pytest.mark.parametrize("variant", every_variant()[::11], ids=str)
def test_the_executor_and_the_text_agree(variant: Variant, libraries: Libraries) -> None:
    """Both run one loop nest, so they are nearer to each other than the bound asks."""
    library, rendered = libraries(variant.dtype)
    rows, keys = variant.sizes()[-1]
    call = prepare(variant, rendered[variant], rows, keys)
    run_on_host(rendered[variant], call.binding, call.outputs, library)
    found = variant.kernel("numpy")(*call.operands, **call.tensors)
    o = (found[0] if isinstance(found, tuple) else found).astype(np.float64)
    ulp = {"fp32": 2.0**-21, "fp16": 2.0**-10, "bf16": 2.0**-7}[variant.dtype]
    np.testing.assert_allclose(call.written["o"].astype(np.float64), o, rtol=ulp, atol=ulp)
