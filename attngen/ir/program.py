"""The loop nest of one kernel: which tiles, in what order, and the named steps between.

    Node = Loop(axis, parallel, Node*) | Step(op)

A `TileProgram` is the algorithm itself.  The NumPy executor runs it as it stands, templates
print it, and the loop nests of `docs/from-softmax-to-flash-attention.md` are these.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TypeAlias, final

from attngen.ir.attention import Attention
from attngen.ir.schedule import Schedule
from attngen.record import record

__all__ = [
    "Axis",
    "Launch",
    "Loop",
    "Node",
    "Op",
    "Program",
    "Step",
    "TileProgram",
    "Workspace",
    "walk",
]


class Axis(Enum):
    """What a loop walks: batch and head together, tiles of query rows, or tiles of keys."""

    BATCH_HEAD = "batch_head"
    Q = "q"
    KV = "kv"


class Op(Enum):
    """The steps, in the words that kernels, executor and documentation share."""

    LOAD_QUERY = "load_query"
    LOAD_KEY = "load_key"
    LOAD_VALUE = "load_value"
    INIT_STATE = "init_state"
    """m = -inf, l = 0, acc = 0"""
    LOAD_STATE = "load_state"
    """fetch this query tile's state from the workspace"""
    STORE_STATE = "store_state"
    """put it back"""
    SCORES = "scores"
    """s = scale · q·k"""
    MASK = "mask"
    """s = the score lines at pairs that attend, -inf at the others"""
    RAISE_MAX = "raise_max"
    """m_old = m; m = max(m, max s); f = rescale(m_old, m)"""
    RESCALE_SUM = "rescale_sum"
    """l = l f"""
    RESCALE_ACC = "rescale_acc"
    """acc = acc f"""
    WEIGHTS = "weights"
    """p = weight(s, m)"""
    ADD_SUM = "add_sum"
    """l = l + Σ p"""
    NORMALIZE_WEIGHTS = "normalize_weights"
    """p = p / l"""
    ACCUMULATE = "accumulate"
    """acc = acc + Σ p v, p rounded to the dtype of v"""
    NORMALIZE_ACC = "normalize_acc"
    """acc = acc / l"""
    DENORMALIZE_ACC = "denormalize_acc"
    """acc = acc l"""
    FINALIZE = "finalize"
    """write o, lse and row_max, or the row state itself when a partial result is asked for"""
    BARRIER = "barrier"
    """all threads of the block wait for each other"""


@final
@record
class Step:
    op: Op


@final
@record
class Loop:
    """Walk an axis; `parallel` loops are spread over the blocks of the grid."""

    axis: Axis
    parallel: bool
    body: tuple[Node, ...]


Node: TypeAlias = Loop | Step


@final
@record
class TileProgram:
    """One kernel's loop nest and the tile sizes in rows and keys."""

    tile_q: int
    tile_kv: int
    body: tuple[Node, ...]


@final
@record
class Workspace:
    """A float32 scratch array that a launch needs: `dims` are size names and numbers, a product."""

    name: str
    dims: tuple[str | int, ...]


@final
@record
class Launch:
    """One kernel launch.  Grid: one block per iteration of the parallel loops."""

    kernel: str
    family: str
    tiles: TileProgram
    threads: int
    shared_bytes: int
    workspaces: tuple[Workspace, ...]


@final
@record(eq=False)
class Program:
    """Everything that runs for one call, in order."""

    attention: Attention
    schedule: Schedule
    launches: tuple[Launch, ...]


def walk(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Every loop and step, in order of first execution."""
    for node in nodes:
        yield node
        if isinstance(node, Loop):
            yield from walk(node.body)
