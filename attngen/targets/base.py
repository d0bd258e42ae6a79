"""What a target is: one NVIDIA architecture, its limits and the instructions it has.

Numbers that are the same for every supported architecture have defaults here; the rest is
in one file per target.  Sources, named in the comments next to each number:

- *Guide*: CUDA C++ Programming Guide, appendix "Compute Capabilities", table "Technical
  Specifications per Compute Capability".
- *PTX*: PTX ISA, the "Target ISA Notes" of the instruction.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import final

from attngen.record import record

__all__ = ["KIB", "Feature", "Target"]

KIB = 1024


@unique
class Feature(Enum):
    """An instruction group that kernels ask for; never ask for `major >= 9` instead."""

    CP_ASYNC = "cp.async: copies from global to shared memory that run beside the arithmetic"
    LDMATRIX = "ldmatrix: 8x8 matrices from shared memory into mma fragments"
    BF16_MMA = "mma.sync with bf16 or fp16 operands and float32 accumulators"
    FP8_MMA = "mma.sync with fp8 operands"
    MBARRIER = "mbarrier: barriers in shared memory that count arrivals and bytes"
    STMATRIX = "stmatrix: mma fragments into shared memory"
    CLUSTER = "thread block clusters and distributed shared memory"
    TMA = "cp.async.bulk.tensor: tensor tiles copied by the tensor memory accelerator"
    DEPENDENT_LAUNCH = "griddepcontrol: a kernel may start before its predecessor has ended"
    SETMAXNREG = "setmaxnreg: registers moved between warp groups"
    WGMMA = "wgmma: matrix products by a whole warp group, operands in shared memory"
    TCGEN05 = "tcgen05: matrix products with accumulators in tensor memory"


@final
@record(kw_only=True)
class Target:
    """One architecture that attngen makes cubins for.

    Units: bytes for memory, 32-bit registers, threads.
    """

    name: str  # "sm_90a", as users and the compiler spell it
    capability: tuple[int, int]  # the compute capability whose limits these are
    features: frozenset[Feature]

    shared_bytes_per_block: int  # largest opt-in dynamic + static shared memory of one block
    shared_bytes_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int

    shared_bytes_reserved: int = 1 * KIB  # per block, by the system (Guide: 8.0 and later)
    shared_bytes_default: int = 48 * KIB  # per block, without opting in (Guide)
    registers_per_sm: int = 64 * KIB  # Guide
    registers_per_block: int = 64 * KIB  # Guide
    registers_per_thread: int = 255  # Guide
    registers_kept: int = 0  # of them, for the compiler: measured, where it spills otherwise
    max_threads_per_block: int = 1024  # Guide
    threads_per_warp: int = 32  # Guide
    barriers_per_block: int = 16  # PTX, bar/barrier: numbers 0 to 15
    max_grid_x: int = 2**31 - 1  # Guide
    max_grid_yz: int = 65535  # Guide

    @property
    def cubin_option(self) -> str:
        """The option that makes NVRTC emit machine code for this target."""
        return f"--gpu-architecture={self.name}"

    @property
    def ptx_option(self) -> str:
        """The option that makes NVRTC stop at PTX for this target."""
        return f"--gpu-architecture={self.name.replace('sm_', 'compute_')}"

    @property
    def sm_number(self) -> int:
        """The architecture as NVRTC lists it: 90 for sm_90a."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def is_chip_specific(self) -> bool:
        """True for the `a` targets: their cubins run on exactly this capability."""
        return self.name.endswith("a")

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether this target's cubin runs on a GPU of the given compute capability.

        Source: Guide, "Binary Compatibility": same major and equal or higher minor; and
        "Architecture-Specific Features": `a` code on that compute capability only.
        """
        if self.is_chip_specific:
            return capability == self.capability
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]
