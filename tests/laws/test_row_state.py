"""The laws of the row state: what tiles, split keys and rings of GPUs rely on.

merge(init, x) is x; merge is commutative, and associative within rounding; any way of cutting
the keys gives the one-pass result; -inf minus -inf counts as weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attngen.ir.expr import Expr
from attngen.ir.row_state import SIGMOID, SOFTMAX, SOFTMAX_WITH_SINK, RowState
from attngen.ir.semantics import evaluate
from attngen.partial import PartialState

STATES = (SOFTMAX, SOFTMAX_WITH_SINK, SIGMOID)
EVERY = pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.name)
SOFT = pytest.mark.parametrize("kind", STATES[:2], ids=lambda kind: kind.name)
SLOW = settings(suppress_health_check=list(HealthCheck))
D = 3
INF, NAN = np.float32(np.inf), np.float32(np.nan)


@dataclass(frozen=True)
class State:
    """One row: m, l and acc, as float32, and the formulas of ir/row_state.py on them."""

    kind: RowState
    m: np.float32
    l: np.float32  # noqa: E741
    acc: np.ndarray

    @staticmethod
    def init(kind: RowState) -> State:
        start = {"m": -INF, "l": 0.0, **kind.init}
        acc = np.full(D, start["acc"], np.float32)
        return State(kind, np.float32(start["m"]), np.float32(start["l"]), acc)

    def update(self, scores: np.ndarray, v: np.ndarray) -> State:
        """One tile of keys."""
        kind = self.kind
        if not scores.size:
            return self
        m = value(kind.raise_max, m_old=self.m, m=scores.max()) if kind.running_max else self.m
        f = value(kind.rescale, m_old=self.m, m=m)
        p = np.broadcast_to(value(kind.weight, s=scores, m=m), scores.shape)
        with np.errstate(all="ignore"):
            total = self.l * f + p.sum(dtype=np.float32) if kind.running_max else self.l
            return State(kind, m, np.float32(total), self.acc * f + p @ v)

    def merge(self, other: State) -> State:
        kind = self.kind
        if not kind.running_max:
            return State(kind, self.m, self.l, self.acc + other.acc)
        m = value(kind.raise_max, m_old=self.m, m=other.m)
        mine, theirs = (value(kind.rescale, m_old=x.m, m=m) for x in (self, other))
        with np.errstate(all="ignore"):
            total = np.float32(self.l * mine + other.l * theirs)
            return State(kind, m, total, self.acc * mine + other.acc * theirs)

    def finalize(self, sink: float = 0.0) -> tuple[np.ndarray, np.float32 | None]:
        known = {"m": self.m, "l": self.l, "sink": np.float32(sink)}
        o = value(self.kind.output, acc=self.acc, **known)
        return o, None if self.kind.lse is None else value(self.kind.lse, **known)

    def bits(self) -> tuple[bytes, ...]:
        with np.errstate(all="ignore"):
            return tuple(
                (np.asarray(x) + np.float32(0)).tobytes() for x in (self.m, self.l, self.acc)
            )


def value(e: Expr, **symbols: Any) -> Any:
    return evaluate(e, symbols, {}).data


finite = st.floats(-90, 90, width=32) | st.sampled_from((0.0, 1e4, -1e4, 1e30, -3e38))
scores = finite | st.just(-np.inf)


@st.composite
def keys(draw: st.DrawFn, least: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores and values of some keys."""
    s = np.array(draw(st.lists(scores, min_size=least, max_size=9)), np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    return s, rng.standard_normal((len(s), D)).astype(np.float32)


def state_of(kind: RowState, given: tuple[np.ndarray, np.ndarray]) -> State:
    return State.init(kind).update(*given)


def agree(a: State, b: State, v: np.ndarray, sink: float = 0.25) -> None:
    """The same result within rounding."""
    (o, lse), (right, right_lse) = a.finalize(sink), b.finalize(sink)
    reach = np.abs(v).max(initial=0.0) * (1 if a.kind.running_max else len(v))
    np.testing.assert_allclose(o, right, rtol=2.0**-20, atol=2.0**-20 * reach)
    if lse is not None:
        np.testing.assert_allclose(lse, right_lse, rtol=2.0**-21, atol=2.0**-20)
    if a.kind.running_max:
        assert a.m == b.m


# ---- the formulas ------------------------------------------------------------------------


@EVERY
@given(keys())
@SLOW
def test_init_is_the_identity(kind: RowState, given: tuple[Any, Any]) -> None:
    x, init = state_of(kind, given), State.init(kind)
    assert init.merge(x).bits() == x.merge(init).bits() == x.bits()


@EVERY
@given(keys(), keys())
@SLOW
def test_merge_is_commutative(kind: RowState, a: tuple[Any, Any], b: tuple[Any, Any]) -> None:
    x, y = state_of(kind, a), state_of(kind, b)
    assert x.merge(y).bits() == y.merge(x).bits()


@EVERY
@given(keys(), keys(), keys())
@SLOW
def test_merge_is_associative(
    kind: RowState, a: tuple[Any, Any], b: tuple[Any, Any], c: tuple[Any, Any]
) -> None:
    x, y, z = (state_of(kind, given) for given in (a, b, c))
    agree(x.merge(y).merge(z), x.merge(y.merge(z)), np.concatenate([a[1], b[1], c[1]]))


@EVERY
@given(keys(), st.lists(st.integers(0, 9), max_size=4))
@SLOW
def test_any_cut_gives_the_one_pass_result(
    kind: RowState, given: tuple[Any, Any], places: list[int]
) -> None:
    s, v = given
    whole = state_of(kind, given)
    cut = [0, *sorted(min(p, len(s)) for p in places), len(s)]
    tiles = [(s[a:b], v[a:b]) for a, b in pairwise(cut)]
    one_by_one = State.init(kind)
    for tile in tiles:
        one_by_one = one_by_one.update(*tile)
    agree(one_by_one, whole, v)
    parts = [state_of(kind, tile) for tile in tiles]
    agree(reduce(State.merge, parts), whole, v)
    agree(reduce(State.merge, parts[::-1]), whole, v)


@SOFT
@given(keys())
@SLOW
def test_one_pass_is_the_softmax(kind: RowState, given: tuple[Any, Any]) -> None:
    s, v = given
    sink = 0.25 if kind.has_sink else -np.inf
    o, lse = state_of(kind, given).finalize(sink)
    top = max(float(s.max(initial=-np.inf)), sink)
    weight = np.exp(s.astype(np.float64) - (top if np.isfinite(top) else 0.0))
    total = weight.sum() + np.exp(sink - top if np.isfinite(top) else -np.inf)
    right = weight @ v.astype(np.float64) / total if total else np.zeros(D)
    np.testing.assert_allclose(o, right, atol=2.0**-20 * np.abs(v).max(initial=0.0))
    with np.errstate(divide="ignore"):
        right_lse = top + np.log(total) if total else -np.inf
    np.testing.assert_allclose(lse, right_lse, rtol=2.0**-22, atol=2.0**-20)


@EVERY
def test_nothing_minus_nothing_weighs_nothing(kind: RowState) -> None:
    with np.errstate(all="raise"):  # not even a NaN on the way
        assert value(kind.weight, s=-INF, m=-INF) == 0
    if kind.running_max:
        for m in (-INF, np.float32(-3e38), np.float32(0), INF):
            assert value(kind.weight, s=-INF, m=m) == 0
            assert value(kind.rescale, m_old=-INF, m=m) == 0
    empty = State.init(kind).update(np.full(4, -INF, np.float32), np.ones((4, D), np.float32))
    assert empty.bits() == State.init(kind).bits()
    assert empty.merge(empty).bits() == State.init(kind).bits()


def test_an_empty_row() -> None:
    o, lse = State.init(SOFTMAX).finalize()
    assert not o.any()
    assert np.isneginf(lse)
    for sink in (-np.inf, -1e30, 0.0, 88.0, 3e38):
        o, lse = State.init(SOFTMAX_WITH_SINK).finalize(sink)
        assert not o.any()
        assert lse == np.float32(sink)
    o, lse = State.init(SIGMOID).finalize()
    assert not o.any()
    assert lse is None


@EVERY
@pytest.mark.parametrize("bad", [NAN, INF])
@given(keys(), keys())
@SLOW
def test_a_bad_score_is_never_lost(
    kind: RowState, bad: np.float32, a: tuple[Any, Any], b: tuple[Any, Any]
) -> None:
    s, v = a
    sick = state_of(kind, (np.append(s, bad), np.append(v, np.ones((1, D), np.float32), axis=0)))
    well = state_of(kind, b)
    for state in (
        sick,
        sick.update(*b),
        sick.merge(well),
        well.merge(sick),
        well.update(s[:0], v[:0]).merge(sick),
    ):
        o, lse = state.finalize(1.0)
        assert np.isnan(o).all()
        assert lse is None or np.isnan(lse)


@given(keys(), st.floats(-90, 90, width=32))
@SLOW
def test_a_sink_is_one_more_key_without_a_value(given: tuple[Any, Any], sink: float) -> None:
    s, v = given
    with_sink = state_of(SOFTMAX_WITH_SINK, given).finalize(sink)
    one_more = np.append(s, np.float32(sink)), np.append(v, np.zeros((1, D), np.float32), axis=0)
    o, lse = state_of(SOFTMAX, one_more).finalize()
    np.testing.assert_allclose(with_sink[0], o, atol=2.0**-20 * np.abs(v).max(initial=0.0))
    np.testing.assert_allclose(with_sink[1], lse, rtol=2.0**-21, atol=2.0**-20)


@SOFT
@given(keys(least=1), st.floats(-90, 90, width=32))
@SLOW
def test_normalising_early_changes_nothing(
    kind: RowState, given: tuple[Any, Any], sink: float
) -> None:
    state = state_of(kind, given)
    if state.l == 0:
        return
    known = {"m": state.m, "l": state.l, "sink": np.float32(sink)}
    early = value(kind.output_of_normalized, acc=state.acc / state.l, **known)
    reach = np.abs(given[1]).max()
    np.testing.assert_allclose(early, state.finalize(sink)[0], rtol=2.0**-20, atol=2.0**-20 * reach)


@EVERY
def test_fields_are_those_of_the_state(kind: RowState) -> None:
    assert set(kind.init) == ({"m", "l", "acc"} if kind.running_max else {"acc"})
    assert set(kind.saved_for_backward) <= {"m", "l", "lse", "acc"}
    state = state_of(kind, (np.zeros(2, np.float32), np.ones((2, D), np.float32)))
    assert {np.asarray(x).dtype for x in (state.m, state.l, state.acc)} == {np.dtype(np.float32)}


# ---- PartialState, which does the same on arrays ------------------------------------------


def partial(kind: RowState, states: Sequence[State], sink: float = 0.5) -> PartialState:
    """Some rows as one partial state, [1, 1, rows]."""
    m, l, acc = (  # noqa: E741
        np.array([getattr(x, n) for x in states], np.float32)[None, None] for n in ("m", "l", "acc")
    )
    sinks = np.full((1, 1, 1), sink, np.float32) if kind.has_sink else None
    return PartialState(kind, m, l, acc, sinks)


rows = st.lists(st.tuples(keys(), keys(), keys()), min_size=1, max_size=4)


@EVERY
@given(rows)
@SLOW
def test_partial_states_merge_by_the_formulas(kind: RowState, given: list[Any]) -> None:
    columns = [[state_of(kind, row[i]) for row in given] for i in range(3)]
    a, b, c = (partial(kind, column) for column in columns)
    merged = a.merge(b).merge(c)
    right = partial(kind, [x.merge(y).merge(z) for x, y, z in zip(*columns, strict=True)])
    for name in ("m", "l", "acc") if kind.running_max else ("acc",):
        np.testing.assert_array_equal(getattr(merged, name), getattr(right, name))
        assert getattr(merged, name).dtype == np.float32
    o, lse = merged.finalize()
    for i, (x, y, z) in enumerate(zip(*columns, strict=True)):
        right_o, right_lse = x.merge(y).merge(z).finalize(0.5)
        np.testing.assert_array_equal(o[0, 0, i], right_o)
        assert (lse is None) == (right_lse is None)
        assert lse is None or lse[0, 0, i] == right_lse or np.isnan(right_lse)


@EVERY
@given(rows)
@SLOW
def test_partial_states_have_an_identity_and_any_order(kind: RowState, given: list[Any]) -> None:
    a, b, _ = (partial(kind, [state_of(kind, row[i]) for row in given]) for i in range(3))
    init = partial(kind, [State.init(kind)] * len(given))
    for name in ("m", "l", "acc") if kind.running_max else ("acc",):
        for x in (init.merge(a), a.merge(init)):
            np.testing.assert_array_equal(getattr(x, name), getattr(a, name))
        np.testing.assert_array_equal(getattr(a.merge(b), name), getattr(b.merge(a), name))


@EVERY
@given(rows)
@SLOW
def test_a_sink_joins_once_however_states_were_merged(kind: RowState, given: list[Any]) -> None:
    a, b, c = (partial(kind, [state_of(kind, row[i]) for row in given]) for i in range(3))
    assert a.merge(b).sink is a.sink
    left, right = a.merge(b).merge(c).finalize(), a.merge(b.merge(c)).finalize()
    v = np.concatenate([v for row in given for _, v in row])
    reach = np.abs(v).max(initial=0.0) * (1 if kind.running_max else len(v))
    np.testing.assert_allclose(left[0], right[0], rtol=2.0**-20, atol=2.0**-20 * reach)
    if kind.running_max:
        np.testing.assert_allclose(left[1], right[1], rtol=2.0**-21, atol=2.0**-20)
