"""Masks to analyse, and what they mean by enumeration.

The names that a mask may use are those of `build`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from attngen.frontend.check import check
from attngen.frontend.load import load_text
from attngen.ir.attention import Attention
from attngen.ir.semantics import evaluate

__all__ = [
    "AFFINE", "B", "DATA", "FAR", "INTS", "PERIODIC", "TRUTHS", "build", "make_far", "make_tensors",
    "pairs", "symbols",
]  # fmt: skip

B, Hq = 2, 2


def build(mask: str, more: str = "") -> Attention:
    """A variant with this mask; `more` declares what the mask reads besides."""
    declarations = f"""
    {more}
    param     w : int where 1 <= w <= 9
    tensor    doc : int32[B, Skv]
    tensor    ids : int32[B, Sq]
    tensor    keep : bool[B, Skv]
    tensor    plen : int32[B]
    tensor    table : bool[NR, NC]
    """
    text = f"attention t {{\n{declarations}\n    mask {mask}\n}}\n"
    return check(load_text(text)).attention


def make_tensors(rng: np.random.Generator, Sq: int, Skv: int, is_sorted: bool) -> dict[str, Any]:
    doc, ids = rng.integers(0, 4, (B, Skv)), rng.integers(0, 4, (B, Sq))
    return {
        "doc": np.sort(doc, 1) if is_sorted else doc,
        "ids": np.sort(ids, 1) if is_sorted else ids,
        "keep": rng.random((B, Skv)) < 0.7,
        "plen": rng.integers(0, Skv + 1, B),
        "table": rng.random((Sq // 4 + 1, Skv // 4 + 1)) < 0.5,
    }


FAR = """tensor    far : int64[B, Skv]
    tensor    ago : int64[B, Sq]
    tensor    start : int64[ND]
