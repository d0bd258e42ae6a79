"""Folding keeps every value, does all of its work at once, and leaves alone what is folded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attngen
from attngen.analysis.ranges import exceeding_int64, launch_ranges
from attngen.ir.expr import Binary, BinaryOp, Call, Const, Expr, Negate, Role, Symbol, expr_type
from attngen.ir.functions import FUNCTIONS, call
from attngen.ir.printer import print_expr
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import postorder, rewrite
from attngen.ir.types import ScalarType
from attngen.ir.verify import verify_attention
from attngen.passes.fold_constants import fold_constants, fold_expr
from tests.codegen.random_expr import DATA, SIZES, expressions, structure, variant

SCORES = np.array([0.0, 1.5, -3.25, 96.0, -np.inf, np.inf, np.nan], np.float64)
TYPES = tuple(ScalarType)
SLOW = settings(suppress_health_check=list(HealthCheck))

values = st.fixed_dictionaries(
    {
        "any": st.sampled_from((0, 3, -7, 2**31, -(2**63), 2**63 - 1)),
        "size": st.sampled_from((0, 1, 2**31 - 1)),
        "tiny": st.integers(-5, 5),
        "flag": st.booleans(),
        "free": st.sampled_from((0.0, -1.5, 0.1, math.inf, math.nan)),
        "unit": st.sampled_from((-1.0, 0.0, 0.3)),
    }
)


def in_float64(root: Expr, params: dict[str, Any]) -> tuple[np.ndarray, Any]:
    """Values, and where they come from outside of a tensor, with every float in float64."""
    constants: dict[str, np.float64] = {}

    def as_symbol(node: Expr) -> Expr:
        if not isinstance(node, Const) or expr_type(node) is not ScalarType.FLOAT:
            return node
        name = f"c{len(constants)}"
        constants[name] = np.float64(node.value)
        return Symbol(name, Role.PARAM, ScalarType.FLOAT)

    shape = np.zeros((len(SCORES), 3, 4), np.int64)
    q, kv = shape + np.arange(3)[:, None], shape + np.arange(4)
    symbols: dict[str, Any] = {n: np.int64(x) for n, x in {**SIZES, "Sq": 3, "Skv": 4}.items()}
    types = {bool: np.bool_, int: np.int64, float: np.float64}
    symbols |= {n: types[type(x)](x) for n, x in params.items()}
    symbols |= {"b": shape + 1, "h": shape + 2, "hkv": shape + 1, "q": q, "kv": kv}
    symbols |= {"qpos": q + 1, "s": shape + SCORES[:, None, None]}
    value = evaluate(rewrite(root, as_symbol), symbols | constants, DATA)
    return np.broadcast_to(value.data, shape.shape), np.broadcast_to(value.outside, shape.shape)


@given(expressions(TYPES, floats=True) | expressions((ScalarType.INT, ScalarType.BOOL)), values)
@SLOW
def test_every_value_stays(roots: list[Expr], params: dict[str, Any]) -> None:
    """Bit for bit in float64, where folding computes; NaN, infinities and wrapping included."""
    for root in roots:
        (before, outside), (after, still) = in_float64(root, params), in_float64(fold(root), params)
        np.testing.assert_array_equal(after, before, err_msg=print_expr(root))
        assert not np.any(still & ~outside), "a read outside has appeared"


def fold(root: Expr) -> Expr:
    folded = fold_expr(root)
    assert expr_type(folded) is expr_type(root)
    return folded


@given(expressions(TYPES, floats=True) | expressions((ScalarType.INT, ScalarType.BOOL)))
@SLOW
def test_once_is_enough(roots: list[Expr]) -> None:
    for root in roots:
        folded = fold_expr(root)
        assert fold_expr(folded) is folded
        assert (folded is root) == (structure(folded) == structure(root))


@given(expressions(TYPES, floats=True), expressions((ScalarType.BOOL,), most=1, floats=True))
@SLOW
def test_a_folded_variant_is_valid_and_stays_the_same_object(
    roots: list[Expr], masks: list[Expr]
) -> None:
    attention = variant(*roots, mask=masks[0])
    folded = fold_constants(attention)
    assert fold_constants(folded) is folded
    same = structure(*folded.expressions()) == structure(*attention.expressions())
    assert (folded is attention) == same
    known = set(verify_attention(attention))
    new = [p for p in verify_attention(folded) if p not in known and "not float" not in p]
    assert all("score" in p for p in new), new  # score lines here may have any type


@given(expressions((ScalarType.INT, ScalarType.BOOL)))
@SLOW
def test_no_constant_leaves_64_bits(roots: list[Expr]) -> None:
    for root in roots:
        for node in postorder(fold_expr(root)):
            if isinstance(node, Const) and expr_type(node) is ScalarType.INT:
                assert -(2**63) <= node.value < 2**63


LEAST = Const(-(2**63))


@pytest.mark.parametrize(
    "e",
    [
        Negate(LEAST),
        call("abs", LEAST),
        Binary(BinaryOp.MUL, Const(2**62), Const(4)),
        Binary(BinaryOp.FLOORDIV, LEAST, Const(-1)),
        call("min", Binary(BinaryOp.ADD, Const(2**63 - 1), Const(1)), Const(5)),
    ],
    ids=print_expr,
)
def test_what_leaves_64_bits_is_left_for_the_launch_to_refuse(e: Expr) -> None:
    assert fold_expr(e) is e
    sizes = {**SIZES, "Sq": 1, "Skv": 1}
    params = {"any": 0, "size": 0, "tiny": 0, "flag": True, "free": 0.0, "unit": 0.0}
    attention = variant(e)
    assert list(exceeding_int64(attention, launch_ranges(attention, sizes, params)))


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("1 / sqrt(64.0) * s", "0.125 * s"),
        ("s + 0.0", "s + 0.0"),  # -0.0 + 0.0 is 0.0
        ("s * 0.0", "s * 0.0"),
        ("s * 1.0", "s * 1.0"),
        ("where(q + 0 < 2 * 8 and true, s, 1.0)", "where(q < 16, s, 1.0)"),
        ("where(not (not flag), s, 1.0)", "where(flag, s, 1.0)"),
        ("where(kv * 1 // 1 - 0 == 3 or false, s, exp(0.0))", "where(kv == 3, s, 1.0)"),
        ("s + (q // 0 + kv % (q - q))", None),
        ("s + (Dqk * 2 + 7 // -2)", "s + 124.0"),
        ("s + -7 % 4 + -7 // 4", "s + 1.0 + -2.0"),
        ("where(1.0 / 3 < 0.34, s, nan)", "s"),
        ("where(nan == nan, s, 2.0)", "2.0"),
    ],
)
def test_examples(text: str, folded: str | None) -> None:
    body = f"dtype fp32\nhead_dim 64\nparam flag : bool\nscore {text}"
    try:
        kernel = attngen.compile_text(f"attention a {{\n{body}\n}}\n")
    except attngen.AttnError:
        assert folded is None
        return
    (line,) = fold_constants(attngen_specialized(kernel)).scores
    assert print_expr(line) == folded


def attngen_specialized(kernel: attngen.Kernel) -> Any:
    from attngen.ir.types import FP32
    from attngen.passes.specialize import specialize

    return specialize(kernel.attention, FP32, 64, 64)


@pytest.mark.parametrize(
    "body",
    [
        "let n = abs(kv - q) * Dqk\nscore s + n * n\nmask n < 100",
        "let n = abs(kv - q) * (1.0 + log(2.0))\nscore s + n * n\nscore s * n",
        "let n = tanh(s) * log(2.0)\nscore s + n * n\nscore s * n + n",
        "let n = exp(Dqk * 0.01) + Hq\nscale n\nscore s + n\nweights softmax(sink = n)",
    ],
)
def test_a_let_that_several_lines_use_stays_one_let(body: str) -> None:
    kernel = attngen.compile_text(f"attention a {{\ndtype fp32\nhead_dim 64\n{body}\n}}\n")
    kernel.render()


@pytest.mark.parametrize("b", [-3, -1, 0, 1, 3, 2**62])
@pytest.mark.parametrize("a", [-(2**62), -7, -3, 0, 4, 2**63 - 1])
def test_division_of_constants_floors(a: int, b: int) -> None:
    for op, right in ((BinaryOp.FLOORDIV, a // b if b else 0), (BinaryOp.MOD, a % b if b else 0)):
        folded = fold_expr(Binary(op, Const(a), Const(b)))
        assert isinstance(folded, Const)
        assert folded.value == right


def test_a_mask_that_is_always_true_is_no_mask() -> None:
    attention = variant(mask=Const(True))
    assert fold_constants(attention).mask is None
    false = variant(mask=Const(False))
    assert fold_constants(false) is false


@pytest.mark.parametrize(
    "name", ["exp", "tanh", "floor", "bit", "max", "clamp", "rsqrt", "sigmoid"]
)
def test_calls_of_constants_fold(name: str) -> None:
    floats = Const(0.5), Const(1.0), Const(2.0)
    count = FUNCTIONS[name].signature.count[0]
    e = call(name, *((Const(5), Const(2)) if name == "bit" else floats[:count]))
    assert isinstance(e, Call)
    folded = fold_expr(e)
    assert isinstance(folded, Const)
    right = evaluate(e, {}, {}).data
    assert folded.value == pytest.approx(right.item(), rel=1e-6)
