"""The loop nests, word for word: what each algorithm of the documentation is."""

from __future__ import annotations

from itertools import product

import pytest

from attngen.ir.program import Axis, Loop, Node, Op, Step, walk
from attngen.ir.row_state import SIGMOID, SOFTMAX
from attngen.ir.schedule import LoopOrder, Normalize, Passes, Schedule
from attngen.passes.loop_nest import build_loop_nest


def words(nodes: tuple[Node, ...]) -> str:
    """A nest on one line: `kv(load_key scores …)`; a parallel loop is written with `*`."""
    parts = []
    for node in nodes:
        if isinstance(node, Loop):
            star = "*" if node.parallel else ""
            parts.append(f"{star}{node.axis.value}({words(node.body)})")
        else:
            parts.append(node.op.value)
    return " ".join(parts)


NESTS = {
    ("q, kv", "fused", "last"): (
        "*batch_head(*q(load_query init_state kv(load_key load_value scores mask raise_max"
        " rescale_sum rescale_acc weights add_sum accumulate) finalize))"
    ),
    ("q, kv", "three", "every_tile"): (
        "*batch_head(*q(load_query init_state kv(load_key scores mask raise_max)"
        " kv(load_key scores mask weights add_sum)"
        " kv(load_key load_value scores mask weights normalize_weights accumulate) finalize))"
    ),
    ("q, kv", "two", "last"): (
        "*batch_head(*q(load_query init_state"
        " kv(load_key scores mask raise_max rescale_sum weights add_sum)"
        " kv(load_key load_value scores mask weights accumulate) finalize))"
    ),
    ("kv, q", "fused", "every_tile"): (
        "*batch_head(q(init_state store_state) kv(load_key load_value q(load_query load_state"
        " scores mask denormalize_acc raise_max rescale_sum rescale_acc weights add_sum"
        " accumulate normalize_acc store_state)) q(load_state finalize))"
    ),
}


@pytest.mark.parametrize(("loop", "passes", "normalize"), NESTS)
def test_nest_is(loop: str, passes: str, normalize: str) -> None:
    schedule = Schedule(LoopOrder(loop), Passes(passes), Normalize(normalize))
    assert words(build_loop_nest(SOFTMAX, schedule)) == NESTS[loop, passes, normalize]


def test_sigmoid_keeps_no_maximum() -> None:
    nest = words(build_loop_nest(SIGMOID, Schedule()))
    assert nest == (
        "*batch_head(*q(load_query init_state"
        " kv(load_key load_value scores mask weights accumulate) finalize))"
    )


@pytest.mark.parametrize(
    "schedule", [Schedule(*s) for s in product(LoopOrder, Passes, Normalize)], ids=str
)
def test_every_nest_reads_only_what_was_loaded(schedule: Schedule) -> None:
    have: set[str] = set()
    for node in walk(build_loop_nest(SOFTMAX, schedule)):
        if isinstance(node, Loop):
            if node.axis is Axis.KV:
                have -= {"key", "value", "s", "p"}
            continue
        assert isinstance(node, Step)
        needs, gives = _EFFECTS[node.op]
        assert needs <= have, f"{node.op.value} needs {needs - have}"
        have |= gives


_EFFECTS: dict[Op, tuple[set[str], set[str]]] = {
    Op.LOAD_QUERY: (set(), {"query"}),
    Op.LOAD_KEY: (set(), {"key"}),
    Op.LOAD_VALUE: (set(), {"value"}),
    Op.INIT_STATE: (set(), {"state"}),
    Op.LOAD_STATE: ({"stored"}, {"state"}),
    Op.STORE_STATE: ({"state"}, {"stored"}),
    Op.SCORES: ({"query", "key"}, {"s"}),
    Op.MASK: ({"s"}, set()),
    Op.RAISE_MAX: ({"s", "state"}, {"f"}),
    Op.RESCALE_SUM: ({"f", "state"}, set()),
    Op.RESCALE_ACC: ({"f", "state"}, set()),
    Op.WEIGHTS: ({"s", "state"}, {"p"}),
    Op.ADD_SUM: ({"p", "state"}, set()),
    Op.NORMALIZE_WEIGHTS: ({"p", "state"}, set()),
    Op.ACCUMULATE: ({"p", "value", "state"}, set()),
    Op.NORMALIZE_ACC: ({"state"}, set()),
    Op.DENORMALIZE_ACC: ({"state"}, set()),
    Op.FINALIZE: ({"state"}, set()),
}
