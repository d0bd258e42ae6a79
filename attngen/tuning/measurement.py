"""Records: what was measured, on what, and the line of text that says it.

    {"schema":"attngen-tune/1","id":"…","op":"…","device":"sm_90a-132sm-…","problem":{…},
     "schedule":{…},"sass":"…","resources":{…},"times":{…},"checked":{…},"environment":{…},
     "provenance":{…}}

One record is one line of JSON, in one canonical form: sorted keys, ASCII, no NaN, times rounded
to a tenth of a microsecond.  Three kinds of fact are kept apart:

    identity     op, device, problem        what a lookup asks for
    validity     schedule, sass             a machine without a GPU can prove it again
    provenance                              who and when; never looked up, and not in the id

A line may come from anywhere, so it is data and nothing else: its size is limited, every value is
checked, and what is wrong with it is a `Rejected`, never an exception.

The machine code is that of some text, and a digest does not tell which.  So a file of records also
holds a `Definition`: the canonical `.attn` text of its operation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import field, fields, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from hashlib import sha256
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, final, get_args, get_type_hints

from attngen.ir.schedule import Schedule
from attngen.ir.types import FLOATING
from attngen.record import record
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.problem import Direction, LayoutClass, Problem

__all__ = [
    "MAX_LINE_BYTES", "SCHEMA", "Checked", "Definition", "Environment", "L2", "Line", "Measurement",
    "Mode", "Record", "Rejected", "Resources", "parse_line", "timestamp",
]  # fmt: skip

SCHEMA: Final = "attngen-tune/1"
"""Changes when the meaning of a line does; lines of another version are kept, and not used."""

MAX_LINE_BYTES: Final = 1 << 16

ID_DIGITS: Final = 16


class Mode(Enum):
    """How the timed launches were started."""

    GRAPH = "graph"
    """By replaying a CUDA graph."""
    EVENTS = "events"
    """One by one, between two events."""


class L2(Enum):
    """What the L2 cache held before each timed launch."""

    WARM = "warm"
    """The operands, as far as they fit."""
    COLD = "cold"
    """Nothing of them."""


@final
@record(kw_only=True)
class Measurement:
    """Times of one candidate, in microseconds; `low` and `high` are the ends of an interval that
    holds the median with 95 % confidence."""

    median_us: float
    low_us: float
    high_us: float
    count: int
    mode: Mode
    l2: L2

    def rounded(self) -> Measurement:
        """As it is recorded: to a tenth of a microsecond."""
        return replace(
            self,
            median_us=round(self.median_us, 1),
            low_us=round(self.low_us, 1),
            high_us=round(self.high_us, 1),
        )


@final
@record(kw_only=True)
class Resources:
    """What the compiler gave the kernel: registers of a thread; bytes of a thread, of a block."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@final
@record(kw_only=True)
class Checked:
    """How the output was compared with the float64 oracle before anything was timed."""

    max_error: float
    bound_ratio: float
    """The largest error as a part of what is allowed at that element: at most 1."""
    seed: int


@final
@record(kw_only=True)
class Environment:
    """Versions of what can change a time without changing the machine code, or changes it."""

    nvrtc: str
    driver: str


@final
@record(kw_only=True)
class Record:
    """One candidate's measurement, complete.

    op:          `ir.digest.digest_operation` of the variant that the kernel was made from.
    schedule:    complete, with its kernel family.
    is_default:  whether this is what ran where nothing was tuned, when it was timed.
    sass:        SHA-256 of the machine code that was timed (`engines.cuda_engine.digest_code`).
    source:      the same of the CUDA text, without comments (`digest_source`).
    provenance:  facts for a person, by name; `at` is a time like "2026-11-29T19:40:00Z".
    """

    op: str
    device: DeviceClass
    problem: Problem
    schedule: Schedule
    is_default: bool
    sass: str
    source: str
    resources: Resources
    times: Measurement
    checked: Checked
    environment: Environment
    provenance: Mapping[str, str | int | float] = field(compare=False)

    @property
    def id(self) -> str:
        """Names everything but the provenance."""
        return _digest(_facts(self))

    @property
    def key(self) -> str:
        """Equal for measurements of the same thing: all but times, resources and the check."""
        facts = _facts(self)
        return _digest({name: facts[name] for name in _KEY} | {"how": _how(self.times)})

    def line(self) -> str:
        """The record in its canonical form, without the end of the line."""
        return _dump({**_facts(self), "id": self.id, "provenance": dict(self.provenance)})


@final
@record
class Definition:
    """The text whose operation has this digest, at the dtype and head dims of its records.

    A complete `.attn` text by itself, without imports and schedules
    (`ir.attention.Attention.source`).
    """

    op: str
    text: str

    def line(self) -> str:
        return _dump({"schema": SCHEMA, "op": self.op, "text": self.text})


@final
@record
class Rejected:
    """A line that is no record of this version; `is_foreign` where it is one of another."""

    reason: str
    is_foreign: bool = False


Line: TypeAlias = Record | Definition | Rejected


