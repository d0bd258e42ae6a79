"""A whole attention kernel of sm_90a on the CPU.

It is right in every order and landing, and each thing that could be left out of it, or written
down wrongly, is noticed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from attngen.cpu.build import CppCompiler, build_library
from attngen.cpu.mutate import Mutant, MutantKind, mutants
from attngen.cpu.run import Landing, Mode, copy_apart
from attngen.diagnostics.diagnostic import AttnError
from tests.cpu.host_kernels import ALL_LANDINGS, ALL_MODES, Case, body_of, kernel_text
from tests.cpu.test_wgmma_instructions import tensor_map
from tests.cpu.variants import build_variants

Build = Callable[..., Path]
Array = npt.NDArray[Any]

HEAD_DIM, KEYS, ROWS = 128, 64, 128  # of a step, of a tile
SHARED_BYTES = 2 * 16384 + 4 * 16384 + 8 * 2048 + 12 * 8 + 2 * 16
UNIT = 2.0**-8  # of bf16


class Forward:
    """One problem, with its right answer in float64."""

    def __init__(
        self, rows: int, keys: int, heads: int = 2, share: int = 2, *, causal: bool
    ) -> None:
        rng = np.random.default_rng(rows * 1000 + keys)
        shapes = {
            "q": (1, rows, heads),
            "k": (1, keys, heads // share),
            "v": (1, keys, heads // share),
        }
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


def forward_body(*, causal: bool = True) -> str:
    body, line = body_of("wgmma_forward"), "constexpr bool kCausal = true;"
    assert body.count(line) == 1
    return body if causal else body.replace(line, "constexpr bool kCausal = false;")


@pytest.mark.parametrize("landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower())
@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_forward(causal: bool, mode: Mode, landing: Landing, build: Build) -> None:
    library = build("wgmma_forward", forward_body(causal=causal))
    problem = Forward(200, 150, causal=causal)
    for seed in range(3 if mode is Mode.RANDOM else 1):
        problem.run(library, mode=mode, landing=landing, seed=seed)


# Rows without a key, a single step, more heads than key heads, keys that end inside of a step.
SIZES = [(1, 1, 1, 1), (65, 63, 2, 2), (100, 60, 3, 1), (129, 300, 2, 1), (300, 260, 4, 2)]


@pytest.mark.parametrize("landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower())
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_forward_of_any_size(
    size: tuple[int, int, int, int], causal: bool, landing: Landing, build: Build
) -> None:
    library = build("wgmma_forward", forward_body(causal=causal))
    problem = Forward(*size, causal=causal)
    problem.run(library, landing=landing)
    problem.run(library, landing=landing, check=False)


# ---- mutants ----------------------------------------------------------------------------------


LEFT_OUT = (MutantKind.BARRIER, MutantKind.FENCE, MutantKind.COPY)
SAME = {
    # Before a warp gives something back, its lanes have met in a barrier by number, which orders
    # what they read before, and have waited for the products that read.
    "no `ag_sync_warp()` in `ag_sync_warp();` of `release`",
}


def left_out(text: str) -> list[Mutant]:
    """Every call of an instruction that is there for order alone, or that moves a tile."""
    return [m for m in mutants(text) if m.kind in LEFT_OUT and not m.after]


def with_switch(text: str, chosen: list[Mutant]) -> str:
    """All mutants in one text: call `i` is left out where the variable `left_out` is i."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for i, mutant in reversed(list(enumerate(chosen))):
        at = lines[mutant.line - 1] + mutant.column - 1
        call = f"(left_out == {i} ? (void)0 : {mutant.before})"
        text = text[:at] + call + text[at + len(mutant.before) :]
    export = 'extern "C" __attribute__((visibility("default"))) int left_out = -1;\n'
    return export + text


def complaint(library: Path, problems: list[Forward], **options: Any) -> str | None:
    """What is noticed; None: nothing."""
    for problem in problems:
        try:
            problem.run(library, **options)
        except AttnError as error:
            return error.diagnostics[0].message()
        except AssertionError:
            return "wrong numbers"
    return None


def name_of(text: str, mutant: Mutant) -> str:
    """What a mutant leaves out, and of which function where that is told by nothing else."""
    above = "\n".join(text.splitlines()[: mutant.line - 1])
    function = re.findall(r"^(?:template .*)?AG_DEVICE \w+ (\w+)\(", above, re.MULTILINE)[-1]
    return f"no `{mutant.before}` in `{mutant.source}` of `{function}`"


