"""The order inside a step of forward_wgmma: every order gives the same bits, and is a setting."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import attngen
from attngen import targets
from attngen.compiler import choose_family
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.attention import Attention
from attngen.ir.schedule import Schedule
from attngen.kernels import all_families
from attngen.tuning.space import collect, describe
from tests.tuning.problems import CAUSAL, FULL, specialised

SM_90A = targets.get("sm_90a")
WGMMA = all_families()["forward_wgmma"]
TILE = Schedule(kernel="forward_wgmma", tile_q=128, tile_kv=96, stages=2)


def orders_of(attention: Attention, schedule: Schedule) -> list[Schedule]:
    found = collect(attention, schedule, SM_90A).candidates
    return [one for one in found if one.has_order]


@pytest.mark.usefixtures("host_compiler")
def test_every_order_gives_the_same_bits() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (
        rng.standard_normal((1, 2, 300, 64), np.float32).astype(ml_dtypes.bfloat16)
        for _ in range(3)
    )
    orders = (
        "auto",
        "values = 0, weights = 96, keys = late",
        "values = 80, weights = 0",
        "values = 48, weights = 48, keys = early",
        "values = 16, weights = 16",
    )
    results = set()
    for overlap in orders:
        kernel = attngen.compile_text(
            CAUSAL, engine="cpu", arch="sm_90a", dtype="bf16", head_dim=64,
            schedule=f"kernel forward_wgmma; tile q = 128, kv = 96; overlap {overlap}",
        )  # fmt: skip
        results.add(np.asarray(kernel(q, k, v)).tobytes())
    assert len(results) == 1


def test_a_tile_is_offered_in_eight_orders_and_the_rule_s_is_one_of_them() -> None:
    for text in (CAUSAL, FULL):
        attention = specialised(text, "bf16", (128, 128))
        found = collect(attention, TILE, SM_90A).candidates
        assert len(found) == len({describe(one) for one in found}) == 8
        assert [one for one in found if not one.has_order] == [found[0]]
        texts = {WGMMA.render(WGMMA.lower(attention, one), SM_90A) for one in found}
        assert len(texts) == 8


def test_an_order_that_is_the_rule_s_own_is_the_rule() -> None:
    attention = specialised(CAUSAL, "bf16", (128, 128))
    for one in orders_of(attention, TILE):
        assert WGMMA.complete(attention, one, SM_90A) == one
    rule = Schedule(
        kernel="forward_wgmma", tile_q=128, tile_kv=128, stages=2,
        late_values=0, early_weights=64, late_keys=True,
    )  # fmt: skip
    complete = WGMMA.complete(attention, rule, SM_90A)
    assert not complete.has_order
    part = WGMMA.complete(attention, Schedule(tile_kv=128, late_keys=False), SM_90A)
    assert (part.late_values, part.early_weights, part.late_keys) == (0, 64, False)


def test_a_small_tile_has_no_values_to_hold_back() -> None:
    attention = specialised(CAUSAL, "bf16", (128, 128))
    found = orders_of(attention, Schedule(kernel="forward_wgmma", tile_q=128, tile_kv=32, stages=2))
    assert {one.late_values for one in found} == {0}


@pytest.mark.parametrize(
    ("overlap", "words"),
    [
        (Schedule(tile_kv=64, late_values=64), "`overlap values` is a multiple of 16 below"),
        (Schedule(tile_kv=64, late_values=8), "`overlap values` is a multiple of 16 below"),
        (Schedule(tile_kv=64, early_weights=80), "`overlap weights` is a multiple of 16 up to"),
    ],
)
def test_what_no_step_can_do_is_refused(overlap: Schedule, words: str) -> None:
    attention = specialised(CAUSAL, "bf16", (128, 128))
    (reason,) = WGMMA.reasons_against(attention, overlap, SM_90A)
    assert words in reason


@pytest.mark.parametrize("name", ["forward_mma", "forward_simt"])
def test_other_families_have_one_order(name: str) -> None:
    attention = specialised(CAUSAL, "bf16", (128, 128))
    reasons = all_families()[name].reasons_against(attention, Schedule(late_values=16), SM_90A)
    assert reasons == ("its steps have one order, so `overlap` stays `auto`",)
    with pytest.raises(AttnError):
        choose_family(attention, Schedule(kernel=name, late_values=16), SM_90A)


def test_where_the_family_is_out_of_the_question_the_order_is_dropped_with_a_note() -> None:
    attention = specialised(CAUSAL, "bf16", (128, 128))
    _, complete, notes = choose_family(attention, Schedule(late_values=16), targets.get("sm_80"))
    assert not complete.has_order
    assert "overlap" in " ".join(notes)
