"""Schedule lines given beside a file, as `--schedule` and `schedule=` take them."""

from __future__ import annotations

from dataclasses import replace

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Source
from attngen.frontend import ast
from attngen.frontend.load import Unit
from attngen.frontend.parse import parse

__all__ = ["override_schedule"]


class BraceInSchedule(Diagnostic):
    """Schedule lines are the inside of a block, not a block."""

    code = "A407"
    title = "schedule lines hold a `{brace}`"
    hint = "give the lines alone, such as 'passes two; tile q = 16'"
    brace: str


def override_schedule(unit: Unit, text: str) -> Unit:
    """The unit with settings that win over its own, key by key, for every target.

        "passes two; tile q = 16, kv = 64"

    Errors:  A1xx with places in `text`.
    """
    for brace in "{}":
        if brace in text:
            raise AttnError(BraceInSchedule(None, brace))
    # On one line with the brace, so that places are those of the given lines.
    lines = text.replace(";", "\n")
    tree = parse(Source("<schedule>", f"schedule {{{lines}\n}}\n"))
    (given,) = (item for item in tree.items if isinstance(item, ast.Schedule))
    keys = {setting.key for setting in given.settings}
    kept = {
        block.target: replace(block, settings=tuple(s for s in block.settings if s.key not in keys))
        for block in unit.schedules
    }
    base = kept.get(None)
    merged = given if base is None else replace(base, settings=(*base.settings, *given.settings))
    others = (block for target, block in kept.items() if target is not None)
    return replace(unit, schedules=(merged, *others))
