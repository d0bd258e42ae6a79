"""What a cubin says about its kernels: registers, memory, arguments, digest of the code.

A cubin is an ELF file.  The facts are in its section table and in records of the sections
`.nv.info` (per function) and `.nv.info.<kernel>`; their layout was read off the output of
NVRTC 12.9 to 13.5 and compared with `cuobjdump -res-usage`.  Spilled bytes are not in a
cubin: `nvrtc.spills_from_log` has them.

A cubin may come from a shared cache, so every offset in it is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum, unique
from hashlib import sha256
from typing import Any, NoReturn, final

from attngen.backend.errors import DamagedCubin
from attngen.diagnostics.diagnostic import AttnError
from attngen.record import record

__all__ = ["KernelParam", "KernelResources", "read_resources"]


@final
@record
class KernelParam:
    """One parameter of a kernel: where the kernel expects it, and its size, in bytes."""

    ordinal: int
    offset: int
    size: int


@final
@record
class KernelResources:
    """What one kernel occupies, and the arguments it reads.

    Units: 32-bit registers per thread; bytes per thread (stack) or per block (shared).
    """

    registers: int
    stack_bytes: int
    shared_bytes: int  # static, without what the system reserves
    barriers: int  # of the 16 hardware barriers of a block
    max_threads: int | None  # per block, from __launch_bounds__; None where it has none
    params: tuple[KernelParam, ...]  # by ordinal
    code_bytes: int
    code_digest: str  # sha256 of the machine code, the same in every cubin that holds it


def read_resources(cubin: bytes) -> dict[str, KernelResources]:
    """The resources of every kernel in a cubin, by kernel name, sorted.

    Errors:  A507 for anything that is not a whole cubin.
    """
    elf = _Elf(cubin)
    per_function = _read_function_table(elf)
    code_total = 0
    result: dict[str, KernelResources] = {}
    for name in sorted(elf.sections):
        if not name.startswith(".text."):
            continue
        kernel = name.removeprefix(".text.")
        if f".nv.info.{kernel}" not in elf.sections:
            continue  # a function that kernels call, no kernel
        code_total += elf.sections[name].size
        if code_total > len(cubin):
            _refuse("its sections overlap")
        result[kernel] = _read_kernel(elf, kernel, per_function.get(kernel, {}))
    if not result:
        _refuse("it holds no kernel")
    return result


# ---- ELF ---------------------------------------------------------------------------------

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL_BYTES = 24
_MACHINE_CUDA = 190
_NO_BITS = 8  # a section that occupies no bytes of the file
_MAX_NAME_BYTES = 4096


@final
@record
class _Section:
    kind: int
    flags: int
    offset: int
    size: int
    link: int


@final
class _Elf:
    """The section table of a cubin; every access to the bytes is checked."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        if data[:6] != b"\x7fELF\x02\x01":
            _refuse("it does not start as a 64-bit ELF file")
        (machine,) = self.unpack("<H", 18)
        if machine != _MACHINE_CUDA:
            _refuse(f"it is for machine {machine}, not for CUDA")
        (abi,) = self.unpack("<B", 8)
        (flags,) = self.unpack("<I", 48)
        # The architecture moved in the flags with version 8 of NVIDIA's ELF.
        self.sm_number = (flags >> 8) & 0xFF if abi >= 8 else flags & 0xFF
        self.sections, self.by_index = self._read_sections()

    def _read_sections(self) -> tuple[dict[str, _Section], list[_Section]]:
        (table,) = self.unpack("<Q", 40)
        entry_bytes, count, names_index = self.unpack("<HHH", 58)
        if entry_bytes != _SECTION.size or names_index >= count:
            _refuse("its section table is damaged")
        raw = [self.unpack(_SECTION.format, table + i * entry_bytes) for i in range(count)]
        listed = [_Section(r[1], r[2], r[4], r[5], r[6]) for r in raw]
        for section in listed:
            if section.kind != _NO_BITS and section.offset + section.size > len(self._data):
                _refuse("a section ends behind the end of the file")
        names = listed[names_index]
        named: dict[str, _Section] = {}
        for entry, section in zip(raw, listed, strict=True):
            named.setdefault(self.string(names, entry[0]), section)
        return named, listed

    def unpack(self, layout: str, offset: int) -> tuple[Any, ...]:
        if offset < 0 or offset + struct.calcsize(layout) > len(self._data):
            _refuse("it ends too early")
        return struct.unpack_from(layout, self._data, offset)

    def bytes_of(self, section: _Section) -> bytes:
        if section.kind == _NO_BITS:
            return b""
        return self._data[section.offset : section.offset + section.size]

    def string(self, table: _Section, offset: int) -> str:
        start = table.offset + offset
        end = self._data.find(b"\0", start, start + _MAX_NAME_BYTES)
        if table.kind == _NO_BITS or offset >= table.size or end < 0:
            _refuse("a name is damaged")
        try:
            return self._data[start:end].decode("ascii")
        except UnicodeDecodeError:
            _refuse("a name is damaged")

    def read_symbol_name(self, index: int) -> str:
        symbols = self.sections.get(".symtab")
        if symbols is None or symbols.kind == _NO_BITS or symbols.link >= len(self.by_index):
            _refuse("its symbol table is missing")
        if (index + 1) * _SYMBOL_BYTES > symbols.size:
            _refuse("a symbol is missing")
        (name,) = self.unpack("<I", symbols.offset + index * _SYMBOL_BYTES)
        return self.string(self.by_index[symbols.link], name)


