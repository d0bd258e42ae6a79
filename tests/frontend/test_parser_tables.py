"""A parser whose tables come from the disk cache is the parser of the grammar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lark
import pytest

from attngen import resources
from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.span import Source
from attngen.frontend import parse as parse_module
from attngen.frontend.parse import parse

ROOT = Path(__file__).resolve().parents[2]
TEXTS = sorted(
    [*(ROOT / "examples").glob("*.attn"), *(ROOT / "tests/data/errors").glob("a1*.attn")],
    key=lambda path: path.name,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and no parser yet."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ATTNGEN_CACHE", raising=False)
    parse_module._lark.cache_clear()
    yield tmp_path
    parse_module._lark.cache_clear()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that tables are made of."""
    made: list[str] = []
    real = lark.Lark.__init__

    def build(self: lark.Lark, grammar: str, **options: object) -> None:
        made.append(grammar)
        real(self, grammar, **options)

    monkeypatch.setattr(lark.Lark, "__init__", build)
    return made


def parse_anew(text: str = "attention a {\n    mask kv <= q\n}\n") -> str:
    """What a new parser makes of a text: the tree with all places, or the errors."""
    parse_module._lark.cache_clear()
    return parse_again(text)


def parse_again(text: str) -> str:
    try:
        return repr(parse(Source("x.attn", text)))
    except AttnError as error:
        return str(error)


def list_tables(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.tables"))


def test_tables_are_made_once(folder: Path, builds: list[str]) -> None:
    assert parse_anew() == parse_anew()
    assert builds == [resources.grammar_text()]
    assert len(list_tables(folder)) == 1


def test_every_text_is_parsed_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [path.read_text(encoding="utf-8") for path in TEXTS]
    assert len(texts) > 40
    monkeypatch.setenv("ATTNGEN_CACHE", "0")
    parse_anew()
    expected = [parse_again(text) for text in texts]
    monkeypatch.setenv("ATTNGEN_CACHE", "1")
    parse_anew()  # stores the tables
    parse_anew()
    assert [parse_again(text) for text in texts] == expected


def test_another_grammar_has_tables_of_its_own(
    folder: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse_anew()
    changed = resources.grammar_text().replace('MASK:      "mask"', 'MASK:      "sees"')
    monkeypatch.setattr(resources, "grammar_text", lambda: changed)
    assert "`mask`" in parse_anew()
    assert "`mask`" not in parse_anew("attention a {\n    sees kv <= q\n}\n")
    assert len(builds) == len(list_tables(folder)) == 2


def test_damaged_tables_are_made_again(folder: Path, builds: list[str]) -> None:
    right = parse_anew()
    (tables,) = list_tables(folder)
    whole = tables.read_bytes()
    tables.write_bytes(whole[:-9] + b"0" + whole[-8:])
    assert parse_anew() == right
    assert parse_anew() == right
    assert len(builds) == 2


def test_without_a_cache_nothing_is_kept(
    folder: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", "0")
    assert parse_anew() == parse_anew()
    assert len(builds) == 2
    assert list_tables(folder) == []
