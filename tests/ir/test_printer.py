"""The canonical text: it says what the expression says, with no parenthesis too many."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
from expressions import INT_NAMES, random_expressions
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.ir.attention import Attention, Bound, Param, Tensor, TensorDim
from attngen.ir.digest import digest_attention
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
from attngen.ir.printer import print_attention, print_expr, print_number, print_program
from attngen.ir.program import (
    Axis,
    CeilDiv,
    Launch,
    Loop,
    MoreThan,
    Op,
    Program,
    Step,
    TileProgram,
    Workspace,
)
from attngen.ir.row_state import SOFTMAX, SOFTMAX_WITH_SINK
from attngen.ir.schedule import Schedule
from attngen.ir.semantics import evaluate
from attngen.ir.types import BF16, ELEMENTS, ScalarType
from attngen.ir.verify import verify_attention, verify_program

Q, KV, B = (Symbol(name, Role.INDEX, ScalarType.INT) for name in ("q", "kv", "b"))
S = Symbol("s", Role.SCORE, ScalarType.FLOAT)
ONE, TWO = Const(1), Const(2)


def op(sign: str, left: Expr, right: Expr) -> Binary:
    return Binary(BinaryOp(sign), left, right)


LESS = Compare(CompareOp.LT, Q, KV)


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (op("-", op("-", Q, KV), B), "q - kv - b"),
        (op("-", Q, op("-", KV, B)), "q - (kv - b)"),
        (op("+", Q, op("+", KV, B)), "q + (kv + b)"),
        (op("*", op("+", Q, KV), B), "(q + kv) * b"),
        (op("+", Q, op("*", KV, B)), "q + kv * b"),
        (op("%", op("//", Q, KV), B), "q // kv % b"),
        (op("//", Q, op("%", KV, B)), "q // (kv % b)"),
        (Negate(op("*", Q, KV)), "-(q * kv)"),
        (op("*", Negate(Q), KV), "-q * kv"),
        (op("-", Q, Negate(KV)), "q - -kv"),
        (Negate(Negate(Q)), "-(-q)"),
        (op("-", Q, Const(-1)), "q - -1"),
        (Not(LESS), "not q < kv"),
        (Not(Not(LESS)), "not not q < kv"),
        (Compare(CompareOp.EQ, LESS, LESS), "(q < kv) == (q < kv)"),
        (Compare(CompareOp.EQ, Not(LESS), LESS), "(not q < kv) == (q < kv)"),
        (Logical(LogicalOp.AND, (LESS, Logical(LogicalOp.OR, (LESS, LESS)))),
         "q < kv and (q < kv or q < kv)"),
        (Logical(LogicalOp.OR, (LESS, Logical(LogicalOp.AND, (LESS, LESS)))),
         "q < kv or q < kv and q < kv"),
        (Not(Logical(LogicalOp.AND, (LESS, LESS))), "not (q < kv and q < kv)"),
        (Select(LESS, S, Const(0.0)), "where(q < kv, s, 0.0)"),
        (op("/", ToFloat(Q), Const(2.0)), "float(q) / 2.0"),
        (Load("t", (op("+", Q, ONE), B), ScalarType.INT), "t[q + 1, b]"),
        (call("min", Q, TWO), "min(q, 2)"),
        (Let("x", LESS), "let x = q < kv\nx"),
    ],
)  # fmt: skip
def test_expressions(e: Expr, text: str) -> None:
    assert print_expr(e) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (-3, "-3"),
        (10**30, str(10**30)),
        (0.1, "0.1"),
        (1 / 3, "0.33333334"),
        (float(np.float32(1 / 3)), "0.33333334"),
        (50.0, "50.0"),
        (-0.0, "-0.0"),
        (1e-20, "1e-20"),
        (1e300, "inf"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value: Any, text: str) -> None:
    assert print_number(value) == text


@given(st.floats(width=32, allow_nan=False))
def test_a_printed_float_is_the_same_float(value: float) -> None:
    assert np.float32(float(print_number(value))) == np.float32(value)


# ---- against Python's own grammar, which the language shares ----------------------------


def python_value(text: str, values: dict[str, Any]) -> Any:
    env = {
        **values,
        "true": True,
        "false": False,
        "where": lambda c, a, b: a if c else b,
        "bit": lambda w, i: 0 <= i < 64 and bool((w >> i) & 1),
        "clamp": lambda x, low, high: min(max(x, low), high),
    }
    *lets, last = text.splitlines()
    for line in lets:
        name, value = line.removeprefix("let ").split(" = ", 1)
        env[name.replace(".", "_")] = eval(value.replace(".", "_"), env)
    return eval(last.replace(".", "_"), env)


@settings(max_examples=300)
@given(random_expressions(), st.lists(st.integers(-4, 9), min_size=4, max_size=4), st.booleans())
def test_the_text_means_what_the_expression_means(e: Expr, numbers: list[int], on: bool) -> None:
    values = {**dict(zip(INT_NAMES, numbers, strict=True)), "on": on}
    try:
        expected = python_value(print_expr(e), values)
    except ZeroDivisionError:  # 0 in the language
        return
    symbols = {n: np.bool_(v) if n == "on" else np.int64(v) for n, v in values.items()}
    found = evaluate(e, symbols, {}).data
    assert found == expected


@settings(max_examples=300)
@given(random_expressions())
def test_no_parenthesis_can_be_left_out(e: Expr) -> None:
    for line in print_expr(e).replace(".", "_").splitlines():
        text = line.split(" = ", 1)[-1]
        tree = ast.dump(ast.parse(text, mode="eval"))
        for start, end in parentheses(text):
            shorter = text[:start] + " " + text[start + 1 : end] + " " + text[end + 1 :]
            try:
                other = ast.dump(ast.parse(shorter.strip(), mode="eval"))
            except SyntaxError:
                continue
            # `-(-q)` keeps them, because `--q` reads badly.
            assert other != tree or text[start - 1 : start + 2] == "-(-"


def parentheses(text: str) -> list[tuple[int, int]]:
    """Pairs that group, and call nothing."""
    stack: list[int] = []
    pairs: list[tuple[int, int]] = []
    for at, c in enumerate(text):
        if c == "(":
            stack.append(at)
        elif c == ")":
            start = stack.pop()
            is_call = start > 0 and (text[start - 1].isalnum() or text[start - 1] == "_")
            pairs += [] if is_call else [(start, at)]
    return pairs


@given(random_expressions())
def test_printing_is_stable(e: Expr) -> None:
    assert print_expr(e) == print_expr(e)


# ---- sharing -----------------------------------------------------------------------------


def test_lets_are_printed_once_in_the_order_of_need() -> None:
    x = Let("x", op("+", Q, KV))
    y = Let("y", op("*", x, x))
    assert print_expr(op("-", y, x)) == "let x = q + kv\nlet y = x * x\ny - x"


def test_two_lets_of_one_name_are_told_apart() -> None:
    first, second = Let("x", Q), Let("x", KV)
    assert print_expr(op("-", first, second)) == "let x = q\nlet x.2 = kv\nx - x.2"
    assert print_expr(op("-", Let("kv", Q), KV)) == "let kv.2 = q\nkv.2 - kv"


def test_shared_nodes_do_not_blow_up() -> None:
    e: Expr = op("+", Q, KV)
    for _ in range(200):
        e = op("*", e, e)
    text = print_expr(e)
    assert len(text) < 20_000
    assert text.splitlines()[0].startswith("let shared = ")


def test_depth_is_no_limit() -> None:
    e: Expr = Q
    for _ in range(5000):
        e = Negate(e)
    assert print_expr(e).count("-") == 5000


# ---- attention ---------------------------------------------------------------------------


def variant(**changes: Any) -> Attention:
    same = Let("same", Compare(CompareOp.EQ, Q, KV))
    fields: dict[str, Any] = {
        "name": "example",
        "dtype": BF16,
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "heads_q": 8,
        "heads_kv": 2,
        "params": (
            Param("w", ScalarType.INT, 3, Bound(1, 2**31, False, True)),
            Param("cap", ScalarType.FLOAT, None, Bound(0.0, None, True)),
        ),
        "tensors": (
            Tensor("doc", ELEMENTS["int32"], (TensorDim("B", False), TensorDim("Skv", False))),
            Tensor("t", ELEMENTS["fp32"], (TensorDim("NW", True), TensorDim(7, False))),
            Tensor("u", ELEMENTS["bool"], (TensorDim("NW", False),)),
        ),
        "length_q": None,
        "length_kv": Load("doc", (B, Const(0)), ScalarType.INT),
        "scale": Const(0.5),
        "scores": (op("+", S, ToFloat(Q)), S),
        "mask": Logical(LogicalOp.AND, (same, Not(same))),
        "row_state": SOFTMAX_WITH_SINK,
        "sink": Const(0.0),
        "outputs": ("o", "lse"),
    }
    return Attention(**{**fields, **changes})


TEXT = """attention example {
    dtype     bf16
    head_dim  qk = 192, v = 128
    heads     q = 8, kv = 2
    param     w : int = 3 where 1 <= w < 2147483648
    param     cap : float where 0.0 < cap
    tensor    doc : int32[B, Skv]
    tensor    t : fp32[NW?, 7]
    tensor    u : bool[NW]
    length    kv = doc[b, 0]
    scale     0.5
    score     s + float(q)
    score     s
    let       same = q == kv
    mask      same and not same
    sink      0.0
    weights   softmax_with_sink
    output    o, lse
}
"""


def test_attention() -> None:
    assert print_attention(variant()) == TEXT
    assert verify_attention(variant()) == []


def test_what_is_open_is_left_out() -> None:
    nothing = {"dtype": None, "head_dim_qk": None, "head_dim_v": None, "heads_q": None}
    a = variant(
        **nothing, heads_kv=None, params=(), tensors=(), length_kv=None, scores=(), mask=None,
        row_state=SOFTMAX, sink=None,
    )  # fmt: skip
    assert print_attention(a) == (
        "attention example {\n    scale     0.5\n    weights   softmax\n    output    o, lse\n}\n"
    )


def test_the_digest_does_not_see_spans_and_source() -> None:
    assert digest_attention(variant(source="x")) == digest_attention(variant())
    assert digest_attention(variant(scale=Const(0.25))) != digest_attention(variant())


# ---- what the verifier finds -------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": Const(1)}, "scale: is int, not float"),
        ({"scale": S}, "scale: s is not visible here"),
        ({"mask": Compare(CompareOp.LT, S, Const(0.0))}, "mask: s is not visible here"),
        ({"sink": ToFloat(KV)}, "sink: kv is not visible here"),
        ({"length_kv": Q}, "length kv: q is not visible here"),
        ({"scores": (op("+", S, Q),)}, "operands of different types: float, int"),
        ({"scores": (op("/", Q, Q),)}, "operands are int, not float"),
        ({"mask": op("//", S, S)}, "operands are float, not int"),
        ({"mask": Not(Q)}, "operands are int, not bool"),
        ({"mask": Logical(LogicalOp.AND, (LESS,))}, "has one operand"),
        ({"mask": Compare(CompareOp.LT, LESS, LESS)}, "operands are bool, not int or float"),
        ({"scores": (ToFloat(S),)}, "operands are float, not int"),
        ({"scores": (Negate(LESS),)}, "operands are bool"),
        ({"mask": Select(Q, LESS, LESS)}, "operands are int, not bool"),
        ({"mask": Select(LESS, LESS, Q)}, "different types: bool, int"),
        ({"scores": (call("exp", Q),)}, "operands are int, not float"),
        ({"scores": (Const(2**63),)}, "does not fit 64 bits"),
        ({"scores": (Load("t", (B,), ScalarType.FLOAT),)}, "1 indices for 2 dimensions"),
        ({"scores": (Load("doc", (B, Q), ScalarType.FLOAT),)}, "elements are int"),
        ({"scores": (Load("none", (B,), ScalarType.FLOAT),)}, "there is no such tensor"),
        ({"scores": (Load("t", (B, S), ScalarType.FLOAT),)}, "different types: int, float"),
        ({"mask": Compare(CompareOp.LT, Symbol("x", Role.INDEX, ScalarType.INT), Q)},
         "index x : int does not exist"),
        ({"mask": Compare(CompareOp.LT, Symbol("w", Role.PARAM, ScalarType.FLOAT), S)},
         "param w : float does not exist"),
        ({"scores": (Symbol("m", Role.ROW, ScalarType.FLOAT),)}, "row m : float does not exist"),
        ({"mask": Logical(LogicalOp.OR, (Let("x", LESS), Let("x", LESS)))}, "two lets are called"),
        ({"heads_q": 7}, "7 query heads do not share 2"),
        ({"heads_q": None}, "one number of heads is given"),
        ({"head_dim_v": 300}, "head_dim v = 300 is outside 1..256"),
        ({"dtype": ELEMENTS["int8"]}, "dtype int8 is not a floating type"),
        ({"outputs": ("lse",)}, "o is not an output"),
        ({"outputs": ("o", "o")}, "outputs o, o are not a choice"),
        ({"sink": None}, "the sink do not fit together"),
        ({"params": (Param("w", ScalarType.INT, 0, Bound(1)),)}, "default of w is outside"),
        ({"params": (Param("w", ScalarType.INT, 1.0, Bound()),)}, "default of w is no int"),
        ({"params": (Param("doc", ScalarType.INT, 1, Bound()),)}, "the name doc is used twice"),
        ({"tensors": (Tensor("t", BF16, (TensorDim("N", True),)),)}, "only optional dimensions"),
        ({"tensors": (Tensor("t", BF16, (TensorDim(0, True),)),)}, "a dimension below 1"),
    ],
)  # fmt: skip
def test_verifier(changes: dict[str, Any], message: str) -> None:
    found = verify_attention(variant(**changes))
    assert any(message in problem for problem in found), found


# ---- programs ----------------------------------------------------------------------------

ONE_TILE = (
    Step(Op.LOAD_KEY), Step(Op.LOAD_VALUE), Step(Op.SCORES), Step(Op.MASK), Step(Op.RAISE_MAX),
    Step(Op.RESCALE_SUM), Step(Op.RESCALE_ACC), Step(Op.WEIGHTS), Step(Op.ADD_SUM),
    Step(Op.ACCUMULATE),
)  # fmt: skip
FUSED = (
    Loop(
        Axis.BATCH_HEAD,
        True,
        (
            Loop(
                Axis.Q,
                True,
                (
                    Step(Op.LOAD_QUERY),
                    Step(Op.INIT_STATE),
                    Loop(Axis.KV, False, ONE_TILE),
                    Step(Op.FINALIZE),
                ),
            ),
        ),
    ),
)


def launch(kernel: str = "main", body: Any = FUSED, **changes: Any) -> Launch:
    tiles = TileProgram(64, 32, body)
    facts = {"grid": ("B", "Hq"), "threads": 128, "shared_bytes": 4096, "workspaces": ()}
    return Launch(kernel, "forward_simt", tiles, **{**facts, **changes})


def program(body: Any = FUSED, **changes: Any) -> Program:
    return Program(variant(), Schedule(tile_q=64), (launch("main", body, **changes),))


SUMMARISE = (Loop(Axis.KV, True, (Step(Op.SUMMARISE_KEYS),)),)
ENDS = Workspace("ends", ("B", CeilDiv("keys", 1024)), "int32")
LONG = (MoreThan("keys", 4096), MoreThan("rows", 64))


def two_launches(main: Launch | None = None, **changes: Any) -> Program:
    """A launch that prepares, and the one of `program`."""
    facts = {"workspaces": (ENDS,), "when": LONG, "grid": ENDS.dims}
    first = launch("first", SUMMARISE, **{**facts, **changes})
    return Program(variant(), Schedule(tile_q=64), (first, main or launch()))


def test_launches_in_order() -> None:
    changed = two_launches()
    assert verify_program(changed) == []
    text = print_program(changed)
    assert "\nlaunch first\n" in text.partition("\nlaunch main\n")[0]
    assert (
        """
