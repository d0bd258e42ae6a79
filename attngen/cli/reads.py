"""Do all reads of captured tensors stay inside, and up to which length do they?

A text may be made for one length: windows of 49 tokens read a table of 169 offsets, which has no
element for a key further away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from attngen.analysis.ranges import infer_ranges, launch_ranges
from attngen.binding import Binding
from attngen.cli.guess import guess_sizes
from attngen.engines.numpy_engine import as_numpy
from attngen.ir.attention import Attention
from attngen.ir.expr import Load
from attngen.ir.semantics import Value, evaluate
from attngen.ir.traverse import postorder, tensors

__all__ = ["find_read_outside", "longest_inside"]

Array: TypeAlias = Any

_KEYS: Final = 1 << 13
"""Keys of a row that are looked at; of more, so many at equal distances."""


def find_read_outside(attention: Attention, binding: Binding) -> str | None:
    """A tensor that some attending pair reads outside of its shape; None where none is found.

    A sample: the first, the middle and the last row of the first and the last head and sequence.
    """
    sizes = binding.sizes
    if 0 in (sizes["B"], sizes["Hq"], sizes["Sq"], sizes["Skv"]):
        return None
    arrays = {name: as_numpy(seen) for name, seen in binding.tensors.items()}
    q = _spread(sizes["Sq"], 3).reshape(1, 1, -1, 1)
    kv = _spread(sizes["Skv"], _KEYS).reshape(1, 1, 1, -1)
    b = _spread(sizes["B"], 2).reshape(-1, 1, 1, 1)
    h = _spread(sizes["Hq"], 2).reshape(1, -1, 1, 1)
    names: dict[str, Array] = {
        **{name: np.int64(size) for name, size in sizes.items()},
        **{n: np.float32(x) if isinstance(x, float) else x for n, x in binding.params.items()},
        "b": b, "h": h, "hkv": h // max(1, sizes["Hq"] // sizes["Hkv"]), "q": q, "kv": kv,
    }  # fmt: skip
    for name, length in (("Sq", attention.length_q), ("Skv", attention.length_kv)):
        if length is not None:
            names[name] = evaluate(length, {**names, name: np.int64(sizes[name])}, arrays).data
    names["qpos"] = q + names["Skv"] - names["Sq"]
    attends = (q < names["Sq"]) & (kv < names["Skv"])
    if attention.mask is not None:
        mask = evaluate(attention.mask, names, arrays)
        if _is_outside(mask, attends):
            return mask.tensor
        attends = attends & mask.data
    names["s"] = np.float32(0)
    for score in attention.scores:
        found = evaluate(score, names, arrays)
        if _is_outside(found, attends):
            return found.tensor
        names["s"] = found.data
    return None


def longest_inside(
    attention: Attention, sizes: Mapping[str, int], params: Mapping[str, bool | int | float]
) -> int | None:
    """The most tokens, up to those of `sizes`, for which intervals prove every read inside.

    There are as many rows as keys.  Sizes that only tensors name grow with what is read along them,
    and indices that are read from tensors are left out: their values are made to fit.
    None where nothing is proved of a single token either.
    """
    named = {name: sizes[name] for name in ("B", "Hq", "Hkv", "Dqk", "Dv")}

    def is_inside(tokens: int) -> bool:
        tried = {**named, "Sq": tokens, "Skv": tokens}
        return _is_proved({**tried, **guess_sizes(attention, tried, params)}, attention, params)

    low, high = 0, max(sizes["Sq"], sizes["Skv"])
    while low < high:
        middle = (low + high + 1) // 2
        if is_inside(middle):
            low = middle
        else:
            high = middle - 1
    return low or None


def _is_proved(
    sizes: Mapping[str, int], attention: Attention, params: Mapping[str, bool | int | float]
) -> bool:
    roots = attention.expressions()
    known = infer_ranges(roots, launch_ranges(attention, sizes, params), attention)
    for load in postorder(*roots):
        if not isinstance(load, Load):
            continue
        for index, dim in zip(load.indices, attention.tensor(load.tensor).dims, strict=True):
            size = dim.size if isinstance(dim.size, int) else sizes[dim.size]
            found = known[id(index)]
            if not tensors(index) and not 0 <= found.low <= found.high < size:
                return False
    return True


def _is_outside(found: Value, where: Array) -> bool:
    return found.tensor is not None and bool(np.any(found.outside & where))


def _spread(size: int, most: int) -> Array:
    """Up to so many of the indices below a size, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))
