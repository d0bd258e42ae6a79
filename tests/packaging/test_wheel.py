"""The wheel holds grammar, templates, tuning records and library, and works without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USE = """
import attngen
kernel = attngen.compile_text("attention a {\\n    mask window(left = 3)\\n}\\n")
assert "mask" in kernel.render("sm_80", dtype="fp16", head_dim=64).source
from attngen.tuning.store import repository_store
assert not any(found.notes for _, _, found in repository_store().files())
print(attngen.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def tracked(*folders: str) -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_data_folders_are_those_of_the_repository(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packed = {n.removeprefix("attngen/_data/") for n in names if n.startswith("attngen/_data/")}
    assert packed == tracked("grammar", "templates", "tuned")


def test_package_files_are_those_of_the_repository(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packed = {n for n in names if n.startswith("attngen/") and "/_data/" not in n}
    assert packed == tracked("attngen")


@pytest.mark.parametrize("unpacked", [True, False], ids=["unpacked", "as a zip"])
def test_works_without_a_checkout(wheel: Path, tmp_path: Path, unpacked: bool) -> None:
    place = wheel
    if unpacked:
        place = tmp_path / "site"
        zipfile.ZipFile(wheel).extractall(place)
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(place))
