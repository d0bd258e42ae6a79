"""The hand-written kernels of `kernels/`, and how the tests build and launch them."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from attngen.codegen.render import _environment
from attngen.cpu.run import Landing, MemoryRange, Mode, RunReport, copy_apart, run_on_cpu
from attngen.cpu.tensor_map import encode_for_cpu
from attngen.resources import template_source
from attngen.tensor_map import TensorMap

KERNELS = Path(__file__).with_name("kernels")
NAMES = tuple(sorted(path.stem for path in KERNELS.glob("*.cu")))
ALL_MODES = tuple(Mode)
ALL_LANDINGS = tuple(Landing)

Array: TypeAlias = npt.NDArray[Any]
Argument: TypeAlias = Array | TensorMap | int | float


def kernel_text(name: str, body: str | None = None) -> str:
    """A whole kernel: the device functions and one of `kernels/`, or a changed body of it."""
    body = body_of(name) if body is None else body
    return device_functions(name, body) + body


def device_functions(name: str, body: str) -> str:
    """What a kernel's body relies on."""
    files = ["common/device.cuh"]
    files += ["common/mma.cuh"] if name.startswith(("mma_", "wgmma_")) else []
    files += ["common/wgmma.cuh"] if name.startswith("wgmma_") else []
    files += ["common/staged.cuh"] if name.endswith("_staged") else []
    return "".join(map(template_source, files)) + _products(body)


def _products(body: str) -> str:
    """The products of warp groups that a body uses; how wide they are, its constants say."""
    elements = sorted(set(re.findall(r"\bag_wgmma_shared_(\w+)<", body)))
    widths = re.findall(r"constexpr int (?:kColumns|kHeadDim|kKeys) = (\d+);", body)
    sizes = sorted({int(n) for n in widths})
    module: Any = _environment().get_template("common/wgmma.cu.j2").module
    return "".join(str(module.products(element, sizes, sizes)) for element in elements)


def body_of(name: str) -> str:
    """The text of a kernel without the device functions."""
    return (KERNELS / f"{name}.cu").read_text(encoding="utf-8")


@dataclass
class Case:
    """Arguments for a kernel in the order of its struct, and what its outputs must be."""

    kernel: str
    arguments: dict[str, Argument]
    expected: Mapping[str, Array]
    grid: int
    threads: int
    shared_bytes: int = 0
    writable: Sequence[str] = ()
    tolerance: float = 0.0
    tensors: Mapping[str, Array] = field(default_factory=dict)
    """The arrays that tensor maps among the arguments are of, by the maps' names."""

    report: RunReport | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, value in self.arguments.items():
            if isinstance(value, np.ndarray):
                self.arguments[name] = copy_apart(value)

    def run(self, library: Path, **options: Any) -> None:
        """Launch it and compare every output; options are those of `run_on_cpu`."""
        for name in self.expected:
            self._array(name).view(np.uint8)[...] = 0xFF
        self.launch(library, **options)
        for name, expected in self.expected.items():
            np.testing.assert_allclose(
                self._array(name), expected, rtol=self.tolerance, atol=self.tolerance, err_msg=name
            )

    def launch(self, library: Path, **options: Any) -> RunReport:
        """Launch it without looking at the outputs."""
        can_write = {*self.expected, *self.writable}
        arrays = {**self.arguments, **self.tensors}
        ranges = [
            MemoryRange.of(value, is_writable=name in can_write, name=name)
            for name, value in arrays.items()
            if isinstance(value, np.ndarray)
        ]
        options = {"shared_bytes": self.shared_bytes, "ranges": ranges, **options}
        self.report = run_on_cpu(
            library,
            self.kernel,
            pack(self.arguments.values()),
            grid=self.grid,
            threads=self.threads,
            **options,
        )
        return self.report

    def _array(self, name: str) -> Array:
        value = self.arguments[name]
        assert isinstance(value, np.ndarray)
        return value


def pack(arguments: Any) -> bytes:
    """The bytes of a C struct with these members: tensor maps first, pointers, ints and floats."""
    codes, values, has_maps = "", [], False
    for argument in arguments:
        value: object = argument
        if isinstance(argument, TensorMap):
            codes, value, has_maps = f"{codes}128s", encode_for_cpu(argument), True
        elif isinstance(argument, np.ndarray):
            codes, value = codes + "P", argument.ctypes.data
        else:
            codes += "f" if isinstance(argument, float) else "i"
        values.append(value)
    packed = struct.pack(f"@{codes}0P", *values)
    return packed + bytes(-len(packed) % 64 if has_maps else 0)


# ---- one case per kernel --------------------------------------------------------------------


