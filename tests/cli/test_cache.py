"""`attngen cache`: what it lists, merges, proves and removes, and what it does with bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attngen.api import compile_text
from attngen.backend.cubin import read_resources
from attngen.backend.nvrtc import load_nvrtc
from attngen.cli.verify_records import State, verify_record
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines.cuda_engine import compile_rendered, digest_code, digest_source
from attngen.ir.digest import digest_operation
from attngen.tuning.measurement import Definition, Environment, Record
from attngen.tuning.problem import LayoutClass, Problem
from attngen.tuning.store import Contents, Store, parse_lines
from tests.tuning.records import A100, H100, H200, OP, make_record, problem, times

from .runner import run, write

CAUSAL = "attention causal {\n    mask kv <= qpos\n}\n"
SIZES = {"B": 1, "Hq": 4, "Hkv": 4, "Sq": 256, "Skv": 256, "Dqk": 64, "Dv": 64}
UNDEFINED = make_record()


def real_record(
    text: str = CAUSAL, dtype: str = "fp16", **others: Any
) -> tuple[Record, Definition]:
    """A record whose machine code this machine's compiler makes, and its definition."""
    kernel = compile_text(text)
    rendered = kernel.render("sm_90a", dtype=dtype, head_dim=64)
    compiled = compile_rendered(rendered)
    attention = rendered.program.attention
    found = make_record(
        op=digest_operation(attention),
        problem=Problem.of(dtype, SIZES, H200.sm_count),
        schedule=rendered.program.schedule,
        sass=digest_code(rendered, compiled),
        source=digest_source(rendered),
        environment=Environment(nvrtc=compiled.compiler_version, driver="580.159.04"),
    )
    return replace(found, **others), Definition(found.op, kernel.attention.source)


@pytest.fixture(scope="module")
def real() -> tuple[Record, Definition]:
    try:
        load_nvrtc()
    except AttnError as error:
        pytest.skip(error.diagnostics[0].message())
    return real_record()


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's records: none."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuned"


def folder_of(path: Path, *found: Record, definition: Definition | None = None) -> Path:
    Store(path).add(Contents(found, () if definition is None else (definition,)))
    return path


def ids(folder: Path) -> set[str]:
    return {record.id for _, _, part in Store(folder).files() for record in part.records}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.jsonl")}


# ---- list, show, path --------------------------------------------------------------------


def test_list_names_operations_by_class_of_gpu(tmp_path: Path) -> None:
    defined = Definition(OP, "attention local {\n}\n")
    other = make_record(device=H100, problem=problem(Skv=8192))
    folder = folder_of(tmp_path / "a", make_record(), other, definition=defined)
    result = run("cache", "list", folder)
    assert result.code == 0
    head, *rows = [line.split() for line in result.out.splitlines()]
    assert head == ["device", "operation", "problems", "records"]
    assert rows == [["h100-sxm", "local", OP[:12], "1", "1"], ["h200", "local", OP[:12], "1", "1"]]
    shown = json.loads(run("cache", "list", folder, "--device", "h100-sxm", "--json").out)
    assert [each["device"] for each in shown["operations"]] == [H100.name]


def test_nothing_is_listed_as_such(tmp_path: Path) -> None:
    tmp_path.joinpath("empty").mkdir()
    result = run("cache", "list", tmp_path / "empty")
    assert (result.code, result.out) == (0, "")
    assert "no records" in result.err


def test_show_marks_the_winner_and_what_is_tied(tmp_path: Path) -> None:
    won, tied = make_record(402.0, (64, 64)), make_record(400.0, (128, 128))
    slow = make_record(500.0, (64, 128))
    folder = folder_of(tmp_path / "a", won, tied, slow)
    result = run("cache", "show", OP[:6], folder)
    assert result.code == 0
    marks = {line.split()[-1]: line.split()[0] for line in result.out.splitlines()[3:]}
    assert marks == {tied.id: "=", won.id: "*", slow.id: "500.0"}
    assert str(problem()) in result.out
    assert "forward_mma 64x64, stages 2, warps 8" in result.out


