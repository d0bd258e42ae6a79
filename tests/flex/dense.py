"""Attention of FlexAttention's functions, dense in float64: they run on arrays of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]


def attend(
    q: Any,
    k: Any,
    v: Any,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """Output [B, Hq, Sq, Dv] and LSE [B, Hq, Sq]; a row without a key gives 0 and -inf."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    indices = np.ogrid[tuple(slice(0, n) for n in scores.shape)]
    if score_mod is not None:
        scores = np.broadcast_to(score_mod(scores, *indices), scores.shape)
    if mask_mod is not None:
        scores = np.where(mask_mod(*indices), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, weights / total, 0.0) @ v
        return out, (np.log(total) + np.where(np.isinf(top), 0.0, top))[..., 0]


def operands(
    B: int, Hq: int, Hkv: int, Sq: int, Skv: int, D: int = 16, seed: int = 0
) -> tuple[Any, Any, Any]:
    """float32 q, k, v."""
    rng = np.random.default_rng(seed)
    shapes = (B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, D)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return q, k, v