def test_whatever_is_left_out_is_noticed(compiler: CppCompiler, tmp_path: Path) -> None:
    text = kernel_text("wgmma_forward")
    chosen = left_out(text)
    library = build_library(
        with_switch(text, chosen), cache_dir=tmp_path, compiler=compiler, optimization=1
    )
    switch = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "left_out")
    problems = [Forward(100, 60, 3, 1, causal=True), Forward(200, 150, causal=True)]
    assert complaint(library, problems) is None
    for landing in ALL_LANDINGS:
        for mode in (Mode.RING, Mode.EAGER_LAST):
            survivors = set()
            for i, mutant in enumerate(chosen):
                switch.value = i
                if complaint(library, problems, landing=landing, mode=mode) is None:
                    survivors.add(name_of(text, mutant))
            assert survivors == SAME, (landing, mode)
    assert len(chosen) == 40


CHANGES = {  # what is written down wrongly, once
    "high": ("ag_matrix_high(kSwizzle128, 1024)", "ag_matrix_high(kSwizzle64, 1024)"),
    "stride": ("ag_matrix_high(kSwizzle128, 1024)", "ag_matrix_high(kSwizzle128, 512)"),
    "leading": ("shared + kV, kKeys * 128)", "shared + kV, kKeys * 64)"),
    "major": ("kHigh, kMajorMN>", "kHigh, kMajorK>"),
    "q_block": ("q + d / 4 * 512 +", "q + d / 4 * 256 +"),
    "k_block": ("k + d / 4 * (kKeys * 8) +", "k + d / 4 * (kKeys * 4) +"),
    "k_part": ("(kKeys * 8) + d % 4 * 2,", "(kKeys * 8) + d % 4 * 4,"),
    "v_part": ("v + part * 128, true", "v + part * 64, true"),
    "accumulate": ("d % 4 * 2, d > 0)", "d % 4 * 2, d > 1)"),
    "chunk": ("(chunk ^ row % 8)", "chunk"),
    "k_arrivals": ("kKFull + 8 * i, 1)", "kKFull + 8 * i, 2)"),
    "one_warp_less": ("kKEmpty + 8 * i, 4 * kGroups)", "kKEmpty + 8 * i, 4 * kGroups - 1)"),
    "one_warp_more": ("kVEmpty + 8 * i, 4 * kGroups)", "kVEmpty + 8 * i, 4 * kGroups + 1)"),
    "bytes": ("8 * at.stage, kStageBytes);", "8 * at.stage, kStageBytes + 128);"),
    "parity_of_producer": ("Place k = {0, 1}", "Place k = {0, 0}"),
    "parity_of_consumer": ("Place k = {0, 0}, v = {0, 0}", "Place k = {0, 0}, v = {0, 1}"),
    "wait_scores": ("ag_wgmma_wait<1>();", "ag_wgmma_wait<2>();"),
    "wait_values": (
        "ag_wgmma_wait<0>();\n            ag_pin(state.out)",
        "ag_wgmma_wait<1>();\n            ag_pin(state.out)",
    ),
    "wait_last_values": (
        "ag_wgmma_wait<0>();\n        ag_pin(state.out)",
        "ag_wgmma_wait<1>();\n        ag_pin(state.out)",
    ),
    "wait_staging": ("ag_tensor_store_wait_read<0>()", "ag_tensor_store_wait_read<1>()"),
    "wait_end": ("ag_tensor_store_wait<0>()", "ag_tensor_store_wait<1>()"),
    "turn": ("? 1 : 2 + w, 256)", "? 1 : 1 + w, 256)"),
}


@pytest.fixture(scope="module")
def changed(compiler: CppCompiler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bodies = {key: changed_body(*change) for key, change in CHANGES.items()}
    cache = tmp_path_factory.mktemp("changed")
    return build_variants("wgmma_forward", bodies, cache_dir=cache, compiler=compiler)


def changed_body(old: str, new: str) -> str:
    body = forward_body()
    assert body.count(old) == 1, old
    return body.replace(old, new)


@pytest.mark.parametrize("landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower())
@pytest.mark.parametrize("key", CHANGES)
def test_whatever_is_written_wrongly_is_noticed(key: str, landing: Landing, changed: Path) -> None:
    problems = [Forward(100, 60, 3, 1, causal=True), Forward(200, 150, causal=True)]
    for problem in problems:
        problem.case.kernel += f"_{key}"
    assert complaint(changed, problems, landing=landing) is not None