def test_show_of_what_is_not_there_says_where_to_look() -> None:
    result = run("cache", "show", "abcdef")
    assert result.code == 2
    assert "A711" in result.err
    assert "attngen cache list" in result.err


def test_path_names_the_folders(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(own) in run("cache", "path").out
    monkeypatch.setenv("ATTNGEN_CACHE", "0")
    assert "turned off" in run("cache", "path").out


# ---- merge, import, export, prune --------------------------------------------------------


def test_merging_in_either_order_gives_the_same_bytes(tmp_path: Path) -> None:
    a = folder_of(tmp_path / "a", make_record(), make_record(390.0, (64, 64)))
    b = folder_of(
        tmp_path / "b", make_record(times=times(401.0, count=90)), make_record(device=A100)
    )
    for into, sources in (("ab", (a, b)), ("ba", (b, a))):
        assert run("cache", "merge", *sources, "--into", tmp_path / into).code == 0
    assert files(tmp_path / "ab") == files(tmp_path / "ba")
    assert len(ids(tmp_path / "ab")) == 3


def test_merge_of_one_folder_brings_it_into_its_form(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", make_record(), make_record(tile=(64, 64)))
    path = folder / H200.name / f"{OP}.jsonl"
    canonical = path.read_bytes()
    path.write_bytes(b"".join(reversed(canonical.splitlines(keepends=True))) * 2 + b"<<<<\n")
    result = run("cache", "merge", folder)
    assert result.code == 0
    assert "2 records" in result.out
    assert path.read_bytes() == canonical


def test_export_and_import_carry_everything(tmp_path: Path, own: Path) -> None:
    defined = Definition(OP, "attention local {\n}\n")
    folder = folder_of(tmp_path / "a", make_record(), make_record(device=H100), definition=defined)
    file = tmp_path / "all.jsonl"
    assert run("cache", "export", folder, "-o", file).code == 0
    assert run("cache", "export", folder).out.encode() == file.read_bytes()
    assert parse_lines(file.read_bytes()).definitions == (defined,)
    only = run("cache", "export", folder, "--device", "h200").out
    assert parse_lines(only.encode()).records == (make_record(),)
    result = run("cache", "import", file)
    assert result.code == 0
    assert "2 records read, 2 new" in result.out
    assert ids(own) == ids(folder)
    assert "2 records read, 0 new" in run("cache", "import", file).out


def test_import_takes_records_and_leaves_the_rest(tmp_path: Path, own: Path) -> None:
    file = tmp_path / "foreign.jsonl"
    file.write_bytes(b"\x80\x04cos\nsystem\n" + make_record().line().encode() + b"\n" + b"[" * 9999)
    result = run("cache", "import", file)
    assert result.code == 0
    assert "line 1" in result.err
    assert ids(own) == {make_record().id}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("merge",), "A710"),
        (("merge", "a", "b"), "A710"),
        (("import",), "A710"),
        (("import", "nowhere.jsonl"), "A712"),
        (("import", "bad\0name"), "A710"),
        (("list", "--device", "h2000"), "A493"),
        (("show",), "A710"),
        (("shw",), "A710"),
        (("prune", "--keep", "0"), "A710"),
    ],
)
def test_wrong_command_lines(arguments: tuple[str, ...], code: str) -> None:
    result = run("cache", *arguments)
    assert result.code == 2
    assert code in result.err


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    folder, file = folder_of(tmp_path / "a", make_record()), tmp_path / "file"
    file.touch()
    result = run("cache", "merge", folder, "--into", file)
    assert result.code == 2
    assert "A713" in result.err


def test_without_a_cache_a_folder_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", "0")
    folder = folder_of(tmp_path / "a", make_record())
    assert "A711" in run("cache", "import", folder).err
    assert run("cache", "import", folder, "--into", tmp_path / "b").code == 0


