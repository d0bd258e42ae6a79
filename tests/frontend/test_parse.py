"""The tree of a text: every construct, Python's precedence, and the places of things."""

from __future__ import annotations

import ast as python_ast
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.diagnostics.span import Source, Span
from attngen.frontend import ast
from attngen.frontend.build_ast import MAX_DEPTH, Builder
from attngen.frontend.format import format_file
from attngen.frontend.parse import _lark, parse
from attngen.frontend.tokens import RESERVED_WORDS, SCHEDULE_KEYS, STATEMENTS, TOP_LEVEL

NOWHERE = Source("nowhere", "").span(0, 0)


def tree(text: str) -> ast.File:
    return parse(Source("test.attn", text))


def statements(*lines: str) -> tuple[ast.Statement, ...]:
    (item,) = tree("\n".join(["attention a {", *lines, "}"])).items
    assert isinstance(item, ast.Attention)
    return item.statements


def statement(line: str) -> ast.Statement:
    (found,) = statements(line)
    return found


def expr(text: str) -> ast.Expr:
    found = statement(f"score {text}")
    assert isinstance(found, ast.Score)
    return found.value


def name(text: str) -> ast.Name:
    return ast.Name(text, NOWHERE)


def number(value: int) -> ast.Literal:
    return ast.Literal(value, str(value), NOWHERE)


# ---- every construct ---------------------------------------------------------------------


def test_imports_and_definitions() -> None:
    file = tree(
        'import "masks.attn"\n'
        "define half : float = 0.5\n"
        "define window(left : int, right : int = 0,) : bool = -left <= kv - qpos <= right\n"
    )
    masks, half, window = file.items
    assert masks == ast.Import("masks.attn", NOWHERE)
    assert isinstance(half, ast.Definition)
    assert (half.name, half.parameters, half.type) == ("half", (), "float")
    assert isinstance(window, ast.Definition)
    assert window.parameters == (
        ast.Parameter("left", "int", None, NOWHERE),
        ast.Parameter("right", "int", number(0), NOWHERE),
    )
    assert isinstance(window.body, ast.Comparison)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dtype bf16", ast.Dtype("bf16", NOWHERE)),
        ("head_dim 128", ast.HeadDim(number(128), number(128), NOWHERE)),
        ("head_dim qk = 192, v = 128", ast.HeadDim(number(192), number(128), NOWHERE)),
        ("head_dim v = 128, qk = 192", ast.HeadDim(number(192), number(128), NOWHERE)),
        ("heads q = 32, kv = 8", ast.Heads(number(32), number(8), NOWHERE)),
        ("const W = 4096", ast.Const("W", None, number(4096), NOWHERE, NOWHERE)),
        ("const W : int", ast.Const("W", "int", None, NOWHERE, NOWHERE)),
        ("const W : int = 1", ast.Const("W", "int", number(1), NOWHERE, NOWHERE)),
        ("param w : int", ast.Param("w", "int", None, None, NOWHERE, NOWHERE)),
        ("length kv = kl", ast.Length(None, name("kl"), NOWHERE)),
        ("length q = ql, kv = kl", ast.Length(name("ql"), name("kl"), NOWHERE)),
        ("let x = y", ast.Let("x", name("y"), NOWHERE, NOWHERE)),
        ("scale c", ast.Scale(name("c"), NOWHERE)),
        ("score s", ast.Score(name("s"), NOWHERE)),
        ("mask m", ast.Mask(name("m"), NOWHERE)),
        ("weights softmax", ast.Weights("softmax", None, NOWHERE)),
        ("weights softmax(sink = t)", ast.Weights("softmax", name("t"), NOWHERE)),
        ("output o, lse, row_max", ast.Output(("o", "lse", "row_max"), NOWHERE)),
    ],
)
def test_statements(line: str, expected: ast.Statement) -> None:
    assert statement(line) == expected


def test_param_with_range() -> None:
    param = statement("param w : int = 256 where 1 <= w < 2**31")
    assert isinstance(param, ast.Param)
    assert param.default == number(256)
    assert isinstance(param.range, ast.Comparison)
    assert param.range.ops == ("<=", "<")


