"""The architectures that attngen makes machine code for.

Each module `sm_*.py` of this package holds one constant `TARGET`; they are found by listing
the package, so adding an architecture is adding a file.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from attngen.diagnostics.diagnostic import AttnError
from attngen.targets.base import Feature, Target
from attngen.targets.errors import NoTargetForGpu, UnknownTarget

__all__ = ["Feature", "Target", "all_targets", "for_capability", "get"]


@cache
def all_targets() -> tuple[Target, ...]:
    """Every target, by ascending compute capability."""
    found: list[Target] = []
    for name in sorted(module.name for module in iter_modules(__path__)):
        if name.startswith("sm_"):
            target = import_module(f"{__name__}.{name}").TARGET
            assert isinstance(target, Target)
            assert target.name == name
            found.append(target)
    return tuple(sorted(found, key=lambda target: target.capability))


def get(name: str) -> Target:
    """The target of this name.

    Errors:  A491 for any other name; it suggests the nearest one.
    """
    for target in all_targets():
        if target.name == name:
            return target
    raise AttnError(UnknownTarget(None, name, _list_names(), _find_closest(name)))


def for_capability(capability: tuple[int, int], *, compiler: str = "not loaded") -> Target:
    """The target whose cubin runs on a GPU of this compute capability.

    Where several do, the one with the highest minor number: it knows most about the chip.

    Errors:  A492 when none does; it names the capability, `compiler` and the targets.
    """
    fitting = [target for target in all_targets() if target.runs_on(capability)]
    if fitting:
        return fitting[-1]
    major, minor = capability
    raise AttnError(NoTargetForGpu(None, f"{major}.{minor}", compiler, _list_names()))


def _list_names() -> str:
    return ", ".join(target.name for target in all_targets())


def _find_closest(name: str) -> str | None:
    """The target that a misspelt name most likely means; None when it looks like none."""
    number = re.fullmatch(r"(?:sm|compute)?[_-]?(\d{2,3})[af]?", name.strip().lower())
    if number:
        wanted = int(number[1])
        nearest = min(all_targets(), key=lambda target: abs(target.sm_number - wanted))
        return nearest.name
    from difflib import get_close_matches

    matches = get_close_matches(name, [target.name for target in all_targets()], n=1)
    return matches[0] if matches else None
