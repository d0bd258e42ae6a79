"""Attention and schedule → the loop nest: every algorithm of the language, as words in order.

    softmax, loop q, kv, passes fused, normalize last        (FlashAttention-2)

        parallel batch_head
          parallel q
            load_query  init_state
            kv
              load_key  load_value  scores  mask
              raise_max  rescale_sum  rescale_acc  weights  add_sum  accumulate
            finalize

    the same with loop kv, q                                 (FlashAttention, Algorithm 1)

        parallel batch_head
          q   init_state  store_state
          kv
            load_key  load_value
            q   load_query  load_state  scores  mask  raise_max … accumulate  store_state
          q   load_state  finalize

Sources: safe softmax and the online normalizer, Milakov and Gimelshein 2018; loop order
`kv, q` with normalisation at every tile, Dao et al. 2022, Algorithm 1; deferred normalisation
and loop order `q, kv`, Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

from attngen.ir.program import Axis, Loop, Node, Op, Step
from attngen.ir.row_state import RowState
from attngen.ir.schedule import LoopOrder, Normalize, Passes, Schedule

__all__ = ["build_loop_nest"]

_LOADS = (Op.LOAD_KEY, Op.LOAD_VALUE)


def build_loop_nest(state: RowState, schedule: Schedule) -> tuple[Node, ...]:
    """The loop nest of one kernel, without barriers."""
    sweeps = key_sweeps(state, schedule)
    if schedule.loop is LoopOrder.Q_KV:
        per_query_tile: list[Node] = [*_steps(Op.LOAD_QUERY, Op.INIT_STATE)]
        per_query_tile += [Loop(Axis.KV, False, _steps(*sweep)) for sweep in sweeps]
        per_query_tile += _steps(Op.FINALIZE)
        body: tuple[Node, ...] = (Loop(Axis.Q, True, tuple(per_query_tile)),)
    else:
        first = Loop(Axis.Q, False, _steps(Op.INIT_STATE, Op.STORE_STATE))
        last = Loop(Axis.Q, False, _steps(Op.LOAD_STATE, Op.FINALIZE))
        body = (first, *(_keys_outside(sweep) for sweep in sweeps), last)
    return (Loop(Axis.BATCH_HEAD, True, body),)


def key_sweeps(state: RowState, schedule: Schedule) -> tuple[tuple[Op, ...], ...]:
    """The steps for one key tile, once per walk over the keys."""
    scores = (Op.LOAD_KEY, Op.SCORES, Op.MASK)
    if not state.running_max:
        return ((Op.LOAD_KEY, Op.LOAD_VALUE, Op.SCORES, Op.MASK, Op.WEIGHTS, Op.ACCUMULATE),)
    every_tile = schedule.normalize is Normalize.EVERY_TILE
    values = (
        Op.LOAD_KEY, Op.LOAD_VALUE, Op.SCORES, Op.MASK, Op.WEIGHTS,
        *((Op.NORMALIZE_WEIGHTS,) if every_tile else ()),
        Op.ACCUMULATE,
    )  # fmt: skip
    match schedule.passes:
        case Passes.THREE:
            return ((*scores, Op.RAISE_MAX), (*scores, Op.WEIGHTS, Op.ADD_SUM), values)
        case Passes.TWO:
            return ((*scores, Op.RAISE_MAX, Op.RESCALE_SUM, Op.WEIGHTS, Op.ADD_SUM), values)
        case Passes.FUSED:
            return ((
                Op.LOAD_KEY, Op.LOAD_VALUE, Op.SCORES, Op.MASK,
                *((Op.DENORMALIZE_ACC,) if every_tile else ()),
                Op.RAISE_MAX, Op.RESCALE_SUM, Op.RESCALE_ACC,
                Op.WEIGHTS, Op.ADD_SUM, Op.ACCUMULATE,
                *((Op.NORMALIZE_ACC,) if every_tile else ()),
            ),)  # fmt: skip


def _keys_outside(sweep: tuple[Op, ...]) -> Loop:
    """One sweep with the key loop outside: loads of key and value stay there."""
    outside = tuple(op for op in sweep if op in _LOADS)
    inside = tuple(op for op in sweep if op not in _LOADS)
    per_query_tile = _steps(Op.LOAD_QUERY, Op.LOAD_STATE, *inside, Op.STORE_STATE)
    return Loop(Axis.KV, False, (*_steps(*outside), Loop(Axis.Q, False, per_query_tile)))


def _steps(*ops: Op) -> tuple[Step, ...]:
    return tuple(Step(op) for op in ops)
