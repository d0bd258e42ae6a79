"""The canonical text of expressions, attention variants and programs.

The same value always gives the same text, and two expressions with the same text mean the
same; digests are taken of it.  It reads like the language, with two differences: `float(x)`
shows where an integer becomes a float, and every shared subexpression has a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from enum import Enum
from typing import Final, assert_never

import numpy as np

from attngen.ir.attention import Attention, Bound, Param, Tensor
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    LogicalOp,
    Negate,
    Not,
    Select,
    Symbol,
    ToFloat,
)
from attngen.ir.program import CeilDiv, Dim, Launch, Loop, Node, Program, Step
from attngen.ir.schedule import ORDER_FIELDS, Schedule
from attngen.ir.traverse import children, postorder

__all__ = ["print_attention", "print_expr", "print_number", "print_program"]

_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _SIGN, _ATOM = range(8)
"""How tightly a piece of text holds together; an operand that holds less gets parentheses."""

_BINARY: Final[dict[BinaryOp, int]] = {
    BinaryOp.ADD: _SUM,
    BinaryOp.SUB: _SUM,
    BinaryOp.MUL: _PRODUCT,
    BinaryOp.DIV: _PRODUCT,
    BinaryOp.FLOORDIV: _PRODUCT,
    BinaryOp.MOD: _PRODUCT,
}

_MAX_REPEATED: Final = 8
"""A shared node of more operations than this gets a name, so that no text grows exponentially."""

_Text = tuple[str, int]


def print_expr(e: Expr) -> str:
    """One expression; `let` lines come first where it shares subexpressions."""
    writer = _Writer((e,))
    last = writer.text(e)
    return "\n".join([*(f"let {name} = {value}" for name, value in writer.take_lets()), last])


def print_attention(attention: Attention) -> str:
    """An attention variant, without its spans and its source."""
    return "\n".join(
        [
            f"attention {attention.name} {{",
            *(f"    {key:<9} {text}" for key, text in _statements(attention)),
            "}\n",
        ]
    )


def print_program(program: Program) -> str:
    """Launches in order: facts, workspaces and the loop nest."""
    lines = [f"program {program.attention.name}", f"    schedule  {_schedule(program.schedule)}"]
    for launch in program.launches:
        lines += ["", *_launch(launch)]
    return "\n".join(lines) + "\n"


def print_number(value: bool | int | float) -> str:
    """A constant.  A float is the shortest decimal that rounds to the same float32."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    with np.errstate(over="ignore"):
        return str(np.float32(value))


# ---- expressions -------------------------------------------------------------------------


class _Writer:
    """Prints expressions that share nodes; every shared node is named once."""

    def __init__(self, roots: Iterable[Expr]) -> None:
        nodes = list(postorder(*roots))
        self._names: dict[int, str] = {}
        self._texts: dict[int, _Text] = {}
        self._new_lets: list[tuple[str, str]] = []
        self._name_shared(nodes)

    def _name_shared(self, nodes: list[Expr]) -> None:
        uses: dict[int, int] = {}
        for node in nodes:
            for child in children(node):
                uses[id(child)] = uses.get(id(child), 0) + 1
        taken = {node.name for node in nodes if isinstance(node, Symbol)}
        taken |= {node.tensor for node in nodes if isinstance(node, Load)}
        length: dict[int, int] = {}  # of the text, counted in operations
        for node in nodes:
            length[id(node)] = 1 + sum(length[id(child)] for child in children(node))
            name = node.name if isinstance(node, Let) else "shared"
            repeats = uses.get(id(node), 0) > 1 and length[id(node)] > _MAX_REPEATED
            if not isinstance(node, Let) and not repeats:
                continue
            self._names[id(node)] = _unused_name(name, taken)
            length[id(node)] = 1

    def text(self, root: Expr) -> str:
        """The text of one expression; lets that it is first to need are left in `take_lets`."""
        for node in postorder(root):
            if id(node) in self._texts:
                continue
            text = self._node(node)
            name = self._names.get(id(node))
            if name is not None:
                self._new_lets.append((name, text[0]))
                text = (name, _ATOM)
            self._texts[id(node)] = text
        return self._texts[id(root)][0]

    def take_lets(self) -> list[tuple[str, str]]:
        """Names and values of the lets that came up since the last call, in order of need."""
        lets, self._new_lets = self._new_lets, []
        return lets

    def _node(self, node: Expr) -> _Text:
        match node:
            case Const(value):
                text = print_number(value)
                return text, _SIGN if text.startswith("-") else _ATOM
            case Symbol(name):
                return name, _ATOM
            case Load(tensor, indices):
                return f"{tensor}[{self._list(indices)}]", _ATOM
            case Negate(operand):
                return "-" + self._operand(operand, _ATOM), _SIGN
            case Not(operand):
                return "not " + self._operand(operand, _NOT), _NOT
            case Binary(op, left, right):
                level = _BINARY[op]
                sides = self._operand(left, level), self._operand(right, level + 1)
                return f"{sides[0]} {op.value} {sides[1]}", level
            case Compare(op, left, right):
                sides = self._operand(left, _SUM), self._operand(right, _SUM)
                return f"{sides[0]} {op.value} {sides[1]}", _COMPARE
            case Logical(op, operands):
                level = _AND if op is LogicalOp.AND else _OR
                texts = (self._operand(operand, level + 1) for operand in operands)
                return f" {op.value} ".join(texts), level
            case Select(condition, then, otherwise):
                return f"where({self._list((condition, then, otherwise))})", _ATOM
            case ToFloat(operand):
                return f"float({self._list((operand,))})", _ATOM
            case Call(function, arguments):
                return f"{function}({self._list(arguments)})", _ATOM
            case Let(_, value):
                return self._texts[id(value)]
            case _:
                assert_never(node)

    def _operand(self, node: Expr, level: int) -> str:
        text, holds = self._texts[id(node)]
        return text if holds >= level else f"({text})"

    def _list(self, nodes: tuple[Expr, ...]) -> str:
        return ", ".join(self._texts[id(node)][0] for node in nodes)


