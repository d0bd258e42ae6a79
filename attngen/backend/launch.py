"""Machine code on a GPU: CuPy loads it, `cuLaunchKernel` starts it.

A launch takes one block of arguments, the bytes of the kernel's one struct parameter.  CuPy
would take a structured array instead, at 26 to 32 us a launch; the driver's function on
CuPy's handle takes about 7 us, the same as a PyTorch operation.

Loading is once per device and kernel and thread-safe.  A launch of a loaded kernel queues on the
given stream and nothing else: it does not allocate, synchronise or change the current device, so
it can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias, final

from attngen.backend.cubin import KernelResources, read_resources
from attngen.backend.device import Device, GpuTraits
from attngen.backend.errors import (
    ArgumentBlockMismatch,
    CubinRefused,
    ForkedAfterCuda,
    GpuUnavailable,
    LaunchFailed,
    LaunchTooLarge,
    NotPrepared,
    SharedMemoryExceeded,
    UnknownKernel,
)
from attngen.backend.tensor_maps import TensorMapEncoder
from attngen.backend.tickets import Tickets
from attngen.diagnostics.diagnostic import AttnError
from attngen.tensor_map import TensorMap

__all__ = ["ArgumentBlock", "CudaModule", "Driver", "DriverError", "ReadyLaunch", "load_driver"]

ArgumentBlock: TypeAlias = Any  # bytes, or anything with `tobytes` or the buffer protocol

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_MAX_GRID = 2**31 - 1  # along x
_MAX_THREADS = 1024  # per block


class DriverError(Exception):
    """A CUDA call that failed, by the number of its result."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(status)


class Driver(Protocol):
    """The part of CUDA that a launch needs; tests put a fake in its place.

    Modules are loaded on the current device.  Calls raise DriverError, but `launch` returns
    the result as a number, because raising it is the caller's choice.
    """

    process_id: int  # of the process whose CUDA this is

    def count_devices(self) -> int: ...
    def current_device(self) -> int: ...
    def set_device(self, index: int) -> None: ...
    def capability(self, index: int) -> tuple[int, int]: ...
    def shared_limit(self, index: int) -> int: ...
    def multiprocessors(self, index: int) -> int: ...
    def traits(self, index: int) -> GpuTraits: ...
    def encode_tensor_map(self, tensor: TensorMap) -> bytes: ...
    def describe_version(self) -> str: ...
    def describe_status(self, status: int) -> str: ...
    def load_module(self, cubin: bytes) -> Any: ...
    def find_function(self, module: Any, kernel: str) -> tuple[int, Any]: ...
    def set_max_dynamic_shared(self, function: int, size: int) -> None: ...
    def is_capturing(self, stream: int) -> bool: ...
    def stream_id(self, stream: int) -> int: ...
    def allocate_zeros(self, size: int) -> int: ...
    def launch(
        self, function: int, grid: int, threads: int, shared: int, stream: int, block: bytes
    ) -> int: ...


class _Loaded:
    """A kernel on one device; `max_dynamic_bytes` grows, the rest stays."""

    def __init__(
        self,
        function: int,
        keep_alive: Any,
        argument_bytes: int,
        max_threads: int,
        max_dynamic_bytes: int,
    ) -> None:
        self.function = function
        self.keep_alive = keep_alive
        self.argument_bytes = argument_bytes
        self.max_threads = max_threads
        self.max_dynamic_bytes = max_dynamic_bytes


class ReadyLaunch(NamedTuple):
    """A checked launch on a loaded kernel, but for its stream and its arguments.

    Threads may share one and start it any number of times.
    """

    driver: Driver
    kernel: str
    loaded: _Loaded
    device: Device
    grid: int
    threads: int
    shared_bytes: int
    tickets: Tickets | None = None
    tickets_at: int = 0  # offset in the struct

    def start(self, stream: int, block: bytes) -> None:
        """Queue it on the stream; `block` has the size of the kernel's parameter.

        Errors:  A612 in a child forked since; A618 when the driver refuses.
        """
        driver, kernel, loaded, device, grid, threads, shared_bytes, tickets, at = self
        if driver.process_id != os.getpid():
            raise AttnError(ForkedAfterCuda(None))
        try:
            if tickets is not None:
                counters = _find_counters(tickets, driver, device, stream)
                block = block[:at] + _ADDRESS.pack(counters) + block[at + 8 :]
            status = _launch_on(driver, device, loaded, grid, threads, shared_bytes, stream, block)
        except DriverError as error:  # from changing the device, or asking for the stream
            status = error.status
        if status:
            raise _explain_failure(driver, status, kernel, device, grid, threads, shared_bytes)


