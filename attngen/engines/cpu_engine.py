"""Run the generated CUDA text itself on the CPU."""

from __future__ import annotations

from pathlib import Path

from attngen.backend.device import ITEM_BYTES, ArrayView
from attngen.binding import Binding
from attngen.compiler import Rendered
from attngen.cpu.run import MemoryRange, Mode, RunReport, run_on_cpu
from attngen.engines.outputs import Outputs, argument_values, grid_size

__all__ = ["run_on_host"]


def run_on_host(
    rendered: Rendered,
    binding: Binding,
    outputs: Outputs,
    library: Path,
    *,
    mode: Mode = Mode.RING,
    seed: int = 0,
    check: bool = False,
) -> RunReport | None:
    """Run a built library of the text; None when there is nothing to run.

    `check` also looks for races and reads of unwritten shared memory, which takes longer.
    """
    launch = rendered.launch
    grid = grid_size(binding, launch.tiles)
    if grid == 0:
        return None
    read = {"q": binding.q, "k": binding.k, "v": binding.v, **binding.tensors}
    ranges = [_range(name, view, False) for name, view in read.items()]
    ranges += [_range(name, view, True) for name, view in outputs.views().items()]
    return run_on_cpu(
        library,
        launch.kernel,
        rendered.arguments.pack(argument_values(binding, outputs)),
        grid=grid,
        threads=launch.threads,
        shared_bytes=launch.shared_bytes,
        ranges=ranges,
        mode=mode,
        seed=seed,
        check=check,
    )


def _range(name: str, view: ArrayView, is_writable: bool) -> MemoryRange:
    """The bytes that a view may touch."""
    size = ITEM_BYTES[view.dtype]
    if 0 in view.shape:
        return MemoryRange(view.pointer, view.pointer, is_writable, size, name)
    reach = [(n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)]
    begin = view.pointer + sum(r for r in reach if r < 0) * size
    end = view.pointer + (sum(r for r in reach if r > 0) + 1) * size
    return MemoryRange(begin, end, is_writable, size, name)
