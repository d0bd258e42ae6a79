"""Tensor maps: how a tensor copy (TMA) finds a box of a tensor in global memory.

The fields are those of `cuTensorMapEncodeTiled` in the CUDA driver API, and so are the rules.
What is not a field is fixed: element strides are 1, nothing is interleaved, and elements outside
the tensor are zeros.  Dimensions are listed densest first, so those of q [B, H, S, D] are D, S,
H, B.

`attngen/cpu/tensor_map.py` encodes a map for the CPU run.  For a GPU the driver has to do it;
that call belongs into `attngen/backend/`, and takes this record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.ir.types import Element
from attngen.record import record

__all__ = ["ALIGNMENT", "MOST_STRIDE", "SWIZZLES", "TensorMap", "TensorMapRefused"]

SWIZZLES = (0, 32, 64, 128)
"""Bytes within which 16-byte chunks are exchanged; 0: none are."""

ALIGNMENT = 16
"""Bytes of which addresses and strides are multiples."""
_MOST_DIMENSIONS = 5
_MOST_SIZE = 2**32
MOST_STRIDE = 2**40
"""Bytes that strides are below."""
_MOST_BOX = 256


class TensorMapRefused(Diagnostic):
    """The driver would not encode the map, or the kernels do not use such a one."""

    code = "A642"
    title = "the tensor map of `{name}` cannot be made"
    label = "{reasons}"
    name: str
    reasons: str


@final
@record
class TensorMap:
    """One tensor, and the box of it that a copy moves.

    sizes:    elements, of each dimension; the densest is first, and its elements lie side by side.
    strides:  bytes, of each dimension but the first.
    box:      elements, of each dimension; a copy's coordinates are those of its first one.
    swizzle:  bytes of a row of the box in shared memory within which chunks of 16 are exchanged.
    Source:   CUDA driver API, Tensor Map Object Management, cuTensorMapEncodeTiled.  Its page
              also asks that each stride is a multiple of the one before; the driver takes others
              (q [B, S, H, D] was run on an H200), so they are taken here.
    """

    name: str
    element: Element
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def check(self) -> None:
        """Refuse what the driver refuses.

        Errors:  A642 with every reason.
        """
        reasons = list(self._reasons_against())
        if reasons:
            raise AttnError(TensorMapRefused(None, self.name, "; ".join(reasons)))

    def box_bytes(self) -> int:
        """What a load brings, elements outside the tensor included."""
        count = self.element.bytes
        for size in self.box:
            count *= size
        return count

    def _reasons_against(self) -> Iterator[str]:
        rank = len(self.sizes)
        if not 1 <= rank <= _MOST_DIMENSIONS:
            yield f"it has {rank} dimensions, and 1 to {_MOST_DIMENSIONS} are possible"
        if len(self.strides) != rank - 1 or len(self.box) != rank:
            yield f"{rank} dimensions need {rank - 1} strides and {rank} sizes of the box"
            return
        if self.address % ALIGNMENT:
            yield f"its address is {self.address % ALIGNMENT} behind a multiple of {ALIGNMENT}"
        for i, size in enumerate(self.sizes):
            if not 1 <= size <= _MOST_SIZE:
                yield f"dimension {i} has {size} elements, and 1 to 2^32 are possible"
        for i, stride in enumerate(self.strides, 1):
            if stride % ALIGNMENT or not 0 <= stride < MOST_STRIDE:
                yield f"dimension {i} has a stride of {stride} bytes, no multiple of 16 below 2^40"
        for i, size in enumerate(self.box):
            if not 1 <= size <= _MOST_BOX:
                yield f"the box has {size} elements in dimension {i}, not 1 to {_MOST_BOX}"
        yield from self._reasons_against_rows()

    def _reasons_against_rows(self) -> Iterator[str]:
        row = self.box[0] * self.element.bytes if self.box else 0
        if row % ALIGNMENT:
            yield f"a row of the box has {row} bytes, which is no multiple of 16"
        if self.swizzle not in SWIZZLES:
            yield f"a swizzle spans 0, 32, 64 or 128 bytes, not {self.swizzle}"
        elif self.swizzle and row != self.swizzle:
            # The driver takes shorter rows, too; no kernel here needs them.
            yield f"a row of the box has {row} bytes, and the swizzle spans {self.swizzle}"
