"""What a call asks of a GPU: device, stream, capture, arguments, forks (O33, O35 to O38)."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.api import Kernel
from attngen.backend import device as device_module
from attngen.backend import launch as launch_module
from attngen.backend import nvrtc as nvrtc_module
from attngen.kernels import forward_mma
from tests.toolchain.fake_cuda import FakeCompiler

from .fake_gpu import FIRST_STREAM, FakeGpus, read_block
from .texts import HQ, PLAIN, SINK, SKV, SQ, B, D, catch, draw, make_qkv, words


def install(monkeypatch: pytest.MonkeyPatch, gpus: FakeGpus) -> FakeGpus:
    monkeypatch.setattr(launch_module, "load_driver", lambda: gpus)
    monkeypatch.setattr(device_module, "_libraries", {})
    monkeypatch.setattr(device_module, "_torch_names", {})
    monkeypatch.setitem(sys.modules, "torch", gpus.torch)
    return gpus


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return install(monkeypatch, FakeGpus((9, 0), (9, 0)))


@pytest.fixture
def kernel() -> Kernel:
    return attngen.compile_text(PLAIN)


def tensors(gpus: FakeGpus, index: int = 0) -> tuple[Any, Any, Any]:
    q, k, v = (gpus.tensor(x, index) for x in make_qkv())
    return q, k, v


# ---- the launch itself -------------------------------------------------------------------


def test_a_launch_has_the_arguments_of_the_call(gpus: FakeGpus) -> None:
    declared = "param left : int = 5\n    tensor doc : int32[B, Skv]"
    kernel = attngen.compile_text(
        PLAIN.replace("mask", f"{declared}\n    mask doc[b, kv] < left and")
    )
    q, k, v = tensors(gpus)
    k.array = k.array[:, :, ::-1]
    doc = gpus.tensor(np.zeros((B, 2 * SKV), np.int32)[:, ::2])
    out = gpus.tensor(np.zeros((B, SQ, HQ, D), np.float32).transpose(0, 2, 1, 3))
    assert kernel(q, k, v, doc=doc, left=3, out=out) is out
    (launch,) = gpus.launches
    rendered = kernel.render("sm_90a", dtype="fp32", head_dim=D)
    found = read_block(rendered.arguments, launch["block"])
    assert (found["q"], found["k"], found["t_doc"]) == (q.data_ptr(), k.data_ptr(), doc.data_ptr())
    assert found["o"] == out.data_ptr()
    assert found["lse"] == found["row_max"] == found["state_acc"] == 0
    assert [found[f"k_stride_{d}"] for d in "bhsd"] == [2 * SKV * D, SKV * D, -D, 1]
    assert [found[f"o_stride_{d}"] for d in "bhsd"] == [SQ * HQ * D, D, HQ * D, 1]
    assert [found[f"t_doc_stride{i}"] for i in (0, 1)] == [2 * SKV, 2]
    sizes = ("B", "Hq", "Hkv", "Sq", "Skv", "q_begin", "q_end", "kv_begin", "kv_end", "p_left")
    assert [found[name] for name in sizes] == [B, HQ, 2, SQ, SKV, 0, SQ, 0, SKV, 3]
    tiles = rendered.launch.tiles
    assert launch["grid"] == B * HQ * -(-SQ // tiles.tile_q)
    assert launch["threads"] == rendered.launch.threads
    assert launch["shared"] == rendered.launch.shared_bytes
    assert launch["stream"] == FIRST_STREAM
    assert gpus.allocated == []


def test_new_arrays_are_of_the_callers_library_and_device(gpus: FakeGpus, kernel: Kernel) -> None:
    q, k, v = tensors(gpus, 1)
    o, lse = kernel(q, k, v, return_lse=True)
    assert (o.shape, lse.shape) == ((B, HQ, SQ, D), (B, HQ, SQ))
    assert (str(o.dtype), str(lse.dtype)) == ("torch.float32", "torch.float32")
    assert o.device.index == lse.device.index == 1
    assert gpus.allocated == [o.shape, lse.shape]


def test_a_workspace_comes_from_the_callers_library(gpus: FakeGpus) -> None:
    kernel = attngen.compile_text(PLAIN, schedule="loop kv, q")
    kernel(*tensors(gpus))
    assert gpus.allocated == [(B, HQ, SQ, D), (B, HQ, SQ), (B, HQ, SQ), (B, HQ, SQ, D)]
    (launch,) = gpus.launches
    assert launch["grid"] == B * HQ
    layout = kernel.render("sm_90a", dtype="fp32", head_dim=D).arguments
    found = read_block(layout, launch["block"])
    assert 0 not in (found["state_m"], found["state_l"], found["state_acc"])


def test_a_launch_ahead_is_on_the_same_stream(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a graph is captured: its workspace comes from the caller's library."""
    monkeypatch.setattr(forward_mma, "PREPASS_KEYS", SKV - 1)
    text = "attention a {\n    tensor doc : int32[B, Skv]\n    mask doc[b, kv] > q\n}\n"
    kernel = attngen.compile_text(text, schedule="kernel forward_mma; tile q = 16, kv = 16")
    kernel.prepare(dtype="fp16", head_dim=D)
    gpus.is_capturing_now = True
    q = gpus.tensor(np.zeros((B, HQ, 17, D), np.float16))
    _, k, v = (gpus.tensor(x) for x in make_qkv(np.float16))
    for _ in range(2):
        kernel(q, k, v, doc=gpus.tensor(np.zeros((B, SKV), np.int32)))
    ahead, main, *again = gpus.launches
    assert [launch["grid"] for launch in again] == [ahead["grid"], main["grid"]] == [B, 2 * B * HQ]
    assert ahead["threads"] == kernel.programs[0].launches[0].threads
    assert (ahead["stream"], ahead["block"]) == (main["stream"], main["block"])
    assert gpus.allocated == [(B, HQ, 17, D), (B, 2, 33, 1)] * 2
    layout = kernel.render("sm_90a", dtype="fp16", head_dim=D).arguments
    ends = {read_block(layout, launch["block"])["key_ends"] for launch in gpus.launches}
    assert 0 not in ends


