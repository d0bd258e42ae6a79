"""Whether a candidate is right, before its time counts: float64 on a sample of rows.

A candidate sits two exams: the call that is timed, and a ragged one, with lengths that no tile
divides.  Before each, its output is filled with NaN, so that what it leaves out shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from attngen.diagnostics.diagnostic import AttnError
from attngen.oracle.dense import reference
from attngen.record import record
from attngen.tuning.call import Call, Subject, make_operands

__all__ = [
    "Exam", "Verdict", "WrongError", "judge", "make_exam", "make_exams", "ragged_lengths",
    "shrink",
]  # fmt: skip

Array: TypeAlias = Any
Floats: TypeAlias = NDArray[np.floating[Any]]

_PAIRS: Final = 1 << 20
"""Pairs of a row and a key that the oracle computes for one exam: half a second of one core."""
_MIN_ROWS: Final = 4
_MAX_ROWS: Final = 64
_RAGGED: Final = 3 * 128 + 5
"""More than three of the highest usual tiles, and a few rows that fill none."""
_NAN_ABOVE: Final[Mapping[str, int]] = {"fp16": 0x7C00, "bf16": 0x7F80, "fp32": 0x7F800000}
"""Bits of infinity; without the sign, whatever is above is NaN."""


@final
@record(eq=False)
class Exam:
    """A call, and the right answer for some of its rows.

    o, bound:  [B, Hq, rows, Dv] in float64.
    """

    call: Call
    dtype: str
    rows: NDArray[np.int64]
    o: Floats
    bound: Floats


@final
@record
class Verdict:
    """How far a result is from the right one, at the rows that were compared.

    bound_ratio:  the largest error in units of the oracle's bound: 1 is allowed.
    """

    max_error: float
    bound_ratio: float


class WrongError(Exception):
    """A candidate that computes something else; the text says how far it is off."""


def make_exam(subject: Subject, call: Call) -> Exam:
    """The oracle's answer for a sample of rows, the first and the last among them.

    Errors:  A65x where the call is not valid.
    """
    attention = subject.attention
    assert attention.dtype is not None
    operands = make_operands(attention.dtype.name, call)
    if call.layout == "bshd":
        operands = {name: array.swapaxes(1, 2) for name, array in operands.items()}
    rows = _choose_rows(call)
    found = reference(
        subject.unit,
        **operands,
        tensors=call.tensors,
        params=call.params,
        consts=subject.consts,
        rows=rows,
        dtype=attention.dtype.name,
    )
    return Exam(call, attention.dtype.name, rows, found.o, found.bound)


def make_exams(subject: Subject, calls: Sequence[Call]) -> tuple[Exam, ...]:
    """Of the call that is timed, and of those others that are valid.

    A ragged call need not be one: a text may ask for a length that it does not have.
    Errors:  A65x where the first call is not valid.
    """
    first, *others = calls
    made = [make_exam(subject, first)]
    for call in others:
        with suppress(AttnError):
            made.append(make_exam(subject, call))
    return tuple(made)


def ragged_lengths(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the ragged exam: short, and divided by no tile; one sequence, few heads."""
    group = sizes["Hq"] // max(1, sizes["Hkv"])
    lengths = {name: min(sizes[name], _RAGGED) for name in ("Sq", "Skv")}
    return {**sizes, **lengths, "B": min(sizes["B"], 1), "Hkv": 1, "Hq": max(1, group)}


def shrink(subject: Subject, call: Call) -> Call:
    """The same call with ragged lengths; of its tensors the beginning is taken.

    It need not be valid: a tensor may hold positions that are not there any more.
    """
    sizes = ragged_lengths(call.sizes)
    tensors = {}
    for tensor in subject.attention.tensors:
        array = call.tensors[tensor.name]
        dims = tensor.dims[len(tensor.dims) - array.ndim :]
        part = tuple(slice(sizes.get(d.size) if isinstance(d.size, str) else None) for d in dims)
        tensors[tensor.name] = np.ascontiguousarray(array[part])
    return replace(call, sizes=sizes, tensors=tensors)


def judge(found: Array, exam: Exam) -> Verdict:
    """Compare an output, [B, Hq, Sq, Dv] of the dtype in any order, that was NaN before.

    Errors:  WrongError.
    """
    if found.size and _has_nan(found, _NAN_ABOVE[exam.dtype]):
        missing = _count_nan(found, _NAN_ABOVE[exam.dtype])
        raise WrongError(f"{missing} of {found.size} elements are not written, or are NaN")
    error = np.abs(found[:, :, exam.rows].astype(np.float64) - exam.o)
    ratio = float((error / exam.bound).max(initial=0.0))
    if not ratio <= 1.0:
        raise WrongError(f"an element is {ratio:.3g} times as far off as is allowed")
    return Verdict(float(error.max(initial=0.0)), ratio)


def _has_nan(found: Array, infinity: int) -> bool:
    """By two maxima, which are a tenth of the work of counting: the bits of a positive NaN are
    above infinity as signed numbers, those of a negative one as unsigned."""
    bits = 8 * found.itemsize
    signed, unsigned = (found.view(f"{kind}{found.itemsize}") for kind in "iu")
    return bool(signed.max() > infinity or unsigned.max() > infinity + (1 << (bits - 1)))


def _count_nan(found: Array, infinity: int) -> int:
    bits = found.view(f"u{found.itemsize}")
    magnitude = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    return int(np.count_nonzero(magnitude > infinity))


def _choose_rows(call: Call) -> NDArray[np.int64]:
    B, Hq, Sq, Skv = (call.sizes[name] for name in ("B", "Hq", "Sq", "Skv"))
    count = min(Sq, _MAX_ROWS, max(_MIN_ROWS, _PAIRS // max(1, B * Hq * Skv)))
    ends = {0, Sq - 1} if Sq else set()
    others = np.random.default_rng(call.seed).permutation(np.arange(1, max(1, Sq - 1)))
    chosen = [*ends, *others[: max(0, count - len(ends))]]
    return np.unique(np.array(chosen, np.int64))
