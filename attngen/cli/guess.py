"""Valid values for captured tensors that nobody gave, from how the expressions use them.

| what is done with a read value                | values that are made                           |
| --------------------------------------------- | ---------------------------------------------- |
| it is part of an index of a tensor            | inside that tensor                             |
| it is a `length`                              | 1 to the buffer's length, one of them all of it |
| `bit(word, i)`                                | any words                                      |
| compared for equality with another of its own | ids of segments, in order along the tokens     |
| compared by size with another of its own      | 0, 1, 2, … along the tokens                    |
| compared with a position                      | positions                                      |
| anything else                                 | small numbers                                  |

Floats are normal, or positive below a root, a logarithm or a fraction line.  Whether the
values were valid shows when the expressions are evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, TypeAlias, final

import numpy as np

from attngen.analysis.ranges import infer_ranges, launch_ranges
from attngen.backend.device import numpy_dtype
from attngen.cli.memory import require_memory
from attngen.ir.attention import Attention, Tensor
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    Not,
    Select,
    Symbol,
)
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder, symbols, tensors
from attngen.ir.types import Element, ScalarType

__all__ = ["guess_sizes", "make_tensor", "shape_of"]

Array: TypeAlias = Any

LARGEST: Final = 1 << 31
"""No size is larger."""
BYTES_OF_ELEMENT: Final = 24
"""While an array is made, with all that it is made from."""
OPTIONAL_BELOW: Final = 1 << 22
"""Optional dimensions are made in full size in tensors of no more elements than this."""
LOOKED_UP: Final = 16
"""Size of a dimension whose index is itself read from a tensor."""
UNUSED: Final = 4
_TOKENS: Final = frozenset({"q", "kv", "qpos", "Sq", "Skv"})


# ---- sizes that only tensors' shapes name -------------------------------------------------


def guess_sizes(
    attention: Attention, sizes: Mapping[str, int], params: Mapping[str, bool | int | float]
) -> dict[str, int]:
    """A size for each name that is still open, large enough for the reads along it."""
    open_names = [name for name in attention.named_sizes if name not in sizes]
    if not open_names:
        return {}
    ranges = dict(launch_ranges(attention, {**sizes, **dict.fromkeys(open_names, 1)}, params))
    ranges |= {name: Interval(1, LARGEST) for name in open_names}
    known = infer_ranges(attention.expressions(), ranges, attention)
    guessed: dict[str, int] = {}
    for name in open_names:
        needed = [UNUSED]
        for index in _indices_along(attention, name):
            if tensors(index):
                needed.append(LOOKED_UP)
            elif not known[id(index)].high < LARGEST:
                needed.append(max(sizes["Sq"], sizes["Skv"], 1))
            else:
                needed.append(int(known[id(index)].high) + 1)
        guessed[name] = max(needed[1:], default=UNUSED)
    return guessed


def _indices_along(attention: Attention, name: str) -> Iterator[Expr]:
    for load in _loads(attention):
        for index, dim in zip(load.indices, attention.tensor(load.tensor).dims, strict=True):
            if dim.size == name:
                yield index


def _loads(attention: Attention) -> Iterator[Load]:
    for node in postorder(*attention.expressions()):
        if isinstance(node, Load):
            yield node


def shape_of(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape to make: optional dimensions are 1 where the whole would be large.

    Errors:  A719 when even that does not fit into memory.
    """
    full = [d.size if isinstance(d.size, int) else sizes[d.size] for d in tensor.dims]
    if math.prod(full) > OPTIONAL_BELOW:
        full = [1 if d.optional else n for d, n in zip(tensor.dims, full, strict=True)]
    require_memory(math.prod(full) * BYTES_OF_ELEMENT, f"`{tensor.name}` {tuple(full)}")
    return tuple(full)


# ---- how a value is used -------------------------------------------------------------------


class Use(IntEnum):
    """What is done with a value that was read; the strongest use decides."""

    OTHER = 0
    POSITION = 1
    POSITION_ID = 2
    SEGMENT = 3
    WORD = 4
    LENGTH_KV = 5
    LENGTH_Q = 6
    INDEX = 7


