"""forward_mma's text on the CPU, in every tile, dtype, layout class and kind of weights.

Sizes lie around the tiles; the race detector is on; threads run in several orders and copies land
late or at once, which must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import attngen
from attngen.binding import LARGEST_SIZE
from attngen.compiler import Rendered
from attngen.cpu.build import build_library
from attngen.cpu.run import Landing, Mode
from attngen.engines.cpu_engine import run_on_host

from .family import WEIGHTS, Variant, every_mma_variant, join, prepare

WAYS = ((Mode.EAGER, Landing.LATE), (Mode.EAGER_LAST, Landing.EARLY), (Mode.RING, Landing.LATE))

Libraries = Callable[[str], tuple[Path, dict[Variant, Rendered]]]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory, host_compiler: None) -> Libraries:
    """The library of all kernels of one kind of weights, and their texts."""
    folder = tmp_path_factory.mktemp("family")

    @cache
    def build(weights: str) -> tuple[Path, dict[Variant, Rendered]]:
        rendered = {v: v.render("sm_80") for v in every_mma_variant() if v.weights == weights}
        text = join(list(rendered.values()))
        return build_library(text, cache_dir=folder, optimization=0), rendered

    return build


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_variant_is_within_the_bound(weights: str, libraries: Libraries) -> None:
    library, rendered = libraries(weights)
    for variant, one in rendered.items():
        for rows, keys in variant.sizes():
            call = prepare(variant, one, rows, keys)
            results = []
            for mode, landing in WAYS:
                report = run_on_host(
                    one, call.binding, call.outputs, library,
                    mode=mode, landing=landing, check=True,
                )  # fmt: skip
                results.append({n: x.tobytes() for n, x in call.written.items()})
            where = f"{variant} at {rows} rows, {keys} keys"
            assert results[0] == results[1] == results[2], f"{where}: the order of threads shows"
            assert report is not None
            if variant.is_aligned:
                least = report.shared_wavefronts_least
                assert report.shared_wavefronts == least, f"{where}: conflicts in shared memory"
            right = attngen.reference(
                variant.kernel().unit, *call.operands, tensors=call.tensors, dtype=variant.dtype
            )
            assert right.accepts_o(call.written["o"]).all(), where
            if weights != "sigmoid":
                assert right.accepts_lse(call.written["lse"]).all(), where
                finite = np.isfinite(right.row_max)
                found = call.written["row_max"]
                np.testing.assert_array_equal(np.isneginf(found), ~finite, err_msg=where)
                error = np.abs(found[finite] - right.row_max[finite])
                assert (error <= right.lse_bound[finite] + 2.0**-20).all(), where


@pytest.mark.parametrize(
    "mask", ["causal", "window(left = 30)", "kv >= 5 and doc[b, kv % 64] != 2"]
)
def test_the_last_keys_of_the_longest_sequence(mask: str, host_compiler: None) -> None:
    """Positions near 2^31, and lanes whose tile would lie beyond."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 100, 16)).astype(np.float16) for _ in range(3))
    text = f"attention a {{\n    tensor doc : int32[B, N]\n    mask {mask}\n}}\n"
    doc = np.zeros((1, 64), np.int32)
    kernel = attngen.compile_text(text, engine="cpu", schedule="kernel forward_mma")
    end = (LARGEST_SIZE - 100, LARGEST_SIZE)
    state = kernel.partial(
        q, k, v, doc=doc, Sq=LARGEST_SIZE, Skv=LARGEST_SIZE, q_range=end, kv_range=end
    )
    near = mask.replace("kv >= 5 and ", "")
    right = attngen.compile_text(text.replace(mask, near), engine="numpy")(q, k, v, doc=doc)
    o, _ = state.finalize()
    np.testing.assert_allclose(o, right.astype(np.float32), atol=2e-3)
