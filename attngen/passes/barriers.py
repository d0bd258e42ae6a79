"""Insert barriers where one thread reads what another wrote, or overwrites what another may
still read: tiles in shared memory, and the row state while it lies in a workspace.

    kv                                  kv
      load_key                            barrier     (last iteration's scores are done)
      load_value                 →        load_key  load_value
      scores                              barrier     (the tiles have arrived)
      …                                   scores  …

A loop body is walked twice, the second time with what its first walk left behind, so a
hazard across iterations is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from attngen.ir.program import Loop, Node, Op, Step
from attngen.record import record

__all__ = ["SharedUse", "place_barriers"]


@final
@record
class _Pending:
    """What was written and what was read since the last barrier."""

    written: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()


@final
@record
class SharedUse:
    """What the threads of a block share, by name: who writes it and who reads it."""

    writes: Mapping[Op, frozenset[str]]
    reads: Mapping[Op, frozenset[str]]


def place_barriers(body: tuple[Node, ...], use: SharedUse) -> tuple[Node, ...]:
    """The same loop nest with the barriers that a family's sharing needs."""
    placed, _ = _place(body, _Pending(), use)
    return placed


def _place(
    nodes: tuple[Node, ...], pending: _Pending, use: SharedUse
) -> tuple[tuple[Node, ...], _Pending]:
    placed: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            loop, pending = _place_in_loop(node, pending, use)
            placed.append(loop)
            continue
        written = use.writes.get(node.op, frozenset())
        read = use.reads.get(node.op, frozenset())
        if read & pending.written or written & pending.read:
            placed.append(Step(Op.BARRIER))
            pending = _Pending()
        pending = _Pending(pending.written | written, pending.read | read)
        placed.append(node)
    return tuple(placed), pending


def _place_in_loop(loop: Loop, pending: _Pending, use: SharedUse) -> tuple[Loop, _Pending]:
    """Barriers that hold for the first iteration and for every later one."""
    if loop.parallel:
        body, after = _place(loop.body, _Pending(), use)
        return Loop(loop.axis, True, body), after
    _, after_first = _place(loop.body, pending, use)
    merged = _Pending(pending.written | after_first.written, pending.read | after_first.read)
    body, after = _place(loop.body, merged, use)
    # A loop may run no iteration at all, so what was pending before it still may be after it.
    after = _Pending(after.written | pending.written, after.read | pending.read)
    return Loop(loop.axis, False, body), after