"""
"""What masks of `DATA` read besides, as text of the block."""


def make_far(rng: np.random.Generator, Sq: int, Skv: int, *, is_wide: bool) -> dict[str, Any]:
    """The arrays of `FAR`; wide ones have elements at and beyond the ends of 32 bits, too."""
    rare = np.array(
        [2**31 - 1, 2**31 - 2, 2**31, -(2**31), 1 - 2**31, -(2**31) - 1, 2**40, -(2**50)]
    )

    def draw(*shape: int) -> Any:
        near = rng.integers(-4, 20, shape)
        return np.where(rng.random(shape) < 0.2 * is_wide, rng.choice(rare, shape), near)

    return {"far": draw(B, Skv), "ago": draw(B, Sq), "start": draw(4)}


def symbols(Sq: int, Skv: int, w: int, b: int, h: int) -> dict[str, Any]:
    sizes = {"B": B, "Hq": Hq, "Hkv": 1, "Sq": Sq, "Skv": Skv, "Dqk": 8, "Dv": 8}
    sizes |= {"NR": Sq // 4 + 1, "NC": Skv // 4 + 1, "ND": 4}
    return {name: np.int64(x) for name, x in {**sizes, "w": w, "b": b, "h": h, "hkv": 0}.items()}


def pairs(
    attention: Attention, known: dict[str, Any], tensors: dict[str, Any], rows: Any, keys: Any
) -> Any:
    """The mask, pair by pair; one that is always true is left out by the checker."""
    if attention.mask is None:
        return np.ones((len(rows), len(keys)), bool)
    q, kv = np.asarray(rows)[:, None], np.asarray(keys)[None, :]
    at = {**known, "q": q, "kv": kv, "qpos": q + known["Skv"] - known["Sq"]}
    value = evaluate(attention.mask, at, tensors).data
    return np.broadcast_to(value, (len(rows), len(keys)))


# ---- random masks, as text ----

_NUMBERS = ["w", "Skv", "b", "plen[b]", "-3", "0", "1", "7"]
_LEAVES = ["q", "kv", "qpos", "doc[b, kv]", "ids[b, q]", *_NUMBERS]
INTS = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["2", "-3", "w"])).map(lambda t: f"({t[0]} * {t[1]})"),
        st.tuples(
            inner,
            st.sampled_from(["//", "%"]),
            st.sampled_from(["3", "4", "-2", "w", "(Skv // 2)", "plen[b]"]),
        ).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        inner.map(lambda x: f"abs({x})"),
        inner.map(lambda x: f"clamp({x}, -2, 20)"),
        st.tuples(inner, inner, inner).map(lambda t: f"where({t[0]} < {t[1]}, {t[1]}, {t[2]})"),
        inner.map(lambda x: f"floor(({x}) / 4)"),
    ),
    max_leaves=5,
)
TRUTHS = st.recursive(
    st.one_of(
        st.tuples(INTS, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), INTS).map(
            lambda t: f"{t[0]} {t[1]} {t[2]}"
        ),
        st.sampled_from(["keep[b, kv]", "table[q // 4, kv // 4]", "causal", "window(left = w)"]),
        st.tuples(INTS, INTS).map(lambda t: f"({t[0]}) / 2 < ({t[1]}) * 0.5"),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda x: f"not ({x})"),
        st.tuples(inner, inner, inner).map(lambda t: f"where({t[0]}, {t[1]}, {t[2]})"),
    ),
    max_leaves=4,
)

_DIGITS = "{0} % 2 + {0} // 4 % 2 * 2 + {0} // 2 % 2 * 4 + {0} // 8 % 2 * 8"
_OF_ROW = st.sampled_from(
    [
        "ids[b, q]", "ago[b, q]", "q - start[ids[b, q]]", "start[ids[b, q]]", "2 * ago[b, q] + q",
        _DIGITS.format("q"), "qpos", "q // 3", "w",
    ]
)  # fmt: skip
_OF_KEY = st.sampled_from(
    [
        "doc[b, kv]", "far[b, kv]", "kv - start[doc[b, kv]]", "start[doc[b, kv]]", "far[b, kv] % 5",
        _DIGITS.format("kv"), "kv", "min(kv, far[b, kv])",
    ]
)  # fmt: skip
_TESTS = st.one_of(
    st.tuples(_OF_ROW, st.sampled_from(["==", "<=", ">", "!="]), _OF_KEY).map(" ".join),
    st.tuples(_OF_ROW, _OF_KEY, st.sampled_from(["w", "3", "plen[b]"])).map(
        lambda t: f"abs({t[0]} - ({t[1]})) <= {t[2]}"
    ),
    st.tuples(_OF_KEY, st.integers(-3, 9)).map(lambda t: f"{t[0]} < {t[1]}"),
    st.sampled_from(["ids[b, q] == doc[b, kv]", "doc[b, kv] == ids[b, q]"]),
    st.just("keep[b, clamp(q - ago[b, q] + kv, 0, Skv - 1)]"),
)
DATA = st.recursive(
    _TESTS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "and", "or"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda x: f"not ({x})"),
    ),
    max_leaves=4,
)
"""Masks of what is read along rows and along keys, and of digits; they need `FAR`."""

_LINES = st.tuples(
    st.sampled_from(["kv", "q", "qpos", "kv - qpos", "qpos + kv", "2 * kv + q", "kv - 2 * q"]),
    st.sampled_from(["", " + w", " - plen[b]", " + 3", " - 5"]),
).map("".join)
_SHAPES = st.one_of(
    _LINES,
    st.tuples(_LINES, st.sampled_from(["// 4", "% 4", "// -3", "// w", "% 5 // 2"])).map(
        lambda t: f"({t[0]}) {t[1]}"
    ),
    _LINES.map(lambda x: f"abs({x})"),
    st.tuples(_LINES, _LINES).map(lambda t: f"min({t[0]}, {t[1]})"),
    st.tuples(_LINES, _LINES).map(lambda t: f"({t[0]}) // 3 - ({t[1]}) // 4"),
    _LINES.map(lambda x: f"clamp({x}, 2, 9)"),
    st.tuples(_LINES, _LINES, _LINES).map(lambda t: f"where({t[0]} <= 4, {t[1]}, {t[2]})"),
)
AFFINE = st.recursive(
    st.tuples(_SHAPES, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), st.integers(-3, 9)).map(
        lambda t: f"{t[0]} {t[1]} {t[2]}"
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "and", "or"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda x: f"not ({x})"),
    ),
    max_leaves=4,
)

_WALKS = st.sampled_from(
    ["kv", "kv - q", "q - kv", "kv + qpos - w", "kv // 4", "3 * kv", "-kv - 1", "kv // 2 * 3 + 1"]
)
_PERIODS = st.sampled_from(["1", "2", "3", "6", "8", "24", "32", "64", "100", "128", "150", "777"])
_TURNS = st.one_of(
    st.tuples(_WALKS, _PERIODS).map(lambda t: f"({t[0]}) % {t[1]}"),
    st.tuples(_WALKS, _PERIODS).map(lambda t: f"(({t[0]}) // 5) % {t[1]}"),
    st.tuples(_WALKS, _PERIODS).map(lambda t: f"(({t[0]}) % {t[1]}) // 3"),
    st.tuples(_WALKS, _PERIODS).map(lambda t: f"abs({t[0]}) % {t[1]}"),
    _PERIODS.map(lambda c: f"abs(q % {c} - kv % {c})"),
)
_OF_TURNS = st.sampled_from(["0", "1", "3", "60", "-2", "900", "q % 150", "w * 20", "plen[b]"])
PERIODIC = st.recursive(
    st.tuples(_TURNS, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), _OF_TURNS).map(" ".join),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner | AFFINE).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda x: f"not ({x})"),
    ),
    max_leaves=3,
)
"""Masks under which keys of a row begin and end again and again."""
