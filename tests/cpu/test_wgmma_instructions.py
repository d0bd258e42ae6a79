"""The instructions of sm_90a against NumPy: tensor copies, products of warp groups, the ring."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from attngen.cpu.build import host_headers
from attngen.cpu.run import Landing, MemoryRange, Mode, copy_apart
from attngen.ir.types import BF16, ELEMENTS, Element
from attngen.resources import template_source
from attngen.tensor_map import SWIZZLES, TensorMap
from tests.cpu.host_kernels import ALL_LANDINGS, ALL_MODES, Case, body_of

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


BOXES = [  # element, shape (the densest last), box (the densest first)
    ("bf16", (50, 72), (64, 8)),
    ("fp16", (3, 50, 40), (32, 16, 2)),
    ("fp32", (3, 20, 40), (8, 16, 1)),
    ("bf16", (2, 3, 33, 80), (16, 24, 2, 1)),
    ("uint8", (2, 5, 33, 80), (128, 8, 1, 2)),
    ("bf16", (2, 2, 3, 9, 80), (64, 3, 2, 1, 2)),
]


def boxes_case(
    element: str, shape: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> tuple[Case, list[MemoryRange], Array, Array]:
    """Loads and stores at coordinates of all kinds: inside, across every edge, outside."""
    rng = np.random.default_rng(5)
    dtype, rank, blocks = DTYPES[element], len(shape), 12
    source = rng.integers(1, 200, shape).astype(dtype)
    width = -(-shape[-1] * source.itemsize // 16) * 16 // source.itemsize  # of a row in memory
    wide = copy_apart(np.full((*shape[:-1], width), 99).astype(dtype))
    wide[..., : shape[-1]] = source
    target = copy_apart(np.zeros_like(wide))
    views = [array[..., : shape[-1]] for array in (wide, target)]
    at = np.zeros((blocks, 8), np.int32)
    for i, (size, edge) in enumerate(zip(reversed(shape), box, strict=True)):
        at[:, i] = rng.integers(-edge - 1, size + 2, blocks)
        at[:, 4 + i if rank < 5 else i] = rng.integers(-2, size + 1, blocks)
    at[0] = 0
    maps = [
        tensor_map(name, view, box, swizzle, ELEMENTS[element])
        for name, view in zip(("from", "to"), views, strict=True)
    ]
    words = maps[0].box_bytes() // 4
    case = Case(
        "wgmma_boxes",
        {
            "from": maps[0],
            "to": maps[1],
            "image": np.zeros((blocks, words), np.uint32),
            "at": at,
            "words": words,
        },
        {},
        grid=blocks,
        threads=64,
        shared_bytes=1024 + words * 4,
        writable=("image",),
    )
    ranges = [
        MemoryRange.of(wide, is_writable=False, name="from"),
        # Boxes of several blocks overlap, and they write what is the same: no array to search.
        MemoryRange.of(target, is_writable=True, name="to"),
        *(
            MemoryRange.of(np.asarray(case.arguments[name]), is_writable=name == "image", name=name)
            for name in ("image", "at")
        ),
    ]
    return case, ranges, views[0], views[1]


@each_landing
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(("element", "shape", "box"), BOXES)
def test_boxes(
    element: str,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    landing: Landing,
    build: Build,
) -> None:
    rank = len(shape)
    if swizzle:
        box = (swizzle // DTYPES[element](0).itemsize, *box[1:])
    names = ", ".join(f"ag_load(at + {i})" for i in range(rank))
    other = ", ".join(f"ag_load(at + {i if rank == 5 else 4 + i})" for i in range(rank))
    body = body_of("wgmma_boxes")
    for first, coordinates in ((0, names), (4, other)):
        old = ", ".join(f"ag_load(at + {first + i})" if first + i else "ag_load(at)" for i in range(4))
        assert body.count(old) == 1
        body = body.replace(old, coordinates)
    case, ranges, source, target = boxes_case(element, shape, box, swizzle)
    library = build("wgmma_boxes", body)
    image, at = (np.asarray(case.arguments[name]) for name in ("image", "at"))
    for block in range(case.grid):  # one at a time: stores of several overlap
        case.grid = 1
        single = np.ascontiguousarray(at[block : block + 1])
        image_of_block = np.zeros_like(image[0])
        target[...] = 0
        case.arguments |= {"at": single, "image": image_of_block}
        ranges[2:] = [
            MemoryRange.of(image_of_block, is_writable=True, name="image"),
            MemoryRange.of(single, is_writable=False, name="at"),
        ]
        case.launch(library, landing=landing, ranges=ranges, workers=1)
        loaded = box_of(source, tuple(single[0, :rank].tolist()), box)
        flat = np.frombuffer(loaded.tobytes(), np.uint8)
        there = image_of_block.view(np.uint8)[swizzled(np.arange(1024, 1024 + flat.size), swizzle) - 1024]
        np.testing.assert_array_equal(there, flat)
        to = tuple(single[0, (0 if rank == 5 else 4) :][:rank].tolist())
        expected = np.zeros(target.shape, target.dtype)
        pad = [(b, b) for b in reversed(box)]
        padded = np.pad(expected, pad)
        window = tuple(
            slice(min(max(t + b, 0), n + b), min(max(t + b, 0), n + b) + b)
            for t, b, n in zip(reversed(to), reversed(box), target.shape, strict=True)
        )
        is_clear = all(-b <= t <= n for t, b, n in zip(to, box, reversed(target.shape), strict=True))
        if is_clear:
            padded[window] = loaded
        inner = tuple(slice(b, b + n) for b, n in zip(reversed(box), target.shape, strict=True))
        np.testing.assert_array_equal(target, padded[inner])


# ---- products -----------------------------------------------------------------------------------


def offsets(swizzle: int, is_dense_along_mn: bool, rows: int) -> tuple[Array, int, int]:
    """Bytes of element (i, k) of a matrix of `rows` x 16 in shared memory, `leading` and `stride`."""
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
    columns: int, element: str, swizzle_a: int, swizzle_b: int, b_is_dense_along_n: bool
) -> Case:
    rng = np.random.default_rng(columns)
    dtype = DTYPES[element]
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((64, 16), (columns, 16)))
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
    return body.replace("kMajorB = kMajorK", f"kMajorB = {'kMajorMN' if b_is_dense_along_n else 'kMajorK'}")


PRODUCTS = [
    (columns, element, swizzle, swizzle, b_is_dense_along_n)
    for columns, element, swizzle in [
        (8, "bf16", 0),
        (64, "bf16", 128),
        (128, "fp16", 128),
        (176, "bf16", 32),
        (256, "fp16", 64),
        (80, "fp16", 0),
    ]
    for b_is_dense_along_n in (False, True)
    if swizzle == 0 or not b_is_dense_along_n or columns % (swizzle // 2) == 0
] + [(32, "bf16", 64, 128, False), (64, "fp16", 128, 0, True)]


@each_landing
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: "-".join(map(str, p)))
def test_products(
    product: tuple[int, str, int, int, bool], landing: Landing, build: Build
) -> None:
    library = build("wgmma_products", products_body(*product))
    for mode in ALL_MODES:
        products_case(*product).run(library, mode=mode, landing=landing)


# ---- matrices to shared memory, and what a barrier says -------------------------------------------


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


# ---- the ring -------------------------------------------------------------------------------------


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


