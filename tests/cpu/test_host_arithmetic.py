"""Conversions and integer division of the host header, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.cpu.host_kernels import Case

Build = Callable[..., Path]

NAN16, NAN32 = 0x7FFF, 0x7FFFFFFF  # what the GPU's conversions make of every NaN


def convert_case() -> Case:
    """All 16-bit patterns; floats at and around every rounding boundary; a box of divisions."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    floats = interesting_floats()
    a, b = (x.ravel().astype(np.int32) for x in np.meshgrid(range(-40, 41), range(-9, 10)))
    return Case(
        "convert",
        {
            "fp16": patterns.view(np.float16),
            "bf16": patterns.view(ml_dtypes.bfloat16),
            "floats": floats,
            "a": a,
            "b": b,
            "from_fp16": np.empty(len(patterns), np.float32),
            "from_bf16": np.empty(len(patterns), np.float32),
            "to_fp16": np.empty(len(floats), np.float16),
            "to_bf16": np.empty(len(floats), ml_dtypes.bfloat16),
            "quotient": np.empty_like(a),
            "remainder": np.empty_like(a),
            "quotient64": np.empty(len(a), np.int64),
            "remainder64": np.empty(len(a), np.int64),
            "halves": len(patterns),
            "float_count": len(floats),
            "pairs": len(a),
        },
        {},
        grid=(len(floats) + 255) // 256,
        threads=256,
        writable=(
            *("from_fp16", "from_bf16", "to_fp16", "to_bf16"),
            *("quotient", "remainder", "quotient64", "remainder64"),
        ),
    )


def interesting_floats() -> npt.NDArray[np.float32]:
    """Each 16-bit value, the middle to the next one, both their neighbours, and noise."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    half = patterns.view(np.float16).astype(np.float32).view(np.uint32)
    brain = patterns.astype(np.uint32) << 16
    middles = [half, half + (1 << 12), brain, brain + (1 << 15)]
    around = [m + np.uint32(step) for m in middles for step in (0, 1, 0xFFFFFFFF)]
    subnormal_ties = np.arange(0, 2050, dtype=np.float32) * np.float32(2.0**-25)
    noise = np.random.default_rng(1).integers(0, 1 << 32, 1 << 17, dtype=np.uint32)
    bits = np.concatenate([*around, subnormal_ties.view(np.uint32), noise])
    return np.ascontiguousarray(bits.astype(np.uint32)).view(np.float32)


def assert_same_bits(
    got: npt.NDArray[np.generic], expected: npt.NDArray[np.generic], nan: int
) -> None:
    """Equal bit patterns; where a NaN is expected, the pattern `nan`."""
    integer = np.uint16 if expected.itemsize == 2 else np.uint32
    bits = np.where(np.isnan(expected), integer(nan), expected.view(integer))
    np.testing.assert_array_equal(got.view(integer), bits)


def test_conversions_and_divisions(build: Build) -> None:
    case = convert_case()
    case.launch(build("convert"))
    given = {name: np.asarray(value) for name, value in case.arguments.items()}
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(given["from_fp16"], given["fp16"].astype(np.float32), NAN32)
        assert_same_bits(given["to_fp16"], given["floats"].astype(np.float16), NAN16)
        assert_same_bits(given["to_bf16"], given["floats"].astype(ml_dtypes.bfloat16), NAN16)

    exact = given["bf16"].view(np.uint16).astype(np.uint32) << 16  # NaNs too
    np.testing.assert_array_equal(given["from_bf16"].view(np.uint32), exact)

    for quotient, remainder, scale in (
        ("quotient", "remainder", 1),
        ("quotient64", "remainder64", 3_000_000_007),
    ):
        pairs = [(int(a) * scale, int(b)) for a, b in zip(given["a"], given["b"], strict=True)]
        assert given[quotient].tolist() == [a // b if b else 0 for a, b in pairs]
        assert given[remainder].tolist() == [a % b if b else 0 for a, b in pairs]
