"""The launches of a call, and the loop nest of each: which tiles, in what order, which steps.

    Node = Loop(axis, parallel, Node*) | Step(op)

A `TileProgram` is the algorithm itself.  The NumPy executor runs it as it stands, templates
print it, and the loop nests of `docs/from-softmax-to-flash-attention.md` are these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Final, TypeAlias, final

from attngen.ir.attention import Attention
from attngen.ir.schedule import Schedule
from attngen.record import record

__all__ = [
    "Axis",
    "CeilDiv",
    "Dim",
    "Launch",
    "Loop",
    "MoreThan",
    "Node",
    "Op",
    "Program",
    "Step",
    "TensorBox",
    "TileBox",
    "TileProgram",
    "Workspace",
    "evaluate_dims",
    "grid_of",
    "walk",
]


class Axis(Enum):
    """What a loop walks: batch and head together, tiles of query rows, or tiles of keys."""

    BATCH_HEAD = "batch_head"
    Q = "q"
    KV = "kv"


class Op(Enum):
    """The steps, in the words that kernels, executor and documentation share."""

    SUMMARISE_KEYS = "summarise_keys"
    """key_ends = minimum and maximum, over a key tile, of what the mask reads along keys"""
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
class CeilDiv:
    """How many pieces of `by` cover a size: the smallest integer that is not below size / by."""

    size: str
    by: int


TICKETS: Final = "tickets"
"""The argument of launches that hand out query tiles."""

Dim: TypeAlias = str | int | CeilDiv
"""A number that a call decides.

A name is a size of the call: `B`, `Hq`, `Hkv`, `Sq`, `Skv`, `Dqk`, `Dv`, or `rows` and `keys`,
those that the launch covers.
"""


@final
@record
class MoreThan:
    """Whether a size of the call is larger than a number."""

    size: str
    number: int


@final
@record
class Workspace:
    """A scratch array that a launch needs; its elements are counted by the product of `dims`.

    The argument of the same name points at it.  `element` is "fp32" or "int32".
    """

    name: str
    dims: tuple[Dim, ...]
    element: str = "fp32"


@final
@record
class TensorBox:
    """What one tensor copy of a launch moves of q, k or v; the argument `map_<operand>` is the
    tensor map that says so.

    A row of the box is `columns` elements of one token.  Its 16-byte chunks are exchanged among
    each other in shared memory, so that 8 rows of one column meet all banks.
    """

    operand: str
    columns: int
    tokens: int


@final
@record
class TileBox:
    """What one tensor copy of a launch moves of a captured tensor, for a tile of rows and keys.

    The argument `map_<value>` is the tensor map, and `has_<value>` says whether there is one: a
    tensor whose rows cannot be copied 16 bytes at a time has none.  Along a dimension that
    repeats one element (stride 0) the map has one.

    value:             what score lines take of it, `x0`.
    row_dim, key_dim:  the dimensions of the tensor.
    keys, rows:        of the box.
    swizzle:           bytes of a row of it in shared memory, within which 16-byte chunks are
                       exchanged; 0: none are.
    """

    value: str
    tensor: str
    row_dim: int
    key_dim: int
    rows: int
    keys: int
    swizzle: int

    def dims(self, rank: int) -> tuple[int, ...]:
        """The tensor's dimensions in the order of the map's."""
        walked = (self.key_dim, self.row_dim)
        return (*walked, *(d for d in reversed(range(rank)) if d not in walked))


@final
@record
class Launch:
    """One kernel launch.

    grid:        blocks, the product of these; in a persistent kernel tiles, and there are as many
                 blocks as the GPU has multiprocessors, if that is less.
    hands_out_tiles:  blocks of a persistent kernel get query tiles as they ask for them.  The
                 argument `tickets` points at the counters, two int32 that are 0 before a launch and
                 behind it; where it is null, tiles are dealt in a fixed order.
    spread:      a persistent kernel has a block for each tile after all where all of these hold;
                 () is never.
    workspaces:  what it writes; launches behind it may read them.
    when:        a call needs all of these to have the launch; () is every call.  Where it is left
                 out, its workspaces are null, and the launches behind it do without.
    """

    kernel: str
    family: str
    tiles: TileProgram
    grid: tuple[Dim, ...]
    threads: int
    shared_bytes: int
    workspaces: tuple[Workspace, ...]
    when: tuple[MoreThan, ...] = ()
    is_persistent: bool = False
    hands_out_tiles: bool = False
    spread: tuple[MoreThan, ...] = ()
    boxes: tuple[TensorBox, ...] = ()
    tile_boxes: tuple[TileBox, ...] = ()


@final
@record(eq=False)
class Program:
    """Everything that runs for one call, in order."""

    attention: Attention
    schedule: Schedule
    launches: tuple[Launch, ...]

    @property
    def main(self) -> Launch:
        """The launch that writes the outputs, for which those before it prepare."""
        return self.launches[-1]

    @property
    def workspaces(self) -> tuple[Workspace, ...]:
        """Those of all launches."""
        return tuple(w for launch in self.launches for w in launch.workspaces)

    @property
    def hands_out_tiles(self) -> bool:
        """Whether some launch does."""
        return any(launch.hands_out_tiles for launch in self.launches)

    @property
    def boxes(self) -> tuple[TensorBox, ...]:
        """Those of all launches, which take the same arguments."""
        return tuple(box for launch in self.launches for box in launch.boxes)

    @property
    def tile_boxes(self) -> tuple[TileBox, ...]:
        """Likewise."""
        return tuple(box for launch in self.launches for box in launch.tile_boxes)

    def without_optional(self) -> Program:
        """The same without launches that a call can do without."""
        needed = tuple(launch for launch in self.launches if not launch.when)
        return replace(self, launches=needed)


def grid_of(tiles: TileProgram) -> tuple[Dim, ...]:
    """One block per iteration of the parallel loops over batch, head and query tiles."""
    iterations: dict[Axis, tuple[Dim, ...]] = {
        Axis.BATCH_HEAD: ("B", "Hq"),
        Axis.Q: (CeilDiv("rows", tiles.tile_q),),
    }
    parallel = [n.axis for n in walk(tiles.body) if isinstance(n, Loop) and n.parallel]
    return tuple(dim for axis in parallel for dim in iterations[axis])


def evaluate_dims(dims: tuple[Dim, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers of one call, whose sizes are given by name."""

    def number(dim: Dim) -> int:
        match dim:
            case CeilDiv(size, by):
                return -(-sizes[size] // by)
            case str():
                return sizes[dim]
            case int():
                return dim

    return tuple(map(number, dims))


def walk(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Every loop and step, in order of first execution."""
    for node in nodes:
        yield node
        if isinstance(node, Loop):
            yield from walk(node.body)
