"""What a launch writes, and the values of the argument struct."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.backend.device import ITEM_BYTES, ArrayView
from attngen.binding import Binding
from attngen.ir.program import (
    TICKETS,
    Launch,
    MoreThan,
    Program,
    TensorBox,
    TileBox,
    Workspace,
    evaluate_dims,
)
from attngen.ir.types import ELEMENTS, Element
from attngen.tensor_map import ALIGNMENT, MOST_STRIDE, TensorMap

__all__ = [
    "Encode", "Outputs", "argument_values", "due_launches", "due_workspaces", "encode_map",
    "encode_tile_map", "find_overlap", "grid_size", "reach", "tensor_map",
    "why_no_tile_map", "workspace_shape",
]  # fmt: skip

_WORK: Final = 10_000
"""Steps of the search for a shared element; where they do not suffice there is none known."""

_DIMS = ("b", "h", "s", "d")

Encode: TypeAlias = Callable[[TensorMap], bytes]
"""A tensor map as a machine reads it, 128 bytes."""

_NO_MAP: Final = bytes(128)
"""Of an array of which nothing is copied by a map."""


@final
@dataclass(frozen=True, slots=True)  # every call makes one, and a record's constructor is slower
class Outputs:
    """Views of the arrays that a launch writes; None where it does not write one.

    Shapes: o [B, Hq, rows, Dv]; lse, row_max [B, Hq, rows] and the row state m, l [B, Hq, rows],
    acc [B, Hq, rows, Dv], all float32 and contiguous.  Without `o` the row state is the result.
    key_ends is the workspace of the launch that summarises keys, int32; without it that launch is
    left out.
    """

    o: ArrayView | None = None
    lse: ArrayView | None = None
    row_max: ArrayView | None = None
    state_m: ArrayView | None = None
    state_l: ArrayView | None = None
    state_acc: ArrayView | None = None
    key_ends: ArrayView | None = None
    report: ArrayView | None = None
    """int32 [1], 0 before the launch: what a checked kernel writes when a read was outside."""

    def views(self) -> dict[str, ArrayView]:
        """Those that are there, by the name of the struct's member."""
        named = {
            "o": self.o, "lse": self.lse, "row_max": self.row_max,
            "state_m": self.state_m, "state_l": self.state_l, "state_acc": self.state_acc,
            "key_ends": self.key_ends, "report": self.report,
        }  # fmt: skip
        return {name: view for name, view in named.items() if view is not None}


_NULLABLE: Final = ("o", "lse", "row_max", "state_m", "state_l", "state_acc")


def argument_values(
    program: Program, binding: Binding, outputs: Outputs, encode: Encode | None = None
) -> dict[str, Any]:
    """One value per member of the argument struct, which all launches of a program share.

    encode:  needed by programs with tensor maps.
    Errors:  A642 for an operand that `why_unaligned` should have refused.
    """
    written = outputs.views()
    values: dict[str, Any] = {
        name: written[name].pointer if name in written else 0
        for name in (*_NULLABLE, *(w.name for w in program.workspaces))
    }
    if program.hands_out_tiles:
        values[TICKETS] = 0  # whoever launches has the counters
    if "report" in written:
        values["report"] = written["report"].pointer
    operands = {"q": binding.q, "k": binding.k, "v": binding.v, "o": written.get("o")}
    for name, view in operands.items():
        if view is not None:
            values[name] = view.pointer
        for i, dim in enumerate(_DIMS):
            values[f"{name}_stride_{dim}"] = 0 if view is None else view.strides[i]
    for name, view in binding.tensors.items():
        values[f"t_{name}"] = view.pointer
        for i, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
            values[f"t_{name}_size{i}"] = size
            values[f"t_{name}_stride{i}"] = stride
    for name, size in binding.sizes.items():
        if name not in ("Dqk", "Dv"):
            values[name if name in ("B", "Hq", "Hkv", "Sq", "Skv") else f"n_{name}"] = size
    values |= {f"p_{name}": value for name, value in binding.params.items()}
    for box in program.boxes:
        assert encode is not None, "the program has tensor maps"
        view = operands[box.operand]
        assert view is not None
        values[f"map_{box.operand}"] = encode_map(box, view, binding.dtype, encode)
    for tile_box in program.tile_boxes:
        assert encode is not None, "the program has tensor maps"
        view = binding.tensors[tile_box.tensor]
        values[f"has_{tile_box.value}"] = int(why_no_tile_map(tile_box, view) is None)
        values[f"map_{tile_box.value}"] = encode_tile_map(tile_box, view, encode)
    values["q_begin"], values["q_end"] = binding.rows
    values["kv_begin"], values["kv_end"] = binding.keys
    return values


