"""Loading and launching against a fake driver: devices, threads, capture, forks (O34, O36)."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attngen import targets
from attngen.backend import launch as launch_module
from attngen.backend.device import CPU, Device, cuda_device
from attngen.backend.launch import CudaModule, load_driver
from attngen.backend.nvrtc import compile_cuda
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from tests.toolchain.fake_cuda import FakeDriver
from tests.toolchain.tiny_kernel import ARGUMENT_BYTES, KERNEL, STATIC_SHARED_BYTES, compile_tiny

BLOCK = bytes(range(ARGUMENT_BYTES))
GPU_0, GPU_1 = cuda_device(0), cuda_device(1)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def module(driver: FakeDriver) -> CudaModule:
    return CudaModule(compile_tiny("sm_90a"), name="tiny for sm_90a", driver=driver)


def run(module: CudaModule, arguments: Any = BLOCK, **changes: Any) -> None:
    options: dict[str, Any] = {
        "kernel": KERNEL,
        "device": GPU_0,
        "stream": 7,
        "grid": 3,
        "threads": 128,
        "shared_bytes": 512,
    }
    options |= changes
    module.launch(options.pop("kernel"), arguments, **options)


def catch(module: CudaModule, *arguments: Any, **changes: Any) -> Diagnostic:
    with pytest.raises(AttnError) as caught:
        run(module, *arguments, **changes)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_a_launch_passes_everything_on(module: CudaModule, driver: FakeDriver) -> None:
    run(module)
    assert driver.launches == [
        {"device": 0, "grid": 3, "threads": 128, "shared": 512, "stream": 7, "block": BLOCK}
    ]
    run(module)
    assert driver.loads == [0]


@pytest.mark.parametrize(
    "arguments",
    [
        bytearray(BLOCK),
        memoryview(BLOCK),
        np.frombuffer(BLOCK, np.dtype((np.void, ARGUMENT_BYTES))),
        np.frombuffer(BLOCK, np.dtype("u8,u8,u8,f4,f4"))[0],
    ],
    ids=lambda arguments: type(arguments).__name__,
)
def test_the_block_may_be_any_bytes(module: CudaModule, driver: FakeDriver, arguments: Any) -> None:
    run(module, arguments)
    assert driver.launches[0]["block"] == BLOCK


@pytest.mark.parametrize("size", [0, ARGUMENT_BYTES - 1, ARGUMENT_BYTES + 8])
def test_a_block_of_another_size_is_refused(
    module: CudaModule, driver: FakeDriver, size: int
) -> None:
    error = catch(module, bytes(size))
    assert error.code == "A616"
    assert f"{size} bytes" in error.message()
    assert error.label_text() == f"the cubin expects {ARGUMENT_BYTES} bytes"
    assert driver.launches == []


def test_a_kernel_needs_exactly_one_parameter(driver: FakeDriver) -> None:
    text = 'extern "C" __global__ void two(float* x, int n) { x[n] = 0.0f; }'
    cubin = compile_cuda(text, name="x", target=targets.get("sm_90a")).binary
    module = CudaModule(cubin, name="x", driver=driver)
    assert catch(module, kernel="two").code == "A616"
    error = catch(module, kernel="three")
    assert error.code == "A619"
    assert error.label_text() == "it has two"
    assert driver.loads == []


# ---- limits ------------------------------------------------------------------------------


def test_grid_and_threads_are_checked(module: CudaModule, driver: FakeDriver) -> None:
    for changes in ({"grid": -1}, {"grid": 2**31}, {"threads": 0}, {"threads": 129}):
        error = catch(module, **changes)
        assert error.code == "A617"
        assert str(next(iter(changes.values()))) in error.message()
    assert driver.launches == []
    run(module, grid=2**31 - 1)


def test_nothing_is_done_for_an_empty_grid(module: CudaModule, driver: FakeDriver) -> None:
    run(module, grid=0)
    assert not driver.launches
    assert not driver.loads


@pytest.mark.parametrize("dynamic", [0, 49151, 49152, 49168, 227 * 1024 - STATIC_SHARED_BYTES])
def test_shared_memory_is_opted_in_for_any_amount(
    module: CudaModule, driver: FakeDriver, dynamic: int
) -> None:
    run(module, shared_bytes=dynamic)
    assert driver.launches[0]["shared"] == dynamic
    run(module, shared_bytes=dynamic, device=GPU_1)
    assert len(driver.launches) == 2


def test_more_shared_memory_is_opted_in_later(module: CudaModule, driver: FakeDriver) -> None:
    for size in (1000, 90_000, 60_000, 120_000):
        run(module, shared_bytes=size)
    assert list(driver.max_dynamic.values()) == [120_000]


def test_too_much_shared_memory_is_refused_with_the_sum(driver: FakeDriver) -> None:
    driver.limit = 99 * 1024
    module = CudaModule(compile_tiny("sm_86"), name="tiny for sm_86", driver=driver)
    dynamic = 99 * 1024 - STATIC_SHARED_BYTES
    run(module, shared_bytes=dynamic)
    error = catch(module, shared_bytes=dynamic + 16)
    assert error.code == "A615"
    assert error.label_text() == (
        f"static {STATIC_SHARED_BYTES} + dynamic {dynamic + 16} = {99 * 1024 + 16} bytes; "
        f"cuda:0 allows {99 * 1024} bytes per block"
    )
    assert len(driver.launches) == 1


# ---- devices and threads -----------------------------------------------------------------


def test_each_device_gets_its_own_handle(module: CudaModule, driver: FakeDriver) -> None:
    driver.set_device(0)
    for device in (GPU_1, GPU_0, GPU_1, GPU_0):
        run(module, device=device, shared_bytes=100_000)
        assert driver.current_device() == 0
    assert [launch["device"] for launch in driver.launches] == [1, 0, 1, 0]
    assert driver.loads == [1, 0]


def test_the_current_device_is_restored_after_an_error(
    module: CudaModule, driver: FakeDriver
) -> None:
    run(module, device=GPU_1)
    driver.launch_status = 719
    catch(module, device=GPU_1)
    assert driver.current_device() == 0
    driver.load_status = 209
    catch(CudaModule(compile_tiny("sm_90a"), name="x", driver=driver), device=GPU_1)
    assert driver.current_device() == 0


def test_a_device_that_is_not_there_is_refused(module: CudaModule) -> None:
    for device in (Device("cuda", 2), Device("cuda", -1), CPU):
        error = catch(module, device=device)
        assert error.code == "A611"
        assert str(device) in error.message()


def test_threads_share_a_module(module: CudaModule, driver: FakeDriver) -> None:
    count, repeats = 8, 20
    start = threading.Barrier(count)

    def work(thread: int) -> None:
        start.wait(10)
        for i in range(repeats):
            device = (GPU_0, GPU_1)[(thread + i) % 2]
            run(module, bytes([thread]) * ARGUMENT_BYTES, device=device, stream=thread)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    assert sorted(driver.loads) == [0, 1]
    assert len(driver.launches) == count * repeats
    for launch in driver.launches:
        assert launch["block"] == bytes([launch["stream"]]) * ARGUMENT_BYTES


def test_a_thread_without_context_gets_one(module: CudaModule, driver: FakeDriver) -> None:
    run(module)  # loaded here, launched from a thread that has never used CUDA
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, module).result()
    assert len(driver.launches) == 2


# ---- capture, load failures, launch failures ---------------------------------------------


def test_a_loaded_kernel_can_be_captured(module: CudaModule, driver: FakeDriver) -> None:
    driver.is_capturing_now = True
    error = catch(module)
    assert error.code == "A613"
    assert "prepare" in (error.hint_text() or "")
    assert not driver.launches
    assert not driver.loads
    driver.is_capturing_now = False
    module.prepare(KERNEL, GPU_0, shared_bytes=512)
    driver.is_capturing_now = True
    run(module)
    assert len(driver.launches) == 1
    assert catch(module, device=GPU_1).code == "A613"


def test_a_refused_cubin_is_explained(module: CudaModule, driver: FakeDriver) -> None:
    driver.load_status = 209
    error = catch(module)
    assert error.code == "A614"
    assert error.message() == ("the driver does not load tiny for sm_90a on cuda:0: CUDA_ERROR_209")
    assert "9.0" in (error.label_text() or "")
    assert "13.0" in (error.label_text() or "")
    driver.load_status = 0
    run(module)  # the next call tries again


@pytest.mark.parametrize(("status", "word"), [(1, "exceed"), (700, "restart"), (12345, None)])
def test_a_failed_launch_is_explained(
    module: CudaModule, driver: FakeDriver, status: int, word: str | None
) -> None:
    run(module)
    driver.launch_status = status
    error = catch(module)
    assert error.code == "A618"
    assert error.message() == f"launching kernel `{KERNEL}` failed: CUDA_ERROR_{status}"
    assert error.label_text() == "grid 3, 128 threads, 512 bytes of shared memory, on cuda:0"
    assert (word or "") in (error.hint_text() or "")
    assert (error.hint_text() is None) == (word is None)


def test_a_damaged_cubin_is_refused_at_once(driver: FakeDriver) -> None:
    with pytest.raises(AttnError) as caught:
        CudaModule(b"nothing", name="x", driver=driver)
    assert caught.value.diagnostics[0].code == "A507"


# ---- forks -------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_of_a_process_that_used_cuda_is_told(module: CudaModule) -> None:
    run(module)
    assert run_in_child(lambda: code_of(module)) == "A612"
    run(module)  # the parent goes on


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_may_be_the_first_to_use_cuda() -> None:
    def use() -> str:
        module = CudaModule(compile_tiny("sm_90a"), name="x", driver=FakeDriver())
        run(module)
        return "fine"

    compile_tiny("sm_90a")
    assert run_in_child(use) == "fine"


def test_a_driver_that_is_not_initialised_means_a_fork(
    module: CudaModule, driver: FakeDriver
) -> None:
    driver.load_status = 3
    assert catch(module).code == "A612"
    driver.load_status = 0
    run(module)
    driver.launch_status = 3
    assert catch(module).code == "A612"


def code_of(module: CudaModule) -> str:
    try:
        run(module)
    except AttnError as error:
        return error.diagnostics[0].code
    return "no error"


def run_in_child(function: Any) -> str:
    """What a forked child says, within a time limit: it must not hang."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(send, str(function()).encode())
        except BaseException as error:
            os.write(send, repr(error).encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        timer = threading.Timer(30, os.kill, (child, 9))
        timer.start()
        answer = pipe.read().decode()
        timer.cancel()
    os.waitpid(child, 0)
    return answer


# ---- finding CUDA ------------------------------------------------------------------------


@pytest.fixture
def unloaded() -> Any:
    load_driver.cache_clear()
    yield
    load_driver.cache_clear()


def load_with(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Diagnostic:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(AttnError) as caught:
        load_driver()
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_missing_cupy_is_explained(monkeypatch: pytest.MonkeyPatch, unloaded: Any) -> None:
    error = load_with(None, monkeypatch)
    assert error.code == "A611"
    assert "CuPy is not installed" in error.message()
    assert error.hint_text() == "pip install 'attngen[cupy]'"


class FakeRuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


@pytest.mark.parametrize(("status", "code"), [(35, "A611"), (100, "A611"), (3, "A612")])
def test_a_missing_gpu_is_explained(
    monkeypatch: pytest.MonkeyPatch, unloaded: Any, status: int, code: str
) -> None:
    def fail() -> int:
        raise FakeRuntimeError(status, "cudaErrorInsufficientDriver: too old\nmore")

    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=fail)))
    error = load_with(cupy, monkeypatch)
    assert error.code == code
    assert ("too old" in error.message()) == (code == "A611")


