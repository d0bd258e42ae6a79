"""The instructions of tensor-core kernels against NumPy, for every lane."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from attngen.cpu.build import CppCompiler, build_library, host_headers
from attngen.resources import template_source
from tests.cpu.host_kernels import ALL_LANDINGS, ALL_MODES, Case, body_of, for_element, kernel_text
from tests.cpu.test_host_arithmetic import NAN16, NAN32, interesting_floats

Build = Callable[..., Path]
Array = npt.NDArray[Any]
Dtype = type[Any]

ELEMENTS: dict[str, Dtype] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
LANES = np.arange(32)
GROUP, PAIR = LANES // 4, LANES % 4 * 2  # a lane's row, and the first of its two columns


ELSEWHERE = {"ag_copy_arrive"}
"""Functions that the host has in another header: this one arrives at a barrier in memory."""


@pytest.mark.parametrize(
    ("file", "some"),
    [
        ("mma.cuh", {"ag_mma", "ag_store16"}),
        ("reads.cuh", {"ag_load_if"}),
        ("staged.cuh", {"ag_copy_async4", "ag_shared_load"}),
    ],
)
def test_every_function_has_a_host_version(file: str, some: set[str]) -> None:
    pattern = r"^(?:template <[^<>]*> )?AG_DEVICE [\w ]+?(ag_\w+)(?:<\w+>)?\("
    instructions, plain = template_source(f"common/{file}").split("#endif  // AG_HOST")
    named = set(re.findall(pattern, instructions, re.MULTILINE))
    headers = host_headers()
    there = functions_of(headers["host_mma.h"], pattern)
    assert some <= named
    assert named - ELSEWHERE <= there
    assert named & ELSEWHERE <= functions_of(headers["host_wgmma.h"], pattern)
    assert not there & functions_of(plain, pattern)


def functions_of(text: str, pattern: str) -> set[str]:
    """Names; the head of a template may be a line of its own."""
    joined = re.sub(r"(template <[^<>]*>)\n", r"\1 ", text)
    return set(re.findall(pattern, joined, re.MULTILINE))


# ---- matrices and shared memory by address ---------------------------------------------------


def matrices_case() -> Case:
    rng = np.random.default_rng(2)
    matrices = rng.integers(1, 1 << 16, (4, 8, 8), dtype=np.uint16)
    is_valid = (rng.random(32) < 0.8).astype(np.int32)
    there = np.where(is_valid.reshape(4, 8, 1), matrices, 0).reshape(32, 8)
    rows = rng.permutation(32).astype(np.int32)
    rows[5] = rows[6]  # an address may be given twice
    loaded = there[rows].reshape(4, 8, 8)
    plain = pairs(loaded[:, GROUP, PAIR], loaded[:, GROUP, PAIR + 1]).T
    transposed = pairs(loaded[:, PAIR, GROUP], loaded[:, PAIR + 1, GROUP]).T
    return Case(
        "mma_matrices",
        {
            "matrices": matrices,
            "rows": rows,
            "is_valid": is_valid,
            "plain": np.empty((32, 4), np.uint32),
            "transposed": np.empty((32, 4), np.uint32),
            "back": np.empty((32, 8), np.uint16),
        },
        {"plain": plain, "transposed": transposed, "back": loaded.reshape(32, 8)},
        grid=1,
        threads=32,
        shared_bytes=1024,
    )


def pairs(low: Array, high: Array) -> Array:
    """Registers of two 16-bit elements."""
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


@pytest.mark.parametrize("landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower())
@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
def test_matrices(mode: object, landing: object, build: Build) -> None:
    case = matrices_case()
    case.run(build("mma_matrices"), mode=mode, landing=landing)
    assert case.report is not None
    assert (case.report.shared_reads, case.report.shared_writes) == (32 * 3, 32 * 5)
    valid = int(np.asarray(case.arguments["is_valid"]).sum())
    assert (case.report.global_loads, case.report.global_stores) == (32 * 3 + valid, 32 * 3)


# ---- products ---------------------------------------------------------------------------------


def fragments(a: Array, b: Array, c: Array) -> tuple[Array, Array, Array]:
    """What the lanes hold of A [n, 16, 16] and B [n, 16, 8], as bits, and of C [n, 16, 8]."""
    rows, columns = (GROUP, GROUP + 8, GROUP, GROUP + 8), (PAIR, PAIR, PAIR + 8, PAIR + 8)
    of_a = [pairs(a[:, i, j], a[:, i, j + 1]) for i, j in zip(rows, columns, strict=True)]
    of_b = [pairs(b[:, i, GROUP], b[:, i + 1, GROUP]) for i in (PAIR, PAIR + 8)]
    of_c = [c[:, i, j] for i in (GROUP, GROUP + 8) for j in (PAIR, PAIR + 1)]
    return np.stack(of_a, -1), np.stack(of_b, -1), np.stack(of_c, -1)


def product_inputs(element: str, count: int) -> tuple[Array, Array, Array]:
    """Ordinary numbers, some infinities, and then any bits, so subnormal numbers and NaNs."""
    rng = np.random.default_rng(3)
    dtype = ELEMENTS[element]
    a = rng.standard_normal((count, 16, 16)).astype(dtype).view(np.uint16)
    b = rng.standard_normal((count, 16, 8)).astype(dtype).view(np.uint16)
    c = rng.standard_normal((count, 16, 8)).astype(np.float32)
    a[: count // 4, 3, 5] = np.array(np.inf, dtype).view(np.uint16)
    half = count // 2
    a[half:] = rng.integers(0, 1 << 16, a[half:].shape)
    any_bits = rng.integers(0, 1 << 16, b[half:].shape)
    b[half:] = np.where(rng.random(any_bits.shape) < 0.8, 0, any_bits)
    a[-8:] = rng.integers(0, 8, a[-8:].shape)  # only subnormal numbers
    c[half:][rng.random(c[half:].shape) < 0.5] = 0
    return a, b, c


def product(element: str, a: Array, b: Array, c: Array) -> Array:
    """C + A B, added up as the host does: in float32, from the first column of A to the last."""
    left, right = (x.view(ELEMENTS[element]).astype(np.float32) for x in (a, b))
    total = c.copy()
    with np.errstate(all="ignore"):
        for k in range(16):
            total += left[:, :, k, None] * right[:, None, k, :]
    return total


def products_case(element: str, count: int = 64) -> Case:
    a, b, c = product_inputs(element, count)
    of_a, of_b, of_c = fragments(a, b, c)
    _, _, expected = fragments(a, b, product(element, a, b, c))
    return Case(
        "mma_products",
        {"a": of_a, "b": of_b, "c": of_c, "out": np.empty_like(of_c)},
        {"out": expected},
        grid=count,
        threads=32,
    )


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
def test_products(element: str, mode: object, build: Build) -> None:
    case = products_case(element)
    library = build("mma_products", for_element(body_of("mma_products"), element))
    case.launch(library, mode=mode)
    check_products(case)


@pytest.mark.parametrize("element", ELEMENTS)
def test_products_without_the_processor_s_conversion(
    element: str, compiler: CppCompiler, tmp_path: Path
) -> None:
    if "ziglang" in compiler.command:
        pytest.skip("its command takes no flags")
    plain = CppCompiler((*compiler.command, "-U__F16C__"), compiler.version)
    text = kernel_text("mma_products", for_element(body_of("mma_products"), element))
    case = products_case(element)
    case.launch(build_library(text, cache_dir=tmp_path, compiler=plain))
    check_products(case)


def check_products(case: Case) -> None:
    out, expected = np.asarray(case.arguments["out"]), case.expected["out"]
    is_nan = np.isnan(expected)
    assert 0.01 < is_nan.mean() < 0.4
    assert np.isinf(expected).any()
    assert (np.abs(expected[-8:]) > 0).any()
    expected_bits = np.where(is_nan, NAN32, expected.view(np.uint32))
    np.testing.assert_array_equal(out.view(np.uint32), expected_bits)


# ---- numbers ----------------------------------------------------------------------------------


FLOATS = ("exp2", "reciprocal", "tanh", "sigmoid", "max")


def scalars_case() -> Case:
    rng = np.random.default_rng(4)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, 1.0, -126.0, -126.5, 128.0]
    specials = np.array(np.meshgrid(special, special), np.float32).reshape(2, -1)
    bits = interesting_floats()
    usual = rng.uniform(-140, 140, 4096).astype(np.float32)
    x = np.concatenate([specials[0], bits[::7], usual])
    y = np.concatenate([specials[1], np.roll(bits[::7], 1000), usual[::-1] / 100])
    count = len(x) // 32 * 32
    x, y = x[:count].copy(), y[:count].copy()
    votes = rng.integers(-(1 << 31), 1 << 31, (count // 32, 32)).astype(np.int32)
    votes[::3] >>= rng.integers(0, 32, votes[::3].shape).astype(np.int32)
    votes[::5, :] = votes[::5, :1]
    positive = ((votes > 0).astype(np.uint64) << LANES.astype(np.uint64)).sum(-1)
    lowest = np.array([(int(v) & -int(v)).bit_length() - 1 for v in votes.ravel()], np.int32)
    named = np.take_along_axis(votes, votes.view(np.uint32).astype(np.int64) % 32, -1).ravel()
    moved = np.roll(x.view(np.uint32).reshape(-1, 32), -1, -1).ravel()
    return Case(
        "mma_scalars",
        {
            "x": x,
            "y": y,
            "votes": votes,
            **{name: np.empty(count, np.uint32) for name in ("bf16_pairs", "fp16_pairs")},
            **{name: np.empty(count, np.float32) for name in FLOATS},
            "positive": np.empty(count, np.uint32),
            **{
                name: np.empty(count, np.int32)
                for name in ("least", "largest", "lowest", "rotated")
            },
            "wide": np.empty(count, np.int64),
            "moved": np.empty(count, np.uint32),
            "count": count,
        },
        {
            "positive": np.repeat(positive.astype(np.uint32), 32),
            "least": np.repeat(votes.min(-1), 32),
            "largest": np.repeat(votes.max(-1), 32),
            "lowest": lowest,
            "rotated": named,
            "wide": named * (np.int64(1) << 31) + 1,
            "moved": moved,
        },
        grid=(count + 127) // 128,
        threads=128,
        writable=("bf16_pairs", "fp16_pairs", *FLOATS),
    )


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
def test_scalars(mode: object, build: Build) -> None:
    case = scalars_case()
    case.run(build("mma_scalars"), mode=mode)
    given = {name: np.asarray(value) for name, value in case.arguments.items()}
    x, y = given["x"], given["y"]
    for element, dtype in ELEMENTS.items():
        expected = pairs(*(rounded(v, dtype) for v in (x, y)))
        np.testing.assert_array_equal(given[f"{element}_pairs"], expected)
    check_approximations(given)
    np.testing.assert_array_equal(given["max"].view(np.uint32), larger(x, y).view(np.uint32))


def rounded(x: Array, dtype: Dtype) -> Array:
    """The bits of numbers in 16 bits; every NaN is the same one."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isnan(x), NAN16, x.astype(dtype).view(np.uint16)).astype(np.uint16)


