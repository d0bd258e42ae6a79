"""How long attngen itself takes in a call like the one before it: a steady call.

    python -m benchmarks.steady_call [--repeats 40] [--out benchmarks/results/FILE.jsonl]

    read      looking at the arrays and params of a call: its key, and the plan of that key
    fill      the argument struct: addresses and params in a copy of the plan's bytes
    start     from there to the driver: stream, and each launch's process and device
    steady    a whole call, its new arrays and the driver's launch included
    nothing   the fakes alone: new arrays, the driver's launches
    share     steady - nothing: what attngen adds, which should be at most 10 us
    full      the same call with all its checks, for comparison
    operator  the call through `attngen.torch.operator`, where PyTorch is real
    eager     operator - nothing: what that adds, which should be at most 15 us
    flex      the like through `attngen.flex`, of Python functions that were traced before
    traced    the same, traced anew, as where nothing says whether the functions have changed

Where there is a GPU everything is real, and PyTorch is measured where it is installed.  Without
one the driver is a fake that does nothing, new arrays are made once and handed out again, and
tensors of PyTorch are fakes with the attributes of real ones, which take longer to read; arrays
of CuPy are CuPy's own, over memory of the CPU.  Prints the lowest of many repeats, in
microseconds, and what was fake.  One of the variants is a call of two launches, of which the
first summarises keys for the second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import platform
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np

import attngen
from attngen.backend import device as device_module
from attngen.backend import launch as launch_module
from attngen.backend.device import GpuTraits
from attngen.diagnostics.diagnostic import AttnError
from attngen.flex import attention, flex_attention
from attngen.flex import trace as trace_module
from attngen.flex.functions import call_library
from attngen.flex.remembered import Traces
from attngen.kernels import forward_mma
from attngen.tensor_map import TensorMap

CALLS = 500
"""Calls of one repeat: fewer launches than a GPU's queue takes before it makes the caller wait."""
SHAPES = {"q": (1, 4, 17, 64), "k": (1, 2, 17, 64), "v": (1, 2, 17, 64)}
"""So small that a GPU is done before the next call; the time of a call does not depend on them."""

PLAIN = "attention plain {\n    mask kv <= qpos\n}\n"
DOCUMENTS = """\
attention documents {
    param  left : int = 64 where 0 <= left
    param  cap : float = 50.0 where cap > 0
    tensor doc : int32[B, Skv]
    score  softcap(s, cap)
    mask   doc[b, qpos] == doc[b, kv] and kv <= qpos and kv >= qpos - left
}
"""


class Variant(NamedTuple):
    """What is called, and in how many launches; two need a tile of fewer than all rows."""

    name: str
    text: str
    schedule: str | None = None
    launches: int = 1


VARIANTS = (
    Variant("plain", PLAIN),
    Variant("documents", DOCUMENTS),
    Variant("documents_ahead", DOCUMENTS, "kernel forward_mma; tile q = 16, kv = 16", launches=2),
)


class FakeDriver:
    """One GPU of compute capability 9.0 on which every launch succeeds at once."""

    process_id = os.getpid()

    def count_devices(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        pass

    def capability(self, index: int) -> tuple[int, int]:
        return 9, 0

    def shared_limit(self, index: int) -> int:
        return 227 * 1024

    def multiprocessors(self, index: int) -> int:
        return 132

    def traits(self, index: int) -> GpuTraits:
        return GpuTraits(
            name="NVIDIA H200",
            capability=(9, 0),
            multiprocessors=132,
            shared_bytes=227 * 1024,
            l2_bytes=60 << 20,
            memory_khz=3_201_000,
            memory_bits=6016,
        )

    def encode_tensor_map(self, tensor: TensorMap) -> bytes:
        return bytes(128)

    def load_module(self, cubin: bytes) -> Any:
        return cubin

    def find_function(self, module: Any, kernel: str) -> tuple[int, Any]:
        return 1, module

    def set_max_dynamic_shared(self, function: int, size: int) -> None:
        pass

    def is_capturing(self, stream: int) -> bool:
        return False

    def stream_id(self, stream: int) -> int:
        return stream

    def allocate_zeros(self, size: int) -> int:
        return 0

    def launch(
        self, function: int, grid: int, threads: int, shared: int, stream: int, block: bytes
    ) -> int:
        return 0


class Name(NamedTuple):
    """A dtype of PyTorch: hashed and compared as quickly as the real one."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


class Place(NamedTuple):
    type: str
    index: int


class FakeTensor:
    """A CUDA tensor's attributes, all of them known beforehand; it can be traced."""

    __slots__ = ("_pointer", "_strides", "device", "dtype", "requires_grad", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Name, pointer: int) -> None:
        self._pointer, self.shape, self.dtype = pointer, shape, dtype
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        self._strides = tuple(strides)
        self.device, self.requires_grad = Place("cuda", 0), False

    def data_ptr(self) -> int:
        return self._pointer

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def is_neg(self) -> bool:
        return False

    def __getitem__(self, index: Any) -> Any:
        return call_library(operator.getitem, (self, index), {})

    @classmethod
    def __torch_function__(cls, *arguments: Any) -> Any:
        raise AssertionError("only whether it is there is asked: PyTorch's are known by it")


TORCH = SimpleNamespace(
    is_grad_enabled=lambda: True,
    get_default_dtype=lambda: "float32",
    bool=Name("bool"),
    int64=Name("int64"),
    float16=Name("float16"),
    float32=Name("float32"),
    int32=Name("int32"),
    _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 7),
)