def test_the_real_driver_speaks_to_cupy_and_the_library() -> None:
    """`_CupyDriver` over stand-ins for CuPy and libcuda: every call and its translation."""
    calls: list[tuple[Any, ...]] = []
    driver = make_cupy_driver(calls)
    assert driver.capability(1) == (9, 0)
    assert driver.shared_limit(0) == 232448
    assert driver.describe_version() == "13.1"
    module = driver.load_module(b"cubin")
    function, keep_alive = driver.find_function(module, "kernel")
    assert function == 4242
    assert keep_alive is not None
    remembered = weakref.ref(module)
    del module
    assert remembered() is not None, "a captured graph needs it, whoever has dropped the kernel"
    driver.set_max_dynamic_shared(function, 99)
    assert driver.launch(function, 5, 128, 99, 7, b"\1\2\3") == 0
    assert calls[-1] == ("launch", 4242, 5, 1, 1, 128, 1, 1, 99, 7, b"\1\2\3", None)
    assert driver.describe_status(77) == "error 77"
    assert driver.stream_id(7) == 0  # the stand-in writes no answer
    assert driver.allocate_zeros(64) == 4096
    assert calls[-2:] == [("memset", 4096, 0, 64), ("synchronize", 0)]
    with pytest.raises(launch_module.DriverError) as caught:
        driver.load_module(b"bad")
    assert caught.value.status == 209
    with pytest.raises(launch_module.DriverError):
        driver.set_max_dynamic_shared(function, -1)
    with pytest.raises(launch_module.DriverError):
        driver.stream_id(8)