def test_nothing_is_launched_for_nothing(gpus: FakeGpus, kernel: Kernel) -> None:
    _, k, v = tensors(gpus)
    assert kernel(gpus.tensor(draw(B, HQ, 0, D)), k, v).shape == (B, HQ, 0, D)
    nothing = gpus.tensor(draw(0, 2, SKV, D))
    assert kernel(gpus.tensor(draw(0, HQ, SQ, D)), nothing, nothing).shape == (0, HQ, SQ, D)
    assert gpus.launches == []


@pytest.mark.parametrize(("batch", "heads"), [(66000, 1), (1, 65537), (257, 256)])
def test_the_grid_has_one_axis(gpus: FakeGpus, kernel: Kernel, batch: int, heads: int) -> None:
    x = gpus.tensor(np.broadcast_to(np.float32(0), (batch, heads, 4, D)))
    kernel(x, x, x, out=gpus.tensor(np.empty((batch, heads, 4, D), np.float32)))
    assert gpus.launches[0]["grid"] == batch * heads


def test_a_grid_beyond_its_limit_is_refused(gpus: FakeGpus, kernel: Kernel) -> None:
    shape = (2**16, 2**15, 1, 1)
    memory = np.zeros(2, np.float32)
    x = gpus.tensor(np.lib.stride_tricks.as_strided(memory, shape, (0, 0, 0, 0)))
    out = gpus.tensor(np.lib.stride_tricks.as_strided(memory[1:], shape, (4 * 2**15, 4, 4, 4)))
    error = catch(kernel, x, x, x, out=out)
    assert error.code == "A617"
    assert str(2**31) in error.message()


def test_shared_memory_is_opted_in_or_refused_with_the_sum(gpus: FakeGpus) -> None:
    """O34: more than the 48 KiB that a launch may have unasked."""
    x = gpus.tensor(draw(1, 1, 4, 256))
    kernel = attngen.compile_text(PLAIN, schedule="kernel forward_simt")
    kernel(x, x, x)
    (launch,) = gpus.launches
    assert launch["shared"] > 48 * 1024
    assert list(gpus.max_dynamic.values()) == [launch["shared"]]
    gpus.limit = 48 * 1024
    error = catch(attngen.compile_text(PLAIN, schedule="kernel forward_simt"), x, x, x)
    assert error.code == "A615"
    assert f"= {launch['shared']} bytes; cuda:0 allows 49152 bytes per block" in words(error)
    assert len(gpus.launches) == 1


# ---- O36: devices ------------------------------------------------------------------------


def test_the_device_is_that_of_the_arrays(gpus: FakeGpus, kernel: Kernel) -> None:
    for current in (0, 1):
        gpus.set_device(current)
        for index in (1, 0, 1):
            kernel(*tensors(gpus, index))
            launch = gpus.launches[-1]
            assert (launch["device"], launch["stream"]) == (index, FIRST_STREAM + index)
            assert gpus.current_device() == current
    assert gpus.loads == [1, 0]
    assert kernel.compilations == 1


