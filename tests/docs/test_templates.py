"""templates/README.md shows the contexts as they are, and a context is what its template uses."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from attngen.codegen.forward_context import ForwardContext
from attngen.kernels import all_families
from attngen.resources import template_names

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "templates"
PAGE = TEMPLATES / "README.md"
CONTEXTS = {n: import_module(f"attngen.kernels.{n}").Context for n in all_families()}
SHARED = [field.name for field in fields(ForwardContext)]
_ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", re.MULTILINE)
_MEMBER = re.compile(r"\bc\.(\w+)")


def shown(heading: str) -> list[tuple[str, str]]:
    """Fields and types of the table below a heading."""
    section = PAGE.read_text("utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return [(name, kind.replace(r"\|", "|")) for name, kind, _ in _ROW.findall(section)]


def used_by(name: str) -> set[str]:
    """Members of `c` that a family's template and its macros mention."""
    files = [file for file in all_families()[name].templates if file.endswith(".j2")]
    return {m for f in files for m in _MEMBER.findall((TEMPLATES / f).read_text("utf-8"))}


def test_every_family_has_a_template_of_its_name() -> None:
    assert {n for n in template_names() if "/" not in n} == {f"{n}.cu.j2" for n in CONTEXTS}
    for name, family in all_families().items():
        assert family.templates[0] == f"{name}.cu.j2"
        assert all((TEMPLATES / file).is_file() for file in family.templates)


def test_the_shared_table_is_the_dataclass() -> None:
    found = [(field.name, field.type) for field in fields(ForwardContext)]
    assert shown("The context of every forward kernel") == found
    assert set(SHARED) <= set().union(*(used_by(name) for name in CONTEXTS))


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_table_of_a_family_is_the_dataclass(name: str) -> None:
    own = [field for field in fields(CONTEXTS[name]) if field.name not in SHARED]
    assert shown(f"The context of `{name}`") == [(field.name, field.type) for field in own]
    names = {field.name for field in own}
    assert names <= used_by(name) <= names | set(SHARED)


def test_every_file_is_described() -> None:
    text = PAGE.read_text("utf-8")
    files = {p.relative_to(TEMPLATES) for p in TEMPLATES.rglob("*") if p.is_file() and p != PAGE}
    assert all(f"| `{file}` |" in text for file in files)
