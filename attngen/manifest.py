"""The manifest of a compiled program: what another language needs to launch it.

    {"launches": [{"kernel": …, "grid": "B * Hq * ceil_div(q_end - q_begin, 16)", …}],
     "arguments": {"bytes": 312, "fields": [{"name": "q", "offset": 0, …}, …]}, …}

Launches run in order on one stream.  Each takes one parameter, the argument struct by value, and
all of them the same bytes: fill its fields at their offsets, allocate the workspaces, evaluate the
grid's formula, and call `cuLaunchKernel`.  Where `launch_when` does not hold, leave the launch out,
and its workspaces null.  Where it has `hands_out_tiles`, `tickets` may be null; otherwise it points
at two int32 that are 0, left at 0 by the launch; launches that may overlap must not share them.
Where `operands.alignment_bytes` is above 1, q, k and v begin at a multiple of it, rows are
contiguous, and their other strides are multiples of it, in bytes.
Formulas are text over names of integer fields, and `grid`, the number of blocks; `ceil_div(a, b)`
is the smallest integer that is not below a / b, and `multiprocessors` what the GPU has of them.
The same program and compiler give the same bytes; nothing of the machine, the time or the folder is
in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from enum import Enum
from hashlib import sha256
from typing import Any, Final

from attngen import __version__
from attngen.backend.cubin import KernelResources, read_resources
from attngen.backend.nvrtc import FIXED_OPTIONS, Compiled, spills_from_log
from attngen.codegen.arguments import ArgumentLayout, Field
from attngen.codegen.render import template_digest
from attngen.compiler import Rendered
from attngen.diagnostics.internal import require_valid
from attngen.ir.attention import Attention, Param, Tensor
from attngen.ir.digest import digest_attention
from attngen.ir.program import (
    TICKETS,
    CeilDiv,
    Dim,
    Launch,
    Program,
    TensorBox,
    TileBox,
    Workspace,
)
from attngen.kernels import all_families

__all__ = ["FORMAT", "build_manifest", "format_manifest", "grid_formula"]

FORMAT: Final = "attngen-manifest/1"
"""Changes when a field goes or changes its meaning; new fields leave it as it is."""

_ELEMENT_BYTES: Final = 4
_ELEMENT_OF_A_BOX: Final = 2  # bytes
_TYPES: Final = {
    "128s": ("tensor_map", 128), "Q": ("pointer", 8), "q": ("int64", 8), "i": ("int32", 4),
    "f": ("float32", 4),
}  # fmt: skip
_SIZES: Final = {
    "B": "batch", "Hq": "query heads", "Hkv": "key/value heads", "Sq": "query rows of the problem",
    "Skv": "keys of the problem",
}  # fmt: skip


def build_manifest(
    rendered: Rendered, compiled: Compiled, files: Mapping[str, str]
) -> dict[str, Any]:
    """The manifest as plain data.

    `compiled` is the program's cubin; `files` names the files written beside the manifest, by
    kind (`cu`, `cubin`, …).

    Errors:  A507 when the cubin is damaged; A901 when it does not fit the program.
    """
    program = rendered.program
    attention, launch = program.attention, program.main
    resources = read_resources(compiled.binary)
    require_valid("compiling", list(_disagreements(rendered, resources)))
    spills = spills_from_log(compiled.log)
    families = all_families()
    templates = families[launch.family].templates
    return {
        "format": FORMAT,
        "attngen_version": __version__,
        "name": attention.name,
        "target": rendered.target.name,
        "files": dict(files),
        "attention": _attention(attention),
        "schedule": _schedule(rendered),
        "notes": list(rendered.notes),
        "compiler": {
            "name": "NVRTC",
            "version": compiled.compiler_version,
            "options": [rendered.target.cubin_option, *FIXED_OPTIONS],
        },
        "digests": {
            "spec": digest_attention(attention),
            "template": {"files": list(templates), "sha256_12": template_digest(*templates)},
            "source": sha256(rendered.source.encode()).hexdigest(),
            "cubin": sha256(compiled.binary).hexdigest(),
            "code": {name: found.code_digest for name, found in resources.items()},
        },
        "launches": [
            _launch(rendered, each, resources[each.kernel], spills.get(each.kernel))
            for each in program.launches
        ],
        "arguments": _arguments(rendered.arguments, program),
        "operands": _operands(families[launch.family].operand_alignment),
    }


def _operands(alignment: int) -> dict[str, Any]:
    """What the text asks of q, k and v; it copies so many bytes at once."""
    return {"alignment_bytes": alignment, "contiguous_rows": alignment > 1}


def _disagreements(rendered: Rendered, found: Mapping[str, KernelResources]) -> Iterator[str]:
    """Where the machine code is not what the program says."""
    for launch in rendered.program.launches:
        if launch.kernel not in found:
            yield f"the cubin has no kernel `{launch.kernel}`"
            continue
        sizes = [param.size for param in found[launch.kernel].params]
        if sizes != [rendered.arguments.size]:
            yield f"`{launch.kernel}` takes {sizes} bytes, not [{rendered.arguments.size}]"


def format_manifest(manifest: Mapping[str, Any]) -> str:
    """The text of a `.json` file: sorted, and strict JSON (no NaN, no Infinity)."""
    return json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False) + "\n"


# ---- what is computed, and how ---------------------------------------------------------------


def _attention(attention: Attention) -> dict[str, Any]:
    assert attention.dtype is not None
    return {
        "dtype": attention.dtype.name,
        "head_dim": {"qk": attention.head_dim_qk, "v": attention.head_dim_v},
        "heads": {"q": attention.heads_q, "kv": attention.heads_kv},
        "weights": attention.row_state.name,
        "outputs": list(attention.outputs),
        "tensors": [_tensor(tensor) for tensor in attention.tensors],
        "params": [_param(param) for param in attention.params],
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "element": tensor.element.name,
        "dims": [{"size": dim.size, "optional": dim.optional} for dim in tensor.dims],
    }


def _param(param: Param) -> dict[str, Any]:
    bound = {name: _number(value) for name, value in asdict(param.bound).items()}
    return {
        "name": param.name,
        "type": param.type.value,
        "default": _number(param.default),
        "range": bound,
    }


def _number(value: bool | int | float | None) -> bool | int | float | str | None:
    """JSON has no infinity and no NaN: they are strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _schedule(rendered: Rendered) -> dict[str, Any]:
    settings = asdict(rendered.program.schedule)
    return {name: v.value if isinstance(v, Enum) else v for name, v in settings.items()}


