"""The one canonical form of a `.attn` file: `parse(format_file(x)) == x`, comments included.

    keyword padded to 10 columns, then the rest      one blank line at most, none at a `{`
    comments behind statements in one column         no parentheses that change nothing
    a line of more than 96 columns is broken inside of brackets, operators first:

        mask      (
            window(left = W - 1, right = 0)
            and doc[b, qpos] == doc[b, kv]
        )

Long lines are laid out as by Wadler ("A prettier printer", 2003): a group stays on one line
if it fits, else all of its own line breaks are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias, assert_never, final

from attngen.frontend.ast import (
    Argument,
    Attention,
    Binary,
    BoolOp,
    Call,
    Comments,
    Comparison,
    Const,
    Definition,
    Dim,
    Dtype,
    Expr,
    File,
    HeadDim,
    Heads,
    Import,
    Index,
    Length,
    Let,
    Literal,
    Mask,
    Name,
    Output,
    Param,
    Parameter,
    Scale,
    Schedule,
    Score,
    Setting,
    Statement,
    Tensor,
    TopLevel,
    Unary,
    Weights,
)
from attngen.record import record

__all__ = ["format_expr", "format_file"]

WIDTH: Final = 96
INDENT: Final = 4
KEYWORD: Final = 10
"""Columns of a statement's first word, with the blanks behind it."""


def format_file(file: File, *, width: int | None = WIDTH) -> str:
    """The canonical text; without a width it takes a line for each statement, and less time."""
    lines: list[str] = []
    for i, item in enumerate(file.items):
        if i and _blank_between(file.items[i - 1], item):
            lines.append("")
        lines += item.comments.above
        lines += _item(item, width)
    lines += file.closing
    return "\n".join(lines) + "\n"


def format_expr(expr: Expr) -> str:
    """An expression on one line, with no more parentheses than it needs."""
    return _lay_out(_expr(expr), 0, width=None)


# ---- lines -------------------------------------------------------------------------------


def _blank_between(above: TopLevel, below: TopLevel) -> bool:
    if type(above) is type(below) and isinstance(below, Import | Definition):
        return below.comments.blank_before
    return True


def _item(item: TopLevel, width: int | None) -> list[str]:
    match item:
        case Import():
            return [_with_comment(f'import "{item.path}"', item.comments)]
        case Definition():
            return [_with_comment(_lay_out(_definition(item), 0, width), item.comments)]
        case Attention():
            return _block(f"attention {item.name} {{", item, item.statements, width)
        case Schedule():
            target = f" {item.target}" if item.target else ""
            return _block(f"schedule{target} {{", item, item.settings, width)
        case _:
            assert_never(item)


def _block(
    header: str,
    block: Attention | Schedule,
    body: Sequence[Statement | Setting],
    width: int | None,
) -> list[str]:
    lines = [_with_comment(header, block.comments)]
    paragraph: list[tuple[str, str | None]] = []
    for i, line in enumerate(body):
        comments = line.comments
        blank = comments.blank_before and i > 0
        if blank or comments.above:
            lines += _aligned(paragraph)
            paragraph = []
            lines += [""] * blank + _indented(comments.above)
        paragraph.append((_lay_out(_statement(line), INDENT, width), comments.behind))
    lines += _aligned(paragraph)
    return [*lines, *_indented(block.closing), "}"]


def _aligned(paragraph: list[tuple[str, str | None]]) -> list[str]:
    """Statements without a gap between them: their comments stand in one column."""
    commented = [len(text) for text, comment in paragraph if comment and "\n" not in text]
    column = max(commented, default=0)
    return [f"{text:<{column}}  {comment}" if comment else text for text, comment in paragraph]


def _with_comment(text: str, comments: Comments) -> str:
    return f"{text}  {comments.behind}" if comments.behind else text


def _indented(lines: Iterable[str]) -> list[str]:
    return [" " * INDENT + line if line else "" for line in lines]


# ---- statements --------------------------------------------------------------------------


def _definition(definition: Definition) -> Doc:
    parameters: Doc = ""
    if definition.parameters:
        parameters = _bracket("(", [_parameter(p) for p in definition.parameters], ")")
    head = (f"define {definition.name}", parameters, f" : {definition.type} = ")
    return (*head, _value(definition.body))


def _parameter(parameter: Parameter) -> Doc:
    head = f"{parameter.name} : {parameter.type}"
    return head if parameter.default is None else (f"{head} = ", _expr(parameter.default))


