"""A whole attention kernel of sm_90a on the CPU: right in every order and landing, and each thing that
could be left out of it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from attngen.cpu.run import Landing, Mode, copy_apart
from tests.cpu.host_kernels import ALL_LANDINGS, ALL_MODES, Case, body_of
from tests.cpu.test_wgmma_instructions import tensor_map

Build = Callable[..., Path]
Array = npt.NDArray[Any]

HEAD_DIM, KEYS, ROWS = 128, 64, 128  # of a step, of a tile
SHARED_BYTES = 2 * 16384 + 4 * 16384 + 8 * 2048 + 12 * 8 + 2 * 16
UNIT = 2.0**-8  # of bf16


class Forward:
    """One problem, with its right answer in float64."""

    def __init__(self, rows: int, keys: int, heads: int = 2, share: int = 2, *, causal: bool) -> None:
        rng = np.random.default_rng(rows * 1000 + keys)
        shapes = {"q": (1, rows, heads), "k": (1, keys, heads // share), "v": (1, keys, heads // share)}
        arrays = {
            name: copy_apart(rng.standard_normal((*shape, HEAD_DIM)).astype(ml_dtypes.bfloat16))
            for name, shape in shapes.items()
        }
        self.out = copy_apart(np.full((1, rows, heads, HEAD_DIM), np.nan, ml_dtypes.bfloat16))
        scale, row_tiles = HEAD_DIM**-0.5, -(-rows // ROWS)
        by_head = {name: array.transpose(0, 2, 1, 3) for name, array in arrays.items()}
        boxes = {"q": 64, "k": KEYS, "v": KEYS}
        maps = {
            name: tensor_map(name, by_head[name], (64, box, 1, 1), 128)
            for name, box in boxes.items()
        }
        self.case = Case(
            "wgmma_forward",
            {
                **maps,
                "out": tensor_map("out", self.out.transpose(0, 2, 1, 3), (64, 16, 1, 1), 128),
                "lse": np.empty((1, heads, rows), np.float32),
                "rows": rows,
                "keys": keys,
                "heads": heads,
                "share": share,
                "row_tiles": row_tiles,
                "tiles": row_tiles * heads,
                "scale": scale,
                "scale_log2": scale * float(np.log2(np.e)),
            },
            {},
            grid=1,
            threads=384,
            shared_bytes=SHARED_BYTES,
            writable=("out", "lse"),
            tensors={**arrays, "out": self.out},
        )
        self.lse = np.asarray(self.case.arguments["lse"])
        self._answer({n: a.astype(np.float64) for n, a in by_head.items()}, share, scale, causal)

    def _answer(self, x: dict[str, Array], share: int, scale: float, causal: bool) -> None:
        k, v = (np.repeat(x[name], share, axis=1) for name in ("k", "v"))
        s = np.einsum("bhid,bhjd->bhij", x["q"], k) * scale
        rows, keys = s.shape[-2:]
        if causal:
            s = np.where(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows, s, -np.inf)
        with np.errstate(invalid="ignore", divide="ignore"):
            largest = s.max(-1, keepdims=True)
            weights = np.where(np.isinf(s), 0, np.exp(s - largest))
            total = weights.sum(-1, keepdims=True)
            weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
            self.right_lse = np.where(total > 0, largest + np.log(total), -np.inf)[..., 0]
        self.right = np.einsum("bhij,bhjd->bhid", weights, v)
        self.bound = UNIT * np.abs(self.right) + 1.1 * UNIT * np.einsum(
            "bhij,bhjd->bhid", weights, np.abs(v)
        )

    def run(self, library: Path, **options: Any) -> None:
        self.out[...] = np.nan
        self.lse[...] = np.nan
        self.case.launch(library, **options)
        error = np.abs(self.out.transpose(0, 2, 1, 3).astype(np.float64) - self.right)
        assert (error <= self.bound).all()
        np.testing.assert_allclose(self.lse, self.right_lse, rtol=1e-5, atol=1e-5)


def forward_body(*, causal: bool) -> str:
    body, line = body_of("wgmma_forward"), "constexpr bool kCausal = true;"
    assert body.count(line) == 1
    return body if causal else body.replace(line, "constexpr bool kCausal = false;")


@pytest.mark.parametrize("landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower())
@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_forward(causal: bool, mode: Mode, landing: Landing, build: Build) -> None:
    library = build("wgmma_forward", forward_body(causal=causal))
    Forward(200, 150, causal=causal).run(library, mode=mode, landing=landing, seed=3)
