"""The machine code of forward_wgmma's loop over key tiles, on the way that masks nothing.

Speed itself needs a GPU; what an instruction too many costs does not.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from attngen.backend.nvrtc import compile_cuda
from tests.goldens import GOLDENS, Golden
from tests.sass import Instruction, disassemble, find_tool, parse, shortest_cycle

WGMMA = [golden for golden in GOLDENS if golden.name.endswith("_wgmma")]

MOST_BESIDE = 190
"""Instructions of a step beside its arithmetic: descriptors, barriers, the list."""

MORE_PER_SCORE = {
    "alibi": 1, "alphafold": 1, "grok_1": 3, "mla_prefill": 2, "sigmoid": 3, "t5": 1,
}  # fmt: skip
"""Beyond one for scale and maximum, power, sum, maximum: what score lines and weights add."""
MORE_PER_STEP = {"alphafold": 12, "t5": 3}
"""What keys say is read ahead of the products where a tile is not full: one more branch.  And where
a box has 8 keys of a row, whose chunks are exchanged."""


@pytest.mark.parametrize("golden", WGMMA, ids=lambda golden: golden.name)
def test_a_step_has_its_products_and_few_instructions_more(golden: Golden, tmp_path: Path) -> None:
    tool = find_tool("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    rendered = golden.render()
    cubin = compile_cuda(rendered.source, name=golden.name, target=rendered.target).binary
    code = disassemble(tool, cubin, rendered.launch.kernel, tmp_path)
    qk, v = golden.head_dim
    products = [i for i, instruction in enumerate(code) if instruction.name == "HGMMA"]
    loops = [loop for loop in (shortest_cycle(code, i) for i in products) if loop]
    # The step that opens a query tile is a loop, too; it does not multiply what was added up.
    rescales = rendered.program.attention.row_state.running_max
    inside = [loop for loop in loops if not rescales or _count(code, loop, "FMUL") >= v // 2]
    loop = min(inside, key=len)
    found = Counter(code[i].name for i in loop)
    keys = rendered.launch.tiles.tile_kv
    assert found["HGMMA"] == qk // 16 + keys // 16  # q k^T, and the product with v
    scores, acc = keys // 2, v // 2  # of a thread
    more = next((n for name, n in MORE_PER_SCORE.items() if golden.name.startswith(name)), 0)
    arithmetic = scores * (4 + more) + scores // 2 + acc + found["HGMMA"]
    beside = next((n for name, n in MORE_PER_STEP.items() if golden.name.startswith(name)), 0)
    assert len(loop) <= arithmetic + MOST_BESIDE + beside, found.most_common(12)


def _count(code: tuple[Instruction, ...], places: tuple[int, ...], name: str) -> int:
    return sum(code[i].name == name for i in places)


def test_the_shortest_way_round_leaves_out_what_is_jumped_over() -> None:
    shown = """
\t.section\t.text.other,"ax",@progbits
        /*0000*/                   EXIT ;
\t.section\t.text.mine,"ax",@progbits
\t.sectioninfo\t@"SHI_REGISTERS=255"
.L_x_0:
        /*0000*/                   HGMMA.64x8x16.F32 R24, gdesc[UR8], R24 ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   FSEL R0, R0, R1, P1 ;
        /*0030*/                   FSEL R2, R2, R3, P1 ;
.L_x_1:
        /*0040*/              @!P2 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2);
"""
    code = parse(shown, "mine")
    assert [instruction.name for instruction in code] == [
        "HGMMA", "BRA", "FSEL", "FSEL", "BRA", "EXIT", "BRA",
    ]  # fmt: skip
    assert shortest_cycle(code, 0) == (0, 1, 4)
    assert shortest_cycle(code, 2) == (2, 3, 4, 0, 1)
    assert shortest_cycle(code, 5) == ()
