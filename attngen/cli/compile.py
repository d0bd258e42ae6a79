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
from attngen.cli.errors import BadOption, LeftOpen
from attngen.cli.files import require_file, write_together
from attngen.cli.option_types import (
    Names,
    consts_option,
    dtype_option,
    head_dim_option,
    schedule_option,
    shape_option,
    spec_argument,
    unique,
)
from attngen.compiler import Rendered
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.engines.cuda_engine import compile_rendered
from attngen.ir.attention import SIZES
from attngen.ir.printer import print_attention, print_program
from attngen.manifest import build_manifest, format_manifest
from attngen.tuning.device_class import DeviceClass

__all__ = ["command"]

ARTEFACTS: Final = ("cu", "cubin", "ptx", "ir", "program")
DEFAULT_TARGETS: Final = ("sm_80", "sm_90a")
DEFAULT_TOKENS: Final = 4096


@click.command(
    "compile",
    epilog="Example:  attngen compile causal.attn --arch sm_80,sm_90a --dtype bf16 --head-dim 128"
    " -o build",
)
@spec_argument
@click.option(
    "--arch", "archs", type=Names(), metavar="NAME,…",
    help=f"Targets.  Default: {','.join(DEFAULT_TARGETS)}, or that of --device.",
)  # fmt: skip
@click.option(
    "--device", metavar="NAME",
    help="A class of GPU, as h200, whose tuning records choose the schedule; with --shape.",
)  # fmt: skip
@shape_option
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
    archs: tuple[str, ...] | None,
    device: str | None,
    shape: Mapping[str, int] | None,
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
    known = _device_of(device, shape, archs)
    archs = archs or (DEFAULT_TARGETS if known is None else (known.arch,))
    chosen = [targets.get(name) for name in archs]
    kernel = compile_spec(
        spec, consts=unique("-D", consts), dtype=dtype, head_dim=head_dim, schedule=schedule
    )
    _require_complete(kernel)
    tuned = None
    if known is not None:
        answer = kernel.find_schedule(known, _complete_shape(kernel, shape or {}))
        tuned = answer.schedule
        for text in (f"{device}: {answer.sentence}", *answer.notes):
            note(text)
    with progress(f"compiling for {', '.join(archs)}"):
        rendered = [kernel.render(target.name, schedule=tuned) for target in chosen]
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


def _device_of(
    device: str | None, shape: Mapping[str, int] | None, archs: tuple[str, ...] | None
) -> DeviceClass | None:
    """The class of GPU to compile for.

    Errors:  A493 an unknown one; A711 a device without a shape, or a shape without a device, or
             another target.
    """
    if device is None:
        if shape is not None:
            problem = "a kernel takes every shape"
            raise AttnError(BadOption(None, "--shape", "", problem, "it goes with --device"))
        return None
    known = DeviceClass.named(device)
    if shape is None:
        problem, advice = "records are of some shape", "pass --shape B=…,Hq=…,Sq=…,Skv=…"
        raise AttnError(BadOption(None, "--device", device, problem, advice))
    if archs not in (None, (known.arch,)):
        problem = f"this is {known.arch}"
        raise AttnError(BadOption(None, "--device", device, problem, "leave out --arch"))
    return known


def _complete_shape(kernel: Kernel, shape: Mapping[str, int]) -> Mapping[str, int]:
    """All sizes of a call; what is left out is the declaration's, or as another one.

    Errors:  A711 for an unknown size, or a number of heads that does not fit.
    """
    attention = kernel.attention
    given = {"B": 1, **shape}
    given.setdefault("Hq", attention.heads_q or 1)
    given.setdefault("Hkv", attention.heads_kv or given["Hq"])
    given.setdefault("Sq", given.get("Skv", DEFAULT_TOKENS))
    given.setdefault("Skv", given["Sq"])
    for name in given:
        if name not in SIZES[:5]:
            problem, advice = "it is no size of a call", f"sizes are {', '.join(SIZES[:5])}"
            raise AttnError(BadOption(None, "--shape", name, problem, advice))
    if given["Hkv"] == 0 or given["Hq"] % given["Hkv"]:
        problem = f"{given['Hq']} query heads cannot share {given['Hkv']} key/value heads"
        raise AttnError(BadOption(None, "--shape", "", problem))
    return given


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