def make_cupy_driver(calls: list[tuple[Any, ...]]) -> Any:
    class Module:
        def load(self, cubin: bytes) -> None:
            if cubin == b"bad":
                raise FakeRuntimeError(209, "CUDA_ERROR_NO_BINARY_FOR_GPU")

        def get_function(self, kernel: str) -> Any:
            return SimpleNamespace(ptr=4242)

    class Function:
        argtypes: Any = None

        def __init__(self, function: Any) -> None:
            self.function = function

        def __call__(self, *arguments: Any) -> Any:
            return self.function(*arguments)

    def launch(*arguments: Any) -> int:
        *before, parameters, extra = arguments
        calls.append(("launch", *before, parameters[0], extra))
        return 0

    library = SimpleNamespace(
        cuLaunchKernel=Function(launch),
        cuFuncSetAttribute=Function(lambda function, which, size: 1 if size < 0 else 0),
        cuStreamIsCapturing=Function(lambda stream, answer: 0),
        cuStreamGetId=Function(lambda stream, answer: 0 if stream.value == 7 else 400),
        cuGetErrorName=Function(lambda status, name: 1),
    )
    attributes = {75: 9, 76: 0, 97: 232448}
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        setDevice=lambda index: None,
        deviceGetAttribute=lambda which, index: attributes[which],
        driverGetVersion=lambda: 13010,
        malloc=lambda size: 4096,
        memset=lambda *arguments: calls.append(("memset", *arguments)),
        streamSynchronize=lambda stream: calls.append(("synchronize", stream)),
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Module=Module))
    return launch_module._CupyDriver(cupy, library, 2)
