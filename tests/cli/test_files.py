"""Several files are written together or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attngen.cli.errors import CannotWrite
from attngen.cli.files import require_writable, write_together
from attngen.diagnostics.diagnostic import AttnError


def test_new_and_old_files(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "folder" / "new"
    old.write_bytes(b"before")
    write_together({old: b"after", new: b"fresh"})
    assert (old.read_bytes(), new.read_bytes()) == (b"after", b"fresh")
    assert sorted(os.listdir(tmp_path)) == ["folder", "old"]


@pytest.mark.parametrize("bad", ["directory", "file as folder", "replace"])
def test_none_when_one_fails(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, last = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    old.write_bytes(b"before")
    match bad:
        case "directory":
            last.mkdir()
        case "file as folder":
            last = old / "below"
        case "replace":
            replace = os.replace

            def fail_late(source: Path, target: Path) -> None:
                if target.name == "c":
                    raise PermissionError(13, "Permission denied")
                replace(source, target)

            monkeypatch.setattr(os, "replace", fail_late)
    with pytest.raises(AttnError) as error:
        write_together({old: b"after", new: b"fresh", last: b"never"})
    (found,) = error.value.diagnostics
    assert isinstance(found, CannotWrite)
    assert found.path == str(last)
    assert old.read_bytes() == b"before"
    assert not new.exists()
    left = {"a", "c"} if bad == "directory" else {"a"}
    assert set(os.listdir(tmp_path)) == left


def test_whether_a_file_can_be_written(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == []
    for path in (tmp_path, tmp_path / "none" / "new", Path("a\0b")):
        with pytest.raises(AttnError):
            require_writable(path)
