"""Kernels in every schedule, dtype and kind of weights, as few texts.

Kernels that share their device functions may share a compilation: each one's text behind those
functions becomes a namespace of its own.  A compiler starts three times instead of 78.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

import attngen
from attngen import targets
from attngen.backend.device import view
from attngen.binding import Binding, bind
from attngen.compiler import Rendered, lower_program, render_lowered
from attngen.cpu.run import copy_apart
from attngen.engines.outputs import Outputs, workspace_shape
from attngen.ir.types import FLOATING

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
LOOPS = ("q, kv", "kv, q")
SCHEDULES = tuple(
    f"loop {loop}; passes {passes}; normalize {normalize}"
    for loop, passes, normalize in product(LOOPS, ("three", "two", "fused"), ("last", "every_tile"))
)
WEIGHTS = {"softmax": "softmax", "sink": "softmax(sink = sinks[h])", "sigmoid": "sigmoid"}
FORMULAS = {
    "all": "",
    "band": "    mask    window(left = 20, right = 9)\n",
    "documents": (
        "    score   s + 0.25 * (kv - qpos)\n    mask    kv <= qpos + 3 and doc[b, kv] != 2\n"
    ),
}
"""Without anything; a mask that is computed; a score, and a mask that reads."""
END = "// ---- end of device functions"


@dataclass(frozen=True)
class Variant:
    """One kernel of a family."""

    number: int
    dtype: str
    weights: str
    schedule: str
    tile: tuple[int, int] = (8, 16)
    head_dim: tuple[int, int] = (8, 12)
    kernel_family: str = "forward_simt"
    formulas: str = "documents"
    is_aligned: bool = True

    def __str__(self) -> str:
        """What pytest calls it."""
        rest = "" if self.kernel_family == "forward_simt" else f"-{self.formulas}-{self.tile}"
        return f"{self.dtype}-{self.weights}-{self.schedule}{rest}"

    @property
    def text(self) -> str:
        output = "o" if self.weights == "sigmoid" else "o, lse, row_max"
        return f"""attention v{self.number} {{
    tensor  sinks : float[Hq]
    tensor  doc : int32[B, Skv]
{FORMULAS[self.formulas]}    weights {WEIGHTS[self.weights]}
    output  {output}
}}
"""

    def kernel(self, engine: Any = "cpu") -> attngen.Kernel:
        tiles = f"tile q = {self.tile[0]}, kv = {self.tile[1]}"
        return attngen.compile_text(
            self.text,
            name=f"v{self.number}.attn",
            engine=engine,
            schedule=f"kernel {self.kernel_family}; {self.schedule}; {tiles}",
        )

    def render(self, target: str) -> Rendered:
        lowered = lower_program(
            self.kernel().checked, FLOATING[self.dtype], self.head_dim, targets.get(target)
        )
        return render_lowered(lowered, is_aligned=self.is_aligned)

    def operands(self, rows: int, keys: int) -> list[Any]:
        """Two heads that share keys."""
        rng = np.random.default_rng((rows, keys))
        Dqk, Dv = self.head_dim
        shapes = (1, 2, rows, Dqk), (1, 1, keys, Dqk), (1, 1, keys, Dv)
        return [rng.standard_normal(s).astype(DTYPES[self.dtype]) for s in shapes]

    def tensors(self, keys: int) -> dict[str, Any]:
        """Some rows see no key, and one head has no sink."""
        doc = np.random.default_rng(keys).integers(0, 3, (1, keys)).astype(np.int32)
        return {"sinks": np.array([0.5, -np.inf], np.float32), "doc": doc}

    def sizes(self) -> list[tuple[int, int]]:
        """(rows, keys): 1, tile - 1, tile + 1, 3 tile + 5."""
        q, kv = self.tile
        return [(1, 1), (q - 1, kv - 1), (q + 1, kv + 1), (3 * q + 5, 3 * kv + 5)]


def every_variant() -> list[Variant]:
    cases = [
        (dtype, weights, schedule)
        for dtype, weights in product(DTYPES, WEIGHTS)
        for schedule in (SCHEDULES if weights != "sigmoid" else [f"loop {x}" for x in LOOPS])
    ]
    return [Variant(i, *case) for i, case in enumerate(cases)]


MMA_TILES = {
    (16, 16): "warps 1; stages 1",
    (32, 32): "warps 1; stages 2",  # 32 rows of a warp: two slabs
    (64, 48): "warps 4; stages 2",
    (64, 16): "warps 2; stages 1",
}
MMA_HEAD_DIMS = ((8, 24), (40, 64), (64, 8), (72, 128))
"""Widths of every layout in shared memory: 1 to 16 chunks of 16 bytes a row."""


def every_mma_variant() -> list[Variant]:
    """Every tile with every kind of formula and weights, and the rest in turn."""
    kinds = product(MMA_TILES, FORMULAS, WEIGHTS)
    return [
        Variant(
            number,
            ("fp16", "bf16")[(number + number // 9) % 2],
            weights,
            MMA_TILES[tile],
            tile,
            MMA_HEAD_DIMS[(number + number // 4) % 4],
            "forward_mma",
            formulas,
            number % 5 != 0,
        )
        for number, (tile, formulas, weights) in enumerate(kinds)
    ]


WGMMA_TILES = {
    (128, 16): "stages 2",
    (192, 32): "stages 3",
    (128, 80): "stages 2",  # so many keys that parts of a product with v wait
}
WGMMA_HEAD_DIMS = ((16, 16), (96, 48), (144, 128))
"""One to three boxes of 64 columns, whole and in part."""


def every_wgmma_variant() -> list[Variant]:
    """Every tile with every kind of formula, and the rest in turn."""
    kinds = product(WGMMA_TILES, FORMULAS)
    return [
        Variant(
            number,
            ("fp16", "bf16")[number % 2],
            tuple(WEIGHTS)[(number + number // 3) % 3],
            WGMMA_TILES[tile],
            tile,
            WGMMA_HEAD_DIMS[(number + number // 3 * 2) % 3],
            "forward_wgmma",
            formulas,
        )
        for number, (tile, formulas) in enumerate(kinds)
    ]


def join(rendered: Sequence[Rendered]) -> str:
    """One text of several kernels."""
    device = rendered[0].source.split(END, 1)[0]
    parts = [device, END, "\n"]
    for one in rendered:
        name = one.program.attention.name
        own = one.source.split(END, 1)[1].partition("\n")[2]
        parts.append(f"namespace in_{name} {{\n{own}\n}}\n")
    return "".join(parts)


@dataclass(frozen=True)
class Call:
    """One call, ready for `run_on_host`; keeps alive every array that the views point into."""

    binding: Binding
    outputs: Outputs
    written: dict[str, np.ndarray]
    """Outputs, filled with a number that no kernel writes, and workspaces."""
    operands: tuple[Any, Any, Any]
    tensors: dict[str, Any]


def prepare(variant: Variant, rendered: Rendered, rows: int, keys: int) -> Call:
    q, k, v = (copy_apart(x) for x in variant.operands(rows, keys))
    tensors = {n: copy_apart(x) for n, x in variant.tensors(keys).items()}
    views = {n: view(x, n) for n, x in {"q": q, "k": k, "v": v, **tensors}.items()}
    attention = rendered.program.attention
    binding = bind(attention, *(views.pop(n) for n in "qkv"), views, {})
    written = {"o": np.full((1, 2, rows, variant.head_dim[1]), 77, q.dtype)}
    if variant.weights != "sigmoid":
        written |= {n: np.full((1, 2, rows), 77, np.float32) for n in ("lse", "row_max")}
    for w in rendered.launch.workspaces:
        written[w.name] = np.full(workspace_shape(w, binding), np.nan, np.float32)
    written = {n: copy_apart(x) for n, x in written.items()}
    outputs = Outputs(**{n: view(x, n, is_output=True) for n, x in written.items()})
    return Call(binding, outputs, written, (q, k, v), tensors)
