"""Naming shared nodes changes no value, names each of them once, and only them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attngen
from attngen.ir.attention import Attention
from attngen.ir.expr import Binary, BinaryOp, Const, Expr, Let, Symbol
from attngen.ir.functions import call
from attngen.ir.printer import print_attention
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import children, postorder
from attngen.ir.types import ScalarType
from attngen.passes.name_shared import name_shared
from tests.codegen.random_expr import DATA, INDEX_SYMBOLS, SCORE, SIZES, expressions, variant

TYPES = tuple(ScalarType)
SLOW = settings(suppress_health_check=list(HealthCheck))
Q, KV = INDEX_SYMBOLS[3], INDEX_SYMBOLS[4]


def values(root: Expr) -> np.ndarray:
    shape = np.zeros((4, 3, 4), np.int64)
    q, kv = shape + np.arange(3)[:, None], shape + np.arange(4)
    symbols = {n: np.int64(x) for n, x in {**SIZES, "Sq": 3, "Skv": 4}.items()}
    symbols |= {"any": np.int64(2**40), "size": np.int64(9), "tiny": np.int64(-5)}
    symbols |= {"flag": np.True_, "free": np.float32(0.1), "unit": np.float32(-1)}
    symbols |= {"b": shape + 1, "h": shape + 2, "hkv": shape + 1, "q": q, "kv": kv, "qpos": q + 1}
    s = np.array([0.5, -np.inf, np.nan, 7.25], np.float32)[:, None, None]
    return np.broadcast_to(evaluate(root, symbols | {"s": s + 0 * shape}, DATA).data, shape.shape)


def uses(attention: Attention) -> Counter[int]:
    nodes = postorder(*attention.expressions())
    return Counter(id(child) for node in nodes for child in children(node))


@given(expressions(TYPES, floats=True) | expressions((ScalarType.INT, ScalarType.BOOL)))
@SLOW
def test_every_value_stays(roots: list[Expr]) -> None:
    named = name_shared(variant(*roots))
    for before, after in zip(roots, named.scores, strict=True):
        np.testing.assert_array_equal(values(after), values(before))


@given(expressions(TYPES, floats=True), st.booleans())
@SLOW
def test_each_shared_node_has_one_name(roots: list[Expr], twice: bool) -> None:
    attention = variant(*roots, *(roots[:1] if twice else ()))
    named = name_shared(attention)
    counted = uses(named)
    lets = [n for n in postorder(*named.expressions()) if isinstance(n, Let)]
    assert len({let.name for let in lets}) == len(lets)
    under_let = {id(let.value) for let in lets}
    for node in postorder(*named.expressions()):
        if counted[id(node)] > 1 and not isinstance(node, Const | Symbol | Let):
            assert id(node) in under_let, "only a let may be the value of several"
            assert counted[id(node)] <= sum(let.value is node for let in lets)


@given(expressions(TYPES, floats=True))
@SLOW
def test_once_is_enough(roots: list[Expr]) -> None:
    named = name_shared(variant(*roots))
    assert name_shared(named) is named


def test_without_sharing_the_object_stays() -> None:
    tree = Binary(BinaryOp.ADD, SCORE, Binary(BinaryOp.MUL, SCORE, Const(2.0)))
    attention = variant(tree)
    assert name_shared(attention) is attention


def test_symbols_constants_and_lets_need_no_name() -> None:
    two = Const(2.0)
    let = Let("x", call("exp", SCORE))
    attention = variant(
        Binary(BinaryOp.MUL, Binary(BinaryOp.ADD, let, two), Binary(BinaryOp.MUL, let, two))
    )
    assert name_shared(attention) is attention


def test_a_name_of_the_user_is_not_taken_again() -> None:
    shared = call("exp", SCORE)
    both = Binary(BinaryOp.ADD, Let("shared_1", call("tanh", SCORE)), Let("shared_3", SCORE))
    tree = Binary(BinaryOp.ADD, both, Binary(BinaryOp.MUL, shared, shared))
    names = [n.name for n in postorder(*name_shared(variant(tree)).scores) if isinstance(n, Let)]
    assert sorted(names) == ["shared_1", "shared_2", "shared_3"]


def test_what_two_lines_share_is_named_once() -> None:
    distance = call("abs", Binary(BinaryOp.SUB, KV, Q))
    attention = variant(
        Binary(BinaryOp.ADD, distance, Const(1)), Binary(BinaryOp.MUL, distance, Const(2))
    )
    first, second = name_shared(attention).scores
    assert isinstance(first, Binary)
    assert isinstance(second, Binary)
    assert isinstance(first.left, Let)
    assert first.left is second.left


@pytest.mark.parametrize("depth", [60, 300])
def test_text_grows_with_the_graph_and_not_with_the_tree(depth: int) -> None:
    e: Expr = SCORE
    for _ in range(depth):
        e = Binary(BinaryOp.ADD, e, call("tanh", e))
    named = name_shared(variant(e))
    assert len(print_attention(named)) < 120 * depth


def test_names_like_those_of_the_pass_may_be_declared() -> None:
    text = """attention a {
        param   shared_1 : float = 2.0
        tensor  shared_2 : float[Skv]
        let     shared_3 = tanh(s) + shared_2[kv]
        score   shared_3 * (shared_3 + shared_1) * exp(shared_3)
    }"""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 8)).astype(np.float32) for n in (4, 9, 9))
    bias = rng.standard_normal(9).astype(np.float32)
    for engine in ("numpy", "cpu"):
        kernel = attngen.compile_text(text, engine=engine, schedule="kernel forward_simt")
        right = attngen.reference(kernel.unit, q, k, v, tensors={"shared_2": bias})
        assert right.accepts_o(kernel(q, k, v, shared_2=bias)).all()
