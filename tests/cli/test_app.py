"""The command itself: help, versions, exit codes, and what happens when attngen is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen import __version__
from attngen.cli.app import COMMANDS

from .runner import Result, run, run_process

HEAVY = ("numpy", "lark", "jinja2", "rich", "cupy", "torch", "islpy", "cuda")


def test_version() -> None:
    assert run("--version") == Result(0, f"attngen {__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("-h",), ("--help",)])
def test_help_lists_the_commands(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.code == 0
    for name, text in COMMANDS.items():
        assert name in result.out
        assert text[:30] in result.out
    assert "Example:" in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "-h")
    assert result.code == 0
    assert f"Example:  attngen {command}" in result.out


def test_the_first_look_imports_nothing_heavy() -> None:
    code = (
        "import sys; from attngen.cli import main; code = main(['--version']);"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_module_and_command_are_the_same() -> None:
    assert run_process("--version") == Result(0, f"attngen {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("chek",), "did you mean `check`?"),
        (("spec.attn",), "attngen run spec.attn"),
        (("nonsense",), "the commands are cache, check, compile"),
        (("run",), "SPEC.attn"),
        (("fmt", "--chek", "x.attn"), "--check"),
        (("run", "x.attn", "--shape", "Sq"), "Sq=8192"),
        (("run", "x.attn", "--shape", "Sq=1,Sq=2"), "given twice"),
        (("run", "x.attn", "--head-dim", "a"), "192,128"),
        (("run", "x.attn", "--head-dim", "1,2,3"), "192,128"),
        (("run", "x.attn", "--rows", "5"), "100:200"),
        (("run", "x.attn", "--set", "cap"), "W=1024"),
        (("run", "x.attn", "--set", "cap=much"), "neither a number"),
        (("run", "x.attn", "--input", "q"), "q=q.npy"),
        (("run", "x.attn", "--device", "tpu"), "tpu"),
        (("compile", "x.attn", "-D", "1=2"), "W=1024"),
        (("compile", "x.attn", "-D", "W=1e999"), "neither a number"),
        (("compile", "x.attn", "--emit", "sass"), "cubin"),
        (("compile", "x.attn", "--arch", ""), "not a name"),
        (("explain", "x.attn", "--rows", "-1"), "-1"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error[A710]: ")
    assert said in result.err


def test_a_const_that_is_given_twice(causal: Path) -> None:
    result = run("check", causal, "-D", "W=1", "-D", "W=2")
    assert result.code == 2
    assert "W is given twice" in result.err


@pytest.mark.parametrize("command", ["check", "compile", "explain", "fmt", "run"])
@pytest.mark.parametrize("kind", ["missing", "directory", "bytes", "empty", "null", "huge"])
def test_every_command_refuses_a_bad_file(command: str, kind: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.attn"
    match kind:
        case "missing":
            (tmp_path / "spek.attn").write_text("attention a { }")
        case "directory":
            spec.mkdir()
            (spec / "inside.attn").write_text("")
        case "bytes":
            spec.write_bytes(b"attention a {\n    mask kv <= \xff\n}\n")
        case "empty":
            spec.write_bytes(b"")
        case "null":
            spec = Path("a\0b.attn")
        case "huge":
            spec.write_bytes(b"# \n" * 400_000)
    result = run(command, spec)
    assert result.code == 2
    assert result.err.startswith("error[A")
    assert "A902" not in result.err
    expected = {
        "missing": "did you mean", "directory": "it holds inside.attn", "bytes": "UTF-8",
        "null": "null character", "huge": "1048576 bytes",
    }  # fmt: skip
    assert expected.get(kind, "error") in result.err


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "spec.attn"
    spec.write_text("attention a { }")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for command in ("check", "fmt", "run"):
        result = run(command, spec)
        assert result.code == 2
        assert "ermission denied" in result.err


def test_errors_for_tools(tmp_path: Path) -> None:
    spec = tmp_path / "spec.attn"
    spec.write_text("attention a {\n    mask kw <= qpos\n}\n")
    result = run("run", spec, "--json-errors")
    assert result.code == 2
    found = json.loads(result.err)
    assert found["format"] == "attngen-errors/1"
    (error,) = found["errors"]
    assert error["code"] == "A201"
    assert error["place"]["line"] == 2
    assert set(error) == {"code", "hint", "label", "message", "notes", "place", "severity"}


def test_wrong_usage_for_tools() -> None:
    result = run("--json-errors", "run", "--nonsense")
    assert json.loads(result.err)["errors"][0]["code"] == "A710"


def test_notes_do_not_disturb_tools(causal: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", q=np.zeros(3), other=np.zeros(3))
    arguments = ("run", causal, "--inputs", tmp_path / "in.npz")
    assert run(*arguments).err.startswith("note: `other`")
    assert json.loads(run(*arguments, "--json-errors").err)["errors"][0]["code"] == "A718"


# ---- when attngen itself is wrong ------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("two lines\nof text")

    monkeypatch.setattr("attngen.cli.check.check", fail)


@pytest.mark.usefixtures("broken")
def test_a_bug_is_called_one(causal: Path) -> None:
    result = run("check", causal)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error[A902]: bug in attngen: ValueError: two lines of text\n")
    assert "please report it" in result.err
    assert "--debug" in result.err


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("how", ["before", "behind", "environment"])
def test_its_traceback_goes_into_a_file(
    how: str, causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if how == "environment":
        monkeypatch.setenv("ATTNGEN_DEBUG", "1")
    arguments = {"before": ("--debug", "check", causal), "behind": ("check", causal, "--debug")}
    result = run(*arguments.get(how, ("check", causal)))
    (kept,) = tmp_path.glob("attngen-bug-*.txt")
    assert str(kept) in result.err
    assert "Traceback" in kept.read_text()
    assert "two lines" in kept.read_text()


def test_no_memory(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 8 EiB")

    monkeypatch.setattr("attngen.cli.run.make_operands", fail)
    result = run("run", causal, "--device", "numpy")
    assert result.code == 2
    assert "error[A719]" in result.err
    assert "8 EiB" in result.err


def test_interrupted(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attngen.cli.check.check", fail)
    assert run("check", causal).code == 130


def test_a_reader_that_goes_away(causal: Path) -> None:
    command = f"{sys.executable} -m attngen explain {causal} --no-compile --arch sm_80 | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}; true"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("attention causal_lm")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# ---- terminals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "has_colors"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colors_are_for_terminals(
    environment: dict[str, str], has_colors: bool, causal: Path
) -> None:
    pty = pytest.importorskip("pty", reason="pseudo-terminals exist on Unix only")
    said = _run_in_terminal(pty, ["run", str(causal), "--shape", "Sqq=1"], environment)
    assert "error[A716]" in said.replace("\x1b[1;31m", "").replace("\x1b[0m", "")
    assert ("\x1b[" in said) == has_colors


def test_progress_is_for_terminals_and_for_what_takes_long() -> None:
    pty = pytest.importorskip("pty", reason="pseudo-terminals exist on Unix only")
    code = (
        "import time; from attngen.cli import console; console.PROGRESS_AFTER_S = {after}\n"
        "with console.progress('thinking') as shown: shown.update('still thinking'); time.sleep(1)"
    )
    assert "still thinking" in _spawn(pty, ["-c", code.format(after=0.01)], {})
    assert _spawn(pty, ["-c", code.format(after=9)], {}) == ""
    done = subprocess.run(
        [sys.executable, "-c", code.format(after=0.01)], capture_output=True, check=True
    )
    assert done.stdout + done.stderr == b""


def _run_in_terminal(pty: Any, arguments: list[str], environment: dict[str, str]) -> str:
    return _spawn(pty, ["-m", "attngen", *arguments], environment)


def _spawn(pty: Any, arguments: list[str], environment: dict[str, str]) -> str:
    """What Python writes to a terminal."""
    keep = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**keep, "TERM": "xterm", **environment},
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux says so when the last writer is gone
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    process.wait(timeout=60)
    return said.decode()


def test_ascii_terminals(causal: Path) -> None:
    result = run_process(
        "explain", causal, "--no-compile", "--arch", "sm_80", PYTHONIOENCODING="ascii"
    )
    assert result.code == 0
    assert result.out.isascii()
    assert "| #..." in result.out
