"""Lookups: the nearest record that can be used, and the grade of each answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.ir.schedule import Passes, Schedule
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.lookup import Answer, Grade, Lookup, Question, agrees
from attngen.tuning.measurement import Record
from attngen.tuning.problem import Problem
from attngen.tuning.store import Contents, Store

from .records import A100, H100, H200, OP, digest, make_record, problem

AUTO, USUAL = Schedule(), problem()
GH200 = DeviceClass.named("gh200-96g")
SMALL, LARGE = (64, 64), (128, 128)


def ask(
    folder: Path,
    *found: Record,
    asked: Problem = USUAL,
    device: DeviceClass = H200,
    wanted: Schedule = AUTO,
    refused: Sequence[tuple[int, int]] = (),
    model: Schedule | None = None,
) -> Answer:
    """The answer from a store with these records; `refused` are tiles that fit no more."""
    store = Store(folder)
    store.add(Contents(found))
    question = Question(OP, asked, device, wanted)

    def reasons_against(schedule: Schedule) -> tuple[str, ...]:
        is_refused = (schedule.tile_q, schedule.tile_kv) in refused
        return ("it is too large",) if is_refused else ()

    return Lookup([store]).find(
        question, reasons_against, None if model is None else lambda q: model
    )


def tile(answer: Answer) -> tuple[int | None, int | None]:
    assert answer.schedule is not None
    return answer.schedule.tile_q, answer.schedule.tile_kv


def test_an_exact_record(tmp_path: Path) -> None:
    answer = ask(tmp_path, make_record(400.0, SMALL), make_record(300.0, LARGE))
    assert (answer.grade, tile(answer)) == (Grade.EXACT, LARGE)
    assert answer.record == make_record(300.0, LARGE)
    assert "300.0 us" in answer.sentence
    assert answer.notes == ()


def test_the_nearest_neighbour(tmp_path: Path) -> None:
    near = make_record(800.0, SMALL, problem=problem(Skv=16384))
    far = make_record(100.0, LARGE, problem=problem(Skv=1024))
    answer = ask(tmp_path, near, far, asked=problem(Skv=8192))
    assert (answer.grade, tile(answer)) == (Grade.NEIGHBOUR, SMALL)
    assert "1 doublings away" in answer.sentence
    assert str(near.problem) in answer.sentence


@pytest.mark.parametrize(
    "other",
    [problem(Skv=1 << 20), problem(Sq=1), problem(Dqk=64), replace(problem(), dtype="fp16")],
    ids=["too far", "decoding", "another head dim", "another dtype"],
)
def test_what_is_no_neighbour(tmp_path: Path, other: Problem) -> None:
    answer = ask(tmp_path, make_record(problem=other))
    assert (answer.grade, answer.schedule) == (Grade.DEFAULT, None)


def test_another_gpu_of_the_architecture_is_inherited_from(tmp_path: Path) -> None:
    answer = ask(tmp_path, make_record(device=H100), make_record(device=A100))
    assert answer.grade is Grade.INHERITED
    assert answer.record == make_record(device=H100)
    assert H100.name in answer.sentence


def test_the_most_similar_gpu_is_inherited_from(tmp_path: Path) -> None:
    like, unlike = make_record(tile=SMALL, device=GH200), make_record(tile=LARGE, device=H100)
    assert tile(ask(tmp_path, unlike, like)) == SMALL


def test_the_own_neighbour_comes_before_an_exact_record_of_another_gpu(tmp_path: Path) -> None:
    own = make_record(tile=SMALL, problem=problem(Skv=8192))
    assert tile(ask(tmp_path, own, make_record(tile=LARGE, device=H100))) == SMALL


def test_other_architectures_and_operations_say_nothing(tmp_path: Path) -> None:
    answer = ask(tmp_path, make_record(device=A100), make_record(op=digest("another")))
    assert answer.grade is Grade.DEFAULT


def test_without_records_the_model_decides(tmp_path: Path) -> None:
    chosen = make_record(tile=SMALL).schedule
    answer = ask(tmp_path, model=chosen)
    assert (answer.grade, answer.schedule, answer.record) == (Grade.MODEL, chosen, None)
    assert ask(tmp_path, make_record(), model=chosen).grade is Grade.EXACT
    assert ask(tmp_path / "none", model=chosen, refused=[SMALL]).grade is Grade.DEFAULT


def test_a_schedule_that_fits_no_more_is_passed_over_with_a_note(tmp_path: Path) -> None:
    fast, slow = make_record(300.0, LARGE), make_record(400.0, SMALL)
    answer = ask(tmp_path, fast, slow, refused=[LARGE])
    assert (answer.grade, tile(answer)) == (Grade.EXACT, SMALL)
    (note,) = answer.notes
    assert fast.id in note
    assert "too large" in note


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Schedule(tile_q=64), SMALL),
        (Schedule(tile_kv=128), LARGE),
        (Schedule(kernel="forward_mma", stages=2), LARGE),
        (Schedule(kernel="forward_simt"), None),
        (Schedule(passes=Passes.TWO), None),
    ],
)
def test_what_the_user_fixed_stays(
    tmp_path: Path, wanted: Schedule, found: tuple[int, int] | None
) -> None:
    answer = ask(tmp_path, make_record(400.0, SMALL), make_record(300.0, LARGE), wanted=wanted)
    assert answer.grade is (Grade.DEFAULT if found is None else Grade.EXACT)
    assert found is None or tile(answer) == found
    assert answer.schedule is None or agrees(wanted, answer.schedule)


def test_lines_that_cannot_be_read_are_notes(tmp_path: Path) -> None:
    ask(tmp_path, make_record())
    path = tmp_path / H200.name / f"{OP}.jsonl"
    path.write_bytes(path.read_bytes() + b"{\n" * 20)
    answer = ask(tmp_path)
    assert answer.grade is Grade.EXACT
    assert len(answer.notes) == 8
    assert "13 more" in answer.notes[-1]


def test_several_stores_are_one(tmp_path: Path) -> None:
    stores = [Store(tmp_path / name) for name in ("repository", "user")]
    stores[0].add(Contents((make_record(400.0, SMALL),)))
    stores[1].add(Contents((make_record(300.0, LARGE),)))
    question = Question(OP, problem(), H200, AUTO)
    assert tile(Lookup(stores).find(question, lambda schedule: ())) == LARGE


def test_an_answer_is_remembered_until_told_to_forget(tmp_path: Path) -> None:
    store = Store(tmp_path)
    lookup, question = Lookup([store]), Question(OP, problem(), H200, AUTO)
    first = lookup.find(question, lambda schedule: ())
    store.add(Contents((make_record(),)))
    assert lookup.find(replace(question), lambda schedule: ()) is first
    lookup.forget()
    assert lookup.find(question, lambda schedule: ()).grade is Grade.EXACT
