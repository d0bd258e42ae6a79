"""Problems: what a call computes, as coarsely as the choice of a schedule needs it.

    B 2, Hq 32, Hkv 8, Sq 5000, Skv 5000, D 128, bf16   →   bf16 d128 gqa4 4096x4096 waves 32

Every call is in exactly one problem, so a new length seldom needs a new measurement.  Which mask
and which scores it has is not said here: that is the digest of the operation
(`ir.digest.digest_operation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Final, final

from attngen.record import record

__all__ = ["EXACT_TOKENS", "NOMINAL_TILE", "Direction", "LayoutClass", "Problem"]

EXACT_TOKENS: Final = 128
"""Up to so many tokens a length stands for itself: it decides how high a tile is."""

NOMINAL_TILE: Final = 128
"""Rows of a tile when waves are counted; the schedule, which is still open, may have others."""
_FEWEST_WAVES, _MOST_WAVES = 1 / 16, 64.0
"""With more waves than this the last one, which is not full, no longer counts."""


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class LayoutClass(Enum):
    """Which text runs: see `KernelFamily.why_unaligned`."""

    ALIGNED = "aligned"
    """Rows of q, k and v are contiguous, and can be copied 16 bytes at a time."""
    ANY = "any"


@final
@record(kw_only=True)
class Problem:
    """One bucket of calls.

    Two calls of one problem have the same element type, head dims, ratio of heads and layout
    class.  A long length is named by the nearest power of two, by ratio; 256 begins at 129.
    """

    dtype: str
    head_dims: tuple[int, int]  # (Dqk, Dv)
    group: int  # query heads that share a key/value head
    q_tokens: int  # 0 to 128, then 256, 512, …
    kv_tokens: int
    waves: float  # a power of two: how often the work fills the GPU, 128 rows in a block
    layout: LayoutClass = LayoutClass.ALIGNED
    direction: Direction = Direction.FORWARD

    def __str__(self) -> str:
        """The problem in a line: `bf16 d128 gqa4 4096x4096 waves 32`."""
        qk, v = self.head_dims
        head_dim = f"d{qk}" if qk == v else f"d{qk}/{v}"
        words = [self.dtype, head_dim, f"gqa{self.group}", f"{self.q_tokens}x{self.kv_tokens}"]
        words.append(f"waves {self.waves:g}")
        if self.layout is not LayoutClass.ALIGNED:
            words.append("any layout")
        if self.direction is not Direction.FORWARD:
            words.append(self.direction.value)
        return " ".join(words)

    @staticmethod
    def of(
        dtype: str,
        sizes: Mapping[str, int],
        sm_count: int,
        *,
        layout: LayoutClass = LayoutClass.ALIGNED,
        direction: Direction = Direction.FORWARD,
    ) -> Problem:
        """The problem of a call with these sizes (`B, Hq, Hkv, Sq, Skv, Dqk, Dv`) on a GPU."""
        tiles = sizes["B"] * sizes["Hq"] * -(-sizes["Sq"] // NOMINAL_TILE)
        return Problem(
            dtype=dtype,
            head_dims=(sizes["Dqk"], sizes["Dv"]),
            group=sizes["Hq"] // sizes["Hkv"] if sizes["Hkv"] else 1,
            q_tokens=_bucket_of_tokens(sizes["Sq"]),
            kv_tokens=_bucket_of_tokens(sizes["Skv"]),
            waves=_bucket_of_waves(tiles, sm_count),
            layout=layout,
            direction=direction,
        )

    def distance(self, other: Problem) -> float | None:
        """How far another problem is, in doublings of lengths, waves and group.

        None where a schedule for one says nothing about the other: another element type, head
        dim, layout class or direction, or a length that is exact in one problem only.
        """
        if self._kind() != other._kind():
            return None
        return sum(
            abs(math.log2(ours / theirs))
            for ours, theirs in zip(self._amounts(), other._amounts(), strict=True)
        )

    def _kind(self) -> tuple[object, ...]:
        is_short = self.q_tokens <= EXACT_TOKENS, self.kv_tokens <= EXACT_TOKENS
        return self.dtype, self.head_dims, self.layout, self.direction, is_short

    def _amounts(self) -> tuple[float, ...]:
        return max(self.q_tokens, 1), max(self.kv_tokens, 1), self.waves, self.group


def _bucket_of_tokens(tokens: int) -> int:
    """The length itself up to 128; above, the nearest power of two from 256 on, by ratio."""
    if tokens <= EXACT_TOKENS:
        return tokens
    below = 1 << (tokens.bit_length() - 1)
    nearest = below if tokens * tokens < 2 * below * below else 2 * below
    return max(nearest, 2 * EXACT_TOKENS)


def _bucket_of_waves(tiles: int, sm_count: int) -> float:
    """The next power of two, within limits."""
    if tiles == 0:
        return _FEWEST_WAVES
    waves = 2.0 ** math.ceil(math.log2(tiles / sm_count))
    return min(max(waves, _FEWEST_WAVES), _MOST_WAVES)
