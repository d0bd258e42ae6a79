"""Run a program on a GPU: compile with NVRTC (or the disk cache), load and launch with CuPy."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final, NamedTuple

from attngen import __version__
from attngen.backend.cache import compile_cached
from attngen.backend.cubin import KernelResources, read_resources
from attngen.backend.device import Device
from attngen.backend.errors import CudaCompileError
from attngen.backend.launch import CudaModule, ReadyLaunch
from attngen.backend.nvrtc import Compiled
from attngen.binding import Binding
from attngen.compiler import Rendered
from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.span import Source
from attngen.engines.outputs import Outputs, argument_values, due_launches, grid_size
from attngen.ir.program import TICKETS, Program

__all__ = [
    "Launched",
    "compile_rendered",
    "digest_code",
    "digest_source",
    "launch_on_gpu",
    "prepare_on_gpu",
    "resources_of",
]


_COMMENT: Final = re.compile(r"//.*")
"""No generated text has this inside of a string."""


def compile_rendered(rendered: Rendered, text: str | None = None) -> Compiled:
    """The cubin of a program, from the disk cache where it is there.

    `text` is the `.attn` text: the program's `#line` markers name its lines, so an error of
    the compiler can point at them.
    Errors:  A50x.
    """
    name = rendered.program.attention.name
    try:
        return compile_cached(
            rendered.source,
            name=f"{name}.cu",
            target=rendered.target,
            context=(f"attngen {__version__}",),
        )
    except AttnError as error:
        (found,) = error.diagnostics
        if text is None or not isinstance(found, CudaCompileError):
            raise
        raise AttnError(found.locate_in(Source(f"{name}.attn", text))) from None


def resources_of(rendered: Rendered, compiled: Compiled) -> KernelResources:
    """Registers, stack and shared memory that the compiler gave the kernel that writes o."""
    return read_resources(compiled.binary)[rendered.launch.kernel]


def digest_code(rendered: Rendered, compiled: Compiled) -> str:
    """SHA-256 of the machine code of a program: of its kernel, or of the digests of several.

    The same in every cubin that holds this code, whatever compiler wrote it.
    """
    found = read_resources(compiled.binary)
    digests = [found[launch.kernel].code_digest for launch in rendered.program.launches]
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


def digest_source(rendered: Rendered) -> str:
    """SHA-256 of the text of a program, without comments and the lines that they stood on.

    Says whether attngen still writes this text, where another compiler makes other code of it.
    """
    lines = (_COMMENT.sub("", line).rstrip() for line in rendered.source.splitlines())
    kept = (line for line in lines if line and not line.startswith("#line"))
    return sha256("\n".join(kept).encode()).hexdigest()


def prepare_on_gpu(program: Program, module: CudaModule, device: Device) -> None:
    """Load what every launch of a program needs.  Errors:  those of `CudaModule.prepare`."""
    for launch in program.launches:
        module.prepare(
            launch.kernel,
            device,
            shared_bytes=launch.shared_bytes,
            hands_out_tiles=launch.hands_out_tiles,
        )


class Launched(NamedTuple):
    """What was queued: launches in order, and the bytes of the argument struct that they share."""

    ready: tuple[ReadyLaunch, ...]
    block: bytes


def launch_on_gpu(
    rendered: Rendered,
    module: CudaModule,
    binding: Binding,
    outputs: Outputs,
    *,
    device: Device,
    stream: int,
) -> Launched | None:
    """Queue the program on a stream; None when the problem is empty and nothing was launched."""
    program = rendered.program
    driver = module.driver
    is_persistent = any(launch.is_persistent for launch in program.launches)
    most = driver.multiprocessors(device.index) if is_persistent else 0
    launches = due_launches(program, binding, outputs, most)
    if not launches:
        return None
    values = argument_values(program, binding, outputs, driver.encode_tensor_map)
    block = rendered.arguments.pack(values)
    offsets = {field.name: field.offset for field in rendered.arguments.fields}
    ready = tuple(
        module.ready(
            launch.kernel,
            len(block),
            device=device,
            stream=stream,
            grid=grid,
            threads=launch.threads,
            shared_bytes=launch.shared_bytes,
            # With a block for each tile there is nothing to hand out.
            tickets_at=offsets[TICKETS]
            if launch.hands_out_tiles and grid < grid_size(binding, launch)
            else None,
        )
        for launch, grid in launches
    )
    for each in ready:
        each.start(stream, block)
    return Launched(ready, block)
