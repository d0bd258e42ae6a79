"""A GPU that is the CPU: CuPy's memory, streams, graphs and events in a few lines, and a driver
whose launches run the kernel's text on the host.

So what the tuner does on a GPU runs to its end without one, kernels and graphs included.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from attngen.cpu.run import MemoryRange, run_on_cpu
from tests.toolchain.fake_cuda import FakeDriver

__all__ = ["PretendCupy", "PretendDriver"]

_EVERYWHERE = MemoryRange(0, 1 << 62, is_writable=True)


class PretendDriver(FakeDriver):
    """Runs the library that stands for a cubin; a stream that is captured keeps the launch."""

    def __init__(self, libraries: dict[bytes, Path]) -> None:
        super().__init__(1)
        self.started = 0
        self.capture: list[Callable[[], None]] | None = None
        self._libraries = libraries
        self._functions: dict[int, tuple[Path, str]] = {}

    def load_module(self, cubin: bytes) -> Any:
        return self._libraries[cubin]

    def find_function(self, module: Any, kernel: str) -> tuple[int, Any]:
        number = len(self._functions) + 1
        self._functions[number] = module, kernel
        return number, module

    def set_max_dynamic_shared(self, function: int, size: int) -> None:
        assert size <= self.limit

    def launch(
        self, function: int, grid: int, threads: int, shared: int, stream: int, block: bytes
    ) -> int:
        library, kernel = self._functions[function]

        def run() -> None:
            self.started += 1
            run_on_cpu(
                library, kernel, block, grid=grid, threads=threads, shared_bytes=shared,
                ranges=[_EVERYWHERE], check=False,
            )  # fmt: skip

        if self.capture is None:
            run()
        else:
            self.capture.append(run)
        return 0


class _Memory:
    """An array of bytes."""

    def __init__(self, array: Any) -> None:
        self.array = np.array(array)
        self.nbytes = self.array.nbytes
        self.data = SimpleNamespace(ptr=self.array.ctypes.data, mem=self.array)


class PretendCupy:
    """As much of CuPy as a bench uses; `can_capture` False is a driver that refuses."""

    def __init__(self, driver: PretendDriver, *, can_capture: bool = True) -> None:
        class Stream:
            ptr = 77

            def __init__(self, *, non_blocking: bool) -> None:
                assert non_blocking

            def synchronize(self) -> None:
                assert driver.capture is None

            def begin_capture(self) -> None:
                if not can_capture:
                    raise RuntimeError("it cannot be captured")
                driver.capture = []

            def end_capture(self) -> Any:
                captured, driver.capture = driver.capture, None
                assert captured
                return SimpleNamespace(launch=lambda stream: [run() for run in captured])

        class Event:
            def record(self, stream: Stream) -> None:
                self.at = float(driver.started)

            def synchronize(self) -> None:
                assert driver.capture is None

        def memset(pointer: int, value: int, size: int, stream: int) -> None:
            _bytes_at(pointer, size)[...] = value

        self.ndarray = _Memory
        self.empty = lambda size, dtype: _Memory(np.full(size, 7, dtype))
        self.asarray = _Memory
        self.asnumpy = lambda memory: memory.array.copy()
        self.cuda = SimpleNamespace(
            Device=lambda index: SimpleNamespace(use=lambda: driver.set_device(index)),
            Stream=Stream,
            Event=Event,
            get_elapsed_time=lambda first, last: last.at - first.at,
            runtime=SimpleNamespace(memsetAsync=memset, deviceSynchronize=lambda: None),
        )


def _bytes_at(pointer: int, size: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
