"""Functions as people write them for FlexAttention, from their formulas.

They are made with the arrays and functions of `xp`: NumPy's or PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Example:
    """`make` gives a `score_mod` and a `mask_mod`, for `rows` rows and `keys` keys."""

    name: str
    make: Callable[[Any], tuple[Any, Any]]
    rows: int = 24
    keys: int = 24


def _causal(xp: Any) -> tuple[Any, Any]:
    return None, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def _window(xp: Any) -> tuple[Any, Any]:
    size = 5

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= size)

    return None, window


def _prefix(xp: Any) -> tuple[Any, Any]:
    lengths = xp.asarray(np.array([3, 9], np.int32))

    def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < lengths[b]) | (kv_idx <= q_idx)

    return None, prefix


def _document(xp: Any) -> tuple[Any, Any]:
    document = xp.asarray(np.repeat(np.arange(4), 6))

    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    return None, same_document


def _packed(xp: Any) -> tuple[Any, Any]:
    """Positions that begin anew in every document: a read inside of a read."""
    document = xp.asarray(np.repeat(np.arange(3), [5, 12, 7]))
    begin = xp.asarray(np.array([0, 5, 17], np.int32))

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row, key = q_idx - begin[document[q_idx]], kv_idx - begin[document[kv_idx]]
        return (document[q_idx] == document[kv_idx]) & (abs(row - key) < 4)

    return None, near


def _soft_cap(xp: Any) -> tuple[Any, Any]:
    cap = 2.5

    def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * xp.tanh(score / cap)

    return soft_cap, None


def _masking_score(xp: Any) -> tuple[Any, Any]:
    """A mask written as a score, as it was before `mask_mod`."""

    def masked(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return xp.where(q_idx >= kv_idx, score, -float("inf"))

    return masked, None


def _alibi(xp: Any) -> tuple[Any, Any]:
    slopes = xp.asarray(np.exp2(-np.arange(1, 5)).astype(np.float32))

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi, None


def _relative(xp: Any) -> tuple[Any, Any]:
    table = xp.asarray(np.sin(np.arange(4 * 47, dtype=np.float32)).reshape(4, 47))

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, q_idx - kv_idx + 23]

    return relative, None


def _pair_bias(xp: Any) -> tuple[Any, Any]:
    bias = xp.asarray(np.cos(np.arange(2 * 24 * 24, dtype=np.float32)).reshape(2, 1, 24, 24))
    return (lambda score, b, h, q_idx, kv_idx: score + bias[b, 0, q_idx, kv_idx]), None


def _dilated(xp: Any) -> tuple[Any, Any]:
    def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = abs(q_idx - kv_idx)
        return (distance <= 8) & (distance % 2 == 0)

    return None, dilated


def _window_2d(xp: Any) -> tuple[Any, Any]:
    width, radius = 6, 1

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        dy, dx = q_idx // width - kv_idx // width, q_idx % width - kv_idx % width
        return (abs(dy) <= radius) & (abs(dx) <= radius)

    return None, window


def _window_3d(xp: Any) -> tuple[Any, Any]:
    height, width = 3, 4

    def place(index: Any) -> tuple[Any, Any, Any]:
        return index // (height * width), index // width % height, index % width

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (qt, qy, qx), (kt, ky, kx) = place(q_idx), place(kv_idx)
        return (abs(qt - kt) <= 1) & (abs(qy - ky) <= 1) & (abs(qx - kx) <= 2)

    return None, window


def _neighbourhood(xp: Any) -> tuple[Any, Any]:
    """As NATTEN does it: at an edge the window stays whole, so its middle is moved."""
    width, half = 6, 1
    middle = xp.asarray(np.clip(np.arange(6), half, width - 1 - half).astype(np.int32))

    def neighbourhood(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        dy = middle[q_idx // width % 4] - kv_idx // width
        dx = middle[q_idx % width] - kv_idx % width
        return (abs(dy) <= half) & (abs(dx) <= half)

    return None, neighbourhood


def _paged(xp: Any) -> tuple[Any, Any]:
    """A table of physical pages: which token of the sequence a key is."""
    logical = xp.asarray(np.array([[1, 0, 2], [2, 1, 0]], np.int64))

    def paged(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        token = logical[b, kv_idx // 8] * 8 + kv_idx % 8
        return token <= q_idx + 16

    return None, paged


def _heads(xp: Any) -> tuple[Any, Any]:
    """A window of its own for every head, and a score that falls off beside it."""
    sizes = xp.asarray(np.array([1, 2, 4, 8], np.int16))
    slope = xp.asarray(np.array(0.25, np.float32))

    def fall(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slope * abs(q_idx - kv_idx) / (h + 1)

    return fall, lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= sizes[h]


EXAMPLES = (
    Example("causal", _causal, rows=9),
    Example("window", _window),
    Example("prefix", _prefix, keys=17),
    Example("document", _document),
    Example("packed documents", _packed),
    Example("tanh soft cap", _soft_cap),
    Example("mask as a score", _masking_score),
    Example("alibi", _alibi),
    Example("relative", _relative),
    Example("pair bias", _pair_bias),
    Example("dilated", _dilated),
    Example("2-D window", _window_2d),
    Example("3-D window", _window_3d),
    Example("neighbourhood", _neighbourhood),
    Example("paged", _paged, rows=8),
    Example("heads", _heads, keys=20),
)
