"""Wrong arguments of a call: the message names the argument, what it has, what was expected."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngen
from attngen.api import Kernel
from attngen.diagnostics.diagnostic import AttnError

from .texts import FULL, HQ, PLAIN, SKV, SQ, B, D, catch, draw, make_qkv, make_tensors, words


@pytest.fixture(scope="module")
def plain() -> Kernel:
    return attngen.compile_text(PLAIN, name="plain.attn", engine="numpy")


@pytest.fixture(scope="module")
def full() -> Kernel:
    return attngen.compile_text(FULL, name="full.attn", engine="numpy")


# ---- q, k, v -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "argument", "has", "expected"),
    [
        ({"q": draw(HQ, SQ, D)}, "q", "(4, 9, 8)", "(B, Hq, Sq, Dqk)"),
        ({"v": draw(B, 2, SKV, 1, D)}, "v", "(2, 2, 21, 1, 8)", "(B, Hkv, Skv, Dv)"),
        ({"k": draw(3, 2, SKV, D)}, "k", "(3, 2, 21, 8)", "B = 2"),
        ({"k": draw(B, 2, SKV, D + 1)}, "k", "(2, 2, 21, 9)", "Dqk = 8"),
        ({"v": draw(B, 2, SKV + 1, D)}, "v", "(2, 2, 22, 8)", "(2, 2, 21, Dv)"),
        ({"v": draw(B, 1, SKV, D)}, "v", "(2, 1, 21, 8)", "(2, 2, 21, Dv)"),
        ({"v": draw(1, 2, SKV, D)}, "v", "(1, 2, 21, 8)", "(2, 2, 21, Dv)"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_shapes_of_the_operands(
    plain: Kernel, change: dict[str, Any], argument: str, has: str, expected: str
) -> None:
    q, k, v = make_qkv()
    error = catch(plain, **({"q": q, "k": k, "v": v} | change))
    assert error.code == "A621"
    assert error.message() == f"argument `{argument}` has shape {has}"
    assert expected in words(error)


def test_shapes_are_said_in_the_order_of_the_caller(plain: Kernel) -> None:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in make_qkv())
    error = catch(plain, q, k, v[:, :-1], layout="bshd")
    assert error.message() == "argument `v` has shape (2, 20, 2, 8)"
    assert error.label_text() == "expected (2, 21, 2, Dv), as k has"
    error = catch(plain, q, k[..., :-1], v, layout="bshd")
    assert error.message() == "argument `k` has shape (2, 21, 2, 7)"
    assert error.label_text() == "expected (B, Skv, Hkv, Dqk) with B = 2, Dqk = 8"
    assert catch(plain, q[0], k, v, layout="bshd").label_text() == "expected (B, Sq, Hq, Dqk)"


@pytest.mark.parametrize(
    ("Hq", "Hkv"), [(6, 4), (1, 2), (4, 0), (0, 0)], ids=lambda count: str(count)
)
def test_heads_that_cannot_share(plain: Kernel, Hq: int, Hkv: int) -> None:
    q, k = draw(B, Hq, SQ, D), draw(B, Hkv, SKV, D)
    error = catch(plain, q, k, k)
    assert error.code == "A627"
    assert str(Hq) in error.message()
    assert str(Hkv) in error.message()


@pytest.mark.parametrize("size", [0, 257, 512])
def test_head_dims_outside_the_supported_ones(plain: Kernel, size: int) -> None:
    q, k, v = draw(1, 1, 2, size), draw(1, 1, 3, size), draw(1, 1, 3, 8)
    for operands, argument in (((q, k, v), "q"), ((draw(1, 1, 2, 8), v, k), "v")):
        error = catch(plain, *operands)
        assert error.code == "A628"
        assert f"`{argument}`" in error.message()
        assert str(size) in error.message()
        assert "1 to 256" in words(error)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sizes_beyond_32_bits(plain: Kernel, axis: int) -> None:
    shape = [1, 1, 1, 8]
    shape[axis] = 2**31
    long = np.broadcast_to(np.zeros(8, np.float32), shape)
    error = catch(plain, long, long, long)
    assert error.code == "A629"
    assert f"{('B', 'Hq', 'Sq')[axis]} is {2**31}" in error.message()


def test_what_the_block_declares_is_checked() -> None:
    text = "attention a {\n    dtype fp32\n    head_dim qk = 8, v = 8\n    heads q = 4, kv = 2\n}\n"
    kernel = attngen.compile_text(text, engine="numpy")
    q, k, v = make_qkv()
    assert kernel(q, k, v).shape == (B, HQ, SQ, D)
    assert words(catch(kernel, q[:, :2], k, v)) == (
        "argument `q` has shape (2, 2, 9, 8), with Hq = 2\nexpected Hq = 4, as declared"
    )
    assert "expected Hkv = 2" in words(catch(kernel, q, k[:, :1], v[:, :1]))
    assert "expected Dv = 8" in words(catch(kernel, q, k, v[..., :5]))
    assert "`v`" in catch(kernel, q, k, v[..., :5]).message()
    error = catch(kernel, q.astype(np.float16), k, v)
    assert words(error) == "argument `q` has dtype fp16\nexpected fp32, as declared"


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "name"), [("f8", "float64"), ("i8", "int64"), ("u1", "uint8"), ("c8", "complex64")]
)
def test_dtypes_of_the_operands(plain: Kernel, position: int, dtype: str, name: str) -> None:
    operands = list(make_qkv())
    operands[position] = operands[position].astype(dtype)
    error = catch(plain, *operands)
    assert f"argument `{'qkv'[position]}` has dtype {name}" in error.message()
    assert "fp16" in words(error)


def test_operands_of_two_dtypes(plain: Kernel) -> None:
    q, k, v = make_qkv(np.float16)
    error = catch(plain, q, k, v.astype(ml_dtypes.bfloat16))
    assert words(error) == "argument `v` has dtype bf16\nexpected fp16, as q has"


@pytest.mark.parametrize("thing", [None, 1.0, [[1.0]], "q"], ids=repr)
def test_what_is_no_array(plain: Kernel, full: Kernel, thing: Any) -> None:
    q, k, v = make_qkv()
    error = catch(plain, q, thing, v)
    assert error.code == "A601"
    assert "`k`" in error.message()
    error = catch(full, q, k, v, **(make_tensors() | {"bias": thing}))
    assert "`bias`" in error.message()


# ---- captured tensors --------------------------------------------------------------------


def test_missing_and_surplus_arguments_are_reported_together(full: Kernel) -> None:
    q, k, v = make_qkv()
    given = make_tensors()
    with pytest.raises(AttnError) as caught:
        full(q, k, v, documents=given["doc"], caps=1.0, bias=given["bias"])
    first, second, third = caught.value.diagnostics
    assert first.message() == "`full` has no tensor or param `documents`"
    assert "bias, cap, doc, is_on, left" in words(first)
    assert second.hint_text() == "did you mean `cap`?"
    assert third.message() == "`full` needs the tensor `doc`, which was not given"
    assert third.span is not None
    assert third.span.first.line == 5


def test_a_param_without_default_must_be_given() -> None:
    kernel = attngen.compile_text("attention a {\n    param t : float\n    score s * t\n}\n")
    error = catch(kernel, *make_qkv())
    assert error.message() == "`a` needs the param `t`, which was not given"


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [("doc", np.int64, "int64"), ("doc", np.float32, "fp32"), ("bias", np.float16, "fp16")],
)
def test_a_tensor_of_another_dtype_gets_advice(
    full: Kernel, name: str, dtype: Any, said: str
) -> None:
    given = make_tensors()
    declared = {"doc": "int32", "bias": "fp32"}[name]
    error = catch(full, *make_qkv(), **(given | {name: given[name].astype(dtype)}))
    assert error.code == "A622"
    assert words(error) == (
        f"argument `{name}` has dtype {said}\n"
        f"expected {declared}\n"
        f"pass `{name}` as {declared}, or declare `{name} : {said}[…]`"
    )


def test_following_the_advice_for_int64_works() -> None:
    kernel = attngen.compile_text(FULL.replace("int32", "int64"), engine="numpy")
    given = make_tensors()
    same = attngen.compile_text(FULL, engine="numpy")(*make_qkv(), **given)
    found = kernel(*make_qkv(), **(given | {"doc": given["doc"].astype(np.int64)}))
    assert all(np.array_equal(a, b) for a, b in zip(found, same, strict=True))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("doc", (B, SKV - 1), "[B, Skv] with B = 2, Skv = 21"),
        ("doc", (SKV,), "[B, Skv]"),
        ("doc", (1, SKV), "[B, Skv]"),
        ("bias", (HQ, SQ, 1), "[Hq?, Sq, Skv] with Hq = 4, Sq = 9, Skv = 21"),
        ("bias", (2, SQ, SKV), "[Hq?, Sq, Skv]"),
        ("bias", (1, HQ, SQ, SKV), "[Hq?, Sq, Skv]"),
        ("bias", (SKV,), "[Hq?, Sq, Skv]"),
        ("bias", (), "[Hq?, Sq, Skv]"),
    ],
    ids=str,
)
def test_a_tensor_of_another_shape(
    full: Kernel, name: str, shape: tuple[int, ...], expected: str
) -> None:
    given = make_tensors()
    wrong = np.zeros(shape, given[name].dtype)
    error = catch(full, *make_qkv(), **(given | {name: wrong}))
    assert error.code == "A621"
    assert error.message() == f"argument `{name}` has shape ({', '.join(map(str, shape))})"
    assert expected in words(error)
    assert error.span is not None


def test_names_that_only_shapes_bind_agree() -> None:
    text = "attention a {\n    tensor one : int32[N]\n    tensor two : int32[N]\n"
    text += "    mask one[kv % N] <= two[q % N] + N\n}\n"
    kernel = attngen.compile_text(text, engine="numpy")
    one, two = np.zeros(3, np.int32), np.zeros(4, np.int32)
    error = catch(kernel, *make_qkv(), one=one, two=two)
    assert words(error) == "argument `two` has shape (4)\nexpected [N] with N = 3"
    assert kernel(*make_qkv(), one=one, two=two[:3]).shape == (B, HQ, SQ, D)


def test_names_of_the_call_are_not_free() -> None:
    taken = ("k", "v", "out", "layout", "return_lse", "check", "q_range", "kv_range")
    for name in taken:
        for declaration in (f"param {name} : float = 1.0", f"tensor {name} : float[Hq]"):
            use = name if "param" in declaration else f"{name}[h]"
            text = f"attention a {{\n    {declaration}\n    score s * {use}\n}}\n"
            error = catch(attngen.compile_text, text)
            assert error.code == "A632"
            assert f"my_{name}" in words(error)
            assert error.span is not None


@pytest.mark.parametrize("name", ["self", "q_", "dropout", "device", "args", "named"])
def test_other_names_are_free(name: str) -> None:
    text = f"attention a {{\n    param {name} : float\n    score s * {name}\n}}\n"
    kernel = attngen.compile_text(text, engine="numpy")
    q, k, v = make_qkv()
    doubled = kernel(q, k, v, **{name: 2.0})
    assert np.array_equal(doubled, kernel(2 * q, k, v, **{name: 1.0}))


# ---- params ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        3,
        np.float32(3),
        np.float64(3),
        np.float16(3),
        np.int64(3),
        np.uint8(3),
        np.array(3.0),
        np.array(3, np.int32),
        ml_dtypes.bfloat16(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_float_param_takes_any_number(full: Kernel, value: Any) -> None:
    found = full(*make_qkv(), cap=value, **make_tensors())
    right = full(*make_qkv(), cap=3.0, **make_tensors())
    assert all(np.array_equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("value", [2, np.int8(2), np.uint64(2), np.array(2)], ids=repr)
def test_an_int_param_takes_any_integer(full: Kernel, value: Any) -> None:
    found = full(*make_qkv(), left=value, **make_tensors())
    assert not np.array_equal(found[1], full(*make_qkv(), **make_tensors())[1])
    assert np.array_equal(found[1], full(*make_qkv(), left=2, **make_tensors())[1])


@pytest.mark.parametrize("value", [True, np.bool_(True), np.array(True)], ids=repr)
def test_a_bool_param_takes_truth_values(full: Kernel, value: Any) -> None:
    full(*make_qkv(), is_on=value, **make_tensors())


@pytest.mark.parametrize(
    ("name", "value", "has", "expected"),
    [
        ("cap", "3", "str", "a number"),
        ("cap", None, "NoneType", "a number"),
        ("cap", True, "bool", "a number"),
        ("cap", 3j, "complex", "a number"),
        ("cap", np.ones(1), "ndarray", "a number"),
        ("left", 3.0, "float", "an integer"),
        ("left", np.float32(3), "float32", "an integer"),
        ("left", True, "bool", "an integer"),
        ("is_on", 1, "int", "a bool"),
        ("is_on", 0.0, "float", "a bool"),
    ],
)
def test_a_param_of_another_type(
    full: Kernel, name: str, value: Any, has: str, expected: str
) -> None:
    error = catch(full, *make_qkv(), **(make_tensors() | {name: value}))
    assert error.code == "A625"
    assert error.message() == f"param `{name}` is a value of type {has}"
    assert error.label_text() == f"expected {expected}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cap", 0.0),
        ("cap", -1.0),
        ("cap", math.nan),
        ("cap", math.inf),
        ("cap", 1e-60),  # 0 as a float32, which is what a kernel gets
        ("cap", 10**400),
        ("cap", 1000.8),
        ("left", -1),
    ],
    ids=str,
)
def test_a_param_outside_its_range(full: Kernel, name: str, value: Any) -> None:
    error = catch(full, *make_qkv(), **(make_tensors() | {name: value}))
    assert error.code == "A626"
    assert f"param `{name}` is " in error.message()
    assert error.span is not None


def test_an_end_of_a_range_is_inside_whatever_its_rounding(full: Kernel) -> None:
    assert float(np.float32(1000.7)) > 1000.7
    full(*make_qkv(), cap=1000.7, **make_tensors())
    full(*make_qkv(), cap=np.float32(1000.7), **make_tensors())


def test_integers_beyond_64_bits(full: Kernel) -> None:
    error = catch(full, *make_qkv(), left=2**63, **make_tensors())
    assert error.code == "A630"
    assert str(2**63) in error.message()
    full(*make_qkv(), left=2**62, **make_tensors())
    text = "attention a {\n    param w : int\n    mask kv * w <= q\n}\n"
    kernel = attngen.compile_text(text, engine="numpy")
    kernel(*make_qkv(), w=2**50)
    error = catch(kernel, *make_qkv(), w=2**62)
    assert error.code == "A630"
    assert error.span is not None
    assert error.span.text == "kv * w"


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_a_float_beyond_float32_is_infinite(engine: Any, host_compiler: None) -> None:
    text = "attention a {\n    param x : float\n    mask x * 0.5 > 3.0 or kv == 0\n}\n"
    kernel = attngen.compile_text(text, engine=engine)
    q, k, v = make_qkv()
    for value, same in (
        (1e39, math.inf),
        (10**400, math.inf),
        (-1e39, -math.inf),
        (-(10**400), -math.inf),
    ):
        assert np.array_equal(kernel(q, k, v, x=value), kernel(q, k, v, x=same))
    first_value = np.repeat(v[:, :, :1], 2, axis=1)
    assert np.array_equal(
        kernel(q, k, v, x=-math.inf), np.broadcast_to(first_value, (B, HQ, SQ, D))
    )


# ---- what attngen does not do ------------------------------------------------------------


@pytest.mark.parametrize("name", ["dropout", "dropout_p"])
def test_dropout_is_refused_in_words(plain: Kernel, name: str) -> None:
    error = catch(plain, *make_qkv(), **{name: 0.1})
    assert error.code == "A632"
    assert "computes no dropout" in error.message()
    right = plain(*make_qkv())
    assert np.array_equal(plain(*make_qkv(), **{name: 0.0}), right)
    assert np.array_equal(plain(*make_qkv(), **{name: 0}), right)


def test_choices_are_checked(plain: Kernel) -> None:
    assert words(catch(plain, *make_qkv(), layout="sbhd")) == (
        "`layout='sbhd'` is not supported: it is one of bhsd, bshd"
    )
    error = catch(attngen.compile_text, PLAIN, engine="gpu")
    assert "auto, cuda, cpu, numpy" in error.message()
    for head_dim in ((1, 2, 3), (), "64", 64.0, True, (8, "8"), [8]):
        error = catch(attngen.compile_text, PLAIN, head_dim=head_dim)
        assert repr(head_dim) in error.message()
    for head_dim in (8, np.int64(8), (8, 8), [8, np.int32(8)]):
        kernel = attngen.compile_text(PLAIN, head_dim=head_dim, engine="numpy")
        assert kernel(*make_qkv()).shape == (B, HQ, SQ, D)
    assert catch(attngen.compile_text, PLAIN, head_dim=257).code == "A235"
    assert catch(attngen.compile_text, PLAIN, dtype="fp64").code == "A234"
    assert catch(attngen.compile_text, PLAIN, arch="sm_70").code == "A491"
    assert catch(attngen.compile_text, PLAIN, consts={"W": 1}).code == "A239"
    assert catch(attngen.compile, "no/such.attn").code == "A701"


def test_arrays_and_engine_must_fit() -> None:
    kernel = attngen.compile_text(PLAIN, engine="cuda", arch="sm_90a")
    error = catch(kernel, *make_qkv())
    assert "the arrays are on the CPU" in error.message()
