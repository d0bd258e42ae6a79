"""Cutting long chains keeps values, laziness and sharing, and bounds every piece."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.ir.attention import Attention
from attngen.ir.expr import Compare, CompareOp, Const, Expr, Let, Load, Logical, LogicalOp
from attngen.ir.functions import call
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import postorder
from attngen.ir.types import ScalarType
from attngen.ir.verify import verify_attention
from attngen.passes.split_chains import LONGEST, split_chains
from tests.codegen.random_expr import DATA, INDEX_SYMBOLS, variant

KV = INDEX_SYMBOLS[4]
LENGTHS = (LONGEST, LONGEST + 1, 2 * LONGEST - 1, 2 * LONGEST, 2000)


def chain(op: LogicalOp, length: int) -> Logical:
    """`kv == 0 or kv == 3 or …`, `kv != 0 and kv != 3 and …`"""
    each = CompareOp.EQ if op is LogicalOp.OR else CompareOp.NE
    return Logical(op, tuple(Compare(each, KV, Const(3 * i)) for i in range(length)))


def values(mask: Expr | None) -> np.ndarray:
    assert mask is not None
    data: np.ndarray = evaluate(mask, {"kv": np.arange(6100)}, DATA).data
    return data


@pytest.mark.parametrize("op", LogicalOp)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_value_stays_and_no_piece_is_long(op: LogicalOp, length: int) -> None:
    attention = variant(mask=chain(op, length))
    split = split_chains(attention)
    assert (split is attention) == (length <= LONGEST)
    np.testing.assert_array_equal(values(split.mask), values(attention.mask))
    assert longest(split) <= LONGEST
    assert split_chains(split) is split
    assert verify_attention(split) == []


def longest(attention: Attention) -> int:
    nodes = postorder(*attention.expressions())
    return max(len(n.operands) for n in nodes if isinstance(n, Logical))


def test_a_read_behind_a_decided_term_still_does_not_happen() -> None:
    """`kv >= 3 or … or narrow[kv] > 0`, whose last read is inside only where nothing decides."""
    terms: list[Expr] = [Compare(CompareOp.GE, KV, Const(3))] * 40
    read = Compare(CompareOp.GT, Load("narrow", (KV,), ScalarType.INT), Const(0))
    split = split_chains(variant(mask=Logical(LogicalOp.OR, (*terms, read))))
    assert split.mask is not None
    assert not np.any(evaluate(split.mask, {"kv": np.arange(99)}, DATA).outside)


def test_a_name_of_the_user_is_not_taken_again() -> None:
    mine = Let("chain_1", call("bit", KV, Const(1)))
    both = Logical(LogicalOp.AND, (mine, chain(LogicalOp.OR, 70)))
    split = split_chains(variant(mask=both))
    names = [n.name for n in postorder(*split.expressions()) if isinstance(n, Let)]
    assert sorted(names) == ["chain_1", "chain_2", "chain_3"]


@pytest.mark.parametrize("second", ["mask m or q > 3", "score where(m, s, s + 2.0)"])
def test_a_let_that_several_lines_use_stays_one_let(second: str) -> None:
    terms = " or ".join(f"kv == {3 * i}" for i in range(40))
    body = f"dtype fp32\nhead_dim 8\nlet m = {terms}\nscore where(m, s, s * 2.0)\n{second}"
    kernel = attngen.compile_text(f"attention a {{\n{body}\n}}\n", engine="numpy")
    assert "let_m" in kernel.render().source
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 9, 8)).astype(np.float32)
    assert attngen.reference(kernel.unit, q, k, v).accepts_o(kernel(q, k, v)).all()