class Library(NamedTuple):
    """Where arrays come from, what of the measurement is fake, and how to wait for the GPU."""

    name: str
    fake: str
    make: Callable[[tuple[int, ...], str], Any]
    wait: Callable[[], None]


def libraries() -> Iterator[Library]:
    """What is installed, on a GPU where there is one."""
    try:
        import cupy
    except ImportError:
        cupy = None
    if cupy is None or not has_gpu():
        yield Library("torch", "driver, new arrays, tensors", fake_tensors(), lambda: None)
        if cupy is not None:
            fake = "driver, new arrays, current stream"
            yield Library("cupy", fake, on_the_cpu(cupy), lambda: None)
        return
    yield Library("cupy", "", cupy.zeros, cupy.cuda.runtime.deviceSynchronize)
    try:
        import torch
    except ImportError:
        return

    def zeros(shape: tuple[int, ...], dtype: str) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")

    yield Library("torch", "", zeros, torch.cuda.synchronize)


def has_gpu() -> bool:
    try:
        launch_module.load_driver()
    except AttnError:
        return False
    return True


def fake_tensors() -> Callable[[tuple[int, ...], str], Any]:
    numbers = itertools.count(1)
    return lambda shape, dtype: FakeTensor(shape, getattr(TORCH, dtype), next(numbers) << 24)


def on_the_cpu(cupy: Any) -> Callable[[tuple[int, ...], str], Any]:
    """CuPy's arrays over memory of the CPU, which nobody reads or writes."""
    memory = np.empty(1 << 20, np.uint8)
    owner = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 0)
    place = cupy.cuda.MemoryPointer(owner, -memory.ctypes.data % 16)
    return lambda shape, dtype: cupy.ndarray(shape, dtype, place)


