"""Run a program on a GPU: compile with NVRTC (or the disk cache), load and launch with CuPy."""

from __future__ import annotations

from attngen.backend.cache import compile_cached
from attngen.backend.cubin import KernelResources, read_resources
from attngen.backend.device import Device
from attngen.backend.launch import CudaModule
from attngen.backend.nvrtc import Compiled
from attngen.binding import Binding
from attngen.compiler import Rendered
from attngen.engines.outputs import Outputs, argument_values, grid_size

__all__ = ["compile_rendered", "launch_on_gpu", "resources_of"]


def compile_rendered(rendered: Rendered) -> Compiled:
    """The cubin of a program, from the disk cache where it is there.

    Errors:  A50x; an error of the compiler points at the user's line where it can.
    """
    return compile_cached(
        rendered.source, name=f"{rendered.program.attention.name}.cu", target=rendered.target
    )


def resources_of(rendered: Rendered, compiled: Compiled) -> KernelResources:
    """Registers, stack and shared memory that the compiler gave the kernel."""
    return read_resources(compiled.binary)[rendered.launch.kernel]


def launch_on_gpu(
    rendered: Rendered,
    module: CudaModule,
    binding: Binding,
    outputs: Outputs,
    *,
    device: Device,
    stream: int,
) -> None:
    """Queue the program on a stream; nothing is launched for an empty problem."""
    launch = rendered.launch
    grid = grid_size(binding, launch.tiles)
    if grid == 0:
        return
    module.launch(
        launch.kernel,
        rendered.arguments.pack(argument_values(binding, outputs)),
        device=device,
        stream=stream,
        grid=grid,
        threads=launch.threads,
        shared_bytes=launch.shared_bytes,
    )
