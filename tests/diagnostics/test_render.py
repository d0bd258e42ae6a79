"""What a diagnostic looks like, with toy errors about a zoo."""

from __future__ import annotations

import json
import pickle
import textwrap
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.diagnostics.diagnostic import AttnError, Diagnostic, Note
from attngen.diagnostics.render import render_plain, render_rich, to_json
from attngen.diagnostics.span import Source, Span


class Escaped(Diagnostic):
    code = "Z101"
    title = "the {animal} has escaped"
    label = "last seen here"
    hint = "try {bait}"
    animal: str = "lion"
    bait: str | None = "meat"
    cage: Span | None = None
    keeper: str | None = None

    def notes(self) -> tuple[Note, ...]:
        notes = [Note("its cage", self.cage)] if self.cage else []
        return (*notes, Note(self.keeper, None)) if self.keeper else tuple(notes)


def mark(text: str, *wanted: str, name: str = "zoo.attn") -> list[Span]:
    source = Source(name, text)
    return [source.span(text.index(w), text.index(w) + len(w)) for w in wanted]


def picture(diagnostic: Diagnostic) -> str:
    return "\n" + render_plain(diagnostic) + "\n"


def drawn(text: str) -> str:
    return textwrap.dedent(text)


def test_one_line() -> None:
    (lion,) = mark("the zoo\nhas a lion in it\n", "lion")
    assert picture(Escaped(lion)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:2:7
          |
        2 | has a lion in it
          |       ^^^^ last seen here
          |
        hint: try meat
        """)


def test_without_hint() -> None:
    (lion,) = mark("lion", "lion")
    assert picture(Escaped(lion, bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:1
          |
        1 | lion
          | ^^^^ last seen here
        """)


def test_without_a_place() -> None:
    assert picture(Escaped(None, keeper="the keeper sleeps")) == drawn("""
        error[Z101]: the lion has escaped
        note: last seen here
        note: the keeper sleeps
        hint: try meat
        """)


def test_notes_elsewhere() -> None:
    text = "\n" * 8 + "a cage\n\na lion\n"
    lion, cage = mark(text, "lion", "cage")
    assert picture(Escaped(lion, cage=cage, keeper="the keeper sleeps")) == drawn("""
        error[Z101]: the lion has escaped
          --> zoo.attn:11:3
           |
        11 | a lion
           |   ^^^^ last seen here
           |
         9 | a cage
           |   ---- its cage
           |
        note: the keeper sleeps
        hint: try meat
        """)


