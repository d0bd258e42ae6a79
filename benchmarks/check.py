"""Whether a result is right, before its time counts: float64 on a sample of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

import attngen
from attngen.record import record

__all__ = ["Expected", "Verdict", "choose_rows", "compute_expected", "judge"]

Floats: TypeAlias = NDArray[np.floating[Any]]
_PAIRS: Final = 1 << 22
"""Pairs of a row and a key that the oracle computes for one cell: two seconds of one core."""
_MIN_ROWS: Final = 4
_MAX_ROWS: Final = 64


@final
@record(eq=False)
class Expected:
    """The right answer for some rows: o and its bound, [B, Hq, rows, Dv] in float64."""

    rows: NDArray[np.int64]
    o: Floats
    bound: Floats


@final
@record
class Verdict:
    """How far a result is from the right one.

    max_err, rms_err:  of the elements of the sampled rows.
    bound_ratio:       the largest error in units of the oracle's bound: attngen promises 1.
    """

    max_err: float
    rms_err: float
    bound_ratio: float


def choose_rows(B: int, Hq: int, S: int, seed: int) -> NDArray[np.int64]:
    """Rows to check, for every sequence and head: the first, the last, and some at random."""
    count = min(S, _MAX_ROWS, max(_MIN_ROWS, _PAIRS // (B * Hq * S)))
    others = np.random.default_rng(seed).permutation(np.arange(1, max(1, S - 1)))
    return np.unique(np.concatenate(([0, S - 1], others[: max(0, count - 2)]))).astype(np.int64)


def compute_expected(
    text: str,
    operands: tuple[Floats, Floats, Floats],
    tensors: Mapping[str, NDArray[Any]],
    dtype: str,
    rows: NDArray[np.int64],
) -> Expected:
    """The oracle's answer for the rows; q, k, v [B, S, H, D] hold values of the dtype."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in operands)
    unit = attngen.load_text(text)
    found = attngen.reference(unit, q, k, v, tensors=tensors, rows=rows, dtype=dtype)
    return Expected(rows, found.o, found.bound)


def judge(found: Floats, expected: Expected) -> Verdict:
    """Compare the sampled rows, [B, rows, Hq, Dv]; NaN counts as infinitely far."""
    with np.errstate(invalid="ignore"):
        error = np.abs(found.transpose(0, 2, 1, 3).astype(np.float64) - expected.o)
    error = np.where(np.isnan(error), np.inf, error)
    ratio = error / expected.bound
    rms = float(np.sqrt(np.mean(np.square(error))))
    return Verdict(float(error.max()), rms, float(ratio.max()))
