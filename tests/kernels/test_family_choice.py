"""Which family runs a variant on sm_90a, where three of them could."""

from __future__ import annotations

import pytest

import attngen

DOC = "tensor doc : int32[B, Skv]"
MARKED = "tensor marked : bool[B, Skv]"
TABLE = "tensor table : bool[NB, NB]"


@pytest.mark.parametrize(
    ("lines", "family"),
    [
        ((), "forward_wgmma"),
        (("mask causal",), "forward_wgmma"),
        (("mask window(left = 100)", "score softcap(s, 30.0)"), "forward_wgmma"),
        # Cheap, once what depends on the sequence alone is known.
        (("tensor n : int32[B]", "mask kv <= qpos or kv < n[b]"), "forward_wgmma"),
        # Most of its tiles are decided by the table.
        ((TABLE, "mask table[q // 128, kv // 128]"), "forward_wgmma"),
        # Dear for a pair, but not once what it takes of rows and keys is known.
        ((DOC, "mask causal and document(doc)"), "forward_wgmma"),
        (("mask (q // 7) * 7 + kv % 5 <= q % 11 + 3",), "forward_wgmma"),
        # Every pair reads for itself, and no table of blocks decides its tiles.
        (("tensor w : fp32[Skv]", "mask w[(q + kv) % Skv] > 0.5"), "forward_mma"),
        # Some rows see all keys, most see few: each query tile is a block of its own.
        ((MARKED, "mask window(left = 100) or global_tokens(marked)"), "forward_wgmma"),
    ],
)
def test_the_faster_family_comes_first(lines: tuple[str, ...], family: str) -> None:
    assert family_of(lines) == family


def test_a_named_family_is_taken() -> None:
    lines = (MARKED, "mask window(left = 100) or global_tokens(marked)")
    assert family_of(lines, schedule="kernel forward_mma") == "forward_mma"


def family_of(lines: tuple[str, ...], schedule: str | None = None) -> str:
    text = "\n".join(("attention a {", *(f"    {line}" for line in lines), "}", ""))
    kernel = attngen.compile_text(text, dtype="bf16", head_dim=128, schedule=schedule)
    return kernel.render("sm_90a").program.main.family
