"""Every kind of part of a mask through forward_mma on the CPU: types, terms, and tiles of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.cpu.build import build_library

from .family import join
from .test_forward_mma_masks import Problem, check, compile_mask

MASKS = (
    # keys of every type: int, float, a bool inside of a chain, and int64
    "doc[b, kv] % 3 == ids[b, q] % 3 or kv == q",
    "kv / 3 + 0.5 < q / 2 or kv == q",
    "kv == q or (keep[b, kv] and kv < q)",
    "floor(kv / 4) * 3 <= floor(q / 2) * 5",
    # of the row alone, of the key alone, of both in either chain
    "ids[b, q] > 1",
    "keep[b, kv]",
    "ids[b, q] > 1 and keep[b, kv] and kv <= q + w",
    "ids[b, q] > 1 or keep[b, kv] or kv <= q - w",
    "kv <= q or kv < plen[b]",
    # of the head alone, between others
    "doc[b, kv] < plen[b] % 4 and kv // 3 <= q // 2 + plen[b] // 5",
    # a read of both
    "kv <= q + 9 and table[q // 4, kv // 4]",
)
TILES = (
    "tile q = 16, kv = 16; warps 1",
    "tile q = 32, kv = 48; warps 1",  # two slabs, and half a group of keys
    "tile q = 32, kv = 64; warps 2",
)
SIZES = ((40, 23, True), (37, 100, False))


@pytest.mark.parametrize("tiles", TILES)
def test_parts(tiles: str, tmp_path: Path, host_compiler: None) -> None:
    schedule = f"kernel forward_mma; {tiles}"
    compiled = [compile_mask(i, mask, schedule) for i, mask in enumerate(MASKS)]
    texts = [rendered for _, rendered in compiled]
    assert all("find_attending" in rendered.source for rendered in texts[:8])
    library = build_library(join(texts), cache_dir=tmp_path, optimization=0)
    for mask, (kernel, rendered) in zip(MASKS, compiled, strict=True):
        for size in SIZES:
            check(f"{mask} at {size}", kernel, rendered, library, Problem(*size))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_many_reads_at_once_need_registers(head_dim: int) -> None:
    schedule = "kernel forward_mma; warps 4"
    _, rendered = compile_mask(0, "kv <= q and table[q // 4, kv // 4]", schedule, head_dim=head_dim)
    assert ("struct RowParts" in rendered.source) == (head_dim == 128)
    _, rendered = compile_mask(0, "doc[b, kv] == ids[b, q]", schedule, head_dim=head_dim)
    assert "struct RowParts" in rendered.source
