"""GPUs in CPU memory: tensors that look like PyTorch's, and a driver that keeps what it is told.

What a call launches can be read back argument by argument; nothing runs.
"""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from attngen.codegen.arguments import ArgumentLayout
from tests.toolchain.fake_cuda import FakeDriver

FIRST_STREAM = 700


class FakeGpus(FakeDriver):
    """Devices of any compute capability; `FIRST_STREAM + index` is the current stream of each."""

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        super().__init__(len(capabilities))
        self.capabilities = capabilities
        self.allocated: list[tuple[int, ...]] = []
        self.torch = SimpleNamespace(
            is_grad_enabled=lambda: True,
            _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: FIRST_STREAM + index),
            **{name: _Dtype(name) for name in ("float32", "float16", "int16", "int32", "int64")},
        )

    def capability(self, index: int) -> tuple[int, int]:
        return self.capabilities[index]

    def tensor(self, array: Any, index: int = 0) -> FakeTensor:
        return FakeTensor(self, np.asarray(array), index)


class _Dtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


class _Device(NamedTuple):
    type: str
    index: int


class FakeTensor:
    """The part of a CUDA tensor that attngen looks at; its memory is that of `array`."""

    requires_grad = False

    def __init__(self, gpus: FakeGpus, array: Any, index: int) -> None:
        self.gpus, self.array = gpus, array
        self.dtype = getattr(gpus.torch, array.dtype.name)
        self.device = _Device("cuda", index)
        self.shape = array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def __getitem__(self, at: Any) -> Any:
        return self.array[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.array[at] = value

    def is_neg(self) -> bool:
        return False

    def new_empty(self, shape: tuple[int, ...], dtype: Any) -> FakeTensor:
        self.gpus.allocated.append(shape)
        return FakeTensor(self.gpus, np.full(shape, 7, dtype.name), self.device.index)


def read_block(layout: ArgumentLayout, block: bytes) -> dict[str, Any]:
    """The argument struct of a launch, by member."""
    assert len(block) == layout.size
    return {
        field.name: struct.unpack_from(f"<{field.format}", block, field.offset)[0]
        for field in layout.fields
    }
