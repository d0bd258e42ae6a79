"""Finding a compiler, building once, and saying what went wrong."""

from __future__ import annotations

import os
import re
import stat
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from attngen.cpu import build as build_module
from attngen.cpu.build import CppCompiler, build_library, find_compiler, host_headers
from attngen.cpu.errors import CpuBuildFailed, CpuBuildTooSlow, CpuCacheUnusable, NoCppCompiler
from attngen.cpu.faults import Fault
from attngen.cpu.run import Landing, Mode
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from tests.cpu.host_kernels import kernel_text


def the_error(caught: pytest.ExceptionInfo[AttnError]) -> Diagnostic:
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# ---- the compiler ---------------------------------------------------------------------------


def test_a_requested_compiler_may_have_arguments(tmp_path: Path) -> None:
    path = script(tmp_path, "cxx", 'echo "cxx 1.0 $1"')
    found = find_compiler(f"{path} --fast")
    assert found.command == (path, "--fast")
    assert found.version == "cxx 1.0 --fast"


def test_a_requested_compiler_that_is_not_there() -> None:
    with pytest.raises(AttnError) as caught:
        find_compiler("no-such-c++")
    assert the_error(caught) == NoCppCompiler(None, "no-such-c++")


def test_a_compiler_that_does_not_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "g++", "exit 1")
    good = script(tmp_path, "clang++", "echo clang 99")
    monkeypatch.setenv("PATH", str(tmp_path))
    build_module._version_of.cache_clear()
    try:
        assert find_compiler() == CppCompiler((Path(good).name,), "clang 99")
    finally:
        build_module._version_of.cache_clear()


def test_no_compiler_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    build_module._version_of.cache_clear()
    try:
        with pytest.raises(AttnError) as caught:
            find_compiler()
    finally:
        build_module._version_of.cache_clear()
    error = the_error(caught)
    assert error == NoCppCompiler(None, "g++, clang++, c++")
    assert "ziglang" in (error.hint_text() or "")


# ---- building -------------------------------------------------------------------------------


def test_builds_once(compiler: CppCompiler, tmp_path: Path) -> None:
    text = kernel_text("reduce")
    first = build_library(text, cache_dir=tmp_path / "new" / "folder", compiler=compiler)
    written = first.stat().st_mtime_ns
    again = build_library(text, cache_dir=tmp_path / "new" / "folder", compiler=compiler)
    assert again == first
    assert again.stat().st_mtime_ns == written
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # nothing is left over


@pytest.mark.parametrize("damage", ["cut", "one bit", "empty"])
def test_a_damaged_library_is_built_anew(damage: str, tmp_path: Path) -> None:
    text = kernel_text("reduce")
    library = build_library(text, cache_dir=tmp_path)
    right = library.read_bytes()
    middle = len(right) // 2
    flipped = bytes([right[middle] ^ 1])
    damaged = {"cut": right[:-9], "one bit": right[:middle] + flipped + right[middle + 1 :]}
    library.write_bytes(damaged.get(damage, b""))
    assert build_library(text, cache_dir=tmp_path) == library
    assert library.read_bytes() == right


def test_text_flags_and_compiler_are_in_the_name(compiler: CppCompiler, tmp_path: Path) -> None:
    def name(text: str, compiler: CppCompiler = compiler, optimization: int = 1) -> str:
        return build_library(
            text, cache_dir=tmp_path, compiler=compiler, optimization=optimization
        ).name

    other = CppCompiler(compiler.command, compiler.version + " (other)")
    text = kernel_text("reduce")
    assert len({name(text), name(text + "\n"), name(text, other), name(text, optimization=2)}) == 4


def test_the_same_text_gives_the_same_library(compiler: CppCompiler, tmp_path: Path) -> None:
    one, two = (
        build_library(kernel_text("reduce"), cache_dir=tmp_path / folder, compiler=compiler)
        for folder in ("one", "two")
    )
    assert one.read_bytes() == two.read_bytes()


def test_many_processes_build_the_same_kernel(compiler: CppCompiler, tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("forkserver")) as pool:
        jobs = [pool.submit(_build_in_child, compiler, tmp_path) for _ in range(8)]
        paths = {job.result() for job in jobs}
    assert len(paths) == 1
    assert len(list(tmp_path.iterdir())) == 1


def _build_in_child(compiler: CppCompiler, cache: Path) -> Path:
    return build_library(kernel_text("reduce"), cache_dir=cache, compiler=compiler, optimization=1)


def test_the_compilers_own_error_lines_are_shown(compiler: CppCompiler, tmp_path: Path) -> None:
    text = kernel_text("reduce", "void f() {\n    int x = y;\n}\n")
    with pytest.raises(AttnError) as caught:
        build_library(text, cache_dir=tmp_path, compiler=compiler)
    error = the_error(caught)
    assert isinstance(error, CpuBuildFailed)
    line = text[: text.index("int x")].count("\n") + 1
    assert error.lines.startswith(f"kernel.cu:{line}:")
    assert "error:" in error.lines
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_dies_silently(tmp_path: Path) -> None:
    dying = CppCompiler((script(tmp_path, "c++", "exit 3"),), "1")
    with pytest.raises(AttnError) as caught:
        build_library("", cache_dir=tmp_path / "cache", compiler=dying)
    assert the_error(caught) == CpuBuildFailed(None, dying.name, "exit status 3")


def test_a_compiler_that_does_not_end(tmp_path: Path) -> None:
    text = 'case "$*" in *probe.cpp*) exit 1;; esac\nexec sleep 60'
    slow = CppCompiler((script(tmp_path, "c++", text),), "1")
    with pytest.raises(AttnError) as caught:
        build_library("", cache_dir=tmp_path / "cache", compiler=slow, limit_s=0.2)
    assert isinstance(the_error(caught), CpuBuildTooSlow)


def test_a_cache_that_is_no_folder(compiler: CppCompiler, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(AttnError) as caught:
        build_library(kernel_text("reduce"), cache_dir=file, compiler=compiler)
    assert isinstance(the_error(caught), CpuCacheUnusable)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_read_only(compiler: CppCompiler, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AttnError) as caught:
        build_library(kernel_text("reduce"), cache_dir=tmp_path, compiler=compiler)
    assert isinstance(the_error(caught), CpuCacheUnusable)


# ---- the header and its Python side -----------------------------------------------------------


def enumerators(name: str) -> list[str]:
    """The members of an enum of the header, without their `k`."""
    header = re.sub(r"//[^\n]*", "", host_headers()["host.h"])
    body = re.search(rf"enum {name} : int32_t \{{(.*?)\}}", header, re.DOTALL)
    assert body
    return [member.strip()[1:] for member in body[1].split(",") if member.strip()]


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


@pytest.mark.parametrize("enum", [Fault, Mode, Landing])
def test_python_and_header_count_alike(enum: type[Fault] | type[Mode] | type[Landing]) -> None:
    assert [camel(m.name) for m in enum] == enumerators(enum.__name__)
    assert [m.value for m in enum] == list(range(len(enum)))


def test_every_fault_has_words() -> None:
    assert len({str(fault) for fault in Fault}) == len(Fault)


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_only_the_kernels_are_exported(compiler: CppCompiler, tmp_path: Path) -> None:
    library = build_library(kernel_text("reduce"), cache_dir=tmp_path, compiler=compiler)
    assert b"reduce_cpu\0" in library.read_bytes()
    assert b"ag_host_switch\0" not in library.read_bytes().split(b".symtab")[0][:4096]
