"""Run the generated CUDA text itself on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from attngen.backend.device import ITEM_BYTES, ArrayView
from attngen.binding import Binding
from attngen.compiler import Rendered
from attngen.cpu.run import Landing, MemoryRange, Mode, RunReport, run_on_cpu
from attngen.cpu.tensor_map import encode_for_cpu
from attngen.engines.outputs import Outputs, argument_values, due_launches, reach
from attngen.ir.program import TICKETS

__all__ = ["MULTIPROCESSORS", "optimization_for", "run_on_host"]

MULTIPROCESSORS: Final = 2
"""Blocks of a persistent kernel: so few that each walks several tiles."""

_QUICK_PRODUCTS: Final = 2**30
"""Multiplications of a call up to which the compiler need not optimise: its one or two seconds less
are more than the call then takes longer.  Counted on the tensor cores, where a step does many."""
_QUICK_PRODUCTS_SIMT: Final = 2**26


def optimization_for(rendered: Rendered, binding: Binding | None) -> int:
    """0 or 1, of `build_library`; 1 where the call is not known."""
    if binding is None:
        return 1
    (row, row_end), (key, key_end) = binding.rows, binding.keys
    B, Hq, Dqk, Dv = (binding.sizes[n] for n in ("B", "Hq", "Dqk", "Dv"))
    products = B * Hq * (row_end - row) * (key_end - key) * (Dqk + Dv)
    is_simt = rendered.launch.family == "forward_simt"
    return int(products > (_QUICK_PRODUCTS_SIMT if is_simt else _QUICK_PRODUCTS))


def run_on_host(
    rendered: Rendered,
    binding: Binding,
    outputs: Outputs,
    library: Path,
    *,
    mode: Mode = Mode.RING,
    landing: Landing = Landing.LATE,
    seed: int = 0,
    workers: int | None = None,
    check: bool = False,
    has_counters: bool = True,
) -> RunReport | None:
    """Run a built library of the text, launch by launch; None when there is nothing to run.

    `check` also looks for races and reads of unwritten shared memory, which takes longer.  Without
    counters, a launch that would hand out query tiles deals them.  The report is the sum over the
    launches.
    """
    program = rendered.program
    launches = due_launches(program, binding, outputs, MULTIPROCESSORS)
    if not launches:
        return None
    written = outputs.views()
    read = {"q": binding.q, "k": binding.k, "v": binding.v, **binding.tensors}
    ranges = [_range(name, view, is_writable=True) for name, view in written.items()]
    for name, view in read.items():
        # The range of an output may lie within that of an input: both are slices of a buffer.
        is_shared = any(_meet(view, other) for other in written.values())
        ranges.append(_range(name, view, is_writable=is_shared))
    values = argument_values(program, binding, outputs, encode_for_cpu)
    tickets = np.zeros(2, np.int32)
    if program.hands_out_tiles and has_counters:
        values[TICKETS] = tickets.ctypes.data
        begin, end = tickets.ctypes.data, tickets.ctypes.data + tickets.nbytes
        ranges.append(MemoryRange(begin, end, True, tickets.itemsize, TICKETS))
    block = rendered.arguments.pack(values)
    reports = [
        run_on_cpu(
            library,
            launch.kernel,
            block,
            grid=grid,
            threads=launch.threads,
            shared_bytes=launch.shared_bytes,
            ranges=ranges,
            mode=mode,
            landing=landing,
            seed=seed,
            workers=workers,
            check=check,
        )
        for launch, grid in launches
    ]
    assert not tickets.any(), "a launch leaves its counters as it found them"
    return RunReport.total(reports)


def _range(name: str, view: ArrayView, *, is_writable: bool) -> MemoryRange:
    """The bytes that a view may touch."""
    begin, end = reach(view)
    return MemoryRange(begin, end, is_writable, ITEM_BYTES[view.dtype], name)


def _meet(one: ArrayView, other: ArrayView) -> bool:
    (begin, end), (other_begin, other_end) = reach(one), reach(other)
    return begin < other_end and other_begin < end
