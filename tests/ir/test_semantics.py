"""What an expression means: integers as Python has them, lazy logic, reads outside a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expressions import param, random_expressions
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Compare,
    CompareOp,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    LogicalOp,
    Negate,
    Not,
    Role,
    Select,
    Symbol,
    ToFloat,
)
from attngen.ir.functions import call
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import fold_up, postorder, rebuild, rewrite, substitute, symbols, tensors
from attngen.ir.types import ScalarType

INT, FLOAT, BOOL = ScalarType.INT, ScalarType.FLOAT, ScalarType.BOOL
Q, KV = Symbol("i", Role.INDEX, INT), Symbol("j", Role.INDEX, INT)


def op(sign: str, left: Expr, right: Expr) -> Binary:
    return Binary(BinaryOp(sign), left, right)


def less(left: Expr, right: Expr) -> Compare:
    return Compare(CompareOp.LT, left, right)


def read(*indices: Expr, name: str = "t", scalar: ScalarType = INT) -> Load:
    return Load(name, indices, scalar)


def value(e: Expr, arrays: dict[str, Any] | None = None, **values: Any) -> Any:
    return evaluate(e, values, arrays or {})


# ---- numbers -----------------------------------------------------------------------------


@given(st.integers(-50, 50), st.integers(-9, 9))
def test_integer_division_is_pythons_and_0_for_0(a: int, b: int) -> None:
    i, j = np.int64(a), np.int64(b)
    assert value(op("//", Q, KV), i=i, j=j).data == (a // b if b else 0)
    assert value(op("%", Q, KV), i=i, j=j).data == (a % b if b else 0)


@pytest.mark.parametrize("sign", ["+", "-", "*", "//", "%"])
def test_integers_stay_int64(sign: str) -> None:
    found = value(op(sign, Q, Const(3)), i=np.arange(5))
    assert found.data.dtype == np.int64


def test_floats_stay_float32() -> None:
    x = param("x")
    for e in (op("/", x, Const(3.0)), op("*", x, Const(0.1)), call("exp", x), Negate(x)):
        assert value(e, x=np.float32([1, 2])).data.dtype == np.float32
    assert value(ToFloat(Q), i=np.arange(3)).data.dtype == np.float32
    assert value(op("+", ToFloat(Q), Const(0.5)), i=np.arange(3)).data.dtype == np.float32


def test_constants_round_to_float32() -> None:
    assert value(Const(0.1)).data == np.float32(0.1)
    assert value(Const(2**62)).data == 2**62
    assert value(Const(True)).data.dtype == np.bool_


def test_large_integers_convert_once() -> None:
    n = 2**24 + 1
    assert value(ToFloat(Q), i=np.int64(n)).data == np.float32(n)


def test_division_by_zero_and_nan() -> None:
    x, y = param("x"), param("y")
    found = value(op("/", x, y), x=np.float32([1, -1, 0]), y=np.float32(0)).data
    assert found[0] == np.inf
    assert found[1] == -np.inf
    assert np.isnan(found[2])
    nan = np.float32(np.nan)
    for compare, expected in ((CompareOp.EQ, False), (CompareOp.NE, True), (CompareOp.LT, False)):
        assert value(Compare(compare, x, x), x=nan).data == expected


def test_truth_values_compare() -> None:
    p = param("p", BOOL)
    same = Compare(CompareOp.EQ, p, less(Q, KV))
    assert value(same, p=np.array([True, False]), i=np.int64(1), j=np.int64(2)).data.tolist() == [
        True,
        False,
    ]


def test_values_broadcast() -> None:
    i, j = np.ogrid[0:3, 0:4]
    assert value(op("-", Q, KV), i=i, j=j).data.shape == (3, 4)


def test_a_let_is_its_value() -> None:
    x = Let("x", op("+", Q, KV))
    assert value(op("*", x, x), i=np.int64(2), j=np.int64(3)).data == 25


# ---- reads -------------------------------------------------------------------------------

T = {"t": np.array([10, 20, 30], np.int32)}


def test_reads() -> None:
    found = value(read(Q), T, i=np.array([2, 0]))
    assert found.data.tolist() == [30, 10]
    assert found.data.dtype == np.int64
    assert not np.any(found.outside)
    assert found.tensor is None


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bool", "bool"), ("int8", "int64"), ("uint32", "int64"), ("float16", "float32")],
)
def test_elements_become_scalars(dtype: str, expected: str) -> None:
    found = value(read(Q), {"t": np.ones(3, dtype)}, i=np.int64(1))
    assert found.data.dtype == expected


@pytest.mark.parametrize("index", [-1, 3, -(2**40), 2**40])
def test_an_index_outside_is_marked(index: int) -> None:
    found = value(read(Q), T, i=np.array([1, index]))
    assert found.outside.tolist() == [False, True]
    assert found.tensor == "t"


def test_a_dimension_of_one_has_one_element() -> None:
    found = value(read(Q), {"t": np.array([7])}, i=np.array([0, 1, -1]))
    assert found.outside.tolist() == [False, True, True]


def test_a_broadcast_dimension_is_read_anywhere() -> None:
    wide = np.broadcast_to(np.array([[1, 2]]), (5, 2))
    found = value(read(Q, KV), {"t": wide}, i=np.array([4, 0]), j=np.array([0, 1]))
    assert found.data.tolist() == [1, 2]
    assert not np.any(found.outside)


def test_an_empty_tensor_is_outside_everywhere() -> None:
    found = value(read(Q), {"t": np.zeros(0, np.int32)}, i=np.arange(2))
    assert np.all(np.broadcast_to(found.outside, 2))


def test_an_index_that_was_read_outside() -> None:
    found = value(read(read(Q)), {"t": np.array([1, 2, 0])}, i=np.array([0, 5]))
    assert found.outside.tolist() == [False, True]


# ---- laziness ----------------------------------------------------------------------------


IN_RANGE = Logical(LogicalOp.AND, (less(Const(-1), Q), less(Q, Const(3))))
INDICES = np.array([-2, 0, 2, 3, 9])


def outside(e: Expr) -> list[bool]:
    found = value(e, T, i=INDICES)
    return np.broadcast_to(found.outside, INDICES.shape).tolist()


NEVER = [False] * 5
ALWAYS = [True, False, False, True, True]


def test_where_reads_only_what_it_takes() -> None:
    assert outside(Select(IN_RANGE, read(Q), Const(0))) == NEVER
    assert outside(Select(IN_RANGE, Const(0), read(Q))) == ALWAYS
    assert outside(Select(less(read(Q), Const(15)), Const(0), Const(1))) == ALWAYS


def test_and_or_stop_early() -> None:
    check = less(read(Q), Const(15))
    assert outside(Logical(LogicalOp.AND, (IN_RANGE, check))) == NEVER
    assert outside(Logical(LogicalOp.AND, (check, IN_RANGE))) == ALWAYS
    assert outside(Logical(LogicalOp.OR, (Not(IN_RANGE), check))) == NEVER
    assert outside(Logical(LogicalOp.OR, (IN_RANGE, check))) == ALWAYS
    three = Logical(LogicalOp.AND, (IN_RANGE, less(Q, Const(9)), check))
    assert outside(three) == NEVER


def test_values_of_lazy_logic() -> None:
    p, q = param("p", BOOL), param("q", BOOL)
    a, b = np.array([[True], [False]]), np.array([True, False])
    assert value(Logical(LogicalOp.AND, (p, q)), p=a, q=b).data.tolist() == (a & b).tolist()
    assert value(Logical(LogicalOp.OR, (p, q)), p=a, q=b).data.tolist() == (a | b).tolist()


def test_a_shared_read_counts_where_one_use_needs_it() -> None:
    t = Let("t", read(Q))
    e = op("+", Select(IN_RANGE, t, Const(0)), Select(less(Const(5), Q), t, Const(0)))
    assert outside(e) == [False, False, False, False, True]


def test_arithmetic_keeps_the_mark() -> None:
    for e in (op("*", read(Q), Const(0)), call("min", read(Q), Const(0)), Negate(read(Q))):
        assert outside(e) == ALWAYS


# ---- the rewriting kit -------------------------------------------------------------------


@given(random_expressions())
def test_rewriting_nothing_gives_the_same_object(e: Expr) -> None:
    assert rewrite(e, lambda node: node) is e
    assert substitute(e, {"none": Const(1)}) is e
    assert all(rebuild(node, ()) is node for node in postorder(e) if isinstance(node, Const))


@given(random_expressions())
def test_postorder_visits_each_node_once_and_operands_first(e: Expr) -> None:
    from attngen.ir.traverse import children

    order = list(postorder(e))
    place = {id(node): at for at, node in enumerate(order)}
    assert len(place) == len(order)
    assert order[-1] is e
    for node in order:
        assert all(place[id(child)] < place[id(node)] for child in children(node))


@given(random_expressions(), st.integers(-5, 5))
def test_substitution_is_evaluation(e: Expr, number: int) -> None:
    names = dict.fromkeys(("q", "kv", "b", "w"), np.int64(number))
    env: dict[str, Any] = {**names, "on": np.bool_(number > 0)}
    replaced = substitute(e, {name: Const(number) for name in names})
    assert symbols(replaced) <= {"on"}
    assert evaluate(replaced, env, {}).data == evaluate(e, env, {}).data


def test_sharing_survives_rewriting() -> None:
    shared = op("+", Q, KV)
    new = substitute(op("*", shared, shared), {"i": Const(4)})
    assert isinstance(new, Binary)
    assert new.left is new.right


def test_fold_up_visits_a_shared_node_once() -> None:
    seen: list[Expr] = []
    e: Expr = Q
    for _ in range(100):
        e = op("+", e, e)

    def count(node: Expr, operands: tuple[int, ...]) -> int:
        seen.append(node)
        return 1 + sum(operands)

    assert fold_up(e, count) == 2**101 - 1
    assert len(seen) == 101


def test_names_of_an_expression() -> None:
    e = op("+", read(Q, name="t"), op("*", param("w", INT), KV))
    assert symbols(e) == {"i", "j", "w"}
    assert symbols(e, role=Role.PARAM) == {"w"}
    assert tensors(e) == {"t"}
