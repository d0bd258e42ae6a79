"""Numbers of Python that change from call to call become params.

A number is written into the text when a function is traced for the first time: the compiler
knows most about a constant.  When the same text comes again with another number at some place,
that place is a param from then on.  So a number that changes costs one more compilation, and
never a third.

    mask  q - kv <= 128      then      mask  q - kv <= 256      gives      param n1 : int
                                                                           mask  q - kv <= n1
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, final

from attngen.diagnostics.span import Span
from attngen.flex.write import rebuild
from attngen.frontend import ast
from attngen.frontend.format import format_file
from attngen.record import record

__all__ = ["NumbersSeen", "Settled"]

Number: TypeAlias = int | float


@final
@record(eq=False)
class Settled:
    """A file in which the numbers that change are params, and their values in this call."""

    file: ast.File
    params: dict[str, Number]


@final
class NumbersSeen:
    """The numbers of every text so far.  Threads may share it."""

    def __init__(self) -> None:
        self._first: dict[str, list[Number]] = {}
        self._changed: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def settle(self, file: ast.File) -> Settled:
        numbers: list[Number] = []

        def blank(literal: ast.Literal) -> ast.Expr:
            numbers.append(literal.value)
            text = "0" if isinstance(literal.value, int) else "0.0"
            return replace(literal, text=text)

        pattern = format_file(_with_numbers(file, blank), width=None)
        with self._lock:
            first = self._first.setdefault(pattern, numbers)
            changed = self._changed.setdefault(pattern, set())
            changed |= {i for i, (a, b) in enumerate(zip(first, numbers, strict=True)) if a != b}
            places = sorted(changed)
        if not places:
            return Settled(file, {})
        return _with_params(file, numbers, places)


def _with_params(file: ast.File, numbers: list[Number], places: list[int]) -> Settled:
    names = _new_names(file, len(places))
    by_place = dict(zip(places, names, strict=True))
    at = iter(range(len(numbers)))

    def name(literal: ast.Literal) -> ast.Expr:
        place = next(at)
        return ast.Name(by_place[place], literal.span) if place in by_place else literal

    changed = _with_numbers(file, name)
    *definitions, block = changed.items
    assert isinstance(block, ast.Attention)
    params = tuple(_param(by_place[i], numbers[i], block.span) for i in places)
    block = replace(block, statements=(*params, *block.statements))
    values = {by_place[i]: numbers[i] for i in places}
    return Settled(replace(changed, items=(*definitions, block)), values)


def _param(name: str, value: Number, span: Span) -> ast.Param:
    kind = "int" if isinstance(value, int) else "float"
    return ast.Param(name, kind, None, None, span, span)


def _new_names(file: ast.File, count: int) -> list[str]:
    block = file.items[-1]
    assert isinstance(block, ast.Attention)
    named = [s for s in block.statements if isinstance(s, ast.Tensor | ast.Let | ast.Param)]
    taken = {s.name for s in named}
    taken |= {str(dim.size) for s in named if isinstance(s, ast.Tensor) for dim in s.dims}
    candidates = (f"n{i}" for i in range(1, count + len(taken) + 1))
    return [name for name in candidates if name not in taken][:count]


def _with_numbers(file: ast.File, change: Callable[[ast.Literal], ast.Expr]) -> ast.File:
    """The file with every number that may be a param replaced, in the order of the text."""
    *definitions, block = file.items
    assert isinstance(block, ast.Attention)
    statements = tuple(
        replace(s, value=_changed(s.value, change))
        if isinstance(s, ast.Let | ast.Score | ast.Mask)
        else s
        for s in block.statements
    )
    return replace(file, items=(*definitions, replace(block, statements=statements)))


def _changed(root: ast.Expr, change: Callable[[ast.Literal], ast.Expr]) -> ast.Expr:
    def operands(node: ast.Expr, parts: list[ast.Expr]) -> list[ast.Expr]:
        return [
            change(e) if isinstance(e, ast.Literal) and _may_change(node, e) else e for e in parts
        ]

    if isinstance(root, ast.Literal):
        return change(root) if _is_number(root) else root
    return rebuild(root, operands)


def _may_change(parent: ast.Expr, literal: ast.Literal) -> bool:
    """Exponents and bare indices are known at compile time."""
    is_exponent = isinstance(parent, ast.Binary) and parent.op == "**" and literal is parent.right
    return _is_number(literal) and not is_exponent and not isinstance(parent, ast.Index)


def _is_number(literal: ast.Literal) -> bool:
    return not isinstance(literal.value, bool) and abs(literal.value) < float("inf")