@final
@dataclass(slots=True)
class _Uses:
    """All that is known about the values of one tensor."""

    kinds: set[Use] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    """What they are compared with."""
    index_of: list[tuple[int | str, bool]] = field(default_factory=list)
    """Sizes of the dimensions they index, and whether the value alone is the index."""
    is_positive: bool = False
    """Whether a root, a logarithm or a division asks for positive numbers."""

    @property
    def strongest(self) -> Use:
        return max(self.kinds, default=Use.OTHER)


_TOKEN: Final = "\0token"
"""Stands beside the tensors' names in a flow: a position takes part."""


def _find_uses(attention: Attention) -> dict[str, _Uses]:
    """Follow every read value up to the comparison, index or function that consumes it."""
    uses = {tensor.name: _Uses() for tensor in attention.tensors}
    flows: dict[int, frozenset[str]] = {}
    for node in postorder(*attention.expressions()):
        operands = [flows[id(child)] for child in children(node)]
        flows[id(node)] = _flow(node, operands, attention, uses)
    for root, use in ((attention.length_q, Use.LENGTH_Q), (attention.length_kv, Use.LENGTH_KV)):
        if root is not None:
            for name in flows[id(root)] - {_TOKEN}:
                uses[name].kinds.add(use)
    return uses


def _flow(
    node: Expr, operands: list[frozenset[str]], attention: Attention, uses: dict[str, _Uses]
) -> frozenset[str]:
    """The tensors (and `_TOKEN`) whose values the value of a node is made of."""
    nothing: frozenset[str] = frozenset()
    match node:
        case Symbol(name):
            return frozenset({_TOKEN}) if name in _TOKENS else nothing
        case Load(tensor, indices):
            for index, dim, flow in zip(
                indices, attention.tensor(tensor).dims, operands, strict=True
            ):
                for name in flow - {_TOKEN}:
                    uses[name].kinds.add(Use.INDEX)
                    uses[name].index_of.append((dim.size, isinstance(_unwrap(index), Load)))
            return frozenset({tensor})
        case Compare():
            _compare(node, operands[0], operands[1], uses)
            return nothing
        case Call("bit"):
            for name in operands[0] - {_TOKEN}:
                uses[name].kinds.add(Use.WORD)
            return nothing
        case Call("log" | "log2" | "sqrt" | "rsqrt"):
            _ask_for_positive(operands[0], uses)
        case Binary(BinaryOp.DIV):
            _ask_for_positive(operands[1], uses)
        case Select():
            return operands[1] | operands[2]
        case Logical() | Not():
            return nothing
    return nothing.union(*operands)


def _compare(
    node: Compare, left: frozenset[str], right: frozenset[str], uses: dict[str, _Uses]
) -> None:
    is_equality = node.op in (CompareOp.EQ, CompareOp.NE)
    for name in (left | right) - {_TOKEN}:
        if name in left and name in right:
            uses[name].kinds.add(Use.SEGMENT if is_equality else Use.POSITION_ID)
        elif (left | right) - {name}:
            uses[name].kinds.add(Use.POSITION)
        for side in (node.left, node.right):
            for part in postorder(side):
                if isinstance(part, Const) and isinstance(part.value, int):
                    uses[name].constants.add(int(part.value))


def _ask_for_positive(flow: frozenset[str], uses: dict[str, _Uses]) -> None:
    for name in flow - {_TOKEN}:
        uses[name].is_positive = True


def _unwrap(e: Expr) -> Expr:
    while isinstance(e, Let):
        e = e.value
    return e


# ---- values --------------------------------------------------------------------------------


def make_tensor(
    attention: Attention, tensor: Tensor, sizes: Mapping[str, int], rng: np.random.Generator
) -> tuple[Array, str]:
    """An array for a captured tensor, and what it holds, in words.

    Errors:  A719 when it would be too large.
    """
    shape = shape_of(tensor, sizes)
    uses = _find_uses(attention)[tensor.name]
    match tensor.element.scalar:
        case ScalarType.BOOL:
            values, words = _make_truths(shape, rng)
        case ScalarType.FLOAT:
            values, words = _make_floats(shape, uses, rng)
        case ScalarType.INT:
            axis = _token_axis(attention, tensor)
            values, words = _make_integers(shape, tensor.element, uses, axis, sizes, rng)
            values = np.clip(values, tensor.element.low, tensor.element.high)
    return np.asarray(values).astype(numpy_dtype(tensor.element.name)), words


