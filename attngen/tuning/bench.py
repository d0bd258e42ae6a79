"""A device with the arrays of some calls on it, which runs one candidate after the other.

It lives in a process of its own (`worker.py`), since a candidate may destroy everything here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, final

import numpy as np

from attngen.backend.device import ITEM_BYTES, ArrayView, cuda_device, numpy_dtype, view
from attngen.binding import Binding, bind
from attngen.engines.outputs import Outputs, due_workspaces, workspace_shape
from attngen.ir.attention import Attention
from attngen.tuning.build import Build
from attngen.tuning.call import Call, in_bhsd, make_operands
from attngen.tuning.exam import Exam, Verdict, judge

if TYPE_CHECKING:
    from attngen.engines.cuda_engine import Launched

__all__ = ["Bench", "CudaBench", "HostBench", "MakeBench"]

Array: TypeAlias = Any

_NAN_BYTE: Final = 0xFF
"""All bytes like this are NaN in every floating type."""


class Bench(Protocol):
    """Candidates are known by the names that they were loaded under."""

    def wake(self) -> None:
        """Make the device ready, which may take seconds; `open` does what is left of that."""

    def open(self, exams: Sequence[Exam]) -> None:
        """Put the arrays of the calls on the device; the first call is the one to time.

        Again: other calls take their place, and what is loaded stays.
        """

    def load(self, name: str, build: Build) -> None:
        """Make a candidate ready to run."""

    def check(self, name: str, first: int = 0) -> Verdict:
        """Let it sit the exams from this one on; the verdict is the worst.  Errors:  WrongError."""

    def sample(self, name: str, repeats: int) -> float:
        """Milliseconds of one call: so many in a row, after one that is not timed."""

    @property
    def mode(self) -> str:
        """How calls are timed: "graph" or "events"."""

    def is_lost(self) -> bool:
        """Whether the device does nothing more for this process."""


MakeBench: TypeAlias = Callable[[], Bench]
"""Can be pickled: a class or function of a module, or a `partial` of one."""


# ---- the CPU -------------------------------------------------------------------------------


class HostBench:
    """The CUDA text on the CPU, where faults are found; its times mean nothing."""

    mode = "events"

    def __init__(self) -> None:
        self._exams: list[tuple[Exam, dict[str, Array]]] = []
        self._builds: dict[str, Build] = {}

    def wake(self) -> None:
        """A CPU is awake."""

    def open(self, exams: Sequence[Exam]) -> None:
        self._exams = [(exam, _make_arrays(exam)) for exam in exams]

    def load(self, name: str, build: Build) -> None:
        self._builds[name] = build

    def check(self, name: str, first: int = 0) -> Verdict:
        verdicts = []
        for number, (exam, arrays) in list(enumerate(self._exams))[first:]:
            arrays["o"].view(np.uint8)[...] = _NAN_BYTE
            self._run(name, number)
            out = arrays["o"] if exam.call.layout == "bhsd" else arrays["o"].swapaxes(1, 2)
            verdicts.append(judge(out, exam))
        return _worst(verdicts)

    def sample(self, name: str, repeats: int) -> float:
        self._run(name, 0)
        start = time.perf_counter()
        for _ in range(repeats):
            self._run(name, 0)
        return (time.perf_counter() - start) * 1e3 / repeats

    def is_lost(self) -> bool:
        return False

    def _run(self, name: str, number: int) -> None:
        from attngen.engines.cpu_engine import run_on_host

        build = self._builds[name]
        assert isinstance(build.code, Path)
        exam, arrays = self._exams[number]
        call = exam.call
        views = {n: in_bhsd(view(x, n), call.layout) for n, x in arrays.items()}
        tensors = {n: view(np.ascontiguousarray(x), n) for n, x in call.tensors.items()}
        binding = _bind(build.rendered.program.attention, views, tensors, call)
        program = build.rendered.program
        scratch = {
            w.name: np.empty(workspace_shape(w, binding), numpy_dtype(w.element))
            for w in due_workspaces(program, binding)
        }
        outputs = Outputs(o=views["o"], **{n: view(x, n) for n, x in scratch.items()})
        run_on_host(build.rendered, binding, outputs, build.code)


# ---- a GPU ---------------------------------------------------------------------------------


@final
class CudaBench:
    """A GPU through CuPy: memory, streams, graphs and events; kernels start as in every call.

    Nothing is computed with CuPy's own kernels, which would have to be compiled.
    """

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._mode = "graph"
        self._exams: list[Exam] = []
        self._memory: dict[tuple[int, str], Array] = {}
        self._builds: dict[str, tuple[Build, Any]] = {}
        self._started: dict[str, Callable[[], object]] = {}

    @property
    def mode(self) -> str:
        return self._mode

    def wake(self) -> None:
        import cupy

        cupy.cuda.Device(self._index).use()
        cupy.cuda.runtime.deviceSynchronize()  # makes the context

    def open(self, exams: Sequence[Exam]) -> None:
        import cupy

        cupy.cuda.Device(self._index).use()
        self._memory.clear()
        self._started.clear()
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._exams = list(exams)
        for number, exam in enumerate(exams):
            tensors = {_captured(name): array for name, array in exam.call.tensors.items()}
            for name, array in {**_make_arrays(exam), **tensors}.items():
                raw = np.frombuffer(array.tobytes() or bytes(1), np.uint8)
                self._memory[number, name] = cupy.asarray(raw)
        cupy.cuda.runtime.deviceSynchronize()  # the copies have a stream of their own

    def load(self, name: str, build: Build) -> None:
        from attngen.backend.launch import CudaModule
        from attngen.engines.cuda_engine import prepare_on_gpu

        assert isinstance(build.code, bytes)
        module = CudaModule(build.code, name=name)
        prepare_on_gpu(build.rendered.program, module, cuda_device(self._index))
        self._builds[name] = build, module

    def check(self, name: str, first: int = 0) -> Verdict:
        verdicts = []
        for number, exam in list(enumerate(self._exams))[first:]:
            memory = self._memory[number, "o"]
            self._cupy.cuda.runtime.memsetAsync(
                memory.data.ptr, _NAN_BYTE, memory.nbytes, self._stream.ptr
            )
            kept = self._launch(number, name)
            self._stream.synchronize()
            del kept
            shape = exam.call.shape("o")
            host = self._cupy.asnumpy(memory)[: _count(shape) * ITEM_BYTES[exam.dtype]]
            found = host.view(numpy_dtype(exam.dtype)).reshape(shape)
            found = found if exam.call.layout == "bhsd" else found.swapaxes(1, 2)
            verdicts.append(judge(found, exam))
        return _worst(verdicts)

    def sample(self, name: str, repeats: int) -> float:
        start = self._started.get(name)
        if start is None:
            start = self._started[name] = self._make_start(name)
        first, last = self._events
        start()  # keeps the GPU busy until the timed ones stand in the queue
        first.record(self._stream)
        for _ in range(repeats):
            start()
        last.record(self._stream)
        last.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(first, last)) / repeats

    def is_lost(self) -> bool:
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except Exception:
            return True
        return False

    def _make_start(self, name: str) -> Callable[[], object]:
        """Replays a CUDA graph of the launches, or starts them one by one."""
        launched, scratch = self._launch(0, name)
        self._stream.synchronize()
        if launched is None:
            return lambda: None

        def start_each() -> object:
            for each in launched.ready:
                each.start(self._stream.ptr, launched.block)
            return scratch  # which has to live as long as this function

        try:
            self._stream.begin_capture()
            try:
                start_each()
            finally:
                graph = self._stream.end_capture()
        except Exception:  # CuPy's own errors, whose home is private
            self._mode = "events"
            return start_each

        def replay() -> object:
            graph.launch(self._stream)
            return scratch

        return replay

    def _launch(self, number: int, name: str) -> tuple[Launched | None, list[Array]]:
        """Queue the launches of a call; what was queued, and the memory that it needs."""
        from attngen.engines.cuda_engine import launch_on_gpu

        build, module = self._builds[name]
        program, exam = build.rendered.program, self._exams[number]
        call = exam.call
        views = {
            n: in_bhsd(self._view(self._memory[number, n], call.shape(n), exam.dtype), call.layout)
            for n in "qkvo"
        }
        tensors = {
            n: self._view(self._memory[number, _captured(n)], x.shape, view(x, n).dtype)
            for n, x in call.tensors.items()
        }
        binding = _bind(program.attention, views, tensors, call)
        scratch, extra = [], {}
        for workspace in due_workspaces(program, binding):
            shape = workspace_shape(workspace, binding)
            memory = self._cupy.empty(_count(shape) * ITEM_BYTES[workspace.element], np.uint8)
            scratch.append(memory)
            extra[workspace.name] = self._view(memory, shape, workspace.element)
        outputs = Outputs(o=views["o"], **extra)
        launched = launch_on_gpu(
            build.rendered,
            module,
            binding,
            outputs,
            device=cuda_device(self._index),
            stream=self._stream.ptr,
        )
        return launched, scratch

    def _view(self, memory: Array, shape: tuple[int, ...], dtype: str) -> ArrayView:
        strides = tuple(_count(shape[i + 1 :]) for i in range(len(shape)))
        device = cuda_device(self._index)
        return ArrayView(memory.data.ptr, shape, strides, dtype, device, memory)


# ---- both ----------------------------------------------------------------------------------


def _captured(name: str) -> str:
    """A captured tensor, which may have the name of an output."""
    return f"tensor {name}"


def _make_arrays(exam: Exam) -> dict[str, Array]:
    """q, k, v and an output, in the call's layout."""
    made = make_operands(exam.dtype, exam.call)
    return {**made, "o": np.empty(exam.call.shape("o"), numpy_dtype(exam.dtype))}


def _bind(
    attention: Attention,
    views: Mapping[str, ArrayView],
    tensors: Mapping[str, ArrayView],
    call: Call,
) -> Binding:
    return bind(attention, views["q"], views["k"], views["v"], tensors, call.params)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    return Verdict(
        max(v.max_error for v in verdicts),
        max(v.bound_ratio for v in verdicts),
    )


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
