"""How it is computed: a schedule never changes the answer beyond rounding."""

from __future__ import annotations

from enum import Enum
from typing import final

from attngen.record import record

__all__ = ["LoopOrder", "Normalize", "Passes", "Schedule"]


class LoopOrder(Enum):
    """Which tiles the outer loop walks."""

    Q_KV = "q, kv"
    """Query tiles outside, one per block; the row state stays in registers (FlashAttention-2)."""
    KV_Q = "kv, q"
    """Key tiles outside; the row state travels through a workspace (FlashAttention Algorithm 1)."""


class Passes(Enum):
    """How often the keys are walked."""

    THREE = "three"
    """Maximum, then sum, then weighted values: the textbook's safe softmax."""
    TWO = "two"
    """Maximum and sum together (online normalizer), then weighted values."""
    FUSED = "fused"
    """All in one walk, rescaling what was accumulated."""


class Normalize(Enum):
    """When the accumulated values are divided by the sum."""

    LAST = "last"
    EVERY_TILE = "every_tile"


@final
@record
class Schedule:
    """One complete schedule; None means auto: the family's default, later the tuner's choice."""

    loop: LoopOrder = LoopOrder.Q_KV
    passes: Passes = Passes.FUSED
    normalize: Normalize = Normalize.LAST
    tile_q: int | None = None
    tile_kv: int | None = None
    stages: int | None = None
    warps: int | None = None
    splits: int | None = None
    kernel: str | None = None
    """A kernel family by name; None: the best one that supports the problem."""
