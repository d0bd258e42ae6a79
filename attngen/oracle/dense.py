"""The float64 oracle: what an attention variant computes, densely, with its error bound.

It follows the definition and knows no tiles, no running maximum and no schedule:

    s       = scale · (q · k)
    score   = each `score` line in turn
    visible = inside both lengths, every `mask` line true, score not -inf
    O       = Σ w v  over the visible keys,  w = softmax(score) or sigmoid(score)

It shares nothing with the compiler but the syntax tree, so that the two can disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend import ast
from attngen.oracle import values
from attngen.oracle.arguments import Problem, Scalar, bind_problem, element_name
from attngen.oracle.errors import LengthOutside, Meaningless, WrongValue
from attngen.oracle.evaluate import Promise, Scope, evaluate
from attngen.oracle.values import Array, Value

if TYPE_CHECKING:
    from attngen.frontend.load import Unit

__all__ = ["ROUNDING_UNIT", "Reference", "reference"]

Floats: TypeAlias = NDArray[np.float64]
Booleans: TypeAlias = NDArray[np.bool_]
Selection: TypeAlias = slice | NDArray[np.integer[Any]] | Sequence[int] | None

ROUNDING_UNIT: Final[Mapping[str, float]] = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""u of the contract."""

_PAIRS_AT_ONCE: Final = 1 << 20
"""Pairs in one step: 8 MiB for every intermediate array of float64."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The right answer for the rows asked, in their order.

    o        [B, Hq, rows, Dv]
    lse      [B, Hq, rows]        natural logarithm; None for `weights sigmoid`
    row_max  [B, Hq, rows]        largest visible score; None for `weights sigmoid`
    visible  [B, Hq, rows, keys]  which pairs attend
    bound, lse_bound              how far an implementation may be from o and lse

    A row with a NaN or +inf score is NaN; its bound is infinite, and so is that of any other
    element that is not finite.
    """

    o: Floats
    lse: Floats | None
    row_max: Floats | None
    visible: Booleans
    bound: Floats
    lse_bound: Floats | None

    def accepts_o(self, o: Any) -> Booleans:
        """Where `o` is right: within the bound, or not finite where the answer is not."""
        return _accepts(np.asarray(o).astype(np.float64), self.o, self.bound)

    def accepts_lse(self, lse: Any) -> Booleans:
        """The same for `lse`; -inf must be exactly -inf."""
        if self.lse is None or self.lse_bound is None:
            raise ValueError("sigmoid weights have no log-sum-exp")
        found = np.asarray(lse).astype(np.float64)
        empty = np.isneginf(self.lse)
        return np.where(
            empty, np.isneginf(found), _accepts(found, self.lse, self.lse_bound)
        ).astype(np.bool_)


