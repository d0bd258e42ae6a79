"""The line of a record: canonical, strict, and harmless whatever it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.schedule import LoopOrder, Schedule
from attngen.tuning.measurement import (
    MAX_LINE_BYTES,
    SCHEMA,
    Definition,
    Record,
    Rejected,
    parse_line,
    timestamp,
)
from attngen.tuning.problem import LayoutClass

from .records import OP, make_record, problem, records, times

RECORD = make_record()


def changed(path: str, value: Any) -> bytes:
    """The line of RECORD with one value replaced, added, or left out (`...`)."""
    facts = json.loads(RECORD.line())
    *folders, name = path.split(".")
    inner = facts
    for folder in folders:
        inner = inner[folder]
    if value is ...:
        del inner[name]
    else:
        inner[name] = value
    return json.dumps(facts).encode()


def rejected(line: bytes) -> str:
    """The reason why a line is no record."""
    found = parse_line(line)
    assert isinstance(found, Rejected)
    return found.reason


@given(records)
def test_a_line_says_the_record(record: Record) -> None:
    line = record.line()
    assert parse_line(line.encode()) == record
    assert json.dumps(json.loads(line), sort_keys=True, separators=(",", ":")) == line
    assert line.isascii()
    assert "\n" not in line


def test_the_line_of_a_record() -> None:
    """What is in files stays readable: this text may only change with SCHEMA."""
    assert RECORD.id == "2aa40742ef93c5ee"
    assert list(json.loads(RECORD.line())) == [
        "checked", "default", "device", "environment", "id", "op", "problem", "provenance",
        "resources", "sass", "schedule", "schema", "source", "times",
    ]  # fmt: skip


def test_every_field_of_every_part_is_read_back() -> None:
    unusual = make_record(
        problem=replace(problem(Dqk=192), layout=LayoutClass.ANY),
        schedule=Schedule(loop=LoopOrder.KV_Q, tile_q=16, tile_kv=32, kernel="forward_simt"),
    )
    assert parse_line(unusual.line().encode()) == unusual


def test_times_are_rounded_when_they_are_written() -> None:
    exact = make_record(times=times(412.34567, spread=0.123))
    read = parse_line(exact.line().encode())
    assert isinstance(read, Record)
    assert (read.times.low_us, read.times.median_us, read.times.high_us) == (412.2, 412.3, 412.5)
    assert read.id == exact.id


def test_the_id_names_all_but_the_provenance() -> None:
    assert make_record(provenance={"host": "elsewhere"}).id == RECORD.id
    assert make_record(times=times(400.1)).id != RECORD.id
    assert make_record(sass="0" * 64).id != RECORD.id


def test_timestamps_are_what_provenance_takes() -> None:
    assert isinstance(parse_line(changed("provenance.at", timestamp())), Record)


def test_definitions_are_read_back() -> None:
    definition = Definition(OP, 'attention a {\n    mask kv <= qpos  # "x"\n}\n')
    assert parse_line(definition.line().encode()) == definition


def test_a_changed_value_is_noticed_by_the_id() -> None:
    assert "id" in rejected(changed("times.median_us", 400.1))
    assert "id" in rejected(changed("problem.kv_tokens", 8192))
    assert "id" in rejected(changed("schedule.stages", 3))


def test_lines_of_another_version_are_foreign() -> None:
    found = parse_line(changed("schema", "attngen-tune/2"))
    assert isinstance(found, Rejected)
    assert found.is_foreign
    assert SCHEMA in found.reason


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("op", ...), ("extra", 1), ("op", "x" * 64), ("op", "../" * 20), ("op", "A" * 64),
        ("sass", None), ("sass", "0" * 63), ("source", "x" * 64), ("id", "0" * 16),
        ("id", 12), ("default", 1), ("default", None),
        ("device", "h200"), ("device", "../../etc"), ("device", ["sm_90a"]),
        ("problem", []), ("problem.group", 0), ("problem.group", 1.0), ("problem.group", True),
        ("problem.dtype", "int8"), ("problem.dtype", ["bf16"]), ("problem.head_dims", [128]),
        ("problem.head_dims", [128, "128"]), ("problem.waves", 3.0), ("problem.waves", 0),
        ("problem.waves", -1), ("problem.waves", 2.0**900), ("problem.layout", "odd"),
        ("problem.kv_tokens", -1), ("problem.kv_tokens", 10**19), ("problem.more", 1),
        ("schedule", None), ("schedule.tile_q", "128"), ("schedule.tile_q", True),
        ("schedule.tile_q", 1.5), ("schedule.unknown", 1), ("schedule.kernel", ...),
        ("schedule.kernel", "a b"), ("schedule.kernel", "os.system"), ("schedule.loop", "q"),
        ("times.count", 0), ("times.low_us", 500.0), ("times.median_us", 0), ("times.l2", None),
        ("times.mode", "graphs"), ("times.high_us", 1e300), ("times.median_us", "400"),
        ("checked.bound_ratio", 1.01), ("checked.bound_ratio", -0.1), ("checked.seed", 0.5),
        ("environment.nvrtc", ""), ("environment.nvrtc", "13 0"), ("environment.driver", 580),
        ("provenance", []), ("provenance.at", "yesterday"), ("provenance.host", "a\nb"),
        ("provenance.host", ["a"]), ("provenance.Host", "a"), ("provenance.mhz", 1e300),
        ("provenance", {f"a{i}": i for i in range(100)}),
        ("resources.registers", -1), ("resources.registers", None), ("resources", {}),
    ],
)  # fmt: skip
def test_values_that_are_refused(path: str, value: Any) -> None:
    assert rejected(changed(path, value))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "JSON"),
        (b"null", "object"),
        (b"[" * 60_000, "JSON"),
        (b'{"a":' * 9_000 + b"1" + b"}" * 9_000, ""),
        (b"1" * 60_000, "long"),
        (b'{"schema":NaN}', "NaN"),
        (b'{"schema":-Infinity}', "Infinity"),
        (b'{"schema":1e999}', "schema"),
        (b'{"schema":1,"schema":1}', "twice"),
        (b'{"schema":"\xc3\xa9"}', "ASCII"),
        (RECORD.line().encode() + b" " * MAX_LINE_BYTES, "bytes"),
        (RECORD.line().encode()[:-1], "JSON"),
        (RECORD.line().encode() * 2, "JSON"),
    ],
)
def test_texts_that_are_refused(line: bytes, reason: str) -> None:
    assert reason in rejected(line)


@pytest.mark.parametrize("text", [None, 3, ["attention"], "é"])
def test_definitions_that_are_refused(text: Any) -> None:
    line = json.dumps({"schema": SCHEMA, "op": OP, "text": text}, ensure_ascii=False)
    assert rejected(line.encode())


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(line: bytes) -> None:
    assert rejected(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
paths = st.sampled_from(
    [
        *json.loads(RECORD.line()),
        *(f"{part}.{name}" for part, inner in json.loads(RECORD.line()).items()
          if isinstance(inner, dict) for name in inner),
    ]
)  # fmt: skip


@given(paths, json_values)
def test_no_value_in_any_place_raises(path: str, value: Any) -> None:
    """Wrong types, NaN, deep values, huge numbers: a record or a reason, never an exception."""
    found = parse_line(changed(path, value))
    if isinstance(found, Record):
        assert math.isfinite(found.times.median_us)
        assert parse_line(found.line().encode()) == found


@given(st.integers(0, len(RECORD.line()) - 1), st.integers(0, 127))
def test_a_changed_byte_gives_no_other_record(at: int, byte: int) -> None:
    line = bytearray(RECORD.line().encode())
    line[at] = byte
    found = parse_line(bytes(line))
    assert isinstance(found, Rejected) or found == RECORD