def test_tensor_dimensions() -> None:
    tensor = statement("tensor bias : float[B?, Hq?, Sq, 64,]")
    assert isinstance(tensor, ast.Tensor)
    assert [(d.size, d.optional) for d in tensor.dims] == [
        ("B", True), ("Hq", True), ("Sq", False), (64, False),
    ]  # fmt: skip


def test_schedules_take_any_key() -> None:
    base, hopper = tree(
        "schedule {\n loop q, kv\n kernel forward_simt\n flag\n}\n"
        "schedule sm_90a { tile q = auto, kv = 128 }\n"
    ).items
    assert isinstance(base, ast.Schedule)
    assert isinstance(hopper, ast.Schedule)
    assert (base.target, hopper.target) == (None, "sm_90a")
    assert [setting.key for setting in base.settings] == ["loop", "kernel", "flag"]
    assert hopper.settings[0].arguments == (
        ast.Argument("q", name("auto"), NOWHERE),
        ast.Argument("kv", number(128), NOWHERE),
    )


def test_constants_and_numbers() -> None:
    assert expr("true") == ast.Literal(True, "true", NOWHERE)
    infinity, not_a_number = expr("inf"), expr("nan")
    assert isinstance(infinity, ast.Literal)
    assert infinity.value == math.inf
    assert isinstance(not_a_number, ast.Literal)
    assert math.isnan(not_a_number.value)
    assert not_a_number == expr("nan")
    for text in ("0", "12", "0.5", ".5", "1.", "1e3", "2.5E-3"):
        literal = expr(text)
        assert isinstance(literal, ast.Literal)
        assert (literal.value, literal.text) == (python_ast.literal_eval(text), text)
        assert type(literal.value) is type(python_ast.literal_eval(text))


FREE_WORDS = "where q kv tile loop auto any lambda transform"


@pytest.mark.parametrize("word", [*TOP_LEVEL, *STATEMENTS, *FREE_WORDS.split()])
def test_words_are_names_where_no_statement_begins(word: str) -> None:
    assert expr(word) == name(word)
    assert statement(f"let {word} = 1") == ast.Let(word, number(1), NOWHERE, NOWHERE)
    call = expr(f"{word}({word}[{word}], {word} = {word})")
    assert isinstance(call, ast.Call)
    assert call.name == word
    assert tree(f"attention {word} {{ }}").items[0] == ast.Attention(word, (), NOWHERE, NOWHERE)


def test_where_is_function_and_word() -> None:
    param = statement("param w : int = where(a, 1, 2) where where(a, w > 1, true)")
    assert isinstance(param, ast.Param)
    assert isinstance(param.default, ast.Call)
    assert isinstance(param.range, ast.Call)


# ---- lines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "attention a{mask x}",
        "attention a { mask x\n}",
        "attention a {\n\n\n  mask x\n\n\n}\n\n\n",
        "attention a\n{\n\tmask\tx\n}",
        "attention a {\r\n  mask x\r\n}\r\n",
        "attention a {\r  mask x\r}\r",
        "\ufeffattention a {\n  mask (\n x\n )\n}",
        "# c\nattention a { # c\n  mask x # c\n} # c",
    ],
)
def test_line_ends(text: str) -> None:
    expected = ast.Attention("a", (ast.Mask(name("x"), NOWHERE),), NOWHERE, NOWHERE)
    assert tree(text).items == (expected,)


def test_comments_are_kept() -> None:
    file = tree(
        "# top\n\n# of a\nattention a {  # behind a\n\n"
        "  # above x\n  mask (x  # inside\n  )  # behind x\n\n  mask y\n  # last\n}  # after\n"
        "\n# end"
    )
    (attention,) = file.items
    assert isinstance(attention, ast.Attention)
    x, y = attention.statements
    assert attention.comments == ast.Comments(("# top", "", "# of a"), "# behind a", False)
    assert x.comments == ast.Comments(("# above x", "# inside"), "# behind x", True)
    assert y.comments == ast.Comments((), None, True)
    assert attention.closing == ("# last", "# after")
    assert file.closing == ("", "# end")


# ---- expressions -------------------------------------------------------------------------