def reference(
    unit: Unit,
    q: Any,
    k: Any,
    v: Any,
    *,
    tensors: Mapping[str, Any] | None = None,
    params: Mapping[str, Scalar] | None = None,
    consts: Mapping[str, Scalar] | None = None,
    rows: Selection = None,
    keys: Selection = None,
    q_range: tuple[int, int] | None = None,
    kv_range: tuple[int, int] | None = None,
    join_sink: bool = True,
    dtype: str | None = None,
    function_error: float = 0.0,
) -> Reference:
    """What `unit.attention` computes from q, k and v.

    `q [B, Hq, Sq, Dqk]`, `k [B, Hkv, Skv, Dqk]` and `v [B, Hkv, Skv, Dv]` hold the whole
    logical problem in any floating dtype; they are widened exactly.
    `rows` chooses the query rows to compute, and `keys` the keys that take part, both with
    their logical indices; `q_range` and `kv_range` are the same as half-open ranges, which is
    what one launch covers.  `join_sink=False` leaves a sink out, as a partial result does.
    `dtype` (bf16, fp16 or fp32) is what the bound is for: by default the declared one, else
    that of `q`.  `function_error` is the stated error of approximate functions, in the score.

    Bound:   |O - R| <= u |R| + (u_P + 4 δ + 2^-20) Σ_j w_j |V_j| + underflow, and per row
             δ = 2^-24 (Dqk + 8) |scale| max_j Σ_d |q_d k_jd| · L + function_error, with
             L = max_j |d score_j / d s|, both maxima over the visible keys of the row;
             u_P = u, 0 for fp32; underflow is 2^-25 for fp16, where an output below 2^-14 has
             no relative precision, and 2^-126 otherwise.
             |LSE - R| <= δ + 2^-20 + 2^-22 (|M| + |R|), M the larger of row maximum and sink:
             log-sum-exp moves by no more than its scores do; 2^-20 is the relative error of
             the sum, as above; products with log2 e and the last addition round numbers as
             large as M and R.
    Errors:  A650 to A659.
    """
    arrays = (np.asarray(q), np.asarray(k), np.asarray(v))
    problem = bind_problem(
        unit.attention,
        unit.definitions,
        (arrays[0].shape, arrays[1].shape, arrays[2].shape),
        tensors or {},
        params or {},
        consts or {},
    )
    row_indices = _selection("rows", rows, q_range, problem.sizes["Sq"])
    key_indices = _selection("keys", keys, kv_range, problem.sizes["Skv"])
    unit_of_rounding = _rounding_unit(problem, dtype, arrays[0].dtype)
    evaluation = _Evaluation(problem, arrays, row_indices, key_indices, join_sink)
    return evaluation.run(unit_of_rounding, function_error)


def _accepts(found: Floats, right: Floats, bound: Floats) -> Booleans:
    finite = np.isfinite(right)
    with np.errstate(invalid="ignore"):
        near = np.abs(found - right) <= bound
    return np.where(finite, near, ~np.isfinite(found)).astype(np.bool_)


def _selection(
    name: str, chosen: Selection, covered: tuple[int, int] | None, size: int
) -> NDArray[np.int64]:
    everything = np.arange(size, dtype=np.int64)
    if covered is not None:
        if chosen is not None:
            raise ValueError(f"give either {name} or a range, not both")
        chosen = slice(*covered)
    if chosen is None:
        return everything
    return np.asarray(everything[chosen], np.int64)


