"""Run a program in the NumPy executor, and put the results where a kernel would."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from attngen.backend.device import ITEM_BYTES, ArrayView, numpy_dtype
from attngen.binding import Binding
from attngen.engines.outputs import Outputs
from attngen.executor.execute import execute
from attngen.ir.program import Program

__all__ = ["as_numpy", "run_in_numpy"]


def run_in_numpy(program: Program, binding: Binding, outputs: Outputs) -> None:
    """Run on arrays in CPU memory, of whatever library."""
    result = execute(
        program.attention,
        program.schedule,
        program.main.tiles,
        as_numpy(binding.q),
        as_numpy(binding.k),
        as_numpy(binding.v),
        sizes=binding.sizes,
        params=binding.params,
        tensors={name: as_numpy(view) for name, view in binding.tensors.items()},
        rows=binding.rows,
        keys=binding.keys,
    )
    written = {
        "o": result.o, "lse": result.lse, "row_max": result.row_max,
        "state_m": result.m, "state_l": result.l, "state_acc": result.acc,
    }  # fmt: skip
    for name, view in outputs.views().items():
        target = as_numpy(view)
        with np.errstate(over="ignore", invalid="ignore"):
            target[...] = written[name].astype(target.dtype)


def as_numpy(view: ArrayView) -> Any:
    """A NumPy array over the memory of a view on the CPU; nothing is copied."""
    dtype = numpy_dtype(view.dtype)
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    size = ITEM_BYTES[view.dtype]
    reach = [(n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)]
    first = view.pointer + sum(r for r in reach if r < 0) * size
    count = (sum(abs(r) for r in reach) + 1) * size
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(first))
    start = (view.pointer - first) // size
    flat = memory.view(dtype)[start:]
    strides = tuple(s * size for s in view.strides)
    return np.lib.stride_tricks.as_strided(flat, view.shape, strides)