def test_notes_in_another_file() -> None:
    (lion,) = mark("lion", "lion")
    (cage,) = mark("cage", "cage", name="plan.attn")
    assert picture(Escaped(lion, cage=cage, bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:1
          |
        1 | lion
          | ^^^^ last seen here
         --> plan.attn:1:1
          |
        1 | cage
          | ---- its cage
        """)


def test_two_places_on_one_line() -> None:
    lion, cage = mark("a cage and a lion here", "lion", "cage")
    assert picture(Escaped(lion, cage=cage, bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:14
          |
        1 | a cage and a lion here
          |   ----       ^^^^ last seen here
          |   its cage
        """)
    lion, cage = mark("a lion and a cage here", "lion", "cage")
    assert picture(Escaped(lion, cage=cage, bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:3
          |
        1 | a lion and a cage here
          |   ^^^^       ---- its cage
          |   last seen here
        """)


def test_overlapping_places_get_two_pictures() -> None:
    lion, cage = mark("a lion in a cage", "lion in a cage", "a cage")
    assert picture(Escaped(lion, cage=cage, bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:3
          |
        1 | a lion in a cage
          |   ^^^^^^^^^^^^^^ last seen here
          |
        1 | a lion in a cage
          |           ------ its cage
        """)


def test_several_lines() -> None:
    (lions,) = mark("a lion and\n    another lion,\nboth gone", "lion and\n    another lion")
    assert picture(Escaped(lions, bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:3
          |
        1 | a lion and
          |   ^^^^^^^^
        2 |     another lion,
          |     ^^^^^^^^^^^^ last seen here
        """)


def test_many_lines_lose_their_middle() -> None:
    text = "\n".join(f"lion {i}" for i in range(1, 10))
    assert picture(Escaped(Source("zoo.attn", text).span(0, len(text)), bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:1
          |
        1 | lion 1
          | ^^^^^^
        2 | lion 2
          | ^^^^^^
          ...
        9 | lion 9
          | ^^^^^^ last seen here
        """)


def test_the_end_of_the_text() -> None:
    source = Source("zoo.attn", "a lion")
    assert picture(Escaped(source.span(6, 6), bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:7
          |
        1 | a lion
          |       ^ last seen here
        """)


def test_tabs_and_wide_characters() -> None:
    (lion,) = mark("\ta\t獅子 e\u0301 \u202elion\x00 gone", "lion")
    assert picture(Escaped(lion, bait=None)) == drawn("""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:11
          |
        1 |     a   獅子 e\u0301 lion\N{REPLACEMENT CHARACTER} gone
          |                ^^^^ last seen here
        """)


def test_a_long_line_is_shown_in_part() -> None:
    (lion,) = mark("x " * 200 + "lion" + " y" * 200, "lion")
    shown = "…" + "x " * 20 + "lion" + " y" * 28 + "…"
    assert picture(Escaped(lion, bait=None)) == drawn(f"""
        error[Z101]: the lion has escaped
         --> zoo.attn:1:401
          |
        1 | {shown}
          |                                          ^^^^ last seen here
        """)


@given(st.text(st.sampled_from("ab \t獅e\u0301\u200d\x07…"), max_size=150), st.data())
def test_carets_stand_under_the_span(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    lines = render_plain(Escaped(Source("zoo.attn", text).span(start, end))).split("\n")
    shown, carets = lines[3], lines[4].removesuffix(" last seen here")
    indent, width = carets.index("^"), carets.count("^")
    assert carets == "  | " + " " * (indent - 4) + "^" * width
    if len(text) <= 100:
        prefix = "".join(cells(text[:start]))
        assert indent - 4 == column(text, start)
        assert width == max(1, column(text, end) - column(text, start)), prefix
    assert sum(map(cell_width, shown.rstrip())) <= 250


def column(text: str, offset: int) -> int:
    """The terminal column of an offset, computed the slow way."""
    at = 0
    for character in text[:offset]:
        at += 4 - at % 4 if character == "\t" else cell_width(character)
    return at


def cells(text: str) -> list[str]:
    return [c for c in text if cell_width(c)]


def cell_width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def test_rich_shows_the_same_text() -> None:
    lion, cage = mark("a cage and a lion here", "lion", "cage")
    diagnostic = Escaped(lion, cage=cage)
    text = render_rich(diagnostic)
    assert "\n".join(line.rstrip() for line in text.plain.split("\n")) == render_plain(diagnostic)
    assert {str(span.style) for span in text.spans} >= {"bold red", "red", "cyan", "green", "blue"}


def test_json() -> None:
    text = "the\ncage and a lion"
    lion, cage = mark(text, "lion", "cage")
    data = to_json(Escaped(lion, cage=cage))
    assert json.loads(json.dumps(data)) == {
        "severity": "error",
        "code": "Z101",
        "message": "the lion has escaped",
        "label": "last seen here",
        "hint": "try meat",
        "place": {
            "file": "zoo.attn",
            "start": 15,
            "end": 19,
            "line": 2,
            "column": 12,
            "end_line": 2,
            "end_column": 16,
        },
        "notes": [
            {
                "label": "its cage",
                "place": {
                    "file": "zoo.attn",
                    "start": 4,
                    "end": 8,
                    "line": 2,
                    "column": 1,
                    "end_line": 2,
                    "end_column": 5,
                },
            }
        ],
    }
    assert to_json(Escaped(None, bait=None))["place"] is None


def test_the_exception_shows_all_its_diagnostics() -> None:
    (lion,) = mark("lion", "lion")
    error = AttnError(Escaped(lion), Escaped(None))
    assert str(error) == f"{render_plain(Escaped(lion))}\n\n{render_plain(Escaped(None))}"


def test_the_exception_survives_pickling() -> None:
    (lion,) = mark("lion", "lion")
    error = AttnError(Escaped(lion), Escaped(None))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)


@pytest.mark.parametrize("module", ["attngen.diagnostics.render", "attngen.frontend.parse"])
def test_rich_is_not_imported_for_plain_text(module: str) -> None:
    import subprocess
    import sys

    code = f"import {module}, sys; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
