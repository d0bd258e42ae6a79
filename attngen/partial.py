"""Row states as values: what `Kernel.partial` returns, and how two of them merge."""

from __future__ import annotations

from typing import Any, TypeAlias, final

from attngen.binding_errors import DifferentStates
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.row_state import RowState
from attngen.ir.semantics import evaluate
from attngen.record import record

__all__ = ["PartialState"]

Array: TypeAlias = Any


@final
@record
class PartialState:
    """The row state of some query rows over some keys, always float32.

    Shapes:  m, l [B, Hq, rows]; acc [B, Hq, rows, Dv], unnormalised.  NumPy or CuPy arrays.
    `merge` is associative with `init` as its identity, so any cut of the keys gives the
    result of one pass: split-KV, shared prefixes and rings of GPUs.
    """

    row_state: RowState
    m: Array
    l: Array  # noqa: E741
    acc: Array
    sink: Array | None = None
    """The sink's logit per head, [B, Hq, 1], which joins once, in `finalize`."""

    def merge(self, other: PartialState) -> PartialState:
        """The state over both sets of keys.

        Errors:  A634 when the two are not of the same rows and heads, or of one kernel.
        """
        if self._kind != other._kind:
            raise AttnError(DifferentStates(None, self._kind, other._kind))
        if not self.row_state.running_max:
            return PartialState(self.row_state, self.m, self.l, self.acc + other.acc, self.sink)
        m = evaluate(self.row_state.raise_max, {"m_old": self.m, "m": other.m}, {}).data
        mine = self._rescale(self.m, m)
        theirs = self._rescale(other.m, m)
        l = self.l * mine + other.l * theirs  # noqa: E741
        acc = self.acc * mine[..., None] + other.acc * theirs[..., None]
        return PartialState(self.row_state, m, l, acc, self.sink)

    def finalize(self) -> tuple[Array, Array | None]:
        """The output [B, Hq, rows, Dv] and the LSE [B, Hq, rows] (None for sigmoid), float32."""
        per_row = {"m": self.m, "l": self.l}
        if self.sink is not None:
            per_row["sink"] = self.sink
        per_element = {name: x[..., None] for name, x in per_row.items()}
        o = evaluate(self.row_state.output, {**per_element, "acc": self.acc}, {}).data
        lse = self.row_state.lse
        return o, None if lse is None else evaluate(lse, per_row, {}).data

    @property
    def _kind(self) -> str:
        """What two states must have in common, in words."""
        batch, heads, rows, head_dim = self.acc.shape
        return f"{self.row_state.name} of {(batch, heads, rows)}, head dim {head_dim}"

    def _rescale(self, m_old: Array, m: Array) -> Array:
        return evaluate(self.row_state.rescale, {"m_old": m_old, "m": m}, {}).data