# ---- the records of .nv.info -------------------------------------------------------------


@unique
class _Attribute(IntEnum):
    """The attributes that are read here; a record has more kinds, which are skipped."""

    MAX_THREADS = 0x05
    FRAME_BYTES = 0x11
    STACK_BYTES = 0x12
    PARAM = 0x17
    REGISTERS = 0x2F
    PARAM_WIDE = 0x45  # instead of PARAM, where the parameters fill more than 4 KiB
    BARRIERS = 0x4C


_PER_FUNCTION = (_Attribute.REGISTERS, _Attribute.FRAME_BYTES, _Attribute.STACK_BYTES)
_STACK = (_Attribute.STACK_BYTES, _Attribute.FRAME_BYTES)  # with and without callees
_FORMATS_INLINE = (1, 2, 3)  # no value, one byte, two bytes: always in a four-byte record
_FORMAT_SIZED = 4

_RESERVED_SHARED_BYTES = 1024  # counted in a kernel's own section from sm_90 on


def _read_records(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The (attribute, inline value, payload) records of one `.nv.info` section."""
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            _refuse("an attribute is cut off")
        record_format, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if record_format in _FORMATS_INLINE:
            yield attribute, value, b""
        elif record_format == _FORMAT_SIZED and at + value <= len(data):
            yield attribute, 0, data[at : at + value]
            at += value
        else:
            _refuse("an attribute is damaged")


def _read_function_table(elf: _Elf) -> dict[str, dict[int, int]]:
    """Registers and stack of every function: name -> attribute -> value."""
    section = elf.sections.get(".nv.info")
    if section is None:
        _refuse("it has no resource table")
    table: dict[str, dict[int, int]] = {}
    for attribute, _, payload in _read_records(elf.bytes_of(section)):
        if attribute in _PER_FUNCTION:
            symbol, value = _unpack_payload("<II", payload)
            table.setdefault(elf.read_symbol_name(symbol), {})[attribute] = value
    return table


def _read_kernel(elf: _Elf, kernel: str, facts: dict[int, int]) -> KernelResources:
    if _Attribute.REGISTERS not in facts:
        _refuse(f"the registers of `{kernel}` are missing")
    text = elf.sections[f".text.{kernel}"]
    params: list[KernelParam] = []
    max_threads: int | None = None
    barriers = (text.flags >> 20) & 0x7F  # where version 7 of NVIDIA's ELF has them
    records = elf.bytes_of(elf.sections[f".nv.info.{kernel}"])
    for attribute, value, payload in _read_records(records):
        match attribute:
            case _Attribute.PARAM:
                _, ordinal, offset, packed = _unpack_payload("<IHHI", payload)
                params.append(KernelParam(ordinal, offset, (packed >> 18) & 0x3FFF))
            case _Attribute.PARAM_WIDE:
                _, ordinal, offset, size, _ = _unpack_payload("<IHHHH", payload)
                params.append(KernelParam(ordinal, offset, size))
            case _Attribute.MAX_THREADS:
                x, y, z = _unpack_payload("<III", payload)
                max_threads = x * y * z
            case _Attribute.BARRIERS:
                barriers = value
            case _:
                pass
    params.sort(key=lambda param: param.ordinal)
    if [param.ordinal for param in params] != list(range(len(params))):
        _refuse(f"the parameters of `{kernel}` are damaged")
    code = elf.bytes_of(text)
    return KernelResources(
        registers=facts[_Attribute.REGISTERS],
        stack_bytes=max(facts.get(attribute, 0) for attribute in _STACK),
        shared_bytes=_read_shared_bytes(elf, kernel),
        barriers=barriers,
        max_threads=max_threads,
        params=tuple(params),
        code_bytes=len(code),
        code_digest=sha256(code).hexdigest(),
    )


def _read_shared_bytes(elf: _Elf, kernel: str) -> int:
    section = elf.sections.get(f".nv.shared.{kernel}")
    if section is None:
        return 0
    reserved = _RESERVED_SHARED_BYTES if elf.sm_number >= 90 else 0
    return max(0, section.size - reserved)


def _unpack_payload(layout: str, payload: bytes) -> tuple[Any, ...]:
    if len(payload) != struct.calcsize(layout):
        _refuse("an attribute has the wrong size")
    return struct.unpack(layout, payload)


def _refuse(reason: str) -> NoReturn:
    raise AttnError(DamagedCubin(None, reason))
