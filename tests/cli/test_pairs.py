"""The pairs that are drawn and counted are those of the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attngen.cli import pairs as module
from attngen.cli.inputs import make_operands
from attngen.cli.pairs import Pairs, count_pairs
from attngen.cli.problem import Problem, make_problem
from attngen.frontend.check import check
from attngen.frontend.load import Unit, load_file, load_text
from attngen.oracle.dense import reference

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))


def _problem(unit: Unit, **shape: int) -> Problem:
    return make_problem(
        check(unit).attention,
        shape=shape,
        values={},
        inputs={},
        defaults={"B": 2, "Hq": 4, "Sq": 40},
        seed=1,
    )


def _visible(unit: Unit, problem: Problem) -> np.ndarray:
    operands = make_operands(problem, {}, seed=1)
    return reference(
        unit,
        *(operands[name].array for name in "qkv"),
        tensors={name: given.array for name, given in problem.tensors.items()},
        params=problem.params,
        dtype=problem.dtype.name,
    ).visible


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_as_the_oracle_sees_them(path: Path) -> None:
    unit = load_file(path)
    shape = {"Sq": 49, "Skv": 49} if "swin" in path.stem else {"Sq": 20, "Skv": 45}
    problem = _problem(unit, B=2, **shape)
    right = _visible(unit, problem)
    pairs = Pairs(problem)
    rows, keys = np.arange(shape["Sq"]), np.arange(shape["Skv"])
    for b in range(2):
        for h in (0, problem.sizes["Hq"] - 1):
            visible, unsure = pairs.visible(b, h, rows, keys)
            assert not unsure.any()
            assert (visible == right[b, h]).all()
    count = count_pairs(pairs, problem, lambda _: None)
    assert count.sample is None
    assert (count.pairs, count.total) == (int(right.sum()), right.size)


def test_lengths_take_part() -> None:
    unit = load_text(
        "attention a {\ntensor n : int32[B]\nlength q = n[b] // 2, kv = n[b]\nmask kv <= qpos\n}\n"
    )
    problem = _problem(unit, B=3, Sq=20, Skv=30)
    count = count_pairs(Pairs(problem), problem, lambda _: None)
    assert count.pairs == int(_visible(unit, problem).sum())


def test_cells_are_shares_of_pairs() -> None:
    unit = load_text("attention a {\nmask kv <= qpos\n}\n")
    problem = _problem(unit, Sq=50, Skv=100)
    count = count_pairs(Pairs(problem), problem, lambda _: None)
    right = _visible(unit, problem)[0, 0]
    rows, keys = (np.array([n * i // c for i in range(c + 1)]) for n, c in ((50, 16), (100, 48)))
    for i in range(16):
        for j in range(48):
            cell = right[rows[i] : rows[i + 1], keys[j] : keys[j + 1]]
            assert count.cells is not None
            assert count.cells[i, j] == pytest.approx(cell.mean())


def test_an_estimate_is_near_and_says_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVALUATED", 100_000)
    monkeypatch.setattr(module, "MAX_COLUMNS", 500)
    unit = load_text("attention a {\nmask kv <= qpos and qpos - kv < 300 * (h + 1)\n}\n")
    problem = _problem(unit, B=2, Hq=2, Hkv=2, Sq=1000, Skv=2000)
    count = count_pairs(Pairs(problem), problem, lambda _: None)
    right = int(_visible(unit, problem).sum())
    assert count.pairs == pytest.approx(right, rel=0.05)
    assert count.sample == "estimated from 96 of 1000 rows, 500 of 2000 keys, evenly spaced"


def test_masks_without_batch_are_evaluated_once() -> None:
    unit = load_text("attention a {\nmask kv <= qpos\n}\n")
    pairs = Pairs(_problem(unit, B=50, Hq=64))
    assert (pairs.batches, pairs.heads) == (1, 1)
    unit = load_text("attention a {\nmask kv <= qpos + b + hkv\n}\n")
    pairs = Pairs(_problem(unit, B=50, Hq=64, Hkv=8))
    assert (pairs.batches, pairs.heads) == (50, 64)
