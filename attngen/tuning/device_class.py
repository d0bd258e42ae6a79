"""Device classes: GPUs on which a schedule takes the same time.

    NVIDIA H200   →   sm_90a-132sm-227k-l2.60m-hbm4.8

A product's name would tell apart what is the same, and not what differs: cards of one name have
been sold with different numbers of multiprocessors.  So a class is what the driver reports:
architecture, multiprocessors, shared memory of a block, L2 cache, memory bandwidth, and the
profile where the GPU is one part of a larger one (MIG).

A machine without a GPU asks by an alias, such as `h200`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final, final

from attngen import targets
from attngen.backend.device import Device, GpuTraits
from attngen.diagnostics.diagnostic import AttnError
from attngen.record import record
from attngen.targets.errors import UnknownDevice

__all__ = ["DeviceClass"]

_NAME: Final = re.compile(
    r"(?P<arch>sm_\d{2,3}[af]?)-(?P<sm>\d{1,4})sm-(?P<shared>\d{1,4})k"
    r"-l2\.(?P<l2>\d{1,4})m-hbm(?P<bandwidth>\d{1,3}\.\d)(?:-mig\.(?P<mig>[0-9a-z.+]{1,20}))?"
)
_MIG: Final = re.compile(r"\bMIG (?P<profile>\d+\S*)", re.IGNORECASE)

_KIB, _MIB = 1 << 10, 1 << 20


@final
@record(kw_only=True)
class DeviceClass:
    """What decides how fast a kernel runs on a GPU, rounded so that equal cards are equal."""

    arch: str  # a target's name
    sm_count: int
    shared_kb: int  # KiB that one block may have, with opting in
    l2_mb: int  # MiB, rounded down
    bandwidth_tb_s: float  # of device memory, in 10^12 bytes a second, to one decimal
    mig: str | None = None  # the profile of a part of a GPU, "3g.71gb"

    @property
    def name(self) -> str:
        """The canonical name, which is also that of a folder."""
        part = "" if self.mig is None else f"-mig.{self.mig}"
        return (
            f"{self.arch}-{self.sm_count}sm-{self.shared_kb}k-l2.{self.l2_mb}m"
            f"-hbm{self.bandwidth_tb_s:.1f}{part}"
        )

    @property
    def aliases(self) -> tuple[str, ...]:
        """The short names of this class, if any."""
        return tuple(alias for alias, known in known_devices().items() if known == self)

    @staticmethod
    def of(device: Device) -> DeviceClass:
        """The class of a GPU of this machine.

        Errors:  A492 it is too old or too new; A611 no GPU; A612 after a fork.
        """
        from attngen.backend.launch import load_driver

        return DeviceClass.from_traits(load_driver().traits(device.index))

    @staticmethod
    def from_traits(traits: GpuTraits) -> DeviceClass:
        """The class of a GPU of which the driver says this.  Errors: A492."""
        part = _MIG.search(traits.name)
        return DeviceClass(
            arch=targets.for_capability(traits.capability).name,
            sm_count=traits.multiprocessors,
            shared_kb=traits.shared_bytes // _KIB,
            l2_mb=traits.l2_bytes // _MIB,
            bandwidth_tb_s=_bandwidth_tb_s(traits.memory_khz, traits.memory_bits),
            mig=None if part is None else part["profile"].lower(),
        )

    @staticmethod
    def parse(name: str) -> DeviceClass | None:
        """The class of a canonical name; None for any other text."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        device = DeviceClass(
            arch=found["arch"],
            sm_count=int(found["sm"]),
            shared_kb=int(found["shared"]),
            l2_mb=int(found["l2"]),
            bandwidth_tb_s=float(found["bandwidth"]),
            mig=found["mig"],
        )
        is_possible = device.sm_count > 0 and device.bandwidth_tb_s > 0
        # One name for one class: no "0132sm".
        return device if is_possible and device.name == name else None

    @staticmethod
    def named(text: str) -> DeviceClass:
        """The class of an alias or of a canonical name.  Errors: A493 for anything else."""
        known = known_devices()
        wanted = text.strip().lower()
        found = known.get(wanted) or DeviceClass.parse(wanted)
        if found is None:
            raise AttnError(UnknownDevice(None, text, ", ".join(known), _advice(wanted)))
        return found


def _bandwidth_tb_s(memory_khz: int, memory_bits: int) -> float:
    """Two transfers a clock, as the CUDA sample deviceQuery computes it, to one decimal."""
    tenths = (memory_khz * memory_bits + 200_000_000) // 400_000_000
    return tenths / 10


def _advice(wanted: str) -> str:
    from difflib import get_close_matches

    closest = get_close_matches(wanted, known_devices(), n=1)
    if closest:
        return f"did you mean `{closest[0]}`?"
    return "on a machine with this GPU, `attngen cache path` shows the name of its class"


@cache
def known_devices() -> dict[str, DeviceClass]:
    """The classes that have an alias, by alias."""
    return {alias: _from_data_sheet(*facts) for alias, facts in _KNOWN.items()}


def _from_data_sheet(arch: str, sm_count: int, l2_mb: int, mhz: int, bits: int) -> DeviceClass:
    return DeviceClass(
        arch=arch,
        sm_count=sm_count,
        shared_kb=targets.get(arch).shared_bytes_per_block // _KIB,
        l2_mb=l2_mb,
        bandwidth_tb_s=_bandwidth_tb_s(1000 * mhz, bits),
    )


# Multiprocessors, MiB of L2, MHz of memory, bits of its bus: what the driver reports, which is
# what `of` asks.  Read off outputs of the CUDA sample deviceQuery where nothing else is said; the
# product of clock and bus agrees with the bandwidth in NVIDIA's data sheet unless noted.
_KNOWN: Final = {
    "a100-40g": ("sm_80", 108, 40, 1215, 5120),
    "a100-80g": ("sm_80", 108, 40, 1593, 5120),  # SXM; the PCIe card has 1512 MHz
    "rtx4090": ("sm_89", 128, 72, 10501, 384),
    "l40s": ("sm_89", 142, 96, 9001, 384),
    "h100-pcie": ("sm_90a", 114, 50, 1593, 5120),
    "h100-sxm": ("sm_90a", 132, 50, 2619, 5120),
    "gh200-96g": ("sm_90a", 132, 60, 2619, 6144),
    # Clock: benchmarks/results/2026-11-30-h200-4.jsonl.  132 multiprocessors and 4.8 TB/s: NVIDIA's
    # data sheet; an H200 reports the class hbm4.8, which at this clock is a bus of 47 channels of
    # 128 bits, one less than six stacks have.  L2: as for GH200, the same chip.
    "h200": ("sm_90a", 132, 60, 3201, 6016),
    # github.com/pytorch/ao/pull/4002.  Drivers before 2026 report a bus of 8192 bits, and so
    # another class.
    "b200": ("sm_100a", 148, 126, 3996, 7680),
}