@final
class CudaModule:
    """One cubin, loaded on each device at its first use there; threads may share it.

    Units:  bytes, threads per block, blocks per grid.
    """

    def __init__(self, cubin: bytes, *, name: str, driver: Driver | None = None) -> None:
        """`name` is what errors call the cubin: "gemma2_local for sm_90a".

        Errors:  A507 when it is no cubin.
        """
        self.name = name
        self.resources = read_resources(cubin)
        self._cubin = cubin
        self._given_driver = driver
        self._modules: dict[int, Any] = {}  # by device index
        self._loaded: dict[tuple[str, int], _Loaded] = {}
        self._tickets: dict[int, Tickets] = {}  # by device index
        self._lock = threading.Lock()

    @property
    def driver(self) -> Driver:
        """Errors:  A611 no GPU; A612 after a fork."""
        return self._given_driver or load_driver()

    def prepare(
        self,
        kernel: str,
        device: Device,
        *,
        shared_bytes: int = 0,
        hands_out_tiles: bool = False,
    ) -> None:
        """Load a kernel on a device, and allow it this much dynamic shared memory.

        hands_out_tiles:  it will need counters.
        Errors:  A611 no GPU; A612 after a fork; A614 the driver refuses the cubin; A615 too
                 much shared memory; A616 not one parameter; A619 no such kernel.
        """
        self._prepare(kernel, device, shared_bytes)
        if hands_out_tiles:
            self._find_tickets(device, None)

    def launch(
        self,
        kernel: str,
        arguments: ArgumentBlock,
        *,
        device: Device,
        stream: int,
        grid: int,
        threads: int,
        shared_bytes: int,
    ) -> None:
        """Queue one launch of `grid` blocks on the stream; a grid of 0 blocks does nothing.

        `arguments` is copied before this returns.

        Errors:  those of `prepare`; A613 not loaded, and the stream is capturing; A616 a
                 block of another size; A617 grid or threads beyond a limit; A618 the rest.
        """
        if grid == 0:
            return
        block = arguments if type(arguments) is bytes else _copy_bytes(arguments)
        ready = self.ready(
            kernel,
            len(block),
            device=device,
            stream=stream,
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
        )
        ready.start(stream, block)

    def ready(
        self,
        kernel: str,
        argument_bytes: int,
        *,
        device: Device,
        stream: int,
        grid: int,
        threads: int,
        shared_bytes: int,
        tickets_at: int | None = None,
    ) -> ReadyLaunch:
        """A launch of at least one block, checked, with its kernel loaded.

        tickets_at:  where in the struct the address of its counters goes, if it has any.
        Errors:  those of `launch` but A618; `stream` is the one that must not be capturing.
        """
        driver = self.driver
        loaded = self._loaded.get((kernel, device.index))
        if (
            loaded is None
            or shared_bytes > loaded.max_dynamic_bytes
            or driver.process_id != os.getpid()
        ):
            loaded = self._prepare(kernel, device, shared_bytes, stream)
        if argument_bytes != loaded.argument_bytes:
            expected = f"{loaded.argument_bytes} bytes"
            raise _refuse_block(kernel, f"{argument_bytes} bytes", expected)
        if not 0 < grid <= _MAX_GRID:
            raise AttnError(LaunchTooLarge(None, kernel, f"{grid} blocks", f"{_MAX_GRID} blocks"))
        if not 0 < threads <= loaded.max_threads:
            limit = f"{loaded.max_threads} threads per block"
            raise AttnError(LaunchTooLarge(None, kernel, f"{threads} threads", limit))
        ready = ReadyLaunch(driver, kernel, loaded, device, grid, threads, shared_bytes)
        if tickets_at is None:
            return ready
        return ready._replace(tickets=self._find_tickets(device, stream), tickets_at=tickets_at)

    def _find_tickets(self, device: Device, stream: int | None) -> Tickets | None:
        """None where there are none yet and memory is not to be had, as while a graph is captured;
        tiles are dealt then."""
        found = self._tickets.get(device.index)
        if found is not None or (stream is not None and self.driver.is_capturing(stream)):
            return found
        try:
            with self._lock, _current(self.driver, device.index):
                found = self._tickets.get(device.index)
                if found is None:
                    found = self._tickets[device.index] = Tickets(self.driver)
                return found
        except DriverError:
            return None

    def _prepare(
        self, kernel: str, device: Device, shared_bytes: int, stream: int | None = None
    ) -> _Loaded:
        driver = self.driver
        if driver.process_id != os.getpid():
            raise AttnError(ForkedAfterCuda(None))
        resources = self._find_resources(kernel)
        if device.kind != "cuda" or not 0 <= device.index < driver.count_devices():
            reason = f"there is no device {device}, but {driver.count_devices()} CUDA device(s)"
            raise AttnError(GpuUnavailable(None, reason, None))
        try:
            with self._lock, _current(driver, device.index):
                loaded = self._loaded.get((kernel, device.index))
                if loaded is None:
                    if stream is not None and driver.is_capturing(stream):
                        raise AttnError(NotPrepared(None, kernel, str(device)))
                    loaded = self._load(driver, kernel, device, resources)
                    self._loaded[kernel, device.index] = loaded
                if shared_bytes > loaded.max_dynamic_bytes:
                    _require_shared(driver, kernel, device, resources, shared_bytes)
                    driver.set_max_dynamic_shared(loaded.function, shared_bytes)
                    loaded.max_dynamic_bytes = shared_bytes
                return loaded
        except DriverError as error:
            raise self._explain_refusal(driver, error.status, device) from None

    def _find_resources(self, kernel: str) -> KernelResources:
        """The resources of a kernel that a launch can serve: with one parameter."""
        resources = self.resources.get(kernel)
        if resources is None:
            raise AttnError(UnknownKernel(None, kernel, ", ".join(self.resources)))
        count = len(resources.params)
        if count != 1:
            raise _refuse_block(kernel, "one struct", f"{count} parameters")
        return resources

    def _load(
        self, driver: Driver, kernel: str, device: Device, resources: KernelResources
    ) -> _Loaded:
        module = self._modules.get(device.index)
        if module is None:
            module = self._modules[device.index] = driver.load_module(self._cubin)
        function, keep_alive = driver.find_function(module, kernel)
        size = resources.params[0].size
        max_threads = resources.max_threads or _MAX_THREADS
        return _Loaded(function, keep_alive, size, max_threads, 0)

    def _explain_refusal(self, driver: Driver, status: int, device: Device) -> AttnError:
        if status == _NOT_INITIALIZED:
            return AttnError(ForkedAfterCuda(None))
        major, minor = driver.capability(device.index)
        described, version = driver.describe_status(status), driver.describe_version()
        return AttnError(
            CubinRefused(None, self.name, str(device), described, f"{major}.{minor}", version)
        )


