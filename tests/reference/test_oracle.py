"""The oracle against answers worked out by hand, one rule of the language at a time."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.frontend.load import load_text
from attngen.oracle import errors
from attngen.oracle.dense import Reference, reference

INF = math.inf


def run(body: str, q: Any, k: Any, v: Any, **more: Any) -> Reference:
    unit = load_text(f"attention test {{\n{body}\n}}", name="test.attn")
    return reference(unit, *(np.asarray(x, np.float64) for x in (q, k, v)), **more)


def column(*numbers: float) -> np.ndarray:
    """One batch, one head, head dim 1."""
    return np.array(numbers).reshape(1, 1, -1, 1)


def ones(count: int) -> np.ndarray:
    return np.ones((1, 1, count, 1))


def error_of(body: str, **more: Any) -> Any:
    arrays = {name: more.pop(name, ones(2)) for name in "qkv"}
    with pytest.raises(AttnError) as error:
        run(body, arrays["q"], arrays["k"], arrays["v"], **more)
    return error.value.diagnostics[0]


# ---- rows --------------------------------------------------------------------------------


def test_one_key_is_copied() -> None:
    found = run("", column(3), column(2), column(-7))
    assert found.o.item() == -7
    assert found.lse is not None
    assert found.lse.item() == found.row_max.item() == 6  # type: ignore[union-attr]


def test_two_keys_share_by_exponentials() -> None:
    found = run("", column(1), column(math.log(1), math.log(3)), column(0, 1))
    assert found.o.item() == pytest.approx(3 / 4)
    assert found.lse.item() == pytest.approx(math.log(4))  # type: ignore[union-attr]
    assert found.row_max.item() == pytest.approx(math.log(3))  # type: ignore[union-attr]


def test_default_scale_is_of_the_query_head_dim() -> None:
    q, k, v = np.ones((1, 1, 1, 4)), np.ones((1, 1, 1, 4)), np.ones((1, 1, 1, 9))
    assert run("", q, k, v).lse.item() == 2.0  # type: ignore[union-attr]


def test_order_is_scale_score_mask() -> None:
    found = run(
        "scale 2\nscore s + 1\nscore s * 10\nmask kv < 2\nmask kv > 0",
        column(1), column(9, 3, 9), column(5, 6, 7),
    )  # fmt: skip
    assert found.visible.tolist() == [[[[False, True, False]]]]
    assert found.row_max.item() == 70  # type: ignore[union-attr]
    assert found.o.item() == 6


def test_scale_may_be_negative_and_differ_by_head() -> None:
    q = np.ones((1, 2, 1, 1))
    found = run("scale h - 2", q, column(5, -1), column(1, 0))
    assert found.lse is not None
    assert found.lse[0, 0, 0] == pytest.approx(math.log(math.exp(-10) + math.exp(2)))
    assert found.lse[0, 1, 0] == pytest.approx(math.log(math.exp(-5) + math.exp(1)))


def test_an_empty_row_is_zero() -> None:
    found = run("mask kv < q", ones(3), ones(3), column(1, 3, 5))
    assert found.o[0, 0, :, 0].tolist() == [0, 1, 2]
    assert found.lse is not None
    assert found.lse[0, 0].tolist() == pytest.approx([-INF, 1, 1 + math.log(2)])
    assert found.row_max[0, 0].tolist() == [-INF, 1, 1]  # type: ignore[index]
    assert (found.bound[0, 0, 0] == 0).all()


def test_a_score_of_minus_infinity_is_masked() -> None:
    found = run("score where(kv == 1, s, -inf)", ones(1), ones(2), column(math.nan, 4))
    assert found.visible[0, 0, 0].tolist() == [False, True]
    assert found.o.item() == 4


@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_infinity_and_nan_at_a_visible_pair_show(bad: str) -> None:
    line = f"score where(kv == 1 and q == 0, {bad}, s)"
    sigmoid = run(f"{line}\nweights sigmoid", ones(2), ones(2), column(1, 3))
    assert np.isnan(sigmoid.o[0, 0, :, 0]).tolist() == [True, False]
    found = run(line, ones(2), ones(2), column(1, 3))
    assert np.isnan(found.o[0, 0, 0])
    assert np.isnan(found.lse[0, 0, 0])  # type: ignore[index]
    assert found.o[0, 0, 1] == 2
    masked = run(f"score where(kv == 1, {bad}, s)\nmask kv == 0", ones(2), ones(2), column(1, 3))
    assert masked.o[0, 0, :, 0].tolist() == [1, 1]


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_what_masked_keys_hold_does_not_matter(bad: float) -> None:
    found = run("mask kv != 1", ones(2), column(1, bad, 1), column(1, bad, 3))
    assert found.o[0, 0, :, 0].tolist() == [2, 2]
    assert np.isfinite(found.bound).all()
    half = np.array([[1, 2], [bad, 3]]).reshape(1, 1, 2, 2)
    assert run("mask kv <= q", ones(2), ones(2), half).o[0, 0, 0].tolist() == [1, 2]
    partly = run("mask kv != 1 or q == 0", ones(2), ones(3), column(1, bad, 3))
    assert not np.isfinite(partly.o[0, 0, 0, 0])
    assert partly.o[0, 0, 1, 0] == 2


# ---- weights -----------------------------------------------------------------------------


def test_a_sink_joins_the_denominator_once() -> None:
    tensors = {"sink": np.array([-INF, 0.0, 700.0, INF], np.float32)}
    body = "tensor sink : float[Hq]\nweights softmax(sink = sink[h])\nmask kv < q"
    q = np.zeros((1, 4, 2, 1))
    found = run(body, q, ones(1), column(6), tensors=tensors)
    assert found.lse is not None
    assert found.o[0, :3, 1, 0].tolist() == pytest.approx([6, 3, 0])
    assert found.lse[0, :3, 1].tolist() == pytest.approx([0, math.log(2), 700])
    assert found.o[0, :3, 0, 0].tolist() == [0, 0, 0]
    assert found.lse[0, :3, 0].tolist() == [-INF, 0, 700]
    assert np.isnan(found.o[0, 3]).all()
    without = run(body, q, ones(1), column(6), tensors=tensors, join_sink=False)
    assert without.o[0, :, 1, 0].tolist() == [6, 6, 6, 6]


def test_sigmoid_weights_are_not_normalised() -> None:
    found = run("weights sigmoid\nmask kv < 2", ones(1), column(0, math.log(3), 9), column(2, 4, 8))
    assert found.o.item() == pytest.approx(0.5 * 2 + 0.75 * 4)
    assert found.lse is None
    assert found.row_max is None


# ---- indices, sizes, lengths ---------------------------------------------------------------


@pytest.mark.parametrize(("Sq", "Skv"), [(2, 5), (5, 2), (3, 3)])
def test_qpos_is_aligned_to_the_bottom_right(Sq: int, Skv: int) -> None:
    found = run("mask kv <= qpos", ones(Sq), ones(Skv), ones(Skv))
    assert found.visible[0, 0].tolist() == np.tri(Sq, Skv, Skv - Sq, bool).tolist()


def test_query_heads_share_key_heads_in_order() -> None:
    k = np.ones((1, 2, 1, 1))
    v = np.array([10.0, 20.0]).reshape(1, 2, 1, 1)
    found = run("mask hkv == h // 3", np.ones((1, 6, 1, 1)), k, v)
    assert found.o.ravel().tolist() == [10, 10, 10, 20, 20, 20]
    assert found.visible.all()


def test_lengths_give_true_sizes() -> None:
    body = "tensor ql : int32[B]\ntensor kl : int32[B]\nlength q = ql[b], kv = kl[b]\n"
    tensors = {"ql": np.array([1, 3, 0]), "kl": np.array([2, 4, 4])}
    q, k = np.ones((3, 1, 3, 1)), np.ones((3, 1, 4, 1))
    v = np.full((3, 1, 4, 1), math.nan)
    v[0, 0, :2], v[1, 0, :4] = 1.0, 2.0
    found = run(body + "mask kv <= qpos\nscore s + Sq + 10 * Skv", q, k, v, tensors=tensors)
    assert found.lse is not None
    assert found.visible[0, 0].tolist() == [[1, 1, 0, 0], [0] * 4, [0] * 4]
    assert found.visible[1, 0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert not found.visible[2].any()
    assert found.o[..., 0].tolist() == [[[1, 0, 0]], [[2, 2, 2]], [[0, 0, 0]]]
    assert found.lse[0, 0].tolist() == pytest.approx([22 + math.log(2), -INF, -INF])
    assert found.lse[1, 0, 2] == pytest.approx(44 + math.log(4))


def test_a_row_behind_its_sequence_is_an_empty_row() -> None:
    found = run("length q = 1\nweights softmax(sink = 3)\nmask false", ones(2), ones(2), ones(2))
    assert found.lse[0, 0].tolist() == [3, 3]  # type: ignore[index]


@pytest.mark.parametrize(("B", "Sq", "Skv"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_zero_sizes(B: int, Sq: int, Skv: int) -> None:
    q, k = np.ones((B, 4, Sq, 2)), np.ones((B, 2, Skv, 2))
    found = run("mask kv <= qpos\nweights softmax(sink = 2)", q, k, k)
    assert found.o.shape == (B, 4, Sq, 2)
    assert found.visible.shape == (B, 4, Sq, Skv)
    assert not found.o.any()
    assert found.lse is not None
    assert (found.lse == 2).all()


# ---- names and arguments ---------------------------------------------------------------------


def test_consts_params_and_lets() -> None:
    body = """
    const A = 2
    const C = A * Dqk
    const D : float
    param p : int = 3
    param x : float = A where 0 < x <= D
    let twice = 2 * s
    score twice + C + p
    score twice + x
    """
    q, k = np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2))
    base = run("scale 1\n" + body, q, k, k, consts={"D": 7})
    assert base.lse.item() == 2 * (2 * 2 + 4 + 3) + 2  # type: ignore[union-attr]
    other = run("scale 1\n" + body, q, k, k, consts={"D": 7, "A": 5}, params={"p": 1, "x": 0.5})
    assert other.lse.item() == 2 * (2 * 2 + 10 + 1) + 0.5  # type: ignore[union-attr]


def test_floats_from_outside_are_float32() -> None:
    found = run("param x : float\nscore x", ones(1), ones(1), ones(1), params={"x": 0.1})
    assert found.lse.item() == float(np.float32(0.1))  # type: ignore[union-attr]


def test_named_sizes_bind_from_shapes() -> None:
    body = "tensor t : float[R, 2]\nscore t[kv, 1] + R"
    found = run(
        body, ones(1), ones(1), ones(1), tensors={"t": np.array([[1, 5], [7, 9], [0, 0]], "f4")}
    )
    assert found.lse.item() == 5 + 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((2, 3, 5, 7), True), ((1, 3, 5, 7), True), ((1, 1, 5, 7), True), ((3, 5, 7), True),
        ((5, 7), True), ((2, 1, 5, 7), True),
        ((7,), False), ((1, 7), False), ((5, 1), False), ((2, 5, 7), False), ((3, 1, 5, 7), False),
        ((1, 2, 3, 5, 7), False), ((5, 8), False), ((), False),
    ],
)  # fmt: skip
def test_question_mark_dimensions(shape: tuple[int, ...], fits: bool) -> None:
    q, k = np.ones((2, 3, 5, 1)), np.ones((2, 3, 7, 1))
    bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    body = "tensor bias : float[B?, Hq?, Sq, Skv]\nscore bias[b, h, q, kv]"
    if not fits:
        found = error_of(body, q=q, k=k, v=k, tensors={"bias": bias})
        assert isinstance(found, errors.WrongShape)
        assert str(tuple(shape)) in found.message()
        assert "[B? = 2, Hq? = 3, Sq = 5, Skv = 7]" in found.message() or len(shape) != 4
        return
    right = np.broadcast_to(bias, (2, 3, 5, 7)).astype(np.float64).max(axis=-1)
    found_max = run(body, q, k, k, tensors={"bias": bias}).row_max
    assert (found_max == right).all()


@pytest.mark.parametrize(
    ("body", "more", "kind", "words"),
    [
        ("tensor t : int32[B]", {}, errors.MissingArgument, "tensor `t`"),
        ("param p : int", {}, errors.MissingArgument, "param `p`"),
        ("const c : int", {}, errors.MissingArgument, "const `c`"),
        ("tensor doc : int32[B]", {"tensors": {"docs": [1]}}, errors.SurplusArgument, "`docs`"),
        ("param p : int = 1", {"params": {"W": 1}}, errors.SurplusArgument, "param `W`"),
        ("", {"consts": {"W": 1}}, errors.SurplusArgument, "const `W`"),
        ("tensor t : int32[B]", {"tensors": {"t": [1, 2]}}, errors.WrongShape, "[B = 1]"),
        ("tensor t : int32[3]", {"tensors": {"t": [1, 2]}}, errors.WrongShape, "[3]"),
        ("tensor t : int32[R, R]", {"tensors": {"t": [[1, 2]]}}, errors.WrongShape, "R = 1"),
        ("tensor t : int32[B]", {"tensors": {"t": [1.5]}}, errors.WrongElement, "int32"),
        ("tensor t : float[B]", {"tensors": {"t": [1]}}, errors.WrongElement, "int64"),
        ("tensor t : bool[B]", {"tensors": {"t": [1]}}, errors.WrongElement, "bool"),
        ("param p : int", {"params": {"p": 1.5}}, errors.WrongValue, "1.5"),
        ("param p : int where 1 <= p < 9", {"params": {"p": 9}}, errors.WrongValue, "9"),
        ("param p : bool", {"params": {"p": 1}}, errors.WrongValue, "1"),
        ("head_dim 8", {}, errors.WrongValue, "Dqk"),
        ("head_dim 1.5", {}, errors.WrongValue, "1.5"),
        ("dtype fp8", {}, errors.WrongValue, "fp8"),
        ("", {"dtype": "fp64"}, errors.WrongValue, "fp64"),
        ("heads q = 1, kv = 2", {}, errors.WrongValue, "Hkv"),
        ("", {"k": np.ones((2, 1, 2, 1))}, errors.WrongShape, "`k`"),
        ("", {"v": np.ones((1, 1, 3, 1))}, errors.WrongShape, "`v`"),
        ("", {"q": np.ones((1, 2, 1))}, errors.WrongShape, "`q`"),
        ("", {"q": np.ones((1, 3, 2, 1)), "k": np.ones((1, 2, 2, 1)), "v": np.ones((1, 2, 2, 1))},
         errors.WrongHeads, "3 query heads cannot share 2"),
        ("length q = 3", {}, errors.LengthOutside, "holds 2 rows"),
        ("length kv = -1", {}, errors.LengthOutside, "holds 2 keys"),
        ("length kv = 1.0", {}, errors.Meaningless, "integer"),
        ("mask kv", {}, errors.Meaningless, "truth"),
        ("score true", {}, errors.Meaningless, "number"),
        ("mask s > 0", {}, errors.Meaningless, "`s`"),
        ("scale q", {}, errors.Meaningless, "`q`"),
        ("let a = a + 1\nscore a", {}, errors.Meaningless, "itself"),
        ("param p : int\nscore s + p * p * p", {"params": {"p": 2**40}}, errors.IntegerOverflow,
         "64 bits"),
        ("tensor t : float[R]\nscore t[kv]", {"tensors": {"t": np.ones(1, "f4")}},
         errors.IndexOutside, "index 1"),
    ],
)  # fmt: skip
def test_errors(body: str, more: dict[str, Any], kind: type[Diagnostic], words: str) -> None:
    tensors = {n: np.asarray(x) for n, x in more.get("tensors", {}).items()}
    found = error_of(body, **{**more, **({"tensors": tensors} if tensors else {})})
    assert type(found) is kind
    assert words in found.message()
    assert found.code.startswith("A65")


def test_reads_happen_only_at_visible_pairs() -> None:
    tensors = {"t": np.zeros(2, np.float32)}
    found = run(
        "tensor t : float[R]\nscore s + t[kv]\nmask kv < R",
        ones(2),
        ones(3),
        ones(3),
        tensors=tensors,
    )
    assert found.visible.sum() == 4
    found = run(
        "tensor t : float[R]\nmask kv < R\nmask t[kv] == 0",
        ones(2),
        ones(3),
        ones(3),
        tensors=tensors,
    )
    assert found.visible.sum() == 4
    with pytest.raises(AttnError):
        run(
            "tensor t : float[R]\nmask t[kv] == 0\nmask kv < R",
            ones(2),
            ones(3),
            ones(3),
            tensors=tensors,
        )


def test_scale_is_read_only_where_pairs_attend() -> None:
    tensors = {"t": np.ones(1, np.float32)}
    body = "tensor t : float[R]\nscale t[b]\nmask b == 0"
    q = np.ones((2, 1, 2, 1))
    assert run(body, q, q, q, tensors=tensors).visible[0].all()
    with pytest.raises(AttnError):
        run("tensor t : float[R]\nscale t[b]\nmask kv < q", q, q, q, tensors=tensors)


# ---- dtypes, rows, bound -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_inputs_are_widened_exactly(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, 5, 3)).astype(dtype) for _ in "qkv")
    unit = load_text("attention test { mask kv <= q }")
    narrow = reference(unit, q, k, v)
    wide = reference(unit, *(x.astype(np.float64) for x in (q, k, v)), dtype="fp16")
    assert (narrow.o == wide.o).all()
    assert (narrow.bound == wide.bound).all() == (dtype is np.float16)


@pytest.mark.parametrize(
    ("dtype", "u", "u_p"),
    [("bf16", 2.0**-8, 2.0**-8), ("fp16", 2.0**-11, 2.0**-11), ("fp32", 2.0**-24, 0.0)],
)
@pytest.mark.parametrize(("score", "steepness"), [("3 * s", 3), ("-1.5 * q", 0)])
def test_the_bound_is_that_of_the_contract(
    dtype: str, u: float, u_p: float, score: str, steepness: int
) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, 4, 8)) for _ in "qkv")
    body = f"dtype bf16\nscale -0.5\nscore {score}\nmask kv <= q"
    found = run(body, q, k, v, dtype=dtype, function_error=1e-5)
    assert found.lse is not None
    assert found.lse_bound is not None
    underflow = 2.0**-25 if dtype == "fp16" else 2.0**-126
    product = np.abs(q[0, 0]) @ np.abs(k[0, 0]).T
    for row in range(4):
        delta = 2.0**-24 * 16 * 0.5 * product[row, : row + 1].max() * steepness + 1e-5
        scores = -0.5 * (q[0, 0, row] @ k[0, 0, : row + 1].T) * 3
        scores = scores if steepness else np.full(row + 1, -1.5 * row)
        spread = np.exp(scores) / np.exp(scores).sum() @ np.abs(v[0, 0, : row + 1])
        right = u * np.abs(found.o[0, 0, row]) + (u_p + 4 * delta + 2.0**-20) * spread + underflow
        assert found.bound[0, 0, row] == pytest.approx(right)
        size = np.abs(scores.max()) + np.abs(found.lse[0, 0, row])
        assert found.lse_bound[0, 0, row] == pytest.approx(delta + 2.0**-20 + 2.0**-22 * size)
    if dtype == "bf16":
        assert (run(body, q, k, v, function_error=1e-5).bound == found.bound).all()


def test_the_bound_of_what_is_not_finite() -> None:
    v = np.array([[1.0, 2.0], [math.nan, 3.0]]).reshape(1, 1, 2, 2)
    found = run("", ones(1), ones(2), v, dtype="fp32")
    assert found.bound[0, 0, 0, 0] == INF
    right = 2.0**-24 * 2.5 + (4 * 2.0**-24 * 9 + 2.0**-20) * 2.5
    assert found.bound[0, 0, 0, 1] == pytest.approx(right)


def test_rows_keys_and_ranges_choose_parts() -> None:
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((2, 4, 9, 4)), *rng.standard_normal((2, 2, 2, 11, 4))
    body = "mask kv <= qpos\nscore s + kv"
    whole = run(body, q, k, v)
    for rows in ([7, 0, 3], np.array([-1]), slice(2, 8, 3), slice(0, 0)):
        found = run(body, q, k, v, rows=rows)
        picked = np.arange(9)[rows]
        assert np.allclose(found.o, whole.o[:, :, picked])
        assert (found.visible == whole.visible[:, :, picked]).all()
    found = run(body, q, k, v, q_range=(2, 5), kv_range=(3, 11))
    assert (found.visible == whole.visible[:, :, 2:5, 3:]).all()
    right = run(body + "\nmask kv >= 3", q, k, v).o[:, :, 2:5]
    assert np.allclose(found.o, right)
    with pytest.raises(ValueError, match="not both"):
        run(body, q, k, v, rows=[1], q_range=(0, 1))


def test_blocks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 4, 9, 4)), *rng.standard_normal((2, 3, 2, 11, 4))
    body = "length kv = 11 - b\nmask kv <= qpos + h\nscore s * (b + 1) - hkv\nscale 1 + h"
    whole = run(body, q, k, v)
    for pairs in (1, 11, 40, 99, 250, 400, 1000):
        monkeypatch.setattr("attngen.oracle.dense._PAIRS_AT_ONCE", pairs)
        found = run(body, q, k, v)
        for name in ("o", "lse", "row_max", "visible", "bound", "lse_bound"):
            assert np.allclose(getattr(found, name), getattr(whole, name)), (pairs, name)


def test_accepting_and_refusing() -> None:
    found = run("mask kv < q\nscore where(q == 2, nan, s)", ones(3), ones(3), column(1, 2, 3))
    assert found.lse is not None
    assert found.accepts_o(found.o + 0.9 * np.where(np.isfinite(found.bound), found.bound, 0)).all()
    off = np.where(np.isfinite(found.o), found.o + 1.001 * found.bound + 1e-9, found.o)
    assert found.accepts_o(off)[0, 0, :, 0].tolist() == [False, False, True]
    assert found.accepts_o(np.zeros_like(found.o))[0, 0, 2, 0] == False  # noqa: E712
    assert found.accepts_lse(found.lse).all()
    assert found.accepts_lse(np.full((1, 1, 3), -1e30))[0, 0].tolist() == [False, False, False]


def test_a_sink_read_outside_of_its_tensor_names_the_head() -> None:
    spec = "attention a {\n    tensor t : float[N]\n    weights softmax(sink = t[h + 30])\n}\n"
    q = np.zeros((2, 2, 4, 8), np.float32)
    with pytest.raises(AttnError, match="index 30 is outside dimension 0"):
        reference(load_text(spec), q, q, q, tensors={"t": np.zeros(5, np.float32)})
