"""Where a benchmark runs: a GPU through PyTorch, or a CPU for a dry run.

The CPU has PyTorch's arrays where PyTorch is installed, else NumPy's.  Its times mean nothing; it
is there so that the whole path runs without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attngen.backend.device import numpy_dtype

__all__ = ["Array", "Machine", "NumpyMachine", "Timer", "TorchMachine", "open_machine"]

Array: TypeAlias = Any
_TORCH_NAME = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Timer(Protocol):
    """One call, made ready to be timed."""

    mode: str
    """How it is started: "graph" is the replay of a CUDA graph, "eager" a call from Python."""

    def __call__(self, repeats: int) -> float:
        """Milliseconds of one call: so many in a row, after one that is not timed."""


class Machine(Protocol):
    kind: Literal["cuda", "cpu"]
    name: str
    has_torch: bool

    def randn(self, shape: Sequence[int], dtype: str, seed: int) -> Array:
        """Normally distributed numbers; contiguous."""

    def asarray(self, host: NDArray[Any]) -> Array:
        """A NumPy array on the machine; bf16 is that of `ml_dtypes`."""

    def asnumpy(self, array: Array) -> NDArray[np.float32]:
        """The values as float32."""

    def poisoned(self, shape: Sequence[int], dtype: str) -> Array:
        """A new array full of NaN."""

    def poison(self, array: Array) -> None:
        """Fill an array with NaN."""

    def poison_free_memory(self, shape: Sequence[int], dtype: str) -> frozenset[int]:
        """Free some arrays full of NaN, so that the next output lies in one; their addresses."""

    def address(self, array: Array) -> int:
        """Where the first element of an array lies."""

    def is_finite(self, array: Array) -> bool:
        """Whether no element is NaN or infinite."""

    def synchronize(self) -> None:
        """Wait until everything is done; raises where the device is lost."""

    def timer(self, call: Callable[[], Array]) -> Timer:
        """A call to be timed; it was made before."""


def open_machine(kind: Literal["cuda", "cpu"]) -> Machine:
    """The machine of a kind.  Errors: RuntimeError where PyTorch or its GPU is missing."""
    has_torch = find_spec("torch") is not None
    if kind == "cpu":
        return TorchMachine("cpu") if has_torch else NumpyMachine()
    if not has_torch:
        raise RuntimeError("the inputs are arrays of PyTorch, which is not installed")
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU; --device cpu makes a dry run")
    return TorchMachine("cuda")


class _HostTimer:
    mode = "eager"

    def __init__(self, call: Callable[[], Array]) -> None:
        self._call = call

    def __call__(self, repeats: int) -> float:
        self._call()
        start = time.perf_counter()
        for _ in range(repeats):
            self._call()
        return (time.perf_counter() - start) * 1e3 / repeats


class NumpyMachine:
    """The CPU without PyTorch."""

    kind: Literal["cuda", "cpu"] = "cpu"
    name = "cpu"
    has_torch = False

    def randn(self, shape: Sequence[int], dtype: str, seed: int) -> Array:
        return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))

    def asarray(self, host: NDArray[Any]) -> Array:
        return host

    def asnumpy(self, array: Array) -> NDArray[np.float32]:
        return np.asarray(array, np.float32)

    def poisoned(self, shape: Sequence[int], dtype: str) -> Array:
        return np.full(shape, np.nan, numpy_dtype(dtype))

    def poison(self, array: Array) -> None:
        array[...] = np.nan

    def poison_free_memory(self, shape: Sequence[int], dtype: str) -> frozenset[int]:
        return frozenset()

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def is_finite(self, array: Array) -> bool:
        return bool(np.isfinite(self.asnumpy(array)).all())

    def synchronize(self) -> None:
        return

    def timer(self, call: Callable[[], Array]) -> Timer:
        return _HostTimer(call)


class TorchMachine:
    """A GPU, or the CPU, with arrays of PyTorch."""

    has_torch = True

    def __init__(self, kind: Literal["cuda", "cpu"]) -> None:
        import torch

        self._torch = torch
        self.kind: Literal["cuda", "cpu"] = kind
        self.name = "cpu" if kind == "cpu" else str(torch.cuda.get_device_name())

    def randn(self, shape: Sequence[int], dtype: str, seed: int) -> Array:
        generator = self._torch.Generator(self.kind).manual_seed(seed)
        wide = self._torch.randn(*shape, generator=generator, device=self.kind)
        return wide.to(self._dtype(dtype))

    def asarray(self, host: NDArray[Any]) -> Array:
        torch = self._torch
        if host.dtype.name == "bfloat16":  # which `from_numpy` does not know
            return torch.from_numpy(host.view(np.int16)).to(self.kind).view(torch.bfloat16)
        return torch.from_numpy(host).to(self.kind)

    def asnumpy(self, array: Array) -> NDArray[np.float32]:
        host: NDArray[np.float32] = array.float().cpu().numpy()
        return host

    def poisoned(self, shape: Sequence[int], dtype: str) -> Array:
        nan = float("nan")
        return self._torch.full(tuple(shape), nan, dtype=self._dtype(dtype), device=self.kind)

    def poison(self, array: Array) -> None:
        array.fill_(float("nan"))

    def poison_free_memory(self, shape: Sequence[int], dtype: str) -> frozenset[int]:
        self.synchronize()
        return frozenset(a.data_ptr() for a in [self.poisoned(shape, dtype) for _ in range(3)])

    def address(self, array: Array) -> int:
        return int(array.data_ptr())

    def is_finite(self, array: Array) -> bool:
        return bool(self._torch.isfinite(array).all())

    def synchronize(self) -> None:
        if self.kind == "cuda":
            self._torch.cuda.synchronize()

    def timer(self, call: Callable[[], Array]) -> Timer:
        if self.kind == "cpu":
            return _HostTimer(call)
        graph = self._capture(call)
        mode, start = ("eager", call) if graph is None else ("graph", graph.replay)
        return _EventTimer(self._torch, mode, start)

    def _capture(self, call: Callable[[], Array]) -> Any | None:
        """A CUDA graph of the call; None where it cannot be captured or gives another result.

        A library that starts its kernels on a stream of its own leaves the graph empty, and
        an empty graph is very fast.  So the graph is replayed over a poisoned output.
        """
        torch = self._torch
        right = call().clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                output = call()
        except Exception:
            self.synchronize()
            return None
        self.poison(output)
        graph.replay()
        self.synchronize()
        return graph if torch.equal(output, right) else None

    def _dtype(self, name: str) -> Any:
        return getattr(self._torch, _TORCH_NAME[name])


class _EventTimer:
    """Times on the GPU, between two CUDA events.

    The call that is not timed leaves the inputs in the L2 cache as far as they fit, and keeps the
    GPU busy until the timed ones stand in the queue.
    """

    def __init__(self, torch: Any, mode: str, call: Callable[[], object]) -> None:
        self.mode = mode
        self._call = call
        self._torch = torch
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, repeats: int) -> float:
        self._call()
        self._start.record()
        for _ in range(repeats):
            self._call()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / repeats
