"""Whether arrays fit into memory, before a system that promises more than it has ends us."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from attngen.cli.errors import OutOfMemory
from attngen.diagnostics.diagnostic import AttnError

__all__ = ["available_bytes", "require_memory"]


def require_memory(needed: int, what: str) -> None:
    """Errors:  A719 when `what` needs more bytes than are free."""
    free = available_bytes()
    if free is not None and needed > free:
        shown, has = (f"{size / 2**30:.1f} GiB" for size in (needed, free))
        raise AttnError(OutOfMemory(None, f"{what} needs {shown}, and {has} are free"))


def available_bytes() -> int | None:
    """Bytes that this process may still take; None where the system does not say."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(1024 * int(line.split()[1]))
    with suppress(OSError, ValueError):  # a container's own limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        found.append(max(0, limit - used))
    return min(found, default=None)
