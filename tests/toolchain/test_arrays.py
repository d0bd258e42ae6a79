"""Arrays of every library as views: no copies, any strides, and refusals that say why."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attngen.backend import device as device_module
from attngen.backend.device import (
    CPU,
    ITEM_BYTES,
    Device,
    allocate,
    cuda_device,
    current_stream,
    find_common_device,
    numpy_dtype,
    view,
)
from attngen.diagnostics.diagnostic import AttnError, Diagnostic


def catch(array: Any, **options: bool) -> Diagnostic:
    with pytest.raises(AttnError) as caught:
        view(array, "doc", **options)
    (diagnostic,) = caught.value.diagnostics
    assert "`doc`" in diagnostic.message()
    return diagnostic


def read_floats(found: device_module.ArrayView) -> list[float]:
    """The elements, by walking pointer and strides."""
    values = []
    for index in np.ndindex(*found.shape):
        offset = sum(i * stride for i, stride in zip(index, found.strides, strict=True))
        values.append(ctypes.c_float.from_address(found.pointer + 4 * offset).value)
    return values


class Exporter:
    """An array of a library that only speaks DLPack, of before or after version 1.0."""

    def __init__(self, array: Any, *, is_old: bool = False, device: tuple[int, int] = (1, 0)):
        self.array, self.is_old, self.device = array, is_old, device
        self.options: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if self.is_old and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.options = options
        options = {k: v for k, v in options.items() if k != "stream"}
        return self.array.__dlpack__(**options)


# ---- NumPy and DLPack --------------------------------------------------------------------

BASE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
LAYOUTS = [
    BASE,
    BASE.transpose(2, 0, 1),
    BASE[::-1, :, ::2],
    BASE[:, 1:2],
    np.broadcast_to(BASE[0, 0], (3, 4)),
    np.float32(5) + np.zeros((), np.float32)[...],
    BASE[:0],
]
WRAPPERS = [
    lambda array: array,
    Exporter,
    lambda array: Exporter(array, is_old=True),
]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["numpy", "dlpack", "old dlpack"])
@pytest.mark.parametrize("array", LAYOUTS, ids=lambda array: str(array.strides))
def test_any_strides_are_seen_without_a_copy(wrap: Any, array: Any) -> None:
    array = np.asarray(array)
    if wrap is WRAPPERS[2] and not array.flags.writeable:
        pytest.skip("NumPy does not export read-only arrays in the old format")
    found = view(wrap(array), "q")
    assert found.shape == array.shape
    assert found.dtype == "fp32"
    assert found.device == CPU
    assert read_floats(found) == list(array.ravel())
    if array.size:
        assert found.pointer == array.ctypes.data
        assert tuple(4 * stride for stride in found.strides) == array.strides


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_every_dtype_has_its_name(name: str) -> None:
    array = np.zeros((2, 3), numpy_dtype(name))
    assert array.itemsize == ITEM_BYTES[name]
    assert view(array, "q").dtype == name
    assert view(array, "q").strides == (3, 1)
    if name != "bf16":  # NumPy does not export it
        assert view(Exporter(array), "q").dtype == name


def test_bf16_is_that_of_ml_dtypes() -> None:
    assert numpy_dtype("bf16") == np.dtype(ml_dtypes.bfloat16)


def test_a_view_keeps_the_memory_alive() -> None:
    array = np.arange(6, dtype=np.float32)
    watch = weakref.ref(array)
    for found in (view(array, "q"), view(Exporter(array), "q")):
        assert read_floats(found) == [0, 1, 2, 3, 4, 5]
    found = view(Exporter(array), "q")
    del array
    gc.collect()
    assert read_floats(found) == [0, 1, 2, 3, 4, 5]
    del found
    gc.collect()
    assert watch() is None


def test_a_view_keeps_an_exported_temporary_alive() -> None:
    class Copying(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            temporary = self.array.copy()
            self.watch = weakref.ref(temporary)
            return temporary.__dlpack__(**options)

    exporter = Copying(BASE)
    found = view(exporter, "q")
    gc.collect()
    assert exporter.watch() is not None
    assert read_floats(found) == list(BASE.ravel())
    del found
    gc.collect()
    assert exporter.watch() is None


class RawExporter:
    """A capsule made by hand, for what NumPy never exports: an offset, no strides, vectors."""

    def __init__(self, *, offset: int = 0, code: int = 2, bits: int = 32, lanes: int = 1) -> None:
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.tensor = device_module._DLTensor(
            BASE.ctypes.data, 1, 0, 2, code, bits, lanes, self.shape, None, offset
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self) -> Any:
        make = ctypes.PYFUNCTYPE(
            ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        )(("PyCapsule_New", ctypes.pythonapi))
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


def test_the_rarer_fields_of_dlpack() -> None:
    found = view(RawExporter(offset=8), "q")
    assert found[:5] == (BASE.ctypes.data + 8, (2, 3), (3, 1), "fp32", CPU)
    assert read_floats(found) == [2, 3, 4, 5, 6, 7]
    assert "float32x4" in catch(RawExporter(lanes=4)).message()
    assert "DLPack type 9" in catch(RawExporter(code=9, bits=8)).message()


@pytest.mark.parametrize(
    ("dtype", "has"),
    [("f8", "float64"), ("c8", "complex64"), ("u8", "uint64"), ("u2", "uint16")],
)
def test_other_dtypes_are_refused(dtype: str, has: str) -> None:
    array = np.zeros(4, dtype)
    for wrapped in (array, Exporter(array)):
        error = catch(wrapped)
        assert error.code == "A602"
        assert error.message() == f"argument `doc` has dtype {has}"
        assert "bf16" in (error.label_text() or "")
    assert (error.hint_text() is not None) == (has == "float64")


def test_foreign_byte_order_is_refused() -> None:
    foreign = np.dtype("f4").newbyteorder("S")
    error = catch(np.zeros(4, foreign))
    assert error.code == "A603"
    assert foreign.str in error.message()
    assert np.dtype("f4").str in (error.label_text() or "")


def test_elements_at_odd_addresses_are_refused() -> None:
    packed = np.zeros(4, np.dtype([("a", "u1"), ("b", "<f4")]))
    error = catch(packed["b"])
    assert error.code == "A604"
    assert "5 bytes along axis 0" in error.message()
    padded = np.zeros(4, np.dtype([("a", "u1"), ("b", "<f4"), ("c", "u1", 3)]))
    assert "first element" in catch(padded["b"]).message()


def test_read_only_outputs_are_refused() -> None:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    view(array, "doc")
    for wrapped in (array, Exporter(array)):
        assert catch(wrapped, is_output=True).code == "A605"
    writable = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (3, 4), (0, 4))
    error = catch(writable, is_output=True)
    assert error.code == "A605"
    assert "axis 0" in (error.label_text() or "")
    view(writable, "doc")


@pytest.mark.parametrize(
    ("thing", "has"), [([1.0], "of type list"), (None, "None"), (1.5, "of type float")]
)
def test_what_is_no_array_is_refused(thing: Any, has: str) -> None:
    error = catch(thing)
    assert error.code == "A601"
    assert error.message() == f"argument `doc` is {has}, not an array"


def test_a_masked_array_is_refused() -> None:
    assert catch(np.ma.masked_array([1.0], [True])).code == "A609"


def test_a_library_that_refuses_is_quoted() -> None:
    class Refusing:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("sparse arrays have no single buffer\nmore")

    error = catch(Refusing())
    assert error.code == "A609"
    assert error.label_text() == "sparse arrays have no single buffer"


def test_other_devices_are_refused() -> None:
    error = catch(Exporter(BASE, device=(8, 0)))  # Metal
    assert error.code == "A607"


def test_an_immutable_output_is_refused() -> None:
    class Array(Exporter):
        __module__ = "jaxlib._jax"

    view(Array(BASE), "doc")
    assert "immutable" in (catch(Array(BASE), is_output=True).label_text() or "")


# ---- PyTorch, by its shape only ----------------------------------------------------------


class FakeTensor:
    def __init__(self, array: Any, dtype: str = "float32", device: str = "cpu") -> None:
        self.array = array
        self.dtype = fake_torch_dtype(dtype)
        kind, _, index = device.partition(":")
        self.device = SimpleNamespace(type=kind, index=int(index) if index else None)
        self.requires_grad = False
        self.is_negated = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def is_neg(self) -> bool:
        return self.is_negated

    def new_empty(self, shape: tuple[int, ...], dtype: Any) -> FakeTensor:
        made = FakeTensor(np.empty(shape, np.float32), str(dtype).removeprefix("torch."))
        made.device = self.device
        return made


class FakeDtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


_dtypes: dict[str, FakeDtype] = {}


def fake_torch_dtype(name: str) -> FakeDtype:
    return _dtypes.setdefault(name, FakeDtype(name))


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(
        is_grad_enabled=lambda: True,
        bfloat16=fake_torch_dtype("bfloat16"),
        float32=fake_torch_dtype("float32"),
        int32=fake_torch_dtype("int32"),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 700 + index),
        cuda=SimpleNamespace(current_stream=lambda index: SimpleNamespace(cuda_stream=800 + index)),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_a_tensor_is_seen_without_importing_torch() -> None:
    was_loaded = "torch" in sys.modules
    found = view(FakeTensor(BASE.transpose(1, 0, 2)), "q")
    assert found[:5] == (BASE.ctypes.data, (3, 2, 4), (4, 12, 1), "fp32", CPU)
    on_gpu = view(FakeTensor(BASE, "bfloat16", "cuda:1"), "q")
    assert on_gpu.dtype == "bf16"
    assert on_gpu.device is cuda_device(1)
    assert ("torch" in sys.modules) == was_loaded


def test_gradients_are_refused_in_words(fake_torch: SimpleNamespace) -> None:
    tensor = FakeTensor(BASE)
    tensor.requires_grad = True
    error = catch(tensor)
    assert error.code == "A606"
    assert "gradient" in error.message()
    assert "no_grad" in (error.hint_text() or "")
    fake_torch.is_grad_enabled = lambda: False
    view(tensor, "doc")


def test_odd_tensors_are_refused(fake_torch: SimpleNamespace) -> None:
    assert catch(FakeTensor(BASE, "float64")).message() == "argument `doc` has dtype float64"
    assert catch(FakeTensor(BASE, device="mps:0")).code == "A607"
    assert catch(FakeTensor(BASE, device="meta")).code == "A607"
    negated = FakeTensor(BASE)
    negated.is_negated = True
    assert "resolve_neg" in (catch(negated).label_text() or "")

    class FakeSparse(FakeTensor):
        def data_ptr(self) -> int:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    error = catch(FakeSparse(BASE))
    assert error.code == "A609"
    assert "storage" in (error.label_text() or "")


def test_new_arrays_are_of_the_callers_library(fake_torch: SimpleNamespace) -> None:
    made = allocate((2, 3), "bf16", BASE)
    assert isinstance(made, np.ndarray)
    assert (made.shape, made.dtype) == ((2, 3), np.dtype(ml_dtypes.bfloat16))
    assert isinstance(allocate((2, 3), "int32", Exporter(BASE)), np.ndarray)
    tensor = FakeTensor(BASE, device="cuda:1")
    made = allocate((2, 3), "bf16", tensor)
    assert isinstance(made, FakeTensor)
    assert view(made, "o", is_output=True)[3:5] == ("bf16", cuda_device(1))


def test_the_stream_is_the_callers(fake_torch: SimpleNamespace) -> None:
    tensor = FakeTensor(BASE, device="cuda:1")
    assert current_stream(cuda_device(1), tensor) == 701
    fake_torch._C = SimpleNamespace()
    assert current_stream(cuda_device(1), tensor) == 801
    assert current_stream(CPU, tensor) == 0


# ---- CuPy and __cuda_array_interface__, without a GPU ------------------------------------


class FakeCupyArray:
    """Two GPUs in CPU memory."""

    current = 0

    def __init__(self, array: Any, device_id: int = 0) -> None:
        self.array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=device_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)


class FakeCupyDevice:
    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        self.before, FakeCupyArray.current = FakeCupyArray.current, self.index

    def __exit__(self, *_: object) -> None:
        FakeCupyArray.current = self.before


class CudaExporter:
    def __init__(self, array: Any, *, stream: int | None = None, is_read_only: bool = False):
        self.array, self.stream, self.is_read_only = array, stream, is_read_only

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        facts = dict(self.array.__array_interface__)
        facts["data"] = (facts["data"][0], self.is_read_only)
        facts["stream"] = self.stream
        return facts


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    runtime = SimpleNamespace(
        getDevice=lambda: FakeCupyArray.current,
        pointerGetAttributes=lambda pointer: SimpleNamespace(device=1),
    )
    module = SimpleNamespace(
        ndarray=FakeCupyArray,
        empty=lambda shape, dtype: FakeCupyArray(np.empty(shape, dtype), FakeCupyArray.current),
        cuda=SimpleNamespace(
            Device=FakeCupyDevice,
            runtime=runtime,
            get_current_stream=lambda index: SimpleNamespace(ptr=900 + index),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(device_module, "_libraries", {})
    return module


def test_a_cupy_array_and_its_device(fake_cupy: SimpleNamespace) -> None:
    array = FakeCupyArray(BASE[::-1], 1)
    found = view(array, "q", is_output=True)
    assert found[:5] == (BASE[1].ctypes.data, (2, 3, 4), (-12, 4, 1), "fp32", cuda_device(1))
    made = allocate((4,), "bf16", array)
    assert isinstance(made, FakeCupyArray)
    assert view(made, "o").device == cuda_device(1)
    assert FakeCupyArray.current == 0
    assert current_stream(cuda_device(1), array) == 901


def test_an_array_with_only_the_cuda_interface(fake_cupy: SimpleNamespace) -> None:
    found = view(CudaExporter(BASE.transpose(0, 2, 1)), "q", is_output=True)
    assert found[:5] == (BASE.ctypes.data, (2, 4, 3), (12, 1, 4), "fp32", cuda_device(1))
    assert view(CudaExporter(BASE), "q").strides == (12, 4, 1)
    assert current_stream(cuda_device(1), CudaExporter(BASE)) == 901
    assert current_stream(cuda_device(1), CudaExporter(BASE, stream=2)) == 2
    assert catch(CudaExporter(BASE, is_read_only=True), is_output=True).code == "A605"
    assert catch(CudaExporter(BASE.astype("f8"))).code == "A602"
    assert isinstance(allocate((2,), "fp32", CudaExporter(BASE)), FakeCupyArray)


def test_dlpack_on_a_gpu_waits_for_the_producer(fake_cupy: SimpleNamespace) -> None:
    exporter = Exporter(BASE, device=(2, 1))
    found = view(exporter, "q")
    assert found.device == cuda_device(1)
    assert exporter.options["stream"] == 901
    fake_cupy.cuda.get_current_stream = lambda index: SimpleNamespace(ptr=0)
    view(exporter, "q")
    assert exporter.options["stream"] == 1  # 0 is not allowed there
    assert isinstance(allocate((2,), "fp32", exporter), FakeCupyArray)
    assert view(Exporter(BASE, device=(3, 0)), "q").device == CPU  # pinned host memory


# ---- several arrays ----------------------------------------------------------------------


def test_all_arrays_of_a_call_are_on_one_device() -> None:
    on_cpu = view(BASE, "q")
    first, second = (view(FakeTensor(BASE, device=f"cuda:{index}"), "x") for index in (0, 1))
    assert find_common_device({}) == CPU
    assert find_common_device({"q": first, "k": first}) == Device("cuda", 0)
    assert str(cuda_device(1)) == "cuda:1"
    for other in (second, on_cpu):
        with pytest.raises(AttnError) as caught:
            find_common_device({"q": first, "k": first, "doc": other})
        (error,) = caught.value.diagnostics
        assert error.code == "A608"
        assert error.message() == (f"argument `doc` is on {other.device}, but `q` is on cuda:0")