# ---- steps of a launch -------------------------------------------------------------------

_NOT_INITIALIZED = 3
_INVALID_CONTEXT = 201
_CAPTURE_IMPLICIT = 906

# Results of cuLaunchKernel that mean something a user can act on.
# Source: CUDA Driver API, enum CUresult.
_ADVICE = {
    1: "grid, threads or shared memory exceed what this GPU allows",
    _INVALID_CONTEXT: "the CUDA context of this device was destroyed",
    400: "the stream belongs to another device, or no longer exists",
    700: "an earlier kernel accessed memory outside its arrays; restart the process",
    701: "the kernel's registers or shared memory do not fit this many threads",
    702: "an earlier kernel ran into the time limit; restart the process",
    715: "an earlier kernel executed an illegal instruction; restart the process",
    716: "an earlier kernel accessed a misaligned address; restart the process",
    718: "an earlier kernel jumped to an invalid address; restart the process",
    719: "an earlier kernel failed; restart the process",
    900: "the stream is capturing a graph, and this operation is not permitted there",
    901: "the capture of a graph on this stream was broken by an earlier operation",
    _CAPTURE_IMPLICIT: "another stream is capturing a graph; launch on a stream of its own",
}


def _find_counters(tickets: Tickets, driver: Driver, device: Device, stream: int) -> int:
    try:
        return tickets.find(stream)
    except DriverError as error:
        if error.status != _INVALID_CONTEXT:
            raise
        # As in `_launch_on`: this thread has not used CUDA yet.
        with _current(driver, device.index):
            return tickets.find(stream)


