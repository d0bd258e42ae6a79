"""Launching on a real GPU: streams, devices, capture, threads, forks, and what it costs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen import targets
from attngen.backend.cubin import read_resources
from attngen.backend.device import Device, allocate, cuda_device, current_stream, view
from attngen.backend.launch import CudaModule, load_driver
from attngen.backend.nvrtc import compile_cuda, select_target
from attngen.diagnostics.diagnostic import AttnError

PRELUDE = (Path(__file__).parents[2] / "templates/common/device.cuh").read_text()
KERNEL = "scale_floats"
SOURCE = (
    PRELUDE
    + """
struct Args { const float* x; float* y; ag_i64 count; float scale; };

AG_KERNEL(128, scale_floats, Args) {
    __shared__ float own[128];
    AG_SHARED_MEMORY(buffer);
    ag_shared<float> staged(buffer, 0, 128);
    const ag_i64 i = (ag_i64)ag_block() * 128 + ag_thread();
    staged[ag_thread()] = i < args.count ? ag_load(args.x + i) : 0.0f;
    own[ag_thread()] = staged[ag_thread()];
    ag_sync();
    if (i < args.count) ag_store(args.y + i, own[ag_thread()] * args.scale);
}
"""
)
COUNT = 1000


def explain_missing_gpu() -> str | None:
    try:
        load_driver()
    except AttnError as error:
        return error.diagnostics[0].message()
    return None


_reason = explain_missing_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_reason is not None, reason=str(_reason))]

needs_two_gpus = pytest.mark.skipif(
    _reason is not None or load_driver().count_devices() < 2, reason="needs two GPUs"
)


@pytest.fixture(scope="module")
def cubin() -> bytes:
    target = select_target(load_driver().capability(0))
    return compile_cuda(SOURCE, name="tiny", target=target).binary


@pytest.fixture
def module(cubin: bytes) -> CudaModule:
    return CudaModule(cubin, name="tiny")


@pytest.fixture(params=["cupy", "torch"])
def library(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


def make_floats(library: Any, device: Device, values: Any) -> Any:
    if library.__name__ == "torch":
        return library.tensor(values, dtype=library.float32, device=f"cuda:{device.index}")
    with library.cuda.Device(device.index):
        return library.asarray(values, library.float32)


def to_list(array: Any) -> list[float]:
    """The values on the host; waits for the device."""
    host = array.cpu().numpy() if hasattr(array, "cpu") else array.get()
    return [float(value) for value in host]


def pack(x: Any, y: Any, scale: float) -> bytes:
    source, target = view(x, "x"), view(y, "y", is_output=True)
    return struct.pack("<QQqf4x", source.pointer, target.pointer, source.shape[0], scale)


def run(module: CudaModule, x: Any, y: Any, scale: float, **changes: Any) -> None:
    found = view(x, "x")
    options: dict[str, Any] = {
        "device": found.device,
        "stream": current_stream(found.device, x),
        "grid": -(-found.shape[0] // 128),
        "threads": 128,
        "shared_bytes": 512,
    }
    module.launch(KERNEL, pack(x, y, scale), **(options | changes))


def test_a_launch_computes(module: CudaModule, library: Any) -> None:
    x = make_floats(library, cuda_device(0), list(range(COUNT)))
    y = allocate((COUNT,), "fp32", x)
    assert type(y) is type(x)
    run(module, x, y, 3.0)
    assert to_list(y) == [3.0 * i for i in range(COUNT)]


@pytest.mark.parametrize("dynamic", [49151, 49152, 49168, 90_000])
def test_much_shared_memory(module: CudaModule, dynamic: int) -> None:
    cupy = pytest.importorskip("cupy")
    x = make_floats(cupy, cuda_device(0), list(range(COUNT)))
    y = allocate((COUNT,), "fp32", x)
    run(module, x, y, 2.0, shared_bytes=dynamic)
    assert to_list(y) == [2.0 * i for i in range(COUNT)]


def test_too_much_shared_memory_is_refused(module: CudaModule) -> None:
    with pytest.raises(AttnError) as caught:
        module.prepare(KERNEL, cuda_device(0), shared_bytes=10**6)
    assert caught.value.diagnostics[0].code == "A615"


def test_limits_of_the_device_are_those_of_the_target() -> None:
    driver = load_driver()
    target = select_target(driver.capability(0))
    if target.capability == driver.capability(0):
        assert driver.shared_limit(0) == target.shared_bytes_per_block


def test_the_driver_agrees_with_the_cubin_reader(cubin: bytes, module: CudaModule) -> None:
    cupy = pytest.importorskip("cupy")
    loaded = cupy.cuda.Module()
    loaded.load(cubin)
    function = loaded.get_function(KERNEL).ptr
    get = cupy.cuda.driver.funcGetAttribute
    found = read_resources(cubin)[KERNEL]
    # CUfunction_attribute: 0 threads, 1 shared bytes, 3 local bytes, 4 registers.
    assert get(0, function) == found.max_threads
    assert get(1, function) == found.shared_bytes
    assert get(3, function) == found.stack_bytes
    assert get(4, function) == found.registers


def test_work_is_queued_on_the_callers_stream(module: CudaModule) -> None:
    cupy = pytest.importorskip("cupy")
    x = make_floats(cupy, cuda_device(0), [0.0] * COUNT)
    y = allocate((COUNT,), "fp32", x)
    big = cupy.ones((4096, 4096), cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    for i in range(20):
        with stream:
            for _ in range(4):
                big @ big  # keeps the stream busy
            x.fill(float(i))
            run(module, x, y, 2.0)
            copied = y.copy()
        stream.synchronize()
        assert to_list(copied) == [2.0 * i] * COUNT


def test_a_foreign_stream_of_torch(module: CudaModule) -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(COUNT, device="cuda")
    y = allocate((COUNT,), "fp32", x)
    big = torch.ones(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert current_stream(cuda_device(0), x) == stream.cuda_stream
        for _ in range(4):
            big @ big
        x.fill_(21.0)
        run(module, x, y, 2.0)
    stream.synchronize()
    assert to_list(y) == [42.0] * COUNT


# ---- graphs ------------------------------------------------------------------------------


def test_a_prepared_kernel_is_captured_by_torch(module: CudaModule) -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(COUNT, device="cuda")
    y = allocate((COUNT,), "fp32", x)
    module.prepare(KERNEL, cuda_device(0), shared_bytes=512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(module, x, y, 2.0)
    for i in range(10):
        x.fill_(float(i))
        graph.replay()
        assert to_list(y) == [2.0 * i] * COUNT


def test_a_prepared_kernel_is_captured_by_cupy(module: CudaModule) -> None:
    cupy = pytest.importorskip("cupy")
    x = make_floats(cupy, cuda_device(0), [0.0] * COUNT)
    y = allocate((COUNT,), "fp32", x)
    module.prepare(KERNEL, cuda_device(0), shared_bytes=512)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        run(module, x, y, 2.0)
        graph = stream.end_capture()
        for i in range(3):
            x.fill(float(i))
            graph.launch(stream)
            stream.synchronize()
            assert to_list(y) == [2.0 * i] * COUNT


def test_an_unprepared_kernel_leaves_the_capture_whole(cubin: bytes, module: CudaModule) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(COUNT, device="cuda")
    y = allocate((COUNT,), "fp32", x)
    module.prepare(KERNEL, cuda_device(0), shared_bytes=512)
    fresh = CudaModule(cubin, name="tiny")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(AttnError) as caught:
            run(fresh, x, y, 2.0)
        run(module, x, y, 5.0)
    assert caught.value.diagnostics[0].code == "A613"
    graph.replay()
    assert to_list(y) == [5.0] * COUNT
    run(fresh, x, y, 7.0)
    assert to_list(y) == [7.0] * COUNT


# ---- threads, devices, processes ---------------------------------------------------------


def test_threads_share_a_module(module: CudaModule) -> None:
    cupy = pytest.importorskip("cupy")
    start = threading.Barrier(8)

    def work(thread: int) -> bool:
        x = make_floats(cupy, cuda_device(0), [float(thread)] * COUNT)
        y = allocate((COUNT,), "fp32", x)
        start.wait(30)
        for _ in range(50):
            run(module, x, y, 3.0)
        return to_list(y) == [3.0 * thread] * COUNT

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_thread_that_has_not_used_cuda_yet(module: CudaModule) -> None:
    cupy = pytest.importorskip("cupy")
    x = make_floats(cupy, cuda_device(0), [1.0] * COUNT)
    y = allocate((COUNT,), "fp32", x)
    run(module, x, y, 2.0)
    block = pack(x, y, 4.0)
    cupy.cuda.Device(0).synchronize()

    def launch() -> None:
        module.launch(
            KERNEL,
            block,
            device=cuda_device(0),
            stream=0,
            grid=8,
            threads=128,
            shared_bytes=512,
        )

    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch).result()
    assert to_list(y) == [4.0] * COUNT


@needs_two_gpus
def test_the_device_that_owns_the_arrays(module: CudaModule, library: Any) -> None:
    driver = load_driver()
    before = driver.current_device()
    for index in (1, 0, 1):
        x = make_floats(library, cuda_device(index), list(range(COUNT)))
        y = allocate((COUNT,), "fp32", x)
        assert view(y, "y").device == cuda_device(index)
        run(module, x, y, 2.0, shared_bytes=90_000)
        assert to_list(y) == [2.0 * i for i in range(COUNT)]
        assert driver.current_device() == before


def test_another_chips_machine_code_is_refused() -> None:
    capability = load_driver().capability(0)
    other = next(t for t in targets.all_targets() if not t.runs_on(capability))
    cubin = compile_cuda(SOURCE, name="tiny", target=other).binary
    with pytest.raises(AttnError) as caught:
        CudaModule(cubin, name=f"tiny for {other.name}").prepare(KERNEL, cuda_device(0))
    (error,) = caught.value.diagnostics
    assert error.code == "A614"
    assert other.name in error.message()


FORK = """
import os, sys
{first_use}
child = os.fork()
if child == 0:
    from attngen.backend.launch import CudaModule
    from attngen.backend.device import cuda_device
    from attngen.diagnostics.diagnostic import AttnError
    try:
        CudaModule(open(sys.argv[1], "rb").read(), name="x").prepare("scale_floats", cuda_device(0))
        print("fine", flush=True)
    except AttnError as error:
        print(error.diagnostics[0].code, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("first_use", "answer"),
    [
        ("import attngen.backend.launch, attngen.backend.device, attngen.backend.cache", "fine"),
        ("from attngen.backend.launch import load_driver; load_driver().set_device(0)", "A612"),
        ("import cupy; cupy.zeros(3)", "A612"),
    ],
    ids=["import only", "attngen before", "CuPy before"],
)
def test_a_forked_child(cubin: bytes, tmp_path: Path, first_use: str, answer: str) -> None:
    path = tmp_path / "tiny.cubin"
    path.write_bytes(cubin)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", FORK.format(first_use=first_use), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env=os.environ | {"PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")},
        check=True,
    )
    assert done.stdout.split() == [answer], done.stderr


def test_what_a_launch_costs(module: CudaModule, library: Any) -> None:
    x = make_floats(library, cuda_device(0), [1.0] * COUNT)
    y = allocate((COUNT,), "fp32", x)
    stream = current_stream(cuda_device(0), x)
    block = pack(x, y, 2.0)

    def launch() -> None:
        module.launch(
            KERNEL,
            block,
            device=cuda_device(0),
            stream=stream,
            grid=8,
            threads=128,
            shared_bytes=512,
        )

    timed = {
        "launch": launch,
        "view": lambda: view(x, "x"),
        "current_stream": lambda: current_stream(cuda_device(0), x),
    }
    for name, function in timed.items():
        best = min(time_calls(function) for _ in range(5))
        print(f"{library.__name__} {name}: {best:.2f} us")
        assert best < 60  # an order of magnitude above what was seen, so that it never flickers
    np.testing.assert_array_equal(to_list(y), [2.0] * COUNT)


def time_calls(function: Any, count: int = 500) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count * 1e6