# ---- launches ----------------------------------------------------------------------------------


def _launch(
    rendered: Rendered, launch: Launch, found: KernelResources, spills: Any
) -> dict[str, Any]:
    shared = launch.shared_bytes
    return {
        "kernel": launch.kernel,
        "family": launch.family,
        "grid": grid_formula(launch),
        "launch_when": _condition(launch),
        "hands_out_tiles": launch.hands_out_tiles,
        "threads": launch.threads,
        "dynamic_shared_bytes": shared,
        "static_shared_bytes": found.shared_bytes,
        "needs_shared_opt_in": shared > rendered.target.shared_bytes_default,
        "parameters": [asdict(param) for param in found.params],
        "workspaces": [_workspace(each, rendered) for each in launch.workspaces],
        "tensor_maps": [
            *(_tensor_map(box) for box in launch.boxes),
            *(_tile_map(box, rendered) for box in launch.tile_boxes),
        ],
        "registers": found.registers,
        "stack_bytes": found.stack_bytes,
        "spill_store_bytes": 0 if spills is None else spills.store_bytes,
        "spill_load_bytes": 0 if spills is None else spills.load_bytes,
        "barriers": found.barriers,
        "max_threads": found.max_threads,
        "code_bytes": found.code_bytes,
    }


_COVERED: Final = {"rows": "q_end - q_begin", "keys": "kv_end - kv_begin"}
"""Sizes of a call that are no fields."""


def grid_formula(launch: Launch) -> str:
    """Blocks of a launch, along x."""
    product = " * ".join(_dim(dim, {}) for dim in launch.grid)
    if not launch.is_persistent:
        return product
    least = f"min({product}, multiprocessors)"
    conditions = " and ".join(f"{_COVERED.get(c.size, c.size)} > {c.number}" for c in launch.spread)
    return f"{product} if {conditions} else {least}" if conditions else least


def _tensor_map(box: TensorBox) -> dict[str, Any]:
    """What cuTensorMapEncodeTiled is given for an operand, beside its address, sizes and strides.

    Its dimensions are D, tokens, heads and batch.
    """
    return {
        "argument": f"map_{box.operand}",
        "operand": box.operand,
        "box": [box.columns, box.tokens, 1, 1],
        "swizzle_bytes": box.columns * _ELEMENT_OF_A_BOX,
        "interleave": "none",
        "outside": "zeros",
    }


def _tile_map(box: TileBox, rendered: Rendered) -> dict[str, Any]:
    """The same for a captured tensor; `dimensions` are its own, densest first.

    Along one with a stride of 0 the map has one element.
    """
    rank = len(rendered.program.attention.tensor(box.tensor).dims)
    return {
        "argument": f"map_{box.value}",
        "operand": f"t_{box.tensor}",
        "dimensions": list(box.dims(rank)),
        "box": [box.keys, box.rows, *[1] * (rank - 2)],
        "swizzle_bytes": box.swizzle,
        "interleave": "none",
        "outside": "zeros",
    }


