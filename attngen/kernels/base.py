"""What a kernel family is: one Python file and one template of the same name.

A family says which problems it takes, completes a schedule, lowers it to a `Program` and
renders that to CUDA.  It never measures, compiles or launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final, Protocol, final

from attngen.ir.attention import Attention
from attngen.ir.program import Program
from attngen.ir.schedule import Schedule
from attngen.ir.types import Element
from attngen.record import record
from attngen.targets.base import Feature, Target

__all__ = ["KernelFamily", "SharedArray", "Strided", "list_arrays", "total_bytes", "vary"]


_SHOWN_BYTES: Final = 64
"""Smaller arrays are left out of a sum that is shown."""


@final
@record
class SharedArray:
    """One array in shared memory: byte offset, element count, bytes, and its shape in words."""

    name: str
    offset: int
    count: int
    bytes: int
    shape: str

    @property
    def extent(self) -> str:
        """The element count in the constants of the text: `kTileQ * kRow`."""
        return self.shape.strip("[]").replace("][", " * ")


def total_bytes(arrays: tuple[SharedArray, ...]) -> int:
    """Shared memory of a block."""
    return sum(array.bytes for array in arrays)


def list_arrays(arrays: tuple[SharedArray, ...], unit: str = "") -> str:
    """The sum in KiB, as in `query 16.0 + key 33.0`; `unit` stands behind each number."""
    shown = [array for array in arrays if array.bytes >= _SHOWN_BYTES]
    return " + ".join(f"{array.name} {array.bytes / 1024:.1f}{unit}" for array in shown)


def why_too_large(arrays: tuple[SharedArray, ...], target: Target) -> str | None:
    """The sum, where it is more than a block of the target may have."""
    needed, allowed = total_bytes(arrays) / 1024, target.shared_bytes_per_block / 1024
    if needed <= allowed:
        return None
    limit = f"{target.name} allows {allowed:.0f} KiB per block"
    return f"shared memory: {list_arrays(arrays, ' KiB')} = {needed:.1f} KiB; {limit}"


def vary(schedule: Schedule, **choices: Sequence[int]) -> Iterator[Schedule]:
    """Every combination of the choices for what the schedule leaves open; what it fixes stays."""
    free = {name: some for name, some in choices.items() if getattr(schedule, name) is None}
    for values in product(*free.values()):
        chosen: dict[str, Any] = dict(zip(free, values, strict=True))
        yield replace(schedule, **chosen)


class Strided(Protocol):
    """An array in memory; strides count elements."""

    @property
    def pointer(self) -> int: ...

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def strides(self) -> Sequence[int]: ...


class KernelFamily(Protocol):
    """The interface of every family in this package, proved by mypy where it is assigned."""

    @property
    def name(self) -> str: ...

    @property
    def templates(self) -> tuple[str, ...]:
        """The files its text comes from; its template is the first."""
        ...

    @property
    def dtypes(self) -> tuple[Element, ...]:
        """The element types it is made for; with others it is out of the question."""
        ...

    @property
    def features(self) -> tuple[Feature, ...]:
        """What a target must have; for another one it is out of the question."""
        ...

    @property
    def operand_alignment(self) -> int:
        """Bytes: q, k and v begin at, and their rows are apart by, multiples of it, and rows are
        contiguous, in the text for aligned operands; 1 for a family that takes them as they are."""
        ...

    @property
    def stand_in(self) -> str | None:
        """The family that runs operands which `why_unaligned` has something against; None: this
        one, with a text of its own."""
        ...

    def reasons_against(
        self, attention: Attention, schedule: Schedule, target: Target
    ) -> tuple[str, ...]:
        """Why this family cannot run the problem as scheduled; empty when it can."""
        ...

    def complete(self, attention: Attention, schedule: Schedule, target: Target) -> Schedule:
        """The schedule with every auto replaced by this family's default for the target."""
        ...

    def candidates(self, schedule: Schedule) -> Iterator[Schedule]:
        """The schedules that a tuner tries, most of them complete; what `schedule` fixes stays.

        Many do not fit a problem or a target, which `reasons_against` says of each.
        """
        ...

    def shared_arrays(self, attention: Attention, schedule: Schedule) -> tuple[SharedArray, ...]:
        """The resource formula: what a block keeps in shared memory."""
        ...

    def registers(self, attention: Attention, schedule: Schedule) -> int:
        """About how many a thread needs; the compiler knows it better."""
        ...

    def lower(self, attention: Attention, schedule: Schedule) -> Program:
        """The loop nest, grid and workspaces of a complete schedule."""
        ...

    def why_slower(self, attention: Attention) -> str | None:
        """Why the next family that takes it is likely to be faster; None for most."""
        ...

    def why_unaligned(self, operands: Mapping[str, Strided]) -> str | None:
        """Why q, k and v, by name, need the text for any address and stride.

        None when the aligned text takes them, which it always does in a family with one text.

        Shapes:  each operand is [B, H, tokens, D].
        """
        ...

    def render(
        self,
        program: Program,
        target: Target,
        *,
        is_checked: bool = False,
        is_aligned: bool = True,
    ) -> str:
        """The CUDA text.

        is_checked:  it reports reads outside of a captured tensor.
        is_aligned:  it takes only operands that `why_unaligned` has nothing against.
        """
        ...
