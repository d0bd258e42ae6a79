"""forward_wgmma's text on the CPU: tiles, dtypes, head dims and kinds of weights.

Sizes lie around the tiles; the race detector is on; threads run in several orders and copies land
late or at once, which must give the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngen
from attngen.compiler import Rendered
from attngen.cpu.build import build_library
from attngen.cpu.run import Landing, Mode
from attngen.engines.cpu_engine import run_on_host

from .family import Variant, every_wgmma_variant, join, prepare

WAYS = (
    (Mode.EAGER, Landing.LATE, True),
    (Mode.EAGER_LAST, Landing.EARLY, True),
    (Mode.RANDOM, Landing.LATE, False),
)
"""The order of threads, when copies land, and whether blocks get tiles as they ask for them."""

VARIANTS = every_wgmma_variant()

Built = tuple[Path, dict[Variant, Rendered]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, host_compiler: None) -> Built:
    """The library of all kernels, and their texts."""
    rendered = {v: v.render("sm_90a") for v in VARIANTS}
    folder = tmp_path_factory.mktemp("family")
    return build_library(join(list(rendered.values())), cache_dir=folder, optimization=1), rendered


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_variant_is_within_the_bound(variant: Variant, built: Built) -> None:
    library, rendered = built
    one = rendered[variant]
    for rows, keys in variant.sizes():
        call = prepare(variant, one, rows, keys)
        results = []
        for mode, landing, has_counters in WAYS:
            run_on_host(
                one,
                call.binding,
                call.outputs,
                library,
                mode=mode,
                landing=landing,
                check=True,
                has_counters=has_counters,
            )
            results.append({n: x.tobytes() for n, x in call.written.items()})
        where = f"{variant} at {rows} rows, {keys} keys"
        assert results[0] == results[1] == results[2], f"{where}: the order of threads shows"
        right = attngen.reference(
            variant.kernel().unit, *call.operands, tensors=call.tensors, dtype=variant.dtype
        )
        assert right.accepts_o(call.written["o"]).all(), where
        if variant.weights != "sigmoid":
            assert right.accepts_lse(call.written["lse"]).all(), where
            finite = np.isfinite(right.row_max)
            found = call.written["row_max"]
            np.testing.assert_array_equal(np.isneginf(found), ~finite, err_msg=where)
            error = np.abs(found[finite] - right.row_max[finite])
            assert (error <= right.lse_bound[finite] + 2.0**-20).all(), where


CAUSAL = "attention a {\n mask causal\n output o, lse, row_max\n}\n"
LENGTHS = """attention lengths {
    tensor ql : int32[B]
    tensor kl : int32[B]
    length q = ql[b], kv = kl[b]
    output o, lse
}
"""


def compile_forced(text: str, schedule: str = "") -> attngen.Kernel:
    schedule = f"kernel forward_wgmma; {schedule}"
    return attngen.compile_text(text, engine="cpu", arch="sm_90a", schedule=schedule)


def draw(*shapes: tuple[int, ...], dtype: Any = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("shape", [(1, 3), (150, 1), (300, 40), (0, 5), (5, 0)])
def test_few_rows_few_keys_and_rows_that_see_none(
    shape: tuple[int, int], host_compiler: None
) -> None:
    rows, keys = shape
    q, k, v = draw((2, 4, rows, 64), (2, 2, keys, 64), (2, 2, keys, 64), dtype=ml_dtypes.bfloat16)
    kernel = compile_forced(CAUSAL)
    right = attngen.reference(kernel.unit, q, k, v)
    o, lse, row_max = kernel(q, k, v)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
    assert (np.isneginf(row_max) == np.isneginf(right.row_max)).all()


def test_parts_merge_to_the_whole(host_compiler: None) -> None:
    """Ranges of rows and keys; in one of them no row sees a key."""
    q, k, v = draw((1, 2, 200, 64), (1, 1, 300, 64), (1, 1, 300, 64))
    kernel = compile_forced(CAUSAL)
    right = attngen.reference(kernel.unit, q, k, v)
    for q_range in ((0, 70), (70, 200)):
        cuts = [(0, 130), (130, 280), (280, 300)]
        first, *others = (kernel.partial(q, k, v, q_range=q_range, kv_range=c) for c in cuts)
        for other in others:
            first = first.merge(other)
        o, lse = first.finalize()
        rows = slice(*q_range)
        assert right.accepts_o(_among(o, q, rows))[:, :, rows].all()
        assert right.accepts_lse(_among(lse, q, rows))[:, :, rows].all()


def _among(found: Any, q: np.ndarray, rows: slice) -> np.ndarray:
    """Results of some rows, at their place among all."""
    whole = np.zeros((*q.shape[:3], *found.shape[3:]), found.dtype)
    whole[:, :, rows] = found
    return whole.astype(q.dtype) if found.ndim == 4 else whole


def test_what_lies_behind_lengths_reaches_no_row(host_compiler: None) -> None:
    q, k, v = draw((3, 2, 140, 64), (3, 1, 90, 64), (3, 1, 90, 64))
    ql, kl = np.array([140, 0, 77], np.int32), np.array([33, 50, 0], np.int32)
    kernel = compile_forced(LENGTHS, "tile q = 128, kv = 32")
    right = attngen.reference(kernel.unit, q, k, v, tensors={"ql": ql, "kl": kl})
    for b in range(3):
        k[b, :, kl[b] :] = v[b, :, kl[b] :] = np.nan
        q[b, :, ql[b] :] = np.nan
    o, lse = kernel(q, k, v, ql=ql, kl=kl)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()


def test_an_output_of_any_stride(host_compiler: None) -> None:
    q, k, v = draw((2, 2, 130, 64), (2, 2, 60, 64), (2, 2, 60, 64))
    kernel = compile_forced("attention a {\n mask causal\n}\n")
    right = kernel(q, k, v)
    for make in (
        lambda: np.zeros((2, 2, 130, 67), np.float16)[..., 2:66],
        lambda: np.zeros((2, 2, 130, 128), np.float16)[..., ::2],
        lambda: np.zeros((64, 130, 2, 2), np.float16).transpose(3, 2, 1, 0),
    ):
        out = make()
        assert np.array_equal(kernel(q, k, v, out=out), right)


def test_more_tiles_than_one_piece_of_a_list_holds(host_compiler: None) -> None:
    q, k, v = draw((1, 1, 20, 16), (1, 1, 1100, 16), (1, 1, 1100, 16))
    kernel = compile_forced("attention a {\n output o, lse\n}\n", "tile q = 128, kv = 16")
    right = attngen.reference(kernel.unit, q, k, v)
    o, lse = kernel(q, k, v)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