def _make_truths(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Array, str]:
    values = rng.random(shape) < 0.75
    if len(shape) >= 2 and shape[-1] == shape[-2]:
        diagonal = np.arange(shape[-1])
        values[..., diagonal, diagonal] = True
        return values, "three quarters true, all of the diagonal"
    return values, "three quarters true"


def _make_floats(
    shape: tuple[int, ...], uses: _Uses, rng: np.random.Generator
) -> tuple[Array, str]:
    if uses.is_positive:
        return rng.uniform(0.5, 1.5, shape), "between 0.5 and 1.5"
    return rng.standard_normal(shape, np.float32), "standard normal"


def _make_integers(
    shape: tuple[int, ...],
    element: Element,
    uses: _Uses,
    axis: int | None,
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> tuple[Array, str]:
    match uses.strongest:
        case Use.INDEX:
            return _make_indices(shape, uses, sizes, rng)
        case Use.LENGTH_Q | Use.LENGTH_KV as use:
            size = sizes["Sq" if use is Use.LENGTH_Q else "Skv"]
            values = rng.integers(min(1, size), size + 1, shape)
            values.reshape(-1)[:1] = size
            return values, f"lengths up to {size}"
        case Use.WORD:
            return rng.integers(element.low, element.high, shape, endpoint=True), "random bits"
        case Use.SEGMENT:
            return _make_segments(shape, axis, 0 in uses.constants, rng)
        case Use.POSITION_ID:
            return _along(shape, axis, np.arange), "0, 1, 2, … along the tokens"
        case Use.POSITION:
            longest = max(sizes["Sq"], sizes["Skv"])
            least = 0 if axis is not None else max(1, longest // 4)
            values = rng.integers(min(least, longest), longest + 1, shape)
            return values, f"positions from {min(least, longest)} to {longest}"
        case _:
            largest = max((*uses.constants, 2)) + 1
            return rng.integers(0, largest, shape, endpoint=True), f"0 to {largest}"


def _make_indices(
    shape: tuple[int, ...], uses: _Uses, sizes: Mapping[str, int], rng: np.random.Generator
) -> tuple[Array, str]:
    if not all(is_alone for _, is_alone in uses.index_of):
        return np.zeros(shape, np.int64), "0, as a part of an index"
    bounds = [size if isinstance(size, int) else sizes[size] for size, _ in uses.index_of]
    smallest = max(min(bounds), 1)
    return rng.integers(0, smallest, shape), f"indices below {smallest}"


def _make_segments(
    shape: tuple[int, ...], axis: int | None, has_zero: bool, rng: np.random.Generator
) -> tuple[Array, str]:
    """Every row of tokens is cut into segments of its own; where 0 is compared with, it means
    none, and every second segment is none.
    """
    if axis is None:
        return np.arange(math.prod(shape)).reshape(shape), "0, 1, 2, …"
    length = shape[axis]
    count = max(1, min(4, length // 4))
    others = (*shape[:axis], *shape[axis + 1 :])
    starts = np.sort(rng.integers(1, max(length, 2), (*others, count - 1)), axis=-1)
    ids = 1 + (np.arange(length) >= starts[..., None]).sum(axis=-2)
    words = f"ids 1 to {count}, in order along the tokens"
    if has_zero and count > 1:
        ids, words = np.where(ids % 2 == 0, ids, 0), "some even ids, with 0 between them"
    return np.moveaxis(ids, -1, axis), words


def _along(shape: tuple[int, ...], axis: int | None, values: Any) -> Array:
    """The same numbers along one axis for all others; along the last where there is none."""
    at = len(shape) - 1 if axis is None else axis
    row = values(shape[at]).reshape([-1 if i == at else 1 for i in range(len(shape))])
    return np.broadcast_to(row, shape)


def _token_axis(attention: Attention, tensor: Tensor) -> int | None:
    """The last dimension that is read at a position."""
    found = [
        i
        for load in _loads(attention)
        if load.tensor == tensor.name
        for i, index in enumerate(load.indices)
        if symbols(index) & _TOKENS
    ]
    return max(found, default=None)
