"""What schedules are tuned for: one attention, and one call of it, with q, k and v made up.

The tuner and the process that times make the same operands from the same numbers, so that only a
seed travels between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.backend.device import CPU, ArrayView, numpy_dtype
from attngen.binding import Binding, Layout
from attngen.engines.numpy_engine import as_numpy
from attngen.engines.outputs import reach
from attngen.frontend.check import Checked
from attngen.frontend.load import Unit
from attngen.ir.attention import Attention
from attngen.ir.schedule import Schedule
from attngen.ir.types import Element
from attngen.passes.pipeline import run_passes
from attngen.passes.specialize import specialize
from attngen.record import record
from attngen.targets.base import Target

__all__ = ["Call", "Subject", "in_bhsd", "make_operands"]

Array: TypeAlias = Any

_PERIOD: Final = (1 << 20) + 7
"""A prime: no row is as long as it, so equal numbers never stand at equal places of two rows."""
_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "q": ("B", "Hq", "Sq", "Dqk"),
    "k": ("B", "Hkv", "Skv", "Dqk"),
    "v": ("B", "Hkv", "Skv", "Dv"),
}


@final
@record(eq=False)
class Subject:
    """One attention with nothing left open.

    unit, consts:  what the oracle reads.
    attention:     the same, as kernels are made from it.
    schedule:      what its file fixes; the rest is to be found.
    """

    unit: Unit
    consts: Mapping[str, bool | int | float]
    attention: Attention
    schedule: Schedule
    target: Target

    @staticmethod
    def of(
        unit: Unit,
        checked: Checked,
        dtype: Element,
        head_dims: tuple[int, int],
        target: Target,
        consts: Mapping[str, bool | int | float] | None = None,
    ) -> Subject:
        """`checked` is what a kernel is made from, so that its texts are these texts."""
        attention = run_passes(specialize(checked.attention, dtype, *head_dims))
        return Subject(unit, consts or {}, attention, checked.schedule_for(target.name), target)


@final
@record(eq=False)
class Call:
    """One call of a specialised attention.

    sizes:    B, Hq, Hkv, Sq, Skv, Dqk, Dv, and those that tensors name.
    tensors:  NumPy arrays, with all their declared dimensions or without optional ones.
    layout:   the order of q, k, v and o in memory.
    """

    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float]
    tensors: Mapping[str, Array]
    layout: Layout = "bhsd"
    seed: int = 0

    @staticmethod
    def of(binding: Binding) -> Call:
        """The call of these arguments; its tensors are copied from the device."""
        _, head, token, _ = binding.q.strides
        tensors = {name: _copy_to_host(seen) for name, seen in binding.tensors.items()}
        return Call(binding.sizes, binding.params, tensors, "bshd" if head < token else "bhsd")

    def shape(self, operand: str) -> tuple[int, ...]:
        """Of q, k, v or o in memory."""
        names = ("B", "Hq", "Sq", "Dv") if operand == "o" else _SIZES[operand]
        b, h, s, d = (self.sizes[name] for name in names)
        return (b, h, s, d) if self.layout == "bhsd" else (b, s, h, d)

    @property
    def name(self) -> str:
        """The sizes in short: `B 2, Hq 16, Hkv 16, Sq 8192, Skv 8192`."""
        return ", ".join(f"{n} {self.sizes[n]}" for n in ("B", "Hq", "Hkv", "Sq", "Skv"))


def make_operands(dtype: str, call: Call) -> dict[str, Array]:
    """q, k and v: normal numbers, which draw the power that real ones do.

    A stretch of them is repeated, since making as many as a long call has takes seconds.
    """
    element = numpy_dtype(dtype)
    made = {}
    for number, name in enumerate(_SIZES):
        shape = call.shape(name)
        count = math.prod(shape)
        stretch = np.random.default_rng((call.seed, number)).standard_normal(
            min(count, _PERIOD), np.float32
        )
        made[name] = np.resize(stretch.astype(element), count).reshape(shape)
    return made


def in_bhsd(view: ArrayView, layout: Layout) -> ArrayView:
    """The same array seen as [B, H, S, D]."""
    if layout == "bhsd":
        return view
    (b, s, h, d), (sb, ss, sh, sd) = view.shape, view.strides
    return view._replace(shape=(b, h, s, d), strides=(sb, sh, ss, sd))


def _copy_to_host(seen: ArrayView) -> Array:
    """The values of an array on a GPU, once all that computes them is done."""
    import cupy

    runtime = cupy.cuda.runtime
    begin, end = reach(seen)
    host = np.empty(max(1, end - begin), np.uint8)
    runtime.deviceSynchronize()
    runtime.memcpy(host.ctypes.data, begin, end - begin, runtime.memcpyDeviceToHost)
    there = seen._replace(pointer=host.ctypes.data + seen.pointer - begin, device=CPU, owner=host)
    return np.array(as_numpy(there))