def _rounding_unit(problem: Problem, dtype: str | None, of_q: np.dtype[Any]) -> float:
    """u of the dtype that was asked for, else of the declared one, else of that of q."""
    declared = problem.statements(ast.Dtype)
    name = dtype or (declared[0].dtype if declared else None)
    if name is None:
        return ROUNDING_UNIT.get(element_name(of_q), ROUNDING_UNIT["fp32"])
    if name not in ROUNDING_UNIT:
        span = declared[0].span if declared and not dtype else None
        raise AttnError(WrongValue(span, "statement", "dtype", name, "bf16, fp16 or fp32"))
    return ROUNDING_UNIT[name]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Some batches, query heads and rows of the result, computed together.

    `indices` are shaped to broadcast over [batch, head, row, key].
    """

    at: tuple[slice, slice, slice]
    indices: Mapping[str, Array]

    def places(self, *names: str) -> Mapping[str, Array]:
        """The indices that say in an error where it happened."""
        return {name: self.indices[name] for name in names or ("b", "h", "q", "kv")}


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Evaluation:
    problem: Problem
    arrays: tuple[Array, Array, Array]
    rows: NDArray[np.int64]
    keys: NDArray[np.int64]
    join_sink: bool

    def run(self, u: float, function_error: float) -> Reference:
        sizes = self.problem.sizes
        shape = (sizes["B"], sizes["Hq"], len(self.rows))
        o, bound = np.zeros((*shape, sizes["Dv"])), np.zeros((*shape, sizes["Dv"]))
        visible = np.zeros((*shape, len(self.keys)), np.bool_)
        lse, row_max, lse_bound = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        softmax = all(w.kind != "sigmoid" for w in self.problem.statements(ast.Weights))
        for block in self._blocks():
            at = block.at
            with np.errstate(all="ignore"):
                scores = self._scores(block, function_error)
                row = self._softmax(block, scores) if softmax else _sigmoid(scores)
                v = self._of_group(block, self.arrays[2])
                o[at], spread = _weighted_sum(row.weight, scores.visible, v)
                bound[at] = _output_bound(o[at], spread, scores.delta, u)
                lse_bound[at] = _lse_bound(row, scores)
            visible[at], row_max[at], lse[at] = scores.visible, scores.row_max, row.lse
        if not softmax:
            return Reference(o, None, None, visible, bound, None)
        return Reference(o, lse, row_max, visible, bound, lse_bound)

    # ---- lengths and blocks ------------------------------------------------------------------

    def _lengths(self) -> dict[str, NDArray[np.int64]]:
        """The true `Sq` and `Skv` of every sequence, shape [B, 1, 1, 1]."""
        sizes = self.problem.sizes
        batch = np.arange(sizes["B"], dtype=np.int64).reshape(-1, 1, 1, 1)
        result = {name: np.full_like(batch, sizes[name]) for name in ("Sq", "Skv")}
        scope = self._scope({**self._sizes(), "b": Value(batch)})
        for statement in self.problem.statements(ast.Length):
            for name, what, expr in (("Sq", "rows", statement.q), ("Skv", "keys", statement.kv)):
                if expr is None:
                    continue
                value = evaluate(expr, scope)
                if value.kind != "int":
                    raise AttnError(Meaningless(expr.span, "a length is an integer"))
                values.raise_faults(value, np.ones_like(batch, np.bool_), {"b": batch})
                length = np.broadcast_to(value.data, batch.shape)
                outside = (length < 0) | (length > sizes[name])
                if outside.any():
                    b = int(np.argmax(outside))
                    found = int(length.flat[b])
                    raise AttnError(LengthOutside(expr.span, what, b, found, sizes[name]))
                result[name] = length
        return result

    def _blocks(self) -> Iterator[_Block]:
        """Blocks of about `_PAIRS_AT_ONCE` pairs: rows of one head, heads of a batch, or more."""
        sizes, lengths = self.problem.sizes, self._lengths()
        B, Hq, R, S = sizes["B"], sizes["Hq"], len(self.rows), max(1, len(self.keys))
        r_step = max(1, min(R, _PAIRS_AT_ONCE // S))
        h_step = max(1, min(Hq, _PAIRS_AT_ONCE // (r_step * S)))
        b_step = max(1, min(B, _PAIRS_AT_ONCE // (r_step * S * h_step)) if h_step == Hq else 1)
        group = Hq // max(1, sizes["Hkv"])
        starts = product(range(0, B, b_step), range(0, Hq, h_step), range(0, R, r_step))
        for b0, h0, r0 in starts:
            at = (slice(b0, b0 + b_step), slice(h0, h0 + h_step), slice(r0, r0 + r_step))
            b = np.arange(B, dtype=np.int64)[at[0]].reshape(-1, 1, 1, 1)
            h = np.arange(Hq, dtype=np.int64)[at[1]].reshape(1, -1, 1, 1)
            q = self.rows[at[2]].reshape(1, 1, -1, 1)
            kv = self.keys.reshape(1, 1, 1, -1)
            Sq, Skv = lengths["Sq"][at[0]], lengths["Skv"][at[0]]
            names = {"b": b, "h": h, "hkv": h // group, "q": q, "kv": kv}
            yield _Block(at, {**names, "qpos": q + Skv - Sq, "Sq": Sq, "Skv": Skv})

    # ---- scopes ------------------------------------------------------------------------------

    def _sizes(self) -> dict[str, Value]:
        return {name: Value(np.int64(size)) for name, size in self.problem.sizes.items()}

    def _scope(self, shared: Mapping[str, Value], s: Value | None = None) -> Scope:
        """The names of the attention block; `s` is visible in score lines and the lets they use."""
        problem = self.problem
        scope = Scope(shared, problem.definitions, dict(problem.names), dict(problem.tensors))
        if s is not None:
            scope.names["s"] = s
        for let in problem.statements(ast.Let):
            scope.names[let.name] = Promise(let.value, scope)
        return scope

    def _block_scope(
        self, block: _Block, *, s: Value | None = None, without: tuple[str, ...] = ()
    ) -> Scope:
        indices = {n: Value(index) for n, index in block.indices.items() if n not in without}
        return self._scope({**self._sizes(), **indices}, s)

    # ---- one block ---------------------------------------------------------------------------

    def _of_group(self, block: _Block, x: Array) -> Floats:
        """Keys or values that take part, for each query head those of its group."""
        batch, shared = block.at[0], block.indices["hkv"].reshape(-1)
        return np.asarray(x[batch][:, shared][:, :, self.keys], np.float64)

    def _scores(self, block: _Block, function_error: float) -> _Scores:
        """Which pairs attend, and with which final score."""
        q = np.asarray(self.arrays[0][block.at[:2]][:, :, self.rows[block.at[2]]], np.float64)
        k = np.swapaxes(self._of_group(block, self.arrays[1]), 2, 3)
        visible = self._mask(block, (*q.shape[:3], k.shape[3]))
        scale = self._scale(block, visible)
        score = self._score(block, scale * (q @ k), visible)
        visible = visible & ~np.isneginf(score.data)
        row_max = np.where(visible, score.data, -np.inf).max(axis=3, initial=-np.inf)

        def largest(x: Array) -> Floats:
            size = np.where(visible, np.abs(x), 0.0).max(axis=3, initial=0.0)
            return np.where(np.isnan(size), np.inf, size)

        products = largest(scale * (np.abs(q) @ np.abs(k)))
        steepest = largest(np.float64(0.0) if score.slope is None else score.slope)
        delta = 2.0**-24 * (q.shape[3] + 8) * products * steepest
        delta = np.where(np.isnan(delta), np.inf, delta + function_error)
        return _Scores(score.data, visible, row_max, delta)

    def _mask(self, block: _Block, shape: tuple[int, ...]) -> Booleans:
        """The pairs inside both lengths for which every mask line is true.

        The lines are and-ed, and `and` is lazy: a later one is not asked about a masked pair.
        """
        at = block.indices
        visible = np.broadcast_to((at["q"] < at["Sq"]) & (at["kv"] < at["Skv"]), shape)
        scope = self._block_scope(block)
        for mask in self.problem.statements(ast.Mask):
            value = evaluate(mask.value, scope)
            if value.kind != "bool":
                raise AttnError(Meaningless(mask.value.span, "a mask is a truth value"))
            values.raise_faults(value, visible, block.places())
            visible = visible & value.data
        return visible

    def _scale(self, block: _Block, visible: Booleans) -> Array:
        """One factor for every batch and head; it is needed where a row sees a key."""
        statements = self.problem.statements(ast.Scale)
        if not statements:
            return np.float64(1.0 / np.sqrt(self.problem.sizes["Dqk"]))
        scope = self._block_scope(block, without=("q", "kv", "qpos"))
        value = _number(statements[-1].value, scope, "a scale")
        needed = np.any(visible, axis=(2, 3), keepdims=True)
        values.raise_faults(value, needed, block.places("b", "h"))
        return value.data

    def _score(self, block: _Block, s: Floats, visible: Booleans) -> Value:
        """The score lines in turn, with the derivative by the scaled product."""
        current = Value(s, np.float64(1.0))
        for line in self.problem.statements(ast.Score):
            current = _number(line.value, self._block_scope(block, s=current), "a score")
            values.raise_faults(current, visible, block.places())
            current = Value(current.data, current.slope)
        return Value(np.broadcast_to(current.data, visible.shape), current.slope)

    def _softmax(self, block: _Block, scores: _Scores) -> _Row:
        sink = self._sink(block)
        largest = np.maximum(scores.row_max, sink)
        offset = np.where(np.isneginf(largest), 0.0, largest)
        weight = np.where(scores.visible, np.exp(scores.score - offset[..., None]), 0.0)
        total = weight.sum(axis=3) + np.exp(sink - offset)
        nothing = total == 0.0
        lse = np.where(nothing, -np.inf, offset + np.log(total))
        return _Row(weight / np.where(nothing, 1.0, total)[..., None], lse, largest)

    def _sink(self, block: _Block) -> Array:
        """The sink of every row, [batch, head, row]; -inf where there is none.

        A row behind the end of its sequence is an empty row, and has its head's sink.
        """
        sinks = [w.sink for w in self.problem.statements(ast.Weights) if w.sink is not None]
        if not sinks or not self.join_sink:
            return np.float64(-np.inf)
        value = _number(sinks[-1], self._block_scope(block, without=("kv",)), "a sink")
        every_row = np.ones_like(block.indices["q"], dtype=np.bool_)
        values.raise_faults(value, every_row, block.places("b", "h", "q"))
        return np.where(every_row, value.data, 0.0)[..., 0]


def _number(e: ast.Expr, scope: Scope, what: str) -> Value:
    value = evaluate(e, scope)
    if value.kind == "bool":
        raise AttnError(Meaningless(e.span, f"{what} is a number"))
    return values.to_float(value)


# ---- rows ---------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """`delta` is δ of the contract, for every row."""

    score: Floats
    visible: Booleans
    row_max: Floats
    delta: Floats


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """What a kind of weights makes of the scores; `largest` is the row maximum or the sink."""

    weight: Floats
    lse: Floats
    largest: Floats


def _sigmoid(scores: _Scores) -> _Row:
    e = np.exp(-np.abs(scores.score))
    weight = np.where(scores.score < 0, e, 1.0) / (1.0 + e)
    weight = np.where(np.isposinf(scores.score), np.nan, weight)
    return _Row(np.where(scores.visible, weight, 0.0), scores.row_max, scores.row_max)


def _weighted_sum(weight: Floats, visible: Booleans, v: Floats) -> tuple[Floats, Floats]:
    """Σ w v and Σ w |v| over the visible keys, whatever the others hold."""
    sick = ~np.all(np.isfinite(v), axis=3)
    healthy = np.where(sick[..., None], 0.0, v)
    o, spread = weight @ healthy, weight @ np.abs(healthy)
    for j in np.flatnonzero(np.any(sick, axis=(0, 1)) & np.any(visible, axis=(0, 1, 2))):
        counts = (visible[..., j] & sick[:, :, None, j])[..., None]
        part = np.where(counts, weight[..., j, None] * v[:, :, None, j], 0.0)
        o, spread = o + part, spread + np.abs(part)
    return o, spread


def _output_bound(o: Floats, spread: Floats, delta: Floats, u: float) -> Floats:
    # Below the normal numbers rounding is absolute: of an fp16 output (2^-25, half its smallest
    # number), of float32 weights and sums (2^-126, also where they are flushed to zero).
    underflow = 2.0**-25 if u == ROUNDING_UNIT["fp16"] else 2.0**-126
    u_p = 0.0 if u == ROUNDING_UNIT["fp32"] else u
    factor = (u_p + 4 * delta + 2.0**-20)[..., None]
    # Nothing to attend to is exactly 0, also where delta is infinite.
    bound = u * np.abs(o) + np.where(spread == 0.0, 0.0, factor * spread + underflow)
    return np.where(np.isfinite(o) & ~np.isnan(bound), bound, np.inf)


def _lse_bound(row: _Row, scores: _Scores) -> Floats:
    rounding = 2.0**-22 * (np.abs(row.largest) + np.abs(row.lse))
    empty = ~scores.visible.any(axis=3)
    bound = rounding + np.where(empty, 0.0, scores.delta + 2.0**-20)
    return np.where(np.isneginf(row.lse), 0.0, np.where(np.isnan(bound), np.inf, bound))
