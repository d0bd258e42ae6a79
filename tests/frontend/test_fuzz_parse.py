"""Whatever the text: a tree, or errors with a place inside the text.  Never a traceback."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.render import render_plain, to_json
from attngen.diagnostics.span import Source
from attngen.frontend import ast
from attngen.frontend.format import format_expr, format_file
from attngen.frontend.parse import parse
from attngen.frontend.tokens import RESERVED_WORDS, STATEMENTS, TOP_LEVEL

DATA = Path(__file__).parent.parent / "data"
PROGRAMS = [
    path.read_text(encoding="utf-8")
    for path in sorted([*(DATA / "format").glob("*.attn"), *(DATA / "errors").glob("a1*.attn")])
]
_SIGNS = """( ( ) ) [ [ ] ] { { } } , : = == <= < != ! & && | + - * ** / // % ? . ; @ ≤ " '"""
_OTHERS = "where tile loop transform True if else lambda q kv s x 0 1 2.5 1e9 007"
_ODD = ("\n", "\n", "\r\n", "\r", "\t", "# c", '"a.attn"', "\u202e", "\x00", "\ufeff")
WORDS = [
    *TOP_LEVEL,
    *STATEMENTS,
    *RESERVED_WORDS,
    *_SIGNS.split(),
    *_OTHERS.split(),
    *_ODD,
]

NOWHERE = Source("nowhere", "").span(0, 0)


def check(text: str) -> None:
    source = Source("fuzz.attn", text)
    try:
        file = parse(source)
    except AttnError as error:
        check_errors(source, error.diagnostics)
    else:
        once = format_file(file)
        again = parse(Source("once.attn", once))
        assert again == file
        assert format_file(again) == once


def check_errors(source: Source, diagnostics: tuple[Diagnostic, ...]) -> None:
    assert diagnostics
    for diagnostic in diagnostics:
        for span in (diagnostic.span, *(note.span for note in diagnostic.notes())):
            assert span is not None
            assert span.source is source
            assert 0 <= span.start <= span.end <= len(source.text)
        assert "_NL" not in diagnostic.message()
        assert render_plain(diagnostic)
        assert to_json(diagnostic)


@given(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join))
def test_token_soup(text: str) -> None:
    check(text)


@given(st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join))
def test_token_soup_in_a_block(text: str) -> None:
    check(f"attention a {{\n{text}\n}}\nschedule {{\n}}\n")


@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    check(text)


@given(st.data())
def test_mutated_programs(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(PROGRAMS))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        insert = data.draw(st.sampled_from(["", "", text[start:end] * 2, *WORDS]))
        text = text[:start] + insert + text[end:]
    check(text)


# ---- from tree to text and back ----------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,8}", fullmatch=True).filter(
    lambda name: name not in (*RESERVED_WORDS, "True", "False")
)
integers = st.integers(0, 2**40).map(lambda n: ast.Literal(n, str(n), NOWHERE))
floats = st.floats(0, 1e30).map(lambda x: ast.Literal(x, repr(x), NOWHERE))
constants = st.sampled_from(
    [("true", True), ("false", False), ("inf", math.inf), ("nan", math.nan)]
).map(lambda pair: ast.Literal(pair[1], pair[0], NOWHERE))
leaves = st.one_of(integers, floats, constants, names.map(lambda name: ast.Name(name, NOWHERE)))


def several(
    inner: st.SearchStrategy[ast.Expr], least: int
) -> st.SearchStrategy[tuple[ast.Expr, ...]]:
    return st.lists(inner, min_size=least, max_size=4).map(tuple)


def arguments_of(inner: st.SearchStrategy[ast.Expr]) -> st.SearchStrategy[ast.Argument]:
    return st.builds(ast.Argument, st.none() | names, inner, st.just(NOWHERE))


def grow(inner: st.SearchStrategy[ast.Expr]) -> st.SearchStrategy[ast.Expr]:
    here = st.just(NOWHERE)
    arguments = st.lists(arguments_of(inner), max_size=4).map(tuple)
    binary = st.sampled_from(["+", "-", "*", "/", "//", "%", "**"])
    compare = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    return st.one_of(
        st.builds(ast.Index, names, several(inner, 1), here, here),
        st.builds(ast.Call, names, arguments, here, here),
        st.builds(ast.Unary, st.sampled_from(["-", "+", "not"]), inner, here),
        st.builds(ast.Binary, binary, inner, inner, here),
        st.builds(ast.BoolOp, st.sampled_from(["and", "or"]), several(inner, 2), here),
        several(inner, 2).flatmap(
            lambda operands: st.lists(
                compare, min_size=len(operands) - 1, max_size=len(operands) - 1
            ).map(lambda ops: ast.Comparison(tuple(ops), operands, NOWHERE))
        ),
    )


