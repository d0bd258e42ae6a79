"""`attngen check`: every error of every file, for people and for tools."""

from __future__ import annotations

import json
from pathlib import Path

from .runner import run, write

WRONG = """\
attention wrong {
    mask      kw <= qpos
    score     softcapp(s, 5.0)
}
"""


def test_good_files(causal: Path, documents: Path) -> None:
    result = run("check", causal, documents)
    assert (result.code, result.out, result.err) == (0, "no errors in 2 files\n", "")


def test_all_errors_of_all_files(causal: Path, tmp_path: Path) -> None:
    wrong = write(tmp_path, WRONG, "wrong.attn")
    broken = write(tmp_path, "attention b {\n    mask kv <=\n}\n", "broken.attn")
    result = run("check", wrong, causal, broken, tmp_path / "none.attn")
    assert result.code == 2
    assert result.out == ""
    assert f"{wrong}:2:15" in result.err
    assert f"{wrong}:3:15" in result.err
    assert f"{broken}:2" in result.err
    assert "none.attn" in result.err
    assert result.err.count("error[") == 4


def test_json_has_one_schema(causal: Path, tmp_path: Path) -> None:
    wrong = write(tmp_path, WRONG, "wrong.attn")
    result = run("check", "--json", causal, wrong)
    assert result.code == 2
    assert result.err == ""
    found = json.loads(result.out)
    assert found["format"] == "attngen-check/1"
    assert [file["file"] for file in found["files"]] == [str(causal), str(wrong)]
    assert found["files"][0]["errors"] == []
    first, second = found["files"][1]["errors"]
    assert set(first) == {"code", "hint", "label", "message", "notes", "place", "severity"}
    assert set(first["place"]) == {
        "file", "start", "end", "line", "column", "end_line", "end_column",
    }  # fmt: skip
    assert first["place"]["file"] == str(wrong)
    assert (first["place"]["line"], second["place"]["line"]) == (2, 3)
    assert first["severity"] == "error"


def test_json_of_good_files(causal: Path) -> None:
    result = run("check", "--json", causal)
    assert result.code == 0
    assert json.loads(result.out) == {
        "format": "attngen-check/1",
        "files": [{"file": str(causal), "errors": []}],
    }


def test_consts_and_dtype_take_part(tmp_path: Path) -> None:
    spec = write(tmp_path, "attention a {\n    const W : int\n    mask kv < W\n}\n")
    assert run("check", spec).code == 2
    assert run("check", spec, "-D", "W=4").code == 0
    assert run("check", spec, "-D", "W=4", "-D", "V=4").code == 2
    assert run("check", spec, "-D", "W=true").code == 2
    wrong = run("check", spec, "-D", "W=4", "--dtype", "bf61")
    assert wrong.code == 2
    assert "bf16" in wrong.err
    assert run("check", spec, "-D", "W=4", "--head-dim", "0").code == 2
