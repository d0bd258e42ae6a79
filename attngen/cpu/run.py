"""Launch a built kernel on the CPU and say what the host header found."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, final

import numpy as np

from attngen.cpu.errors import CpuLaunchRefused, CpuRunFault
from attngen.cpu.faults import Fault
from attngen.diagnostics.diagnostic import AttnError

__all__ = ["Landing", "MemoryRange", "Mode", "RunReport", "copy_apart", "run_on_cpu"]


class Mode(IntEnum):
    """Which thread goes on when one has to wait; the numbers are `ag_host::Mode` in `host.h`.

    A right kernel gives the same answer in all of them.
    """

    RING = 0  # one after the other
    EAGER = 1  # a warp until all its lanes are stuck, then the next warp
    EAGER_LAST = 2  # the same backwards, from the last warp
    RANDOM = 3  # any, by `seed`


class Landing(IntEnum):
    """When an asynchronous copy moves its bytes; the numbers are `ag_host::Landing` in `host.h`.

    A right kernel gives the same answer in both, and what is wrong is a fault in both.
    """

    LATE = 0  # in the wait for it, the last moment that is allowed
    EARLY = 1  # at its start


@final
@dataclass(frozen=True, slots=True)
class MemoryRange:
    """The bytes `[begin, end)` of one argument array, and whether the kernel may write them.

    Races in global memory are found in units of `element_bytes`: 1 is always right, the size of
    the array's elements is faster, and then a smaller access is a fault.
    """

    begin: int
    end: int
    is_writable: bool
    element_bytes: int = 1
    name: str = "an array"

    @classmethod
    def of(cls, array: np.ndarray[Any, Any], *, is_writable: bool, name: str) -> MemoryRange:
        """The range of a NumPy array with any strides."""
        begin, end = np.lib.array_utils.byte_bounds(array)
        return cls(begin, end if array.size else begin, is_writable, array.itemsize, name)


@final
@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run without a fault did, summed over its threads.

    Wavefronts are counted for matrices and for shared memory by address (not for `ag_shared`, nor
    for asynchronous copies): those it took, and those it would take without bank conflicts.
    """

    switches: int  # from one fiber to another
    meetings: int  # of a block at `ag_sync`, or of a warp at a barrier or collective
    index_reads: int  # calls of `ag_thread`: most steps of most loops make one
    notes: int  # a checksum of integers and words stored in shared memory, and of where
    shared_reads: int
    shared_writes: int
    global_loads: int
    global_stores: int
    shared_wavefronts: int
    shared_wavefronts_least: int
    seconds: float

    @classmethod
    def total(cls, reports: Sequence[RunReport]) -> RunReport:
        """What several runs did together."""
        return cls(*(sum(getattr(r, f.name) for r in reports) for f in fields(cls)))


def copy_apart(array: np.ndarray[Any, Any], *, margin: int = 1 << 16) -> np.ndarray[Any, Any]:
    """A C-contiguous copy with `margin` unused bytes on either side of it.

    An access a little outside an array is only found when it does not fall into the next one,
    so a search for mistakes should give the kernel arrays that lie apart.
    """
    memory = np.zeros(array.nbytes + 2 * margin, np.uint8)
    first = margin + -(memory.ctypes.data + margin) % 64
    copy: np.ndarray[Any, Any] = memory[first : first + array.nbytes].view(array.dtype)
    copy = copy.reshape(array.shape)
    copy[...] = array
    return copy


class _Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("is_writable", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        ("args_bytes", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64),
        ("grid", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("workers", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("landing", ctypes.c_int32),
        ("is_checked", ctypes.c_int32),
        ("range_count", ctypes.c_int32),
        ("ranges", ctypes.POINTER(_Range)),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("fault", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("switches", ctypes.c_int64),
        ("meetings", ctypes.c_int64),
        ("index_reads", ctypes.c_int64),
        ("notes", ctypes.c_int64),
        ("shared_reads", ctypes.c_int64),
        ("shared_writes", ctypes.c_int64),
        ("global_loads", ctypes.c_int64),
        ("global_stores", ctypes.c_int64),
        ("shared_wavefronts", ctypes.c_int64),
        ("shared_wavefronts_least", ctypes.c_int64),
        ("text", ctypes.c_char * 2048),
    )


def run_on_cpu(
    library: Path,
    kernel: str,
    args: bytes,
    *,
    grid: int,
    threads: int,
    shared_bytes: int,
    ranges: Sequence[MemoryRange],
    mode: Mode = Mode.RING,
    landing: Landing = Landing.LATE,
    seed: int = 0,
    workers: int | None = None,
    check: bool = True,
) -> RunReport:
    """Run `kernel` over its whole grid; the interpreter is free meanwhile.

    args:    the bytes of the kernel's argument struct; its pointers lie in `ranges`.
    workers: OS threads that share the blocks; None is one per processor this process may use.
    check:   False leaves out the search for races and unwritten shared memory, for large runs.
    Errors:  A641 for a fault in the kernel; A941 when the launch does not fit it.
    """
    rows = (_Range * len(ranges))(
        *(
            _Range(r.begin, r.end, r.name.encode(), int(r.is_writable), r.element_bytes)
            for r in ranges
        )
    )
    launch = _Launch(
        struct_bytes=ctypes.sizeof(_Launch),
        args_bytes=len(args),
        shared_bytes=shared_bytes,
        grid=grid,
        threads=threads,
        workers=workers if workers is not None else _processors(),
        mode=int(mode),
        seed=seed & 0xFFFFFFFF,
        landing=int(landing),
        is_checked=int(check),
        range_count=len(ranges),
        ranges=rows,
    )
    report = _Report()
    entry = _entry(library, kernel)
    start = time.perf_counter()
    entry(args, ctypes.byref(launch), ctypes.byref(report))
    seconds = time.perf_counter() - start

    fault = Fault(report.fault)
    text = report.text.decode(errors="replace")
    if fault is Fault.LAUNCH:
        raise AttnError(CpuLaunchRefused(None, kernel, text))
    if fault is not Fault.NONE:
        raise AttnError(CpuRunFault(None, kernel, fault, text))
    return RunReport(
        report.switches,
        report.meetings,
        report.index_reads,
        report.notes,
        report.shared_reads,
        report.shared_writes,
        report.global_loads,
        report.global_stores,
        report.shared_wavefronts,
        report.shared_wavefronts_least,
        seconds,
    )


def _entry(library: Path, kernel: str) -> Any:
    """The exported function of a kernel; ctypes lets go of the interpreter while it runs."""
    try:
        entry = getattr(ctypes.CDLL(str(library)), f"{kernel}_cpu")
    except (OSError, AttributeError) as error:
        raise AttnError(CpuLaunchRefused(None, kernel, str(error))) from error
    entry.argtypes = (ctypes.c_char_p, ctypes.POINTER(_Launch), ctypes.POINTER(_Report))
    entry.restype = None
    return entry


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
