"""The instructions of sm_90a against NumPy: tensor copies, products of warp groups, the ring."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from attngen.cpu.build import CppCompiler, host_headers
from attngen.cpu.run import Landing, Mode, copy_apart
from attngen.ir.types import BF16, ELEMENTS, Element
from attngen.resources import template_source
from attngen.tensor_map import SWIZZLES, TensorMap
from tests.cpu.host_kernels import ALL_LANDINGS, ALL_MODES, Case, body_of
from tests.cpu.test_host_arithmetic import NAN32
from tests.cpu.variants import build_variants

Build = Callable[..., Path]
Array = npt.NDArray[Any]

DTYPES: dict[str, type[Any]] = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
    "uint8": np.uint8,
}
SHARED_BASE = 1024  # of addresses, in host_mma.h

each_mode = pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name.lower())
each_landing = pytest.mark.parametrize(
    "landing", ALL_LANDINGS, ids=lambda landing: landing.name.lower()
)


def test_every_function_has_a_host_version() -> None:
    pattern = r"^(?:template <[^<>]*> )?AG_DEVICE (?!constexpr)[\w ]+?(ag_\w+)\("
    instructions = template_source("common/wgmma.cuh").split("#ifndef AG_HOST")[1]
    named = set(re.findall(pattern, instructions.split("#endif  // AG_HOST")[0], re.MULTILINE))
    header = host_headers()["host_wgmma.h"]
    assert {"ag_barrier_init", "ag_tensor_load", "ag_wgmma_wait", "ag_elect"} <= named
    assert {name for name in named if not re.search(rf"AG_DEVICE \w+ {name}\(", header)} == set()


# ---- tensor maps --------------------------------------------------------------------------------


def tensor_map(
    name: str, array: Array, box: tuple[int, ...], swizzle: int = 0, element: Element = BF16
) -> TensorMap:
    """The map of a NumPy array whose last dimension is dense."""
    return TensorMap(
        name,
        element,
        array.ctypes.data,
        tuple(reversed(array.shape)),
        tuple(reversed(array.strides[:-1])),
        box,
        swizzle,
    )


def swizzled(place: Array, span: int) -> Array:
    """Where the byte at a place of shared memory lies."""
    if not span:
        return place
    address = place + SHARED_BASE
    return (address ^ ((address >> 3) & (span - 16))) - SHARED_BASE


# ---- boxes --------------------------------------------------------------------------------------


def box_of(array: Array, at: tuple[int, ...], box: tuple[int, ...]) -> Array:
    """The box at some coordinates, zeros outside; coordinates and box with the densest first."""
    out = np.zeros(tuple(reversed(box)), array.dtype)
    first, sizes = tuple(reversed(at)), array.shape
    inside = [
        (max(0, f), min(n, f + b)) for f, n, b in zip(first, sizes, reversed(box), strict=True)
    ]
    if all(begin < end for begin, end in inside):
        there = tuple(slice(b, e) for b, e in inside)
        here = tuple(slice(b - f, e - f) for (b, e), f in zip(inside, first, strict=True))
        out[here] = array[there]
    return out


# Element, shape (the densest last), box (the densest first; a swizzle has its own length of rows).
BOXES = [
    ("bf16", (50, 72), (64, 8)),
    ("fp16", (3, 50, 40), (32, 16, 2)),
    ("fp32", (3, 20, 40), (8, 16, 1)),
    ("bf16", (2, 3, 33, 80), (16, 24, 2, 1)),
    ("uint8", (2, 5, 33, 80), (128, 8, 1, 2)),
    ("bf16", (2, 2, 3, 9, 80), (64, 3, 2, 1, 2)),
]
PLACES = 8  # of each box: inside, across the edges, outside


def boxes_body(rank: int) -> str:
    """The kernel for a number of dimensions; it has four."""
    body = body_of("wgmma_boxes").replace("kRank = 4", f"kRank = {rank}")
    for first in ("at", "at + kRank"):
        old = ", ".join(f"ag_load({first}{f' + {i}' if i else ''})" for i in range(4))
        new = ", ".join(f"ag_load({first}{f' + {i}' if i else ''})" for i in range(rank))
        assert body.count(old + ")") == 1
        body = body.replace(old + ")", new + ")")
    return body


@pytest.fixture(scope="module")
def boxes(compiler: CppCompiler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_variants(
        "wgmma_boxes",
        {str(rank): boxes_body(rank) for rank in (2, 3, 4, 5)},
        cache_dir=tmp_path_factory.mktemp("boxes"),
        compiler=compiler,
    )


def put_box(target: Array, at: tuple[int, ...], box: Array) -> None:
    """Write a box into an array as far as it is inside; coordinates with the densest first."""
    padded = np.pad(target, [(size, size) for size in box.shape])
    first = [f + size for f, size in zip(reversed(at), box.shape, strict=True)]
    if all(0 <= f <= n - size for f, n, size in zip(first, padded.shape, box.shape, strict=True)):
        padded[tuple(slice(f, f + size) for f, size in zip(first, box.shape, strict=True))] = box
    inside = tuple(slice(b, b + n) for b, n in zip(box.shape, target.shape, strict=True))
    target[...] = padded[inside]


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(("element", "shape", "box"), BOXES)
def test_boxes(
    element: str, shape: tuple[int, ...], box: tuple[int, ...], swizzle: int, boxes: Path
) -> None:
    """Loaded, written down as they lie in shared memory, and stored to another tensor."""
    rng = np.random.default_rng(5)
    dtype = DTYPES[element]
    if swizzle:
        box = (swizzle // ELEMENTS[element].bytes, *box[1:])
    row = -(-shape[-1] * ELEMENTS[element].bytes // 16) * 16 // ELEMENTS[element].bytes
    source = rng.integers(1, 200, (*shape[:-1], row)).astype(dtype)  # more than the tensor has
    target = np.zeros_like(source)
    at = np.stack(
        [
            rng.integers(-b - 1, n + 2, (PLACES, 2))
            for n, b in zip(reversed(shape), box, strict=True)
        ],
        axis=-1,
    ).astype(np.int32)
    at[0] = 0
    for landing in ALL_LANDINGS:
        for load, store in at:
            case = boxes_case(source, target, shape, box, swizzle, np.stack([load, store]))
            case.launch(boxes, landing=landing, workers=1)
            loaded = box_of(source[..., : shape[-1]], tuple(load.tolist()), box)
            image = np.asarray(case.arguments["image"]).view(np.uint8)
            places = swizzled(np.arange(image.size) + 1024, swizzle) - 1024
            np.testing.assert_array_equal(image[places], np.frombuffer(loaded.tobytes(), np.uint8))
            expected = np.zeros_like(target)
            put_box(expected[..., : shape[-1]], tuple(store.tolist()), loaded)
            np.testing.assert_array_equal(case.tensors["to"], expected)


def boxes_case(
    source: Array,
    target: Array,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    at: Array,
) -> Case:
    tensors = {"from": copy_apart(source), "to": copy_apart(target)}
    element = next(name for name, dtype in DTYPES.items() if source.dtype == dtype)
    maps = {
        name: tensor_map(name, array[..., : shape[-1]], box, swizzle, ELEMENTS[element])
        for name, array in tensors.items()
    }
    words = maps["from"].box_bytes() // 4
    return Case(
        f"wgmma_boxes_{len(shape)}",
        {**maps, "image": np.zeros(words, np.uint32), "at": at, "words": words},
        {},
        grid=1,
        threads=64,
        shared_bytes=1024 + words * 4,
        writable=("image", "to"),
        tensors=tensors,
    )


# ---- products -----------------------------------------------------------------------------------


def offsets(swizzle: int, is_dense_along_mn: bool, rows: int) -> tuple[Array, int, int]:
    """Bytes of element (i, k) of a matrix of `rows` x 16 in shared memory; leading, stride."""
    i, k = np.arange(rows)[:, None], np.arange(16)[None]
    if not swizzle and not is_dense_along_mn:  # 8x8 blocks of 128 bytes, the two of K far apart
        stride, leading = 128, rows * 16 + 128
        return i // 8 * stride + i % 8 * 16 + k // 8 * leading + k % 8 * 2, leading, stride
    if not swizzle:
        stride, leading = 256 + 128, 128
        return i // 8 * stride + i % 8 * 2 + k // 8 * leading + k % 8 * 16, leading, stride
    span, atom = swizzle, 8 * swizzle
    if not is_dense_along_mn:
        plain = i // 8 * atom + i % 8 * span + k * 2
        return plain, 16, atom
    across = span // 2
    leading = 2 * atom if rows > across else 16
    plain = i // across * leading + k // 8 * atom + k % 8 * span + i % across * 2
    return plain, leading, atom


def products_case(
    columns: int,
    element: str,
    swizzle_a: int,
    swizzle_b: int,
    b_is_dense_along_n: bool,
    *,
    special: bool = False,
) -> Case:
    rng = np.random.default_rng(columns)
    dtype = DTYPES[element]
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((64, 16), (columns, 16)))
    if special:
        a[::5] = rng.integers(0, 1 << 16, a[::5].shape).astype(np.uint16).view(dtype)
        a[1] = rng.integers(0, 8, 16).astype(np.uint16).view(dtype)  # subnormal numbers
        b[:, ::3] = 0
        b[0] = np.inf
    c = rng.standard_normal((64, columns)).astype(np.float32)
    place_a, leading_a, _ = offsets(swizzle_a, False, 64)
    place_b, leading_b, _ = offsets(swizzle_b, b_is_dense_along_n, columns)
    first_b = -(-(int(place_a.max()) + 2) // 1024) * 1024
    image = rng.integers(0, 1 << 16, first_b // 2 + (int(place_b.max()) // 1024 + 1) * 512)
    image = image.astype(np.uint16)
    image[swizzled(place_a, swizzle_a) // 2] = a.view(np.uint16)
    image[swizzled(place_b + first_b, swizzle_b) // 2] = b.view(np.uint16)
    left, right = a.astype(np.float32), b.astype(np.float32)
    total, plain = c.copy(), np.zeros_like(c)
    with np.errstate(all="ignore"):
        for k in range(16):  # added up as the host does
            total += left[:, k, None] * right[None, :, k]
            plain += left[:, k, None] * right[None, :, k]
    lanes = np.arange(128)
    row, pair = lanes // 32 * 16 + lanes % 32 // 4, lanes % 4 * 2
    j = np.arange(columns // 2)
    rows = row[:, None] + (j >> 1 & 1) * 8
    at = (rows, j // 4 * 8 + pair[:, None] + (j & 1))
    bits = a.view(np.uint16).astype(np.uint32)
    fragments = np.stack(
        [
            bits[row + 8 * (e % 2), pair + e // 2 * 8]
            | bits[row + 8 * (e % 2), pair + e // 2 * 8 + 1] << 16
            for e in range(4)
        ],
        -1,
    )
    return Case(
        "wgmma_products",
        {
            "image": image.view(np.uint32),
            "fragments": fragments,
            "c": np.ascontiguousarray(c[at]),
            "from_shared": np.empty((128, columns // 2), np.float32),
            "from_registers": np.empty((128, columns // 2), np.float32),
            "words": image.size // 2,
            "a": 0,
            "b": first_b,
            "leading_a": leading_a,
            "leading_b": leading_b,
        },
        {"from_shared": total[at], "from_registers": plain[at]},
        grid=1,
        threads=128,
        shared_bytes=image.nbytes,
    )


def products_body(
    columns: int, element: str, swizzle_a: int, swizzle_b: int, b_is_dense_along_n: bool
) -> str:
    body = body_of("wgmma_products").replace("_bf16<", f"_{element}<")
    body = body.replace("kColumns = 64;", f"kColumns = {columns};")
    names = {0: "kSwizzleNone", 32: "kSwizzle32", 64: "kSwizzle64", 128: "kSwizzle128"}
    strides = (
        offsets(swizzle_a, False, 64)[2],
        offsets(swizzle_b, b_is_dense_along_n, columns)[2],
    )
    for side, swizzle, stride in zip("AB", (swizzle_a, swizzle_b), strides, strict=True):
        old = f"kHigh{side} = ag_matrix_high(kSwizzle128, 1024)"
        assert body.count(old) == 1
        body = body.replace(old, f"kHigh{side} = ag_matrix_high({names[swizzle]}, {stride})")
    return body.replace(
        "kMajorB = kMajorK", f"kMajorB = {'kMajorMN' if b_is_dense_along_n else 'kMajorK'}"
    )


PRODUCTS = [  # columns, element, swizzle of A and of B, whether B is dense along its columns
    *(
        (64, element, swizzle, swizzle, b_is_dense_along_n)
        for element, swizzle in itertools.product(("bf16", "fp16"), SWIZZLES)
        for b_is_dense_along_n in (False, True)
    ),
    (32, "bf16", 64, 128, False),
    (128, "fp16", 128, 0, True),
    *((n, "bf16", 128, SWIZZLES[n // 8 % 4], n // 32 % 2 == 1) for n in range(8, 257, 8)),
]


@pytest.fixture(scope="module")
def products(compiler: CppCompiler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_variants(
        "wgmma_products",
        {str(i): products_body(*product) for i, product in enumerate(PRODUCTS)},
        cache_dir=tmp_path_factory.mktemp("products"),
        compiler=compiler,
    )


@each_landing
@pytest.mark.parametrize("i", range(len(PRODUCTS)), ids=lambda i: "-".join(map(str, PRODUCTS[i])))
def test_products(i: int, landing: Landing, products: Path) -> None:
    for mode in (Mode.RING, Mode.RANDOM):
        case = products_case(*PRODUCTS[i])
        case.kernel += f"_{i}"
        case.run(products, mode=mode, landing=landing)


def test_special_numbers_in_products(products: Path) -> None:
    """Infinities, subnormal numbers and NaNs as in NumPy; every NaN is the same one."""
    for i in range(0, 16, 3):
        case = products_case(*PRODUCTS[i], special=True)
        case.kernel += f"_{i}"
        case.launch(products)
        for name, expected in case.expected.items():
            bits = np.where(np.isnan(expected), NAN32, expected.view(np.uint32))
            found = np.asarray(case.arguments[name]).view(np.uint32)
            np.testing.assert_array_equal(found, bits, err_msg=f"{name} {PRODUCTS[i]}")
            assert 0.01 < np.isnan(expected).mean() < 0.9


# ---- matrices to shared memory, and what a barrier says -----------------------------------------


def matrices_case() -> Case:
    rng = np.random.default_rng(9)
    matrices = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    lane = np.arange(32)
    group, pair = lane // 4, lane % 4 * 2
    low, high = (matrices[:, group, pair + i].astype(np.uint32) for i in (0, 1))
    rows = copy_apart(rng.standard_normal((1, 1, 8, 64)).astype(ml_dtypes.bfloat16))
    # Behind the first phase, its parity is over and that of the next one is not.
    looks = np.full(32, 0 + 2 + 4 + 0, np.int32)
    return Case(
        "wgmma_matrices",
        {
            "rows": tensor_map("rows", rows, (64, 8, 1, 1)),
            "given": np.ascontiguousarray((low | high << 16).T),
            "plain": np.empty((32, 8), np.uint16),
            "transposed": np.empty((32, 8), np.uint16),
            "loaded": np.empty((8, 64), np.uint16),
            "looks": np.empty(32, np.int32),
        },
        {
            "plain": matrices.reshape(32, 8),
            "transposed": matrices.transpose(0, 2, 1).reshape(32, 8),
            "loaded": rows.view(np.uint16).reshape(8, 64),
            "looks": looks,
        },
        grid=1,
        threads=32,
        shared_bytes=2056,
        tensors={"rows": rows},
    )


@each_mode
@each_landing
def test_matrices(mode: Mode, landing: Landing, build: Build) -> None:
    case = matrices_case()
    case.run(build("wgmma_matrices"), mode=mode, landing=landing)
    assert case.report is not None
    # Rows of 16 bytes that follow each other meet no bank twice.
    assert case.report.shared_wavefronts == case.report.shared_wavefronts_least == 6 * 4


# ---- the ring -----------------------------------------------------------------------------------


def ring_case(steps: int = 5, blocks: int = 2) -> Case:
    rng = np.random.default_rng(6)
    source = copy_apart(rng.standard_normal((blocks * steps * 16, 64)).astype(ml_dtypes.bfloat16))
    target = copy_apart(np.zeros_like(source))
    return Case(
        "wgmma_ring",
        {
            "from": tensor_map("from", source, (64, 16)),
            "to": tensor_map("to", target, (64, 16)),
            "steps": steps,
        },
        {},
        grid=blocks,
        threads=256,
        shared_bytes=1024 + 3 * 2048,
        writable=("to",),
        tensors={"from": source, "to": target},
    )


def check_ring(library: Path, *, seed: int = 0, **options: Any) -> None:
    case = ring_case()
    case.launch(library, seed=seed, **options)
    source, target = case.tensors["from"], case.tensors["to"]
    np.testing.assert_array_equal(target, (2 * source.astype(np.float32)).astype(source.dtype))


@each_mode
@each_landing
def test_ring(mode: Mode, landing: Landing, build: Build) -> None:
    for seed in range(8 if mode is Mode.RANDOM else 1):
        check_ring(build("wgmma_ring"), mode=mode, landing=landing, seed=seed)
    check_ring(build("wgmma_ring"), mode=mode, landing=landing, check=False)
