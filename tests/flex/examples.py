"""Functions as people write them for FlexAttention, from their formulas and with operators alone.

`array` makes what a function captures: NumPy's array or a tensor of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Callable[[Any], Any]


@dataclass(frozen=True)
class Example:
    """`make` gives a `score_mod` and a `mask_mod`, for `rows` rows and `keys` keys."""

    name: str
    make: Callable[[Array], tuple[Any, Any]]
    rows: int = 24
    keys: int = 24


def _causal(array: Array) -> tuple[Any, Any]:
    return None, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def _window(array: Array) -> tuple[Any, Any]:
    size = 5

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= size)

    return None, window


def _prefix(array: Array) -> tuple[Any, Any]:
    lengths = array(np.array([3, 9], np.int32))

    def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < lengths[b]) | (kv_idx <= q_idx)

    return None, prefix


def _document(array: Array) -> tuple[Any, Any]:
    document = array(np.repeat(np.arange(4), 6))

    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    return None, same_document


def _packed(array: Array) -> tuple[Any, Any]:
    """Positions that begin anew in every document: a read inside of a read."""
    document = array(np.repeat(np.arange(3), [5, 12, 7]))
    begin = array(np.array([0, 5, 17], np.int32))

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row, key = q_idx - begin[document[q_idx]], kv_idx - begin[document[kv_idx]]
        return (document[q_idx] == document[kv_idx]) & (abs(row - key) < 4)

    return None, near


def _alibi(array: Array) -> tuple[Any, Any]:
    slopes = array(np.exp2(-np.arange(1, 5)).astype(np.float32))

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi, None


def _relative(array: Array) -> tuple[Any, Any]:
    table = array(np.sin(np.arange(4 * 47, dtype=np.float32)).reshape(4, 47))

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, q_idx - kv_idx + 23]

    return relative, None


def _pair_bias(array: Array) -> tuple[Any, Any]:
    bias = array(np.cos(np.arange(2 * 24 * 24, dtype=np.float32)).reshape(2, 1, 24, 24))
    return (lambda score, b, h, q_idx, kv_idx: score + bias[b, 0, q_idx, kv_idx]), None


def _dilated(array: Array) -> tuple[Any, Any]:
    def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = abs(q_idx - kv_idx)
        return (distance <= 8) & (distance % 2 == 0)

    return None, dilated


def _window_2d(array: Array) -> tuple[Any, Any]:
    width, radius = 6, 1

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        dy, dx = q_idx // width - kv_idx // width, q_idx % width - kv_idx % width
        return (abs(dy) <= radius) & (abs(dx) <= radius)

    return None, window


def _window_3d(array: Array) -> tuple[Any, Any]:
    height, width = 3, 4

    def place(index: Any) -> tuple[Any, Any, Any]:
        return index // (height * width), index // width % height, index % width

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (qt, qy, qx), (kt, ky, kx) = place(q_idx), place(kv_idx)
        return (abs(qt - kt) <= 1) & (abs(qy - ky) <= 1) & (abs(qx - kx) <= 2)

    return None, window


def _neighbourhood(array: Array) -> tuple[Any, Any]:
    """As NATTEN does it: at an edge the window stays whole, so its middle is moved."""
    width, half = 6, 1
    middle = array(np.clip(np.arange(6), half, width - 1 - half).astype(np.int32))

    def neighbourhood(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        dy = middle[q_idx // width % 4] - kv_idx // width
        dx = middle[q_idx % width] - kv_idx % width
        return (abs(dy) <= half) & (abs(dx) <= half)

    return None, neighbourhood


def _paged(array: Array) -> tuple[Any, Any]:
    """A table of physical pages: which token of the sequence a key is."""
    logical = array(np.array([[1, 0, 2], [2, 1, 0]], np.int64))

    def paged(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        token = logical[b, kv_idx // 8] * 8 + kv_idx % 8
        return token <= q_idx + 16

    return None, paged


def _heads(array: Array) -> tuple[Any, Any]:
    """A window of its own for every head, and a score that falls off beside it."""
    sizes = array(np.array([1, 2, 4, 8], np.int16))
    slope = array(np.array(0.25, np.float32))

    def fall(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slope * abs(q_idx - kv_idx) / (h + 1)

    return fall, lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= sizes[h]


EXAMPLES = (
    Example("causal", _causal, rows=9),
    Example("window", _window),
    Example("prefix", _prefix, keys=17),
    Example("document", _document),
    Example("packed documents", _packed),
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
