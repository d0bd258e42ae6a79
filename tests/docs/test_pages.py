"""Run the pages: every `python` block of a page, in order, and compare what it prints with the
`text` block behind it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(p for p in DOCS.glob("*.md") if "```python" in p.read_text(encoding="utf-8"))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore:arrays on the CPU")
def test_page_runs_as_printed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS)
    text = page.read_text(encoding="utf-8")
    for name in ("torch", "transformers"):
        if re.search(rf"^(import|from) {name}\b", text, re.MULTILINE):
            pytest.importorskip(name, reason=f"{name} is not installed")
    names: dict[str, object] = {}
    printed = ""
    for block in _BLOCK.finditer(text):
        language, code = block[1], block[2]
        if language == "python":
            line = text[: block.start(2)].count("\n")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * line + code, str(page), "exec"), names)
            printed = output.getvalue()
        elif language == "text":
            assert printed.rstrip() == code.rstrip()
