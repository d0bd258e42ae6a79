"""Arrays of any library as pointer, shape, strides, dtype and device; nothing is copied.

| library                | recognised by                     | new arrays  | current stream    |
| ---------------------- | --------------------------------- | ----------- | ----------------- |
| NumPy, with ml_dtypes  | `numpy.ndarray`                   | NumPy       | none              |
| CuPy                   | `cupy.ndarray`                    | CuPy        | CuPy's            |
| PyTorch, CPU and CUDA  | `data_ptr` and `stride`           | PyTorch     | PyTorch's         |
| JAX, others: DLPack    | `__dlpack__`, `__dlpack_device__` | NumPy, CuPy | CuPy's            |
| Numba, others          | `__cuda_array_interface__`        | CuPy        | its own or CuPy's |

No library is imported to recognise its arrays: whoever has an array has imported it.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, final

import numpy as np

from attngen.backend.errors import (
    ForeignByteOrder,
    GradientRequired,
    MisalignedArray,
    MixedDevices,
    NotAnArray,
    ReadOnlyOutput,
    UnreadableArray,
    UnsupportedDevice,
    UnsupportedDtype,
)
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.record import record

__all__ = [
    "CPU",
    "ITEM_BYTES",
    "ArrayView",
    "Device",
    "GpuTraits",
    "allocate",
    "cuda_device",
    "current_stream",
    "find_common_device",
    "numpy_dtype",
    "read",
    "view",
]

ITEM_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "fp16": 2,
    "bf16": 2,
    "fp32": 4,
}

# The names of other libraries that differ from ours.
_OUR_NAME = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_THEIR_NAME = {ours: theirs for theirs, ours in _OUR_NAME.items()}


@final
@record
class Device:
    """Where an array is and a kernel runs."""

    kind: Literal["cpu", "cuda"]
    index: int

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu", 0)


@final
@record(kw_only=True)
class GpuTraits:
    """What the driver says of a GPU, as far as it decides how fast a schedule is."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # of one block, with opting in
    l2_bytes: int
    memory_khz: int  # the highest memory clock
    memory_bits: int  # the width of the memory bus


_ALIGNMENT = 16
"""Bytes that the widest copy of a kernel takes; no check of an address looks further."""


@cache
def cuda_device(index: int) -> Device:
    """The CUDA device of this number."""
    return Device("cuda", index)


