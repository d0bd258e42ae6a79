"""PyTorch's own FlexAttention in eager mode, the peer that attngen is compared with."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.attention.flex_attention as peer

from attngen.flex import flex_attention


def eager(
    q: Any,
    k: Any,
    v: Any,
    score_mod: Any = None,
    mask_mod: Any = None,
    scale: float | None = None,
    *,
    enable_gqa: bool = False,
) -> tuple[Any, Any]:
    """Output and LSE, uncompiled."""
    mask = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mask_mod is not None:
            rows, keys = q.shape[2], k.shape[2]
            mask = peer.create_block_mask(
                mask_mod, q.shape[0], q.shape[1], rows, keys, device="cpu"
            )
        before = peer._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
        peer._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # without it, eager mode compiles
        try:
            request = peer.AuxRequest(lse=True)
            o, aux = peer.flex_attention(
                q, k, v, score_mod, mask, scale, enable_gqa, return_aux=request
            )
        finally:
            peer._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
    return o, aux.lse


def largest_difference(
    q: Any, k: Any, v: Any, score_mod: Any = None, mask_mod: Any = None, **options: Any
) -> float:
    """Between attngen's output and LSE and the peer's, in float32."""
    expected = eager(q, k, v, score_mod, mask_mod, **options)
    found = flex_attention(
        q, k, v, score_mod, mask_mod=mask_mod, return_lse=True, engine="numpy", **options
    )
    gaps = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.isinf(), other.isinf())
        gaps.append((one - other).nan_to_num(0.0).abs().max().item())
    return float(max(gaps))


def attending_pairs(mask_mod: Any, B: int, H: int, rows: int, keys: int) -> Any:
    """[B, H, rows, keys]: which pairs attend, evaluated as eager mode does."""
    return peer.create_mask(mask_mod, B, H, rows, keys, device="cpu")
