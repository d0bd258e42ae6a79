"""Every error of names, types, statements and schedule values, as the reader sees it.

The cases are `tests/data/errors/*.attn` with their `.err`.  What a caller gives to `check`
stands in a first line of the form `# check(consts={"W": 2.5})`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.frontend import check_errors
from attngen.frontend.check import check
from attngen.frontend.load import load_file, load_text

DATA = Path(__file__).parent.parent / "data" / "errors"
STAGES = ("a2*", "a40*", "a491*", "a70*")
CASES = sorted(path for stage in STAGES for path in DATA.glob(f"{stage}.attn"))
CLASSES = sorted(
    (
        cls
        for _, cls in inspect.getmembers(check_errors, inspect.isclass)
        if cls.__module__ == check_errors.__name__
    ),
    key=lambda cls: getattr(cls, "code", ""),
)
CONCRETE = [cls for cls in CLASSES if cls is not check_errors.CheckDiagnostic]


def errors_of(text: str, name: str = "test.attn", **given: Any) -> tuple[Diagnostic, ...]:
    with pytest.raises(AttnError) as caught:
        check(load_text(text, name, DATA), **given)
    return caught.value.diagnostics


def only(text: str, **given: Any) -> Diagnostic:
    (diagnostic,) = errors_of(text, **given)
    return diagnostic


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_messages(path: Path, update_data: bool) -> None:
    text = path.read_text(encoding="utf-8")
    given = re.match(r"# check\((.*)\)\n", text)
    arguments = eval(f"dict({given[1]})") if given else {}
    found = errors_of(text, path.name, **arguments)
    expected = path.with_suffix(".err")
    shown = f"{AttnError(*found)}\n"
    if update_data:
        expected.write_text(shown, encoding="utf-8")
    assert shown == expected.read_text(encoding="utf-8")


def test_no_expected_file_is_orphaned() -> None:
    found = {path.stem for stage in STAGES for path in DATA.glob(f"{stage}.err")}
    assert found == {path.stem for path in CASES}


@pytest.mark.parametrize("cls", CONCRETE, ids=lambda cls: cls.__name__)
def test_every_error_has_a_case(cls: type[Diagnostic]) -> None:
    shown = (path.with_suffix(".err").read_text("utf-8") for path in CASES)
    assert any(f"error[{cls.code}]" in text for text in shown)


def test_codes_are_unique_and_exported() -> None:
    codes = [cls.code for cls in CONCRETE]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("A2..|A40.|A70.", code) for code in codes)
    assert sorted(check_errors.__all__) == sorted(cls.__name__ for cls in CLASSES)


# ---- where an error points ---------------------------------------------------------------


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_spans_are_inside_and_in_the_order_of_the_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    given = re.match(r"# check\((.*)\)\n", text)
    found = errors_of(text, path.name, **(eval(f"dict({given[1]})") if given else {}))
    for diagnostic in found:
        for span in (diagnostic.span, *(note.span for note in diagnostic.notes())):
            if span is not None:
                assert 0 <= span.start <= span.end <= len(span.source.text)
    own = [d.span.start for d in found if d.span and d.span.source.name == path.name]
    assert own == sorted(own)


def test_an_error_in_a_library_definition_shows_the_call() -> None:
    error = only("attention a {\n tensor t : float[Skv]\n mask key_padding(t)\n}")
    assert error.code == "A212"
    assert error.span is not None
    assert error.span.source.name == "attngen/library/key_padding.attn"
    calls = [note for note in error.notes() if note.label == "`key_padding` is used here"]
    assert [note.span.text for note in calls if note.span] == ["key_padding(t)"]


def test_a_hidden_index_is_reported_at_the_call_of_the_definition() -> None:
    found = errors_of("attention a {\n scale where(causal, 1.0, 2.0)\n}")
    assert [(d.code, d.span.text) for d in found if d.span] == [("A206", "causal")] * 2
    assert [d.message().split()[-1] for d in found] == ["`kv`", "`qpos`"]


# ---- one mistake, one error --------------------------------------------------------------


def test_a_name_that_failed_once_is_silent_afterwards() -> None:
    text = """attention a {
        let x = foo + 1
        let y = x * 2
        score s + y + x
        mask x == y and kv <= x
        mask kv <= bar
    }"""
    names = [d.span.text for d in errors_of(text) if d.span]
    assert names == ["foo", "bar"]


def test_an_error_in_a_definition_is_reported_once() -> None:
    text = "define f(x : int) : int = x + foo\nattention a {\n mask f(1) < f(2) and f(3) < kv\n}"
    assert only(text).code == "A201"


def test_an_unused_definition_is_checked_too() -> None:
    assert only("define f(n : int) : int = n / 2\nattention a {\n}").code == "A211"
    unused = "define f(n : int, on : flag, t : tensor) : float = t[n] * 2.0 ** n + where(on, 1, 2)"
    check(load_text(f"{unused}\nattention a {{\n}}"))


def test_a_failed_part_is_never_dropped_in_silence() -> None:
    for text in ("const T = t[0]\n tensor t : int32[B]\n mask kv < T", "let x = y\n mask x"):
        assert errors_of(f"attention a {{\n {text}\n}}")


def test_a_long_chain_of_definitions_is_no_traceback() -> None:
    chain = [f"define f{i}(x : int) : int = f{i + 1}(x + 1)" for i in range(1500)]
    text = "\n".join(
        [*chain, "define f1500(x : int) : int = x", "attention a {", " mask f0(kv) < 3"]
    )
    assert {d.code for d in errors_of(f"{text}\n}}")} == {"A227"}


def test_doubling_definitions_stop_early() -> None:
    chain = [f"define f{i} : int = f{i + 1} + f{i + 1}" for i in range(60)]
    text = "\n".join([*chain, "define f60 : int = 1", "attention a {", " mask f0 < kv"])
    assert {d.code for d in errors_of(f"{text}\n}}")} == {"A226"}


def test_constants_cannot_grow_without_end() -> None:
    lines = [f"let x{i} = x{i - 1} * x{i - 1}" for i in range(1, 190)]
    text = "\n".join(["attention a {", "let x0 = 2", *lines, "mask x189 < kv", "}"])
    assert only(text).code == "A216"


# ---- files -------------------------------------------------------------------------------


def test_an_import_in_a_text_without_a_place() -> None:
    with pytest.raises(AttnError) as caught:
        load_text('import "x.attn"\nattention a {\n}')
    assert caught.value.diagnostics[0].code == "A701"


@pytest.mark.parametrize("path", [".", "..", "nothing.attn", "a\0b.attn", "/dev/zero", ""])
def test_paths_that_cannot_be_read(path: str, tmp_path: Path) -> None:
    with pytest.raises(AttnError) as caught:
        load_text(f'import "{path}"\nattention a {{\n}}', directory=tmp_path)
    assert caught.value.diagnostics[0].code in ("A701", "A105", "A104", "A103")
    with pytest.raises(AttnError):
        load_file(tmp_path / path if "\0" not in path else path)


def test_a_file_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bytes.attn"
    path.write_bytes(b"attention \xff {\n}\n")
    with pytest.raises(AttnError) as caught:
        load_file(path)
    assert caught.value.diagnostics[0].code == "A701"
    path.write_bytes(b"#" * 2_000_000)
    with pytest.raises(AttnError) as caught:
        load_file(path)
    assert "bytes" in str(caught.value)


def test_imports_go_round(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "b")):
        text = f'import "{other}.attn"\ndefine {name}_value : int = 1\n'
        (tmp_path / f"{name}.attn").write_text(text)
    with pytest.raises(AttnError) as caught:
        load_text('import "a.attn"\nattention x {\n}', directory=tmp_path)
    (error,) = caught.value.diagnostics
    assert error.code == "A702"
    assert error.label_text() == "b.attn -> c.attn -> b.attn"


def test_a_syntax_error_in_an_import_is_shown_there(tmp_path: Path) -> None:
    (tmp_path / "bad.attn").write_text("define f : int = )\n")
    with pytest.raises(AttnError) as caught:
        load_text('import "bad.attn"\nattention x {\n}', directory=tmp_path)
    (error,) = caught.value.diagnostics
    assert error.span is not None
    assert error.span.source.name == "bad.attn"


def test_two_imports_with_one_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.attn").write_text("define near : bool = kv <= qpos\n")
    text = 'import "a.attn"\nimport "b.attn"\nattention x {\n mask near\n}'
    with pytest.raises(AttnError) as caught:
        load_text(text, directory=tmp_path)
    assert [d.code for d in caught.value.diagnostics] == ["A203"]
