"""What can be wrong with a call of the float64 oracle: A650 to A659."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import final

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = [
    "IndexOutside", "IntegerOverflow", "LengthOutside", "Meaningless", "MissingArgument",
    "SurplusArgument", "WrongElement", "WrongHeads", "WrongShape", "WrongValue", "closest",
]  # fmt: skip


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


@final
class MissingArgument(Diagnostic):
    """A tensor, param or const without a value."""

    code = "A650"
    title = "{kind} `{name}` was not given"
    label = "declared here, and without a value"
    kind: str
    name: str


@final
class SurplusArgument(Diagnostic):
    """A tensor, param or const that the block does not declare."""

    code = "A651"
    title = "attention `{attention}` has no {kind} `{name}`"
    hint = "did you mean `{closest}`?"
    kind: str
    name: str
    attention: str
    closest: str | None


@final
class WrongShape(Diagnostic):
    """q, k, v or a captured tensor; `expected` is written as the block writes it."""

    code = "A652"
    title = "`{name}` has shape {shape}, but {expected} was expected"
    label = "declared here"
    name: str
    shape: str
    expected: str


@final
class WrongElement(Diagnostic):
    """A captured tensor of another kind: integers for floats, numbers for truth values."""

    code = "A653"
    title = "`{name}` holds {element} elements, but was declared as {declared}"
    label = "declared here"
    name: str
    element: str
    declared: str


@final
class WrongValue(Diagnostic):
    """A number of the wrong type, or outside of its range."""

    code = "A654"
    title = "{kind} `{name}` cannot be {value}"
    label = "it must be {expected}"
    kind: str
    name: str
    value: str
    expected: str


@final
class WrongHeads(Diagnostic):
    """Query heads that cannot be shared out evenly."""

    code = "A655"
    title = "{query_heads} query heads cannot share {key_heads} key/value heads evenly"
    hint = "the number of query heads must be a multiple of the number of key/value heads"
    query_heads: int
    key_heads: int


@final
class IndexOutside(Diagnostic):
    """A read outside of a captured tensor, at a pair that needs it."""

    code = "A656"
    title = "index {index} is outside dimension {axis} of tensor `{tensor}`, which has size {size}"
    label = "read here for {place}"
    tensor: str
    axis: int
    index: int
    size: int
    place: str


@final
class IntegerOverflow(Diagnostic):
    """Integers are mathematical, and end at 64 bits."""

    code = "A657"
    title = "an integer does not fit into 64 bits"
    label = "computed here for {place}"
    place: str


@final
class LengthOutside(Diagnostic):
    """`length kv = kl[b]` with more keys than the buffer has."""

    code = "A658"
    title = "the length of sequence {sequence} is {length}, but its buffer holds {size} {what}"
    label = "computed here"
    hint = "a length is at least 0 and at most the size of the buffer"
    what: str
    sequence: int
    length: int
    size: int


@final
class Meaningless(Diagnostic):
    """An expression that the language gives no meaning; the checker finds these first."""

    code = "A659"
    title = "this expression has no value: {reason}"
    label = "here"
    reason: str
