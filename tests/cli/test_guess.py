"""Captured tensors that are made up are valid: the oracle reads nothing outside of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attngen.cli.inputs import make_operands
from attngen.cli.problem import Problem, make_problem
from attngen.frontend.check import check
from attngen.frontend.load import load_file, load_text
from attngen.oracle.dense import reference

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))
FITTING = {"swin_shifted": {"Sq": 49, "Skv": 49}}
"""Sizes for variants that are made for these alone."""


def _problem(body: str, seed: int = 0, **shape: int) -> Problem:
    unit = load_text(f"attention a {{\n{body}\n}}\n")
    return make_problem(
        check(unit).attention,
        shape=shape,
        values={},
        inputs={},
        defaults={"B": 2, "Hq": 4, "Sq": 40},
        seed=seed,
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example(path: Path) -> None:
    unit = load_file(path)
    for sizes in ({"Sq": 24, "Skv": 24}, {"Sq": 9, "Skv": 33}):
        problem = make_problem(
            check(unit).attention,
            shape=FITTING.get(path.stem, sizes),
            values={},
            inputs={},
            defaults={"B": 2, "Hq": 2, "Sq": 24},
            seed=0,
        )
        operands = make_operands(problem, {}, seed=0)
        found = reference(
            unit,
            *(operands[name].array for name in "qkv"),
            tensors={name: given.array for name, given in problem.tensors.items()},
            params=problem.params,
            dtype=problem.dtype.name,
        )
        assert np.isfinite(found.o).all()


def test_lengths() -> None:
    problem = _problem("tensor n : int32[B]\nlength kv = n[b]", B=5, Skv=30)
    values = problem.tensors["n"].array
    assert values.max() == values[0] == 30
    assert values.min() >= 1
    assert _problem("tensor n : int32[B]\nlength kv = n[b]", Skv=0).tensors["n"].array.max() == 0


def test_segments_are_sorted() -> None:
    body = "tensor d : int32[B, Skv]\nmask d[b, qpos] == d[b, kv]"
    values = _problem(body, B=3, Skv=200).tensors["d"].array
    assert (np.diff(values, axis=1) >= 0).all()
    assert values.min() == 1
    assert len(np.unique(values)) > 1


def test_zero_means_no_segment() -> None:
    body = "tensor d : int32[B, Skv]\nmask d[b, qpos] == d[b, kv] and d[b, kv] > 0"
    values = _problem(body, B=3, Skv=200).tensors["d"].array
    assert {0, 2} <= set(np.unique(values).tolist())


def test_indices_stay_inside() -> None:
    body = (
        "tensor page : int32[B, NB]\ntensor keep : bool[NP, 8]\nmask keep[page[b, kv // 8], kv % 8]"
    )
    problem = _problem(body, Skv=50)
    assert problem.sizes["NB"] == 7
    page = problem.tensors["page"].array
    assert 0 <= page.min() <= page.max() < problem.sizes["NP"]


def test_positions() -> None:
    body = "tensor p : int32[B, Skv]\nmask p[b, kv] <= p[b, qpos]"
    assert (_problem(body).tensors["p"].array == np.arange(40)).all()


def test_words() -> None:
    body = "tensor w : uint32[Sq, NW]\nmask bit(w[q, kv // 32], kv % 32)"
    problem = _problem(body, Sq=10, Skv=70)
    assert problem.tensors["w"].array.dtype == np.uint32
    assert problem.tensors["w"].array.shape == (10, 3)
    assert problem.tensors["w"].array.max() > 2**31


def test_roots_get_positive_numbers() -> None:
    body = "tensor t : float[B]\nscore s / t[b] + log(t[b])"
    assert (_problem(body).tensors["t"].array > 0).all()


def test_large_optional_dimensions_are_one() -> None:
    body = "tensor t : float[B?, Hq?, Sq, Skv]\nscore s + t[b, h, q, kv]"
    assert _problem(body, B=2, Hq=2, Sq=8).tensors["t"].array.shape == (2, 2, 8, 8)
    assert _problem(body, B=64, Hq=16, Sq=300).tensors["t"].array.shape == (1, 1, 300, 300)


def test_small_elements_are_not_overrun() -> None:
    body = "tensor t : int8[Skv]\nmask kv < t[kv]"
    assert _problem(body, Skv=1000).tensors["t"].array.max() <= 127


def test_named_sizes_are_large_enough() -> None:
    body = "param P : int = 5\ntensor t : bool[T, T]\nmask kv < P or t[q, kv - P]"
    assert _problem(body, Sq=10, Skv=40).sizes["T"] == 35
    body = "tensor t : float[L]\nscore s + t[min(kv, L - 1)]"
    assert _problem(body, Skv=30).sizes["L"] == 30
    body = "tensor t : float[NW, Skv]\nscore s + t[b % NW, kv]"
    assert _problem(body, B=3).sizes["NW"] == 3


def test_the_same_seed_gives_the_same_arrays() -> None:
    body = "tensor t : float[Skv]\nscore s + t[kv]"
    one, two, three = (_problem(body, seed).tensors["t"].array for seed in (0, 0, 1))
    assert (one == two).all()
    assert (one != three).any()
