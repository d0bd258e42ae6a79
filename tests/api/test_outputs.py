"""What a call gives back: `out=`, LSE and row maximum, layouts, empty problems."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngen
from attngen.api import Kernel
from attngen.oracle.dense import reference

from .texts import HQ, PLAIN, SIGMOID, SINK, SKV, SQ, B, D, catch, draw, make_qkv

ENGINES = ("numpy", "cpu")
OUTPUTS = PLAIN.replace("mask", "output lse, o, row_max\n    mask")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, host_compiler: None) -> Any:
    return request.param


@pytest.fixture(scope="module")
def plain(engine: Any) -> Kernel:
    return attngen.compile_text(PLAIN, engine=engine)


# ---- out= --------------------------------------------------------------------------------


def test_out_is_written_and_returned(plain: Kernel) -> None:
    q, k, v = make_qkv()
    right = plain(q, k, v)
    out = np.full((B, HQ, SQ, D), np.nan, np.float32)
    assert plain(q, k, v, out=out) is out
    assert np.array_equal(out, right)
    first, lse = plain(q, k, v, out=out, return_lse=True)
    assert first is out
    assert lse.shape == (B, HQ, SQ)


@pytest.mark.parametrize(
    ("shape", "dtype", "word"),
    [
        ((B, HQ, SQ, D + 1), np.float32, "(2, 4, 9, 9) of fp32"),
        ((B, SQ, HQ, D), np.float32, "(2, 9, 4, 8) of fp32"),
        ((HQ, SQ, D), np.float32, "(4, 9, 8) of fp32"),
        ((B, HQ, SQ, D), np.float16, "(2, 4, 9, 8) of fp16"),
        ((B, HQ, SQ, D), np.int32, "(2, 4, 9, 8) of int32"),
    ],
    ids=str,
)
def test_out_of_another_shape_or_dtype(
    plain: Kernel, shape: tuple[int, ...], dtype: Any, word: str
) -> None:
    out = np.zeros(shape, dtype)
    error = catch(plain, *make_qkv(), out=out)
    assert error.code == "A621"
    assert error.message() == f"argument `out` has shape {word}"
    assert error.label_text() == "expected (2, 4, 9, 8) of fp32"
    assert not out.any()


def test_out_that_must_not_be_written(plain: Kernel) -> None:
    out = np.zeros((B, HQ, SQ, D), np.float32)
    out.flags.writeable = False
    assert catch(plain, *make_qkv(), out=out).code == "A605"
    shared = np.lib.stride_tricks.as_strided(np.zeros(D, np.float32), (B, HQ, SQ, D), (0, 0, 0, 4))
    assert catch(plain, *make_qkv(), out=shared).code == "A605"
    assert catch(plain, *make_qkv(), out=[1.0]).code == "A601"


def test_out_must_not_share_memory_with_what_is_read() -> None:
    kernel = attngen.compile_text(
        "attention a {\n    tensor bias : float[Sq, Skv]\n    score s + bias[q, kv]\n}\n",
        engine="numpy",
    )
    arrays = {name: draw(1, 1, 8, 8) for name in "qkv"} | {"bias": draw(8, 8)}
    for name, array in arrays.items():
        error = catch(kernel, **arrays, out=array.reshape(1, 1, 8, 8)[:, :, ::-1])
        assert error.code == "A633"
        assert error.message() == f"argument `out` shares memory with `{name}`"
    memory = np.zeros(2 * 64 - 1, np.float32)
    first, second = memory[:64].reshape(1, 1, 8, 8), memory[63:].reshape(1, 1, 8, 8)
    assert "`v`" in catch(kernel, **(arrays | {"v": first}), out=second).message()


def test_out_may_be_a_slice_of_the_buffer_of_the_inputs(plain: Kernel) -> None:
    packed = draw(B, SQ, 4, HQ, D)
    q, k, v, out = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(4))
    right = plain(q.copy(), k.copy(), v.copy())
    before = packed[:, :, :3].copy()
    assert plain(q, k, v, out=out) is out
    assert np.array_equal(out, right)
    assert np.array_equal(packed[:, :, :3], before)


def test_a_refused_call_compiles_nothing(engine: Any) -> None:
    kernel = attngen.compile_text(PLAIN, engine=engine)
    q, k, v = make_qkv()
    catch(kernel, q, k, v[:, :1])
    catch(kernel, q, k, v, out=q)
    catch(kernel, q, k, v, surplus=1)
    assert kernel.compilations == 0


# ---- which outputs -----------------------------------------------------------------------


def test_outputs_come_in_the_order_of_their_line(engine: Any) -> None:
    q, k, v = make_qkv()
    kernel = attngen.compile_text(OUTPUTS, engine=engine)
    lse, o, row_max = kernel(q, k, v)
    assert (lse.shape, o.shape, row_max.shape) == ((B, HQ, SQ), (B, HQ, SQ, D), (B, HQ, SQ))
    assert lse.dtype == row_max.dtype == np.float32
    assert (row_max <= lse).all()
    assert len(kernel(q, k, v, return_lse=True)) == 3
    right = reference(kernel.unit, q, k, v)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
    assert np.allclose(row_max, right.row_max, rtol=1e-5, atol=1e-6)


def test_lse_comes_behind_what_the_line_names() -> None:
    q, k, v = make_qkv()
    kernel = attngen.compile_text(
        PLAIN.replace("mask", "output o, row_max\n    mask"), engine="numpy"
    )
    o, row_max = kernel(q, k, v)
    again, same_max, lse = kernel(q, k, v, return_lse=True)
    assert np.array_equal(again, o)
    assert np.array_equal(same_max, row_max)
    assert (lse >= row_max).all()


def test_sigmoid_has_no_lse(engine: Any) -> None:
    kernel = attngen.compile_text(SIGMOID, engine=engine)
    assert kernel(*make_qkv()).shape == (B, HQ, SQ, D)
    error = catch(kernel, *make_qkv(), return_lse=True)
    assert error.code == "A632"
    assert "return_lse" in error.message()
    assert "sigmoid" in error.message()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_o_has_the_dtype_of_the_operands(dtype: Any) -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    o, lse = kernel(*make_qkv(dtype), return_lse=True)
    assert o.dtype == np.dtype(dtype)
    assert lse.dtype == np.float32


# ---- layout ------------------------------------------------------------------------------


def test_bshd_is_bhsd_with_two_axes_exchanged(plain: Kernel) -> None:
    q, k, v = make_qkv()
    right, right_lse = plain(q, k, v, return_lse=True)
    q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v))
    o, lse = plain(q, k, v, return_lse=True, layout="bshd")
    assert o.shape == (B, SQ, HQ, D)
    assert o.flags.c_contiguous
    assert np.array_equal(o.transpose(0, 2, 1, 3), right)
    assert np.array_equal(lse, right_lse)
    out = np.empty_like(o)
    assert plain(q, k, v, out=out, layout="bshd") is out
    assert np.array_equal(out, o)
    assert catch(plain, q, k, v, out=out.transpose(0, 2, 1, 3), layout="bshd").code == "A621"
    part = plain.partial(q, k, v, layout="bshd")
    assert np.allclose(part.finalize()[0], right, atol=1e-6)


# ---- nothing to do -----------------------------------------------------------------------


@pytest.mark.parametrize("text", [PLAIN, SINK, SIGMOID], ids=["softmax", "sink", "sigmoid"])
@pytest.mark.parametrize(
    "change", [{"Sq": 0}, {"Skv": 0}, {"B": 0}, {"Sq": 0, "Skv": 0}, {"B": 0, "Skv": 0}], ids=str
)
def test_sizes_of_zero(engine: Any, text: str, change: dict[str, int]) -> None:
    sizes = {"B": B, "Sq": SQ, "Skv": SKV} | change
    kernel = attngen.compile_text(text, engine=engine)
    q = draw(sizes["B"], HQ, sizes["Sq"], D)
    k = draw(sizes["B"], 2, sizes["Skv"], D)
    sink = np.array([-math.inf, 0.0, 5.0, 100.0], np.float32)
    named = {"sink": sink} if text is SINK else {}
    found = kernel(q, k, k, **named) if text is not PLAIN else kernel(q, k, k, return_lse=True)
    o = found[0] if isinstance(found, tuple) else found
    assert o.shape == (sizes["B"], HQ, sizes["Sq"], D)
    if sizes["Skv"] == 0:
        assert not o.any()
    if text is not SIGMOID:
        lse = found[1]
        assert lse.shape == o.shape[:3]
        if sizes["Skv"] == 0:
            expected = np.full(lse.shape, -np.inf)
            if text is SINK:
                expected[...] = (sink + np.arange(sizes["B"])[:, None])[..., None]
            assert np.array_equal(lse, expected)
    part = kernel.partial(q, k, k, **named)
    assert part.acc.shape == o.shape
    finished, finished_lse = part.finalize()
    assert finished.shape == o.shape
    assert (finished_lse is None) == (text is SIGMOID)
    if finished_lse is not None and sizes["Skv"] == 0:
        assert np.array_equal(finished_lse, found[1])


def test_captured_tensors_may_be_empty(engine: Any) -> None:
    text = "attention a {\n    tensor doc : int32[B, Skv]\n    tensor table : float[N]\n"
    text += "    mask doc[b, kv] > 0 or kv < N and table[kv] > 0.0\n    output o, lse\n}\n"
    kernel = attngen.compile_text(text, engine=engine)
    q, k, v = make_qkv()
    nothing = np.zeros(0, np.float32)
    o, lse = kernel(q, k, v, doc=np.zeros((B, SKV), np.int32), table=nothing)
    assert not o.any()
    assert np.isneginf(lse).all()
    o, _ = kernel(q, k[:, :, :0], v[:, :, :0], doc=np.zeros((B, 0), np.int32), table=nothing)
    assert not o.any()


def test_heads_of_zero_give_nothing(plain: Kernel) -> None:
    _, k, v = make_qkv()
    assert plain(draw(B, 0, SQ, D), k, v).shape == (B, 0, SQ, D)
