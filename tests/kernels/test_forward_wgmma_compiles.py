"""What NVRTC says of forward_wgmma: products go on by themselves, and nothing spills.

ptxas warns (C7508 to C7519) where it waits for a product at once, or ignores how registers are
split; no such text is wrong, but each is slow.
"""

from __future__ import annotations

import re

import pytest

from attngen.backend.nvrtc import compile_cuda, spills_from_log

from .test_forward_wgmma_runs import compile_forced

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

BODIES = {
    "full": "",
    "causal": "mask causal",
    "softcap": "score softcap(s, 30.0)\nmask window(left = 500)",
    "documents": "tensor doc : int32[B, Skv]\nmask causal and doc[b, qpos] == doc[b, kv]",
    "capped_documents": """score softcap(s, 50.0)
        tensor doc : int32[B, Skv]
        mask window(left = 4095) and document(doc)""",
    "chunks": "mask causal and qpos // 100 == kv // 100",
    "neighbours": "mask abs(kv % 64 - q % 64) <= 3 and abs(kv // 64 - q // 64) <= 3",
    "pair_bias": "tensor bias : bf16[Hq, Sq, Skv]\nscore s + bias[h, q, kv]\nmask causal",
    "alibi": "score alibi(s)\nmask causal",
}
DIMS = {
    "full": (64, 128, 192),
    "causal": (64, 256),
    "softcap": (128,),
    "documents": (128, 256),
    "capped_documents": (128, 256),
    "chunks": (128, 256),
    "neighbours": (128, 192),
    "pair_bias": (64, 128, 256),
    "alibi": (128,),
}
CASES = [(name, dim) for name, dims in DIMS.items() for dim in dims]


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_products_are_not_waited_for(name: str, dim: int) -> None:
    kernel = compile_forced(f"attention a {{\n{BODIES[name]}\noutput o, lse\n}}\n")
    rendered = kernel.render("sm_90a", dtype="bf16", head_dim=dim)
    compiled = compile_cuda(rendered.source, name=name, target=rendered.target)
    assert re.findall(r"C75\d\d", compiled.log) == []
    spills = spills_from_log(compiled.log)[rendered.launch.kernel]
    assert (spills.store_bytes, spills.load_bytes) == (0, 0)
