"""What a result depends on beside the code: the device, its clocks, and every version."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from typing import Final

from attngen.backend.nvrtc import load_nvrtc
from attngen.diagnostics.diagnostic import AttnError

__all__ = ["describe_machine", "file_stem", "installed_versions", "parse_clocks", "read_clocks"]

_PACKAGES: Final = (
    "apache-tvm-ffi",
    "attn-gym",
    "attngen",
    "cupy-cuda13x",
    "fa3-fwd",
    "flash-attn",
    "flash-attn-4",
    "numpy",
    "nvidia-cuda-nvrtc",
    "nvidia-cudnn-cu13",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "tokenspeed-fa3",
    "torch",
    "transformers",
    "triton",
)

_CLOCKS: Final = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.limit": "power_limit_w",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}


def describe_machine() -> dict[str, object]:
    """Python, processor and driver."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "driver": _ask_gpu("driver_version"),
    }


def installed_versions() -> dict[str, str]:
    """Versions of all packages that can change a result, and of the NVRTC that is loaded."""
    found = {}
    with suppress(AttnError):
        found["NVRTC"] = ".".join(str(part) for part in load_nvrtc().version())
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_clocks() -> dict[str, float | None] | None:
    """Clocks, power and temperature of the first visible GPU, as nvidia-smi says; never set.

    None without nvidia-smi.
    """
    line = _ask_gpu(",".join(_CLOCKS))
    return None if line is None else parse_clocks(line)


def parse_clocks(line: str) -> dict[str, float | None]:
    """One line of nvidia-smi's CSV; None where it says that a value is not available."""
    values = (_number(text) for text in line.split(","))
    return dict(zip(_CLOCKS.values(), values, strict=True))


def file_stem(gpu: str, now: datetime | None = None) -> str:
    """`<date>-<gpu>`: "NVIDIA H200" on a day is 2026-11-30-h200."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-").removeprefix("nvidia-")
    return f"{now or datetime.now(UTC):%Y-%m-%d}-{name}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _ask_gpu(fields: str) -> str | None:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    command.append(f"--id={first}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
