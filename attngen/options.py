"""What the environment sets; the only module that reads environment variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from attngen.record import record

__all__ = ["Settings", "host_cache_dir", "settings"]

_OFF = frozenset({"0", "off", "no", "false"})


@final
@record(kw_only=True)
class Settings:
    """Choices of the machine, not of a program: they never change a result."""

    cache_dir: Path | None = None  # ATTNGEN_CACHE_DIR; None is the user's cache directory
    is_cache_on: bool = True  # ATTNGEN_CACHE=0 turns the disk cache off
    cxx: str | None = None  # CXX, the C++ compiler of the CPU run; None: the first that is found
    is_debug: bool = False  # ATTNGEN_DEBUG=1 keeps the traceback of a bug in attngen in a file
    is_color_on: bool = True  # NO_COLOR, or TERM=dumb, turns colours and progress off


def settings() -> Settings:
    """The settings of this moment; read again at each call, so that tests can change them."""
    directory = os.environ.get("ATTNGEN_CACHE_DIR", "")
    return Settings(
        cache_dir=Path(directory) if directory else None,
        is_cache_on=os.environ.get("ATTNGEN_CACHE", "").strip().lower() not in _OFF,
        cxx=os.environ.get("CXX") or None,
        is_debug=os.environ.get("ATTNGEN_DEBUG", "0").strip().lower() not in {"", *_OFF},
        is_color_on=not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
    )


def host_cache_dir() -> Path:
    """Where libraries for the CPU run are kept."""
    if (chosen := settings().cache_dir) is not None:
        return chosen / "host"
    from platformdirs import user_cache_path

    return user_cache_path("attngen") / "host"
