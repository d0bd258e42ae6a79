"""Every syntax error of the language, as the reader sees it: `tests/data/errors/*.attn`, `.err`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Source
from attngen.frontend import errors
from attngen.frontend.parse import parse

DATA = Path(__file__).parent.parent / "data" / "errors"
CASES = sorted(DATA.glob("a1*.attn"))
CLASSES: list[type[Diagnostic]] = [getattr(errors, name) for name in errors.__all__]

WHOLE = "\n".join(
    [
        "attention a {",
        "    dtype     bf16",
        "    mask      window(",
        "        left = 3,",
        "        right = 0",
        "    ) and kv <= q",
        "    weights   softmax(sink = sink[h])",
        "}",
        "",
        "schedule sm_90a {",
        "    tile      q = 128, kv = auto",
        "}",
        "",
    ]
)


def errors_of(text: str) -> tuple[Diagnostic, ...]:
    try:
        parse(Source("test.attn", text))
    except AttnError as error:
        return error.diagnostics
    return ()


def fail(text: str) -> tuple[Diagnostic, ...]:
    found = errors_of(text)
    assert found
    return found


def only(text: str) -> Diagnostic:
    (diagnostic,) = fail(text)
    return diagnostic


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_messages(path: Path, update_data: bool) -> None:
    with pytest.raises(AttnError) as caught:
        parse(Source(path.name, path.read_text(encoding="utf-8")))
    expected = path.with_suffix(".err")
    shown = f"{caught.value}\n"
    if update_data:
        expected.write_text(shown, encoding="utf-8")
    assert shown == expected.read_text(encoding="utf-8")


def test_no_expected_file_is_orphaned() -> None:
    assert {p.stem for p in DATA.glob("a1*.err")} <= {p.stem for p in CASES}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_a_case(cls: type[Diagnostic]) -> None:
    assert any(f"error[{cls.code}]" in p.with_suffix(".err").read_text("utf-8") for p in CASES)


def test_codes_are_unique_and_exported() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(code.startswith("A1") for code in codes)
    defined = {cls for cls in Diagnostic.__subclasses__() if cls.__module__ == errors.__name__}
    assert {cls.__name__ for cls in defined} == set(errors.__all__)


# ---- where a text ends too early (conformance O39) ---------------------------------------


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("indent", ["    ", "\t"], ids=["blanks", "tabs"])
def test_cut_anywhere(line_end: str, indent: str) -> None:
    whole = WHOLE.replace("    ", indent).replace("\n", line_end)
    parse(Source("whole.attn", whole))
    parse(Source("whole.attn", whole.rstrip()))
    started = time.perf_counter()
    for end in range(len(whole)):
        text = whole[:end]
        found = errors_of(text)
        assert len(found) <= 1
        for diagnostic in found:
            assert_inside(diagnostic, text)
            assert "_NL" not in diagnostic.message()
    assert time.perf_counter() - started < 60


def assert_inside(diagnostic: Diagnostic, text: str) -> None:
    spans = [diagnostic.span, *(note.span for note in diagnostic.notes())]
    for span in spans:
        assert span is not None
        assert 0 <= span.start <= span.end <= len(text)
        first = span.first
        assert 1 <= first.line <= max(1, len(text.splitlines()))
        assert 1 <= first.column <= len(span.source.line(first.line)) + 1


@pytest.mark.parametrize(
    ("text", "line", "column", "expected"),
    [
        ("attention a {\n  mask kv <=", 2, 13, "an expression"),
        ("attention a {\r\n\tmask\tkv <=\r\n", 2, 12, "an expression"),
        ("attention a {\n  mask", 2, 7, "an expression"),
        ("attention a {\n  param x :", 2, 12, "a type"),
        ("attention a {\n  output o,\n\n\n", 2, 12, "a name"),
        ("attention a", 1, 12, "`{`"),
        ("define f : int =", 1, 17, "an expression"),
    ],
)
def test_truncation_points_at_the_end(text: str, line: int, column: int, expected: str) -> None:
    error = only(text)
    assert isinstance(error, errors.ExpectedOther)
    assert error.expected == expected
    assert error.found == "the text ends here"
    assert error.span is not None
    assert (error.span.first.line, error.span.first.column) == (line, column)


def test_unclosed_bracket_shows_where_it_was_opened() -> None:
    error = only("attention a {\n  mask (kv <=\n   3\n  + 4")
    assert isinstance(error, errors.UnclosedBracket)
    assert error.span is not None
    assert error.span.first.line == 4
    (note,) = error.notes()
    assert note.span is not None
    assert (note.span.text, note.span.first.line, note.span.first.column) == ("(", 2, 8)


def test_unclosed_block_is_reported_once() -> None:
    error = only("attention a {\n  mask kv <= q\n  # that is all\n")
    assert isinstance(error, errors.UnclosedBracket)
    assert error.opening.text == "{"


@pytest.mark.parametrize("text", ["", "\n", " \t\r\n \r", "\ufeff", "\ufeff\n\n"])
def test_empty_program(text: str) -> None:
    assert isinstance(only(text), errors.EmptyProgram)


@pytest.mark.parametrize("text", ["#", "# a\n", "\n\n  # a\r\n\t# b"])
def test_only_comments(text: str) -> None:
    assert isinstance(only(text), errors.OnlyComments)


# ---- several errors in one run -----------------------------------------------------------


def test_every_bad_statement_is_reported_and_no_good_one() -> None:
    lines = ["attention a {"]
    for i in range(30):
        lines += [f"    mask      kv <= {i}", f"    mask      kv <= {i} {i}"]
    found = fail("\n".join([*lines, "}"]))
    assert [d.span.first.line for d in found if d.span] == list(range(3, 63, 2))


def test_errors_are_in_the_order_of_the_text() -> None:
    found = fail((DATA / "a115_unknown_statement.attn").read_text("utf-8"))
    starts = [d.span.start for d in found if d.span]
    assert starts == sorted(starts)


def test_garbage_stops_after_a_hundred_errors() -> None:
    assert len(fail("@\n" * 1000)) == 100


# ---- depth (conformance O40) -------------------------------------------------------------


@pytest.mark.parametrize(
    "expr",
    [
        " + ".join(["s"] * 2000),
        " - ".join(["s"] * 2000),
        "**".join(["s"] * 2000),
        "-" * 2000 + "s",
        "not " * 2000 + "s",
        "f(" * 2000 + "s" + ")" * 2000,
        "t[" * 2000 + "s" + "]" * 2000,
        "(a or (b and " * 2000 + "c" + "))" * 2000,
        "f(" * 200 + "s",
    ],
)
def test_too_deep(expr: str) -> None:
    found = fail(f"attention a {{\n    score {expr}\n}}\n")
    assert isinstance(found[0], errors.TooDeep | errors.UnclosedBracket)
    assert len(found) == 1
