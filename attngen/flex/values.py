"""What stands for an index, the score or a captured array while a function is traced.

A `Scalar` is one number or truth value of a pair; a `Row` is several of them.  Operators, methods
and PyTorch's functions on them become nodes of the syntax tree (`functions.py` says which).
What would need a value, such as `if` or `range`, is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias, final

from attngen.diagnostics.diagnostic import AttnError
from attngen.flex.captured import Captured, is_array, scalar_of
from attngen.flex.errors import DecidesPython
from attngen.flex.graph import Graph, refuse
from attngen.flex.places import running_place
from attngen.frontend import ast
from attngen.ir.types import ScalarType

__all__ = ["Row", "Scalar", "Traced", "Value", "scalars_of", "to_scalar", "to_value"]

MAX_ROW: Final = 512
"""Elements of a row that are written out one by one."""

_KIND_TEXT: Final = {
    ScalarType.BOOL: "truth value", ScalarType.INT: "integer", ScalarType.FLOAT: "number",
}  # fmt: skip


class Traced:
    """Operators and functions, for scalars and rows alike."""

    __slots__ = ("graph",)
    graph: Graph

    @property
    def kind_text(self) -> str:
        return "row"

    # ---- operators

    def __add__(self, other: Any) -> Any:
        return _apply("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return _apply("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return _apply("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _apply("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return _apply("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _apply("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _apply("true_divide", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _apply("true_divide", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _apply("floor_divide", other, self)

    def __mod__(self, other: Any) -> Any:
        return _apply("remainder", self, other)

    def __rmod__(self, other: Any) -> Any:
        return _apply("remainder", other, self)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __pow__(self, other: Any) -> Any:
        return _apply("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return _apply("pow", other, self)

    def __neg__(self) -> Any:
        return _apply("neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _apply("abs", self)

    def __floor__(self) -> Any:
        return _apply("floor", self)

    def __ceil__(self) -> Any:
        return _apply("ceil", self)

    def __trunc__(self) -> Any:
        return _apply("trunc", self)

    def __lt__(self, other: Any) -> Any:
        return _apply("lt", self, other)

    def __le__(self, other: Any) -> Any:
        return _apply("le", self, other)

    def __gt__(self, other: Any) -> Any:
        return _apply("gt", self, other)

    def __ge__(self, other: Any) -> Any:
        return _apply("ge", self, other)

    def __eq__(self, other: Any) -> Any:
        return _apply("eq", self, other)

    def __ne__(self, other: Any) -> Any:
        return _apply("ne", self, other)

    def __and__(self, other: Any) -> Any:
        return _apply("bitwise_and", self, other)

    def __rand__(self, other: Any) -> Any:
        return _apply("bitwise_and", other, self)

    def __or__(self, other: Any) -> Any:
        return _apply("bitwise_or", self, other)

    def __ror__(self, other: Any) -> Any:
        return _apply("bitwise_or", other, self)

    def __xor__(self, other: Any) -> Any:
        return _apply("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Any:
        return _apply("bitwise_xor", other, self)

    def __invert__(self) -> Any:
        return _apply("bitwise_not", self)

    def __lshift__(self, other: Any) -> Any:
        return _apply("bitwise_left_shift", self, other)

    def __rlshift__(self, other: Any) -> Any:
        return _apply("bitwise_left_shift", other, self)

    def __rshift__(self, other: Any) -> Any:
        return _apply("bitwise_right_shift", self, other)

    def __rrshift__(self, other: Any) -> Any:
        return _apply("bitwise_right_shift", other, self)

    __hash__ = object.__hash__

    # ---- what needs a value

    def __bool__(self) -> bool:
        advice = "use `&`, `|`, `~` and `torch.where`; `a <= x < b` is `(a <= x) & (x < b)`"
        raise self._decides(advice)

    def __index__(self) -> int:
        raise self._decides("only a captured tensor can be indexed by it: `tensor[index]`")

    def __int__(self) -> int:
        raise self._decides("`x.int()` stays traced")

    def __float__(self) -> float:
        raise self._decides("`x.float()` stays traced")

    def __round__(self, digits: int | None = None) -> Any:
        raise refuse("`round`", "the language rounds down only", "use `torch.floor(x + 0.5)`")

    def _decides(self, advice: str) -> AttnError:
        return AttnError(DecidesPython(running_place().span, self.kind_text, advice))

    # ---- PyTorch and NumPy

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call_library(function, args, kwargs or {})

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise refuse(f"`{function.__name__}.{method}`", "the language has no such function")
        return _call_library(function, args, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _call_library(function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """A method of PyTorch's tensors, where there is a function of its name."""
        from attngen.flex.functions import FUNCTIONS

        if name in FUNCTIONS:
            return partial(_apply, name, self)
        if name.startswith("_"):
            raise AttributeError(name)
        raise refuse(f"`.{name}`", f"a traced {self.kind_text} has nothing of this name")


