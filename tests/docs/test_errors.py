"""docs/errors.md and the error classes of the package belong to each other, one to one.

Every code has one class, one heading and at least one test that meets it.  Every example on the
page causes the error that it stands under, and no other.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import attngen
from attngen.cli import main
from attngen.diagnostics.diagnostic import AttnError, Diagnostic

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
TESTS = ROOT / "tests"

_STAGES = {"1", "2", "4", "5", "6", "7", "9"}
_WITHOUT_EXAMPLE = {"A101", "A123"}
"""Errors of a `.attn` text whose text is nothing, or too long for the page."""
_HEADING = re.compile(r"^### (A\d{3}): (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OPTIONS = re.compile(r"# attngen check (.*)\n")


@cache
def error_classes() -> tuple[type[Diagnostic], ...]:
    """Every class of the package that has a code, by code."""
    found: list[type[Diagnostic]] = []
    for entry in pkgutil.walk_packages(attngen.__path__, "attngen."):
        if entry.name.endswith("__main__") or entry.name in _NEED_MORE:
            continue
        module = importlib.import_module(entry.name)
        found += [
            cls
            for _, cls in inspect.getmembers(module, inspect.isclass)
            if issubclass(cls, Diagnostic) and cls.__module__ == entry.name and hasattr(cls, "code")
        ]
    return tuple(sorted(found, key=lambda cls: cls.code))


@dataclass(frozen=True)
class Section:
    """What the page says about one code."""

    code: str
    text: str

    def blocks(self, language: str) -> list[str]:
        return [block[2] for block in _BLOCK.finditer(self.text) if block[1] == language]


_NEED_MORE = ("attngen.torch", "attngen.transformers")
"""They need PyTorch or Transformers, and have no errors of their own."""


def sections() -> list[Section]:
    text = PAGE.read_text(encoding="utf-8")
    starts = list(_HEADING.finditer(text))
    ends = [following.start() for following in starts[1:]] + [len(text)]
    return [
        Section(start[1], text[start.end() : end].split("\n## ")[0])
        for start, end in zip(starts, ends, strict=True)
    ]


def _prelude() -> str:
    """What the calls of A6xx are made with."""
    opening = PAGE.read_text(encoding="utf-8").split("\n## A6xx")[1].split("\n### ")[0]
    (found,) = (block[2] for block in _BLOCK.finditer(opening))
    return found


SECTIONS = sections()
_PRELUDE = _prelude()
by_code = pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.code)


def test_every_code_has_one_class() -> None:
    count = Counter(cls.code for cls in error_classes())
    twice = {
        code: [cls.__qualname__ for cls in error_classes() if cls.code == code]
        for code, times in count.items()
        if times > 1
    }
    assert not twice
    assert all(re.fullmatch(r"A\d{3}", code) and code[1] in _STAGES for code in count)


def test_every_code_has_one_heading_in_order() -> None:
    documented = [section.code for section in SECTIONS]
    assert documented == [cls.code for cls in error_classes()]
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        stage = part[:2]
        assert all(heading[1].startswith(stage) for heading in _HEADING.finditer(part))


def test_a_class_of_the_syntax_or_the_checker_has_an_example() -> None:
    shown = {s.code for s in SECTIONS if s.blocks("attn") or s.blocks("py")}
    in_a_text = {
        cls.code
        for cls in error_classes()
        if cls.__module__.startswith("attngen.frontend") or cls.code == "A491"
    }
    assert in_a_text - shown == _WITHOUT_EXAMPLE


@by_code
def test_examples_cause_their_error(
    section: Section, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in section.blocks("attn"):
        path = tmp_path / "example.attn"
        path.write_text(text, encoding="utf-8")
        options = _OPTIONS.match(text)
        given = options[1].split() if options else []
        assert main(["check", "--json", str(path), *given]) == 2
        (file,) = json.loads(capsys.readouterr().out)["files"]
        assert {error["code"] for error in file["errors"]} == {section.code}


@by_code
def test_commands_cause_their_error(
    section: Section,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text in section.blocks("sh"):
        shutil.copytree(ROOT / "examples", tmp_path / "examples", dirs_exist_ok=True)
        shutil.copy(ROOT / "README.md", tmp_path)
        monkeypatch.chdir(tmp_path)
        for line in text.splitlines():
            program, *arguments = line.split()
            assert program == "attngen"
            assert main(arguments) == 2
            assert f"error[{section.code}]" in capsys.readouterr().err


@by_code
def test_calls_cause_their_error(section: Section) -> None:
    """The `py` blocks, each behind the one that opens its part of the page."""
    calls = section.blocks("py")
    if not calls:
        return
    names: dict[str, object] = {}
    exec(_PRELUDE, names)
    for call in calls:
        with pytest.raises(AttnError) as caught:
            exec(call, names)
        assert [found.code for found in caught.value.diagnostics] == [section.code]


def test_the_first_example_looks_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.attn").write_text("attention a {\n    mask      kv = q\n}\n", encoding="utf-8")
    assert main(["check", "spec.attn"]) == 2
    intro = PAGE.read_text(encoding="utf-8").split("\n## ")[0]
    (shown,) = (block[2] for block in _BLOCK.finditer(intro))
    assert capsys.readouterr().err.rstrip() == shown.rstrip()


def test_every_class_is_met_by_a_test() -> None:
    expected = "\n".join(p.read_text("utf-8") for p in (TESTS / "data" / "errors").glob("*.err"))
    tests = [p.read_text("utf-8") for p in TESTS.rglob("*.py") if p != Path(__file__)]
    on_the_page = {section.code for section in SECTIONS if _BLOCK.search(section.text)}
    missing = []
    for cls in error_classes():
        is_shown = f"error[{cls.code}]" in expected
        code, name = re.compile(rf"\b{cls.code}\b"), re.compile(rf"\b{cls.__name__}\b")
        is_named = any(
            code.search(text) or (cls.__module__ in text and name.search(text)) for text in tests
        )
        if not (is_shown or is_named or cls.code in on_the_page):
            missing.append(f"{cls.code} {cls.__module__}.{cls.__name__}")
    assert not missing
