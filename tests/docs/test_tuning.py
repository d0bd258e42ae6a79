"""docs/tuning.md: the recipe for CI is YAML, its commands exist, and those without a GPU run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from attngen.cli.app import COMMANDS, app
from attngen.tuning.device_class import known_devices
from attngen.tuning.lookup import Grade
from attngen.tuning.measurement import SCHEMA
from attngen.tuning.store import Contents, Store
from tests.cli.runner import run, write
from tests.tuning.records import make_record

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tuning.md").read_text("utf-8")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [block[2] for block in _BLOCK.finditer(PAGE) if block[1] == language]


(RECIPE,) = (yaml.safe_load(block) for block in blocks("yaml"))
(SHELL,) = blocks("sh")


def attngen_lines(job: dict[str, Any]) -> list[str]:
    runs = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    return [line for line in runs if line.startswith("attngen ")]


LINES = {name: attngen_lines(job) for name, job in RECIPE["jobs"].items()}


def parse(line: str) -> None:
    """Let click read a command line, without running it.  Raises a UsageError where it cannot."""
    _, name, *arguments = shlex.split(line)
    root = click.Context(app, **app.context_settings)
    command: click.Command = app.get_command(root, name) or pytest.fail(name)
    context = command.make_context(name, arguments, parent=root)
    if isinstance(command, click.Group):
        (inner, *rest) = arguments
        found = command.get_command(context, inner)
        assert found is not None, inner
        found.make_context(inner, rest, parent=context)


def test_the_recipe_is_a_workflow() -> None:
    assert set(RECIPE["jobs"]) == {"compile", "tune"}
    for job in RECIPE["jobs"].values():
        assert job["runs-on"]
        assert all(set(step) & {"run", "uses"} for step in job["steps"])


@pytest.mark.parametrize("line", sorted({line for lines in LINES.values() for line in lines}))
def test_the_commands_of_the_recipe_exist(line: str) -> None:
    if line.split()[1] == "tune" and "tune" not in COMMANDS:
        pytest.skip("there is no `attngen tune` yet")
    parse(line)


def test_a_command_that_does_not_exist_is_noticed() -> None:
    for line in ("attngen cache verfy tuned", "attngen cache verify --fast", "attngen tunes"):
        with pytest.raises((click.UsageError, AssertionError, pytest.fail.Exception)):
            parse(line)


def test_the_generic_recipe_has_the_same_commands() -> None:
    lines = [line for line in SHELL.splitlines() if line.startswith("attngen ")]
    assert lines == LINES["compile"] + LINES["tune"]


def test_the_job_without_a_gpu_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specs").mkdir()
    write(tmp_path / "specs", "attention causal {\n    mask kv <= qpos\n}\n", "causal.attn")
    Store(tmp_path / "tuned").add(Contents((make_record(),)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    for line in LINES["compile"]:
        result = run(*shlex.split(line)[1:])
        assert result.code == 0, f"{line}\n{result.err}"
    assert (tmp_path / "build" / "causal.sm_90a.cubin").is_file()


def test_only_records_are_shared() -> None:
    """The rest of the cache directory is machine code, which is run as it is."""
    steps = [step for job in RECIPE["jobs"].values() for step in job["steps"]]
    paths = {step["with"]["path"] for step in steps if "cache" in step.get("uses", "")}
    assert paths == {"~/.cache/attngen/tuned"}


def test_the_page_names_every_grade_alias_and_field() -> None:
    for grade in Grade:
        assert f"| {grade.value} |" in PAGE
    for alias in known_devices():
        assert f"`{alias}`" in PAGE
    (shown,) = (json.loads(block) for block in blocks("json"))
    written = json.loads(make_record().line())
    assert shown["schema"] == SCHEMA
    assert shown.keys() == written.keys()
    for name, value in written.items():
        if isinstance(value, dict) and name not in ("provenance", "schedule"):
            assert shown[name].keys() == value.keys(), name
