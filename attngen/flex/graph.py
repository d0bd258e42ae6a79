"""The expressions of one trace, as nodes of the syntax tree in which equal ones are one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from attngen.diagnostics.diagnostic import AttnError
from attngen.flex.captured import Captured, element_of, is_array, read_shape
from attngen.flex.errors import NotExpressible, UnreadableCapture
from attngen.flex.places import running_place
from attngen.frontend import ast
from attngen.ir.printer import print_number

__all__ = ["Graph", "refuse"]

Key = tuple[Any, ...]


def refuse(what: str, reason: str, advice: str | None = None) -> AttnError:
    """The error for an operation that has no words in the language, at its Python line."""
    return AttnError(NotExpressible(running_place().span, what, reason, advice))


@final
class Graph:
    """Nodes, captured tensors and every read of one: what tracing collects.

    `device` is the one that `score.device` says; None for the CPU.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.is_computed = False
        """Whether a function computed with tensors, not with what is traced."""
        self.captured: list[Captured] = []
        self.reads: list[ast.Index] = []
        self.names: dict[int, str] = {}
        """What a captured array is called, by its id."""
        self.variables: dict[int, str] = {}
        """The Python variable that a node was stored in, by its id."""
        self._nodes: dict[Key, ast.Expr] = {}
        self._by_id: dict[int, Captured] = {}

    # ---- nodes

    def literal(self, value: bool | int | float) -> ast.Expr:
        """A number or truth value; a float as the shortest text of its float32."""
        if not isinstance(value, bool) and print_number(value).startswith("-"):
            return self.unary("-", self.literal(-value))
        text = print_number(value)
        return self._node(("literal", text), lambda span: ast.Literal(value, text, span))

    def unary(self, op: str, operand: ast.Expr) -> ast.Expr:
        return self._node(("unary", op, id(operand)), lambda span: ast.Unary(op, operand, span))

    def binary(self, op: str, left: ast.Expr, right: ast.Expr) -> ast.Expr:
        key = ("binary", op, id(left), id(right))
        return self._node(key, lambda span: ast.Binary(op, left, right, span))

    def compare(self, op: str, left: ast.Expr, right: ast.Expr) -> ast.Expr:
        key = ("compare", op, id(left), id(right))
        return self._node(key, lambda span: ast.Comparison((op,), (left, right), span))

    def logical(self, op: str, left: ast.Expr, right: ast.Expr) -> ast.Expr:
        key = ("logical", op, id(left), id(right))
        return self._node(key, lambda span: ast.BoolOp(op, (left, right), span))

    def call(self, function: str, *arguments: ast.Expr) -> ast.Expr:
        key = ("call", function, *map(id, arguments))

        def make(span: Any) -> ast.Expr:
            given = tuple(ast.Argument(None, each, each.span) for each in arguments)
            return ast.Call(function, given, span, span)

        return self._node(key, make)

    def read(self, captured: Captured, indices: tuple[ast.Expr, ...]) -> ast.Expr:
        """`captured[indices]`, one index for every dimension.

        Errors:  A265 elements that no kernel reads.
        """
        if captured.element is None:
            dtype = str(captured.array.dtype)
            advice = "pass a float32 copy of it" if "float64" in dtype else None
            reason = f"its elements are {dtype}"
            error = UnreadableCapture(running_place().span, captured.name, reason, advice)
            raise AttnError(error)
        key = ("read", captured.name, *map(id, indices))
        known = self._nodes.get(key)
        if known is not None:
            return known
        node = self._node(key, lambda span: ast.Index(captured.name, indices, span, span))
        assert isinstance(node, ast.Index)
        self.reads.append(node)
        return node

    def _node(self, key: Key, make: Callable[[Any], ast.Expr]) -> ast.Expr:
        found = self._nodes.get(key)
        place = running_place()
        if found is None:
            found = self._nodes[key] = make(place.span)
        if place.variable is not None:
            self.variables.setdefault(id(found), place.variable)
        return found

    # ---- captured arrays

    def capture(self, array: Any) -> Captured:
        """What is known of an array that the function has; the same one is captured once."""
        found = self._by_id.get(id(array))
        if found is None:
            assert is_array(array)
            name = self._free_name(self.names.get(id(array), "captured"))
            found = Captured(name, element_of(array), read_shape(array), array)
            self.captured.append(found)
            self._by_id[id(array)] = found
        return found

    def _free_name(self, wanted: str) -> str:
        taken = {each.name for each in self.captured}
        number, name = 1, wanted
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        return name
