"""Which schedule to use: from records where there are any, and how good the answer is.

    exact       measured for this problem on this class of GPU
    neighbour   on this class of GPU, for the nearest problem
    inherited   on another class of GPU of the same architecture
    model       nothing measured; the cost model's choice (`model_choice.py`)
    default     nothing known; the kernel family's own choice

A record counts only where its schedule agrees with what the user fixed and still fits the kernel
family and the target; where it does not, a note says why.  An answer is remembered, so asking again
takes microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias, final

from attngen.disk_cache import find_directory
from attngen.ir.schedule import Schedule
from attngen.record import record
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.measurement import Record
from attngen.tuning.problem import Problem
from attngen.tuning.store import EMPTY, Contents, Store, merge, open_stores
from attngen.tuning.winner import find_winner

__all__ = [
    "Answer", "Choose", "Grade", "Lookup", "Question", "ReasonsAgainst", "agrees", "open_lookup",
]  # fmt: skip

_FARTHEST: Final = 4.0
"""Doublings between neighbours: a record at 4k keys and rows says something up to 16k of them."""

_MOST_NOTES: Final = 8


class Grade(Enum):
    """How far the answer is from a measurement of the question, nearest first."""

    EXACT = "exact"
    NEIGHBOUR = "neighbour"
    INHERITED = "inherited"
    MODEL = "model"
    DEFAULT = "default"


@final
@record
class Question:
    """What is computed, on what; `wanted` is the user's schedule, in which None is auto."""

    op: str
    problem: Problem
    device: DeviceClass
    wanted: Schedule


@final
@record
class Answer:
    """A complete schedule, or None for the family's default.

    sentence:  for a person: where the schedule comes from.
    record:    the measurement behind it, where there is one.
    notes:     records that were passed over, and lines that could not be read.
    """

    grade: Grade
    sentence: str
    schedule: Schedule | None
    record: Record | None
    notes: tuple[str, ...]


ReasonsAgainst: TypeAlias = Callable[[Schedule], tuple[str, ...]]
"""Why a schedule cannot run the question's operation on its GPU; empty when it can."""

Choose: TypeAlias = Callable[[Question], Schedule | None]
"""A cost model's complete schedule for a question; None where it has none."""