def _launch_on(
    driver: Driver,
    device: Device,
    loaded: _Loaded,
    grid: int,
    threads: int,
    shared_bytes: int,
    stream: int,
    block: bytes,
) -> int:
    if driver.current_device() == device.index:
        status = driver.launch(loaded.function, grid, threads, shared_bytes, stream, block)
        if status != _INVALID_CONTEXT:
            return status
        # This thread has not used CUDA yet: naming its device gives it the context.
    with _current(driver, device.index):
        return driver.launch(loaded.function, grid, threads, shared_bytes, stream, block)


@contextmanager
def _current(driver: Driver, index: int) -> Iterator[None]:
    """Make a device the current one, and the one before current again afterwards."""
    before = driver.current_device()
    driver.set_device(index)
    try:
        yield
    finally:
        if before != index:
            driver.set_device(before)


def _require_shared(
    driver: Driver, kernel: str, device: Device, resources: KernelResources, dynamic: int
) -> None:
    limit = driver.shared_limit(device.index)
    static = resources.shared_bytes
    if static + dynamic > limit:
        needed = static + dynamic
        error = SharedMemoryExceeded(None, kernel, static, dynamic, needed, limit, str(device))
        raise AttnError(error)


def _copy_bytes(arguments: ArgumentBlock) -> bytes:
    if hasattr(arguments, "tobytes"):  # NumPy scalars and arrays
        return bytes(arguments.tobytes())
    return bytes(arguments)


def _refuse_block(kernel: str, has: str, expected: str) -> AttnError:
    return AttnError(ArgumentBlockMismatch(None, kernel, has, expected))


def _explain_failure(
    driver: Driver,
    status: int,
    kernel: str,
    device: Device,
    grid: int,
    threads: int,
    shared_bytes: int,
) -> AttnError:
    if status == _NOT_INITIALIZED:
        return AttnError(ForkedAfterCuda(None))
    name, advice = driver.describe_status(status), _ADVICE.get(status)
    return AttnError(
        LaunchFailed(None, kernel, name, str(grid), threads, shared_bytes, str(device), advice)
    )


# ---- CUDA itself -------------------------------------------------------------------------


@cache
def load_driver() -> Driver:
    """CUDA through CuPy, initialised once per process.

    Errors:  A611 without CuPy, driver or GPU; A612 in a child forked after CUDA was used.
    """
    try:
        import cupy
    except ImportError as error:
        reason = f"CuPy is not installed ({str(error).partition(chr(10))[0]})"
        raise AttnError(GpuUnavailable(None, reason, "pip install 'attngen[cupy]'")) from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.runtime.getDevice()  # in a forked child this is the first call that fails
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except (RuntimeError, OSError) as error:
        if getattr(error, "status", None) == _NOT_INITIALIZED:
            raise AttnError(ForkedAfterCuda(None)) from None
        reason = str(error).partition("\n")[0]
        advice = "install the NVIDIA driver; without a GPU, NumPy arrays run on the CPU"
        raise AttnError(GpuUnavailable(None, reason, advice)) from None
    return _CupyDriver(cupy, library, count)


_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_OPT_IN = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount
_MEMORY_KHZ = 36  # cudaDevAttrMemoryClockRate
_MEMORY_BITS = 37  # cudaDevAttrGlobalMemoryBusWidth
_L2_BYTES = 38  # cudaDevAttrL2CacheSize
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # cudaDevAttrComputeCapabilityMajor, …Minor

_OneParameter = ctypes.c_char_p * 1
_ADDRESS = struct.Struct("<Q")


