"""Schedule lines given beside a file."""

from __future__ import annotations

import pytest

import attngen
from attngen.frontend.check import check
from attngen.frontend.load import load_text
from attngen.frontend.schedule_text import override_schedule
from attngen.ir.schedule import LoopOrder, Passes, Schedule

TEXT = """
attention a {
    mask causal
}

schedule {
    passes three
    tile q = 32, kv = 64
}

schedule sm_90a {
    tile q = 128, kv = 128
    stages 2
}
"""


def schedule(lines: str, target: str) -> Schedule:
    return check(override_schedule(load_text(TEXT), lines)).schedule_for(target)


def test_given_lines_win_for_every_target() -> None:
    found = schedule("tile q = 16, kv = 8; loop kv, q", "sm_90a")
    assert (found.tile_q, found.tile_kv, found.loop) == (16, 8, LoopOrder.KV_Q)
    assert (found.passes, found.stages) == (Passes.THREE, 2)
    assert schedule("tile q = 16, kv = 8", "sm_80").tile_q == 16


def test_an_error_points_into_the_given_lines() -> None:
    with pytest.raises(attngen.AttnError) as caught:
        schedule("loop q, kv; passes twoo", "sm_80")
    (error,) = caught.value.diagnostics
    assert error.span is not None
    assert (error.span.source.name, error.span.first.line) == ("<schedule>", 2)
    assert error.span.text == "twoo"


@pytest.mark.parametrize("lines", ["}\nschedule {", "schedule { passes two }"])
def test_a_block_is_not_lines(lines: str) -> None:
    with pytest.raises(attngen.AttnError) as caught:
        schedule(lines, "sm_80")
    assert caught.value.diagnostics[0].code == "A407"


def test_the_order_inside_a_step() -> None:
    found = schedule("overlap values = 48, weights = 2 * 32, keys = late", "sm_90a")
    assert (found.late_values, found.early_weights, found.late_keys) == (48, 64, True)
    found = schedule("overlap keys = early, values = auto", "sm_90a")
    assert (found.late_values, found.early_weights, found.late_keys) == (None, None, False)
    assert not schedule("overlap auto", "sm_90a").has_order