exprs = st.recursive(leaves, grow, max_leaves=40)
small = st.recursive(leaves, grow, max_leaves=4)


@st.composite
def files(draw: st.DrawFn) -> ast.File:
    comment = st.from_regex(r"#( [ -~é漢]{0,20})?", fullmatch=True).map(str.rstrip)
    comments = st.builds(
        ast.Comments, st.lists(comment, max_size=2).map(tuple), st.none() | comment, st.booleans()
    )
    here, closing = st.just(NOWHERE), st.lists(comment, max_size=2).map(tuple)
    optional = st.none() | small
    dims = st.builds(ast.Dim, names | st.integers(0, 999), st.booleans(), here)
    const = st.one_of(
        st.builds(ast.Const, names, names, optional, here, here, comments),
        st.builds(ast.Const, names, st.none(), small, here, here, comments),
    )
    length = st.one_of(
        st.builds(ast.Length, small, optional, here, comments),
        st.builds(ast.Length, optional, small, here, comments),
    )
    statements = st.one_of(
        st.builds(ast.Dtype, names, here, comments),
        st.builds(ast.HeadDim, small, small, here, comments),
        st.builds(ast.Heads, small, small, here, comments),
        const,
        st.builds(ast.Param, names, names, optional, optional, here, here, comments),
        st.builds(
            ast.Tensor, names, names, st.lists(dims, min_size=1, max_size=9).map(tuple), here, here,
            comments,
        ),
        length,
        st.builds(ast.Let, names, small, here, here, comments),
        st.builds(ast.Scale, small, here, comments),
        st.builds(ast.Score, exprs, here, comments),
        st.builds(ast.Mask, exprs, here, comments),
        st.builds(ast.Weights, names, optional, here, comments),
        st.builds(ast.Output, st.lists(names, min_size=1, max_size=3).map(tuple), here, comments),
    )  # fmt: skip
    keys = names.filter(lambda name: name not in TOP_LEVEL)
    settings_ = st.builds(
        ast.Setting,
        keys,
        st.lists(arguments_of(small), max_size=3).map(tuple),
        here,
        here,
        comments,
    )
    parameters = st.builds(ast.Parameter, names, names, optional, here)
    items = st.one_of(
        st.builds(
            ast.Definition, names, st.lists(parameters, max_size=6).map(tuple), names, exprs, here,
            here, comments,
        ),
        st.builds(
            ast.Attention, names, st.lists(statements, max_size=5).map(tuple), here, here, comments,
            closing,
        ),
        st.builds(
            ast.Schedule, st.none() | names, st.lists(settings_, max_size=3).map(tuple), here,
            comments, closing,
        ),
    )  # fmt: skip
    paths = st.from_regex(r"[a-z./ é]{1,20}", fullmatch=True)
    imports = st.builds(ast.Import, paths, here, comments)
    first = draw(st.lists(imports, max_size=2))
    rest = draw(st.lists(items, min_size=0 if first else 1, max_size=3))
    return ast.File((*first, *rest), NOWHERE, draw(closing))


@given(files())
def test_round_trip(file: ast.File) -> None:
    text = format_file(file)
    again = parse(Source("again.attn", text))
    assert again == file
    assert format_file(again) == text
    assert sorted(all_comments(again)) == sorted(all_comments(file))


def all_comments(file: ast.File) -> list[str]:
    found = [*file.closing]
    for item in file.items:
        lines: list[ast.Statement | ast.Setting | ast.TopLevel] = [item]
        match item:
            case ast.Attention():
                lines += item.statements
                found += item.closing
            case ast.Schedule():
                lines += item.settings
                found += item.closing
        for line in lines:
            found += [*line.comments.above, line.comments.behind or ""]
    return [comment for comment in found if comment]


@given(exprs)
def test_expression_round_trip(expr: ast.Expr) -> None:
    text = format_expr(expr)
    assert "\n" not in text
    (item,) = parse(Source("again.attn", f"attention a {{ score {text} }}")).items
    assert isinstance(item, ast.Attention)
    assert item.statements == (ast.Score(expr, NOWHERE),)