def _unused_name(name: str, taken: set[str]) -> str:
    """`name`, or with the first number that makes it new; it is taken from then on."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}.{number}"
    taken.add(candidate)
    return candidate


# ---- attention ---------------------------------------------------------------------------


def _statements(a: Attention) -> Iterator[tuple[str, str]]:
    """Keyword and text of every line."""
    if a.dtype is not None:
        yield "dtype", a.dtype.name
    if a.head_dim_qk is not None or a.head_dim_v is not None:
        yield "head_dim", _pairs(("qk", a.head_dim_qk), ("v", a.head_dim_v))
    if a.heads_q is not None or a.heads_kv is not None:
        yield "heads", _pairs(("q", a.heads_q), ("kv", a.heads_kv))
    for param in a.params:
        yield "param", _param(param)
    for tensor in a.tensors:
        yield "tensor", _tensor(tensor)

    writer = _Writer(a.expressions())
    formulas: list[tuple[str, str, Expr | None]] = [
        ("length", "q = ", a.length_q),
        ("length", "kv = ", a.length_kv),
        ("scale", "", a.scale),
        *(("score", "", score) for score in a.scores),
        ("mask", "", a.mask),
        ("sink", "", a.sink),
    ]
    for key, start, e in formulas:
        if e is not None:
            text = writer.text(e)
            yield from (("let", f"{name} = {value}") for name, value in writer.take_lets())
            yield key, start + text
    yield "weights", a.row_state.name
    yield "output", ", ".join(a.outputs)


def _pairs(*pairs: tuple[str, int | None]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in pairs if value is not None)


def _param(p: Param) -> str:
    default = "" if p.default is None else f" = {print_number(p.default)}"
    bound = _bound(p.name, p.bound)
    return f"{p.name} : {p.type.value}{default}" + (f" where {bound}" if bound else "")


def _bound(name: str, bound: Bound) -> str:
    low = high = ""
    if bound.low is not None:
        low = f"{print_number(bound.low)} {'<' if bound.low_open else '<='} "
    if bound.high is not None:
        high = f" {'<' if bound.high_open else '<='} {print_number(bound.high)}"
    return f"{low}{name}{high}" if low or high else ""


def _tensor(t: Tensor) -> str:
    dims = ", ".join(f"{dim.size}{'?' if dim.optional else ''}" for dim in t.dims)
    return f"{t.name} : {t.element.name}[{dims}]"


# ---- programs ----------------------------------------------------------------------------


def _schedule(schedule: Schedule) -> str:
    """`loop q, kv; passes fused; …`: the fields in order, `auto` for what is open.

    The order inside a step is shown where it is given.
    """
    parts: list[str] = []
    for field in fields(schedule):
        value = getattr(schedule, field.name)
        if value is None and field.name in ORDER_FIELDS:
            continue
        text = "auto" if value is None else value.value if isinstance(value, Enum) else value
        parts.append(f"{field.name} {text}")
    return "; ".join(parts)


def _launch(launch: Launch) -> Iterator[str]:
    tiles = launch.tiles
    yield f"launch {launch.kernel}"
    yield f"    family    {launch.family}"
    if launch.when:
        yield f"    when      {' and '.join(f'{c.size} > {c.number}' for c in launch.when)}"
    yield f"    tile      q = {tiles.tile_q}, kv = {tiles.tile_kv}"
    most = ", at most one for each multiprocessor" if launch.is_persistent else ""
    if launch.spread:
        most += f" unless {' and '.join(f'{c.size} > {c.number}' for c in launch.spread)}"
    yield f"    grid      {' * '.join(map(_dim, launch.grid))}{most}"
    if launch.hands_out_tiles:
        yield "    tiles     handed out as blocks ask for them"
    yield f"    threads   {launch.threads}"
    yield f"    shared    {launch.shared_bytes} bytes"
    for w in launch.workspaces:
        yield f"    workspace {w.name} : {w.element}[{', '.join(map(_dim, w.dims))}]"
    yield from _nest(tiles.body, "    ")


def _dim(dim: Dim) -> str:
    return f"ceil_div({dim.size}, {dim.by})" if isinstance(dim, CeilDiv) else str(dim)


def _nest(nodes: tuple[Node, ...], indent: str) -> Iterator[str]:
    for node in nodes:
        match node:
            case Step(op):
                yield indent + op.value
            case Loop(axis, parallel, body):
                yield f"{indent}{'parallel ' if parallel else ''}for {axis.value}"
                yield from _nest(body, indent + "    ")
            case _:
                assert_never(node)
