"""A user's own spec, timed beside what is installed.

Who can compute the spec itself is timed on it: FlexAttention, through functions derived from the
spec, and every library for full and causal specs.  For any other spec the plain libraries are timed
on full or causal attention of the same shape: what that costs without the spec's mask and scores.

Each result is checked before it is timed, and all are timed interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from attngen.api import Kernel
from attngen.bench.from_spec import (
    NotExpressibleError,
    as_flex_functions,
    constant_scale,
    plain_mask,
)
from attngen.bench.libraries import (
    FLASH,
    LIBRARIES,
    build_block_mask,
    call_flash,
    call_flex,
    call_sdpa,
    swap,
    why_missing,
)
from attngen.bench.machines import Array, Machine, Timer
from attngen.bench.timing import Plan, Times, measure
from attngen.oracle.dense import Reference, reference
from attngen.record import record

__all__ = ["OWN", "Found", "SpecProblem", "choose_rows", "time_spec"]

OWN: Final = "attngen"
_OTHERS_LIMIT: Final = 4.0
"""The oracle's bound is attngen's promise.  Who promises nothing is wrong beyond four times it."""
_PAIRS: Final = 1 << 22
"""Pairs of a row and a key that the oracle computes: two seconds of one core."""
_MIN_ROWS: Final = 4
_MAX_ROWS: Final = 64


@final
@record(eq=False)
class SpecProblem:
    """A spec with everything that it is called with, in memory of the CPU.

    Shapes:  q [B, Sq, Hq, Dqk], k [B, Skv, Hkv, Dqk], v [B, Skv, Hkv, Dv].
    """

    kernel: Kernel
    consts: Mapping[str, bool | int | float]
    dtype: str
    sizes: Mapping[str, int]
    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    tensors: Mapping[str, NDArray[Any]]
    params: Mapping[str, bool | int | float]


@final
@record(eq=False)
class Found:
    """One library: its times, or the reason why it has none.

    computes:  `spec`; or `full` or `causal`, attention of the same shape and nothing more.
    how:       what the library calls the code that runs.
    pairs:     of a row and a key that it has to look at, over all sequences, for one head; of a
               spec, estimated from the rows that were checked.
    fraction:  the largest error in units of the oracle's bound; None where nothing was compared.
    mask_ms:   what building the block mask took, which is not part of the times.
    """

    library: str
    computes: str
    times: Times | None
    pairs: float = 0.0
    how: str = ""
    fraction: float | None = None
    mask_ms: float | None = None
    mode: str = ""
    reason: str | None = None

    def tflops(self, sizes: Mapping[str, int]) -> float | None:
        """10^12 operations a second: two products of 2 Dqk and 2 Dv for each pair."""
        if self.times is None:
            return None
        work = 2.0 * sizes["Hq"] * self.pairs * (sizes["Dqk"] + sizes["Dv"])
        return work / (self.times.ms * 1e9)

    def as_json(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """For tools."""
        times = {"ms": None} if self.times is None else asdict(self.times)
        rest = {
            name: getattr(self, name) for name in ("how", "fraction", "mask_ms", "mode", "reason")
        }
        named = {"library": self.library, "computes": self.computes}
        return {**named, **times, "tflops": self.tflops(sizes), **rest}


@final
@record(eq=False)
class _Lane:
    """A call that is ready; `read` gives its output as [B, S, H, D]."""

    library: str
    computes: str
    call: Callable[[], Array]
    read: Callable[[Array], Array]
    how: str
    mask_ms: float | None = None


def time_spec(
    problem: SpecProblem, machine: Machine, libraries: Sequence[str], plan: Plan
) -> list[Found]:
    """attngen first, then each library of `libraries`, in order."""
    sizes = problem.sizes
    rows = choose_rows(sizes)
    right = _right_answer(problem, rows)
    visible = float(np.mean(right.visible)) if right.visible.size else 0.0
    pairs = {"spec": sizes["B"] * sizes["Sq"] * sizes["Skv"] * visible}
    pairs |= {mask: float(_count_pairs(sizes, mask)) for mask in ("full", "causal")}
    operands = [machine.asarray(x) for x in (problem.q, problem.k, problem.v)]
    tensors = {name: machine.asarray(x) for name, x in problem.tensors.items()}
    plain = _plain_problem(problem, right, rows)
    found: dict[str, Found] = {}
    timers: dict[str, Timer] = {}
    for name in (OWN, *libraries):
        computes = "spec" if name in (OWN, "flex", "flex_flash") else plain
        try:
            lane = _make_lane(name, computes, problem, operands, tensors, machine)
            output = lane.call()
            machine.synchronize()
            fraction = None
            if lane.computes == "spec":
                fraction = _check(name, machine.asnumpy(lane.read(output)[:, rows]), right)
            timers[name] = machine.timer(lane.call)
            found[name] = Found(
                name, lane.computes, None, pairs[lane.computes], lane.how, fraction, lane.mask_ms,
                timers[name].mode,
            )  # fmt: skip
        except _LeftOutError as reason:
            found[name] = Found(name, computes, None, reason=str(reason))
        except Exception as error:  # a library's own errors have no common base
            if name == OWN:
                raise
            found[name] = Found(name, computes, None, reason=_first_line(error))
    for name, times in measure(timers, plan).items():
        each = found[name]
        found[name] = Found(
            name, each.computes, times, each.pairs, each.how, each.fraction, each.mask_ms, each.mode
        )
    return list(found.values())


def choose_rows(sizes: Mapping[str, int]) -> NDArray[np.int64]:
    """Rows to check: the first, the last, and some between, evenly spaced."""
    Sq, pairs_of_a_row = sizes["Sq"], max(1, sizes["B"] * sizes["Hq"] * sizes["Skv"])
    count = min(Sq, _MAX_ROWS, max(_MIN_ROWS, _PAIRS // pairs_of_a_row))
    return np.unique(np.linspace(0, max(0, Sq - 1), count).round().astype(np.int64))[:Sq]


# ---- what is right -------------------------------------------------------------------------------


class _LeftOutError(Exception):
    """A library that is not timed; the text says why."""


def _right_answer(problem: SpecProblem, rows: NDArray[np.int64]) -> Reference:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (problem.q, problem.k, problem.v))
    return reference(
        problem.kernel.unit,
        q,
        k,
        v,
        tensors=problem.tensors,
        params=problem.params,
        consts=problem.consts,
        rows=rows,
        dtype=problem.dtype,
    )


def _check(name: str, found: NDArray[Any], right: Reference) -> float:
    """The largest error in units of the bound; `found` [B, rows, Hq, Dv].

    Errors:  _LeftOutError when the result is wrong.
    """
    o = found.transpose(0, 2, 1, 3).astype(np.float64)
    finite = np.isfinite(right.o)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(np.isfinite(o), np.abs(o - right.o) / right.bound, np.inf)
    largest = float(share[finite].max(initial=0.0))
    if not largest <= (1.0 if name == OWN else _OTHERS_LIMIT):
        raise _LeftOutError(f"its result is wrong: {largest:.3g} times the bound away")
    return largest


def _plain_problem(problem: SpecProblem, right: Reference, rows: NDArray[np.int64]) -> str:
    """What the plain libraries compute: the spec where it is full or causal, else what is near."""
    attention, sizes = problem.kernel.attention, problem.sizes
    mask = plain_mask(attention)
    if mask == "full" or (mask == "causal" and sizes["Sq"] == sizes["Skv"]):
        return "spec"
    positions = rows + sizes["Skv"] - sizes["Sq"]
    is_later = np.arange(sizes["Skv"]) > positions[:, None]
    looks_ahead = bool((right.visible & is_later).any())
    return "full" if looks_ahead or sizes["Sq"] != sizes["Skv"] else "causal"


def _count_pairs(sizes: Mapping[str, int], mask: str) -> int:
    """Of full or causal attention; a causal mask counts as half, as is the custom."""
    every = sizes["B"] * sizes["Sq"] * sizes["Skv"]
    return every if mask == "full" else every // 2


# ---- the calls -----------------------------------------------------------------------------------


def _make_lane(
    name: str,
    computes: str,
    problem: SpecProblem,
    operands: Sequence[Array],
    tensors: Mapping[str, Array],
    machine: Machine,
) -> _Lane:
    """Errors:  _LeftOutError, or whatever the library raises."""
    if name == OWN:
        return _own_lane(problem, operands, tensors, machine)
    reason = why_missing(name, machine)
    if reason is not None:
        raise _LeftOutError(reason)
    if name not in LIBRARIES:
        raise _LeftOutError("there is no such library")
    if name in ("flex", "flex_flash"):
        return _flex_lane(name, problem, operands, tensors, machine)
    return _plain_lane(name, computes, problem, operands)


def _own_lane(
    problem: SpecProblem,
    operands: Sequence[Array],
    tensors: Mapping[str, Array],
    machine: Machine,
) -> _Lane:
    kernel, sizes = problem.kernel, problem.sizes
    q, k, v = operands
    out = machine.poisoned((sizes["B"], sizes["Sq"], sizes["Hq"], sizes["Dv"]), problem.dtype)
    named = {**tensors, **problem.params}

    def call() -> Array:
        kernel(q, k, v, layout="bshd", out=out, **named)
        return out

    call()
    machine.poison(out)
    return _Lane(OWN, "spec", call, _as_it_is, kernel.programs[-1].main.family)


def _flex_lane(
    name: str,
    problem: SpecProblem,
    operands: Sequence[Array],
    tensors: Mapping[str, Array],
    machine: Machine,
) -> _Lane:
    attention, sizes = problem.kernel.attention, problem.sizes
    try:
        functions = as_flex_functions(attention, sizes, problem.params, tensors)
    except NotExpressibleError as error:
        raise _LeftOutError(str(error)) from None
    block_mask, mask_ms = None, None
    if functions.mask_mod is not None:
        B, H = (sizes["B"], sizes["Hq"]) if functions.varies else (None, None)
        lengths = sizes["Sq"], sizes["Skv"]
        block_mask, mask_ms = build_block_mask(functions.mask_mod, B, H, *lengths, machine)
    q, k, v = operands
    call = call_flex(name, machine, q, k, v, functions.score_mod, block_mask, scale=functions.scale)
    return _Lane(name, "spec", call, swap, "from the spec", mask_ms)


def _plain_lane(name: str, computes: str, problem: SpecProblem, operands: Sequence[Array]) -> _Lane:
    q, k, v = operands
    attention = problem.kernel.attention
    mask: str | None = computes
    scale: float | None = None
    if computes == "spec":
        mask = plain_mask(attention)
        scale = constant_scale(attention, problem.sizes, problem.params)
        if scale is None:
            raise _LeftOutError("it takes one scale for all pairs")
    causal = mask == "causal"
    if name not in FLASH:
        call = call_sdpa(name, q, k, v, causal=causal, scale=scale)
        return _Lane(name, computes, call, swap, "scaled_dot_product_attention")
    call = call_flash(name, q, k, v, causal=causal, softmax_scale=scale)
    return _Lane(name, computes, call, _as_it_is, f"{FLASH[name]}.flash_attn_func")


def _as_it_is(output: Array) -> Array:
    return output


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
