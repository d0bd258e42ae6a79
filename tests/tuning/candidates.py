"""Candidates that work, and broken ones: real texts, with one line that should not be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Final

from attngen import options, targets
from attngen.cpu.build import build_library
from attngen.frontend.check import check
from attngen.frontend.load import load_text
from attngen.ir.schedule import Schedule
from attngen.ir.types import FLOATING
from attngen.tuning.build import Build, HostBuilder
from attngen.tuning.call import Call, Subject
from attngen.tuning.exam import Exam, make_exam, ragged_lengths

from .problems import CAUSAL

__all__ = ["BREAKS", "BrokenBuilder", "call_of", "exams_of", "simt", "subject_of"]

Break = Callable[[str], str]


def subject_of(text: str = CAUSAL, dtype: str = "fp32", dim: int = 16) -> Subject:
    unit = load_text(text)
    return Subject.of(unit, check(unit), FLOATING[dtype], (dim, dim), targets.get("sm_80"))


def call_of(S: int = 64, *, B: int = 1, H: int = 2, dim: int = 16) -> Call:
    return Call({"B": B, "Hq": H, "Hkv": H, "Sq": S, "Skv": S, "Dqk": dim, "Dv": dim}, {}, {})


def exams_of(subject: Subject, call: Call) -> tuple[Exam, Exam]:
    """The call itself, and a ragged one that is small enough for the CPU."""
    ragged = {**ragged_lengths(call.sizes), "Sq": 37, "Skv": 37}
    return make_exam(subject, call), make_exam(subject, Call(ragged, {}, {}))


def simt(tile_q: int, tile_kv: int) -> Schedule:
    return Schedule(
        kernel="forward_simt", tile_q=tile_q, tile_kv=tile_kv, stages=1, warps=tile_q // 4, splits=1
    )


def _at_start(line: str) -> Break:
    """The line becomes the first of the kernel."""
    return _replaced("_forward, Args) {", f"_forward, Args) {{\n{line}\n")


def _replaced(old: str, new: str) -> Break:
    def change(text: str) -> str:
        assert text.count(old) == 1, old
        return text.replace(old, new)

    return change


BREAKS: Final[Mapping[str, Break]] = {
    "out of bounds": _replaced("ag_store(row + d *", "ag_store(row + (1 << 24) + d *"),
    "endless": _at_start("for (volatile int i = 0; i < 1; i = 0) {}"),
    "crashing": _at_start("*reinterpret_cast<volatile int*>(8) = 1;"),
    "exiting": _at_start("exit(0);"),
    "wrong": _replaced("ag_from_float<Element>(o)", "ag_from_float<Element>(1.5f * o)"),
    "wrong on ragged": _replaced("kv0 < kv_end; kv0", "kv0 + kTileKv <= kv_end; kv0"),
    "half of the rows": _at_start("if (ag_block() % 2 == 1) return;"),
    "nothing": _at_start("return;"),
}


class BrokenBuilder:
    """Builds for the CPU, and breaks the texts of some schedules."""

    def __init__(self, subject: Subject, breaks: Mapping[Schedule, Break]) -> None:
        self._builder = HostBuilder(subject)
        self._breaks = breaks

    def build(self, schedule: Schedule) -> Build:
        made = self._builder.build(schedule)
        change = self._breaks.get(schedule)
        if change is None:
            return made
        rendered = replace(made.rendered, source=change(made.rendered.source))
        library = build_library(rendered.source, cache_dir=options.host_cache_dir())
        sass = sha256(library.read_bytes()).hexdigest()
        return replace(made, rendered=rendered, code=library, sass=sass)