def _statement(line: Statement | Setting) -> Doc:
    keyword, rest = _keyword_and_rest(line)
    if rest == "":
        return " " * INDENT + keyword
    return (" " * INDENT + keyword.ljust(KEYWORD - 1) + " ", rest)


def _keyword_and_rest(line: Statement | Setting) -> tuple[str, Doc]:
    match line:
        case Setting():
            return line.key, _join([_argument(a, _value) for a in line.arguments])
        case Dtype():
            return "dtype", line.dtype
        case HeadDim():
            if line.qk == line.v:
                return "head_dim", _value(line.qk)
            return "head_dim", _named(qk=line.qk, v=line.v)
        case Heads():
            return "heads", _named(q=line.q, kv=line.kv)
        case Const():
            type_ = f" : {line.type}" if line.type else ""
            return "const", (line.name + type_, *_optional(" = ", line.value))
        case Param():
            default, range_ = _optional(" = ", line.default), _optional(" where ", line.range)
            return "param", (f"{line.name} : {line.type}", *default, *range_)
        case Tensor():
            dims: list[Doc] = [_dim(dim) for dim in line.dims]
            return "tensor", (f"{line.name} : {line.dtype}", _bracket("[", dims, "]"))
        case Length():
            return "length", _named(q=line.q, kv=line.kv)
        case Let():
            return "let", (f"{line.name} = ", _value(line.value))
        case Scale():
            return "scale", _value(line.value)
        case Score():
            return "score", _value(line.value)
        case Mask():
            return "mask", _value(line.value)
        case Weights():
            if line.sink is None:
                return "weights", line.kind
            return "weights", (line.kind, _bracket("(", [("sink = ", _expr(line.sink))], ")"))
        case Output():
            return "output", ", ".join(line.names)
        case _:
            assert_never(line)


def _dim(dim: Dim) -> str:
    return f"{dim.size}?" if dim.optional else str(dim.size)


def _named(**values: Expr | None) -> Doc:
    given = [(f"{name} = ", _value(value)) for name, value in values.items() if value]
    return _join(given)


def _optional(sign: str, value: Expr | None) -> tuple[Doc, ...]:
    return () if value is None else (sign, _value(value))


def _join(docs: Iterable[Doc]) -> Doc:
    joined: list[Doc] = []
    for doc in docs:
        joined += [", ", doc] if joined else [doc]
    return tuple(joined) or ""


def _value(expr: Expr) -> Doc:
    """An expression outside of brackets: it gets some where it does not fit on the line."""
    if isinstance(expr, Call | Index | Literal | Name):
        return _expr(expr)
    return _Group((_IfBroken("("), _Nest((_Line(""), _expr(expr))), _Line(""), _IfBroken(")")))


# ---- expressions -------------------------------------------------------------------------

_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(1, 10)
"""How tightly an expression binds."""

_BINARY: Final = {
    "+": _SUM,
    "-": _SUM,
    "*": _PRODUCT,
    "/": _PRODUCT,
    "//": _PRODUCT,
    "%": _PRODUCT,
    "**": _POWER,
}


def _binding(expr: Expr) -> int:
    match expr:
        case BoolOp():
            return _OR if expr.op == "or" else _AND
        case Comparison():
            return _COMPARE
        case Binary():
            return _BINARY[expr.op]
        case Unary():
            return _NOT if expr.op == "not" else _SIGN
        case Literal() | Name() | Index() | Call():
            return _ATOM
        case _:
            assert_never(expr)


def _expr(expr: Expr, least: int = _OR) -> Doc:
    """In parentheses where the place needs an expression that binds more tightly."""
    if _binding(expr) < least:
        return _Group(("(", _Nest((_Line(""), _bare(expr))), _Line(""), ")"))
    return _bare(expr)


