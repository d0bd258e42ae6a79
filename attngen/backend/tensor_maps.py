"""Tensor maps as the GPU reads them: the driver's `cuTensorMapEncodeTiled`, through ctypes.

The driver only writes 128 bytes; it needs no context, and no GPU memory is touched.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, final

from attngen.diagnostics.diagnostic import AttnError
from attngen.tensor_map import TensorMap, TensorMapRefused

__all__ = ["TensorMapEncoder"]

_BYTES: Final = 128
_ALIGNMENT: Final = 64

# CUDA driver API: CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
_DATA_TYPES: Final = {
    "bool": 0, "uint8": 0, "int8": 0, "int16": 1, "uint32": 2, "int32": 3, "fp16": 6, "fp32": 7,
    "bf16": 9,
}  # fmt: skip
"""Only what is outside depends on the type: zeros, whatever it is."""
_SWIZZLES: Final = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTE_128_BYTES: Final = 2
_NOT_INTERLEAVED, _ZEROS_OUTSIDE = 0, 0


@final
class TensorMapEncoder:
    """The driver's function, ready to be called; threads may share one."""

    def __init__(self, library: Any) -> None:
        """`library` is libcuda, by ctypes."""
        self._encode = library.cuTensorMapEncodeTiled
        void, integer = ctypes.c_void_p, ctypes.c_uint32
        self._encode.argtypes = [void, integer, integer, *[void] * 5, *[integer] * 4]

    def encode(self, tensor: TensorMap) -> bytes:
        """The 128 bytes of an `ag_tensor_map`, to lie at a multiple of 64.

        Errors:  A642 with every known reason, or the driver's status where there is none.
        """
        rank = len(tensor.sizes)
        memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        offset = -ctypes.addressof(memory) % _ALIGNMENT
        status = self._encode(
            ctypes.addressof(memory) + offset,
            _DATA_TYPES[tensor.element.name],
            rank,
            tensor.address,
            (ctypes.c_uint64 * rank)(*tensor.sizes),
            (ctypes.c_uint64 * 4)(*tensor.strides),
            (ctypes.c_uint32 * rank)(*tensor.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            _NOT_INTERLEAVED,
            _SWIZZLES[tensor.swizzle],
            _PROMOTE_128_BYTES,
            _ZEROS_OUTSIDE,
        )
        if status:
            tensor.check()
            reason = f"the CUDA driver says {status}"
            raise AttnError(TensorMapRefused(None, tensor.name, reason))
        return memory.raw[offset : offset + _BYTES]
