"""The one structured argument of a kernel: its C++ declaration and its bytes are one table.

Every kernel takes `const Args args` by value.  `ArgumentLayout.fields` lists the members with
their offsets; the template prints the struct from it, the launcher packs it, the manifest
publishes it, and the toolchain checks its size against the compiled kernel's parameter table.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, final

from attngen.analysis.ranges import INT32, compile_time_ranges
from attngen.ir.attention import Attention
from attngen.ir.program import TICKETS, TensorBox, TileBox, Workspace
from attngen.ir.types import Element, ScalarType
from attngen.record import record

__all__ = ["C_ELEMENT", "ArgumentLayout", "Field", "layout_arguments"]

C_ELEMENT: Final = {
    "bool": "unsigned char", "int8": "signed char", "uint8": "unsigned char", "int16": "short",
    "int32": "int", "uint32": "unsigned int", "int64": "ag_i64",
    "fp16": "ag_fp16", "bf16": "ag_bf16", "fp32": "float",
}  # fmt: skip
"""The C++ type that stores one element."""

_FORMAT: Final = {"pointer": "Q", "ag_i64": "q", "int": "i", "float": "f"}
_TENSOR_MAP: Final = "128s"
_BYTES: Final = {_TENSOR_MAP: 128, "Q": 8, "q": 8, "i": 4, "f": 4}
_OPERAND_DIMS: Final = ("b", "h", "s", "d")
_C_WORKSPACE: Final = {"fp32": "float", "int32": "int"}
_ROW_STATE: Final = frozenset(("state_m", "state_l", "state_acc"))


@final
@record
class Field:
    """One member of the struct: its C++ declaration, its `struct` format and its offset."""

    name: str
    c_type: str
    format: str
    offset: int
    comment: str

    @property
    def declaration(self) -> str:
        type_ = self.c_type.replace("*", " *")
        return f"{type_}{self.name};" if "*" in type_ else f"{type_} {self.name};"


@final
@record
class ArgumentLayout:
    """All members, in order; large ones first, so that nothing is padded in between."""

    fields: tuple[Field, ...]

    @cached_property
    def _packer(self) -> struct.Struct:
        return struct.Struct("<" + "".join(f.format for f in self.fields))

    @property
    def alignment(self) -> int:
        """Bytes; the struct begins at a multiple of it."""
        return 64 if any(f.format == _TENSOR_MAP for f in self.fields) else 8

    @property
    def size(self) -> int:
        """Bytes of the struct, a multiple of its alignment as C++ wants it."""
        return -(-self._packer.size // self.alignment) * self.alignment

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The struct's bytes; `values` holds exactly one value per member."""
        if values.keys() != {f.name for f in self.fields}:
            different = values.keys() ^ {f.name for f in self.fields}
            raise KeyError(f"argument values and layout differ in {sorted(different)}")
        packed = self._packer.pack(*(values[f.name] for f in self.fields))
        return packed.ljust(self.size, b"\0")


def layout_arguments(
    attention: Attention,
    dtype: Element,
    workspaces: tuple[Workspace, ...] = (),
    boxes: tuple[TensorBox, ...] = (),
    tile_boxes: tuple[TileBox, ...] = (),
    *,
    has_tickets: bool = False,
    is_checked: bool = False,
) -> ArgumentLayout:
    """The argument struct that all kernels of a program take.

    workspaces:  the program's; the row state has its place in every struct.
    boxes:       the program's; a tensor map for each.
    tile_boxes:  likewise, with a word that says whether there is one.
    has_tickets: a launch hands out query tiles.
    is_checked:  there is a place for the report.
    """
    element = C_ELEMENT[dtype.name]
    pointers = [(name, f"const {element}*", "") for name in "qkv"]
    pointers += [
        ("o", f"{element}*", "null: write the row state instead"),
        ("lse", "float*", "may be null"),
        ("row_max", "float*", "may be null"),
        ("state_m", "float*", "row state, [B, Hq, rows]; null when nothing needs it"),
        ("state_l", "float*", ""),
        ("state_acc", "float*", "[B, Hq, rows, Dv]"),
    ]
    pointers += [
        (w.name, f"{_C_WORKSPACE[w.element]}*", "workspace; null when nothing made it")
        for w in workspaces
        if w.name not in _ROW_STATE
    ]
    pointers += [
        (f"t_{t.name}", f"const {C_ELEMENT[t.element.name]}*", f"tensor {t.name}")
        for t in attention.tensors
    ]
    if has_tickets:
        pointers.append((TICKETS, "int*", "[2], zeros: tiles handed out, blocks done; may be null"))
    if is_checked:
        pointers.append(("report", "int*", "1 + number of a tensor that was read outside"))
    wide = [
        (f"{operand}_stride_{dim}", "ag_i64", "in elements" if (operand, dim) == ("q", "b") else "")
        for operand in "qkvo"
        for dim in _OPERAND_DIMS
    ]
    for tensor in attention.tensors:
        for i in range(len(tensor.dims)):
            wide += [
                (f"t_{tensor.name}_stride{i}", "ag_i64", ""),
                (f"t_{tensor.name}_size{i}", "ag_i64", ""),
            ]
    narrow = [(name, "int", "") for name in ("B", "Hq", "Hkv", "Sq", "Skv")]
    narrow += [
        ("q_begin", "int", "rows [q_begin, q_end) of the logical problem"),
        ("q_end", "int", ""),
        ("kv_begin", "int", "keys [kv_begin, kv_end)"),
        ("kv_end", "int", ""),
    ]
    narrow += [
        (f"has_{b.value}", "int", f"1: map_{b.value} is there; 0: its rows are not aligned")
        for b in tile_boxes
    ]
    narrow += [(f"n_{name}", "int", f"named dimension {name}") for name in attention.named_sizes]
    ranges = compile_time_ranges(attention)
    for param in attention.params:
        member = (
            f"p_{param.name}",
            _param_type(param.type, ranges[param.name]),
            f"param {param.name}",
        )
        (wide if member[1] == "ag_i64" else narrow).append(member)
    members = [
        (f"map_{b.operand}", "ag_tensor_map", _TENSOR_MAP, f"boxes of {b.operand}") for b in boxes
    ]
    members += [
        (f"map_{b.value}", "ag_tensor_map", _TENSOR_MAP, f"boxes of tensor {b.tensor}")
        for b in tile_boxes
    ]
    members += [(n, c, _FORMAT["pointer"], t) for n, c, t in pointers]
    members += [(n, c, _FORMAT[c], t) for n, c, t in [*wide, *narrow]]
    fields, offset = [], 0
    for name, c_type, code, comment in members:
        fields.append(Field(name, c_type, code, offset, comment))
        offset += _BYTES[code]
    return ArgumentLayout(tuple(fields))


def _param_type(scalar: ScalarType, range_: Any) -> str:
    if scalar is ScalarType.FLOAT:
        return "float"
    return "int" if range_.within(INT32.low, INT32.high) else "ag_i64"
