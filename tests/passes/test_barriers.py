"""Barriers: enough of them for every execution, and none that no execution needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.program import Axis, Loop, Node, Op, Step
from attngen.ir.row_state import SIGMOID, SOFTMAX
from attngen.ir.schedule import LoopOrder, Normalize, Passes, Schedule
from attngen.passes.barriers import SharedUse, place_barriers
from attngen.passes.loop_nest import build_loop_nest

USE = SharedUse(
    writes={
        Op.LOAD_QUERY: frozenset({"query"}),
        Op.LOAD_KEY: frozenset({"key"}),
        Op.LOAD_VALUE: frozenset({"value"}),
        Op.STORE_STATE: frozenset({"state"}),
    },
    reads={
        Op.SCORES: frozenset({"query", "key"}),
        Op.ACCUMULATE: frozenset({"value"}),
        Op.LOAD_STATE: frozenset({"state"}),
    },
)


def executions(nodes: tuple[Node, ...], counts: tuple[int, ...]) -> Iterator[list[Op]]:
    """The steps of some runs: every sequential loop takes the same number of turns in one run."""
    for turns in counts:
        yield list(run(nodes, turns))


def run(nodes: tuple[Node, ...], turns: int) -> Iterator[Op]:
    for node in nodes:
        if isinstance(node, Loop):
            for _ in range(1 if node.parallel else turns):
                yield from run(node.body, turns)
        else:
            yield node.op


def first_hazard(ops: list[Op]) -> str | None:
    written: set[str] = set()
    read: set[str] = set()
    for op in ops:
        if op is Op.BARRIER:
            written, read = set(), set()
            continue
        writes, reads = USE.writes.get(op, frozenset()), USE.reads.get(op, frozenset())
        if reads & written or writes & read:
            return op.value
        written |= writes
        read |= reads
    return None


NESTS = [
    build_loop_nest(state, Schedule(*s))
    for state in (SOFTMAX, SIGMOID)
    for s in product(LoopOrder, Passes, Normalize)
]


@pytest.mark.parametrize("nest", NESTS)
def test_no_execution_has_a_hazard(nest: tuple[Node, ...]) -> None:
    for ops in executions(place_barriers(nest, USE), (0, 1, 2, 3)):
        assert first_hazard(ops) is None


@pytest.mark.parametrize("nest", NESTS)
def test_every_barrier_is_needed(nest: tuple[Node, ...]) -> None:
    placed = place_barriers(nest, USE)
    total = sum(1 for _ in _barrier_paths(placed))
    for i in range(total):
        without = _without_barrier(placed, i)
        hazards = [first_hazard(ops) for ops in executions(without, (1, 2, 3))]
        assert any(hazards), f"barrier {i} of {total} is not needed"


@given(st.data())
def test_random_nests_have_no_hazard(data: st.DataObject) -> None:
    ops = st.sampled_from([*USE.writes, *USE.reads]).map(Step)
    nest: st.SearchStrategy[tuple[Node, ...]] = st.recursive(
        st.lists(ops, max_size=4).map(tuple),
        lambda inner: st.lists(
            st.one_of(ops, inner.map(lambda body: Loop(Axis.KV, False, body))), max_size=4
        ).map(tuple),
        max_leaves=4,
    )
    placed = place_barriers(data.draw(nest), USE)
    for steps in executions(placed, (0, 1, 2)):
        assert first_hazard(steps) is None


def _barrier_paths(nodes: tuple[Node, ...]) -> Iterator[Node]:
    for node in nodes:
        if isinstance(node, Loop):
            yield from _barrier_paths(node.body)
        elif node.op is Op.BARRIER:
            yield node


def _without_barrier(nodes: tuple[Node, ...], index: int) -> tuple[Node, ...]:
    def strip(nodes: tuple[Node, ...], counter: list[int]) -> tuple[Node, ...]:
        kept: list[Node] = []
        for node in nodes:
            if isinstance(node, Loop):
                kept.append(Loop(node.axis, node.parallel, strip(node.body, counter)))
                continue
            if node.op is Op.BARRIER:
                counter[0] += 1
                if counter[0] - 1 == index:
                    continue
            kept.append(node)
        return tuple(kept)

    return strip(nodes, [0])
