"""What isl adds, and that its budget bounds it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from attngen.analysis.cubes import CubeBuilder
from attngen.analysis.integer_sets import IntegerSets
from attngen.analysis.key_ranges import MOST_RANGES, derive_key_ranges, derive_query_ranges
from attngen.analysis.linear import Atoms
from attngen.frontend.check import check
from attngen.frontend.load import load_text
from attngen.ir.traverse import postorder
from tests.analysis.masks import build
from tests.analysis.test_key_ranges import seen_and_covered

NATTEN = (
    "neighborhood(qpos // 11, kv // 11, Skv // 11, {size}, {dilation}) and "
    "neighborhood(qpos % 11, kv % 11, 11, {size}, {dilation})"
)
SHIFTED = (
    "(qpos // 14 + 3) // 7 == (kv // 14 + 3) // 7 and (qpos % 14 + 3) // 7 == (kv % 14 + 3) // 7"
)
HARD = {
    "two-dimensional neighborhood": NATTEN.format(size=3, dilation=1),
    "dilated neighborhood": NATTEN.format(size=3, dilation=2),
    "shifted windows": SHIFTED,
    "longformer": "window(left = 4, right = 4) or global_tokens(keep)",
    "three-dimensional neighborhood": (
        "neighborhood(qpos // 15, kv // 15, Skv // 15, 3) and "
        "neighborhood(qpos // 5 % 3, kv // 5 % 3, 3, 3) and neighborhood(qpos % 5, kv % 5, 5, 3)"
    ),
    "three distances": (
        "abs(qpos // 15 - kv // 15) + abs(qpos // 5 % 3 - kv // 5 % 3) + abs(qpos % 5 - kv % 5) < 3"
    ),
}
MANY = 2000
CHAINS = {
    "or of keys": " or ".join(f"kv == {3 * i}" for i in range(MANY)),
    "or of windows": " or ".join(f"{i} <= kv - qpos <= {i + 1}" for i in range(MANY)),
    "and of slopes": " and ".join(f"kv - {i % 7} * q <= {3 * i}" for i in range(MANY)),
    "and of holes": " and ".join(f"kv // 7 != {3 * i + 2}" for i in range(MANY)),
    "and of ors": " and ".join(f"(kv <= {i} or q >= {i % 9})" for i in range(MANY)),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", HARD)
def test_hard_masks_stay_sound_within_the_budget(name: str, transposed: bool) -> None:
    attention = build(HARD[name])
    for shape in ((66, 66), (30, 75)):
        if "keep" in HARD[name] and shape[0] > shape[1]:
            continue
        found = seen_and_covered(attention, shape, 8, w=1, seed=1, transposed=transposed)
        for seen, covered in found:
            assert (covered | ~seen).all()


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_two_thousand_terms_stay_sound_and_small(name: str) -> None:
    attention = build(CHAINS[name])
    for transposed in (False, True):
        derive = derive_query_ranges if transposed else derive_key_ranges
        ranges = derive(attention).ranges
        assert len(ranges) <= MOST_RANGES
        assert sum(1 for _ in postorder(*(e for r in ranges for e in (r.begin, r.end)))) < 1000
        for seen, covered in seen_and_covered(attention, (20, 60), 7, 1, 1, transposed=transposed):
            assert (covered | ~seen).all()


# ---- what isl adds ------------------------------------------------------------------------------

JOINT = {
    "limits that cross": ("kv <= qpos and kv + qpos <= 30", 1.0),
    "a distance in two dimensions": (
        "abs(qpos // 8 - kv // 8) + abs(qpos % 8 - kv % 8) <= 2",
        1.3,
    ),
    "limits that meet in one key": ("kv <= qpos and kv + qpos <= 2 * w and kv >= w", 1.0),
    "a remainder written out": ("kv - kv // 8 * 7 < qpos // 2", 1.6),
}


@pytest.mark.parametrize("name", JOINT)
def test_comparisons_hold_together(name: str) -> None:
    """The ranges are at most so many times as long as what is seen, and shorter than all keys."""
    mask, most = JOINT[name]
    attention = build(mask)
    for size in (1, 4):
        ((seen, covered), *_) = seen_and_covered(attention, (64, 64), size, w=1, seed=1)
        assert (covered | ~seen).all()
        spans = hull(seen)
        assert covered.sum() <= most * spans.sum()
        assert covered.sum() < covered.size


def hull(seen: np.ndarray) -> np.ndarray:
    """All keys between the first and the last that a tile sees."""
    return np.maximum.accumulate(seen, 1) & np.maximum.accumulate(seen[:, ::-1], 1)[:, ::-1]


# ---- the budget ----------------------------------------------------------------------------------


def test_a_budget_ends_isl_and_leaves_it_usable() -> None:
    attention = build(JOINT["a distance in two dimensions"][0])
    atoms = Atoms(attention, "q")
    assert attention.mask is not None
    cubes = CubeBuilder(atoms, "kv").build(attention.mask)
    enough = [len(IntegerSets(atoms, "kv").limits(cube)) for cube in cubes]
    assert all(enough)
    for most_operations in (1, 100, 1000, 10_000) * 5:
        small = IntegerSets(atoms, "kv", most_operations)
        assert [small.limits(cube) for cube in cubes] == [[] for _ in cubes]
        assert small.gave_up
        assert not small.limits(cubes[0]), "it does not start again"
    assert [len(IntegerSets(atoms, "kv").limits(cube)) for cube in cubes] == enough


def test_what_the_budget_cuts_off_is_noted() -> None:
    derived = derive_key_ranges(build(HARD["three distances"]))
    assert any("taken one by one" in note for note in derived.notes)


def test_without_isl_the_closed_forms_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "islpy", None)
    attention = build(JOINT["limits that cross"][0])
    derived = derive_key_ranges(attention)
    assert any("taken one by one" in note for note in derived.notes)
    for seen, covered in seen_and_covered(attention, (20, 20), 4, 1, 1):
        assert (covered | ~seen).all()


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))


def test_no_example_needs_isl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "islpy", None)
    attentions = [check(load_text(path.read_text(encoding="utf-8"))).attention for path in EXAMPLES]
    attentions += [build(HARD[name]) for name in HARD if name != "three distances"]
    for attention in attentions:
        for derived in (derive_key_ranges(attention), derive_query_ranges(attention)):
            assert not any("taken one by one" in note for note in derived.notes), attention.name


def test_a_budget_that_ends_while_a_number_is_read() -> None:
    """islpy takes such a number for None, which is an error of another class."""
    mask = (
        "kv <= qpos + 30 and ((where(b == 0, (qpos - kv) < w, doc[b, kv] == ids[b, q])"
        " and q % 3 != 1) and min(kv, 60 - kv) != (b - qpos * 2))"
    )
    derive_key_ranges(build(mask))