_OPERATORS = {
    python_ast.Add: "+", python_ast.Sub: "-", python_ast.Mult: "*", python_ast.Div: "/",
    python_ast.FloorDiv: "//", python_ast.Mod: "%", python_ast.Pow: "**",
    python_ast.USub: "-", python_ast.UAdd: "+", python_ast.Not: "not",
    python_ast.Lt: "<", python_ast.LtE: "<=", python_ast.Gt: ">", python_ast.GtE: ">=",
    python_ast.Eq: "==", python_ast.NotEq: "!=", python_ast.And: "and", python_ast.Or: "or",
}  # fmt: skip


def from_python(node: python_ast.expr) -> ast.Expr:
    """Python's own tree of an expression, in our classes."""
    match node:
        case python_ast.Constant(value=int(value)):
            return number(value)
        case python_ast.Name(id=identifier):
            return name(identifier)
        case python_ast.UnaryOp():
            op = _OPERATORS[type(node.op)]
            return ast.Unary(op, from_python(node.operand), NOWHERE)
        case python_ast.BinOp():
            op = _OPERATORS[type(node.op)]
            return ast.Binary(op, from_python(node.left), from_python(node.right), NOWHERE)
        case python_ast.Compare():
            ops = tuple(_OPERATORS[type(op)] for op in node.ops)
            operands = (node.left, *node.comparators)
            return ast.Comparison(ops, tuple(map(from_python, operands)), NOWHERE)
        case python_ast.BoolOp():
            op = _OPERATORS[type(node.op)]
            return ast.BoolOp(op, tuple(map(from_python, node.values)), NOWHERE)
        case python_ast.Subscript(value=python_ast.Name(id=tensor)):
            parts = node.slice.elts if isinstance(node.slice, python_ast.Tuple) else [node.slice]
            return ast.Index(tensor, tuple(map(from_python, parts)), NOWHERE, NOWHERE)
        case python_ast.Call(func=python_ast.Name(id=function)):
            arguments = [ast.Argument(None, from_python(a), NOWHERE) for a in node.args]
            arguments += [ast.Argument(k.arg, from_python(k.value), NOWHERE) for k in node.keywords]
            return ast.Call(function, tuple(arguments), NOWHERE, NOWHERE)
    raise AssertionError(python_ast.dump(node))


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = ["**", *(f" {op} " for op in _OPERATORS.values() if op not in ("not", "**"))]
    return st.one_of(
        st.tuples(inner, st.sampled_from(binary), inner).map("".join),
        st.tuples(st.sampled_from(["-", "+", "not "]), inner).map("".join),
        inner.map("({})".format),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"t[{', '.join(parts)}]"),
        st.lists(inner, max_size=3).map(lambda parts: f"f({', '.join(parts)})"),
        inner.map("f(q, x = {})".format),
    )


@given(st.recursive(st.sampled_from(["q", "kv", "1", "2"]), combine, max_leaves=25))
def test_precedence_is_python_s(text: str) -> None:
    try:
        expected = from_python(python_ast.parse(text, mode="eval").body)
    except SyntaxError:  # `a == not b`
        with pytest.raises(Exception, match="expected"):
            expr(text)
    else:
        assert expr(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "0 <= q - kv < 9 or kv < 2 and not q % 2 == 1",
        "-2**2*0.01*kv + s",
        "2**-1**2",
        "2**3**2",
        "a - b - c",
        "a // b % c * d",
        "not not a == b",
        "a == (u or b == v)",
        "- - a",
        "(a or b) or c",
    ],
)
def test_precedence_by_example(text: str) -> None:
    assert python_ast.dump(to_python(expr(text))) == python_ast.dump(
        python_ast.parse(text, mode="eval").body
    )


def to_python(node: ast.Expr) -> python_ast.expr:
    """The other way round: through Python's grammar, fully parenthesised."""
    return python_ast.parse(parenthesised(node), mode="eval").body


def parenthesised(node: ast.Expr) -> str:
    match node:
        case ast.Literal():
            return node.text
        case ast.Name():
            return node.name
        case ast.Unary():
            return f"({node.op} {parenthesised(node.operand)})"
        case ast.Binary():
            return f"({parenthesised(node.left)} {node.op} {parenthesised(node.right)})"
        case ast.Comparison():
            first, *others = map(parenthesised, node.operands)
            return (
                f"({first} {' '.join(f'{op} {o}' for op, o in zip(node.ops, others, strict=True))})"
            )
        case ast.BoolOp():
            return f"({f' {node.op} '.join(map(parenthesised, node.operands))})"
        case _:
            raise AssertionError(node)