def test_two_kinds_of_gpu_need_two_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = install(monkeypatch, FakeGpus((9, 0), (8, 6), (8, 0)))
    kernel = attngen.compile_text(PLAIN)
    for index in (0, 1, 2, 1, 0):
        kernel(*tensors(gpus, index))
    assert kernel.compilations == 3
    assert gpus.loads == [0, 1, 2]


def test_arrays_on_two_devices_are_refused(gpus: FakeGpus) -> None:
    kernel = attngen.compile_text(SINK)
    q, k, v = tensors(gpus)
    sink = draw(HQ)
    out = gpus.tensor(np.zeros((B, HQ, SQ, D), np.float32), 1)
    there = gpus.tensor(sink, 1)
    cases: list[tuple[str, tuple[Any, Any, Any], dict[str, Any]]] = [
        ("k", (q, gpus.tensor(k.array, 1), v), {"sink": gpus.tensor(sink)}),
        ("sink", (q, k, v), {"sink": there}),
        ("out", (q, k, v), {"sink": gpus.tensor(sink), "out": out}),
    ]
    for name, operands, named in cases:
        error = catch(kernel, *operands, **named)
        assert error.code == "A608"
        assert error.message() == f"argument `{name}` is on cuda:1, but `q` is on cuda:0"
    assert "is on cpu" in catch(kernel, q, k, v, sink=sink).message()
    assert "is on cpu" in catch(kernel, q, k, v, sink=gpus.tensor(sink), out=out.array).message()
    assert gpus.launches == []
    assert kernel.compilations == 0


def test_the_engine_must_be_where_the_arrays_are(gpus: FakeGpus) -> None:
    for engine in ("cpu", "numpy"):
        error = catch(attngen.compile_text(PLAIN, engine=engine), *tensors(gpus))
        assert error.message().startswith(f"`engine={engine}` is not supported")
        assert "cuda:0" in error.message()


def test_threads_launch_on_devices_of_their_own(gpus: FakeGpus, kernel: Kernel) -> None:
    start = threading.Barrier(6)

    def work(thread: int) -> None:
        operands = tensors(gpus, thread % 2)
        start.wait(60)
        for _ in range(10):
            kernel(*operands)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert sorted(gpus.loads) == [0, 1]
    assert [launch["device"] for launch in gpus.launches].count(1) == 30
    assert kernel.compilations == 1


def run_in_child(function: Any) -> str:
    """What a forked child says; it is ended when it hangs."""
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
    timer = threading.Timer(60, os.kill, (child, 9))
    timer.start()
    with os.fdopen(receive, "rb") as pipe:
        answer = pipe.read().decode()
    timer.cancel()
    os.waitpid(child, 0)
    return answer


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@needs_fork
def test_a_kernel_may_be_defined_before_a_fork(gpus: FakeGpus, kernel: Kernel) -> None:
    kernel.render("sm_90a", dtype="fp32", head_dim=D)

    def use() -> int:
        gpus.process_id = os.getpid()  # the child's own CUDA
        kernel(*tensors(gpus))
        return len(gpus.launches)

    assert run_in_child(use) == "1"


@needs_fork
def test_a_child_of_a_user_of_cuda_is_told(gpus: FakeGpus, kernel: Kernel) -> None:
    kernel(*tensors(gpus))

    def use() -> str:
        fresh = attngen.compile_text(PLAIN)
        codes = [
            catch(call, *tensors(gpus)).code
            for call in (kernel, kernel.partial, fresh, fresh.partial)
        ]
        codes += [
            catch(each.prepare, dtype="fp32", head_dim=D).code
            for each in (kernel, fresh, attngen.compile_text(PLAIN))
        ]
        return " ".join(codes)

    assert run_in_child(use) == " ".join(["A612"] * 7)
    kernel(*tensors(gpus))
    assert len(gpus.launches) == 2


# ---- O38: capture ------------------------------------------------------------------------


