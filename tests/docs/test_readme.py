"""The README is true: its blocks are real pieces of real files, its commands run and print what it
shows, and every link of every page leads somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import attngen
from attngen.kernels import all_families
from attngen.targets import all_targets

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("grammar", "templates", "generated", "tuned")),
)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [b[2] for b in _BLOCK.finditer(README.read_text("utf-8")) if b[1] == language]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the commands of the README read."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def run(line: str, folder: Path) -> str:
    """A shell line with this environment's `attngen`, in a folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, "PATH": path, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def pattern_of(shown: list[str]) -> str:
    """A regular expression for an output that is shown in part: `…` stands for what is left out."""
    lines = []
    for line in shown:
        if line == "…":
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(re.escape(line).replace("…", r"[^\n]*") + r"\s*?\n")
    return "".join(lines)


def test_the_example_is_the_file() -> None:
    (shown,) = blocks("attn")
    assert shown == (ROOT / "examples" / "bigbird.attn").read_text("utf-8")


def test_the_cuda_is_what_is_generated() -> None:
    (shown,) = blocks("cuda")
    kernel = attngen.compile(ROOT / "examples" / "bigbird.attn", dtype="bf16", head_dim=64)
    assert re.search(pattern_of(shown.splitlines()), kernel.render("sm_80").source)


def test_commands_print_what_is_shown(checkout: Path, host_compiler: None) -> None:
    (text,) = blocks("sh")
    commands = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    assert len(commands) == 6
    for command in commands:
        line, *shown = command.splitlines()
        printed = run(line, checkout)
        assert re.fullmatch(pattern_of(shown), printed), f"{line}\n{printed}"


def test_python_runs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line]) <= 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, str(README), "exec"), {})


def test_what_exists_and_what_is_planned() -> None:
    """A kernel family that was planned and now exists moves up."""
    section = README.read_text("utf-8").split("## What exists")[1].split("\n## ")[0]
    today, planned = section.split("Planned")
    for name in all_families():
        assert f"`{name}`" in today
        assert f"`{name}`" not in planned
    assert all(target.name in today for target in all_targets())


def test_make_has_the_commands() -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for page in PAGES:
        for name in re.findall(r"`make ([a-z-]+)", page.read_text("utf-8")):
            assert name in targets, f"{page.name}: make {name}"


def test_make_demo_works(checkout: Path, host_compiler: None) -> None:
    recipe = (ROOT / "Makefile").read_text("utf-8").split("\ndemo:")[1].split("\n\n")[0]
    lines = [line.strip() for line in recipe.splitlines()[1:]]
    assert lines
    for line in lines:
        run(line.replace("$(BIN)/", ""), checkout)


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(_LINK.findall(index))


def test_contributing_names_what_exists() -> None:
    """Paths in backticks, and the arguments of `pytest`; NAME and NUMBER stand for others."""
    text = _BLOCK.sub("", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    words = {word for code in re.findall(r"`([^`]+)`", text) for word in code.split()}
    paths = {word for word in words if re.fullmatch(r"[\w.]+(/[\w.]*)+", word)}
    paths = {path for path in paths if not re.search("NAME|NUMBER|NNN|TARGET", path)}
    assert len(paths) > 30
    assert not sorted(path for path in paths if not (ROOT / path).exists() and ".venv" not in path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text("utf-8"))
    for link in _LINK.findall(text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            headings = _HEADING.findall(target.read_text("utf-8"))
            assert anchor in {_anchor(heading) for heading in headings}, f"{link} has no heading"


def _anchor(heading: str) -> str:
    """How a heading is linked to: lower case, no punctuation, `-` for blanks."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
