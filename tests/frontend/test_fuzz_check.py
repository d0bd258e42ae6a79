"""Whatever the text: a valid variant that means what the oracle says, or errors with a place."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.render import render_plain
from attngen.frontend import ast
from attngen.frontend.check import Checked, check
from attngen.frontend.load import load_text
from attngen.ir.digest import digest_attention
from attngen.ir.printer import print_attention
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import postorder
from attngen.ir.verify import verify_attention
from attngen.oracle.evaluate import Scope
from attngen.oracle.evaluate import evaluate as evaluate_oracle
from attngen.oracle.values import Value

# ---- soup: any names and types -----------------------------------------------------------

ATOMS = [
    "b", "h", "hkv", "q", "kv", "qpos", "s", "B", "Hq", "Skv", "Sq", "Dqk", "W", "X", "w", "cap",
    "on", "t", "u", "early", "late", "t[b]", "t[kv]", "u[h, 0]", "u[h, N]", "N", "0", "1", "2",
    "2.5", "-1", "1e30", "9**9", "inf", "true", "false", "causal", "window", "f", "g", "foo",
]  # fmt: skip
CALLS = [
    "f(%s)", "f(%s, y = %s)", "g(%s)", "g(%s, up)", "h2(t, %s)", "h2(%s, t)", "window(%s)",
    "window(left = %s, right = %s)", "causal(top_left = %s)", "softcap(%s, %s)", "document(t)",
    "alibi(%s)", "bucketed_bias(%s, u)", "exp(%s)", "min(%s, %s)", "max(%s, %s, %s)",
    "clamp(%s, %s, %s)", "floor(%s)", "abs(%s)", "bit(%s, %s)", "where(%s, %s, %s)", "sqrt(%s)",
    "(%s) + (%s)", "(%s) - (%s)", "(%s) * (%s)", "(%s) / (%s)", "(%s) // (%s)", "(%s) %% (%s)",
    "(%s) ** (%s)", "-(%s)", "not (%s)", "(%s) and (%s)", "(%s) or (%s)", "(%s) < (%s)",
    "(%s) == (%s)", "(%s) <= (%s) < (%s)", "t[%s]", "u[%s, %s]", "W(%s)", "q[%s]",
]  # fmt: skip


def call(template: str, arguments: list[str]) -> str:
    count = template.replace("%%", "").count("%s")
    return template % tuple(arguments[:count])


SOUP = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.builds(call, st.sampled_from(CALLS), st.lists(inner, min_size=3, max_size=3)),
    max_leaves=12,
)
DECLARATIONS = [
    "const W = 4", "const X : int = 3", "param w : int = 3 where 1 <= w < 2**31",
    "param cap : float where 1 <= cap < 50", "param on : bool", "tensor t : int32[Skv]",
    "tensor u : float[Hq, N]", "let early = kv - w", "const Y : float = 2",
]  # fmt: skip
STATEMENTS = [
    "let e2 = %s", "let late = %s", "score %s", "score %s", "mask %s", "mask %s", "scale %s",
    "length kv = %s", "length q = %s, kv = %s", "weights softmax(sink = %s)", "weights sigmoid",
    "const V = %s", "const V2 : int = %s", "const V3 : float", "param w2 : int = %s",
    "param w3 : int = 3 where %s", "param c2 : float where 1 <= c2 < %s", "param on2 : bool",
    "param p : float = %s where %s < p", "tensor t2 : int32[B]", "tensor t3 : bool[Skv]",
    "tensor u2 : float[Hq, N?]", "tensor u3 : float[Hq?, M]", "tensor u4 : bf16[W, skv]",
    "head_dim %s", "head_dim qk = %s, v = 64", "heads q = %s, kv = %s", "dtype bf16",
    "dtype half", "output o, lse", "output lse", "output o, o",
]  # fmt: skip
DEFINITIONS = [
    "define f(x : float, y : float = 1.0) : float = %s",
    "define f(x : int) : int = where(x > 3, f(x - 1), %s)",
    "define g(x : int, up : flag) : bool = %s",
    "define h2(u : tensor, x : int) : float = %s",
    "define f : bool = %s",
    "define f(x : float) : wrong = %s",
    "define causal(x : bool) : bool = %s",
]
SETTINGS = ["tile q = %s, kv = auto", "warps %s", "passes fused", "loop kv, q", "stages %s", "x 3"]


@st.composite
def programs(draw: st.DrawFn) -> str:
    def lines(templates: list[str], most: int) -> list[str]:
        chosen = draw(st.lists(st.sampled_from(templates), max_size=most))
        return [call(line, [draw(SOUP) for _ in range(3)]) for line in chosen]

    return "\n".join(
        [
            *lines(DEFINITIONS, 3),
            "attention a {",
            *(line for line in DECLARATIONS if draw(st.integers(0, 19))),
            *lines(STATEMENTS, 4),
            "}",
            "schedule {",
            *lines(SETTINGS, 3),
            "}",
        ]
    )


@settings(max_examples=150)
@given(programs(), st.dictionaries(st.sampled_from(["W", "Y"]), st.sampled_from([1, 2.5, True])))
def test_soup(text: str, consts: dict[str, Any]) -> None:
    result, errors = checked(text, consts)
    for diagnostic in errors:
        assert render_plain(diagnostic)
        if diagnostic.span is not None:
            assert diagnostic.span.end <= len(diagnostic.span.source.text)
    if result is not None:
        assert_sound(text, result)


def checked(text: str, consts: Any = None) -> tuple[Checked | None, tuple[Diagnostic, ...]]:
    """The variant, or at least one error."""
    try:
        return check(load_text(text, "fuzz.attn"), consts=consts), ()
    except AttnError as error:
        return None, error.diagnostics


def assert_sound(text: str, result: Checked) -> None:
    """Valid, complete, and the same again from its own canonical text."""
    attention = result.attention
    assert verify_attention(attention) == []
    assert len(attention.scores) == text.count("\nscore ")
    assert (attention.sink is not None) == ("sink = " in text)
    assert len(print_attention(attention)) < 100_000
    again = check(load_text(attention.source)).attention
    assert digest_attention(again) == digest_attention(attention)


# ---- typed expressions against the oracle ------------------------------------------------

INT_ATOMS = ["q", "kv", "b", "qpos", "Sq", "Skv", "W", "w", "i1", "0", "1", "2", "3", "-5", "7"]
BOOL_ATOMS = ["on", "b1", "true", "false", "q < kv", "kv <= qpos"]


@st.composite
def typed(draw: st.DrawFn, kind: str, depth: int) -> str:
    """An integer (`int`) or truth value (`bool`) in the language."""
    if depth == 0:
        return draw(st.sampled_from(INT_ATOMS if kind == "int" else BOOL_ATOMS))

    def some(kind: str) -> str:
        return draw(typed(kind, draw(st.integers(0, depth - 1))))

    if kind == "int":
        form = draw(
            st.sampled_from(
                [
                    "({i}) + ({i})", "({i}) - ({i})", "({i}) * ({i})", "({i}) // ({i})",
                    "({i}) % ({i})", "-({i})", "({i}) ** 2", "({i}) ** 0", "2 ** 3 ** 2 - ({i})",
                    "min({i}, {i}, {i})", "max({i}, {i})", "abs({i})", "clamp({i}, {i}, {i})",
                    "where({b}, {i}, {i})", "twice({i})", "mixed({i}, y = {i})",
                    "pick({i}, {i})", "pick({i}, {i}, second)", "floor({i})",
                ]
            )
        )  # fmt: skip
    else:
        form = draw(
            st.sampled_from(
                [
                    "({i}) < ({i})", "({i}) <= ({i}) < ({i})", "({i}) == ({i}) != ({i}) > ({i})",
                    "not ({b})", "({b}) and ({b})", "({b}) or ({b}) or ({b})", "({b}) == ({b})",
                    "({b}) != ({b})", "where({b}, {b}, {b})", "bit({i}, {i})", "within({i}, {i})",
                    "causal", "window({i}, {i})", "causal(top_left = 1 < 2)", "chunked(4)",
                ]
            )
        )  # fmt: skip
    parts = form.split("{")
    text = parts[0]
    for part in parts[1:]:
        text += some("int" if part[0] == "i" else "bool") + part[2:]
    return text


BEFORE = """define twice(x : int) : int = x + x * x
define mixed(x : int, y : int = 3) : int = twice(x - y) % 7 + y
define pick(x : int, y : int, second : flag) : int = where(second, y, x)
define within(x : int, y : int) : bool = -x <= kv - qpos <= twice(y)
"""


@settings(max_examples=150)
@given(typed("int", 2), typed("bool", 2), typed("bool", 4), st.integers(-3, 6), st.booleans())
def test_the_checker_and_the_oracle_agree(i1: str, b1: str, mask: str, w: int, on: bool) -> None:
    i1, b1 = (text.replace("i1", "kv").replace("b1", "on") for text in (i1, b1))
    text = (
        f"{BEFORE}attention a {{\nconst W = 4\nparam w : int\nparam on : bool\n"
        f"let i1 = {i1}\nlet b1 = {b1}\nmask {mask}\n}}"
    )
    result, errors = checked(text)
    if result is None:  # a constant that divides by zero, or a result that is too large
        assert {d.code for d in errors} <= {"A214", "A216"}
        return
    unit, attention = load_text(text), result.attention
    assert verify_attention(attention) == []
    sizes = {"B": 2, "Sq": 3, "Skv": 5}
    b, q, kv = np.ogrid[0:2, 0:3, 0:5]
    numbers: dict[str, Any] = {**sizes, "b": b, "q": q, "kv": kv, "qpos": q + 2, "w": w, "on": on}
    arrays = {name: np.asarray(value) for name, value in numbers.items()}
    found = True if attention.mask is None else evaluate(attention.mask, arrays, {}).data
    shared = {name: Value(value) for name, value in arrays.items() if name not in ("w", "on")}
    names: dict[str, Any] = {name: Value(arrays[name]) for name in ("w", "on")}
    names["W"] = Value(np.int64(4))
    scope = Scope(shared, unit.definitions, names)
    for statement in unit.attention.statements:
        if isinstance(statement, ast.Let):
            names[statement.name] = evaluate_oracle(statement.value, scope)
        elif isinstance(statement, ast.Mask):
            expected = evaluate_oracle(statement.value, scope)
    if any(np.any(where) for where in expected.faults.values()):
        return  # beyond 64 bits
    assert (np.broadcast_to(found, (2, 3, 5)) == expected.data).all()


def test_an_expression_is_never_longer_than_its_graph_allows() -> None:
    """Nested definitions that use their argument often stay small as text."""
    text = "s"
    for _ in range(60):
        text = f"f({text})"
    unit = load_text(
        f"define f(x : float) : float = x * x + tanh(x)\nattention a {{\n score {text}\n}}"
    )
    (score,) = check(unit).attention.scores
    assert len(list(postorder(score))) < 2000
    assert len(print_attention(check(unit).attention)) < 20_000
