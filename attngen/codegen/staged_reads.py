"""What score lines take from shared memory, where it is written ahead of them.

    score   s + bias[h, q, kv]               a tile: one element for each row and key
    score   s + log(weight[b, kv])           keys: one value for each key
    score   s + table[bucket(kv - qpos), h]  a diagonal: one value for each difference of both

Read pair by pair, a tile's elements would take as long as its matrix products: the cache looks up
the rows of every read one by one.  Copied, they cost one look-up for 16 bytes, and nobody waits
for memory.  A value that many pairs of a tile share is computed once for all of them: a diagonal
of 128 rows and 128 keys has 255 values, where there are 16384 pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple, final

from attngen.codegen.arguments import C_ELEMENT
from attngen.codegen.expr import Emitted, ExprPrinter, Variable, called
from attngen.codegen.formulas import Formula, convert_of, formula, is_inside
from attngen.codegen.score_parts import KEYS, ROWS, find_called_elsewhere, growth_of
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
from attngen.ir.traverse import children, postorder
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "Pattern",
    "StagedRead",
    "StagedText",
    "choose_staged",
    "find_staged_reads",
    "find_tile_nodes",
    "name_staged",
    "print_staged",
    "staged_bytes",
]

_CHUNK: Final = 16
"""Bytes of one asynchronous copy."""
_MOST_BYTES: Final = 4
"""Of an element."""
_FLOAT_BYTES: Final = 4
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
    attention: Attention, tile_q: int, tile_kv: int, steps: int, most_bytes: int
) -> tuple[StagedRead, ...]:
    """Those that find room, in their order; the others are computed pair by pair.

    steps:       that are in shared memory at once.
    most_bytes:  for all of them.
    """
    chosen: list[StagedRead] = []
    left = most_bytes
    for read in find_staged_reads(attention):
        size = steps * _bytes_of(read, tile_q, tile_kv)
        if size <= left:
            chosen.append(read)
            left -= size
    return tuple(chosen)


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


def staged_bytes(reads: tuple[StagedRead, ...], tile_q: int, tile_kv: int) -> int:
    """Bytes of shared memory for one step."""
    return sum(_bytes_of(read, tile_q, tile_kv) for read in reads)


def _bytes_of(read: StagedRead, tile_q: int, tile_kv: int) -> int:
    match read.pattern:
        case Pattern.TILE:
            return tile_q * _pitch(read, tile_kv)
        case Pattern.KEYS:
            return _whole_chunks(tile_kv * read.element_bytes)
        case Pattern.DIAGONAL:
            return _whole_chunks((tile_q + tile_kv) * read.element_bytes)


def _pitch(read: StagedRead, tile_kv: int) -> int:
    """Bytes from a row to the next: more than it has, so that rows begin at other banks."""
    return tile_kv * read.element_bytes + max(_CHUNK, 8 * read.element_bytes)


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
    reads: tuple[StagedRead, ...], attention: Attention, tile_q: int, tile_kv: int
) -> Iterator[StagedText]:
    """The values as text, one behind the other in shared memory."""
    printer, offset = ExprPrinter(attention), 0
    for read in reads:
        tile = _tile_of(read)
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
            pitch=_pitch(read, tile_kv),
        )
        offset += _bytes_of(read, tile_q, tile_kv)


def _clamped(read: StagedRead, tile: Load, attention: Attention) -> tuple[int, ...]:
    dims = attention.tensor(tile.tensor).dims
    walked = (read.row_dim, read.key_dim)
    return tuple(d for d in walked if not is_inside(tile.indices[d], dims[d]))
