"""The disk cache under many users at once, damage, deletion and full disks (O30, O31)."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attngen import targets
from attngen.backend import cache
from attngen.backend.cache import CacheWarning, DiskCache, compile_cached, make_key, open_cache
from attngen.backend.nvrtc import Compiled
from attngen.options import Settings, settings
from tests.toolchain.fake_cuda import FakeCompiler

SM_80 = targets.get("sm_80")


@pytest.fixture(autouse=True)
def fail_on_unexpected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


def compile_text(text: str, disk: DiskCache, compiler: FakeCompiler, **changes: Any) -> Compiled:
    arguments: dict[str, Any] = {"name": "case", "target": SM_80} | changes
    return compile_cached(text, disk=disk, compiler=compiler, **arguments)


def compile_all(disk: DiskCache, compiler: FakeCompiler) -> None:
    for text in ("one", "two", "three"):
        assert compile_text(text, disk, compiler).binary.endswith(text.encode())


def list_entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.entry"))


def list_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_the_second_compilation_is_read_from_disk(tmp_path: Path) -> None:
    compiler = FakeCompiler()
    first = compile_text("text", DiskCache(tmp_path), compiler)
    second = compile_text("text", DiskCache(tmp_path), compiler)
    assert first == second
    assert len(compiler.runs) == 1
    assert list_files(tmp_path) == list_entries(tmp_path)


def test_the_directory_can_be_moved(tmp_path: Path) -> None:
    compiler = FakeCompiler()
    compile_text("text", DiskCache(tmp_path / "a"), compiler)
    shutil.move(tmp_path / "a", tmp_path / "b")
    compile_text("text", DiskCache(tmp_path / "b"), compiler)
    assert len(compiler.runs) == 1
    (entry,) = list_entries(tmp_path)
    assert str(tmp_path).encode() not in entry.read_bytes()


def test_real_machine_code_comes_back_unchanged(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void f(float* x) { x[0] = 1.0f; }'
    fresh, stored = (
        compile_cached(text, name="f", target=SM_80, disk=DiskCache(tmp_path)) for _ in range(2)
    )
    assert fresh == stored
    assert stored.binary[:4] == b"\x7fELF"
    assert "registers" in stored.log


# ---- O31 (d), (e): what a key depends on -------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "text "},
        {"target": "sm_86"},
        {"options": ("--maxrregcount=64",)},
        {"options": ("a", "b c")},
        {"compiler_version": "13.5.38"},
        {"emit": "ptx"},
        {"context": ("attngen 2.0",)},
    ],
    ids=str,
)
def test_every_input_is_part_of_the_key(changes: dict[str, Any]) -> None:
    base: dict[str, Any] = {
        "source": "text",
        "target": "sm_80",
        "options": ("a b", "c"),
        "compiler_version": "13.5.37",
        "emit": "cubin",
        "context": ("attngen 1.0",),
    }
    assert make_key(**base) == make_key(**base)
    assert make_key(**base) != make_key(**(base | changes))


def test_another_compiler_or_fixed_option_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, disk = FakeCompiler(), DiskCache(tmp_path)
    compile_text("text", disk, compiler)
    compiler.build_text = "13.5.38"
    compile_text("text", disk, compiler)
    monkeypatch.setattr(cache, "FIXED_OPTIONS", ("--std=c++20",))
    compile_text("text", disk, compiler)
    compile_text("text", disk, compiler, target=targets.get("sm_90a"))
    compile_text("text", disk, compiler, context=("driver 13.1",))
    assert len(compiler.runs) == 5 == len(list_entries(tmp_path))


FRESH_PROCESS = """
import sys
from pathlib import Path
from attngen import targets
from attngen.backend import cache, nvrtc

