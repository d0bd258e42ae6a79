"""How calls are started and timed on a GPU, with a PyTorch that is made up for it.

The made-up GPU writes down every kernel that is started; a graph repeats those that were started on
the stream that was captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attngen.bench.machines import NumpyMachine, TorchMachine, open_machine

MS_PER_KERNEL = 2.0


class FakeArray:
    def __init__(self, host: Any) -> None:
        self.host = host

    def clone(self) -> FakeArray:
        return FakeArray(self.host.copy())

    def fill_(self, value: float) -> None:
        self.host[...] = value


class FakeGpu:
    """Time is counted in kernels that have run."""

    def __init__(self) -> None:
        self.kernels = 0
        self.recording: list[Callable[[], None]] | None = None
        self.is_broken_in_capture = False

    def launch(self, kernel: Callable[[], None], *, on_own_stream: bool = False) -> None:
        if self.recording is not None and self.is_broken_in_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.recording is not None and not on_own_stream:
            self.recording.append(kernel)
            return
        self.kernels += 1
        kernel()


class FakeGraph:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.kernels: list[Callable[[], None]] = []

    def replay(self) -> None:
        for kernel in self.kernels:
            self.gpu.launch(kernel)


def fake_torch(gpu: FakeGpu) -> Any:
    @contextmanager
    def graph(made: FakeGraph) -> Iterator[None]:
        gpu.recording = made.kernels
        try:
            yield
        finally:
            gpu.recording = None

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = gpu.kernels

        def synchronize(self) -> None:
            return

        def elapsed_time(self, end: Event) -> float:
            return MS_PER_KERNEL * (end.at - self.at)

    cuda = SimpleNamespace(
        CUDAGraph=lambda: FakeGraph(gpu),
        Event=Event,
        get_device_name=lambda: "NVIDIA H200",
        graph=graph,
        is_available=lambda: True,
        synchronize=lambda: None,
    )
    return SimpleNamespace(cuda=cuda, equal=lambda a, b: np.array_equal(a.host, b.host))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    monkeypatch.setitem(sys.modules, "torch", fake_torch(made))
    return made


def attention(gpu: FakeGpu, *, on_own_stream: bool = False) -> Callable[[], FakeArray]:
    """A library with one kernel and an output of its own."""
    output = FakeArray(np.zeros(4))

    def kernel() -> None:
        output.host[...] = 7.0

    def call() -> FakeArray:
        gpu.launch(kernel, on_own_stream=on_own_stream)
        return output

    return call


def test_a_graph_is_replayed_where_it_can_be_captured(gpu: FakeGpu) -> None:
    timer = TorchMachine("cuda").timer(attention(gpu))
    assert timer.mode == "graph"
    assert timer(5) == MS_PER_KERNEL


def test_an_empty_graph_is_not_taken_for_a_fast_one(gpu: FakeGpu) -> None:
    timer = TorchMachine("cuda").timer(attention(gpu, on_own_stream=True))
    assert timer.mode == "eager"
    assert timer(5) == MS_PER_KERNEL


def test_what_cannot_be_captured_is_called(gpu: FakeGpu) -> None:
    gpu.is_broken_in_capture = True
    timer = TorchMachine("cuda").timer(attention(gpu))
    assert timer.mode == "eager"
    assert timer(3) == MS_PER_KERNEL


def test_the_call_before_the_timed_ones_is_not_timed(gpu: FakeGpu) -> None:
    timer = TorchMachine("cuda").timer(attention(gpu))
    before = gpu.kernels
    assert timer(4) == MS_PER_KERNEL
    assert gpu.kernels == before + 5


def test_a_gpu_needs_pytorch_that_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.bench.machines.find_spec", lambda name: None)
    assert isinstance(open_machine("cpu"), NumpyMachine)
    with pytest.raises(RuntimeError, match="PyTorch, which is not installed"):
        open_machine("cuda")
    monkeypatch.setattr("attngen.bench.machines.find_spec", lambda name: name)
    blind = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", blind)
    with pytest.raises(RuntimeError, match="PyTorch sees no GPU"):
        open_machine("cuda")


def test_freed_memory_is_poisoned_and_its_addresses_are_known() -> None:
    pytest.importorskip("torch", reason="needs PyTorch's allocator")
    machine = TorchMachine("cpu")
    addresses = machine.poison_free_memory((8, 1024, 1024), "fp32")
    assert 1 <= len(addresses) <= 3
    assert not machine.is_finite(machine.poisoned((3, 5), "bf16"))
    assert machine.is_finite(machine.randn((3, 5), "bf16", 0))
    first, again = (machine.asnumpy(machine.randn((7, 2), "fp16", 4)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