def _bare(expr: Expr) -> Doc:
    binding = _binding(expr)
    match expr:
        case Literal():
            return expr.text
        case Name():
            return expr.name
        case Index():
            return (expr.tensor, _bracket("[", [_expr(i) for i in expr.indices], "]"))
        case Call():
            return (expr.name, _bracket("(", [_argument(a, _expr) for a in expr.arguments], ")"))
        case Unary():
            sign = "not " if expr.op == "not" else expr.op
            return (sign, _expr(expr.operand, binding))
        case Binary(op="**"):
            return (_expr(expr.left, _ATOM), "**", _expr(expr.right, _SIGN))
        case Binary():
            first, rest = _left_spine(expr)
            operands = [_expr(operand, binding + 1) for _, operand in rest]
            return _chain(_expr(first, binding), [op for op, _ in rest], operands)
        case Comparison():
            first_operand, *others = [_expr(operand, binding + 1) for operand in expr.operands]
            return _chain(first_operand, expr.ops, others)
        case BoolOp():
            first_operand, *others = [_expr(operand, binding + 1) for operand in expr.operands]
            return _chain(first_operand, [expr.op] * len(others), others)
        case _:
            assert_never(expr)


def _left_spine(expr: Binary) -> tuple[Expr, list[tuple[str, Expr]]]:
    """`a - b + c` as `a` and `- b`, `+ c`."""
    binding, rest, first = _BINARY[expr.op], [], expr
    left: Expr = expr
    while isinstance(left, Binary) and _BINARY[left.op] == binding:
        rest.append((left.op, left.right))
        first = left
        left = left.left
    return first.left, rest[::-1]


def _argument(argument: Argument, value: Callable[[Expr], Doc]) -> Doc:
    doc = value(argument.value)
    return doc if argument.name is None else (f"{argument.name} = ", doc)


def _chain(first: Doc, ops: Iterable[str], operands: Iterable[Doc]) -> Doc:
    rest = ((_Line(" "), f"{op} ", _Nest(doc)) for op, doc in zip(ops, operands, strict=True))
    return _Group((_Nest(first), *rest))


def _bracket(opening: str, docs: Sequence[Doc], closing: str) -> Doc:
    if not docs:
        return opening + closing
    inside: list[Doc] = [_Line(""), docs[0]]
    for doc in docs[1:]:
        inside += [",", _Line(" "), doc]
    return _Group((opening, _Nest((*inside, _IfBroken(","))), _Line(""), closing))


# ---- layout ------------------------------------------------------------------------------


@final
@record
class _Line:
    """A line end where the group around it is broken, else the text `flat`."""

    flat: str


@final
@record
class _IfBroken:
    """A text where the group around it is broken, else nothing."""

    text: str


@final
@record
class _Nest:
    """Line ends inside are followed by one more level of indentation."""

    body: Doc


@final
@record
class _Group:
    """On one line if it fits there."""

    body: Doc


Doc: TypeAlias = "str | _Line | _IfBroken | _Nest | _Group | tuple[Doc, ...]"

_Pending: TypeAlias = tuple[int, bool, Doc]
"""Indentation, whether the group around is broken, and what is to be printed."""


def _lay_out(doc: Doc, indent: int, width: int | None = WIDTH) -> str:
    """Print a document; without a width nothing is broken.  Uses a stack of its own."""
    out: list[str] = []
    column = 0
    stack: list[_Pending] = [(indent, width is not None, doc)]
    while stack:
        indent, broken, doc = stack.pop()
        match doc:
            case str():
                out.append(doc)
                column += len(doc)
            case _Line() if broken:
                out.append("\n" + " " * indent)
                column = indent
            case _Line():
                out.append(doc.flat)
                column += len(doc.flat)
            case _IfBroken():
                out.append(doc.text if broken else "")
                column += len(out[-1])
            case _Nest():
                stack.append((indent + INDENT, broken, doc.body))
            case _Group():
                fits = width is None or _fits(width - column, doc.body, stack)
                stack.append((indent, broken and not fits, doc.body))
            case tuple():
                stack.extend((indent, broken, part) for part in reversed(doc))
            case _:
                assert_never(doc)
    return "".join(out)


def _fits(room: int, body: Doc, behind: Sequence[_Pending]) -> bool:
    """Whether `body`, unbroken, and what follows it up to the next line end, fit."""
    stack: list[tuple[bool, Doc]] = [(False, body)]
    following = len(behind)
    while room >= 0:
        if not stack:
            if not following:
                return True
            following -= 1
            _, broken, doc = behind[following]
        else:
            broken, doc = stack.pop()
        match doc:
            case str():
                room -= len(doc)
            case _Line():
                if broken:
                    return True
                room -= len(doc.flat)
            case _IfBroken():
                room -= len(doc.text) if broken else 0
            case _Nest() | _Group():
                stack.append((broken, doc.body))
            case tuple():
                stack.extend((broken, part) for part in reversed(doc))
            case _:
                assert_never(doc)
    return False