class ArrayView(NamedTuple):
    """What a kernel needs to know about an array.

    A named tuple, because several are made in every call and a frozen dataclass costs
    three times as much (0.5 against 0.2 microseconds).

    Units:  strides in elements, possibly zero or negative; `pointer` is that of the element
            with all indices 0.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # one of ITEM_BYTES
    device: Device
    owner: object  # keeps the memory alive as long as the view


def view(array: Any, name: str, *, is_output: bool = False) -> ArrayView:
    """Look at an array of any library without copying it; `name` is the argument's, for errors.

    Errors:  A601 no array; A602 its dtype; A603 its byte order; A604 its alignment; A605 an
             output that must not be written; A606 a tensor that requires a gradient; A607
             its device; A609 its library refuses.
    """
    return _find_library(array, name).view(array, name, is_output)


def read(array: Any) -> tuple[int, Hashable] | None:
    """A quick look at an array of CuPy or PyTorch; None where only `view` can tell more.

    Returns: its address, and its facts: all else that `view` looks at.  Arrays with equal facts
             have equal views but for pointer and owner, addresses alike modulo 16, and `view`
             refuses both of them or none.
    Errors:  whatever the array's library raises.
    """
    library = _libraries.get(type(array)) or _find_library(array, "array")
    return None if library.read is None else library.read(array)


def allocate(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """A new, uninitialised, contiguous array of the library and on the device of `like`."""
    return _find_library(like, "like").allocate(shape, dtype, like)


def may_be_freed_in_capture(like: Any) -> bool:
    """Whether a new array of the library of `like` may go while a CUDA graph is captured.

    PyTorch keeps its memory for the graph.  Others hand it out again, and a replay would overwrite
    what came there.
    """
    return _find_library(like, "like").allocate is _allocate_torch


def current_stream(device: Device, like: Any) -> int:
    """The handle of the stream that the library of `like` queues its work on just now."""
    if device.kind == "cpu":
        return 0
    return _find_library(like, "like").current_stream(device.index, like)


def find_common_device(views: Mapping[str, ArrayView]) -> Device:
    """The device that all arrays of a call are on.

    Errors:  A608 when they are on several; it names two arguments and both devices.
    """
    first_name, first = None, CPU
    for name, found in views.items():
        if first_name is None:
            first_name, first = name, found.device
        elif found.device != first:
            error = MixedDevices(None, name, str(found.device), first_name, str(first))
            raise AttnError(error)
    return first


# ---- one entry per library ---------------------------------------------------------------


class _Library(NamedTuple):
    view: Callable[[Any, str, bool], ArrayView]
    allocate: Callable[[tuple[int, ...], str, Any], Any]
    current_stream: Callable[[int, Any], int]
    read: Callable[[Any], tuple[int, Hashable] | None] | None = None


_libraries: dict[type, _Library] = {}  # by type of array, filled as types are met


def _find_library(array: Any, name: str) -> _Library:
    kind = type(array)
    library = _libraries.get(kind)
    if library is None:
        library = _libraries[kind] = _recognise(kind, name)
    return library


def _recognise(kind: type, name: str) -> _Library:
    if issubclass(kind, np.ma.MaskedArray):
        reason = "its mask would be ignored; pass `.filled(...)`"
        raise AttnError(UnreadableArray(None, name, _describe_type(kind), reason))
    if issubclass(kind, np.ndarray):
        return _Library(_view_numpy, _allocate_numpy, _no_stream)
    cupy = sys.modules.get("cupy")
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return _Library(_view_cupy, _allocate_cupy, _stream_of_cupy, _read_cupy)
    if hasattr(kind, "data_ptr") and hasattr(kind, "stride"):
        return _Library(_view_torch, _allocate_torch, _stream_of_torch, _read_torch)
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _Library(_view_dlpack, _allocate_beside_dlpack, _stream_of_cupy)
    if hasattr(kind, "__cuda_array_interface__"):
        return _Library(_view_cuda_interface, _allocate_beside_cuda, _stream_of_cuda_interface)
    described = "None" if kind is type(None) else f"of type {_describe_type(kind)}"
    raise AttnError(NotAnArray(None, name, described))


def _describe_type(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


# ---- NumPy -------------------------------------------------------------------------------


def _view_numpy(array: Any, name: str, is_output: bool) -> ArrayView:
    dtype = _name_numpy_dtype(array.dtype, name)
    if is_output and not array.flags.writeable:
        raise AttnError(ReadOnlyOutput(None, name, "a NumPy array without the WRITEABLE flag"))
    pointer: int = array.ctypes.data
    strides = _count_elements(array.strides, dtype, name)
    return _finish(ArrayView(pointer, array.shape, strides, dtype, CPU, array), name, is_output)


def _allocate_numpy(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    return np.empty(shape, numpy_dtype(dtype))


def _no_stream(index: int, like: Any) -> int:
    return 0


_numpy_names: dict[Any, str] = {}  # np.dtype -> our name; its own `name` takes 1.5 us


def _name_numpy_dtype(dtype: Any, name: str) -> str:
    found = _numpy_names.get(dtype)
    if found is None:
        theirs = _OUR_NAME.get(dtype.name, dtype.name)
        if theirs not in ITEM_BYTES:
            raise _refuse_dtype(name, dtype.name)
        if not dtype.isnative:
            error = ForeignByteOrder(None, name, dtype.str, dtype.newbyteorder("=").str)
            raise AttnError(error)
        found = _numpy_names[dtype] = theirs
    return found


@cache
def numpy_dtype(dtype: str) -> Any:
    """The NumPy dtype of one of our names; bf16 is that of `ml_dtypes`."""
    if dtype == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_THEIR_NAME.get(dtype, dtype))


# ---- CuPy --------------------------------------------------------------------------------


def _view_cupy(array: Any, name: str, is_output: bool) -> ArrayView:
    dtype = _name_numpy_dtype(array.dtype, name)
    memory = array.data
    strides = _count_elements(array.strides, dtype, name)
    where = cuda_device(memory.device_id)
    return _finish(
        ArrayView(memory.ptr, array.shape, strides, dtype, where, array), name, is_output
    )


def _read_cupy(array: Any) -> tuple[int, Hashable]:
    memory = array.data
    pointer: int = memory.ptr
    device, low = memory.device_id, pointer % _ALIGNMENT
    return pointer, (type(array), array.dtype, device, array.shape, array.strides, low)


def _allocate_cupy(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    return _make_cupy_array(shape, dtype, like.data.device_id)


def _make_cupy_array(shape: tuple[int, ...], dtype: str, index: int) -> Any:
    import cupy

    with cupy.cuda.Device(index):
        return cupy.empty(shape, numpy_dtype(dtype))


def _stream_of_cupy(index: int, like: Any) -> int:
    import cupy

    return int(cupy.cuda.get_current_stream(index).ptr)


# ---- PyTorch -----------------------------------------------------------------------------

_torch_names: dict[Any, str] = {}  # torch.dtype -> our name


def _view_torch(tensor: Any, name: str, is_output: bool) -> ArrayView:
    dtype = _torch_names.get(tensor.dtype) or _name_torch_dtype(tensor.dtype, name)
    if tensor.requires_grad and _is_autograd_on():
        raise AttnError(GradientRequired(None, name))
    device = tensor.device
    if device.type == "cuda":
        where = cuda_device(device.index)
    elif device.type == "cpu":
        where = CPU
    else:
        raise AttnError(UnsupportedDevice(None, name, str(device)))
    try:
        pointer, shape, strides = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
    except RuntimeError as error:  # sparse, fake and functional tensors
        raise _refuse_access(tensor, name, str(error).partition("\n")[0]) from None
    if dtype in _THEIR_NAME and tensor.is_neg():
        raise _refuse_access(tensor, name, "its sign is not applied yet; pass `.resolve_neg()`")
    return _finish(ArrayView(pointer, shape, strides, dtype, where, tensor), name, is_output)


def _read_torch(tensor: Any) -> tuple[int, Hashable] | None:
    if (tensor.requires_grad and _is_autograd_on()) or tensor.is_neg():
        return None
    pointer: int = tensor.data_ptr()
    strides, low = tensor.stride(), pointer % _ALIGNMENT
    return pointer, (type(tensor), tensor.dtype, tensor.device, tensor.shape, strides, low)


def _name_torch_dtype(dtype: Any, name: str) -> str:
    theirs = str(dtype).removeprefix("torch.")
    ours = _OUR_NAME.get(theirs, theirs)
    if ours not in ITEM_BYTES:
        raise _refuse_dtype(name, theirs)
    _torch_names[dtype] = ours
    return ours


def _is_autograd_on() -> bool:
    """Whether PyTorch records gradients just now; under `no_grad` a tensor may require one."""
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def _allocate_torch(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    torch = sys.modules["torch"]
    return like.new_empty(shape, dtype=getattr(torch, _THEIR_NAME.get(dtype, dtype)))


def _stream_of_torch(index: int, like: Any) -> int:
    torch: Any = sys.modules["torch"]
    # The same number as torch.cuda.current_stream(index).cuda_stream, without the object
    # around it; the function is private, so a PyTorch without it is served as well.
    get_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if get_raw_stream is not None:
        return int(get_raw_stream(index))
    return int(torch.cuda.current_stream(index).cuda_stream)


# ---- DLPack ------------------------------------------------------------------------------
# Source: the DLPack C header, versions 0.8 (DLManagedTensor) and 1.0 (…Versioned).


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_DL_READ_ONLY = 1
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13
_DL_DTYPES = {  # (code, bits) -> our name
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 32): "uint32",
    (2, 16): "fp16",
    (2, 32): "fp32",
    (4, 16): "bf16",
    (6, 8): "bool",
}
_DL_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


_get_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _view_dlpack(array: Any, name: str, is_output: bool) -> ArrayView:
    if is_output and type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise AttnError(ReadOnlyOutput(None, name, "a JAX array, which is immutable"))
    kind, index = (int(value) for value in array.__dlpack_device__())
    if kind in (_DL_CPU, _DL_CUDA_HOST):
        where = CPU
    elif kind in (_DL_CUDA, _DL_CUDA_MANAGED):
        where = cuda_device(index)
    else:
        raise AttnError(UnsupportedDevice(None, name, f"type {kind} of DLPack"))
    # The capsule stays unconsumed: it frees the tensor when it dies, so the view holds it.
    capsule = _export_dlpack(array, name, where)
    tensor, is_read_only = _read_capsule(capsule)
    if is_output and is_read_only:
        raise AttnError(ReadOnlyOutput(None, name, "marked so by its library"))
    dtype = _DL_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        code = _DL_CODES.get(tensor.code, f"DLPack type {tensor.code} of bits ")
        lanes = f"x{tensor.lanes}" if tensor.lanes != 1 else ""
        raise _refuse_dtype(name, f"{code}{tensor.bits}{lanes}")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _pack_tightly(shape)
    pointer = (tensor.data or 0) + tensor.byte_offset
    found = ArrayView(pointer, shape, strides, dtype, where, (array, capsule))
    return _finish(found, name, is_output)


def _export_dlpack(array: Any, name: str, where: Device) -> Any:
    options: dict[str, Any] = {}
    if where.kind == "cuda":
        # The library makes this stream wait for its own work; 1 means the default stream.
        options["stream"] = _stream_of_cupy(where.index, array) or 1
    try:
        try:
            return array.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # a library from before DLPack 1.0
            return array.__dlpack__(**options)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _refuse_access(array, name, str(error).partition("\n")[0]) from None


def _read_capsule(capsule: Any) -> tuple[_DLTensor, bool]:
    try:
        address = _get_capsule_pointer(capsule, b"dltensor_versioned")
    except ValueError:  # the capsule has another name
        address = _get_capsule_pointer(capsule, b"dltensor")
        return _DLTensor.from_address(address), False
    managed = _DLManagedVersioned.from_address(address)
    return managed.tensor, bool(managed.flags & _DL_READ_ONLY)


def _allocate_beside_dlpack(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    kind, index = (int(value) for value in like.__dlpack_device__())
    if kind in (_DL_CUDA, _DL_CUDA_MANAGED):
        return _make_cupy_array(shape, dtype, index)
    return _allocate_numpy(shape, dtype, like)


# ---- __cuda_array_interface__ ------------------------------------------------------------


def _view_cuda_interface(array: Any, name: str, is_output: bool) -> ArrayView:
    facts = array.__cuda_array_interface__
    dtype = _name_numpy_dtype(np.dtype(facts["typestr"]), name)
    pointer, is_read_only = facts["data"]
    if is_output and is_read_only:
        raise AttnError(ReadOnlyOutput(None, name, "marked so by its library"))
    shape = tuple(facts["shape"])
    byte_strides = facts.get("strides")
    if byte_strides is None:
        strides = _pack_tightly(shape)
    else:
        strides = _count_elements(byte_strides, dtype, name)
    where = cuda_device(_find_pointer_device(pointer))
    return _finish(ArrayView(pointer or 0, shape, strides, dtype, where, array), name, is_output)


def _find_pointer_device(pointer: int | None) -> int:
    import cupy

    if not pointer:  # an empty array is everywhere
        return int(cupy.cuda.runtime.getDevice())
    return int(cupy.cuda.runtime.pointerGetAttributes(pointer).device)


def _allocate_beside_cuda(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    pointer, _ = like.__cuda_array_interface__["data"]
    return _make_cupy_array(shape, dtype, _find_pointer_device(pointer))


def _stream_of_cuda_interface(index: int, like: Any) -> int:
    stream = like.__cuda_array_interface__.get("stream")
    return _stream_of_cupy(index, like) if stream is None else int(stream)


# ---- what all have in common -------------------------------------------------------------


def _count_elements(byte_strides: Sequence[int], dtype: str, name: str) -> tuple[int, ...]:
    """Strides in elements from strides in bytes."""
    size = ITEM_BYTES[dtype]
    if size == 1:
        return tuple(byte_strides)
    for axis, stride in enumerate(byte_strides):
        if stride % size:
            has = f"a stride of {stride} bytes along axis {axis}"
            raise AttnError(MisalignedArray(None, name, has, size, dtype))
    return tuple([stride // size for stride in byte_strides])


def _pack_tightly(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array of this shape."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _finish(found: ArrayView, name: str, is_output: bool) -> ArrayView:
    """The checks that do not depend on the library."""
    size = ITEM_BYTES[found.dtype]
    if found.pointer % size:
        has = f"its first element at address {found.pointer:#x}"
        raise AttnError(MisalignedArray(None, name, has, size, found.dtype))
    if is_output and 0 not in found.shape:  # empty arrays have strides of any kind
        for axis, (count, stride) in enumerate(zip(found.shape, found.strides, strict=True)):
            if stride == 0 and count > 1:
                has = f"a broadcast view, all of whose elements along axis {axis} are one"
                raise AttnError(ReadOnlyOutput(None, name, has))
    return found


def _refuse_dtype(name: str, has: str) -> AttnError:
    advice = f"convert `{name}` to fp32, fp16 or bf16" if "float" in has else None
    error: Diagnostic = UnsupportedDtype(None, name, has, ", ".join(ITEM_BYTES), advice)
    return AttnError(error)


def _refuse_access(array: Any, name: str, reason: str) -> AttnError:
    return AttnError(UnreadableArray(None, name, _describe_type(type(array)), reason))
