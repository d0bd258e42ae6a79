"""Offsets, lines and columns agree with one another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.diagnostics.span import LINE_END, Location, Source, Span

texts = st.text(st.sampled_from("ab \t\r\n漢é"), max_size=40)


@given(texts, st.data())
def test_location_is_the_inverse_of_an_offset(text: str, data: st.DataObject) -> None:
    source = Source("test.attn", text)
    offset = data.draw(st.integers(0, len(text)))
    location = source.location(offset)
    assert location.line >= 1
    assert location.column >= 1
    assert source.line_start(location.line) + location.column - 1 == offset


@given(texts)
def test_lines_are_those_of_python(text: str) -> None:
    source = Source("test.attn", text)
    lines = LINE_END.split(text)
    assert [source.line(i + 1) for i in range(len(lines))] == lines
    assert lines[: len(text.splitlines())] == text.splitlines()


@given(texts, st.data())
def test_locations_grow_with_the_offset(text: str, data: st.DataObject) -> None:
    source = Source("test.attn", text)
    a = data.draw(st.integers(0, len(text)))
    b = data.draw(st.integers(a, len(text)))
    assert source.location(a) <= source.location(b)


@given(texts, st.data())
def test_a_span_covers_its_parts(text: str, data: st.DataObject) -> None:
    source = Source("test.attn", text)
    bounds = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted)
    one, other = (source.span(*data.draw(bounds)) for _ in range(2))
    both = one.to(other)
    assert both == other.to(one)
    assert one.text in both.text
    assert other.text in both.text
    assert both.first == min(one.first, other.first)


@pytest.mark.parametrize(
    ("text", "offset", "line", "column"),
    [
        ("", 0, 1, 1),
        ("ab", 2, 1, 3),
        ("a\nb", 1, 1, 2),
        ("a\nb", 2, 2, 1),
        ("a\r\nb", 3, 2, 1),
        ("a\rb", 2, 2, 1),
        ("a\n", 2, 2, 1),
    ],
)
def test_location(text: str, offset: int, line: int, column: int) -> None:
    assert Source("test.attn", text).location(offset) == Location(line, column)


def test_an_empty_span_has_its_place_as_last() -> None:
    span = Source("test.attn", "abc").span(1, 1)
    assert span.text == ""
    assert span.first == span.last == Location(1, 2)


def test_sources_are_told_apart_by_identity() -> None:
    one, other = Source("test.attn", "a"), Source("test.attn", "a")
    assert one != other
    assert Span(one, 0, 1) == Span(one, 0, 1)
    assert Span(one, 0, 1) != Span(other, 0, 1)
