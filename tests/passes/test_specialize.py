"""Specialising writes down what the first call decides, and changes no value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from attngen.ir.attention import Attention
from attngen.ir.expr import Binary, BinaryOp, Const, Expr, Let, Role, Symbol, ToFloat
from attngen.ir.printer import print_attention, print_expr
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import postorder, symbols
from attngen.ir.types import BF16, FP32, ScalarType
from attngen.ir.verify import verify_attention
from attngen.passes.specialize import specialize
from tests.codegen.random_expr import DATA, SCORE, SIZES, expressions, variant

INT = ScalarType.INT
TYPES = tuple(ScalarType)
SLOW = settings(suppress_health_check=list(HealthCheck))


def size(name: str) -> Symbol:
    return Symbol(name, Role.SIZE, INT)


def open_variant(*roots: Expr, **parts: Any) -> Attention:
    return variant(*roots, **{"dtype": None, "head_dim_qk": None, "head_dim_v": None, **parts})


@given(expressions(TYPES, floats=True) | expressions((ScalarType.INT, ScalarType.BOOL)))
@SLOW
def test_every_value_stays_and_head_dims_are_numbers(roots: list[Expr]) -> None:
    fixed = specialize(open_variant(*roots), FP32, SIZES["Dqk"], SIZES["Dv"])
    sizes = {n: np.int64(x) for n, x in {**SIZES, "Sq": 3, "Skv": 4}.items()}
    known = {**sizes, "any": np.int64(5), "size": np.int64(9), "tiny": np.int64(-5)}
    known |= {"flag": np.True_, "free": np.float32(0.1), "unit": np.float32(-1)}
    at = {"b": 1, "h": 2, "hkv": 1, "q": 2, "kv": 3, "qpos": 3}
    known |= {n: np.int64(x) for n, x in at.items()} | {"s": np.float32(0.25)}
    without = {n: x for n, x in known.items() if n not in ("Dqk", "Dv")}
    for before, after in zip(roots, fixed.scores, strict=True):
        assert not symbols(after) & {"Dqk", "Dv"}
        right = evaluate(before, known, DATA).data
        np.testing.assert_array_equal(evaluate(after, without, DATA).data, right)


@given(expressions(TYPES, floats=True))
@SLOW
def test_once_is_enough(roots: list[Expr]) -> None:
    fixed = specialize(open_variant(*roots), BF16, 64, 32)
    assert (fixed.dtype, fixed.head_dim_qk, fixed.head_dim_v) == (BF16, 64, 32)
    assert specialize(fixed, BF16, 64, 32) is fixed


def test_nothing_to_do_leaves_the_object() -> None:
    attention = variant(SCORE)
    assert specialize(attention, FP32, 8, 8) is attention
    assert specialize(attention, FP32, 8, 16) is not attention


@pytest.mark.parametrize("declared", [True, False])
def test_heads_become_numbers_where_they_are_declared(declared: bool) -> None:
    heads = {"heads_q": 4, "heads_kv": 2} if declared else {}
    group = Binary(BinaryOp.FLOORDIV, size("Hq"), size("Hkv"))
    line = Binary(BinaryOp.MUL, SCORE, ToFloat(Binary(BinaryOp.ADD, group, size("Dv"))))
    fixed = specialize(open_variant(line, **heads), FP32, 64, 32)
    numbers = "4 // 2" if declared else "Hq // Hkv"
    assert print_expr(fixed.scores[0]) == f"s * float({numbers} + 32)"
    assert verify_attention(fixed) == []


def test_every_place_is_reached_and_a_shared_let_stays_shared() -> None:
    n = Let("n", ToFloat(Binary(BinaryOp.ADD, size("Dqk"), Symbol("b", Role.INDEX, INT))))
    e = Binary(BinaryOp.ADD, SCORE, n)
    length = Binary(BinaryOp.SUB, size("Dqk"), Const(60))
    attention = open_variant(e, e, scale=n, length_q=length, length_kv=length)
    fixed = specialize(attention, FP32, 64, 64)
    assert "Dqk" not in print_attention(fixed)
    lets = {id(x) for x in postorder(*fixed.expressions()) if isinstance(x, Let)}
    assert len(lets) == 1
    assert verify_attention(fixed) == []