def parse_line(line: bytes) -> Line:
    """What a line from anywhere says."""
    try:
        return _read_line(line)
    except _RefusedError as refused:
        return Rejected(str(refused))


def timestamp() -> str:
    """Now, as provenance has it: UTC, in seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- writing -----------------------------------------------------------------------------

_KEY: Final = ("op", "device", "problem", "schedule", "sass", "environment")


def _facts(r: Record) -> dict[str, Any]:
    """Everything that the id names, as JSON."""
    return {
        "schema": SCHEMA,
        "op": r.op,
        "device": r.device.name,
        "problem": _as_json(r.problem),
        "schedule": _schedule_as_json(r.schedule),
        "default": r.is_default,
        "sass": r.sass,
        "source": r.source,
        "resources": _as_json(r.resources),
        "times": _as_json(r.times.rounded()),
        "checked": _as_json(r.checked),
        "environment": _as_json(r.environment),
    }


def _as_json(value: Any) -> dict[str, Any]:
    """A record of plain values, by field."""
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case tuple():
            return list(value)
        case _:
            return value


def _schedule_as_json(schedule: Schedule) -> dict[str, Any]:
    """What differs from `Schedule()`: so a field that is added later changes no old record."""
    usual = _as_json(Schedule())
    return {name: v for name, v in _as_json(schedule).items() if v != usual[name]}


def _how(times: Measurement) -> list[str]:
    return [times.mode.value, times.l2.value]


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(value: Any) -> str:
    return sha256(_dump(value).encode()).hexdigest()[:ID_DIGITS]


# ---- reading -----------------------------------------------------------------------------


class _RefusedError(Exception):
    """What is wrong with a line, in words."""


_T = TypeVar("_T", bound=Enum)

_RECORD: Final = frozenset(
    {
        "schema", "id", "op", "device", "problem", "schedule", "default", "sass", "source",
        "resources", "times", "checked", "environment", "provenance",
    }
)  # fmt: skip
_DEFINITION: Final = frozenset({"schema", "op", "text"})

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ID: Final = re.compile(rf"[0-9a-f]{{{ID_DIGITS}}}")
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
_VERSION: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,39}")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_FOREIGN: Final = re.compile(r"attngen-tune/\d{1,4}")
_PRINTABLE: Final = re.compile(r"[\x20-\x7e]{0,200}")

_MOST: Final = 2**31 - 1
_MOST_US: Final = 3.6e9  # an hour
_MOST_FACTS: Final = 24
_MOST_DIGITS: Final = 20


def _read_line(line: bytes) -> Line:
    value = _load(line)
    if not isinstance(value, dict):
        _refuse("it is no object")
    schema = value.get("schema")
    if schema != SCHEMA:
        if isinstance(schema, str) and _FOREIGN.fullmatch(schema):
            return Rejected(f"it is of version {schema}; this one reads {SCHEMA}", is_foreign=True)
        _refuse(f"its schema is not {SCHEMA}")
    if "text" in value:
        _require_keys(value, _DEFINITION, "a definition")
        text = value["text"]
        if not isinstance(text, str) or not text.isascii():
            _refuse("text is no ASCII text")
        return Definition(_match(value["op"], _DIGEST, "op"), text)
    return _read_record(value)


def _load(line: bytes) -> Any:
    """The JSON of a line, within limits."""
    if len(line) > MAX_LINE_BYTES:
        _refuse(f"it has more than {MAX_LINE_BYTES} bytes")
    if not line.isascii():
        _refuse("it is not ASCII")
    try:
        return json.loads(
            line,
            parse_int=_read_integer,
            parse_constant=lambda name: _refuse(f"{name} is no number"),
            object_pairs_hook=_read_pairs,
        )
    except (ValueError, RecursionError):
        _refuse("it is no JSON")


def _read_integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        _refuse("a number is too long")
    return int(digits)


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        _refuse("a key occurs twice")
    return value


def _read_record(value: Mapping[str, Any]) -> Record:
    _require_keys(value, _RECORD, "a record")
    found = Record(
        op=_match(value["op"], _DIGEST, "op"),
        device=_read_device(value["device"]),
        problem=_read_problem(value["problem"]),
        schedule=_read_schedule(value["schedule"]),
        is_default=_boolean(value["default"], "default"),
        sass=_match(value["sass"], _DIGEST, "sass"),
        source=_match(value["source"], _DIGEST, "source"),
        resources=_read_resources(value["resources"]),
        times=_read_times(value["times"]),
        checked=_read_checked(value["checked"]),
        environment=_read_environment(value["environment"]),
        provenance=_read_provenance(value["provenance"]),
    )
    if _match(value["id"], _ID, "id") != found.id:
        _refuse("its id does not name its content")
    return found


def _read_device(value: Any) -> DeviceClass:
    device = DeviceClass.parse(value) if isinstance(value, str) else None
    if device is None:
        _refuse("device is no device class")
    return device


def _read_problem(value: Any) -> Problem:
    given = _object_of(value, Problem)
    dims = given["head_dims"]
    if not isinstance(dims, list) or len(dims) != 2:
        _refuse("head_dims is no pair")
    if _match(given["dtype"], _WORD, "dtype") not in FLOATING:
        _refuse("dtype is none of attngen's")
    waves = _number(given["waves"], "waves", low=2.0**-10, high=2.0**10)
    if not math.log2(waves).is_integer():
        _refuse("waves is no power of two")
    return Problem(
        dtype=given["dtype"],
        head_dims=(_integer(dims[0], "head_dims", 1), _integer(dims[1], "head_dims", 1)),
        group=_integer(given["group"], "group", 1),
        q_tokens=_integer(given["q_tokens"], "q_tokens"),
        kv_tokens=_integer(given["kv_tokens"], "kv_tokens"),
        waves=waves,
        layout=_choice(given["layout"], LayoutClass),
        direction=_choice(given["direction"], Direction),
    )


def _read_schedule(value: Any) -> Schedule:
    if not isinstance(value, dict):
        _refuse("schedule is no object")
    kinds = _schedule_kinds()
    for name in value:
        if name not in kinds:
            _refuse("schedule has a setting that this version does not know")
    schedule = Schedule(**{name: _setting(v, name, kinds[name]) for name, v in value.items()})
    if schedule.kernel is None:
        _refuse("schedule names no kernel family")
    return schedule


@cache
def _schedule_kinds() -> dict[str, tuple[type, ...]]:
    """The types of each setting, without None."""
    hints = get_type_hints(Schedule)
    kinds = {f.name: get_args(hints[f.name]) or (hints[f.name],) for f in fields(Schedule)}
    return {name: tuple(k for k in kind if k is not type(None)) for name, kind in kinds.items()}


def _setting(value: Any, name: str, kinds: tuple[type, ...]) -> Any:
    for kind in kinds:
        if issubclass(kind, Enum):
            return _choice(value, kind)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and type(value) is int:
            return _integer(value, name)
        if kind is str and isinstance(value, str):
            return _match(value, _WORD, name)
    _refuse(f"{name} has a value of another type")


def _read_resources(value: Any) -> Resources:
    given = _object_of(value, Resources)
    return Resources(**{name: _integer(v, name) for name, v in given.items()})


def _read_times(value: Any) -> Measurement:
    given = _object_of(value, Measurement)
    low, median, high = (
        _number(given[name], name, low=0.0, high=_MOST_US)
        for name in ("low_us", "median_us", "high_us")
    )
    if median == 0 or not low <= median <= high:
        _refuse("the median is not inside of its interval")
    return Measurement(
        median_us=median,
        low_us=low,
        high_us=high,
        count=_integer(given["count"], "count", 1),
        mode=_choice(given["mode"], Mode),
        l2=_choice(given["l2"], L2),
    )


def _read_checked(value: Any) -> Checked:
    given = _object_of(value, Checked)
    return Checked(
        max_error=_number(given["max_error"], "max_error", low=0.0, high=1e30),
        bound_ratio=_number(given["bound_ratio"], "bound_ratio", low=0.0, high=1.0),
        seed=_integer(given["seed"], "seed"),
    )


def _read_environment(value: Any) -> Environment:
    given = _object_of(value, Environment)
    return Environment(**{name: _match(v, _VERSION, name) for name, v in given.items()})


def _read_provenance(value: Any) -> dict[str, str | int | float]:
    if not isinstance(value, dict) or len(value) > _MOST_FACTS:
        _refuse("provenance is no object of a few facts")
    for name, fact in value.items():
        _match(name, _WORD, "a name in provenance")
        if isinstance(fact, str):
            _match(fact, _TIME if name == "at" else _PRINTABLE, name)
        else:
            _number(fact, name, low=-1e30, high=1e30)
    return dict(value)


# ---- values ------------------------------------------------------------------------------


def _refuse(reason: str) -> NoReturn:
    raise _RefusedError(reason)


def _require_keys(value: Mapping[str, Any], names: frozenset[str], what: str) -> None:
    if value.keys() != names:
        _refuse(f"it has not the keys of {what}")


def _object_of(value: Any, kind: type) -> dict[str, Any]:
    """An object with exactly the fields of a record."""
    if not isinstance(value, dict) or value.keys() != {f.name for f in fields(kind)}:
        _refuse(f"it has not the keys of {kind.__name__}")
    return value


def _match(value: Any, pattern: re.Pattern[str], name: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        _refuse(f"{name} is malformed")
    return value


def _boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        _refuse(f"{name} is neither true nor false")
    return value


def _integer(value: Any, name: str, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= _MOST:
        _refuse(f"{name} is no integer from {low} to {_MOST}")
    return value


def _number(value: Any, name: str, *, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:
        _refuse(f"{name} is no number from {low:g} to {high:g}")
    return float(value)


def _choice(value: Any, kind: type[_T]) -> _T:
    if isinstance(value, str):
        for member in kind:
            if member.value == value:
                return member
    _refuse(f"it has an unknown {kind.__name__}")