runs = []
real = nvrtc.compile_cuda
cache.compile_cuda = lambda *a, **k: runs.append(a) or real(*a, **k)
text = 'extern "C" __global__ void f(float* x) { x[0] = 1.0f; }'
cache.compile_cached(text, name="f", target=targets.get("sm_80"))
print(len(runs), *sorted(p.name for p in Path(sys.argv[1]).rglob("*.entry")))
"""


def test_a_fresh_process_compiles_nothing_again(tmp_path: Path) -> None:
    outputs = []
    for seed in ("1", "2"):
        environment = os.environ | {"ATTNGEN_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        environment.pop("ATTNGEN_CACHE", None)
        command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.split())
    assert [output[0] for output in outputs] == ["1", "0"]
    assert outputs[0][1:] == outputs[1][1:] != []


# ---- O31 (a)-(c): damage -----------------------------------------------------------------


def truncate_to_nothing(entry: Path) -> None:
    entry.write_bytes(b"")


def truncate_to_half(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])


def flip_a_byte(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[-3] ^= 0x10
    entry.write_bytes(data)


def flip_a_byte_of_the_checksum(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[30] ^= 0x01
    entry.write_bytes(data)


def put_another_entry_in_its_place(entry: Path) -> None:
    other = DiskCache(entry.parents[2])
    compile_text("another text", other, FakeCompiler())
    (source,) = (path for path in list_entries(entry.parents[2]) if path != entry)
    entry.write_bytes(source.read_bytes())


def write_a_whole_entry_of_nonsense(entry: Path) -> None:
    DiskCache(entry.parents[2]).store(entry.stem, b"[]\nno compilation")


@pytest.mark.parametrize(
    "damage",
    [
        truncate_to_nothing,
        truncate_to_half,
        flip_a_byte,
        flip_a_byte_of_the_checksum,
        put_another_entry_in_its_place,
        write_a_whole_entry_of_nonsense,
    ],
)
def test_a_damaged_entry_is_compiled_again_with_one_warning(tmp_path: Path, damage: Any) -> None:
    compiler = FakeCompiler()
    right = compile_text("text", DiskCache(tmp_path), compiler)
    (entry,) = list_entries(tmp_path)
    whole = entry.read_bytes()
    damage(entry)
    assert entry.read_bytes() != whole
    disk = DiskCache(tmp_path)
    with pytest.warns(CacheWarning, match="damaged") as caught:
        assert compile_text("text", disk, compiler) == right
    assert len(caught) == 1
    assert entry.read_bytes() == whole  # replaced
    assert compile_text("text", disk, compiler) == right
    assert len(compiler.runs) == 2


def test_threads_that_meet_one_damaged_entry_warn_once(tmp_path: Path) -> None:
    compiler = FakeCompiler()
    right = compile_text("text", DiskCache(tmp_path), compiler)
    flip_a_byte(list_entries(tmp_path)[0])
    disk = DiskCache(tmp_path)
    with pytest.warns(CacheWarning) as caught, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: compile_text("text", disk, compiler), range(16)))
    assert all(result == right for result in results)
    assert len(caught) == 1


# ---- O30: many at once -------------------------------------------------------------------

KERNELS = 4


def hammer(directory: str, start: Any, answers: Any) -> None:
    """One of several processes: two threads compile the same kernels at the same moment."""
    warnings.simplefilter("error", CacheWarning)
    disk = DiskCache(Path(directory))

    def run(thread: int) -> str:
        start.wait(60)
        found = hashlib.sha256()
        for i in range(KERNELS):
            text = f'extern "C" __global__ void k{i}(float* x) {{ x[{i}] = {i}.0f; }}'
            found.update(compile_cached(text, name="k", target=SM_80, disk=disk).binary)
        return found.hexdigest()

    try:
        with ThreadPoolExecutor(2) as pool:
            answers.put(list(pool.map(run, range(2))))
    except BaseException as error:
        answers.put([repr(error)])
        raise


def test_processes_and_threads_share_a_cold_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    count = 3
    start, answers = context.Barrier(2 * count), context.Queue()
    workers = [
        context.Process(target=hammer, args=(str(tmp_path), start, answers)) for _ in range(count)
    ]
    for worker in workers:
        worker.start()
    found = [digest for _ in workers for digest in answers.get(timeout=120)]
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * count
    assert len(found) == 2 * count
    assert len(set(found)) == 1
    assert len(list_entries(tmp_path)) == KERNELS
    assert list_files(tmp_path) == list_entries(tmp_path)  # no temporary file is left


def test_threads_of_one_process_compile_once(tmp_path: Path) -> None:
    compiler, disk = FakeCompiler(), DiskCache(tmp_path)
    start = threading.Barrier(8)

    def run(_: int) -> Compiled:
        start.wait(10)
        return compile_text("text", disk, compiler)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    assert len(set(map(id, results))) == 8
    assert len({result.binary for result in results}) == 1
    assert len(compiler.runs) == 1


def test_a_failed_compilation_is_not_remembered(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path)

    def fail() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        disk.load_or_build("ab12", fail)
    assert disk.load_or_build("ab12", lambda: b"yes") == b"yes"
    assert list_files(tmp_path) == list_entries(tmp_path)


def test_the_directory_may_be_deleted_at_any_moment(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    disk = DiskCache(directory)
    is_done = threading.Event()

    def delete() -> None:
        while not is_done.is_set():
            shutil.rmtree(directory, ignore_errors=True)

    def use(thread: int) -> None:
        for i in range(150):
            text = f"text {i % 5}"
            binary = compile_text(text, disk, FakeCompiler()).binary
            assert binary.endswith(text.encode())

    deleter = threading.Thread(target=delete)
    deleter.start()
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(use, range(3)))
    finally:
        is_done.set()
        deleter.join()
    compile_text("text", disk, FakeCompiler())
    assert list_files(directory) == list_entries(directory)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path)
    path = disk.find_path("ab12")
    path.parent.mkdir(parents=True)
    old, new = path.parent / ".tmp-old", path.parent / ".tmp-new"
    for file in (old, new):
        file.write_bytes(b"half an ent")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    assert disk.store("ab12", b"content")
    assert not old.exists()
    assert new.exists()  # somebody may be writing it at this moment


# ---- a directory that cannot be used -----------------------------------------------------


def test_a_full_disk_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    disk, compiler = DiskCache(tmp_path), FakeCompiler()
    with pytest.warns(CacheWarning, match="No space left") as caught:
        compile_all(disk, compiler)
    assert len(caught) == 1
    assert list_files(tmp_path) == []


def test_a_file_in_the_place_of_the_directory_costs_one_warning(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.write_text("in the way")
    disk, compiler = DiskCache(place), FakeCompiler()
    with pytest.warns(CacheWarning) as caught:
        compile_all(disk, compiler)
    assert len(caught) == 1


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0,
    reason="permissions do not bind the superuser, or not on this system",
)
def test_a_read_only_directory_costs_one_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        disk, compiler = DiskCache(tmp_path), FakeCompiler()
        with pytest.warns(CacheWarning) as caught:
            compile_all(disk, compiler)
        assert len(caught) == 1
    finally:
        tmp_path.chmod(0o700)


def test_an_entry_that_cannot_be_opened_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, compiler = DiskCache(tmp_path), FakeCompiler()
    compile_text("text", disk, compiler)

    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.warns(CacheWarning, match="cannot be read"):
        compile_text("text", disk, compiler)
    assert len(compiler.runs) == 2


# ---- settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "is_on"), [("0", False), ("off", False), ("No", False), ("1", True), ("", True)]
)
def test_the_environment_turns_the_cache_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, is_on: bool
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", value)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    assert settings() == Settings(cache_dir=tmp_path, is_cache_on=is_on)
    opened = open_cache()
    assert (opened is not None) == is_on
    compiler = FakeCompiler()
    for _ in range(2):
        compile_cached("text", name="x", target=SM_80, compiler=compiler)
    assert len(compiler.runs) == (1 if is_on else 2)
    assert bool(list_files(tmp_path)) == is_on


def test_the_default_directory_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNGEN_CACHE", raising=False)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", "")
    opened = open_cache()
    assert opened is not None
    assert opened.directory.name == "kernels"
    assert "attngen" in opened.directory.parts[-2]
    assert open_cache() is opened  # so that all of a process wait for each other
