"""Caches of their own, kept for all tests of a process: compiling is what takes time."""

from __future__ import annotations

from pathlib import Path

import pytest

from .runner import CAUSAL, DOCUMENTS, write


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _environment(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(cache_folder))
    monkeypatch.delenv("ATTNGEN_DEBUG", raising=False)


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    return write(tmp_path, CAUSAL, "causal.attn")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write(tmp_path, DOCUMENTS, "documents.attn")
