"""What the environment sets; the only module that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

__all__ = ["Settings", "settings"]

_OFF = frozenset({"0", "off", "no", "false"})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Choices of the machine, not of a program: they never change a result."""

    cache_dir: Path | None = None  # ATTNGEN_CACHE_DIR; None is the user's cache directory
    is_cache_on: bool = True  # ATTNGEN_CACHE=0 turns the disk cache off


def settings() -> Settings:
    """The settings of this moment; read again at each call, so that tests can change them."""
    directory = os.environ.get("ATTNGEN_CACHE_DIR", "")
    return Settings(
        cache_dir=Path(directory) if directory else None,
        is_cache_on=os.environ.get("ATTNGEN_CACHE", "").strip().lower() not in _OFF,
    )