def test_long_flat_chains() -> None:
    chain = expr(" or ".join(f"kv == {i}" for i in range(2000)))
    assert isinstance(chain, ast.BoolOp)
    assert len(chain.operands) == 2000
    comparison = expr(" <= ".join(["a"] * 2000))
    assert isinstance(comparison, ast.Comparison)
    call = expr(f"max({', '.join(['a'] * 2000)})")
    assert isinstance(call, ast.Call)


def test_parentheses_leave_no_node_and_no_limit() -> None:
    assert expr("(" * 500 + "q" + ")" * 500) == name("q")
    assert expr("(" * 5000 + "q" + ")" * 5000) == name("q")


def test_the_deepest_tree_can_be_compared_hashed_and_shown() -> None:
    nested = {
        "call": "f(" * (MAX_DEPTH // 2 - 1) + "q" + ")" * (MAX_DEPTH // 2 - 1),
        "index": "t[" * (MAX_DEPTH - 1) + "q" + "]" * (MAX_DEPTH - 1),
        "sum": " + ".join(["q"] * MAX_DEPTH),
        "logic": "(a or (b and " * (MAX_DEPTH // 2 - 1) + "c" + "))" * (MAX_DEPTH // 2 - 1),
    }
    for text in nested.values():
        one, other = expr(text), expr(text)
        assert one == other
        assert hash(one) == hash(other)
        assert repr(one)


# ---- spans -------------------------------------------------------------------------------


def test_spans_cover_what_was_written() -> None:
    file = tree("attention a {\n  mask  (a + b) * f(c)  # x\n}  # y\n")
    (attention,) = file.items
    assert isinstance(attention, ast.Attention)
    assert attention.span.text.startswith("attention")
    assert attention.span.text.endswith("}")
    assert attention.name_span.text == "a"
    (mask,) = attention.statements
    assert mask.span.text == "mask  (a + b) * f(c)"
    assert isinstance(mask, ast.Mask)
    assert isinstance(mask.value, ast.Binary)
    assert mask.value.span.text == "(a + b) * f(c)"
    assert mask.value.left.span.text == "a + b"
    assert mask.value.right.span.text == "f(c)"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("weights softmax(sink = t)  ", "weights softmax(sink = t)"),
        ("tensor t : int32[B, Skv?] # c", "tensor t : int32[B, Skv?]"),
        ("param w : int = (3) where (w > 1)", "param w : int = (3) where (w > 1)"),
        ("heads q = 1, kv = (2)", "heads q = 1, kv = (2)"),
    ],
)
def test_statement_spans(line: str, text: str) -> None:
    assert statement(line).span.text == text


def test_spans_lie_inside_one_another() -> None:
    def check(node: object, outer: Span) -> None:
        span = getattr(node, "span", outer)
        assert outer.start <= span.start <= span.end <= outer.end
        for field in getattr(node, "__slots__", ()):
            value = getattr(node, field)
            for child in value if isinstance(value, tuple) else (value,):
                if type(child).__module__ == ast.__name__:
                    check(child, span)

    file = tree(
        "attention a {\n  score where(kv <= q < -t[b, (q)], s * 2, -inf)\n  heads q=1, kv=2\n}"
    )
    check(file, file.span)


# ---- the grammar -------------------------------------------------------------------------


def test_every_rule_has_a_builder_method() -> None:
    for rule in _lark().rules:
        callback = rule.alias or rule.options.template_source or rule.origin.name
        if not callback.startswith("_") and not (rule.options.expand1 and not rule.alias):
            assert hasattr(Builder, callback), callback


def test_the_language_page_is_true() -> None:
    page = (Path(__file__).parents[2] / "grammar" / "README.md").read_text("utf-8")
    (example,) = re.findall(r"```attn\n(.*?)```", page, flags=re.DOTALL)
    assert format_file(tree(example)) == example
    words = {*TOP_LEVEL, *STATEMENTS, *SCHEDULE_KEYS, *RESERVED_WORDS}
    assert {word for word in words if not re.search(rf"\b{word}\b", page)} == set()