@final
class _CupyDriver:
    """CuPy for devices and modules; the driver library itself for each launch."""

    def __init__(self, cupy: Any, library: Any, device_count: int) -> None:
        self.process_id = os.getpid()
        self._runtime = cupy.cuda.runtime
        self._module_type = cupy.cuda.Module
        self._loaded: list[Any] = []  # for good: a CUDA graph may outlive the kernel that it starts
        self._device_count = device_count
        self._library = library
        void, unsigned, integer = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int
        self._launch = library.cuLaunchKernel
        self._launch.argtypes = [void, *[unsigned] * 7, void, void, void]
        self._set_attribute = library.cuFuncSetAttribute
        self._set_attribute.argtypes = [void, integer, integer]
        self._is_capturing = library.cuStreamIsCapturing
        self._is_capturing.argtypes = [void, ctypes.POINTER(integer)]
        self._error_name = library.cuGetErrorName
        self._error_name.argtypes = [integer, ctypes.POINTER(ctypes.c_char_p)]
        self._encoder: TensorMapEncoder | None = None  # drivers before 12 have none

    def count_devices(self) -> int:
        return self._device_count

    def current_device(self) -> int:
        return int(self._runtime.getDevice())

    def set_device(self, index: int) -> None:
        self._translate(self._runtime.setDevice, index)

    def capability(self, index: int) -> tuple[int, int]:
        get = self._runtime.deviceGetAttribute
        return int(get(_CAPABILITY_MAJOR, index)), int(get(_CAPABILITY_MINOR, index))

    def shared_limit(self, index: int) -> int:
        return int(self._runtime.deviceGetAttribute(_SHARED_OPT_IN, index))

    def multiprocessors(self, index: int) -> int:
        return int(self._runtime.deviceGetAttribute(_MULTIPROCESSORS, index))

    def traits(self, index: int) -> GpuTraits:
        get = self._runtime.deviceGetAttribute
        name = self._runtime.getDeviceProperties(index)["name"]
        return GpuTraits(
            name=name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name),
            capability=self.capability(index),
            multiprocessors=self.multiprocessors(index),
            shared_bytes=self.shared_limit(index),
            l2_bytes=int(get(_L2_BYTES, index)),
            memory_khz=int(get(_MEMORY_KHZ, index)),
            memory_bits=int(get(_MEMORY_BITS, index)),
        )

    def encode_tensor_map(self, tensor: TensorMap) -> bytes:
        if self._encoder is None:
            self._encoder = TensorMapEncoder(self._library)
        return self._encoder.encode(tensor)

    def describe_version(self) -> str:
        version = self._runtime.driverGetVersion()
        return f"{version // 1000}.{version % 1000 // 10}"

    def describe_status(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._error_name(status, ctypes.byref(name))
        return name.value.decode("ascii") if name.value else f"error {status}"

    def load_module(self, cubin: bytes) -> Any:
        module = self._module_type()
        self._translate(module.load, cubin)
        self._loaded.append(module)
        return module

    def find_function(self, module: Any, kernel: str) -> tuple[int, Any]:
        function = self._translate(module.get_function, kernel)
        return int(function.ptr), function

    def set_max_dynamic_shared(self, function: int, size: int) -> None:
        status = self._set_attribute(function, _DYNAMIC_SHARED, size)
        if status:
            raise DriverError(status)

    def is_capturing(self, stream: int) -> bool:
        answer = ctypes.c_int()
        status = self._is_capturing(stream, ctypes.byref(answer))
        # The default stream answers with this error while another stream captures.
        return bool(status == _CAPTURE_IMPLICIT or (status == 0 and answer.value))

    def stream_id(self, stream: int) -> int:
        answer = ctypes.c_uint64()
        find = self._library.cuStreamGetId  # drivers before 12 have none, and no Hopper
        status = find(ctypes.c_void_p(stream), ctypes.byref(answer))
        if status:
            raise DriverError(status)
        return answer.value

    def allocate_zeros(self, size: int) -> int:
        address = self._translate(self._runtime.malloc, size)
        self._translate(lambda it: self._runtime.memset(it, 0, size), address)
        self._translate(self._runtime.streamSynchronize, 0)  # so that it is done for every stream
        return int(address)

    def launch(
        self, function: int, grid: int, threads: int, shared: int, stream: int, block: bytes
    ) -> int:
        parameters = _OneParameter(block)  # points at the bytes; the driver copies them
        status: int = self._launch(
            function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, None
        )
        return status

    def _translate(self, function: Any, argument: Any) -> Any:
        try:
            return function(argument)
        except RuntimeError as error:  # CuPy's own classes, whose home is private
            status = getattr(error, "status", None)
            if status is None:
                raise
            raise DriverError(int(status)) from error
