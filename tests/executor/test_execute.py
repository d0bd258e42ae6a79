"""The NumPy executor against the float64 reference: every schedule, any shape, any mask."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import attngen
from attngen.diagnostics.diagnostic import AttnError
from attngen.partial import PartialState

from .problems import DTYPES, SCHEDULES, Problem, problems

SLOW = settings(suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.filterwarnings("error")


def check(right: Any, o: Any, lse: Any = None, row_max: Any = None) -> None:
    """Within the bound, element by element."""
    assert right.accepts_o(o).all(), worst(o, right.o, right.bound)
    if lse is not None:
        assert right.accepts_lse(lse).all(), worst(lse, right.lse, right.lse_bound)
    if row_max is not None:
        with np.errstate(invalid="ignore"):
            near = np.abs(row_max - right.row_max) <= right.lse_bound + 2.0**-20
        finite = np.isfinite(right.row_max)
        same = (row_max == right.row_max) | (np.isnan(row_max) & np.isnan(right.row_max))
        assert np.where(finite, near | (right.lse_bound == 0), same).all(), (row_max, right.row_max)


def worst(found: Any, right: Any, bound: Any) -> str:
    with np.errstate(invalid="ignore"):
        excess = np.abs(np.asarray(found).astype(np.float64) - right) - bound
    at = np.unravel_index(np.nanargmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape)
    return f"at {at}: {found[at]} for {right[at]}, bound {bound[at]}"


def run(kernel: attngen.Kernel, problem: Problem, *operands: Any) -> tuple[Any, ...]:
    found = kernel(*(operands or problem.operands()), **problem.tensors(), **problem.params)
    return found if isinstance(found, tuple) else (found,)


@given(problems())
@settings(SLOW, max_examples=250)
def test_every_problem_is_within_the_bound(problem: Problem) -> None:
    kernel = problem.kernel()
    event(problem.schedule if not problem.is_sigmoid else "sigmoid")
    found = run(kernel, problem)
    check(problem.reference(kernel), *found)
    again = run(kernel, problem)
    assert [x.tobytes() for x in again] == [x.tobytes() for x in found]


@given(problems(), st.integers(1, 3))
@settings(SLOW, max_examples=40)
def test_bits_do_not_depend_on_where_arrays_lie(problem: Problem, shift: int) -> None:
    """Other strides and other alignment, the same bits."""
    kernel = problem.kernel()
    moved = []
    for x in problem.operands():
        wide = np.zeros((*x.shape[:3], x.shape[3] + 3), x.dtype)
        wide[..., shift : shift + x.shape[3]] = x
        moved.append(wide[..., shift : shift + x.shape[3]])
    found, right = run(kernel, problem, *moved), run(kernel, problem)
    assert [x.tobytes() for x in found] == [x.tobytes() for x in right]


@given(problems(), st.data())
@settings(SLOW, max_examples=80)
def test_parts_merge_to_the_whole(problem: Problem, data: st.DataObject) -> None:
    """Any cut of rows and of keys, merged in any order."""
    kernel = problem.kernel()
    _, _, _, Sq, Skv = problem.shape
    operands, named = problem.operands(), {**problem.tensors(), **problem.params}
    rows, keys = (cuts(data, size) for size in (Sq, Skv))
    outputs = []
    for row_range in rows:
        parts = []
        for key_range in data.draw(st.permutations(keys)):
            part = kernel.partial(*operands, q_range=row_range, kv_range=key_range, **named)
            right = problem.reference(
                kernel, q_range=row_range, kv_range=key_range, join_sink=False
            )
            m = None if right.row_max is None else part.m
            without_sink = PartialState(_plain(part), part.m, part.l, part.acc)
            check(right, without_sink.finalize()[0], None, m)
            parts.append(part)
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.merge(part)
        outputs.append(whole.finalize())
    o = np.concatenate([x[0] for x in outputs], axis=2)
    lse = None if problem.is_sigmoid else np.concatenate([x[1] for x in outputs], axis=2)
    check(problem.reference(kernel), o, lse)


def _plain(part: PartialState) -> Any:
    """The row state without its sink."""
    from attngen.ir.row_state import SIGMOID, SOFTMAX

    return SOFTMAX if part.row_state.running_max else SIGMOID


def cuts(data: st.DataObject, size: int) -> list[tuple[int, int]]:
    places = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    return list(itertools.pairwise((0, *places, size)))


@given(problems(), st.data())
@settings(SLOW, max_examples=40)
def test_arrays_may_hold_only_the_range(problem: Problem, data: st.DataObject) -> None:
    kernel = problem.kernel()
    _, _, _, Sq, Skv = problem.shape
    (q, k, v), named = problem.operands(), {**problem.tensors(), **problem.params}
    (q0, q1), (k0, k1) = (data.draw(st.sampled_from(cuts(data, size))) for size in (Sq, Skv))
    ranges = {"q_range": (q0, q1), "kv_range": (k0, k1)}
    whole = kernel.partial(q, k, v, **ranges, **named)
    k, v = k[:, :, k0:k1], v[:, :, k0:k1]
    part = kernel.partial(q[:, :, q0:q1], k, v, **ranges, Sq=Sq, Skv=Skv, **named)
    for name in ("m", "l", "acc"):
        assert getattr(part, name).tobytes() == getattr(whole, name).tobytes()


# ---- the cases that go wrong first -------------------------------------------------------

Q, K, V = (
    np.random.default_rng(i).standard_normal((2, 2, 11, 4)).astype(np.float32) for i in range(3)
)
EVERY = pytest.mark.parametrize("schedule", SCHEDULES)


def run_text(body: str, schedule: str, q: Any = Q, k: Any = K, v: Any = V, **named: Any) -> Any:
    """Outputs and reference; tiles of 3 rows and 2 keys."""
    text = f"attention a {{\n{body}\n}}\n"
    if "sigmoid" in body:
        schedule = schedule.split(";")[0]
    kernel = attngen.compile_text(text, engine="numpy", schedule=f"{schedule}; tile q = 3, kv = 2")
    found = kernel(q, k, v, **named)
    tensors = {n: x for n, x in named.items() if isinstance(x, np.ndarray)}
    params = {n: x for n, x in named.items() if n not in tensors}
    right = attngen.reference(kernel.unit, q, k, v, tensors=tensors, params=params)
    found = found if isinstance(found, tuple) else (found,)
    check(right, *found)
    return found


@EVERY
def test_rows_that_see_no_key_for_several_tiles(schedule: str) -> None:
    o, lse, row_max = run_text("mask kv >= 7 + q % 3\noutput o, lse, row_max", schedule)
    assert np.isfinite(o).all()
    assert np.isfinite(lse).all()
    assert np.isfinite(row_max).all()


@EVERY
def test_rows_that_see_no_key_at_all(schedule: str) -> None:
    o, lse, row_max = run_text("mask kv > q\noutput o, lse, row_max", schedule)
    assert not o[:, :, -1].any()
    assert np.isneginf(lse[:, :, -1]).all()
    assert np.isneginf(row_max[:, :, -1]).all()


@EVERY
@pytest.mark.parametrize("sink", ["-inf", "-1e30", "0.0", "80.0", "1e30"])
def test_sinks(schedule: str, sink: str) -> None:
    _, lse = run_text(f"mask kv > q\nweights softmax(sink = {sink})\noutput o, lse", schedule)
    np.testing.assert_array_equal(lse[:, :, -1], np.float32(sink))


@EVERY
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("weights", ["softmax", "softmax(sink = 1.0)", "sigmoid"])
def test_a_bad_score_shows_in_its_row_and_nowhere_else(
    schedule: str, value: str, weights: str
) -> None:
    score = f"score where(q == 4 and kv == 5, {value}, s)\nweights {weights}"
    (o,) = run_text(score, schedule)
    assert np.isnan(o[:, :, 4]).all()
    assert np.isfinite(np.delete(o, 4, axis=2)).all()
    (o,) = run_text(f"{score}\nmask kv != 5", schedule)  # a masked pair has no score
    assert np.isfinite(o).all()


@EVERY
def test_all_scores_of_a_row_are_nan(schedule: str) -> None:
    q = Q.copy()
    q[:, :, 6] = np.nan
    o, lse = run_text("mask kv <= q\noutput o, lse", schedule, q=q)
    assert np.isnan(o[:, :, 6]).all()
    assert np.isnan(lse[:, :, 6]).all()


@EVERY
def test_scores_of_minus_infinity_are_masked_pairs(schedule: str) -> None:
    masked = run_text("mask kv % 3 == 1\noutput o, lse", schedule)
    infinite = run_text("score where(kv % 3 == 1, s, -inf)\noutput o, lse", schedule)
    assert [x.tobytes() for x in masked] == [x.tobytes() for x in infinite]
    o, lse = run_text("score -inf\noutput o, lse", schedule)
    assert not o.any()
    assert np.isneginf(lse).all()


@EVERY
@pytest.mark.parametrize("weights", ["softmax", "sigmoid"])
def test_dead_keys_may_hold_anything(schedule: str, weights: str) -> None:
    """Past the length, and where a condition on the key alone fails."""
    lengths = np.array([7, 0], np.int32)
    k, v = K.copy(), V.copy()
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = np.nan
    k[:, :, 3] = v[:, :, 3] = np.inf
    body = f"tensor n : int32[B]\nlength kv = n[b]\nmask kv != 3\nweights {weights}"
    (o,) = run_text(body, schedule, k=k, v=v, n=lengths)
    assert np.isfinite(o).all()
    assert not o[1].any()


@EVERY
def test_lengths_of_each_sequence(schedule: str) -> None:
    ql, kl = np.array([11, 0], np.int32), np.array([2, 11], np.int32)
    body = "tensor ql : int32[B]\ntensor kl : int32[B]\nlength q = ql[b], kv = kl[b]\n"
    o, lse = run_text(f"{body}mask causal\noutput o, lse", schedule, ql=ql, kl=kl)
    assert not o[1].any()
    assert np.isneginf(lse[1]).all()
    assert np.isneginf(lse[0, :, :9]).all()  # qpos < 0: the rows before the first key


@pytest.mark.parametrize("length", [-1, 12])
def test_a_length_outside_the_buffer_is_an_error(length: int) -> None:
    with pytest.raises(AttnError, match=r"A662.*Skv"):
        run_text(
            "tensor n : int32[B]\nlength kv = n[b]", SCHEDULES[0], n=np.full(2, length, np.int32)
        )


@EVERY
def test_an_untaken_read_does_not_happen(schedule: str) -> None:
    t = np.arange(11, dtype=np.float32)
    for body in (
        "score where(kv > 0, s + t[kv - 1], s)",
        "score s + t[kv - 1]\nmask kv > 0",
        "mask kv > 0 and t[kv - 1] < 5.0",
        "mask kv == 0 or t[kv - 1] < 5.0",
        "let x = t[kv - 1]\nscore where(kv > 0, s + x * x, s)",
    ):
        run_text(f"tensor t : float[Skv]\n{body}", schedule, t=t)


@EVERY
def test_the_floor_of_a_score_is_an_integer_like_others(schedule: str) -> None:
    """Its range is not known before the launch, which is no reason to refuse the launch."""
    run_text("score s * (floor(s) + 1)\nmask kv % 3 != 1", schedule)
    run_text("score s + (2 * floor(exp(s)) - 1) % 3", schedule)


@pytest.mark.parametrize(
    "body",
    [
        "score s + t[kv + 1]",
        "mask t[kv - 1] > 0.0",
        "scale t[b - 1]",
        "weights softmax(sink = t[h + 10])",
        "mask where(t[kv - 1] > 0.0, true, true)",
        "score where(kv == 3, s + t[kv + 11], s)\nmask kv > 2",
    ],
)
def test_a_read_outside_that_counts_is_an_error(body: str) -> None:
    t = np.ones(11, np.float32)
    with pytest.raises(AttnError, match=r"A661.*`t`"):
        run_text(f"tensor t : float[Skv]\n{body}", SCHEDULES[0], t=t)


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0)])
@pytest.mark.parametrize("weights", ["softmax", "softmax(sink = 2.0)", "sigmoid"])
def test_nothing_is_legal(
    shape: tuple[int, ...], weights: str, engine: Any, host_compiler: None
) -> None:
    B, H, Sq, Skv = shape
    output = "o" if weights == "sigmoid" else "o, lse"
    text = f"attention a {{\nmask causal\nweights {weights}\noutput {output}\n}}\n"
    kernel = attngen.compile_text(text, engine=engine, schedule="kernel forward_simt")
    q, k = np.ones((B, H, Sq, 4), np.float32), np.ones((B, H, Skv, 4), np.float32)
    found = kernel(q, k, k)
    o, *lse = found if isinstance(found, tuple) else (found,)
    assert o.shape == q.shape
    assert not o.any()
    if lse:
        assert (lse[0] == (2.0 if "sink" in weights else -np.inf)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_weights_are_not_lost(dtype: str) -> None:
    """Rows of 55,831 equal weights: in fp16 each would be subnormal, and half a step away."""
    q = np.zeros((1, 1, 1, 1), DTYPES[dtype])
    k = np.zeros((1, 1, 55831, 1), DTYPES[dtype])
    v = np.full_like(k, 3.0)
    for schedule in SCHEDULES:
        lines = f"{schedule}; tile kv = 1024"
        kernel = attngen.compile_text("attention a {\n}\n", engine="numpy", schedule=lines)
        check(attngen.reference(kernel.unit, q, k, v), kernel(q, k, v))
