"""`attngen doctor`: what is here, and what each missing part would give."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from attngen.backend.errors import ToolchainMissing
from attngen.cli import doctor
from attngen.diagnostics.diagnostic import AttnError

from .runner import run


def test_every_part_is_named() -> None:
    result = run("doctor")
    assert result.code == 0
    lines = result.out.splitlines()
    for name in doctor.CHECKS:
        assert any(line.startswith(name) for line in lines)


def test_for_tools(cache_folder: Path) -> None:
    found = json.loads(run("doctor", "--json").out)
    assert found["format"] == "attngen-doctor/1"
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == list(doctor.CHECKS)
    for part in parts.values():
        assert set(part) == {"name", "state", "found", "gives", "fix"}
        assert part["state"] in ("here", "missing", "broken")
    assert str(cache_folder) in parts["cache"]["found"]


def test_what_is_missing_says_what_it_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    def no_nvrtc() -> None:
        raise AttnError(ToolchainMissing(None, "libnvrtc", "no file", "packages"))

    def no_spec(name: str) -> None:
        return None

    monkeypatch.setattr("importlib.metadata.version", no_version)
    monkeypatch.setattr("attngen.backend.nvrtc.load_nvrtc", no_nvrtc)
    monkeypatch.setattr(doctor, "find_spec", no_spec)
    monkeypatch.setenv("ATTNGEN_CACHE", "0")
    result = run("doctor")
    assert result.code == 0
    for text in ("pip install 'attngen[cupy]'", "pip install islpy", "pip install torch",
                 "nvidia-cuda-nvrtc", "turned off"):  # fmt: skip
        assert text in result.out
    parts = json.loads(run("doctor", "--json").out)["parts"]
    missing = {part["name"] for part in parts if part["state"] == "missing"}
    assert missing >= {"NVRTC", "CuPy", "GPU", "islpy", "PyTorch", "cache"}


def test_a_broken_part_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> doctor.Part:
        raise OSError("libfoo.so: cannot open")

    monkeypatch.setitem(doctor.CHECKS, "GPU", explode)
    result = run("doctor")
    assert result.code == 0
    assert "libfoo.so" in result.out
    assert "cache" in result.out
