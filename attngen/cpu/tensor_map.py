"""Tensor maps as the host header reads them: 128 bytes in place of the driver's."""

from __future__ import annotations

import struct
from typing import Final

from attngen.tensor_map import TensorMap

__all__ = ["TENSOR_MAP_BYTES", "encode_for_cpu"]

TENSOR_MAP_BYTES: Final = 128
_MARK: Final = 0x70616D5F67617461
_LAYOUT: Final = struct.Struct("<QQ5Q4Q5HBBB27x")  # ag_host::HostTensorMap in host_wgmma.h


def encode_for_cpu(tensor: TensorMap) -> bytes:
    """The bytes of an `ag_tensor_map` in the arguments of a kernel, at a multiple of 64.

    Errors:  A642 when the driver would refuse it.
    """
    tensor.check()
    rank = len(tensor.sizes)
    return _LAYOUT.pack(
        _MARK,
        tensor.address,
        *_filled(tensor.sizes, 5),
        *_filled(tensor.strides, 4),
        *_filled(tensor.box, 5),
        rank,
        tensor.element.bytes,
        tensor.swizzle,
    )


def _filled(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    return values + (0,) * (count - len(values))