def _apply(name: str, *arguments: Any, **options: Any) -> Any:
    from attngen.flex.functions import apply

    return apply(name, *arguments, **options)


def _call_library(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    from attngen.flex.functions import call_library

    return call_library(function, arguments, options)


@final
class Scalar(Traced):
    """One value: a node of the syntax tree and its type.

    `bits` are the only ones that an integer may have set, where that is known and it is not
    negative.  `parts` are integers whose `|` this is, where no sum can say it.
    """

    __slots__ = ("_node", "bits", "kind", "parts")

    def __init__(
        self,
        graph: Graph,
        node: ast.Expr | None,
        kind: ScalarType,
        bits: int | None = None,
        parts: tuple[Scalar, ...] = (),
    ) -> None:
        self.graph, self._node, self.kind = graph, node, kind
        self.bits, self.parts = bits, parts

    @property
    def node(self) -> ast.Expr:
        """Errors: A261 for a `|` of integers that may share bits."""
        if self._node is None:
            reason = "integers that may share bits; only an `&` with a number makes it a sum"
            raise refuse("this `|`", reason)
        return self._node

    @property
    def kind_text(self) -> str:
        return _KIND_TEXT[self.kind]

    @property
    def constant(self) -> bool | int | float | None:
        """The number that this is, if it is one."""
        match self._node:
            case ast.Literal(value):
                return value
            case ast.Unary("-", ast.Literal(value)):
                return -value
        return None

    @property
    def dtype(self) -> Any:
        torch = sys.modules.get("torch")
        names = {ScalarType.BOOL: "bool", ScalarType.INT: "int64", ScalarType.FLOAT: "float32"}
        return names[self.kind] if torch is None else getattr(torch, names[self.kind])

    @property
    def device(self) -> Any:
        return "cpu" if self.graph.device is None else self.graph.device

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    ndim = 0

    def dim(self) -> int:
        return 0

    def __len__(self) -> int:
        raise self._decides("it is one number, not a row")

    def __iter__(self) -> Iterator[Any]:
        raise self._decides("it is one number, not a row")

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis or (isinstance(index, tuple) and not index):
            return self
        if index is None:
            return Row(self.graph, (self,))
        raise refuse("an index behind a number", "it has no dimensions")


@final
class Row(Traced):
    """Several values, written out one by one; or an array of which some dimensions are fixed.

    `items` is None while the array has dimensions left, `slots` with an index for each that is
    fixed and None for the others.
    """

    __slots__ = ("_items", "captured", "slots")

    def __init__(
        self,
        graph: Graph,
        items: tuple[Scalar, ...] | None = None,
        captured: Captured | None = None,
        slots: tuple[Scalar | None, ...] = (),
    ) -> None:
        self.graph, self._items, self.captured, self.slots = graph, items, captured, slots

    @property
    def shape(self) -> tuple[int, ...]:
        if self.captured is None:
            return (len(self.items),)
        sizes = zip(self.captured.shape, self.slots, strict=True)
        return tuple(size for size, slot in sizes if slot is None)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def items(self) -> tuple[Scalar, ...]:
        """Errors: A261 for more than one dimension, or a very long one."""
        if self._items is None:
            shape = self.shape
            if len(shape) != 1:
                raise refuse("this read", f"{len(shape)} dimensions have no index")
            if shape[0] > MAX_ROW:
                reason = f"its {shape[0]} elements would be written out one by one"
                raise refuse("this row", reason, f"at most {MAX_ROW} are")
            self._items = tuple(self[i] for i in range(shape[0]))
        return self._items

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if self.captured is None:
            return self._item(index)
        free = [at for at, slot in enumerate(self.slots) if slot is None]
        slots = list(self.slots)
        for at, given in zip(free, _complete(index, len(free)), strict=False):
            if isinstance(given, slice):
                if given != slice(None):
                    raise refuse("this slice", "a part of a dimension is no index")
                continue
            slots[at] = _index(self.graph, given, self.captured.shape[at])
        return _read(self.graph, self.captured, tuple(slots))

    def _item(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.items[index]
        if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
            return self
        raise refuse("this index", "only a captured array can be indexed by a traced number")


Value: TypeAlias = Scalar | Row


def to_value(graph: Graph, value: Any) -> Value:
    """A number, array or traced value as a traced one.

    Errors:  A261 for anything else.
    """
    if isinstance(value, Scalar | Row):
        return value
    if isinstance(value, bool):
        return Scalar(graph, graph.literal(value), ScalarType.BOOL)
    if isinstance(value, int):
        bits = value if value >= 0 else None
        return Scalar(graph, graph.literal(value), ScalarType.INT, bits)
    if isinstance(value, float):
        return Scalar(graph, graph.literal(value), ScalarType.FLOAT)
    if is_array(value):
        captured = graph.capture(value)
        return _read(graph, captured, (None,) * len(captured.shape))
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy
        return to_value(graph, value.item())
    raise refuse(f"a value of type {type(value).__name__}", "only numbers and arrays can be")


def to_scalar(graph: Graph, value: Any) -> Scalar:
    """The same where one number is needed; a row of one element is one.

    Errors:  A261 also for a longer row.
    """
    found = to_value(graph, value)
    if isinstance(found, Scalar):
        return found
    if found.shape != (1,):
        raise refuse("a row", "one number is needed here")
    return found.items[0]


def scalars_of(values: Iterable[Any]) -> Iterator[Traced]:
    """The traced values in arguments, also inside of lists and tuples."""
    for value in values:
        if isinstance(value, Traced):
            yield value
        elif isinstance(value, list | tuple):
            yield from scalars_of(value)


def _read(graph: Graph, captured: Captured, slots: tuple[Scalar | None, ...]) -> Value:
    if any(slot is None for slot in slots):
        return Row(graph, captured=captured, slots=slots)
    indices = tuple(slot.node for slot in slots if slot is not None)
    node = graph.read(captured, indices or (graph.literal(0),))
    assert captured.element is not None
    return Scalar(graph, node, scalar_of(captured.element))


def _complete(index: Any, free: int) -> list[Any]:
    """An index for every free dimension: `...` and missing ones are whole dimensions."""
    given = list(index) if isinstance(index, tuple) else [index]
    if sum(each is Ellipsis for each in given) > 1 or any(each is None for each in given):
        raise refuse("this index", "it adds a dimension")
    at = next((i for i, each in enumerate(given) if each is Ellipsis), len(given))
    before, behind = given[:at], given[at + 1 :]
    missing = free - len(before) - len(behind)
    if missing < 0:
        raise refuse("this index", f"there are {free} dimensions, and {len(given)} indices")
    return [*before, *[slice(None)] * missing, *behind]


def _index(graph: Graph, given: Any, size: int) -> Scalar:
    if isinstance(given, list):
        raise refuse("this index", "a list picks several elements")
    value = to_value(graph, given)
    if not isinstance(value, Scalar):
        raise refuse("this index", "a row picks several elements", "index by one number")
    if value.kind is not ScalarType.INT:
        advice = "divide by `//`, or use `.int()`" if value.kind is ScalarType.FLOAT else None
        what = "float" if value.kind is ScalarType.FLOAT else value.kind_text
        raise refuse(f"an index that is a {what}", "only an integer picks an element", advice)
    constant = value.constant
    if constant is not None and constant < 0:  # counts from the end
        return Scalar(graph, graph.literal(int(constant) + size), ScalarType.INT)
    return value