def test_the_first_call_in_a_capture_is_refused_untouched(
    gpus: FakeGpus, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    real = Kernel._module
    monkeypatch.setattr(Kernel, "_module", lambda self, c: compiled.append("once") or real(self, c))
    gpus.is_capturing_now = True
    for call in (kernel, kernel.partial):
        error = catch(call, *tensors(gpus))
        assert error.code == "A613"
        assert "cuda:0" in error.message()
        assert "prepare" in words(error)
    assert gpus.allocated == []
    assert gpus.loads == []
    assert compiled == []
    gpus.is_capturing_now = False
    kernel(*tensors(gpus))
    gpus.is_capturing_now = True
    kernel(*tensors(gpus))
    assert len(gpus.launches) == 2
    assert catch(kernel, *tensors(gpus, 1)).code == "A613"
    assert "check=True" in catch(kernel, *tensors(gpus), check=True).message()


def test_a_prepared_kernel_can_be_captured(gpus: FakeGpus, kernel: Kernel) -> None:
    kernel.prepare(dtype="fp32", head_dim=D, devices=(0, 1))
    assert gpus.loads == [0, 1]
    assert gpus.launches == []
    gpus.is_capturing_now = True
    for index in (0, 1):
        out = gpus.tensor(np.zeros((B, HQ, SQ, D), np.float32), index)
        kernel(*tensors(gpus, index), out=out)
    assert gpus.loads == [0, 1]
    assert gpus.allocated == []
    assert [launch["device"] for launch in gpus.launches] == [0, 1]


def test_preparing_for_a_gpu_that_is_not_there(gpus: FakeGpus, kernel: Kernel) -> None:
    for index in (2, -1, "cuda:0"):
        error = catch(kernel.prepare, dtype="fp32", head_dim=D, devices=(index,))
        assert error.code == "A611"
        assert f"no device {index!r} among 2" in error.message()
    assert kernel.compilations == 0


# ---- partial results ---------------------------------------------------------------------


class FakeCupy:
    """CuPy's name, for arrays that come through DLPack."""

    ndarray = np.ndarray

    @staticmethod
    def from_dlpack(tensor: Any) -> Any:
        return tensor.array


def test_the_sink_of_a_partial_result_is_computed_on_the_gpu(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy)
    kernel = attngen.compile_text(SINK)
    q, k, v = tensors(gpus, 1)
    gpus.is_capturing_now = False
    state = kernel.partial(q, k, v, sink=gpus.tensor(draw(HQ), 1), q_range=(2, 7), kv_range=(3, 9))
    assert state.acc.shape == (B, HQ, 5, D)
    assert state.sink.shape == (B, HQ, 1)
    layout = kernel.render("sm_90a", dtype="fp32", head_dim=D).arguments
    main, for_sink = (read_block(layout, launch["block"]) for launch in gpus.launches)
    assert [main[n] for n in ("q_begin", "q_end", "kv_begin", "kv_end")] == [2, 7, 3, 9]
    assert (main["o"], main["lse"]) == (0, 0)
    assert main["state_acc"] == state.acc.ctypes.data
    assert [for_sink[n] for n in ("q_begin", "q_end", "kv_begin", "kv_end")] == [2, 3, 3, 3]
    assert for_sink["lse"] == state.sink.ctypes.data
    assert for_sink["o"] != 0
    assert {(x["device"], x["stream"]) for x in gpus.launches} == {(1, FIRST_STREAM + 1)}


# ---- O33: the GPU and the compiler -------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
    ids=str,
)
def test_the_target_is_that_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], target: str
) -> None:
    gpus = install(monkeypatch, FakeGpus(capability))
    kernel = attngen.compile_text(PLAIN)
    kernel(*tensors(gpus))
    assert [key.target for key in kernel._compiled] == [target]


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (10, 3), (11, 0), (99, 0)], ids=str)
def test_a_gpu_without_a_target_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    gpus = install(monkeypatch, FakeGpus(capability))
    kernel = attngen.compile_text(PLAIN)
    for call in (lambda: kernel(*tensors(gpus)), lambda: kernel.prepare(dtype="fp32", head_dim=8)):
        error = catch(call)
        assert error.code == "A492"
        assert "{}.{}".format(*capability) in error.message()
        assert "sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120" in words(error)
        assert "NVRTC" in words(error)
    assert kernel.compilations == 0


def test_an_old_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = install(monkeypatch, FakeGpus((9, 0)))
    old = FakeCompiler(archs=(70, 75, 80))
    monkeypatch.setattr(nvrtc_module, "load_nvrtc", lambda: old)
    error = catch(attngen.compile_text(PLAIN), *tensors(gpus))
    assert error.code == "A502"
    assert "sm_90a" in error.message()
    assert "sm_70, sm_75, sm_80" in words(error)
    assert old.runs == []


def test_another_target_may_be_asked_for(gpus: FakeGpus) -> None:
    kernel = attngen.compile_text(PLAIN, arch="sm_80")
    kernel(*tensors(gpus))
    assert [key.target for key in kernel._compiled] == ["sm_80"]
    gpus.load_status = 209  # CUDA_ERROR_NO_BINARY_FOR_GPU
    error = catch(attngen.compile_text(PLAIN, arch="sm_100a"), *tensors(gpus))
    assert error.code == "A614"
    assert "plain for sm_100a" in error.message()
