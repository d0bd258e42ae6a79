"""`attngen fmt`: in place, whole, and never at the price of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .runner import run, write

UGLY = """\
# above
attention  a{
  mask kv<=qpos   # behind
  dtype bf16
}
"""
PRETTY = """\
# above
attention a {
    mask      kv <= qpos  # behind
    dtype     bf16
}
"""


def test_in_place(tmp_path: Path) -> None:
    spec = write(tmp_path, UGLY)
    spec.chmod(0o640)
    result = run("fmt", spec)
    assert (result.code, result.out) == (0, f"formatted {spec}\n")
    assert spec.read_text() == PRETTY
    assert spec.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["spec.attn"]
    assert run("fmt", spec).out == ""


def test_check_and_diff_write_nothing(tmp_path: Path) -> None:
    spec = write(tmp_path, UGLY)
    checked = run("fmt", "--check", spec)
    assert checked.code == 1
    assert "is not in its canonical form" in checked.out
    shown = run("fmt", "--diff", spec)
    assert shown.code == 0
    assert "\n-  mask kv<=qpos   # behind\n" in shown.out
    assert "\n+    mask      kv <= qpos  # behind\n" in shown.out
    assert run("fmt", "--check", "--diff", spec).code == 1
    assert spec.read_text() == UGLY
    pretty = write(tmp_path, PRETTY, "pretty.attn")
    assert run("fmt", "--check", "--diff", pretty) == run("fmt", pretty)


def test_stdin() -> None:
    result = run("fmt", "-", stdin=UGLY.encode())
    assert (result.code, result.out) == (0, PRETTY)
    assert run("fmt", "-", stdin=b"\xff").code == 2
    assert run("fmt", "--check", "-", stdin=UGLY.encode()).code == 1


def test_definitions_alone(tmp_path: Path) -> None:
    spec = write(tmp_path, "define  mine( n:int ):bool=kv<=n\n")
    assert run("fmt", spec).code == 0
    assert spec.read_text() == "define mine(n : int) : bool = kv <= n\n"


def test_an_error_spares_the_file_and_not_the_others(tmp_path: Path) -> None:
    broken = write(tmp_path, "attention a {\n mask kv <=\n}\n", "broken.attn")
    before = broken.read_bytes()
    spec = write(tmp_path, UGLY)
    result = run("fmt", broken, spec, tmp_path / "none.attn")
    assert result.code == 2
    assert broken.read_bytes() == before
    assert spec.read_text() == PRETTY
    assert result.err.count("error[") == 2


@pytest.mark.parametrize("ending", ["\r\n", "\r"])
def test_line_ends_and_byte_order_marks(ending: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.attn"
    spec.write_bytes(("\ufeff" + UGLY.replace("\n", ending)).encode())
    assert run("fmt", spec).code == 0
    assert spec.read_text() == PRETTY


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    spec = write(tmp_path, UGLY)
    link = tmp_path / "link.attn"
    link.symlink_to(spec)
    assert run("fmt", link).code == 0
    assert link.is_symlink()
    assert spec.read_text() == PRETTY


def test_a_write_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write(tmp_path, UGLY)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for place in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            result = run("fmt", spec)
        assert result.code == 2
        assert f"error[A713]: cannot write `{spec}`: no space left on device" in result.err
        assert spec.read_text() == UGLY
        assert os.listdir(tmp_path) == ["spec.attn"]


def test_a_formatter_that_is_wrong_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write(tmp_path, UGLY)
    for wrong in ("attention a {\n    mask      kv <= qpos\n}\n", PRETTY.replace("# behind", "")):
        monkeypatch.setattr("attngen.cli.fmt.format_file", lambda _, text=wrong: text)
        result = run("fmt", spec)
        assert result.code == 2
        assert "A902" in result.err
        assert spec.read_text() == UGLY
