"""`attngen compile`: CUDA text, machine code and a manifest for each target."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import click

from attngen import targets
from attngen.api import Kernel
from attngen.api import compile as compile_spec
from attngen.backend.cache import compile_cached
from attngen.cli.console import note, progress, say, table
from attngen.cli.errors import LeftOpen
from attngen.cli.files import require_file, write_together
from attngen.cli.option_types import (
    Names,
    consts_option,
    dtype_option,
    head_dim_option,
    schedule_option,
    spec_argument,
    unique,
)
from attngen.compiler import Rendered
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.engines.cuda_engine import compile_rendered
from attngen.ir.printer import print_attention, print_program
from attngen.manifest import build_manifest, format_manifest

__all__ = ["command"]

ARTEFACTS: Final = ("cu", "cubin", "ptx", "ir", "program")
DEFAULT_TARGETS: Final = ("sm_80", "sm_90a")


@click.command(
    "compile",
    epilog="Example:  attngen compile causal.attn --arch sm_80,sm_90a --dtype bf16 --head-dim 128"
    " -o build",
)
@spec_argument
@click.option(
    "--arch", "archs", type=Names(), default=",".join(DEFAULT_TARGETS), show_default=True,
    help="Targets.",
)  # fmt: skip
@dtype_option
@head_dim_option
@consts_option
@schedule_option
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path), default=Path("."), metavar="DIR",
    help="Where to write; it is made when it is not there.  Default: here.",
)  # fmt: skip
@click.option(
    "--emit", type=Names(ARTEFACTS), default="cu,cubin", show_default=True,
    help=f"What to write: {', '.join(ARTEFACTS)}.  A manifest goes with every cubin.",
)  # fmt: skip
def command(
    spec: Path,
    archs: tuple[str, ...],
    dtype: str | None,
    head_dim: tuple[int, int] | None,
    consts: tuple[tuple[str, Any], ...],
    schedule: str | None,
    folder: Path,
    emit: tuple[str, ...],
) -> int:
    """Compile a file for some targets; this needs no GPU.

    For each target it writes NAME.TARGET.cu, .cubin and .json (the manifest: everything that
    a program in any language needs to launch the kernel).  Either all files are written, or,
    after an error, none.
    """
    require_file(spec)
    chosen = [targets.get(name) for name in archs]
    kernel = compile_spec(
        spec, consts=unique("-D", consts), dtype=dtype, head_dim=head_dim, schedule=schedule
    )
    _require_complete(kernel)
    with progress(f"compiling for {', '.join(archs)}"):
        rendered = [kernel.render(target.name) for target in chosen]
        # NVRTC lets go of the interpreter, so targets compile side by side.
        with ThreadPoolExecutor() as pool:
            made = list(pool.map(lambda one: _artefacts(one, emit), rendered))
    files: dict[Path, bytes] = {}
    lines: list[tuple[str, str]] = []
    for target, artefacts in zip(chosen, made, strict=True):
        for suffix, (content, words) in artefacts.items():
            path = folder / f"{kernel.name}.{target.name}.{suffix}"
            files[path] = content
            lines.append((str(path), words))
    write_together(files)
    for text in dict.fromkeys(text for one in rendered for text in one.notes):
        note(text)
    for line in table(lines, indent=0):
        say(line)
    return 0


def _require_complete(kernel: Kernel) -> None:
    """Errors:  A714 when the dtype or the head dim is left open."""
    attention = kernel.attention
    errors: list[Diagnostic] = []
    span = kernel.unit.attention.name_span
    if attention.dtype is None:
        errors.append(LeftOpen(span, kernel.name, "dtype", "--dtype bf16", "dtype bf16"))
    if attention.head_dim_qk is None or attention.head_dim_v is None:
        errors.append(LeftOpen(span, kernel.name, "head dim", "--head-dim 128", "head_dim 128"))
    if errors:
        raise AttnError(*errors)


def _artefacts(rendered: Rendered, emit: tuple[str, ...]) -> Mapping[str, tuple[bytes, str]]:
    """The files of one target by suffix: contents, and what to say about each."""
    name, target = rendered.program.attention.name, rendered.target
    made: dict[str, tuple[bytes, str]] = {}
    if "ir" in emit:
        made["ir"] = _text(print_attention(rendered.program.attention))
    if "program" in emit:
        made["program"] = _text(print_program(rendered.program))
    if "cu" in emit:
        made["cu"] = _text(rendered.source)
    if "ptx" in emit:
        compiled = compile_cached(rendered.source, name=f"{name}.cu", target=target, emit="ptx")
        made["ptx"] = _text(compiled.binary.decode("utf-8", "replace"))
    if "cubin" in emit:
        compiled = compile_rendered(rendered)
        made["cubin"] = (compiled.binary, "")
        files = {suffix: f"{name}.{target.name}.{suffix}" for suffix in made}
        manifest = build_manifest(rendered, compiled, files)
        made["cubin"] = (compiled.binary, _resources(manifest))
        made["json"] = _text(format_manifest(manifest))
    return made


def _text(text: str) -> tuple[bytes, str]:
    count = text.count("\n")
    return text.encode(), f"{count} line{'' if count == 1 else 's'}"


def _resources(manifest: Mapping[str, Any]) -> str:
    """Of the launch that writes the outputs; spills are those of all."""
    launches = manifest["launches"]
    launch = launches[-1]
    shared = launch["dynamic_shared_bytes"] + launch["static_shared_bytes"]
    spilled = sum(each["spill_store_bytes"] + each["spill_load_bytes"] for each in launches)
    spills = f"{spilled} bytes of spills" if spilled else "no spills"
    return (
        f"{launch['family']}, {launch['threads']} threads, {launch['registers']} registers,"
        f" {shared / 1024:.1f} KiB shared, {spills}"
    )