def _condition(launch: Launch) -> str:
    parts = [f"{_COVERED.get(c.size, c.size)} > {c.number}" for c in launch.when]
    return " and ".join(["grid > 0", *(parts or ["q_end > q_begin"])])


def _workspace(workspace: Workspace, rendered: Rendered) -> dict[str, Any]:
    """A scratch array; the argument of the same name points at it."""
    attention = rendered.program.attention
    known = {"Dqk": str(attention.head_dim_qk), "Dv": str(attention.head_dim_v)}
    dims = [_dim(dim, known) for dim in workspace.dims]
    return {
        "argument": workspace.name,
        "element": workspace.element,
        "bytes": " * ".join((*dims, str(_ELEMENT_BYTES))),
    }


def _dim(dim: Dim, known: Mapping[str, str]) -> str:
    """A factor of a formula; `known` are sizes that are numbers already."""
    if isinstance(dim, CeilDiv):
        return f"ceil_div({_COVERED.get(dim.size, dim.size)}, {dim.by})"
    if dim in _COVERED:
        return f"({_COVERED[str(dim)]})"
    return known.get(str(dim), str(dim))


# ---- the argument struct -----------------------------------------------------------------------


def _arguments(layout: ArgumentLayout, program: Program) -> dict[str, Any]:
    may_be_null = {"o", "lse", "row_max", "state_m", "state_l", "state_acc"}
    may_be_null |= {TICKETS, *(w.name for w in program.workspaces)}
    return {
        "bytes": layout.size,
        "alignment": layout.alignment,
        "byte_order": "little",
        "fields": [
            _field(field, program.attention, is_nullable=field.name in may_be_null)
            for field in layout.fields
        ],
    }


def _field(field: Field, attention: Attention, *, is_nullable: bool) -> dict[str, Any]:
    type_, size = _TYPES[field.format]
    return {
        "name": field.name,
        "type": type_,
        "c_type": field.c_type,
        "offset": field.offset,
        "bytes": size,
        "meaning": _meaning(field, attention),
        "nullable": is_nullable,
    }


def _meaning(field: Field, attention: Attention) -> str:
    """What to put into a field, in words."""
    name = field.name
    if name in _SIZES:
        return _SIZES[name]
    if name in ("q_begin", "q_end", "kv_begin", "kv_end"):
        what = "query rows" if name.startswith("q_") else "keys"
        return f"the launch covers the {what} [begin, end) of the problem"
    if field.c_type == "ag_tensor_map":
        return f"the tensor map {name}; the launch's `tensor_maps` say of what"
    if field.format == "Q":
        return _pointer_meaning(name, field, attention)
    for tensor in attention.tensors:
        for i in range(len(tensor.dims)):
            if name == f"t_{tensor.name}_stride{i}":
                return f"elements from one to the next along dimension {i}; 0 repeats one"
            if name == f"t_{tensor.name}_size{i}":
                return f"size of dimension {i}"
    if "_stride_" in name and not name.startswith(("p_", "n_")):
        operand, _, dim = name.partition("_stride_")
        words = {"b": "batch", "h": "head", "s": "token", "d": "element of the head"}
        return f"elements of {operand} from one {words[dim]} to the next"
    return field.comment


def _pointer_meaning(name: str, field: Field, attention: Attention) -> str:
    shapes = {
        "q": "[B, Hq, rows, Dqk], the rows [q_begin, q_end)",
        "k": "[B, Hkv, keys, Dqk], the keys [kv_begin, kv_end)",
        "v": "[B, Hkv, keys, Dv], the keys [kv_begin, kv_end)",
        "o": "[B, Hq, rows, Dv]; null writes the row state instead",
        "lse": "float32 [B, Hq, rows], contiguous; natural logarithm",
        "row_max": "float32 [B, Hq, rows], contiguous",
        "state_m": "float32 [B, Hq, rows], contiguous",
        "state_l": "float32 [B, Hq, rows], contiguous",
        "state_acc": "float32 [B, Hq, rows, Dv], contiguous",
    }
    if name in shapes:
        return shapes[name]
    for tensor in attention.tensors:
        if name == f"t_{tensor.name}":
            dims = ", ".join(f"{d.size}{'?' if d.optional else ''}" for d in tensor.dims)
            return f"{tensor.element.name} [{dims}]"
    return field.comment
