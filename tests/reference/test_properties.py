"""Laws that hold for every variant and every input."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.frontend.load import load_text
from attngen.oracle.dense import Reference, reference

SCORES = (
    "s", "2.5 * s", "s - 0.1 * abs(qpos - kv)", "5 * tanh(s / 5)", "s + bias[h, kv]", "-s",
    "where(bias[h, kv] > 0, s, -inf)", "max(s, 0.2 * s)", "s * sigmoid(s)", "clamp(s, -1, 1)",
)  # fmt: skip
MASKS = (
    "true", "kv <= qpos", "kv <= q", "-3 <= kv - qpos <= 1", "(q - kv) % 3 == 0", "false",
    "q // 4 == kv // 4 or kv < 2", "bias[h, q % Skv] <= bias[h, kv] and kv != 1",
)  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """The text of a variant, and its arrays.

    Some lines make NaN of the -inf that a line above them gave: NaN has laws to keep, too.
    """
    group, Hkv = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2)]))
    B, Sq, Skv = draw(st.integers(1, 2)), draw(st.integers(1, 9)), draw(st.integers(1, 13))
    D, Dv = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    scale = draw(st.sampled_from(["1", "-0.7", "1 / sqrt(Dqk)", "0.3 * (h + 1)"]))
    body = f"tensor bias : float[Hq, Skv]\nscale {scale}\n"
    body += "".join(
        f"score {line}\n" for line in draw(st.lists(st.sampled_from(SCORES), max_size=2))
    )
    body += f"mask {draw(st.sampled_from(MASKS))}\n"
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([0.5, 2.0]))

    def normal(*shape: int) -> np.ndarray:
        return (size * rng.standard_normal(shape)).astype(np.float32)

    arrays = {
        "q": normal(B, group * Hkv, Sq, D),
        "k": normal(B, Hkv, Skv, D),
        "v": normal(B, Hkv, Skv, Dv),
        "tensors": {"bias": normal(group * Hkv, Skv)},
    }
    return f"attention test {{\n{body}}}", arrays


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True))


@settings(max_examples=60)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(problem: Any, random: Any) -> None:
    text, arrays = problem
    unit = load_text(text)
    order = list(range(arrays["k"].shape[2]))
    random.shuffle(order)
    whole, shuffled = reference(unit, **arrays), reference(unit, **arrays, keys=order)
    assert close(shuffled.o, whole.o)
    assert close(shuffled.lse, whole.lse)
    assert close(shuffled.bound, whole.bound)
    assert (shuffled.visible == whole.visible[..., order]).all()


@settings(max_examples=60)
@given(problems(), st.data())
def test_parts_merge_to_the_whole(problem: Any, data: st.DataObject) -> None:
    text, arrays = problem
    unit = load_text(text)
    Skv = arrays["k"].shape[2]
    cuts = sorted(data.draw(st.lists(st.integers(0, Skv), max_size=3)))
    edges = [0, *cuts, Skv]
    parts = [reference(unit, **arrays, kv_range=edge) for edge in pairwise(edges)]
    whole = reference(unit, **arrays)
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp.reduce([np.asarray(part.lse) for part in parts])
    offset = np.where(np.isneginf(lse), 0.0, lse)
    weights = [np.exp(part.lse - offset) for part in parts]
    assert close(sum(w[..., None] * p.o for w, p in zip(weights, parts, strict=True)), whole.o)
    assert close(lse, whole.lse)
    assert close(np.max([np.asarray(part.row_max) for part in parts], axis=0), whole.row_max)
    assert (np.concatenate([part.visible for part in parts], axis=-1) == whole.visible).all()


@settings(max_examples=60)
@given(problems(), st.sampled_from(["fp16", "bf16", "fp32"]))
def test_bounds_are_never_negative_and_grow_with_the_unit(problem: Any, dtype: str) -> None:
    text, arrays = problem
    unit = load_text(text)
    found = reference(unit, **arrays, dtype=dtype)
    assert (found.bound >= 0).all()
    assert (np.asarray(found.lse_bound) >= 0).all()
    assert (found.bound >= reference(unit, **arrays, dtype="fp32").bound).all()
    assert found.accepts_o(found.o).all()
    assert found.accepts_lse(found.lse).all()


@settings(max_examples=60)
@given(problems())
def test_rows_are_independent(problem: Any) -> None:
    text, arrays = problem
    unit = load_text(text)
    whole = reference(unit, **arrays)
    for row in range(arrays["q"].shape[2]):
        one = reference(unit, **arrays, rows=[row])
        for name in ("o", "lse", "row_max", "bound", "lse_bound"):
            assert close(getattr(one, name)[:, :, 0], getattr(whole, name)[:, :, row])


# ---- the bound against float32 arithmetic --------------------------------------------------

BIAS = "tensor bias : float[Hq, Skv]\n"
VARIANTS = (
    ("mask kv <= qpos", lambda s, _q, _kv, _x: s),
    ("score 5 * tanh(s / 5)\nmask kv <= qpos", lambda s, _q, _kv, _x: 5 * np.tanh(s / 5)),
    ("scale -0.5\nscore 3 * s\nmask kv <= qpos", lambda s, _q, _kv, _x: 3 * s),
    ("score s + bias[h, kv]\nmask kv <= qpos", lambda s, _q, _kv, x: s + x[:, None, :]),
    ("score s - 0.125 * (qpos - kv)\nmask kv <= qpos", lambda s, q, kv, _x: s - (q - kv) / 8),
)  # fmt: skip


@settings(max_examples=50)
@given(
    st.sampled_from(VARIANTS),
    st.integers(1, 24),
    st.integers(0, 60),
    st.sampled_from([4, 32, 128]),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.integers(0, 2**32 - 1),
)
def test_float32_arithmetic_is_within_the_bound(
    variant: Any, Sq: int, more: int, D: int, size: float, seed: int
) -> None:
    body, score = variant
    rng = np.random.default_rng(seed)
    H, Skv = 2, Sq + more
    q, k, v = (
        (size * rng.standard_normal((1, H, n, D))).astype(np.float32) for n in (Sq, Skv, Skv)
    )
    bias = rng.standard_normal((H, Skv)).astype(np.float32)
    unit = load_text(f"attention test {{\n{BIAS}{body}\n}}")
    found = reference(unit, q, k, v, tensors={"bias": bias})
    o, lse = _float32_attention(q, k, v, bias, score, -0.5 if "scale" in body else D**-0.5)
    assert found.accepts_o(o).all()
    assert found.accepts_lse(lse).all()


def _float32_attention(
    q: Any, k: Any, v: Any, bias: Any, score: Any, scale: float
) -> tuple[Any, Any]:
    qpos = np.arange(q.shape[2], dtype=np.float32)[:, None] + (k.shape[2] - q.shape[2])
    kv = np.arange(k.shape[2], dtype=np.float32)
    s = score(np.float32(scale) * (q @ np.swapaxes(k, 2, 3)), qpos, kv, bias)
    s = np.where(kv <= qpos, s, -np.inf).astype(np.float32)
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(axis=-1, keepdims=True)
    return (p @ v) / total, (m + np.log(total))[..., 0]


# ---- L by differences ----------------------------------------------------------------------


@settings(max_examples=60)
@given(st.sampled_from([x for x in SCORES if "-inf" not in x]), st.integers(0, 2**32 - 1))
def test_the_bound_knows_how_steep_the_score_is(line: str, seed: int) -> None:
    """With values of one sign the bound gives δ back, and δ gives L: compare with differences."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((1, 1, 1, 1)), rng.standard_normal((1, 1, 1, 1))
    v = np.ones((1, 1, 1, 1))
    bias = {"bias": rng.standard_normal((1, 1)).astype(np.float32)}
    unit = load_text(f"attention test {{\n{BIAS}scale 1\nscore {line}\n}}")

    def run(q: Any) -> Reference:
        return reference(unit, q, k, v, tensors=bias, dtype="fp32")

    found = run(q)
    delta = (found.bound.item() - 2.0**-24 - 2.0**-20) / 4
    steepness = delta / (2.0**-24 * 9 * abs(q.item() * k.item()))
    step = 1e-6 / k.item()
    above, below = run(q + step).lse, run(q - step).lse
    assert above is not None
    assert below is not None
    difference = abs(above.item() - below.item()) / 2e-6
    assert steepness == np.float64(difference) or abs(steepness - difference) < 1e-4
