"""Stand-ins for NVRTC and the CUDA driver, for tests on a machine without a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attngen.backend.device import GpuTraits
from attngen.backend.launch import DriverError
from attngen.backend.nvrtc import Emit, Outcome
from attngen.cpu.tensor_map import encode_for_cpu
from attngen.tensor_map import TensorMap


class FakeCompiler:
    """Compiles to the text itself, and counts."""

    def __init__(self, *, archs: tuple[int, ...] = (80, 86, 89, 90, 100, 120)) -> None:
        self.archs = archs
        self.version_parts = (13, 5)
        self.build_text = "13.5.37"
        self.outcome: Outcome | None = None
        self.runs: list[tuple[str, ...]] = []
        self._lock = threading.Lock()

    def version(self) -> tuple[int, int]:
        return self.version_parts

    def build(self) -> str:
        return self.build_text

    def supported_archs(self) -> tuple[int, ...]:
        return self.archs

    def run(self, source: str, file_name: str, options: tuple[str, ...], emit: Emit) -> Outcome:
        with self._lock:
            self.runs.append(options)
        if self.outcome is not None:
            return self.outcome
        binary = f"{emit} {options[0]} {source}".encode()
        return Outcome("NVRTC_SUCCESS", binary, "")


class FakeDriver:
    """Several devices, handles per device, and the state that a launch must not disturb.

    A thread has no CUDA context before it names a device, as with the real driver.
    """

    def __init__(self, devices: int = 2, *, shared_limit: int = 227 * 1024) -> None:
        self.process_id = os.getpid()
        self.devices = devices
        self.limit = shared_limit
        self.is_capturing_now = False
        self.launch_status = 0
        self.load_status = 0
        self.loads: list[int] = []
        self.allocated: list[int] = []
        self.launches: list[dict[str, Any]] = []
        self.max_dynamic: dict[int, int] = {}
        self._thread = threading.local()
        self._lock = threading.Lock()

    @contextmanager
    def current(self, index: int) -> Iterator[None]:
        before = self.current_device()
        self.set_device(index)
        yield
        self.set_device(before)

    def count_devices(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, index: int) -> None:
        self._thread.device = index
        self._thread.has_context = True

    def capability(self, index: int) -> tuple[int, int]:
        return (9, 0)

    def shared_limit(self, index: int) -> int:
        return self.limit

    def multiprocessors(self, index: int) -> int:
        return 132

    def traits(self, index: int) -> GpuTraits:
        """Those of an H200, with this driver's capability and limit."""
        return GpuTraits(
            name="NVIDIA H200",
            capability=self.capability(index),
            multiprocessors=self.multiprocessors(index),
            shared_bytes=self.limit,
            l2_bytes=60 << 20,
            memory_khz=3_201_000,
            memory_bits=6016,
        )

    def encode_tensor_map(self, tensor: TensorMap) -> bytes:
        return encode_for_cpu(tensor)

    def describe_version(self) -> str:
        return "13.0"

    def describe_status(self, status: int) -> str:
        return f"CUDA_ERROR_{status}"

    def load_module(self, cubin: bytes) -> Any:
        if self.load_status:
            raise DriverError(self.load_status)
        with self._lock:
            self.loads.append(self.current_device())
        return ("module", self.current_device())

    def find_function(self, module: Any, kernel: str) -> tuple[int, Any]:
        assert module[1] == self.current_device()
        return 1000 * (module[1] + 1) + len(kernel), module

    def set_max_dynamic_shared(self, function: int, size: int) -> None:
        assert function // 1000 - 1 == self.current_device()
        self.max_dynamic[function] = size

    def is_capturing(self, stream: int) -> bool:
        return self.is_capturing_now

    def stream_id(self, stream: int) -> int:
        if not getattr(self._thread, "has_context", False):
            raise DriverError(201)  # CUDA_ERROR_INVALID_CONTEXT
        return stream

    def allocate_zeros(self, size: int) -> int:
        with self._lock:
            self.allocated.append(size)
        return 1 << 20

    def launch(
        self, function: int, grid: int, threads: int, shared: int, stream: int, block: bytes
    ) -> int:
        if not getattr(self._thread, "has_context", False):
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        if function // 1000 - 1 != self.current_device():
            return 400  # CUDA_ERROR_INVALID_HANDLE
        if shared > max(48 * 1024, self.max_dynamic.get(function, 0)):
            return 1  # CUDA_ERROR_INVALID_VALUE
        with self._lock:
            self.launches.append(
                {
                    "device": self.current_device(),
                    "grid": grid,
                    "threads": threads,
                    "shared": shared,
                    "stream": stream,
                    "block": block,
                }
            )
        return self.launch_status
