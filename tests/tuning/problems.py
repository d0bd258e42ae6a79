"""Small attention variants, specialised as the tuner sees them."""

from __future__ import annotations

from attngen.frontend.check import Checked, check
from attngen.frontend.load import load_text
from attngen.ir.attention import Attention
from attngen.ir.types import FLOATING
from attngen.passes.pipeline import run_passes
from attngen.passes.specialize import specialize

__all__ = ["CAUSAL", "DOCUMENTS", "FULL", "specialised", "the_check"]

FULL = "attention full {\n}\n"
CAUSAL = "attention causal_attention {\n    mask causal\n}\n"
DOCUMENTS = """\
attention packed_documents {
    tensor doc : int32[B, Skv]
    mask causal and document(doc)
}
"""


def the_check(text: str, dtype: str = "bf16", dims: tuple[int, int] = (64, 64)) -> Checked:
    return check(load_text(text), dtype=dtype, head_dim=dims)


def specialised(text: str, dtype: str = "bf16", dims: tuple[int, int] = (64, 64)) -> Attention:
    checked = the_check(text, dtype, dims)
    return run_passes(specialize(checked.attention, FLOATING[dtype], *dims))
