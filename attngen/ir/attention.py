"""What is computed: the checked, typed form of an `attention` block."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Final, final

from attngen.diagnostics.span import Span
from attngen.ir.expr import Expr
from attngen.ir.row_state import RowState
from attngen.ir.types import Element, ScalarType
from attngen.record import record

__all__ = ["INDICES", "OUTPUTS", "SIZES", "Attention", "Bound", "Param", "Tensor", "TensorDim"]

INDICES: Final = ("b", "h", "hkv", "q", "kv", "qpos")
"""Batch, query head, key/value head, query row, key, and `qpos = q + Skv - Sq`; all from 0."""
SIZES: Final = ("B", "Hq", "Hkv", "Sq", "Skv", "Dqk", "Dv")
OUTPUTS: Final = ("o", "lse", "row_max")


@final
@record
class Bound:
    """A range of a param: each end a number or None, and whether the end itself is excluded."""

    low: int | float | None = None
    high: int | float | None = None
    low_open: bool = False
    high_open: bool = False

    def contains(self, value: float) -> bool:
        low_ok = self.low is None or (value > self.low if self.low_open else value >= self.low)
        high_ok = self.high is None or (value < self.high if self.high_open else value <= self.high)
        return low_ok and high_ok


@final
@record
class Param:
    """A run-time scalar.  `default` None: the caller must give it."""

    name: str
    type: ScalarType
    default: bool | int | float | None
    bound: Bound
    span: Span | None = field(default=None, compare=False)


@final
@record
class TensorDim:
    """`size` is a number, a size of the problem, or a name that the argument's shape binds."""

    size: int | str
    optional: bool


@final
@record
class Tensor:
    """A captured array."""

    name: str
    element: Element
    dims: tuple[TensorDim, ...]
    span: Span | None = field(default=None, compare=False)


@final
@record(eq=False)
class Attention:
    """A checked attention variant; None where the language leaves a choice to the first call.

    Order of evaluation for one visible pair: `s = scale · (q·k)`, then each of `scores` in
    turn (its symbol `s` is the value before it), then `mask`: a pair attends where it is
    true.  A read of a tensor happens only where the value is used.
    """

    name: str
    dtype: Element | None
    head_dim_qk: int | None
    head_dim_v: int | None
    heads_q: int | None
    heads_kv: int | None
    params: tuple[Param, ...]
    tensors: tuple[Tensor, ...]
    length_q: Expr | None
    length_kv: Expr | None
    scale: Expr
    scores: tuple[Expr, ...]
    mask: Expr | None
    row_state: RowState
    sink: Expr | None
    outputs: tuple[str, ...]
    source: str = field(default="", repr=False)
    """The canonical text of the block with its imports, as shown in the generated code."""

    def expressions(self) -> tuple[Expr, ...]:
        """Every expression of the variant, in the order of evaluation."""
        parts = (self.length_q, self.length_kv, self.scale, *self.scores, self.mask, self.sink)
        return tuple(e for e in parts if e is not None)

    def with_expressions(self, new: tuple[Expr, ...]) -> Attention:
        """The variant with other expressions, in the same order; the same object for the same."""
        if all(a is b for a, b in zip(self.expressions(), new, strict=True)):
            return self
        left = iter(new)

        def following(old: Expr | None) -> Expr | None:
            return None if old is None else next(left)

        return replace(
            self,
            length_q=following(self.length_q),
            length_kv=following(self.length_kv),
            scale=next(left),
            scores=tuple(next(left) for _ in self.scores),
            mask=following(self.mask),
            sink=following(self.sink),
        )

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    @property
    def named_sizes(self) -> tuple[str, ...]:
        """Names that tensor shapes bind, in order of first use."""
        names = [d.size for t in self.tensors for d in t.dims if isinstance(d.size, str)]
        return tuple(dict.fromkeys(n for n in names if n not in SIZES))
