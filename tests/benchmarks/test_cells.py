"""The grids of the suites."""

from __future__ import annotations

import pytest

from benchmarks.cells import SUITES, make_cells, select_cells, shrink
from benchmarks.variants import VARIANTS, make_variant


def test_the_forward_grid_has_thirty_cells_of_one_width() -> None:
    cells = make_cells(["forward"])
    assert len(cells) == 30
    assert {(c.B * c.S, c.Hq * c.D, c.Dv) for c in cells} == {
        (16384, 2048, d) for d in (64, 128, 256)
    }
    assert {(c.variant, c.S) for c in cells if c.D == 64} == {
        (mask, 1024 << n) for mask in ("full", "causal") for n in range(5)
    }


def test_grouped_queries_have_eight_heads_for_each_key_head() -> None:
    cells = make_cells(["gqa"])
    assert {(c.B, c.Hq, c.Hkv, c.D) for c in cells} == {(1, 64, 8, 128)}
    assert sorted({c.S for c in cells}) == [4096, 8192, 16384, 32768]


def test_every_variant_but_the_full_one_has_a_cell() -> None:
    assert {c.variant for c in make_cells(["variants"])} == set(VARIANTS) - {"full"}


def test_names_are_unique_before_and_after_shrinking() -> None:
    cells = make_cells(SUITES)
    assert len({c.name for c in cells}) == len(cells)
    assert len({shrink(c).name for c in cells}) == len(cells)


def test_a_small_cell_keeps_its_variant_and_its_group() -> None:
    for cell in make_cells(SUITES):
        small = shrink(cell)
        assert (small.suite, small.variant, small.D) == (cell.suite, cell.variant, cell.D)
        assert small.Hq // small.Hkv == cell.Hq // cell.Hkv
        assert small.B * small.S * small.Hq <= 2048
        assert make_variant(small).mask_name == make_variant(cell).mask_name


def test_patterns_select_by_name() -> None:
    cells = make_cells(["forward", "gqa"])
    chosen = select_cells(cells, "forward-causal-d128-*,gqa-full-*-s4096")
    assert [c.name for c in chosen] == [
        *(f"forward-causal-d128-s{1024 << n}" for n in range(5)),
        "gqa-full-d128-s4096",
    ]
    assert select_cells(cells, None) == cells
    assert select_cells(cells, "backward-*") == ()


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="no suite 'decode'; there are forward, gqa"):
        make_cells(["decode"])
