"""The cost model as the last grade of a lookup: a schedule for what nobody has measured.

    bf16 d128 gqa4 4096x4096 waves 32   →   B 8, Hq 16, Hkv 4, Sq 4096, Skv 4096   →   a schedule

A lookup asks by problem, so the model gets a call that stands for the problem: its nominal lengths,
as many heads as make its waves, and the defaults of the params.  Where a mask or score reads
captured tensors there is no such call, nor where a param has no default or a length is beyond 32k;
then the answer is the default.
"""

from __future__ import annotations

from typing import Final

from attngen import targets
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.attention import Attention
from attngen.ir.schedule import Schedule
from attngen.tuning.call import Call
from attngen.tuning.cost_model import CostModel
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.lookup import Question
from attngen.tuning.problem import NOMINAL_TILE, LayoutClass, Problem
from attngen.tuning.space import collect

__all__ = ["choose_by_model", "nominal_call"]

_MOST_TOKENS: Final = 1 << 15
"""Beyond, counting tiles takes longer than a tenth of a second."""
_SMALLEST: Final = 0.5
"""Of the default's tile, along each side: the model was fitted to times of defaults, and knows
nothing of much smaller tiles."""


def choose_by_model(attention: Attention, question: Question) -> Schedule | None:
    """A complete schedule; None where the model cannot say one.

    Of operands that cannot be copied 16 bytes at a time no model is known.
    """
    call = nominal_call(attention, question.problem, question.device)
    if call is None or question.problem.layout is not LayoutClass.ALIGNED:
        return None
    try:
        target = targets.get(question.device.arch)
        space = collect(attention, question.wanted, target, with_orders=False)
    except AttnError:
        return None
    known = [s for s in space.candidates if _is_near(s, space.default)]
    return CostModel(attention, call, question.device).choose(space.default, known)


def nominal_call(attention: Attention, problem: Problem, device: DeviceClass) -> Call | None:
    """A call that stands for all of a problem."""
    params = {param.name: param.default for param in attention.params}
    values = {name: value for name, value in params.items() if value is not None}
    is_long = max(problem.q_tokens, problem.kv_tokens) > _MOST_TOKENS
    if is_long or attention.tensors or len(values) < len(params):
        return None
    tiles = problem.waves * device.sm_count / max(1, -(-problem.q_tokens // NOMINAL_TILE))
    heads_kv = attention.heads_kv or max(1, round(tiles / problem.group))
    heads_q = attention.heads_q or problem.group * heads_kv
    batch = max(1, round(tiles / heads_q))
    qk, v = problem.head_dims
    sizes = {
        "B": batch, "Hq": heads_q, "Hkv": heads_kv, "Sq": problem.q_tokens,
        "Skv": problem.kv_tokens, "Dqk": qk, "Dv": v,
    }  # fmt: skip
    return Call(sizes, values, {})


def _is_near(schedule: Schedule, default: Schedule) -> bool:
    sides = ((schedule.tile_q, default.tile_q), (schedule.tile_kv, default.tile_kv))
    return all((side or 0) >= _SMALLEST * (usual or 0) for side, usual in sides)
