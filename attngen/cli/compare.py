"""Outputs against the float64 oracle, in parts, with the bound of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.frontend.load import Unit
from attngen.oracle.dense import Reference, reference

__all__ = ["Comparison", "Errors", "choose_rows", "compare"]

Array: TypeAlias = Any

MAX_PAIRS: Final = 1 << 25
"""Pairs that the oracle computes; of a larger problem it computes evenly spaced rows."""
PAIRS_AT_ONCE: Final = 1 << 24
"""Pairs in one step, so that progress can be seen."""


@final
@dataclass(slots=True)
class Errors:
    """How far one output is from the oracle, over all rows seen so far.

    `fraction` is the largest error divided by its bound, and `worst` the indices of that
    element; `outside` counts elements beyond their bound.
    """

    count: int = 0
    finite: int = 0
    outside: int = 0
    largest: float = 0.0
    squares: float = 0.0
    fraction: float = 0.0
    worst: tuple[int, ...] | None = None
    worst_values: tuple[float, float] = (0.0, 0.0)
    """What was found there, and what is right."""

    @property
    def rms(self) -> float:
        return float(np.sqrt(self.squares / self.finite)) if self.finite else 0.0

    def add(self, found: Array, right: Array, bound: Array, accepted: Array, rows: Array) -> None:
        """Take in some rows; the row is the third dimension of every array."""
        if not right.size:
            return
        found = np.asarray(found).astype(np.float64)
        finite = np.isfinite(right) & np.isfinite(found)
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.where(finite, np.abs(found - right), 0.0)
            share = np.where(error == 0.0, 0.0, error / bound)
        # What is not finite is either right or as wrong as can be.
        share = np.where(finite, share, np.where(accepted, 0.0, np.inf))
        self.count += right.size
        self.finite += int(finite.sum())
        self.outside += int((~accepted).sum())
        self.largest = max(self.largest, float(error.max()))
        self.squares += float((error**2).sum())
        at = np.unravel_index(int(np.argmax(share)), share.shape)
        if self.worst is None or share[at] > self.fraction:
            self.fraction = float(share[at])
            indices = [int(i) for i in at]
            indices[2] = int(rows[indices[2]])
            self.worst = tuple(indices)
            self.worst_values = (float(found[at]), float(right[at]))


@final
@dataclass(slots=True)
class Comparison:
    """The rows that were compared, and the errors of each output."""

    rows: Array
    errors: dict[str, Errors] = field(default_factory=dict)
    visible: int = 0
    pairs: int = 0
    empty_rows: int = 0

    @property
    def is_right(self) -> bool:
        return all(errors.outside == 0 for errors in self.errors.values())


def choose_rows(sizes: Mapping[str, int], covered: tuple[int, int]) -> Array:
    """The rows to compare: all that a run covered, or evenly spaced ones of a large problem."""
    begin, end = covered
    pairs_of_a_row = max(1, sizes["B"] * sizes["Hq"] * sizes["Skv"])
    most = max(2, MAX_PAIRS // pairs_of_a_row)
    if end - begin <= most:
        return np.arange(begin, end, dtype=np.int64)
    # The first and the last row are among them: masks have their corners there.
    return np.unique(np.linspace(begin, end - 1, most).round().astype(np.int64))


def compare(
    unit: Unit,
    operands: Mapping[str, Array],
    outputs: Mapping[str, Array],
    *,
    tensors: Mapping[str, Array],
    params: Mapping[str, Any],
    consts: Mapping[str, Any],
    dtype: str,
    covered: tuple[int, int],
    rows: Array,
    tell: Callable[[str], None],
) -> Comparison:
    """Compare outputs [B, Hq, rows, …] of the rows `covered` with the oracle's, for `rows`.

    Errors:  A65x when the oracle refuses the arguments.
    """
    q, k, v = (operands[name] for name in "qkv")
    result = Comparison(rows, {name: Errors() for name in outputs})
    step = max(1, PAIRS_AT_ONCE // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for part in _parts(rows, step):
        tell(f"comparing with the oracle: row {part[0]} of {covered[1]}")
        right = reference(
            unit, q, k, v,
            tensors=tensors, params=params, consts=consts, rows=part, dtype=dtype,
        )  # fmt: skip
        at = part - covered[0]
        for name, errors in result.errors.items():
            found = np.asarray(outputs[name])[:, :, at]
            errors.add(found, *_right_answer(name, right, found), rows=part)
        result.visible += int(right.visible.sum())
        result.pairs += right.visible.size
        result.empty_rows += int((~right.visible.any(axis=3)).sum())
    return result


def _parts(rows: Array, size: int) -> Iterator[Array]:
    for i in range(0, len(rows), size):
        yield rows[i : i + size]


def _right_answer(name: str, right: Reference, found: Array) -> tuple[Array, Array, Array]:
    """The oracle's values of an output, how far one may be from them, and where it is right."""
    if name == "o":
        return right.o, right.bound, right.accepts_o(found)
    assert right.lse is not None
    assert right.lse_bound is not None
    assert right.row_max is not None
    if name == "lse":
        return right.lse, right.lse_bound, right.accepts_lse(found)
    # The largest score is as exact as the scores, and so no less exact than the LSE.
    empty = np.isneginf(right.row_max)
    bound = np.where(empty, 0.0, right.lse_bound)
    widened = np.asarray(found).astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.abs(widened - right.row_max) <= bound
    finite = np.isfinite(right.row_max)
    accepted = np.where(finite, near, np.where(empty, np.isneginf(widened), ~np.isfinite(widened)))
    return right.row_max, bound, accepted
