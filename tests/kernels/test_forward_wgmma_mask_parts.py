"""Every kind of part of a mask through forward_wgmma on the CPU: types, terms, tiles of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attngen.cpu.build import build_library
from tests.analysis.masks import AFFINE, PERIODIC, TRUTHS

from .family import join
from .test_forward_mma_mask_parts import MASKS
from .test_forward_mma_masks import RECURRING, RECURRING_AND_MORE, Problem, check, compile_mask

TILES = ("kv = 128", "kv = 112", "kv = 16")  # whole groups of 32 keys, half a one behind, one alone
READS = (
    # a read of both, beside what rows and keys say alone, with parts of either
    "kv < 40 or table[q // 4, kv // 4]",
    "ids[b, q] > 1 and keep[b, kv] and table[q // 4, kv // 4]",
    "keep[b, kv] or ids[b, q] > 2 or kv <= q and table[(doc[b, kv] + q) % 5, ids[b, q]]",
)
IN_WORDS = (
    # what row, key and pair say is joined for many keys at once
    "abs(q - kv) <= 9 or ids[b, q] > 2 or keep[b, kv]",
    "keep[b, kv] or (kv - q) % 3 == 0",
    "ids[b, q] > 2 or (q - kv) % 130 < 9",
    "ids[b, q] > 0 and keep[b, kv]",
    "keep[b, kv]",
)
SIZES = ((150, 140, True), (37, 300, False), (1, 70, False))


def check_all(masks: Any, tiles: str, folder: Path) -> list[str]:
    """Compare each with the oracle; their texts."""
    schedule = f"kernel forward_wgmma; tile q = 128, {tiles}"
    compiled = [compile_mask(i, mask, schedule, "sm_90a") for i, mask in enumerate(masks)]
    library = build_library(
        join([rendered for _, rendered in compiled]), cache_dir=folder, optimization=0
    )
    for mask, (kernel, rendered) in zip(masks, compiled, strict=True):
        for size in SIZES:
            check(f"{mask} at {size}", kernel, rendered, library, Problem(*size))
    return [rendered.source for _, rendered in compiled]


@pytest.mark.parametrize("tiles", TILES)
def test_parts(tiles: str, tmp_path: Path, host_compiler: None) -> None:
    texts = check_all(MASKS, tiles, tmp_path)
    assert "struct Attending" in texts[-1]  # it reads for each pair: found before the products
    assert all("struct Attending" not in text for text in texts[:-1])
    assert all("struct Parts" in text for text in texts[:4])


@pytest.mark.parametrize("tiles", TILES)
def test_pairs_that_read_are_found_row_by_row(
    tiles: str, tmp_path: Path, host_compiler: None
) -> None:
    texts = check_all(READS, tiles, tmp_path)
    assert all("attends[n][word]" in text for text in texts)


@pytest.mark.parametrize("tiles", TILES)
def test_no_pair_is_asked(tiles: str, tmp_path: Path, host_compiler: None) -> None:
    texts = check_all(IN_WORDS, tiles, tmp_path)
    assert all("keys_in_bounds(args, at, parts." in text for text in texts)
    assert all(" mask(" not in text for text in texts)


@settings(max_examples=1, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(TRUTHS | AFFINE, min_size=12, max_size=12, unique=True))
def test_random_masks(tmp_path_factory: Any, host_compiler: None, masks: list[str]) -> None:
    check_all(masks, "kv = 48", tmp_path_factory.mktemp("masks"))


@settings(max_examples=1, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(PERIODIC, min_size=6, max_size=6, unique=True))
def test_masks_that_begin_and_end_again(
    tmp_path_factory: Any, host_compiler: None, masks: list[str]
) -> None:
    check_all(RECURRING, "kv = 176", tmp_path_factory.mktemp("wide"))  # a word and a part of one
    check_all([*RECURRING_AND_MORE, *masks], "kv = 128", tmp_path_factory.mktemp("masks"))
