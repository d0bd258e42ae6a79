"""The CPU run notices every missing barrier and shuffle, and every tile that is one too many.

`python -m tests.mutation` tries every mutant.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from attngen.cpu.mutate import Mutant, MutantKind, Outcome, Verdict, mutants, run_mutants
from tests import mutation
from tests.goldens import GOLDENS, Golden
from tests.judge import Work, check_library, complain_of_other_work, prepare
from tests.mutation import (
    Key,
    Tried,
    figures_of,
    key_of,
    line_of,
    lines_of,
    read_record,
    try_all,
)
from tests.tile_probe import with_probe
from tests.witnesses import WITNESSES

NAMES = ("ragged_prefill_bf16_d20_v12", "causal_fp32_d24_v20_keys_outside")
SMALL = [g for g in GOLDENS if g.name in NAMES]


def test_another_number_of_accesses_and_more_work_are_complaints() -> None:
    golden = Work((1, 2, 3, 4, 5), meetings=6, index_reads=7, notes=8, summaries=b"9")
    complain_of_other_work(golden, golden)
    complain_of_other_work(golden._replace(meetings=5, index_reads=6), golden)
    for wrong in (
        {"accesses": (1, 2, 3, 4, 4)},
        {"meetings": 7},
        {"index_reads": 8},
        {"notes": 0},
        {"summaries": b""},
    ):
        with pytest.raises(AssertionError):
            complain_of_other_work(golden._replace(**wrong), golden)


TWO_TEXTS = (
    """
constexpr int kA = 3;
AG_DEVICE void f(int n) {
    for (int i = 0; i < n; ++i) g(i);
    for (int i = 0; i < n; ++i) g(i);
}
""",
    """
