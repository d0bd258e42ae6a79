"""CuPy and PyTorch, as the tests of the kernels use them: the same steps in both."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import pytest

from attngen.backend.device import view
from attngen.engines.outputs import reach

__all__ = ["Cupy", "Library", "Torch", "digest"]

Array = Any


class Library(Protocol):
    """What a test asks of an array library; `array` is always one on the GPU."""

    name: str

    def asarray(self, host: Array) -> Array:
        """A contiguous copy on the GPU."""

    def mirror(self, host: Array) -> Array:
        """A copy with the strides of `host`, and its address modulo 256 bytes."""

    def asnumpy(self, array: Array) -> Array:
        """The values on the host, widened from bf16 to fp32; waits for the current stream."""

    def bits(self, array: Array) -> str:
        """A digest of a contiguous array's bytes; waits for the current stream."""

    def poison(self, array: Array) -> None:
        """Make every element of a contiguous array NaN, on the current stream."""

    def used_bytes(self) -> int:
        """Memory that arrays of this library hold."""


def digest(host: Array) -> str:
    """Bytes of any number as a few characters, which a failing test can print."""
    return hashlib.sha256(np.ascontiguousarray(host).tobytes()).hexdigest()[:16]


def read_region(host: Array) -> tuple[Array, int]:
    """The bytes that a strided array lies in, at the same address modulo 256; its first element."""
    begin, end = reach(view(host, "host"))
    padding = begin % 256
    region = np.zeros(padding + end - begin, np.uint8)
    region[padding:] = np.frombuffer(ctypes.string_at(begin, end - begin), np.uint8)
    return region, padding + host.ctypes.data - begin


class Cupy:
    name = "cupy"

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy")

    def asarray(self, host: Array) -> Array:
        if host.dtype == ml_dtypes.bfloat16:
            return self.cupy.asarray(host.view(np.uint16)).view(ml_dtypes.bfloat16)
        return self.cupy.asarray(host)

    def mirror(self, host: Array) -> Array:
        region, first = read_region(host)
        memory = self.cupy.asarray(region)
        assert memory.data.ptr % 256 == 0
        return self.cupy.ndarray(
            host.shape, host.dtype, memptr=memory.data + first, strides=host.strides
        )

    def asnumpy(self, array: Array) -> Array:
        if array.dtype == ml_dtypes.bfloat16:
            array = self.cupy.ascontiguousarray(array).view(np.uint16)
            return self.cupy.asnumpy(array).view(ml_dtypes.bfloat16).astype(np.float32)
        return self.cupy.asnumpy(array)

    def bits(self, array: Array) -> str:
        assert array.flags.c_contiguous
        return digest(self.cupy.asnumpy(array.reshape(-1).view(np.uint8)))

    def poison(self, array: Array) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            array.data.memset_async(0xFF, array.nbytes)

    def used_bytes(self) -> int:
        return int(self.cupy.get_default_memory_pool().used_bytes())


class Torch:
    name = "torch"

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")

    def asarray(self, host: Array) -> Array:
        host = np.array(host)  # writable and contiguous
        if host.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(host.view(np.int16)).cuda().view(self.torch.bfloat16)
        return self.torch.from_numpy(host).cuda()

    def mirror(self, host: Array) -> Array:
        if any(stride < 0 for stride in host.strides):
            pytest.skip("PyTorch has no negative strides")
        size = host.itemsize
        region, first = read_region(host)
        padded = np.zeros(-(-region.size // size) * size, np.uint8)
        padded[: region.size] = region
        memory = self.asarray(padded.view(host.dtype))
        assert memory.data_ptr() % 256 == 0
        strides = [stride // size for stride in host.strides]
        return memory.as_strided(host.shape, strides, memory.storage_offset() + first // size)

    def asnumpy(self, array: Array) -> Array:
        if array.dtype == self.torch.bfloat16:
            array = array.float()
        return array.cpu().numpy()

    def bits(self, array: Array) -> str:
        assert array.is_contiguous()
        return digest(array.view(-1).view(self.torch.uint8).cpu().numpy())

    def poison(self, array: Array) -> None:
        array.fill_(float("nan"))

    def used_bytes(self) -> int:
        return int(self.torch.cuda.memory_allocated())
