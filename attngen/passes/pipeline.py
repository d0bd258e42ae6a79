"""The passes over an `Attention`, in one list, with a verifier between them.

A pass is a pure function from module to module, valid in and valid out; nothing is promised
in between.  `observe(name, before, after)` sees every step: printing, timing and tests need
no edits to passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from attngen.diagnostics.internal import require_valid
from attngen.ir.attention import Attention
from attngen.ir.verify import verify_attention
from attngen.passes.fold_constants import fold_constants
from attngen.passes.lift_masks import lift_masks
from attngen.passes.name_shared import name_shared
from attngen.passes.split_chains import split_chains

__all__ = ["PASSES", "Observer", "Pass", "run_passes"]

Pass: TypeAlias = Callable[[Attention], Attention]
Observer: TypeAlias = Callable[[str, Attention, Attention], None]

PASSES: Final[tuple[Pass, ...]] = (fold_constants, lift_masks, split_chains, name_shared)


def run_passes(attention: Attention, observe: Observer | None = None) -> Attention:
    """Run every pass in order, and check the result of each.

    Errors:  A901 when a pass leaves an invalid module behind: a bug in attngen.
    """
    for step in PASSES:
        before, attention = attention, step(attention)
        require_valid(f"pass `{step.__name__}`", verify_attention(attention))
        if observe is not None:
            observe(step.__name__, before, attention)
    return attention
