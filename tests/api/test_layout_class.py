"""The layout class: which of a family's two texts runs q, k and v of some address and stride."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attngen
from attngen import api
from attngen.backend import device as device_module
from attngen.backend import launch as launch_module
from attngen.kernels import all_families

from .fake_gpu import FakeGpus
from .texts import HQ, PLAIN, SKV, SQ, B, D, catch, draw, make_qkv, words

MMA = "kernel forward_mma"
TEXT = PLAIN.replace("plain", "plain_rows")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_said", set())


def at_address(x: Any, offset: int) -> Any:
    """A copy that begins `offset` bytes behind a multiple of 16."""
    memory = np.empty(x.nbytes + 32, np.uint8)
    begin = -memory.ctypes.data % 16 + offset
    copy = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def with_gap(x: Any, axis: int, elements: int) -> Any:
    """A copy whose stride along one axis is longer by some elements; outer ones are aligned."""
    strides = [1]
    for i in (2, 1, 0):
        stride = strides[0] * x.shape[i + 1]
        strides.insert(0, stride + elements if i == axis else -(-stride // 8) * 8)
    size = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    flat = at_address(np.zeros(size, x.dtype), 0)
    byte_strides = tuple(s * x.itemsize for s in strides)
    copy = np.lib.stride_tricks.as_strided(flat, x.shape, byte_strides)
    copy[...] = x
    return copy


def with_steps(x: Any) -> Any:
    """A copy whose rows have a hole behind every element."""
    wide = at_address(np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype), 0)
    wide[..., ::2] = x
    return wide[..., ::2]


def aligned_qkv(dtype: Any = np.float16) -> Iterator[Any]:
    return (at_address(x, 0) for x in make_qkv(dtype))


# ---- the operands themselves -------------------------------------------------------------


UNALIGNED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "address": (lambda x: at_address(x, 2), "begins at an address that is no multiple of 16"),
    "tokens": (lambda x: with_gap(x, 2, 1), "stride of 18 bytes along its tokens"),
    "heads": (lambda x: with_gap(x, 1, 2), "along its heads, no multiple of 16"),
    "batch": (lambda x: with_gap(x, 0, 4), "along its batch, no multiple of 16"),
    "elements": (with_steps, "are 2 apart, not 1"),
}


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("kind", UNALIGNED)
def test_the_reason_names_operand_and_stride(name: str, kind: str) -> None:
    change, expected = UNALIGNED[kind]
    mma, simt = (all_families()[f] for f in ("forward_mma", "forward_simt"))
    operands = dict(zip("qkv", aligned_qkv(), strict=True))
    views = {n: device_module.view(x, n) for n, x in operands.items()}
    assert mma.why_unaligned(views) is None
    views[name] = device_module.view(change(operands[name]), name)
    reason = mma.why_unaligned(views)
    assert reason is not None
    assert f"`{name}`" in reason
    assert expected in reason
    assert simt.why_unaligned(views) is None


strides = st.integers(-40, 40) | st.integers(-5, 5).map(lambda n: 8 * n)
arrays = st.builds(
    SimpleNamespace,
    pointer=st.integers(0, 40).map(lambda n: 4096 + 2 * n) | st.just(4096),
    shape=st.tuples(*(st.integers(1, 3) for _ in "bhs"), st.sampled_from([8, 16])),
    strides=st.tuples(strides, strides, strides, st.sampled_from([1, 1, 1, 2, -1, 0])),
)


@given(arrays)
def test_aligned_means_that_every_copy_is(array: Any) -> None:
    """A copy takes 8 elements of a row; the row behind the last one is walked, too."""
    batches, heads, tokens, head_dim = array.shape
    counts = (range(batches), range(heads), range(tokens + 1), range(0, head_dim, 8))
    starts = [
        array.pointer + 2 * sum(i * s for i, s in zip(at, array.strides, strict=True))
        for at in itertools.product(*counts)
    ]
    right = array.strides[3] == 1 and all(start % 16 == 0 for start in starts)
    found = all_families()["forward_mma"].why_unaligned({"q": array})
    assert (found is None) == right


# ---- the text that is chosen -------------------------------------------------------------


def test_misaligned_arrays_compile_once_and_say_so(host_compiler: None) -> None:
    kernel = attngen.compile_text(TEXT, engine="cpu", schedule=MMA)
    q, k, v = aligned_qkv()
    right = kernel(q, k, v)
    assert kernel.compilations == 1
    with pytest.warns(UserWarning, match="forward_mma runs its slower text") as caught:
        found = kernel(q, at_address(k, 2), v)
    (warning,) = caught
    assert "plain_rows" in str(warning.message)
    assert "`k` begins at an address" in str(warning.message)
    assert warning.filename == __file__
    assert np.array_equal(found, right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change, _ in UNALIGNED.values():
            for i in range(3):
                operands = [q, k, v]
                operands[i] = change(operands[i])
                assert np.array_equal(kernel(*operands), right)
        assert np.array_equal(kernel(q, k, v), right)
    assert kernel.compilations == 2
    assert {key.is_aligned for key in kernel._compiled} == {True, False}


def test_prepare_makes_the_aligned_text(host_compiler: None) -> None:
    kernel = attngen.compile_text(TEXT, engine="cpu", schedule=MMA)
    kernel.prepare(dtype="fp16", head_dim=D)
    assert [key.is_aligned for key in kernel._compiled] == [True]
    kernel(*aligned_qkv())
    assert kernel.compilations == 1


def test_a_range_is_judged_by_where_it_begins(host_compiler: None) -> None:
    """Rows 17 elements apart: all of them, or an odd one first, need the other text."""
    kernel = attngen.compile_text(TEXT, engine="cpu", schedule=MMA)
    q, k, v = aligned_qkv()
    whole = kernel.partial(q, k, v)
    assert kernel.compilations == 1
    kernel.partial(q, k, v, kv_range=(3, 9), q_range=(1, 4))
    assert kernel.compilations == 1  # rows of 16 bytes: wherever it begins
    wide = with_gap(k, 2, 1)
    with pytest.warns(UserWarning, match="`k` has a stride of 18 bytes along its tokens"):
        parts = [kernel.partial(q, wide, v, kv_range=r) for r in ((0, 5), (5, SKV))]
    assert kernel.compilations == 2
    merged = parts[0].merge(parts[1])
    for found, right in zip(merged.finalize(), whole.finalize(), strict=True):
        assert np.allclose(found, right, atol=2e-3)


def test_a_single_token_with_an_odd_stride_is_misaligned(host_compiler: None) -> None:
    """The rows behind it are copied as zeros, from addresses that the stride would misalign."""
    kernel = attngen.compile_text(TEXT, engine="cpu", schedule=MMA)
    q, k, v = aligned_qkv()
    right = attngen.compile_text(TEXT, engine="numpy")(q[:, :, :1], k, v)
    with pytest.warns(UserWarning, match="`q` has a stride of 18 bytes along its tokens"):
        found = kernel(with_gap(q, 2, 1)[:, :, :1], k, v)
    assert np.allclose(found.astype(np.float32), right.astype(np.float32), atol=2e-3)


def test_a_checked_text_has_both_classes(host_compiler: None) -> None:
    kernel = attngen.compile_text(TEXT, engine="cpu", schedule=MMA)
    q, k, v = aligned_qkv()
    right = kernel(q, k, v, check=True)
    with pytest.warns(UserWarning, match="slower text"):
        assert np.array_equal(kernel(at_address(q, 2), k, v, check=True), right)
    assert [(key.is_checked, key.is_aligned) for key in kernel._compiled] == [
        (True, True),
        (True, False),
    ]


def test_a_family_with_one_text_compiles_once(host_compiler: None) -> None:
    kernel = attngen.compile_text(TEXT, engine="cpu", schedule="kernel forward_simt")
    q, k, v = aligned_qkv()
    right = kernel(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change, _ in UNALIGNED.values():
            assert np.array_equal(kernel(change(q), change(k), change(v)), right)
    assert kernel.compilations == 1


# ---- on a GPU ----------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    gpus = FakeGpus((9, 0))
    monkeypatch.setattr(launch_module, "load_driver", lambda: gpus)
    monkeypatch.setattr(device_module, "_libraries", {})
    monkeypatch.setattr(device_module, "_torch_names", {})
    monkeypatch.setitem(sys.modules, "torch", gpus.torch)
    return gpus


def test_a_launch_gets_the_text_of_its_class(gpus: FakeGpus) -> None:
    kernel = attngen.compile_text(TEXT, schedule=MMA)
    q, k, v = (gpus.tensor(x) for x in aligned_qkv())
    kernel(q, k, v)
    assert gpus.loads == [0]
    with pytest.warns(UserWarning, match="slower text"):
        kernel(q, gpus.tensor(at_address(k.array, 8)), v)
    assert gpus.loads == [0, 0]
    kernel(q, gpus.tensor(at_address(k.array, 6)), v)
    kernel(q, k, v)
    assert gpus.loads == [0, 0]
    texts = [
        compiled.rendered.source for compiled in kernel._compiled.values() if compiled.rendered
    ]
    assert len(set(texts)) == 2
    assert kernel.compilations == 2


def test_misaligned_arrays_are_not_compiled_for_in_a_capture(gpus: FakeGpus) -> None:
    kernel = attngen.compile_text(TEXT, schedule=MMA)
    kernel.prepare(dtype="fp16", head_dim=D)
    gpus.is_capturing_now = True
    q, k, v = (gpus.tensor(x) for x in aligned_qkv())
    kernel(q, k, v)
    odd = gpus.tensor(at_address(v.array, 2))
    with pytest.warns(UserWarning, match="slower text"):
        error = catch(kernel, q, k, odd)
    assert error.code == "A613"
    assert "once with arrays like these" in words(error)
    assert kernel.compilations == 1
    gpus.is_capturing_now = False
    kernel(q, k, odd)
    assert kernel.compilations == 2
    gpus.is_capturing_now = True
    kernel(q, k, odd)
    assert len(gpus.launches) == 3


def test_what_was_not_compiled_is_not_counted(gpus: FakeGpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    gpus.is_capturing_now = True
    x = gpus.tensor(draw(B, HQ, SQ, D))
    assert catch(kernel, x, x, x).code == "A613"
    assert (kernel.compilations, kernel.programs) == (0, ())