def encode_map(box: TensorBox, view: ArrayView, element: Element, encode: Encode) -> bytes:
    """The tensor map of an operand [B, H, tokens, D]; zeros where it has no elements."""
    if 0 in view.shape:
        return _NO_MAP
    return encode(tensor_map(box, view, element))


def tensor_map(box: TensorBox, view: ArrayView, element: Element) -> TensorMap:
    """The boxes of an operand [B, H, tokens, D]; what lies outside is zeros.

    The stride of a dimension of size 1, which is never walked, is whatever the array has; here it
    is one that is allowed.
    """
    batch, heads, tokens, columns = view.shape
    strides = tuple(
        element.bytes * stride if size > 1 else 16
        for size, stride in zip((tokens, heads, batch), view.strides[-2::-1], strict=True)
    )
    return TensorMap(
        box.operand,
        element,
        view.pointer,
        (columns, tokens, heads, batch),
        strides,
        (box.columns, box.tokens, 1, 1),
        box.columns * element.bytes,
    )


def encode_tile_map(box: TileBox, view: ArrayView, encode: Encode) -> bytes:
    """The tensor map of a captured tensor; zeros where it has none.

    Along a dimension that repeats one element (stride 0) there is one, at coordinate 0.
    """
    if why_no_tile_map(box, view) is not None:
        return _NO_MAP
    dims, element = box.dims(len(view.shape)), ELEMENTS[view.dtype]
    walked = {d: view.shape[d] > 1 and view.strides[d] != 0 for d in dims}
    sizes = tuple(view.shape[d] if walked[d] else 1 for d in dims)
    strides = tuple(element.bytes * view.strides[d] if walked[d] else ALIGNMENT for d in dims[1:])
    boxed = (box.keys, box.rows, *(1,) * (len(dims) - 2))
    tensor = TensorMap(box.tensor, element, view.pointer, sizes, strides, boxed, box.swizzle)
    return encode(tensor)


def why_no_tile_map(box: TileBox, view: ArrayView) -> str | None:
    """What keeps a tensor map from describing a captured tensor."""
    item = ITEM_BYTES[view.dtype]
    if 0 in view.shape:
        return "it has no elements"
    if view.pointer % ALIGNMENT:
        return f"it begins at an address that is no multiple of {ALIGNMENT} bytes"
    if view.shape[box.key_dim] > 1 and view.strides[box.key_dim] != 1:
        return f"its elements are {view.strides[box.key_dim]} apart from key to key, not 1"
    for d in box.dims(len(view.shape))[1:]:
        stride = item * view.strides[d]
        is_repeated = stride == 0 and d != box.row_dim
        if view.shape[d] > 1 and not is_repeated and not _is_map_stride(stride):
            return (
                f"it has a stride of {stride} bytes along dimension {d}, which is no multiple of"
                f" {ALIGNMENT} above 0 and below 2^40"
            )
    return None


def _is_map_stride(stride: int) -> bool:
    return stride % ALIGNMENT == 0 and 0 < stride < MOST_STRIDE


