"""The canonical form: examples in `tests/data/format`, and small cases one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.diagnostics.span import Source
from attngen.frontend import ast
from attngen.frontend.format import format_expr, format_file
from attngen.frontend.parse import parse

DATA = Path(__file__).parent.parent / "data" / "format"
CASES = sorted(DATA.glob("*.attn"))


def formatted(text: str) -> str:
    return format_file(parse(Source("test.attn", text)))


def assert_stable(text: str) -> str:
    """The canonical text, after checking that it means the same and does not change again."""
    once = formatted(text)
    assert parse(Source("once.attn", once)) == parse(Source("text.attn", text))
    assert formatted(once) == once
    return once


def statement(line: str) -> str:
    text = assert_stable(f"attention a {{\n{line}\n}}\n")
    return text.removeprefix("attention a {\n").removesuffix("}\n")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_examples(path: Path, update_data: bool) -> None:
    shown = assert_stable(path.read_text(encoding="utf-8"))
    expected = path.with_suffix(".formatted")
    if update_data:
        expected.write_text(shown, encoding="utf-8")
    assert shown == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("(((a)))", "a"),
        ("((a)+((b)))*c", "(a + b) * c"),
        ("(a*b)+c", "a * b + c"),
        ("a-(b-c)", "a - (b - c)"),
        ("(a-b)-c", "a - b - c"),
        ("a+(b+c)", "a + (b + c)"),
        ("(-a)**2", "(-a)**2"),
        ("-(a**2)", "-a**2"),
        ("2 ** -a", "2**-a"),
        ("2**(-(a**b))", "2**-a**b"),
        ("(a**b)**c", "(a**b)**c"),
        ("a**(b**c)", "a**b**c"),
        ("a**(b*c)", "a**(b * c)"),
        ("-(a*b)", "-(a * b)"),
        ("-a*b", "-a * b"),
        ("a*-b", "a * -b"),
        ("--a", "--a"),
        ("not(a)", "not a"),
        ("not(a==b)", "not a == b"),
        ("not(a or b)", "not (a or b)"),
        ("a==(not b)", "a == (not b)"),
        ("(a<b)<c", "(a < b) < c"),
        ("a<b<c", "a < b < c"),
        ("(a and b)or c", "a and b or c"),
        ("a and(b or c)", "a and (b or c)"),
        ("(a or b)or c", "(a or b) or c"),
        ("f( a,b = c , )", "f(a, b = c)"),
        ("f()", "f()"),
        ("t[ i , j,]", "t[i, j]"),
        ("-inf", "-inf"),
        ("1.50E+3", "1.50E+3"),
    ],
)
def test_expressions(text: str, canonical: str) -> None:
    assert statement(f"score {text}") == f"    score     {canonical}\n"
    (attention,) = parse(Source("t", f"attention a {{ score {text} }}")).items
    assert isinstance(attention, ast.Attention)
    (score,) = attention.statements
    assert isinstance(score, ast.Score)
    assert format_expr(score.value) == canonical


@pytest.mark.parametrize(
    ("line", "canonical"),
    [
        ("head_dim qk=64,v=64", "    head_dim  64\n"),
        ("head_dim v=64,qk=128", "    head_dim  qk = 128, v = 64\n"),
        ("heads kv=1,q=2", "    heads     q = 2, kv = 1\n"),
        ("const W:int=3", "    const     W : int = 3\n"),
        ("param w:int=2 where w>1", "    param     w : int = 2 where w > 1\n"),
        ("tensor t:float[B?,3]", "    tensor    t : float[B?, 3]\n"),
        ("length kv=kl[b]", "    length    kv = kl[b]\n"),
        ("weights softmax(sink=t[h])", "    weights   softmax(sink = t[h])\n"),
        ("output o,lse", "    output    o, lse\n"),
    ],
)
def test_statements(line: str, canonical: str) -> None:
    assert statement(line) == canonical


def test_long_lines_are_broken_inside_of_brackets() -> None:
    long = " + ".join(f"term_{i}[b, q, kv]" for i in range(40))
    for line in (
        f"score where({long}, {long}, s)",
        f"score s + f({long})",
        f"score {long}",
        f"mask not ({long} < 3 or {long} < 4 and kv == 0)",
        f"let x = -({long})**({long})",
        f"param w : int = {long} where {long} < 3",
        f"length q = {long}, kv = {long}",
        f"weights softmax(sink = {long})",
        f"tensor t : int32[{', '.join(['Skv'] * 40)}]",
    ):
        text = statement(line)
        assert max(map(len, text.splitlines())) <= 96, text
    parameters = ", ".join(f"parameter_{i} : int" for i in range(20))
    text = assert_stable(f"define f({parameters}) : float = {long}")
    assert max(map(len, text.splitlines())) <= 96, text


def test_a_long_chain_is_quick() -> None:
    chain = " or ".join(f"kv == {i} and q < {i} + 3" for i in range(2000))
    assert len(assert_stable(f"attention a {{\nmask {chain}\n}}").splitlines()) == 2004


def test_no_comment_is_lost() -> None:
    text = (
        '# 0\nimport "a.attn" # 1\n# 2\ndefine f(a : int, # 3\n b : int) : int = a # 4\n\n'
        "attention a # 5\n# 6\n{ # 7\n# 8\nmask ( # 9\na) # 10\n# 11\n} # 12\n"
        "schedule { # 13\n} # 14\n# 15\n\n# 16"
    )
    canonical = assert_stable(text)
    assert [int(part.split()[0]) for part in canonical.split("# ")[1:]] == [
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
    ]  # fmt: skip


def test_blank_lines() -> None:
    assert formatted("\n\nattention a {\n\n\nmask x\n\n\n\nmask y\n\n}\n\n\n\n\nschedule {\n}") == (
        "attention a {\n    mask      x\n\n    mask      y\n}\n\nschedule {\n}\n"
    )
    definitions = "define a : int = 1\ndefine b : int = 2\n\ndefine c : int = 3\n"
    assert formatted(definitions) == definitions


def test_comments_behind_statements_stand_in_one_column() -> None:
    assert formatted(
        "attention a {\nmask x # 1\ndtype bf16\nmask xyz # 2\n\nmask x # 3\n# 4\nmask xy # 5\n}"
    ) == (
        "attention a {\n"
        "    mask      x    # 1\n"
        "    dtype     bf16\n"
        "    mask      xyz  # 2\n"
        "\n"
        "    mask      x  # 3\n"
        "    # 4\n"
        "    mask      xy  # 5\n"
        "}\n"
    )