def larger(x: Array, y: Array) -> Array:
    """max.f32: the number, where one is a NaN; +0 is above -0."""
    most = np.fmax(x, y)
    zeros = (x == 0) & (y == 0)
    most = np.where(zeros & (np.signbit(x) != np.signbit(y)), np.float32(0), most)
    nan = np.array(NAN32, np.uint32).view(np.float32)
    return np.where(np.isnan(x) & np.isnan(y), nan, most)


def check_approximations(given: dict[str, Array]) -> None:
    """ex2 and rcp, approximately and flushed: the bounds of the PTX ISA, and the special values.

    What is made from them has the absolute errors that mma.cuh states.
    """
    with np.errstate(all="ignore"):
        x = given["x"].astype(np.float64)
        exp2, tanh, sigmoid = np.exp2(x), np.tanh(x), 1 / (1 + np.exp(-x))
    flushed = exp2 < 2.0**-126
    assert not given["exp2"][flushed & (exp2 < 2.0**-126 * (1 - 2.0**-22))].any()
    is_usual = ~flushed & (exp2 < 3.4e38)
    error = np.abs(given["exp2"][is_usual] / exp2[is_usual] - 1)
    assert error.max() <= 2.0**-22
    assert np.isinf(given["exp2"][x >= 128]).all()
    assert (given["exp2"].view(np.uint32)[np.isnan(x)] == NAN32).all()

    is_usual = (np.abs(x) >= 2.0**-126) & (np.abs(x) <= 2.0**126)
    error = np.abs(given["reciprocal"][is_usual] * x[is_usual] - 1)
    assert error.max() <= 2.0**-23
    assert (given["reciprocal"][np.isinf(x)] == 0).all()
    assert np.isinf(given["reciprocal"][np.abs(x) < 2.0**-126]).all()

    is_number = ~np.isnan(x)
    for name, right, error in (("tanh", tanh, 2.0**-21), ("sigmoid", sigmoid, 2.0**-22)):
        assert np.abs(given[name] - right)[is_number].max() <= error
        assert np.isnan(given[name][~is_number]).all()
        is_far = np.isinf(x)
        np.testing.assert_array_equal(given[name][is_far], right[is_far])
