"""ARCHITECTURE.md names every folder, module and template, and nothing that is not there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
_HEADING = re.compile(r"^#+ (?:`([^`]+/)`)?", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"[\w.\-/]+(?:\.(?:py|md|j2|cuh|h|lark|toml|attn)|/)")


def mentioned() -> Iterator[Path]:
    """Every path in backticks: in the first cell of a table relative to the heading's folder."""
    folder = Path()
    for line in _BLOCK.sub("", PAGE.read_text("utf-8")).splitlines():
        heading = _HEADING.match(line)
        if heading:
            folder = Path(heading[1] or ".")
            if heading[1]:
                yield folder
            continue
        first, _, rest = line[1:].partition("|") if line.startswith("|") else ("", "", line)
        yield from (folder / name for name in _CODE.findall(first) if _FILE.fullmatch(name))
        # Elsewhere a path begins at the root of the repository.
        yield from (Path(name) for name in _CODE.findall(rest) if _is_from_root(name))


def _is_from_root(name: str) -> bool:
    return bool(_FILE.fullmatch(name)) and "/" in name


def test_what_is_named_exists() -> None:
    missing = [str(path) for path in mentioned() if not (ROOT / path).exists()]
    assert not missing


def test_every_folder_module_and_template_is_named() -> None:
    package = ROOT / "attngen"
    files = {p for p in package.rglob("*.py") if p.name != "__init__.py" and p.stat().st_size}
    files |= {package / "__init__.py", *package.rglob("*.h")}
    files |= {p for p in (ROOT / "templates").rglob("*") if p.is_file()}
    folders = {p.parent for p in files if p.parent != ROOT / "templates" / "common"}
    named = {ROOT / path for path in mentioned()}
    missing = sorted(str(p.relative_to(ROOT)) for p in (files | folders) - named)
    assert not missing


def test_layers_are_those_that_are_checked() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers")
    shown = PAGE.read_text("utf-8").split("## The layers")[1].split("```text\n")[1].split("```")[0]
    assert shown.splitlines() == [layer.replace("attngen.", "") for layer in layers]
    forbidden = next(c for c in contracts if c.get("source_modules") == ["attngen.oracle"])
    text = PAGE.read_text("utf-8").split("**The oracle is independent.**")[1].split("\n- **")[0]
    for module in forbidden["forbidden_modules"]:
        assert f"`{module.removeprefix('attngen.')}`" in text