def transpose_case() -> Case:
    a = _random(70, 33)
    return Case(
        "transpose",
        {"in": a, "out": np.empty((33, 70), np.float32), "rows": 70, "columns": 33},
        {"out": a.T},
        grid=6,
        threads=256,
        shared_bytes=32 * 33 * 4,
    )


def reduce_case(blocks: int = 3) -> Case:
    a = _random(blocks, 300)
    return Case(
        "reduce",
        {"in": a, "out": np.empty(blocks, np.float32), "count": 300},
        {"out": a.sum(axis=1, dtype=np.float64)},
        grid=blocks,
        threads=128,
        shared_bytes=16,
        tolerance=1e-4,
    )


def diffuse_case() -> Case:
    a = _random(2, 96)
    expected = a.astype(np.float64)
    for _ in range(5):
        expected = (np.roll(expected, 1, 1) + expected + np.roll(expected, -1, 1)) / 3
    return Case(
        "diffuse",
        {"in": a, "out": np.empty_like(a), "steps": 5},
        {"out": expected},
        grid=2,
        threads=96,
        shared_bytes=96 * 4,
        tolerance=1e-6,
    )


def rotate_case() -> Case:
    a = _random(2, 32)
    return Case(
        "rotate",
        {"in": a, "out": np.empty_like(a), "turns": 7},
        {"out": np.roll(a, -7, 1)},
        grid=1,
        threads=64,
        shared_bytes=256,
    )


def halves_case() -> Case:
    a = _random(64).astype(np.float16)
    return Case(
        "halves",
        {"in": a, "out": np.empty(64, np.float32), "words": np.empty(32, np.int32)},
        {"out": a.reshape(32, 2)[:, ::-1].reshape(64), "words": a.view(np.int32)},
        grid=1,
        threads=64,
        shared_bytes=128,
    )


def workspace_case() -> Case:
    one_block = 64 - (np.arange(64) ^ 1)
    return Case(
        "workspace",
        {"work": np.empty(192, np.float32), "out": np.empty(192, np.float32)},
        {"out": np.tile(one_block, 3)},
        grid=3,
        threads=64,
        writable=("work",),
    )


def attention_case(heads: int = 2, rows: int = 100, keys: int = 70) -> Case:
    q, k, v = _random(heads, rows, 64), _random(heads, keys, 64), _random(heads, keys, 64)
    s = np.einsum("hid,hjd->hij", q.astype(np.float64), k) * 0.125
    weights = np.exp(s - s.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    row_tiles = (rows + 63) // 64
    return Case(
        "attention",
        {
            "q": q,
            "k": k,
            "v": v,
            "out": np.empty_like(q),
            "lse": np.empty((heads, rows), np.float32),
            "rows": rows,
            "keys": keys,
            "row_tiles": row_tiles,
            "scale": 0.125,
        },
        {
            "out": np.einsum("hij,hjd->hid", weights / total, v),
            "lse": (s.max(-1, keepdims=True) + np.log(total))[..., 0],
        },
        grid=heads * row_tiles,
        threads=256,
        shared_bytes=4 * 64 * 65 * 4,
        tolerance=2e-6,
    )


def gemm_case(
    rows: int = 100, columns: int = 72, depth: int = 136, *, element: str = "bf16"
) -> Case:
    """The kernel has bf16; see `for_element`."""
    dtype = np.float16 if element == "fp16" else ml_dtypes.bfloat16
    a, b = _random(rows, depth).astype(dtype), _random(depth, columns).astype(dtype)
    column_tiles = (columns + 63) // 64
    return Case(
        "mma_gemm",
        {
            "a": a,
            "b": b,
            "out": np.empty((rows, columns), np.float32),
            "rows": rows,
            "columns": columns,
            "depth": depth,
            "column_tiles": column_tiles,
        },
        {"out": a.astype(np.float64) @ b.astype(np.float64)},
        grid=(rows + 63) // 64 * column_tiles,
        threads=128,
        shared_bytes=2 * (64 * 32 + 32 * 64) * 2,
        tolerance=1e-5,
    )


def for_element(body: str, element: str) -> str:
    """A body written for bf16, for another element."""
    line = "typedef ag_bf16 Element;"
    assert line in body
    return body.replace(line, f"typedef ag_{element} Element;")


CASES = {
    "transpose": transpose_case,
    "reduce": reduce_case,
    "diffuse": diffuse_case,
    "rotate": rotate_case,
    "halves": halves_case,
    "workspace": workspace_case,
    "attention": attention_case,
    "mma_gemm": gemm_case,
}


def _random(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)