def test_prune_keeps_the_winner_and_what_is_tied(tmp_path: Path) -> None:
    tied = [make_record(400.0 + i, (64, 64 + 8 * i)) for i in range(3)]
    slow = [make_record(500.0 + i, (128, 64 + 8 * i)) for i in range(3)]
    folder = folder_of(tmp_path / "a", *tied, *slow)
    assert "2 records would go" in run("cache", "prune", folder, "--keep", "4", "--dry-run").out
    assert len(ids(folder)) == 6
    assert "2 removed" in run("cache", "prune", folder, "--keep", "4").out
    assert ids(folder) == {r.id for r in (*tied, slow[0])}
    run("cache", "prune", folder, "--keep", "1")
    assert ids(folder) == {r.id for r in tied}


def test_prune_counts_each_operation_by_itself(tmp_path: Path) -> None:
    """What is slow beside another operation may be the fastest of its own."""
    fast, slow = make_record(100.0), replace(make_record(900.0), op="f" * 64)
    folder = folder_of(tmp_path / "a", fast, slow)
    run("cache", "prune", folder, "--keep", "1")
    assert ids(folder) == {fast.id, slow.id}


def test_prune_of_nothing_is_no_error(own: Path) -> None:
    result = run("cache", "prune")
    assert result.code == 0
    assert str(own) in result.out


# ---- verify ------------------------------------------------------------------------------


def test_a_record_of_todays_code_is_valid(real: tuple[Record, Definition], tmp_path: Path) -> None:
    found, definition = real
    assert verify_record(found, definition).state is State.VALID
    elsewhere = replace(found, environment=Environment(nvrtc="12.9.86", driver="575"))
    assert verify_record(elsewhere, definition).state is State.VALID
    folder = folder_of(tmp_path / "a", found, definition=definition)
    result = run("cache", "verify", folder)
    assert (result.code, result.out) == (0, "1 valid, 0 stale, 0 unknown\n")


def test_verify_finds_the_same_code_for_another_text_of_the_operation(
    real: tuple[Record, Definition],
) -> None:
    """Names, comments, and whether dtype and head dim are written down make no difference."""
    found, _ = real
    text = CAUSAL.replace("causal {", "other {  # a name\n    dtype fp16\n    head_dim 64\n")
    assert verify_record(found, Definition(found.op, text)).state is State.VALID


def test_a_program_of_two_kernels_has_one_digest(real: tuple[Record, Definition]) -> None:
    text = "attention a {\n    tensor doc : int32[B, Skv]\n    mask doc[b, kv] > q\n}\n"
    rendered = compile_text(text, schedule="kernel forward_mma").render(
        "sm_90a", dtype="fp16", head_dim=64
    )
    compiled = compile_rendered(rendered)
    digests = {kernel.code_digest for kernel in read_resources(compiled.binary).values()}
    assert len(rendered.program.launches) == len(digests) == 2
    assert digest_code(rendered, compiled) not in digests
    found, definition = real_record(text)
    assert verify_record(found, definition).state is State.VALID


def test_the_code_for_any_layout_is_code_of_its_own(real: tuple[Record, Definition]) -> None:
    kernel = compile_text(CAUSAL, schedule="kernel forward_mma")
    found, definition = real
    rendered = kernel.render("sm_90a", dtype="fp16", head_dim=64)
    schedule = rendered.program.schedule
    aligned = replace(
        found, schedule=schedule, sass=digest_code(rendered, compile_rendered(rendered))
    )
    assert verify_record(aligned, definition).state is State.VALID
    anything = replace(aligned, problem=replace(aligned.problem, layout=LayoutClass.ANY))
    assert verify_record(anything, definition).state is State.STALE


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({"sass": "0" * 64}, State.STALE, "other machine code today"),
        ({"sass": "0" * 64, "environment": Environment(nvrtc="12.9.86", driver="575")},
         State.UNKNOWN, "than 12.9.86 did"),
        ({"sass": "0" * 64, "source": "0" * 64,
          "environment": Environment(nvrtc="12.9.86", driver="575")},
         State.STALE, "writes another text today"),
        ({"source": "0" * 64}, State.VALID, ""),
        ({"op": OP}, State.STALE, "another digest"),
        ({"device": replace(H200, arch="sm_999")}, State.UNKNOWN, "unknown target"),
    ],
)  # fmt: skip
def test_records_that_are_not_valid(
    real: tuple[Record, Definition], changes: dict[str, Any], state: State, reason: str
) -> None:
    found, definition = real
    verdict = verify_record(replace(found, **changes), definition)
    assert verdict.state is state
    assert reason in verdict.reason


