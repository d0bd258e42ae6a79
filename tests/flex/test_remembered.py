"""Functions that are called again: they are traced once, and again when anything of it changed."""

from __future__ import annotations

import functools
import gc
import math
import operator
import random
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from attngen.flex import attention, flex_attention
from attngen.flex.guards import UnguardedError, make_guard
from attngen.flex.remembered import MOST_IN_VAIN, Traces
from tests.flex.dense import attend, operands

Q, K, V = operands(1, 2, 2, 7, 9)
ROW = np.arange(9, dtype=np.float32)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that were traced, from none remembered on."""
    made: list[Any] = []
    trace = attention.trace

    def record(*functions: Any, **options: Any) -> Any:
        made.append(functions)
        return trace(*functions, **options)

    monkeypatch.setattr(attention, "trace", record)
    monkeypatch.setattr(attention, "_traces", Traces())
    return made


def check(score_mod: Any = None, mask_mod: Any = None) -> None:
    """The call gives what the functions say now."""
    o = flex_attention(Q, K, V, score_mod, mask_mod=mask_mod, engine="numpy")
    np.testing.assert_allclose(o, attend(Q, K, V, score_mod, mask_mod)[0], atol=3e-6)


def twice(score_mod: Any = None, mask_mod: Any = None) -> None:
    for _ in range(2):
        check(score_mod, mask_mod)


# ---- what is served ----------------------------------------------------------------------


def scaled(factor: Any) -> Any:
    return lambda s, b, h, q, kv: s * factor + kv


def test_the_same_function_is_traced_once(traced: list[Any]) -> None:
    function = scaled(0.5)
    for _ in range(3):
        check(function)
    assert len(traced) == 1


def test_a_new_closure_over_equal_values_is_not_traced(traced: list[Any]) -> None:
    for _ in range(3):
        check(scaled(12345.5))
    assert len(traced) == 1


def test_a_new_closure_reads_its_own_array(traced: list[Any]) -> None:
    def biased(bias: Any) -> Any:
        return lambda s, b, h, q, kv: s + bias[kv]

    for factor in (1, -1, 3):
        check(biased(ROW * factor))
    assert len(traced) == 1


def test_a_rebound_array_is_read(traced: list[Any]) -> None:
    bias = ROW

    def function(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + bias[kv]

    check(function)
    bias = -ROW
    check(function)
    bias[3] = 17.0  # in place
    check(function)
    assert len(traced) == 1


def test_arrays_are_not_kept_alive(traced: list[Any]) -> None:
    bias = ROW.copy()
    gone = weakref.ref(bias)
    twice(functools.partial(lambda bias, s, b, h, q, kv: s + bias[kv], bias))
    assert len(traced) == 1
    traced.clear()
    del bias
    gc.collect()
    assert gone() is None


def test_two_masks_joined(traced: list[Any]) -> None:
    def both(first: Any, second: Any) -> Any:
        return lambda b, h, q, kv: first(b, h, q, kv) & second(b, h, q, kv)

    def near(width: int) -> Any:
        return lambda b, h, q, kv: q - kv < width

    for width in (3, 3, 4, 3):
        check(None, both(lambda b, h, q, kv: q >= kv, near(width)))
    assert len(traced) == 2


# ---- what is noticed ---------------------------------------------------------------------

NUMBER = 2.0
FLAG = True
ROOT = np.sqrt
TABLES = [ROW, 2 * ROW]
LIMITS = {"near": 2, "far": 5}


def helper(x: Any) -> Any:
    return x * 2


def with_global(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * NUMBER + kv


def with_helper(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return helper(s) + kv


def with_list(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    for table in TABLES:
        s = s + table[kv]
    return s


def with_dict(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return abs(q - kv) <= LIMITS["near"]


def with_module(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * math.floor(2.5) + kv


def with_flag(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return ROOT(s * s + 1) + kv if FLAG else s


def with_builtin(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * max(2, 3) + kv


def test_a_number_of_the_closure(traced: list[Any]) -> None:
    factor = 0.5

    def function(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * factor + kv

    twice(function)
    factor = 0.25
    twice(function)
    assert len(traced) == 2


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, 1.0), (True, 1), (1.0, np.float32(1.0))])
def test_numbers_that_are_equal_and_differ(a: Any, b: Any, traced: list[Any]) -> None:
    check(scaled(a))
    check(scaled(b))
    assert len(traced) == 2


def test_a_global(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    twice(with_global)
    monkeypatch.setitem(globals(), "NUMBER", 0.5)
    twice(with_global)
    assert len(traced) == 2


def test_a_global_that_is_compared_by_identity(
    monkeypatch: pytest.MonkeyPatch, traced: list[Any]
) -> None:
    twice(with_flag)
    monkeypatch.setitem(globals(), "FLAG", False)
    twice(with_flag)
    monkeypatch.setitem(globals(), "ROOT", np.abs)
    twice(with_flag)
    assert len(traced) == 3


def test_a_function_that_is_called(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    twice(with_helper)
    monkeypatch.setitem(globals(), "helper", lambda x: x * 3)
    twice(with_helper)
    assert len(traced) == 2


def test_the_code_of_a_function_that_is_called(
    monkeypatch: pytest.MonkeyPatch, traced: list[Any]
) -> None:
    twice(with_helper)
    monkeypatch.setattr(helper, "__code__", (lambda x: x * 5).__code__)
    twice(with_helper)
    assert len(traced) == 2


def test_a_function_of_a_module(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    twice(with_module)
    monkeypatch.setattr(math, "floor", lambda x: 7)
    twice(with_module)
    assert len(traced) == 2


def test_a_global_that_hides_a_builtin(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    twice(with_builtin)
    monkeypatch.setitem(globals(), "max", lambda *x: 1)
    twice(with_builtin)
    assert len(traced) == 2


def test_elements_of_a_list(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    twice(with_list)
    monkeypatch.setitem(globals(), "TABLES", [ROW, ROW, ROW])
    twice(with_list)
    TABLES.append(ROW)
    twice(with_list)
    TABLES.pop()
    assert len(traced) == 3


def test_entries_of_a_dict(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    twice(None, with_dict)
    monkeypatch.setitem(LIMITS, "near", 3)
    twice(None, with_dict)
    assert len(traced) == 2


def test_keys_of_a_dict(traced: list[Any]) -> None:
    def function(weights: dict[str, int]) -> Any:
        return lambda s, b, h, q, kv: s + sum(i * len(n) for n, i in weights.items()) + kv

    for weights in ({"a": 1, "bb": 2}, {"a": 1, "bbb": 2}, {"a": 1}):
        twice(function(weights))
    assert len(traced) == 3


def test_defaults(traced: list[Any]) -> None:
    def function(s: Any, b: Any, h: Any, q: Any, kv: Any, n: int = 2, *, m: int = 3) -> Any:
        return s * n + m * kv

    twice(function)
    function.__defaults__ = (4,)
    twice(function)
    function.__kwdefaults__ = {"m": 5}
    twice(function)
    assert len(traced) == 3


def test_arguments_of_a_partial(traced: list[Any]) -> None:
    def function(n: int, s: Any, b: Any, h: Any, q: Any, kv: Any, m: int) -> Any:
        return s * n + m * kv

    for n, m in ((1, 2), (1, 2), (2, 2), (2, 3)):
        check(functools.partial(function, n, m=m))
    assert len(traced) == 3


@pytest.mark.parametrize(
    "other", [ROW[:8].repeat(2), ROW.astype(np.float16), ROW[None].repeat(2, 0)]
)
def test_an_array_of_another_shape_or_dtype(other: Any, traced: list[Any]) -> None:
    def function(bias: Any) -> Any:
        return lambda s, b, h, q, kv: s + (bias[kv] if bias.ndim == 1 else bias[h, kv])

    twice(function(ROW))
    twice(function(other))
    assert len(traced) == 2


def test_arrays_that_are_one_object(traced: list[Any]) -> None:
    """One array that is read twice is one argument of the kernel."""

    def function(left: Any, right: Any) -> Any:
        return lambda s, b, h, q, kv: s + left[kv] - 2 * right[kv]

    other = -ROW
    for left, right in ((ROW, ROW), (ROW, other), (other, ROW), (other, other)):
        check(function(left, right))
    assert len(traced) == 2


def test_a_changed_rank_of_what_is_given(traced: list[Any]) -> None:
    """Other lengths, and other dtypes of q, need no new trace."""

    def function(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv <= q + 2

    for rows, dtype in ((7, np.float32), (5, np.float32), (5, np.float16)):
        q, k, v = (x.astype(dtype) for x in operands(1, 2, 2, rows, 9))
        o = flex_attention(q, k, v, mask_mod=function, engine="numpy")
        expected = attend(*(x.astype(np.float32) for x in (q, k, v)), None, function)[0]
        np.testing.assert_allclose(o.astype(np.float32), expected, atol=2e-3)
    assert len(traced) == 1


def test_options_that_change_the_text(traced: list[Any]) -> None:
    function = scaled(0.5)
    sinks = np.zeros(2, np.float32)
    for options in ({}, {"scale": 0.5}, {"sinks": sinks}, {"sinks": sinks.astype(np.float16)}):
        for _ in range(2):
            flex_attention(Q, K, V, function, engine="numpy", **options)
    assert len(traced) == 4


def test_a_longer_array_is_cut_for_each_length(traced: list[Any]) -> None:
    bias = np.linspace(0, 3, 64, dtype=np.float32).reshape(8, 8)

    def function(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + bias[q, kv]

    for rows, keys in ((5, 6), (7, 3), (5, 6)):
        q, k, v = operands(1, 2, 2, rows, keys)
        o = flex_attention(q, k, v, function, engine="numpy")
        np.testing.assert_allclose(o, attend(q, k, v, function)[0], atol=3e-6)
    assert len(traced) == 1


# ---- objects -----------------------------------------------------------------------------


class Bias:
    """A function with a state, and one method calling another."""

    factor = 2

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __call__(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * self.factor - self.distance(q, kv)

    def distance(self, q: Any, kv: Any) -> Any:
        return abs(q - kv) * self.slope


@dataclass(frozen=True)
class Window:
    left: int
    right: int


@pytest.mark.parametrize("take", [lambda bias: bias, lambda bias: bias.__call__])
def test_attributes(take: Any, monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    bias = Bias(0.5)
    twice(take(bias))
    assert len(traced) == 1
    bias.slope = 0.25
    twice(take(bias))
    bias.factor = 3
    twice(take(bias))
    monkeypatch.setattr(Bias, "distance", lambda self, q, kv: q + kv)
    twice(take(bias))
    assert len(traced) == 4
    check(take(Bias(0.25)))
    assert len(traced) == 5


class Steeper(Bias):
    def __call__(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s - self.distance(q, kv) * 3


class Same(Bias):
    factor = 2


def test_another_class(traced: list[Any]) -> None:
    """Also where a class has what the other has: whether it is one may be asked."""

    def through(bias: Any) -> Any:
        return lambda s, b, h, q, kv: bias(s, b, h, q, kv)

    for bias in (Bias(0.5), Steeper(0.5), Same(0.5)):
        twice(through(bias))
    assert len(traced) == 3


def test_a_method_that_an_object_hides(traced: list[Any]) -> None:
    bias = Bias(0.5)
    twice(bias)
    bias.distance = lambda q, kv: q + kv  # type: ignore[method-assign]
    twice(bias)
    assert len(traced) == 3


def test_a_dataclass(traced: list[Any]) -> None:
    def function(window: Any) -> Any:
        return lambda b, h, q, kv: (q - kv <= window.left) & (kv - q <= window.right)

    for window in (Window(2, 3), Window(2, 3), Window(2, 4), Window(1, 4)):
        check(None, function(window))
    assert len(traced) == 3


def test_a_namespace_is_not_looked_into(traced: list[Any]) -> None:
    settings = types.SimpleNamespace(left=2)

    def function(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv <= settings.left

    check(None, function)
    settings.left = 4
    check(None, function)
    assert len(traced) == 2


# ---- what is traced every time -----------------------------------------------------------


class Computed:
    def __init__(self) -> None:
        self.calls = 0

    @property
    def factor(self) -> int:
        self.calls += 1
        return self.calls


class Fixed:
    @property
    def factor(self) -> int:
        return 2


class Indexed:
    def __getitem__(self, index: int) -> int:
        return 3


def _functions() -> dict[str, Callable[..., Any]]:
    numbers, log, state = iter(range(1, 100)), [], {"n": 0}
    computed, fixed, indexed, tables = Computed(), Fixed(), Indexed(), {"a": ROW}
    calls = 0

    was_called = False

    def noting(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        nonlocal was_called
        was_called = True
        return s + kv

    def counting(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        nonlocal calls
        calls += 1
        return s * calls + kv

    def storing(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        state["n"] += 1
        return s * state["n"] + kv

    def importing(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        import random as r

        return s * r.random() + kv

    def catching(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        try:
            return s * indexed.factor + kv
        except AttributeError:
            return s + kv

    def logging(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        log.append(len(log))
        return s * len(log) + kv

    def assigning(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        computed.calls = computed.calls + 1
        return s + kv

    return {
        "random": lambda s, b, h, q, kv: s * random.random() + kv,
        "a generator": lambda s, b, h, q, kv: s * next(numbers) + kv,
        "nonlocal": counting,
        "nonlocal, always the same": noting,
        "an entry of a dict": storing,
        "an import": importing,
        "an exception": catching,
        "a list that grows": logging,
        "an attribute that is assigned": assigning,
        "a property": lambda s, b, h, q, kv: s * computed.factor + kv,
        "a property, always the same": lambda s, b, h, q, kv: s * fixed.factor + kv,
        "an array in a dict": lambda s, b, h, q, kv: s * tables["a"][0] + kv,
        "an operator": lambda s, b, h, q, kv: s * indexed[0] + kv,
        "getattr": lambda s, b, h, q, kv: s * getattr(computed, "calls") + kv,  # noqa: B009
        "a method of C": lambda s, b, h, q, kv: s * "abc".__len__() + kv,
        "a setter": lambda s, b, h, q, kv: (operator.setitem(state, "n", 1), s)[1],
    }


@pytest.mark.parametrize("name", _functions())
def test_a_function_that_is_not_guarded(name: str, traced: list[Any]) -> None:
    function = _functions()[name]
    for _ in range(3):
        flex_attention(Q, K, V, function, engine="numpy")
    assert len(traced) == 3


def test_a_name_that_is_missing_is_none_of_the_guard() -> None:
    def later(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + value

    with pytest.raises(UnguardedError, match="no value yet"):
        make_guard(later)
    value = 1


def test_a_value_that_holds_itself() -> None:
    items: list[Any] = []
    items.append(items)
    with pytest.raises(UnguardedError, match="holds itself"):
        make_guard(lambda s, b, h, q, kv: items)


def test_numbers_that_always_change_are_given_up(traced: list[Any]) -> None:
    for n in range(MOST_IN_VAIN + 5):
        flex_attention(Q, K, V, scaled(n + 0.5), engine="numpy")
    last = scaled(0.25)
    for _ in range(2):
        check(last)
    assert len(traced) == MOST_IN_VAIN + 7