def workspace_shape(workspace: Workspace, binding: Binding) -> tuple[int, ...]:
    """The shape of a scratch array for one call."""
    return evaluate_dims(workspace.dims, _sizes(binding))


def due_workspaces(
    program: Program, binding: Binding, *, with_ahead: bool = True
) -> list[Workspace]:
    """The scratch arrays to allocate for one call, in order.

    with_ahead:  also those of launches that a call can do without, where they pay.
    """
    due = [each for each in program.launches if not each.when or with_ahead]
    return [w for each in due if _is_due(each, binding) for w in each.workspaces]


def due_launches(
    program: Program, binding: Binding, outputs: Outputs, multiprocessors: int
) -> list[tuple[Launch, int]]:
    """The launches of one call and their blocks, in order; none when the problem is empty.

    One that a call can do without is there when its workspaces are.  A persistent one has at most
    a block for each multiprocessor, where it is not spread.
    """
    if grid_size(binding, program.main) == 0:
        return []
    written = outputs.views().keys()
    return [
        (each, _blocks(each, binding, multiprocessors))
        for each in program.launches
        if not each.when or all(w.name in written for w in each.workspaces)
    ]


def grid_size(binding: Binding, launch: Launch) -> int:
    """Blocks of a launch, or tiles of a persistent one; 0 when there are no rows."""
    sizes = _sizes(binding)
    return math.prod(evaluate_dims(launch.grid, sizes)) if sizes["rows"] else 0


def _blocks(launch: Launch, binding: Binding, multiprocessors: int) -> int:
    tiles = grid_size(binding, launch)
    is_spread = bool(launch.spread) and _hold(launch.spread, binding)
    return min(tiles, multiprocessors) if launch.is_persistent and not is_spread else tiles


def _is_due(launch: Launch, binding: Binding) -> bool:
    return _hold(launch.when, binding)


def _hold(conditions: tuple[MoreThan, ...], binding: Binding) -> bool:
    sizes = _sizes(binding)
    return all(sizes[condition.size] > condition.number for condition in conditions)


def _sizes(binding: Binding) -> Mapping[str, int]:
    """The sizes of a call by name, and how many rows and keys it covers."""
    (q_begin, q_end), (kv_begin, kv_end) = binding.rows, binding.keys
    return {**binding.sizes, "rows": q_end - q_begin, "keys": kv_end - kv_begin}


def reach(view: ArrayView) -> tuple[int, int]:
    """The addresses [begin, end) that a view may touch."""
    size = ITEM_BYTES[view.dtype]
    if 0 in view.shape:
        return view.pointer, view.pointer
    low = high = 0  # in elements
    for count, stride in zip(view.shape, view.strides, strict=True):
        if stride < 0:
            low += (count - 1) * stride
        else:
            high += (count - 1) * stride
    return view.pointer + low * size, view.pointer + (high + 1) * size


def find_overlap(out: ArrayView, inputs: Mapping[str, ArrayView]) -> str | None:
    """The first input that has an element in common with `out`; slices of a buffer need not."""
    begin, end = reach(out)
    for name, view in inputs.items():
        its_begin, its_end = reach(view)
        if begin < its_end and its_begin < end and _share(out, view):
            return name
    return None


def _share(one: ArrayView, other: ArrayView) -> bool:
    try:
        limit: Any = _WORK
        return bool(np.shares_memory(_addresses(one), _addresses(other), max_work=limit))
    except np.exceptions.TooHardError:
        return False


def _addresses(view: ArrayView) -> Any:
    """An array with the addresses of a view, whose memory is never read."""
    size = ITEM_BYTES[view.dtype]

    place = SimpleNamespace(
        __array_interface__={
            "version": 3,
            "data": (view.pointer, True),
            "shape": tuple(view.shape),
            "strides": tuple(s * size for s in view.strides),
            "typestr": f"|V{size}",
        }
    )
    return np.asarray(place)