launch first
    family    forward_simt
    when      keys > 4096 and rows > 64
    tile      q = 64, kv = 32
    grid      B * ceil_div(keys, 1024)
    threads   128
    shared    4096 bytes
    workspace ends : int32[B, ceil_div(keys, 1024)]
    parallel for kv
        summarise_keys
"""
        in text
    )
    assert changed.main.kernel == "main"
    assert changed.workspaces == (ENDS,)


def test_program() -> None:
    text = print_program(program(workspaces=(Workspace("state", ("B", "Hq", "Sq", 3)),)))
    assert (
        text
        == """program example
    schedule  loop q, kv; passes fused; normalize last; tile_q 64; tile_kv auto; stages auto; \
warps auto; splits auto; kernel auto

launch main
    family    forward_simt
    tile      q = 64, kv = 32
    grid      B * Hq
    threads   128
    shared    4096 bytes
    workspace state : fp32[B, Hq, Sq, 3]
    parallel for batch_head
        parallel for q
            load_query
            init_state
            for kv
                load_key
                load_value
                scores
                mask
                raise_max
                rescale_sum
                rescale_acc
                weights
                add_sum
                accumulate
            finalize
"""
    )
    assert verify_program(program()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (program(threads=100), "100 threads are not 1 to 32 whole warps"),
        (program(shared_bytes=-1), "shared memory is negative"),
        (program(workspaces=(Workspace("w", ("B", 0)),)), "workspace w has a dimension below 1"),
        (program((Loop(Axis.Q, False, FUSED),)), "the parallel loop over batch_head stands inside"),
        (program((Loop(Axis.Q, True, FUSED),)), "a loop over q inside another one"),
        (program((Loop(Axis.Q, True, ()),)), "the loop over q is empty"),
        (program((Step(Op.FINALIZE),)), "finalize stands outside of the loop over q"),
        (program((Step(Op.WEIGHTS),)), "weights comes before mask"),
        (program((Step(Op.LOAD_STATE), *FUSED)), "a workspace that does not exist"),
        (program(()), "there is no finalize"),
        (Program(variant(), Schedule(), ()), "there is no launch"),
        (program(grid=("B", "X")), "its grid has the dimension X, which is no size"),
        (program(grid=(CeilDiv("X", 8),)), "its grid has the dimension X, which is no size"),
        (program(grid=(CeilDiv("rows", 0),)), "its grid has a dimension below 1"),
        (program(grid=()), "its grid has no dimension"),
        (program(when=LONG), "the last launch, which writes the outputs, is left out of some"),
        (two_launches(workspaces=()), "what it finds of keys goes into a workspace that does not"),
        (two_launches(when=(MoreThan("X", 1),)), "its condition names X, which is no size"),
        (two_launches(launch(workspaces=(ENDS,))), "two workspaces are called ends"),
        (
            program(workspaces=(Workspace("w", ("B",), "int16"),)),
            "workspace w has elements of int16",
        ),
        (program((Step(Op.SUMMARISE_KEYS),)), "summarise_keys stands outside of the loop over kv"),
        (Program(variant(), Schedule(), program().launches * 2), "two kernels are called main"),
        (Program(variant(heads_q=7), Schedule(), program().launches), "attention: 7 query heads"),
    ],
)
def test_program_verifier(changed: Program, message: str) -> None:
    found = verify_program(changed)
    assert any(message in problem for problem in found), found
