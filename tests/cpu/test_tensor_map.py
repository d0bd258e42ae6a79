"""Tensor maps: the rules of the driver, and the bytes that the host header reads."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from attngen.cpu.build import host_headers
from attngen.cpu.tensor_map import TENSOR_MAP_BYTES, encode_for_cpu
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.types import BF16, FP32
from attngen.tensor_map import TensorMap, TensorMapRefused

GOOD = TensorMap("k", BF16, 1 << 20, (128, 1000, 8, 2), (2048, 256, 2048000), (64, 64, 1, 1), 128)


def test_a_good_map_is_encoded() -> None:
    encoded = encode_for_cpu(GOOD)
    assert len(encoded) == TENSOR_MAP_BYTES
    assert GOOD.box_bytes() == 64 * 64 * 2
    assert struct.unpack_from("<Q5Q4Q5H", encoded, 8) == (
        *(1 << 20, 128, 1000, 8, 2, 0, 2048, 256, 2048000, 0, 64, 64, 1, 1, 0),
    )
    assert encoded[8 + 8 + 40 + 32 + 10 :][:3] == bytes([4, 2, 128])
    mark = f"{int.from_bytes(encoded[:8], 'little'):#x}ull"
    assert f"kTensorMapMark = {mark};" in host_headers()["host_wgmma.h"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"address": (1 << 20) + 8}, "its address is 8 behind a multiple of 16"),
        ({"sizes": (), "strides": (), "box": ()}, "it has 0 dimensions"),
        ({"sizes": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "it has 6 dimensions"),
        ({"strides": (2048, 256)}, "4 dimensions need 3 strides"),
        ({"sizes": (128, 0, 8, 2)}, "dimension 1 has 0 elements"),
        ({"sizes": (128, 2**32 + 1, 8, 2)}, "dimension 1 has 4294967297 elements"),
        (
            {"strides": (2048, 264, 2048000)},
            "dimension 2 has a stride of 264 bytes, no multiple of 16",
        ),
        ({"strides": (2048, -256, 2048000)}, "dimension 2 has a stride of -256 bytes"),
        ({"strides": (2048, 256, 2**40)}, "dimension 3 has a stride of 1099511627776 bytes"),
        ({"box": (64, 257, 1, 1)}, "the box has 257 elements in dimension 1"),
        ({"box": (64, 0, 1, 1)}, "the box has 0 elements in dimension 1"),
        ({"box": (12, 8, 1, 1), "swizzle": 0}, "a row of the box has 24 bytes"),
        ({"swizzle": 16}, "a swizzle spans 0, 32, 64 or 128 bytes, not 16"),
        ({"swizzle": 64}, "a row of the box has 128 bytes, and the swizzle spans 64"),
        ({"element": FP32}, "a row of the box has 256 bytes, and the swizzle spans 128"),
    ],
)
def test_what_the_driver_refuses(changes: dict[str, object], says: str) -> None:
    with pytest.raises(AttnError) as caught:
        encode_for_cpu(replace(GOOD, **changes))  # type: ignore[arg-type]
    (diagnostic,) = caught.value.diagnostics
    assert isinstance(diagnostic, TensorMapRefused)
    assert diagnostic.code == "A642"
    assert says in diagnostic.reasons
    assert "`k`" in diagnostic.message()


def test_every_reason_is_given() -> None:
    with pytest.raises(AttnError) as caught:
        encode_for_cpu(replace(GOOD, address=1, box=(64, 300, 1, 1)))
    (diagnostic,) = caught.value.diagnostics
    assert isinstance(diagnostic, TensorMapRefused)
    assert diagnostic.reasons.count("; ") == 1