constexpr int kB = 1;
constexpr int kA = 4;
AG_DEVICE void f(int n, int m) {
    h(m);
    for (int i = 0; i < n; ++i) g(i);
}
AG_DEVICE void e(int n) {
    for (int i = 0; i < n; ++i) g(i);
}
""",
)


def test_equal_lines_are_one_mutant_only_at_the_same_place_of_a_function() -> None:
    first, second = ([key_of(m) for m in mutants(text)] for text in TWO_TEXTS)
    assert len(set(first)) == len(first) == 5
    assert len(set(second)) == len(second) == 6
    shared = [(k.function, k.occurrence, k.before) for k in first if k in second]
    assert shared == [
        ("", 0, "n"),
        ("AG_DEVICE void f", 0, "0"),
        ("AG_DEVICE void f", 0, "<"),
    ]


def test_what_is_explained_is_a_line_of_a_golden() -> None:
    texts = [golden.path.read_text(encoding="utf-8") for golden in GOLDENS]
    for piece, _ in mutation.EXPLAINED:
        assert any(piece in text for text in texts), piece


def a_key(after: str) -> Key:
    return Key("AG_DEVICE void f", 1, "a = 1 + 2;", 5, "1", after)


PLACES = {a_key(str(i)): ["small", "large"] for i in range(6)}
TRIED = [
    Tried(a_key("0"), "small", Verdict.SURVIVED, "the check passes", 1.0),
    Tried(a_key("0"), "large", Verdict.KILLED, "AssertionError: o is wrong", 1.0),
    Tried(a_key("1"), "small", Verdict.EQUIVALENT, "the same machine code", 1.0),
    Tried(a_key("1"), "large", Verdict.SURVIVED, "the check passes", 1.0),
    Tried(a_key("2"), "small", Verdict.SURVIVED, "the check passes", 1.0),
    Tried(a_key("3"), "small", Verdict.EQUIVALENT, "the same machine code", 1.0),
    Tried(a_key("3"), "large", Verdict.UNBUILDABLE, "an error", 1.0),
    Tried(a_key("4"), "small", Verdict.KILLED, "shared_race: x.cu:1: thread 2", 1.0),
]


def test_what_is_still_to_be_tried_is_neither_noticed_nor_a_survivor() -> None:
    figures = figures_of(PLACES, TRIED)
    assert [key.after for key in figures.noticed] == ["0", "4"]
    assert {key.after: names for key, names in figures.survived.items()} == {"1": ("large",)}
    assert [key.after for key in figures.equivalent] == ["3"]
    assert [key.after for key in figures.open] == ["2", "5"]
    assert figures.judged == 3
    assert not figures.is_good
    text = "\n".join(lines_of(figures, PLACES))
    assert "1 survived (33.3% of those judged)" in text
    assert "2 not judged, or not in every golden: there was no time" in text
    assert "1 noticed by o is wrong" in text
    assert "1 noticed by a fault: shared_race" in text


def test_a_record_of_a_stopped_run_is_read_without_its_last_half_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    file.write_text('{"judge": "x"}\n' + "".join(map(line_of, TRIED)) + '{"key": [')
    assert read_record(file) == ({"judge": "x"}, TRIED)


class FalseJudges:
    """Mutant 0 is noticed in the first golden, 1 in the last one, and others nowhere."""

    def __init__(self, goldens: list[Golden], *_: object) -> None:
        self.goldens = goldens

    def judge(self, golden: Golden, key: Key) -> Outcome:
        where = {"0": self.goldens[0], "1": self.goldens[-1]}.get(key.after)
        verdict = Verdict.KILLED if golden is where else Verdict.SURVIVED
        return Outcome(mutants(TWO_TEXTS[0])[0], verdict, "said so")

    def close(self) -> None: ...


def test_a_mutant_is_tried_until_it_is_noticed_and_a_run_goes_on_where_one_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mutation, "Judges", FalseJudges)
    goldens = GOLDENS[:6]
    work = mutation.Work(goldens, {a_key(str(i)): goldens for i in range(3)})
    whole: list[Tried] = []
    try_all(work, [], whole.append, jobs=2, deadline=time.monotonic() + 60)
    assert len(whole) == len({(one.key, one.golden) for one in whole}) == 1 + 6 + 6
    assert sum(one.verdict is Verdict.KILLED for one in whole) == 2
    rest: list[Tried] = []
    try_all(work, whole[:5], rest.append, jobs=2, deadline=time.monotonic() + 60)
    assert {(x.key, x.golden) for x in whole[:5] + rest} == {(x.key, x.golden) for x in whole}
    assert len(rest) == len(whole) - 5
    try_all(work, [], lambda one: pytest.fail("there was no time"), jobs=2, deadline=0.0)


def is_one_more_tile(mutant: Mutant) -> bool:
    return mutant.after == "<=" and mutant.source.startswith(("for (int q0", "for (int kv0"))


@pytest.mark.parametrize("golden", SMALL, ids=lambda g: g.name)
def test_every_missing_barrier_and_shuffle_and_every_tile_too_many_is_noticed(
    golden: Golden, host_compiler: None
) -> None:
    text = golden.path.read_text(encoding="utf-8")
    missing = [m for m in mutants(text) if m.kind in (MutantKind.BARRIER, MutantKind.SHUFFLE)]
    too_many = [m for m in mutants(text) if is_one_more_tile(m)]
    assert len(missing) >= 5
    assert too_many
    chosen = missing + too_many
    check = partial(check_library, golden, prepare(golden))
    outcomes = run_mutants(text, chosen, check, jobs=2)
    assert [o for o in outcomes if o.verdict is Verdict.SURVIVED] == []


@pytest.mark.parametrize(
    ("piece", "complaint"),
    [
        ("return tile.kv_last <= tile.qpos_first", "another answer about a tile or a key"),
        ("is_whole = offset + kTileKv <= left", "other integers or words in shared memory"),
    ],
)
def test_a_full_tile_that_is_masked_all_the_same_is_noticed(
    piece: str, complaint: str, host_compiler: None
) -> None:
    golden = next(g for g in GOLDENS if g.name == "causal_fp16_d64_one_stage")
    rendered = golden.render()
    chosen = [
        replace(m, text=with_probe(rendered, m.text))
        for m in mutants(rendered.source)
        if piece in m.source and m.before == "<="
    ]
    check = partial(check_library, golden, prepare(golden))
    outcomes = run_mutants(with_probe(rendered, rendered.source), chosen, check, jobs=1)
    assert [o.how.partition(":")[2].strip() for o in outcomes] == [complaint]


HOLES = {
    "kept_documents": (
        ("AG_DEVICE void clear_dead_values", "key += 32", "1"),  # leaves out the first key
        ("AG_DEVICE void clear_dead_values", "key += 32", "33"),  # leaves out the 33rd key
        ("AG_DEVICE int next_group", "first += 32 * kGroupKv", "33"),  # leaves out a group
    ),
    "pointed": (
        ("AG_DEVICE int next_group", "ag_min(kGroupKv, end - group.kv_first) - 1;", "2"),
        ("AG_DEVICE int next_group", "lane() * kGroupKv < left;", "<="),  # a group behind the last
        ("AG_DEVICE void list_key_tiles", "end - first > kThreads * kTileKv", ">="),
    ),
    "small_blocks": (("AG_DEVICE void find_box0", "left = 64", "65"),),
    "limited": (("AG_DEVICE void mask_scores", "kIsFull ? ~0u", "1u"),),
    "wide": (("", "constexpr int kWordKv", "129"),),  # the second word begins a key too late
}
"""Mutants that no golden notices: a function, a piece of a line, what is put there."""


@pytest.mark.parametrize("witness", WITNESSES, ids=lambda w: w.name)
def test_a_witness_notices_what_no_golden_shows(witness: Golden, host_compiler: None) -> None:
    rendered, holes = witness.render(), HOLES[witness.name]
    chosen = [
        replace(mutant, text=with_probe(rendered, mutant.text))
        for mutant in mutants(rendered.source)
        for function, piece, after in holes
        if key_of(mutant).function == function and piece in mutant.source and mutant.after == after
    ]
    assert len(chosen) == len(holes)
    check = partial(check_library, witness, prepare(witness))
    outcomes = run_mutants(with_probe(rendered, rendered.source), chosen, check, jobs=2)
    assert [o.verdict for o in outcomes] == [Verdict.KILLED] * len(holes)
