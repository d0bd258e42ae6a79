"""Stores: merging is a union, files are canonical, and what is wrong in one is a note."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen import disk_cache
from attngen.disk_cache import lock_folder
from attngen.tuning import store as store_module
from attngen.tuning.measurement import Definition, Record
from attngen.tuning.store import (
    EMPTY,
    Contents,
    Store,
    merge,
    parse_lines,
    repository_store,
    user_store,
)
from attngen.tuning.winner import find_winner

from .records import A100, H100, H200, OP, digest, make_record, records, times

ROOT = Path(__file__).resolve().parents[2]

definitions = st.builds(
    Definition, st.sampled_from([OP, digest("another op")]), st.sampled_from(["a", "b"])
)
contents = st.builds(
    Contents,
    st.lists(records, max_size=6).map(tuple),
    st.lists(definitions, max_size=3).map(tuple),
    st.lists(st.sampled_from([b'{"schema":"attngen-tune/2"}', b"{}"]), max_size=2).map(tuple),
)


def text_of(*found: Record) -> bytes:
    return merge(Contents(found)).text()


# ---- merging -----------------------------------------------------------------------------


@given(contents, contents, contents)
def test_merging_is_a_union(a: Contents, b: Contents, c: Contents) -> None:
    assert merge(a, b).text() == merge(b, a).text()
    assert merge(merge(a, b), c).text() == merge(a, merge(b, c)).text() == merge(a, b, c).text()
    assert merge(merge(a, b), a).text() == merge(a, b).text()
    assert merge(merge(a), EMPTY) == merge(a)


@given(contents, contents)
def test_merging_in_any_order_has_the_same_winners(a: Contents, b: Contents) -> None:
    assert find_winner(merge(a, b).records) == find_winner(merge(b, a).records)


@given(contents)
def test_what_is_written_is_read_back(a: Contents) -> None:
    merged = replace(merge(a), foreign=())
    assert parse_lines(merged.text()) == merged


def test_more_samples_win_and_nothing_else_is_lost() -> None:
    few, many = (make_record(times=times(us, count=n)) for us, n in ((390.0, 10), (400.0, 20)))
    other = make_record(tile=(64, 64))
    assert set(merge(Contents((few, other)), Contents((many,))).records) == {many, other}


def test_a_line_merge_by_git_reads_as_a_merge_of_records() -> None:
    """`merge=union` leaves the lines of both sides, some of them twice, in any order."""
    ours, theirs = text_of(make_record(), make_record(390.0)), text_of(make_record(tile=(64, 64)))
    lines = theirs + ours + theirs + b"\n"
    assert parse_lines(lines).text() == merge(parse_lines(ours), parse_lines(theirs)).text()


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_bytes_from_anywhere_are_notes(lines: list[bytes]) -> None:
    found = parse_lines(b"\n".join(lines))
    assert found.records == ()
    assert len(found.notes) <= sum(line.count(b"\n") + 1 for line in lines)


def test_git_merges_two_branches_that_tuned_the_same(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    def tune(*found: Record) -> None:
        Store(tmp_path / "tuned").add(Contents(found))
        git("add", ".")
        git("commit", "-m", "tune")

    git("init", "-b", "main")
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    tune(make_record(tile=(64, 64)))
    git("switch", "-c", "other")
    theirs = make_record(tile=(64, 128)), make_record(times=times(400.0, count=90))
    tune(*theirs)
    git("switch", "main")
    ours = make_record(tile=(128, 64)), make_record()
    tune(*ours)
    git("merge", "other")
    found = Store(tmp_path / "tuned").read(H200, OP)
    assert found == merge(Contents((make_record(tile=(64, 64)), *ours)), Contents(theirs))


# ---- files -------------------------------------------------------------------------------


def test_a_record_is_found_where_it_belongs(tmp_path: Path) -> None:
    folder = Store(tmp_path)
    found = [make_record(), make_record(device=H100), make_record(op=digest("other"))]
    folder.add(Contents(tuple(found), (Definition(OP, "text"),)))
    assert (tmp_path / H200.name / f"{OP}.jsonl").is_file()
    assert folder.read(H200, OP) == Contents((found[0],), (Definition(OP, "text"),))
    assert folder.read(A100, OP) == EMPTY
    assert folder.devices() == (H100, H200)
    assert set(folder.operations(H200)) == {OP, digest("other")}
    assert [device for device, _, _ in folder.files()] == [H100, H200, H200]


def test_adding_again_changes_no_file(tmp_path: Path) -> None:
    folder, path = Store(tmp_path), tmp_path / H200.name / f"{OP}.jsonl"
    folder.add(Contents((make_record(),)))
    before = path.stat()
    folder.add(Contents((make_record(),)))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_lines_that_are_no_records_are_notes(tmp_path: Path) -> None:
    folder, path = Store(tmp_path), tmp_path / H200.name / f"{OP}.jsonl"
    folder.add(Contents((make_record(),)))
    foreign = make_record().line().replace("tune/1", "tune/9").encode()
    stray = make_record(device=H100).line().encode()
    path.write_bytes(b"\n".join([path.read_bytes(), b"\xff{", foreign, stray]))
    found = folder.read(H200, OP)
    assert found.records == (make_record(),)
    assert found.foreign == (foreign,)
    assert len(found.notes) == 3
    assert all(OP[:12] in note for note in found.notes)
    folder.add(Contents((make_record(tile=(64, 64)),)))
    assert set(path.read_bytes().split(b"\n")[:-1]) == {
        foreign,
        make_record().line().encode(),
        make_record(tile=(64, 64)).line().encode(),
    }


@pytest.mark.parametrize("kept", [0, 0.3, 0.55, 0.99])
def test_a_file_that_was_cut_off_says_less_and_nothing_else(tmp_path: Path, kept: float) -> None:
    folder, path = Store(tmp_path), tmp_path / H200.name / f"{OP}.jsonl"
    found = tuple(make_record(tile=(64, 8 * n)) for n in range(1, 9))
    folder.add(Contents(found))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    left = folder.read(H200, OP)
    assert set(left.records) < set(found)
    assert len(left.notes) == (kept > 0)


def test_a_file_under_the_name_of_another_says_nothing(tmp_path: Path) -> None:
    folder = Store(tmp_path)
    folder.add(Contents((make_record(), make_record(op=digest("other")))))
    one, other = (tmp_path / H200.name / f"{op}.jsonl" for op in (OP, digest("other")))
    one.write_bytes(other.read_bytes())
    found = folder.read(H200, OP)
    assert found.records == ()
    assert "another operation" in found.notes[0]


def test_other_files_and_folders_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "README.md").write_text("records")
    (tmp_path / H200.name).mkdir()
    (tmp_path / H200.name / "notes.jsonl").write_text("{}")
    folder = Store(tmp_path)
    assert folder.devices() == (H200,)
    assert folder.operations(H200) == ()
    assert list(folder.files()) == []


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    folder = Store(tmp_path / "nothing")
    assert folder.devices() == ()
    assert folder.read(H200, OP) == EMPTY


def test_a_file_that_cannot_be_read_is_a_note(tmp_path: Path) -> None:
    (tmp_path / H200.name / f"{OP}.jsonl").mkdir(parents=True)
    (note,) = Store(tmp_path).read(H200, OP).notes
    assert "directory" in note


def test_a_file_that_is_too_large_is_neither_read_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = Store(tmp_path), tmp_path / H200.name / f"{OP}.jsonl"
    folder.add(Contents((make_record(),)))
    before = path.read_bytes()
    monkeypatch.setattr(store_module, "MAX_FILE_BYTES", len(before) + 100)
    with pytest.raises(OSError, match="no room"):
        folder.add(Contents((make_record(tile=(64, 64)),)))
    monkeypatch.setattr(store_module, "MAX_FILE_BYTES", len(before) - 1)
    assert "not read" in folder.read(H200, OP).notes[0]
    with pytest.raises(OSError, match="more records"):
        folder.add(Contents((make_record(tile=(64, 64)),)))
    assert path.read_bytes() == before


def test_nothing_left_removes_the_file(tmp_path: Path) -> None:
    folder = Store(tmp_path)
    folder.add(Contents((make_record(),)))
    folder.update(H200, OP, lambda found: EMPTY)
    assert folder.operations(H200) == ()


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Store(tmp_path)
    folder.add(Contents((make_record(),)))

    def fail(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        folder.add(Contents((make_record(tile=(64, 64)),)))
    assert folder.read(H200, OP).records == (make_record(),)
    assert [p.name for p in (tmp_path / H200.name).iterdir()] == [f"{OP}.jsonl"]


def test_a_lock_leaves_nothing_behind_and_a_killed_ones_file_locks_nobody(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    Store(tmp_path).add(Contents((make_record(),)))
    assert [path.name for path in tmp_path.iterdir()] == [H200.name]


def test_a_lock_that_is_kept_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_PATIENCE_SECONDS", 0.01)
    with lock_folder(tmp_path), pytest.raises(TimeoutError, match="another process"):
        Store(tmp_path).add(Contents((make_record(),)))
    Store(tmp_path).add(Contents((make_record(),)))


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    found = [make_record(sass=digest(str(n))) for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: Store(tmp_path).add(Contents((one,))), found))
    assert set(Store(tmp_path).read(H200, OP).records) == set(found)


def test_the_stores_that_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    own = user_store()
    assert own is not None
    assert own.folder == tmp_path / "tuned"
    monkeypatch.setenv("ATTNGEN_CACHE", "0")
    assert user_store() is None
    assert Path(str(repository_store())).name == "tuned"


def test_every_record_of_the_repository_is_read_without_a_note() -> None:
    for device, op, found in repository_store().files():
        assert found.notes == ()
        assert found.definitions, f"{device.name}/{op} does not say what its operation is"
