"""Which pairs of query row and key attend: counted, and drawn.

A pair attends when it is inside both lengths, the mask is true, and no score line makes it
-inf.  What a score line does may depend on the score itself; such pairs count as attending,
and are marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.cli.errors import CannotMake
from attngen.cli.problem import Problem
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines.numpy_engine import as_numpy
from attngen.ir.expr import Binary, BinaryOp, Call, Const, Expr, Load, Role
from attngen.ir.semantics import Value, evaluate
from attngen.ir.traverse import postorder, symbols

__all__ = ["Count", "Pairs", "Picture", "count_pairs", "draw_rows"]

Array: TypeAlias = Any

MAX_EVALUATED: Final = 1 << 26
"""Pairs that are evaluated for a count; a larger problem is sampled."""
AT_ONCE: Final = 1 << 20
"""Pairs in one step: 8 MiB for every intermediate array."""
MAX_COLUMNS: Final = 1 << 20
"""Keys of a sampled row that are looked at."""
CELLS: Final = (16, 48)
"""Rows and columns of the overview."""
TRIED_SCORES: Final = (-16.0, 0.0, 16.0)
"""A score line masks a pair for certain when it does so for each of these."""


@final
class Pairs:
    """Evaluates the mask of one problem at any rows and keys."""

    def __init__(self, problem: Problem) -> None:
        attention = problem.attention
        self._problem = problem
        self._tensors = {n: as_numpy(view) for n, view in problem.binding.tensors.items()}
        self._sizes = {name: np.int64(size) for name, size in problem.sizes.items()}
        self._params = {
            name: np.float32(v) if isinstance(v, float) else v for name, v in problem.params.items()
        }
        masking = {name for name, x in self._tensors.items() if _holds_negative_infinity(x)}
        may_mask = any(_may_mask(score, masking) for score in attention.scores)
        self._scores = attention.scores if may_mask else ()
        roots = [attention.length_q, attention.length_kv, attention.mask, *self._scores]
        used = symbols(*(root for root in roots if root is not None))
        self.batches = problem.sizes["B"] if "b" in used else min(1, problem.sizes["B"])
        """Batches with a mask of their own: all, or one that stands for the others."""
        self.heads = problem.sizes["Hq"] if used & {"h", "hkv"} else 1

    def visible(self, b: int, h: int, rows: Array, keys: Array) -> tuple[Array, Array]:
        """Which pairs attend, and for which the score decides; both [rows, keys].

        Errors:  A717 when the mask of an attending pair reads outside of a tensor.
        """
        attention, sizes = self._problem.attention, self._problem.sizes
        Sq, Skv = self.lengths(b)
        group = max(1, sizes["Hq"] // sizes["Hkv"])
        q, kv = rows[:, None], keys[None, :]
        names = {
            **self._sizes, **self._params, "Sq": Sq, "Skv": Skv, "b": np.int64(b),
            "h": np.int64(h), "hkv": np.int64(h // group), "q": q, "kv": kv, "qpos": q + Skv - Sq,
        }  # fmt: skip
        inside = np.broadcast_to((q < Sq) & (kv < Skv), (len(rows), len(keys)))
        visible = inside
        if attention.mask is not None:
            mask = evaluate(attention.mask, names, self._tensors)
            self._check_reads(mask, inside)
            visible = inside & mask.data
        masked, unsure = self._masked_by_score(names, visible)
        return visible & ~masked, visible & unsure

    def lengths(self, b: int) -> tuple[Array, Array]:
        """The true lengths of a sequence."""
        attention = self._problem.attention
        names = {**self._sizes, **self._params, "b": np.int64(b)}
        lengths = []
        for name, e in (("Sq", attention.length_q), ("Skv", attention.length_kv)):
            if e is None:
                lengths.append(self._sizes[name])
                continue
            found = evaluate(e, names, self._tensors)
            self._check_reads(found, np.bool_(True))
            lengths.append(np.int64(found.data))
        return lengths[0], lengths[1]

    def _masked_by_score(self, names: Mapping[str, Array], visible: Array) -> tuple[Array, Array]:
        nothing = np.zeros(visible.shape, np.bool_)
        if not self._scores:
            return nothing, nothing
        outcomes = []
        for start in TRIED_SCORES:
            s: Array = np.float32(start)
            for score in self._scores:
                found = evaluate(score, {**names, "s": s}, self._tensors)
                self._check_reads(found, visible)
                s = found.data
            outcomes.append(np.broadcast_to(np.isneginf(s), visible.shape))
        always = np.logical_and.reduce(outcomes)
        return always, np.logical_or.reduce(outcomes) & ~always

    def _check_reads(self, found: Value, where: Array) -> None:
        if found.tensor is None or not np.any(found.outside & where):
            return
        tensor = self._problem.attention.tensor(found.tensor)
        reason = "with these sizes it is read outside of its shape"
        raise AttnError(CannotMake(tensor.span, tensor.name, reason, ", or other sizes"))


def _holds_negative_infinity(tensor: Array) -> bool:
    return tensor.dtype.kind not in "biu" and bool(np.isneginf(tensor).any())


def _may_mask(score: Expr, masking: Set[str]) -> bool:
    """Whether a score line can make a score -inf where it was not.

    `masking` are the tensors that hold -inf.
    """
    for node in postorder(score):
        match node:
            case Const(value) if isinstance(value, float) and math.isinf(value):
                return True
            case Load(tensor) if tensor in masking:
                return True
            case Call("log" | "log2"):
                return True
            case Binary(BinaryOp.DIV, _, divisor) if symbols(divisor, role=Role.INDEX):
                return True
            case _:
                pass
    return False


# ---- counting ------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, eq=False)
class Count:
    """Attending pairs of a problem.

    `cells` are the shares of attending pairs in a grid over batch 0, head 0, or None for an
    empty problem.  `sample` says in words what was looked at; None: every pair.
    """

    pairs: int
    total: int
    sample: str | None
    by_score: bool
    cells: Array | None


def count_pairs(pairs: Pairs, problem: Problem, tell: Callable[[str], None]) -> Count:
    """Count exactly where that is a matter of seconds, else from evenly spaced rows."""
    sizes = problem.sizes
    B, Hq, Sq, Skv = (sizes[name] for name in ("B", "Hq", "Sq", "Skv"))
    total = B * Hq * Sq * Skv
    if total == 0:
        return Count(0, 0, None, False, None)
    row_edges, key_edges = _edges(Sq, CELLS[0]), _edges(Skv, CELLS[1])
    heads = pairs.batches * pairs.heads
    is_exact = heads * Sq * Skv <= MAX_EVALUATED
    keys = _evenly(0, Skv, Skv if is_exact else MAX_COLUMNS)
    shown = _evenly(0, heads, max(1, MAX_EVALUATED // (CELLS[0] * len(keys))))
    rows_of_cell = max(1, MAX_EVALUATED // (len(shown) * len(keys) * (len(row_edges) - 1)))
    cells = np.zeros((len(row_edges) - 1, len(key_edges) - 1))
    visible_pairs, by_score, rows_seen = 0.0, False, 0
    for number, (i, (begin, end)) in product(shown, enumerate(pairwise(row_edges))):
        b, h = divmod(int(number), pairs.heads)
        rows = _evenly(begin, end, end - begin if is_exact else rows_of_cell)
        tell(f"counting pairs: batch {b}, head {h}, from row {begin}")
        found = np.zeros(len(keys), np.int64)
        for part in _chunks(rows, max(1, AT_ONCE // len(keys))):
            visible, unsure = pairs.visible(b, h, part, keys)
            found += visible.sum(axis=0)
            by_score |= bool(unsure.any())
        rows_seen += len(rows)
        visible_pairs += found.sum() / (len(rows) * len(keys)) * (end - begin) * Skv
        if number == 0:
            cells[i] = _share(found, keys, key_edges) / len(rows)
    sample = None
    if not is_exact:
        seen = (rows_seen // len(shown), len(keys), len(shown))
        of = (Sq, Skv, heads)
        parts = zip(seen, of, ("rows", "keys", "heads"), strict=True)
        words = ", ".join(f"{a} of {b} {what}" for a, b, what in parts if a < b)
        sample = f"estimated from {words}, evenly spaced"
    return Count(round(visible_pairs * (B * Hq) / len(shown)), total, sample, by_score, cells)


def _share(found: Array, keys: Array, edges: list[int]) -> Array:
    """Attending pairs per row and key in each column of the overview."""
    starts = np.searchsorted(keys, edges[:-1])
    sums = np.add.reduceat(found, np.minimum(starts, len(found) - 1))
    counts = np.diff(np.append(starts, len(keys)))
    return np.where(counts > 0, sums / np.maximum(counts, 1), 0.0)


def _edges(size: int, cells: int) -> list[int]:
    count = min(size, cells)
    return [size * i // count for i in range(count + 1)]


def _evenly(begin: int, end: int, most: int) -> Array:
    """At most so many integers of [begin, end), evenly spaced: the middles of equal parts."""
    size = end - begin
    if size <= most:
        return np.arange(begin, end, dtype=np.int64)
    return begin + (2 * np.arange(most, dtype=np.int64) + 1) * size // (2 * most)


def _chunks(rows: Array, size: int) -> Iterator[Array]:
    for i in range(0, len(rows), size):
        yield rows[i : i + size]


# ---- drawing -------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Picture:
    """Lines of a drawing, each with the name of its row in front."""

    heading: str
    lines: tuple[str, ...]


COLUMNS: Final = 56
_LEAD: Final = 12
"""Columns for the first keys where the drawing skips to the diagonal."""


def draw_rows(pairs: Pairs, problem: Problem, count: int, marks: str) -> Picture:
    """The first rows of batch 0, head 0; `marks` are for attending, masked, and score decides."""
    sizes = problem.sizes
    rows = np.arange(min(count, sizes["Sq"]), dtype=np.int64)
    Sq, Skv = (int(length) for length in pairs.lengths(0))
    left, right = _columns(sizes["Skv"], int(rows[-1]) + Skv - Sq if len(rows) else 0)
    keys = np.concatenate([left, right])
    visible, unsure = pairs.visible(0, 0, rows, keys)
    signs = np.where(unsure, marks[2], np.where(visible, marks[0], marks[1]))
    width = len(str(max(int(rows[-1]) if len(rows) else 0, 0)))
    at_width = max((len(str(int(q) + Skv - Sq)) for q in rows), default=1)
    lines = []
    for q, row in zip(rows, signs, strict=True):
        text = "".join(row[: len(left)]) + (" … " + "".join(row[len(left) :]) if len(right) else "")
        more = " …" if keys[-1] + 1 < sizes["Skv"] else ""
        lines.append(f"q {q:>{width}}  qpos {int(q) + Skv - Sq:>{at_width}} | {text}{more}")
    margin = " " * (len(f"q {0:>{width}}  qpos {0:>{at_width}} | "))
    heading = margin + f"kv {left[0]}"
    if len(right):
        heading = heading.ljust(len(margin) + len(left) + 3) + f"kv {right[0]}"
    return Picture(heading, tuple(lines))


def _columns(size: int, last_position: int) -> tuple[Array, Array]:
    """The keys to show: the first ones, and, where those do not reach it, the diagonal."""
    everything = np.arange(size, dtype=np.int64)
    if size <= COLUMNS or last_position + 2 <= COLUMNS:
        return everything[:COLUMNS], everything[:0]
    end = min(size, last_position + 3)
    return everything[:_LEAD], np.arange(end - (COLUMNS - _LEAD - 3), end, dtype=np.int64)