@contextmanager
def fakes(library: Library) -> Iterator[None]:
    """The fake GPU, and new arrays that are made once for each shape."""
    made: dict[Any, Any] = {}

    def allocate(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        found = made.get((shape, dtype))
        if found is None:
            theirs = {"fp16": "float16", "fp32": "float32", "int32": "int32"}[dtype]
            found = made[shape, dtype] = library.make(shape, theirs)
        return found

    def stream(index: int, like: Any) -> int:
        return 7

    before = sys.modules.get("torch")
    sys.modules["torch"] = cast(Any, TORCH)
    try:
        with (
            mock.patch.object(launch_module, "load_driver", return_value=FakeDriver()),
            mock.patch.object(device_module, "_allocate_torch", allocate),
            mock.patch.object(device_module, "_allocate_cupy", allocate),
            mock.patch.object(device_module, "_stream_of_cupy", stream),
            mock.patch.object(device_module, "_libraries", {}),
            mock.patch.object(device_module, "_torch_names", {}),
            mock.patch.object(trace_module, "_watch_torch", return_value=nullcontext()),
        ):
            yield
    finally:
        del sys.modules["torch"]
        if before is not None:
            sys.modules["torch"] = before


def lowest(function: Callable[[], Any], library: Library, repeats: int) -> float:
    """Microseconds of one call in the quickest repeat."""
    times = timeit.repeat(function, setup=library.wait, number=CALLS, repeat=repeats)
    return min(times) / CALLS * 1e6


def parts_of_call(library: Library, variant: Variant) -> dict[str, Callable[[], Any]]:
    """A steady call of a variant, and what it is made of, each to be called any number of times."""
    kernel = attngen.compile_text(variant.text, schedule=variant.schedule)
    q, k, v = (library.make(shape, "float16") for shape in SHAPES.values())
    named: dict[str, Any] = {}
    if kernel.attention.tensors:
        named = {"doc": library.make((1, SHAPES["k"][2]), "int32"), "left": 100, "cap": 30.0}
    least = 0 if variant.launches > 1 else forward_mma.PREPASS_KEYS
    with mock.patch.object(forward_mma, "PREPASS_KEYS", least):
        kernel(q, k, v, **named)

    def read() -> Any:
        return kernel._plans.read(q, k, v, named, None, "bhsd", False)

    call = read()
    plan = call.plan
    ready, new = plan._ready, plan._new
    assert len(ready) == variant.launches
    driver, device = ready[0].driver, ready[0].device
    made = [plan._allocate(shape, dtype, q) for shape, dtype, _ in new]
    pointers = [device_module.view(array, "new").pointer for array in made]
    block = plan._fill_block(call, pointers)
    stream = device_module.current_stream(device, q)

    def start(keep: Any = made) -> None:  # the block has the addresses of these arrays
        stream = plan._current_stream(device.index, q)
        if len(ready) > 1:
            plan._must_stay(stream, q)
        for launch in ready:
            launch.start(stream, block)

    def do_nothing() -> None:
        for shape, dtype, _ in new:
            plan._allocate(shape, dtype, q)
        for _, _, loaded, _, grid, threads, shared_bytes, *_ in ready:
            driver.launch(loaded.function, grid, threads, shared_bytes, stream, block)

    parts = {
        "read": read,
        "fill": lambda: plan._fill_block(call, pointers),
        "start": start,
        "steady": lambda: kernel(q, k, v, **named),
        "nothing": do_nothing,
        "full": lambda: kernel._call_in_full(q, k, v, False, None, "bhsd", False, named, None),
    }
    if library.name == "torch" and not library.fake:
        from attngen.torch import operator

        attend = operator(kernel)
        parts["operator"] = lambda: attend(q, k, v, **named)
    if variant.launches == 1:
        parts |= calls_of_functions(q, k, v, named.get("doc"))
    return parts


def calls_of_functions(q: Any, k: Any, v: Any, document: Any) -> dict[str, Callable[[], Any]]:
    """The calls of `attngen.flex`: a causal mask, or one of documents beside a capped score."""
    left, cap = 100, 30.0

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx

    def of_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = document[b, q_idx] == document[b, kv_idx]
        return same & causal(b, h, q_idx, kv_idx) & (q_idx - kv_idx <= left)

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * (score / cap).tanh()

    score_mod, mask_mod = (None, causal) if document is None else (capped, of_document)

    def flex() -> Any:
        return flex_attention(q, k, v, score_mod, mask_mod=mask_mod, enable_gqa=True)

    def traced() -> Any:
        with mock.patch.object(attention, "_traces", Traces()):
            return flex()

    flex()
    return {"flex": flex, "traced": traced}


def measure(
    parts: Mapping[str, Callable[[], Any]], library: Library, repeats: int
) -> dict[str, float]:
    """Microseconds of each part, and the share of attngen in them."""
    found = {name: lowest(part, library, repeats) for name, part in parts.items()}
    found["share"] = found["steady"] - found["nothing"]
    if "operator" in found:
        found["eager"] = found["operator"] - found["nothing"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for library in libraries():
        fake = library.fake or "nothing"
        for variant in VARIANTS:
            with fakes(library) if library.fake else nullcontext():
                times = measure(parts_of_call(library, variant), library, given.repeats)
            rounded = {part: round(time, 2) for part, time in times.items()}
            rows.append(
                {
                    "suite": "steady_call", "library": library.name, "fake": fake,
                    "variant": variant.name,
                    **{f"{part}_us": time for part, time in rounded.items()},
                }
            )  # fmt: skip
            print(f"{library.name}, {variant.name} (fake: {fake})")
            print("  " + "  ".join(f"{part} {time:.2f}" for part, time in rounded.items()))
    if given.out is not None:
        environment = {
            "suite": "environment",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
        }
        lines = [json.dumps(row, sort_keys=True) for row in (environment, *rows)]
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
