"""Turn what the LALR parser reduces into the syntax tree, bottom up and without recursion.

Lark calls the method that has the name of the rule as soon as the rule is complete.  An
expression travels together with its nesting depth, which is bounded here once, so that
every later pass may recurse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar, cast, final

from lark import Transformer, v_args

from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.span import Span
from attngen.frontend import ast
from attngen.frontend.ast import Expr
from attngen.frontend.errors import (
    ForeignSyntax,
    MalformedNumber,
    MissingValue,
    NumberTooLarge,
    TooDeep,
    WrongArguments,
    WrongDimension,
)
from attngen.frontend.tokens import Token
from attngen.record import record

__all__ = ["MAX_DEPTH", "Builder"]

MAX_DEPTH: Final = 150
"""Most nodes from the top of an expression down to a leaf.

Recursion takes three or four Python frames a node (`==` takes four), and Python stops at 1000.
"""

MAX_DIGITS: Final = 100
"""Longest number; Python itself refuses to read integers of 4300 digits."""

_CONSTANTS: Final[dict[str, bool | float]] = {
    "true": True,
    "false": False,
    "inf": math.inf,
    "nan": math.nan,
}
_PYTHON_CONSTANTS: Final = {"True": "true", "False": "false"}

T = TypeVar("T", bound=Expr | ast.Argument)


@final
@record
class Built(Generic[T]):
    """A finished piece of an expression; `span` includes parentheses, which leave no node."""

    node: T
    depth: int
    span: Span


BuiltExpr = Built[Expr]
BuiltArgument = Built[ast.Argument]


@v_args(inline=True)
class Builder(Transformer[Token, ast.File]):
    """One method per rule of `grammar/attn.lark`, in the same order.  Has no state."""

    # ---- a file

    def file(self, *items: ast.TopLevel) -> ast.File:
        source = items[0].span.source
        return ast.File(items, source.span(0, len(source.text)))

    def import_(self, keyword: Token, path: Token) -> ast.Import:
        return ast.Import(path.text[1:-1], _cover(keyword, path))

    def definition(
        self,
        keyword: Token,
        name: Token,
        parameters: tuple[ast.Parameter, ...] | None,
        type_: Token,
        body: BuiltExpr,
    ) -> ast.Definition:
        return ast.Definition(
            name.text, parameters or (), type_.text, body.node, _cover(keyword, body), name.span
        )

    def attention(
        self, keyword: Token, name: Token, *statements: ast.Statement | Token
    ) -> ast.Attention:
        *body, closing = statements
        return ast.Attention(
            name.text,
            tuple(cast("list[ast.Statement]", body)),
            _cover(keyword, closing),
            name.span,
        )

    def schedule(
        self, keyword: Token, target: Token | None, *settings: ast.Setting | Token
    ) -> ast.Schedule:
        *body, closing = settings
        return ast.Schedule(
            target.text if target else None,
            tuple(cast("list[ast.Setting]", body)),
            _cover(keyword, closing),
        )

    def parameters(self, *parameters: ast.Parameter) -> tuple[ast.Parameter, ...]:
        return parameters

    def parameter(self, name: Token, type_: Token, default: BuiltExpr | None) -> ast.Parameter:
        return ast.Parameter(name.text, type_.text, _node(default), _cover(name, type_, default))

    def setting(self, key: Token, arguments: list[BuiltArgument] | None = None) -> ast.Setting:
        arguments = arguments or []
        return ast.Setting(
            key.text, tuple(a.node for a in arguments), _cover(key, *arguments), key.span
        )

    # ---- the statements of an attention block

    def dtype(self, keyword: Token, dtype: Token) -> ast.Dtype:
        return ast.Dtype(dtype.text, _cover(keyword, dtype))

    def head_dim(self, keyword: Token, arguments: list[BuiltArgument]) -> ast.HeadDim:
        span = _cover(keyword, *arguments)
        if len(arguments) == 1 and arguments[0].node.name is None:
            both = arguments[0].node.value
            return ast.HeadDim(both, both, span)
        values = _by_name(keyword, arguments, "one value, or `qk = …, v = …`", ("qk", "v"))
        return ast.HeadDim(values["qk"], values["v"], span)

    def heads(self, keyword: Token, arguments: list[BuiltArgument]) -> ast.Heads:
        values = _by_name(keyword, arguments, "`q = …, kv = …`", ("q", "kv"))
        return ast.Heads(values["q"], values["kv"], _cover(keyword, *arguments))

    def const(
        self, keyword: Token, name: Token, type_: Token | None, value: BuiltExpr | None
    ) -> ast.Const:
        span = _cover(keyword, name, type_, value)
        if type_ is None and value is None:
            raise AttnError(MissingValue(name.span, name.text))
        return ast.Const(name.text, type_.text if type_ else None, _node(value), span, name.span)

    def param(
        self,
        keyword: Token,
        name: Token,
        type_: Token,
        default: BuiltExpr | None,
        range_: BuiltExpr | None,
    ) -> ast.Param:
        span = _cover(keyword, type_, default, range_)
        return ast.Param(name.text, type_.text, _node(default), _node(range_), span, name.span)

    def tensor(
        self, keyword: Token, name: Token, dtype: Token, *dims: ast.Dim | Token
    ) -> ast.Tensor:
        *shape, closing = dims
        return ast.Tensor(
            name.text,
            dtype.text,
            tuple(cast("list[ast.Dim]", shape)),
            _cover(keyword, closing),
            name.span,
        )

    def dim(self, size: Token, optional: Token | None) -> ast.Dim:
        value = size.text if size.type == "NAME" else _read_number(size)
        if isinstance(value, float):
            raise AttnError(WrongDimension(size.span, size.text))
        return ast.Dim(value, optional is not None, _cover(size, optional))

    def length(self, keyword: Token, arguments: list[BuiltArgument]) -> ast.Length:
        takes = "`q = …`, `kv = …` or both"
        values = _by_name(keyword, arguments, takes, ("q", "kv"), all_needed=False)
        return ast.Length(values.get("q"), values.get("kv"), _cover(keyword, *arguments))

    def let(self, keyword: Token, name: Token, value: BuiltExpr) -> ast.Let:
        return ast.Let(name.text, value.node, _cover(keyword, value), name.span)

    def scale(self, keyword: Token, value: BuiltExpr) -> ast.Scale:
        return ast.Scale(value.node, _cover(keyword, value))

    def score(self, keyword: Token, value: BuiltExpr) -> ast.Score:
        return ast.Score(value.node, _cover(keyword, value))

    def mask(self, keyword: Token, value: BuiltExpr) -> ast.Mask:
        return ast.Mask(value.node, _cover(keyword, value))

    def weights(
        self,
        keyword: Token,
        kind: Token,
        arguments: list[BuiltArgument] | None,
        closing: Token | None,
    ) -> ast.Weights:
        takes = "`softmax`, `softmax(sink = …)` or `sigmoid`"
        values = _by_name(keyword, arguments or [], takes, ("sink",), all_needed=False)
        return ast.Weights(kind.text, values.get("sink"), _cover(keyword, kind, closing))

    def output(self, keyword: Token, *names: Token) -> ast.Output:
        return ast.Output(tuple(name.text for name in names), _cover(keyword, names[-1]))

    # ---- expressions

    def or_expr(self, *operands: BuiltExpr) -> BuiltExpr:
        return self._flat("or", operands)

    def and_expr(self, *operands: BuiltExpr) -> BuiltExpr:
        return self._flat("and", operands)

    def comparison(self, *parts: BuiltExpr | Token) -> BuiltExpr:
        operands = [part for part in parts if isinstance(part, Built)]
        ops = tuple(part.text for part in parts if isinstance(part, Token))
        span = _cover(*operands)
        nodes = tuple(operand.node for operand in operands)
        return _nest(ast.Comparison(ops, nodes, span), span, operands)

    def binary(self, left: BuiltExpr, op: Token, right: BuiltExpr) -> BuiltExpr:
        span = _cover(left, right)
        return _nest(ast.Binary(op.text, left.node, right.node, span), span, (left, right))

    def unary(self, op: Token, operand: BuiltExpr) -> BuiltExpr:
        span = _cover(op, operand)
        return _nest(ast.Unary(op.text, operand.node, span), span, (operand,))

    def number(self, token: Token) -> BuiltExpr:
        return _leaf(ast.Literal(_read_number(token), token.text, token.span))

    def constant(self, token: Token) -> BuiltExpr:
        return _leaf(ast.Literal(_CONSTANTS[token.text], token.text, token.span))

    def name(self, token: Token) -> BuiltExpr:
        if instead := _PYTHON_CONSTANTS.get(token.text):
            raise AttnError(ForeignSyntax(token.span, token.text, f"write `{instead}`"))
        return _leaf(ast.Name(token.text, token.span))

    def index(self, tensor: Token, *rest: BuiltExpr | Token) -> BuiltExpr:
        indices = [part for part in rest if isinstance(part, Built)]
        span = _cover(tensor, rest[-1])
        nodes = tuple(index.node for index in indices)
        return _nest(ast.Index(tensor.text, nodes, span, tensor.span), span, indices)

    def call(self, name: Token, *rest: list[BuiltArgument] | Token) -> BuiltExpr:
        *arguments, closing = rest
        (built,) = cast("list[list[BuiltArgument]]", arguments) or ([],)
        span = _cover(name, cast(Token, closing))
        nodes = tuple(argument.node for argument in built)
        return _nest(ast.Call(name.text, nodes, span, name.span), span, built)

    def parentheses(self, opening: Token, inner: BuiltExpr, closing: Token) -> BuiltExpr:
        return Built(inner.node, inner.depth, _cover(opening, closing))

    def arguments(self, *arguments: BuiltArgument) -> list[BuiltArgument]:
        return list(arguments)

    def argument(self, name: Token | None, value: BuiltExpr) -> BuiltArgument:
        span = _cover(name or value, value)
        node = ast.Argument(name.text if name else None, value.node, span)
        return Built(node, _deeper(span, [value]), span)

    def _flat(self, op: str, operands: tuple[BuiltExpr, ...]) -> BuiltExpr:
        span = _cover(*operands)
        nodes = tuple(operand.node for operand in operands)
        return _nest(ast.BoolOp(op, nodes, span), span, operands)


def _leaf(node: ast.Literal | ast.Name) -> BuiltExpr:
    return Built(node, 1, node.span)


def _nest(node: Expr, span: Span, inner: Sequence[Built[T]]) -> BuiltExpr:
    return Built(node, _deeper(span, inner), span)


def _deeper(span: Span, inner: Sequence[Built[T]]) -> int:
    """The depth of a node around `inner`."""
    depth = 1 + max((part.depth for part in inner), default=0)
    if depth > MAX_DEPTH:
        raise AttnError(TooDeep(span, MAX_DEPTH))
    return depth


def _node(built: BuiltExpr | None) -> Expr | None:
    return None if built is None else built.node


class _Spanned(Protocol):
    @property
    def span(self) -> Span: ...


def _cover(*parts: _Spanned | None) -> Span:
    """From the start of the first part to the end of the last one that is there."""
    spans = [part.span for part in parts if part is not None]
    return spans[0].to(spans[-1])


def _read_number(token: Token) -> int | float:
    text = token.text
    if len(text) > MAX_DIGITS:
        raise AttnError(NumberTooLarge(token.span))
    if re.fullmatch("[0-9]+", text):
        if text[0] == "0" and text != "0":
            raise AttnError(MalformedNumber(token.span, text))
        return int(text)
    value = float(text)
    if math.isinf(value):
        raise AttnError(NumberTooLarge(token.span))
    return value


def _by_name(
    keyword: Token,
    arguments: list[BuiltArgument],
    takes: str,
    names: tuple[str, ...],
    *,
    all_needed: bool = True,
) -> dict[str, Expr]:
    """The arguments of a statement that takes named ones only."""

    def wrong(span: Span, problem: str) -> AttnError:
        return AttnError(WrongArguments(span, keyword.text, takes, problem))

    values: dict[str, Expr] = {}
    for argument in arguments:
        name = argument.node.name
        if name is None:
            raise wrong(argument.span, "this value has no name")
        if name not in names:
            raise wrong(argument.span, f"there is no `{name}`")
        if name in values:
            raise wrong(argument.span, f"`{name}` is given twice")
        values[name] = argument.node.value
    if all_needed and len(values) < len(names):
        missing = next(name for name in names if name not in values)
        raise wrong(_cover(keyword, *arguments), f"`{missing}` is missing")
    return values
