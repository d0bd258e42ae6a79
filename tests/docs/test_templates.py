"""templates/README.md shows the context as it is, and the context is what the template uses."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from attngen.kernels import all_families, forward_simt
from attngen.resources import template_names

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "templates"
PAGE = TEMPLATES / "README.md"
CONTEXTS = {"forward_simt": forward_simt.Context}
_ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", re.MULTILINE)
_MEMBER = re.compile(r"\bc\.(\w+)")


def test_every_family_has_a_template_and_a_context() -> None:
    assert set(all_families()) == set(CONTEXTS)
    assert {n for n in template_names() if "/" not in n} == {f"{n}.cu.j2" for n in CONTEXTS}
    for name, family in all_families().items():
        assert family.templates[0] == f"{name}.cu.j2"
        assert all((TEMPLATES / file).is_file() for file in family.templates)


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_table_is_the_dataclass(name: str) -> None:
    section = PAGE.read_text("utf-8").split(f"## The context of `{name}`")[1].split("\n## ")[0]
    shown = [(field, kind.replace(r"\|", "|")) for field, kind, _ in _ROW.findall(section)]
    assert shown == [(field.name, field.type) for field in fields(CONTEXTS[name])]


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_is_what_the_template_uses(name: str) -> None:
    files = [f for f in all_families()[name].templates if f.endswith(".j2")]
    used = {m for f in files for m in _MEMBER.findall((TEMPLATES / f).read_text("utf-8"))}
    assert used == {field.name for field in fields(CONTEXTS[name])}


def test_every_file_is_described() -> None:
    text = PAGE.read_text("utf-8")
    files = {p.relative_to(TEMPLATES) for p in TEMPLATES.rglob("*") if p.is_file() and p != PAGE}
    assert all(f"| `{file}` |" in text for file in files)
