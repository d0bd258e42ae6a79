"""Compiled templates in the disk cache: the same text, and the same errors."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

import attngen
from attngen import resources
from attngen.codegen import render as render_module
from attngen.codegen.render import render

TEMPLATE = "forward_simt.cu.j2"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and no template compiled yet."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNGEN_CACHE", raising=False)
    render_module._environment.cache_clear()
    yield tmp_path / "cache"
    render_module._environment.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the templates that are compiled."""
    names: list[str] = []
    real = jinja2.Environment.compile

    def compile(self: jinja2.Environment, source: str, name: str, filename: str) -> object:
        names.append(name)
        return real(self, source, name, filename)

    monkeypatch.setattr(jinja2.Environment, "compile", compile)
    return names


def render_anew() -> str:
    """A kernel's text, from templates that a new process would load."""
    render_module._environment.cache_clear()
    text = "attention a {\n    mask kv <= qpos\n}\n"
    schedule = "kernel forward_simt"
    kernel = attngen.compile_text(text, dtype="fp16", head_dim=8, schedule=schedule)
    return kernel.render("sm_80").source


def list_codes(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.code"))


def test_a_template_is_compiled_once(folder: Path, compiled: list[str]) -> None:
    first = render_anew()
    count = len(compiled)
    assert TEMPLATE in compiled
    assert render_anew() == first
    assert len(compiled) == count == len(list_codes(folder))


def test_a_changed_template_is_compiled_again(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = folder.parent
    for name in ("templates", "grammar"):
        shutil.copytree(resources._CHECKOUT / name, copies / name)
    monkeypatch.setattr(resources, "_CHECKOUT", copies)
    render_anew()
    compiled.clear()
    template = copies / "templates" / TEMPLATE
    template.write_text(template.read_text(encoding="utf-8") + "// changed\n", encoding="utf-8")
    assert render_anew().endswith("// changed\n")
    assert compiled == [TEMPLATE]


def test_damaged_code_is_compiled_again(folder: Path, compiled: list[str]) -> None:
    right = render_anew()
    count = len(compiled)
    for code in list_codes(folder):
        data = bytearray(code.read_bytes())
        data[len(data) // 2] ^= 0xFF
        code.write_bytes(data)
    assert render_anew() == right
    assert len(compiled) == 2 * count


def test_an_error_shows_the_line_of_the_template(folder: Path, compiled: list[str]) -> None:
    shown = []
    for _ in range(2):
        render_module._environment.cache_clear()
        with pytest.raises(jinja2.UndefinedError) as caught:
            render(TEMPLATE, SimpleNamespace(name="a"), name="a")
        shown.append(traceback.format_exception(caught.value)[-2])
    assert compiled.count(TEMPLATE) == 1
    assert shown[0] == shown[1]
    path, line = shown[0].split('"')[1], int(shown[0].split("line ")[1].split(",")[0])
    assert Path(path).is_relative_to(resources._CHECKOUT / "templates")
    assert Path(path).read_text(encoding="utf-8").splitlines()[line - 1].strip() in shown[0]


def test_without_a_cache_nothing_is_kept(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", "0")
    assert render_anew() == render_anew()
    assert compiled.count(TEMPLATE) == 2
    assert list_codes(folder) == []