@final
class Lookup:
    """Answers from some stores; threads may share one."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = tuple(stores)
        self._answers: dict[tuple[Question, bool], Answer] = {}

    def find(
        self, question: Question, reasons_against: ReasonsAgainst, model: Choose | None = None
    ) -> Answer:
        """The best answer that there is.

        `reasons_against` and `model` must be functions of the question.
        """
        key = question, model is not None
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._find(question, reasons_against, model)
        return found

    def forget(self) -> None:
        """Look into the stores again, because they changed."""
        self._answers.clear()

    def _find(
        self, question: Question, reasons_against: ReasonsAgainst, model: Choose | None
    ) -> Answer:
        notes: list[str] = []
        contents = self._read(question.device, question.op)
        notes += contents.notes
        usable = list(_usable(contents.records, question.wanted, reasons_against, notes))
        best, distance = _nearest(usable, question.problem)
        if best is not None:
            return _measured(question, best, distance, notes)
        best = self._inherit(question, reasons_against, notes)
        if best is not None:
            sentence = f"inherited from {best.device.name}: {_describe(best)}"
            return _answer(Grade.INHERITED, sentence, best.schedule, best, notes)
        chosen = None if model is None else model(question)
        if chosen is not None and agrees(question.wanted, chosen) and not reasons_against(chosen):
            sentence = "no record for it; the cost model's choice"
            return _answer(Grade.MODEL, sentence, chosen, None, notes)
        return _answer(Grade.DEFAULT, "no record for it; the family's default", None, None, notes)

    def _read(self, device: DeviceClass, op: str) -> Contents:
        found = [store.read(device, op) for store in self._stores]
        parts = [part for part in found if part != EMPTY]
        return parts[0] if len(parts) == 1 else merge(*parts)

    def _inherit(
        self, question: Question, reasons_against: ReasonsAgainst, notes: list[str]
    ) -> Record | None:
        """The winner of the nearest problem, of the most similar GPU that has one so near."""
        found: list[tuple[float, float, str, Record]] = []
        for device in self._relatives(question.device):
            contents = self._read(device, question.op)
            usable = list(_usable(contents.records, question.wanted, reasons_against, notes))
            best, distance = _nearest(usable, question.problem)
            if best is not None:
                unlike = _difference(device, question.device)
                found.append((distance, unlike, device.name, best))
        return min(found, key=lambda each: each[:3])[-1] if found else None

    def _relatives(self, device: DeviceClass) -> list[DeviceClass]:
        """Other classes of the same architecture, of which there are records."""
        known = {other for store in self._stores for other in store.devices()}
        alike = (other for other in known if other.arch == device.arch and other != device)
        return sorted(alike, key=lambda other: other.name)


def open_lookup() -> Lookup:
    """The answers of this process, from the repository's records and the user's."""
    return _open(find_directory())


@cache
def _open(directory: Path | None) -> Lookup:
    """One for each cache directory that the environment has named."""
    return Lookup(open_stores())


def agrees(wanted: Schedule, schedule: Schedule) -> bool:
    """Whether a complete schedule is one of those that the user leaves open."""
    settings = ((getattr(wanted, f.name), getattr(schedule, f.name)) for f in fields(Schedule))
    return all(fixed is None or fixed == chosen for fixed, chosen in settings)


def _usable(
    records: Iterable[Record],
    wanted: Schedule,
    reasons_against: ReasonsAgainst,
    notes: list[str],
) -> Iterator[Record]:
    """The records whose schedules can be used; `notes` grows by why others cannot."""
    known: dict[Schedule, tuple[str, ...]] = {}
    for each in records:
        if not agrees(wanted, each.schedule):
            continue
        if each.schedule not in known:
            known[each.schedule] = reasons_against(each.schedule)
            if known[each.schedule]:
                why = "; ".join(known[each.schedule])
                notes.append(f"the schedule of record {each.id} does not fit any more: {why}")
        if not known[each.schedule]:
            yield each


def _nearest(records: Sequence[Record], problem: Problem) -> tuple[Record | None, float]:
    """The winner of the problem nearest to this one, and how far it is."""
    distances: dict[Problem, float] = {}
    for other in {each.problem for each in records}:
        distance = problem.distance(other)
        if distance is not None and distance <= _FARTHEST:
            distances[other] = distance
    if not distances:
        return None, math.inf
    nearest = min(distances, key=lambda other: (distances[other], str(other)))
    return find_winner(r for r in records if r.problem == nearest), distances[nearest]


def _difference(device: DeviceClass, other: DeviceClass) -> float:
    """How unlike two GPUs of one architecture are, in doublings of size and bandwidth."""
    sm = math.log2(device.sm_count / other.sm_count)
    bandwidth = math.log2(device.bandwidth_tb_s / other.bandwidth_tb_s)
    return abs(sm) + abs(bandwidth)


def _measured(question: Question, best: Record, distance: float, notes: list[str]) -> Answer:
    if best.problem == question.problem:
        sentence = f"measured on this class of GPU: {_describe(best)}"
        return _answer(Grade.EXACT, sentence, best.schedule, best, notes)
    sentence = f"nearest record, {distance:g} doublings away: {_describe(best)}"
    return _answer(Grade.NEIGHBOUR, sentence, best.schedule, best, notes)


def _describe(best: Record) -> str:
    return f"{best.times.median_us:.1f} us for {best.problem} (record {best.id})"


def _answer(
    grade: Grade,
    sentence: str,
    schedule: Schedule | None,
    found: Record | None,
    notes: Sequence[str],
) -> Answer:
    shown = tuple(dict.fromkeys(notes))
    if len(shown) > _MOST_NOTES:
        left_out = f"and {len(shown) - _MOST_NOTES + 1} more like these"
        shown = (*shown[: _MOST_NOTES - 1], left_out)
    return Answer(grade, sentence, schedule, found, shown)
