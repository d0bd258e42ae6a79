"""What score lines take from shared memory, where it is written ahead of them.

    score   s + bias[h, q, kv]               a tile: one element for each row and key
    score   s + log(weight[b, kv])           keys: one value for each key
    score   s + table[bucket(kv - qpos), h]  a diagonal: one value for each difference of both

Read pair by pair, a tile's elements would take as long as its matrix products: the cache looks up
the rows of every read one by one.  Copied, they cost one look-up for 16 bytes, or a few tensor
copies for all of them, and nobody waits for memory.  A value that many pairs of a tile share is
computed once for all of them: a diagonal of 128 rows and 128 keys has 255 values, where there are
16384 pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple, final

from attngen.analysis.growth import KEYS, ROWS, growth_of
from attngen.codegen.arguments import C_ELEMENT
from attngen.codegen.expr import Emitted, ExprPrinter, Variable, called
from attngen.codegen.formulas import Formula, convert_of, formula, is_inside
from attngen.codegen.score_parts import find_called_elsewhere
from attngen.ir.attention import Attention
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    Const,
    Expr,
    Let,
    Load,
    Symbol,
    expr_type,
)
from attngen.ir.printer import print_expr
from attngen.ir.program import TileBox
from attngen.ir.traverse import children, postorder
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "Pattern",
    "StagedRead",
    "StagedText",
    "choose_staged",
    "find_staged_reads",
    "find_tile_boxes",
    "find_tile_nodes",
    "is_taken_ahead",
    "name_staged",
    "print_staged",
    "staged_bytes",
]

_CHUNK: Final = 16
"""Bytes of one asynchronous copy."""
_MOST_BYTES: Final = 4
"""Of an element."""
_FLOAT_BYTES: Final = 4
_AHEAD_BYTES: Final = 2
"""Of an element that a lane takes ahead: two share a register until they are used."""
_BOX_ALIGNMENT: Final = 1024
"""Bytes after which the widest swizzle repeats."""
_MOST_DIMENSIONS: Final = 5
"""Of a tensor that a tensor map describes."""
_PAIR: Final = ROWS | KEYS
_NAMES: Final = _PAIR | {"s"}
_CHEAP: Final = frozenset({"abs", "min", "max", "floor"})
"""Functions that take an instruction or two."""


class Pattern(Enum):
    """Which pairs of a tile share a value."""

    TILE = "tile"
    KEYS = "keys"
    DIAGONAL = "diagonal"


@final
@record(eq=False)
class StagedRead:
    """One value; the node is that of the score line.

    element_bytes:     of the element of a tile, or of the value.
    row_dim, key_dim:  the dimensions of a tile's tensor that rows and keys walk along.
    """

    node: Expr
    pattern: Pattern
    element_bytes: int
    row_dim: int = 0
    key_dim: int = 0


@final
@record(eq=False)
class StagedText:
    """A staged value as the template sees it.

    value:      of keys and of a diagonal: the value at a Position.
    tensor:     of a tile, as all that follows but the offset.
    variables:  what the indices use.
    indices:    the C++ text of each index, at a Position.
    clamped:    of row_dim and key_dim, those whose index is not proved to be inside.
    offset:     bytes from the beginning of what is staged for a step.
    pitch:      bytes from a row to the next.
    box_keys:   of a tile that lies in boxes: keys of one; 0 elsewhere.
    coordinates:  C++ text of where a tensor copy begins, the densest dimension first; () where
                there is none.
    is_ahead:   a lane takes its part of a tile before it has the scores.
    """

    what: str
    pattern: str
    c_element: str
    c_type: str
    convert: str
    element_bytes: int
    value: Formula | None
    tensor: str
    variables: tuple[Variable, ...]
    indices: tuple[str, ...]
    row_dim: int
    key_dim: int
    clamped: tuple[int, ...]
    offset: int
    pitch: int
    box_keys: int
    coordinates: tuple[str, ...]
    is_ahead: bool


class StagedTexts(tuple[StagedText, ...]):
    """The staged values of a kernel, and which kinds of them there are."""

    __slots__ = ()

    @property
    def has_boxes(self) -> bool:
        return any(one.box_keys for one in self)

    @property
    def has_copies(self) -> bool:
        """Tensor copies bring some."""
        return any(one.coordinates for one in self)

    @property
    def has_ahead(self) -> bool:
        return any(one.is_ahead for one in self)

    @property
    def has_behind(self) -> bool:
        """Some is read where the scores are."""
        return any(not one.is_ahead for one in self)


@lru_cache(maxsize=64)  # asked again for every schedule
def find_staged_reads(attention: Attention) -> tuple[StagedRead, ...]:
    """Those that only the functions of the score lines compute, each once, as large as can be."""
    elsewhere = find_called_elsewhere(attention)
    facts = _find_facts(attention)
    found: dict[int, StagedRead] = {}
    seen: set[int] = set()
    for line in attention.scores:
        stack: list[Expr] = [line]
        while stack:
            node = stack.pop()
            if id(node) in seen or id(node) in elsewhere:
                continue
            seen.add(id(node))
            read = _as_staged(node, facts[id(node)], attention)
            if read is not None:
                found[id(node)] = read
            else:
                stack.extend(reversed(children(node)))
    return tuple(found.values())


def choose_staged(
    attention: Attention,
    tile_q: int,
    tile_kv: int,
    steps: int,
    most_bytes: int,
    *,
    in_boxes: bool = False,
) -> tuple[StagedRead, ...]:
    """Those that find room, in their order; the others are computed pair by pair.

    steps:       that are in shared memory at once.
    most_bytes:  for all of them.
    in_boxes:    as for `staged_bytes`.
    """
    chosen: tuple[StagedRead, ...] = ()
    for read in find_staged_reads(attention):
        more = (*chosen, read)
        if steps * staged_bytes(more, tile_q, tile_kv, in_boxes=in_boxes) <= most_bytes:
            chosen = more
    return chosen


def find_tile_boxes(
    reads: tuple[StagedRead, ...], attention: Attention, tile_q: int, tile_kv: int
) -> tuple[TileBox, ...]:
    """What tensor copies bring of the tiles, where their tensors have few enough dimensions."""
    return tuple(
        TileBox(
            value=f"x{i}",
            tensor=tile.tensor,
            row_dim=read.row_dim,
            key_dim=read.key_dim,
            rows=tile_q,
            keys=_box_bytes(read, tile_kv) // read.element_bytes,
            swizzle=_swizzle(_box_bytes(read, tile_kv)),
        )
        for i, read in enumerate(reads)
        if (tile := _tile_of(read)) is not None and len(tile.indices) <= _MOST_DIMENSIONS
    )


def is_taken_ahead(read: StagedRead) -> bool:
    """Whether a lane has registers for its part of a tile while it waits for the scores."""
    return read.pattern is Pattern.TILE and read.element_bytes == _AHEAD_BYTES


def find_tile_nodes(reads: tuple[StagedRead, ...]) -> frozenset[int]:
    """Reads, by id, of which whole tiles are copied."""
    return frozenset(id(read.node) for read in reads if read.pattern is Pattern.TILE)


def _as_staged(node: Expr, facts: _Facts, attention: Attention) -> StagedRead | None:
    if "s" in facts.names or not facts.names & _PAIR:
        return None
    if facts.is_dear and expr_type(node) is ScalarType.FLOAT:
        if not facts.names & ROWS:
            return StagedRead(node, Pattern.KEYS, _FLOAT_BYTES)
        if facts.gain == 0:
            return StagedRead(node, Pattern.DIAGONAL, _FLOAT_BYTES)
    return _as_tile(node, attention) if isinstance(node, Load) else None


def _as_tile(node: Load, attention: Attention) -> StagedRead | None:
    element = attention.tensor(node.tensor).element
    growths = [(growth_of(i, ROWS), growth_of(i, KEYS)) for i in node.indices]
    walked = [i for i, growth in enumerate(growths) if growth != (0, 0)]
    if element.bytes > _MOST_BYTES:
        return None
    match [growths[i] for i in walked]:
        case [(1, 0), (0, 1)]:
            return StagedRead(node, Pattern.TILE, element.bytes, *walked)
        case [(0, 1), (1, 0)]:
            return StagedRead(node, Pattern.TILE, element.bytes, walked[1], walked[0])
        case _:
            return None


class _Facts(NamedTuple):
    """What is known of a node of the score lines.

    names:    the indices of a pair that it depends on, and s.
    is_dear:  it reads or computes, for each pair, more than additions and products.
    gain:     what it gains from a pair to the one a row and a key further on; None: unknown.
    """

    names: frozenset[str]
    is_dear: bool
    gain: int | None


def _find_facts(attention: Attention) -> dict[int, _Facts]:
    """By the id of the node; each is looked at once, since lets may make lines long."""
    facts: dict[int, _Facts] = {}
    for node in postorder(*attention.scores):
        below = [facts[id(child)] for child in children(node)]
        names = frozenset[str]().union(*(each.names for each in below))
        if isinstance(node, Symbol) and node.name in _NAMES:
            names = frozenset({node.name})
        is_dear = any(each.is_dear for each in below) or bool(names & _PAIR and _takes_long(node))
        facts[id(node)] = _Facts(names, is_dear, _gain(node, [each.gain for each in below]))
    return facts


def _takes_long(node: Expr) -> bool:
    match node:
        case Call(function):
            return function not in _CHEAP
        case Load() | Binary(BinaryOp.DIV | BinaryOp.FLOORDIV | BinaryOp.MOD):
            return True
        case _:
            return False


def _gain(node: Expr, below: list[int | None]) -> int | None:
    match node, below:
        case Symbol(name), _:
            return 1 if name in _PAIR else 0
        case Const() | Let(), [*inner]:
            return inner[0] if inner else 0
        case Binary(BinaryOp.ADD), [int(a), int(b)]:
            return a + b
        case Binary(BinaryOp.SUB), [int(a), int(b)]:
            return a - b
        case Compare(), [int(a), int(b)] if a == b:
            return 0
        case _:
            return 0 if all(gain == 0 for gain in below) else None


def staged_bytes(
    reads: tuple[StagedRead, ...], tile_q: int, tile_kv: int, *, in_boxes: bool = False
) -> int:
    """Bytes of shared memory for one step.

    in_boxes:  tiles lie there as tensor copies bring them.
    """
    return _offsets(reads, tile_q, tile_kv, in_boxes=in_boxes)[-1]


def _offsets(
    reads: tuple[StagedRead, ...], tile_q: int, tile_kv: int, *, in_boxes: bool
) -> list[int]:
    """Where each begins, and the end, where the next step's may begin."""
    has_boxes = in_boxes and any(read.pattern is Pattern.TILE for read in reads)
    unit = _BOX_ALIGNMENT if has_boxes else 1
    offsets = [0]
    for read in reads:
        size = _bytes_of(read, tile_q, tile_kv, in_boxes=in_boxes)
        offsets.append(offsets[-1] + -(-size // unit) * unit)
    return offsets


def _bytes_of(read: StagedRead, tile_q: int, tile_kv: int, *, in_boxes: bool) -> int:
    match read.pattern:
        case Pattern.TILE if in_boxes:
            return tile_q * tile_kv * read.element_bytes
        case Pattern.TILE:
            return tile_q * _pitch(read, tile_kv)
        case Pattern.KEYS:
            return _whole_chunks(tile_kv * read.element_bytes)
        case Pattern.DIAGONAL:
            return _whole_chunks((tile_q + tile_kv) * read.element_bytes)


def _pitch(read: StagedRead, tile_kv: int) -> int:
    """Bytes from a row to the next: more than it has, so that rows begin at other banks."""
    return tile_kv * read.element_bytes + max(_CHUNK, 8 * read.element_bytes)


def _box_bytes(read: StagedRead, tile_kv: int) -> int:
    """Bytes of a row of a box: the widest swizzle that a row of the tile is whole ones of."""
    row = tile_kv * read.element_bytes
    return next(span for span in (128, 64, 32, _CHUNK) if row % span == 0)


def _swizzle(span: int) -> int:
    return span if span > _CHUNK else 0  # rows of one chunk meet all banks as they are


def _whole_chunks(size: int) -> int:
    return -(-size // _CHUNK) * _CHUNK


def name_staged(reads: tuple[StagedRead, ...], attention: Attention) -> dict[int, Emitted]:
    """What score lines take instead of computing it, by the id of the node."""
    return {
        id(read.node): called(f"at.staged.x{i}[at.side]", _convert(read, attention)[0])
        for i, read in enumerate(reads)
    }


def _convert(read: StagedRead, attention: Attention) -> tuple[str, str]:
    """The C++ type of a value, and what makes it of what is stored."""
    tile = _tile_of(read)
    return convert_of(attention.tensor(tile.tensor)) if tile else ("float", "")


def _tile_of(read: StagedRead) -> Load | None:
    """The read of which a whole tile is copied; None where values are computed."""
    match read.node:
        case Load() as tile if read.pattern is Pattern.TILE:
            return tile
        case _:
            return None


def print_staged(
    reads: tuple[StagedRead, ...],
    attention: Attention,
    tile_q: int,
    tile_kv: int,
    *,
    in_boxes: bool = False,
) -> StagedTexts:
    """The values as text, one behind the other in shared memory."""
    return StagedTexts(_print_each(reads, attention, tile_q, tile_kv, in_boxes=in_boxes))


def _print_each(
    reads: tuple[StagedRead, ...],
    attention: Attention,
    tile_q: int,
    tile_kv: int,
    *,
    in_boxes: bool,
) -> Iterator[StagedText]:
    printer = ExprPrinter(attention)
    offsets = _offsets(reads, tile_q, tile_kv, in_boxes=in_boxes)
    boxes = {box.value: box for box in find_tile_boxes(reads, attention, tile_q, tile_kv)}
    for i, (read, offset) in enumerate(zip(reads, offsets, strict=False)):
        tile = _tile_of(read)
        is_boxed = in_boxes and tile is not None
        c_type, convert = _convert(read, attention)
        bodies = [printer.print(index) for index in tile.indices] if tile else []
        yield StagedText(
            what=print_expr(read.node).splitlines()[-1],  # behind its lets
            pattern=read.pattern.value,
            c_element=C_ELEMENT[attention.tensor(tile.tensor).element.name] if tile else "float",
            c_type=c_type,
            convert=convert,
            element_bytes=read.element_bytes,
            value=None if tile else formula(printer, read.node),
            tensor=tile.tensor if tile else "",
            variables=tuple({v.name: v for body in bodies for v in body.variables}.values()),
            indices=tuple(body.text for body in bodies),
            row_dim=read.row_dim,
            key_dim=read.key_dim,
            clamped=_clamped(read, tile, attention) if tile else (),
            offset=offset,
            pitch=_box_bytes(read, tile_kv) if is_boxed else _pitch(read, tile_kv),
            box_keys=_box_bytes(read, tile_kv) // read.element_bytes if is_boxed else 0,
            coordinates=(
                _coordinates(boxes[f"x{i}"], tile, [body.text for body in bodies], attention)
                if tile is not None and is_boxed and f"x{i}" in boxes
                else ()
            ),
            is_ahead=is_boxed and is_taken_ahead(read),
        )


def _coordinates(
    box: TileBox, tile: Load, indices: list[str], attention: Attention
) -> tuple[str, ...]:
    """Where a box begins; the index of another dimension is the nearest one there is."""
    tensor = attention.tensor(tile.tensor)

    def coordinate(d: int) -> str:
        if d in (box.key_dim, box.row_dim):
            return f"(int)({indices[d]})"
        size, stride = (f"args.t_{tensor.name}_{word}{d}" for word in ("size", "stride"))
        is_known = is_inside(tile.indices[d], tensor.dims[d])
        index = indices[d] if is_known else f"ag_nearest({indices[d]}, {size})"
        return f"{stride} == 0 ? 0 : (int)({index})"

    return tuple(map(coordinate, box.dims(len(indices))))


def _clamped(read: StagedRead, tile: Load, attention: Attention) -> tuple[int, ...]:
    dims = attention.tensor(tile.tensor).dims
    walked = (read.row_dim, read.key_dim)
    return tuple(d for d in walked if not is_inside(tile.indices[d], dims[d]))