def test_a_schedule_that_fits_no_more_is_stale(real: tuple[Record, Definition]) -> None:
    found, definition = real
    large = replace(found, schedule=replace(found.schedule, tile_q=1024, tile_kv=1024, warps=64))
    verdict = verify_record(large, definition)
    assert verdict.state is State.STALE
    assert "does not fit" in verdict.reason


@pytest.mark.parametrize(
    "text",
    ["", "attention", 'import "/etc/passwd"\nattention a { }\n', "attention a { dtype fp32 }\n"],
)
def test_definitions_from_anywhere_are_only_read(
    real: tuple[Record, Definition], text: str
) -> None:
    found, _ = real
    assert verify_record(found, Definition(found.op, text)).state is State.STALE


def test_without_a_definition_nothing_is_known() -> None:
    assert verify_record(UNDEFINED, None).state is State.UNKNOWN


def test_only_a_stale_winner_fails(real: tuple[Record, Definition], tmp_path: Path) -> None:
    found, definition = real
    stale = {"sass": "0" * 64}
    loser = replace(found, times=times(900.0), **stale)
    folder = folder_of(tmp_path / "a", found, loser, definition=definition)
    assert run("cache", "verify", folder).code == 0
    result = run("cache", "verify", folder, "--all")
    assert result.code == 0
    assert "stale, no winner" in result.out
    assert "1 valid, 1 stale, 0 unknown" in result.out
    winner = replace(found, times=times(100.0, count=90), **stale)
    folder_of(folder, winner)
    result = run("cache", "verify", folder)
    assert result.code == 1
    assert winner.id in result.out
    # One that is kept for its speed and then left out as stale would leave nothing.
    assert run("cache", "prune", folder, "--keep", "1", "--stale").code == 0
    assert ids(folder) == {found.id}


def test_an_unknown_winner_does_not_fail(tmp_path: Path) -> None:
    result = run("cache", "verify", folder_of(tmp_path / "a", UNDEFINED))
    assert result.code == 0
    assert "0 valid, 0 stale, 1 unknown" in result.out


# ---- compile ahead of time ---------------------------------------------------------------


def test_compile_for_a_device_takes_the_schedule_of_its_records(
    real: tuple[Record, Definition], tmp_path: Path, own: Path
) -> None:
    found, _ = real
    schedule = replace(found.schedule, kernel="forward_simt", tile_q=16, tile_kv=32, stages=1)
    tuned = replace(found, schedule=replace(schedule, warps=4))
    folder_of(own, tuned)
    spec = write(tmp_path, CAUSAL)
    arguments = ("--dtype", "fp16", "--head-dim", "64", "-o", tmp_path / "out")
    result = run("compile", spec, *arguments, "--device", "h200", "--shape", "B=1,Hq=4,Sq=256")
    assert result.code == 0
    assert "measured on this class of GPU" in result.err
    assert "forward_simt" in result.out
    assert [path.name for path in (tmp_path / "out").glob("*.cubin")] == ["causal.sm_90a.cubin"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--device", "h200"), "A711"),
        (("--shape", "B=1"), "A711"),
        (("--device", "h20", "--shape", "B=1"), "A493"),
        (("--device", "h200", "--shape", "B=1", "--arch", "sm_80"), "A711"),
        (("--device", "h200", "--shape", "Dqk=64"), "A711"),
        (("--device", "h200", "--shape", "Hq=4,Hkv=3"), "A711"),
    ],
)
def test_devices_and_shapes_that_do_not_go_together(
    arguments: tuple[str, ...], code: str, tmp_path: Path
) -> None:
    spec = write(tmp_path, CAUSAL)
    result = run("compile", spec, "--dtype", "fp16", "--head-dim", "64", *arguments)
    assert result.code == 2
    assert code in result.err
