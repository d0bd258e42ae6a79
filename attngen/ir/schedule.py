"""How it is computed: a schedule never changes the answer beyond rounding."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Final, final

from attngen.record import record

__all__ = ["ORDER_FIELDS", "LoopOrder", "Normalize", "Passes", "Schedule"]

ORDER_FIELDS: Final = frozenset({"late_values", "early_weights", "late_keys"})
"""Of a schedule: the order inside a step."""


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
    late_values: int | None = None
    """Keys of a tile whose product with v is started only when the row maxima are known.

    This and the next two are the order inside a step; None: the family's rule, also in a complete
    schedule.  A complete one has all three or none."""
    early_weights: int | None = None
    """Keys of a tile whose weights are found while the product with v before them still runs."""
    late_keys: bool | None = None
    """Whether keys are given back when the row maxima are known, or once they are multiplied."""

    @property
    def has_order(self) -> bool:
        """Whether anything is said about the order inside a step."""
        order = self.late_values, self.early_weights, self.late_keys
        return any(part is not None for part in order)

    def without_order(self) -> Schedule:
        """The same with the family's rule for the order inside a step."""
        return replace(self, late_values=None, early_weights=None, late_keys=None)

    def with_free_tiles(self) -> Schedule:
        """The same with everything left open that hangs on a family or a size."""
        free = replace(self, tile_q=None, tile_kv=None, stages=None, warps=None, splits=None)
        return free.without_order()
