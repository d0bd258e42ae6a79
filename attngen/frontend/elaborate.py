"""Expressions of the syntax tree → typed expressions of the IR.

    0 <= kv - lo < W            →   0 <= kv - lo and kv - lo < 128
    softcap(s, cap)             →   cap * tanh(s / cap)
    q / 2                       →   float(q) / 2.0

Names get their meaning, every node its type, and integers become floats where a float is
needed.  Integer constants fold exactly.  A definition is expanded where it is called: its body
sees indices, sizes, its parameters and other definitions, never the names of its caller.
An argument that the body uses several times is one shared node, a `Let` where it is not
trivial; so the text of an expression is never much longer than its graph.

An expression with an error elaborates to None, and what contains it is silent about it, so
each mistake is reported once and all of them in one run.  `Elaborator` keeps a stack of its
own instead of recursing: definitions may nest deeply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias, assert_never, final

from attngen.diagnostics.diagnostic import Diagnostic, Note
from attngen.diagnostics.span import Span
from attngen.frontend import ast
from attngen.frontend.check_errors import (
    BadPower,
    CheckDiagnostic,
    DivisionByZero,
    DuplicateName,
    ExpansionTooLarge,
    ExpressionTooDeep,
    HiddenHere,
    MissingArgument,
    NegativeIndex,
    NotATensor,
    NotCallable,
    NotConstant,
    NumberOutOfRange,
    RecursiveDefinition,
    RepeatedArgument,
    ReservedName,
    ScoreInMask,
    TensorWithoutIndex,
    UnknownArgument,
    UnknownFunction,
    UnknownName,
    UnknownType,
    UsedTooEarly,
    WrongArgumentCount,
    WrongIndexCount,
    WrongType,
)
from attngen.frontend.load import library_names, walk
from attngen.ir.attention import INDICES, SIZES, Tensor
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Compare,
    CompareOp,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    LogicalOp,
    Negate,
    Not,
    Role,
    Select,
    Symbol,
    ToFloat,
    expr_type,
)
from attngen.ir.functions import FUNCTIONS, LANGUAGE, call
from attngen.ir.printer import print_number
from attngen.ir.traverse import children, symbols
from attngen.ir.types import ScalarType
from attngen.ir.verify import HIDDEN, Place
from attngen.record import record

__all__ = [
    "MAX_DEPTH",
    "MAX_NODES",
    "TYPE_SYNONYMS",
    "WHERE",
    "Binding",
    "Captured",
    "Elaborator",
    "Failed",
    "Later",
    "Scope",
    "Value",
    "Where",
    "build_logical",
    "constant_place",
    "find_closest",
    "found_type",
    "list_choices",
    "short_text",
    "find_word",
    "other_name",
    "reserved_meaning",
]

MAX_NODES: Final = 20_000
"""Most operations of all expressions together; a real variant has a few dozen."""
MAX_DEPTH: Final = 1000
"""Deepest nesting, definitions included."""
MAX_BITS: Final = 4096
"""Longest integer of a constant expression."""
MAX_EXPONENT: Final = 64
"""Largest exponent that becomes multiplications."""

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT

_TYPE_TEXT: Final = {_BOOL: "a truth value", _INT: "an integer", _FLOAT: "a float"}
_PARAMETER_TYPES: Final = ("int", "float", "bool", "flag", "tensor")

TYPE_SYNONYMS: Final = {
    "float32": "float", "double": "float", "integer": "int", "long": "int", "boolean": "bool",
}  # fmt: skip
_SYNONYMS: Final = {
    "q_idx": "q", "row": "q", "i": "q", "kv_idx": "kv", "k_idx": "kv", "k": "kv", "col": "kv",
    "j": "kv", "head": "h", "batch": "b", "score": "s", "scores": "s", "D": "Dqk", "H": "Hq",
    "seq_len": "Skv", "ln": "log", "pow": "**", "maximum": "max", "minimum": "min",
    "clip": "clamp", "select": "where", "fabs": "abs", "logistic": "sigmoid", "float": "1.0 * x",
    "int": "floor",
}  # fmt: skip
"""What people write who come from elsewhere."""


# ---- what a name can mean ----------------------------------------------------------------


@final
@record
class Value:
    """A name with a value; `kind` says in words what it is."""

    expr: Expr
    kind: str


@final
@record
class Captured:
    """A captured tensor."""

    tensor: Tensor


@final
@record
class Later:
    """A let or const whose line is still to come, or a tensor whose shape is not known yet."""

    statement: str
    declared: Span


@final
@record
class Failed:
    """A declaration with an error, or a tensor that nobody knows yet: uses say nothing."""


Binding: TypeAlias = Value | Captured | Later | Failed


@final
@record
class Where:
    """The place of an expression: its name in messages and what is hidden from it."""

    text: str
    hidden: frozenset[str]
    reason: str
    constant: bool = False
    """Only what is known at compile time can be used."""


_EVERYTHING: Final = frozenset((*INDICES, *SIZES, "s"))

WHERE: Final[dict[Place, Where]] = {
    Place.LENGTH: Where("a length", HIDDEN[Place.LENGTH], "a length belongs to a sequence"),
    Place.SCALE: Where("the scale", HIDDEN[Place.SCALE], "the scale belongs to a head"),
    Place.SCORE: Where("a score", HIDDEN[Place.SCORE], ""),
    Place.MASK: Where("a mask", HIDDEN[Place.MASK], ""),
    Place.SINK: Where("a sink", HIDDEN[Place.SINK], "a sink belongs to a head"),
}


_IDLE: Final = Where("", frozenset(), "")
"""What is never evaluated, such as the other branch of `where(true, …)`, may name anything."""


def constant_place(text: str) -> Where:
    """Where a value is needed at compile time; `text` names it."""
    return Where(text, _EVERYTHING, "", constant=True)


@final
@record(eq=False)
class Scope:
    """The names that an expression sees, and where it stands."""

    names: Mapping[str, Binding]
    where: Where
    expanding: tuple[tuple[str, Span], ...] = ()
    """The definitions whose bodies this is inside of, each with the place of its call."""

    @property
    def in_definition(self) -> bool:
        return bool(self.expanding)


def reserved_meaning(name: str) -> str | None:
    """What a name of the language itself stands for; None for a name that is free."""
    if name in INDICES:
        return "an index"
    if name in SIZES:
        return "a size of the problem"
    if name == "s":
        return "the score"
    if name in LANGUAGE:
        return "a function"
    return "reserved for a later version" if name in ("any", "transform") else None


def find_closest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate that a misspelt name most likely means."""
    known = list(dict.fromkeys(candidates))
    for candidate in known:
        if candidate.casefold() == name.casefold() and candidate != name:
            return candidate
    from difflib import get_close_matches

    matches = get_close_matches(name, known, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def found_type(e: Expr) -> str:
    """`an integer`, `a float`, `a truth value`."""
    return _TYPE_TEXT[expr_type(e)]


# ---- elaboration -------------------------------------------------------------------------

_Step: TypeAlias = "Generator[tuple[ast.Expr, Scope], Expr | None, Expr | None]"
"""A node at work: it asks for its operands one by one and ends with its result."""


class _GaveUpError(Exception):
    """A limit is exceeded; the error has been reported."""


@final
class Elaborator:
    """Elaborates the expressions of one attention block; collects errors."""

    def __init__(self, definitions: Mapping[str, ast.Definition]) -> None:
        self.definitions = definitions
        self.errors: list[Diagnostic] = []
        self.block_names: set[str] = set()
        """All names that the block declares."""

        self._reported: set[tuple[str, int, str, str]] = set()
        self._used_let_names: set[str] = set()
        self._expanded: set[str] = set()
        self._sound: dict[str, bool] = {}
        self._steps = 0
        self._gave_up = False
        self._symbolic = False
        """Arguments are unknown: what must be constant is taken on trust."""

    def elaborate(self, e: ast.Expr, scope: Scope) -> Expr | None:
        """The typed expression, or None after an error."""
        if self._gave_up:
            return None
        stack = [self._visit(e, scope)]
        value: Expr | None = None
        try:
            while stack:
                try:
                    request = stack[-1].send(value)
                except StopIteration as stop:
                    stack.pop()
                    value = stop.value
                    continue
                self._count(request[0], request[1], len(stack))
                stack.append(self._visit(*request))
                value = None
        except _GaveUpError:
            self._gave_up = True
            return None
        return value

    def elaborate_as(self, e: ast.Expr, scope: Scope, wanted: ScalarType, what: str) -> Expr | None:
        """The same, with the type that its place needs."""
        value = self.elaborate(e, scope)
        return None if value is None else self.convert(value, wanted, what, e.span, scope)

    def check_unused(self, definition: ast.Definition) -> None:
        """Check a definition that no expression has expanded, for arguments of any value."""
        if definition.name in self._expanded or self._gave_up:
            return
        if not self._signature(definition):
            return
        self._symbolic = True
        names: dict[str, Binding] = {
            p.name: Failed() if p.type == "tensor" else _unknown_argument(p)
            for p in definition.parameters
        }
        where = Where("a definition", frozenset(), "")
        scope = Scope(names, where, ((definition.name, definition.name_span),))
        value = self.elaborate(definition.body, scope)
        self._convert_result(value, definition, scope)
        self._symbolic = False

    def report(self, diagnostic: Diagnostic, scope: Scope | None = None) -> None:
        """Keep an error, once; inside of a definition it also says who called."""
        span = diagnostic.span
        place = ("", -1) if span is None else (span.source.name, span.start)
        key = (diagnostic.code, place[1], place[0], diagnostic.message())
        if key in self._reported:
            return
        self._reported.add(key)
        if scope is not None and isinstance(diagnostic, CheckDiagnostic) and not self._symbolic:
            notes = tuple(
                Note(f"`{name}` is used here", at) for name, at in reversed(scope.expanding)
            )
            diagnostic = replace(diagnostic, calls=(*diagnostic.calls, *notes))
        self.errors.append(diagnostic)

    def new_let(self, name: str, value: Expr, span: Span | None) -> Let:
        """A let with a name that no other one has."""
        number, candidate = 1, name
        while candidate in self._used_let_names or candidate in self.block_names:
            number += 1
            candidate = f"{name}_{number}"
        self._used_let_names.add(candidate)
        return Let(candidate, value, span)

    def convert(
        self, value: Expr, wanted: ScalarType, what: str, span: Span, scope: Scope
    ) -> Expr | None:
        """An expression as the type that its place needs; only int to float happens by itself."""
        found = expr_type(value)
        if found is wanted:
            return value
        if found is _INT and wanted is _FLOAT:
            return _to_float(value)
        advice = None
        if wanted is _INT and found is _FLOAT:
            advice = "`floor(x)` is the integer below a float"
        elif found is _BOOL:
            advice = "`where(condition, 1, 0)` makes a number of a truth value"
        elif wanted is _BOOL and isinstance(value, Const):
            advice = "truth values are written `true` and `false`"
        elif wanted is _BOOL:
            advice = "compare it, for example with `!= 0`"
        expected = _TYPE_TEXT[wanted]
        self.report(WrongType(span, what, expected, _TYPE_TEXT[found], advice), scope)
        return None

    def _count(self, e: ast.Expr, scope: Scope, depth: int) -> None:
        self._steps += 1
        span = _at(e.span, scope)
        if self._steps > MAX_NODES:
            self.report(ExpansionTooLarge(span, MAX_NODES))
        elif depth > MAX_DEPTH:
            self.report(ExpressionTooDeep(span, MAX_DEPTH))
        else:
            return
        raise _GaveUpError

    # ---- nodes

    def _visit(self, e: ast.Expr, scope: Scope) -> _Step:
        match e:
            case ast.Literal():
                return self._literal(e, scope)
            case ast.Name():
                return self._name(e, scope)
            case ast.Index():
                return self._index(e, scope)
            case ast.Call():
                return self._call(e, scope)
            case ast.Unary():
                return self._unary(e, scope)
            case ast.Binary():
                return self._binary(e, scope)
            case ast.Comparison():
                return self._comparison(e, scope)
            case ast.BoolOp():
                return self._bool_op(e, scope)
            case _:
                assert_never(e)

    def _literal(self, e: ast.Literal, scope: Scope) -> _Step:
        return Const(e.value, _at(e.span, scope))
        yield  # makes this a step like the others

    def _name(self, e: ast.Name, scope: Scope) -> _Step:
        name, span = e.name, _at(e.span, scope)
        bound = scope.names.get(name)
        match bound:
            case Failed():
                return None
            case Later():
                self._later(name, bound, e.span, scope)
                return None
            case Captured(tensor):
                self.report(TensorWithoutIndex(e.span, name, _read_example(tensor)), scope)
                return None
            case Value():
                return self._use(e, bound, scope)
            case None:
                pass
            case _:
                assert_never(bound)
        if name == "s" and scope.in_definition:
            advice = f"give it a parameter and call `{scope.expanding[-1][0]}(s, …)`"
            text = "a definition sees `s` only as an argument"
            self.report(HiddenHere(e.span, "a definition", "s", text, advice), scope)
            return None
        if name == "s" or name in INDICES or name in SIZES:
            if name in scope.where.hidden:
                self._hidden(name, e.span, scope)
                return None
            return _problem_symbol(name, span)
        if name in self.definitions:
            return (yield from self._expand(self.definitions[name], (), e.span, scope))
        if name in LANGUAGE:
            usage = "a function needs its arguments in parentheses"
            self.report(WrongArgumentCount(e.span, name, _takes(name), "it has none", usage), scope)
            return None
        self._unknown_name(e, scope)
        return None

    def _later(self, name: str, bound: Later, span: Span, scope: Scope) -> None:
        """Report a name that has no value yet."""
        if scope.where.constant and bound.statement != "const":
            self._not_constant(span, name, f"a {bound.statement}", scope)
        elif bound.statement != "tensor":
            self.report(UsedTooEarly(span, name, bound.statement, bound.declared), scope)

    def _use(self, e: ast.Name, bound: Value, scope: Scope) -> Expr | None:
        expr, span = bound.expr, _at(e.span, scope)
        if scope.where.constant and not scope.in_definition and not isinstance(expr, Const):
            self._not_constant(e.span, e.name, bound.kind, scope)
            return None
        if bound.kind == "a let":
            hidden = sorted(symbols(expr) & scope.where.hidden)
            if hidden:
                name = "s" if "s" in hidden else hidden[0]
                self._hidden(name, e.span, scope, f"`{e.name}` depends on `{name}`")
                return None
        if isinstance(expr, Const | Symbol):
            return replace(expr, span=span)
        return expr

    def _unknown_name(self, e: ast.Name, scope: Scope) -> None:
        place = "in a definition" if scope.in_definition else "here"
        if scope.in_definition and e.name in self.block_names:
            advice: str | None = f"a definition does not see the block: pass `{e.name}` to it"
        else:
            known = [n for n, bound in scope.names.items() if not isinstance(bound, Later)]
            visible = (*known, *INDICES, *SIZES, "s")
            advice = _did_you_mean(e.name, visible, (*self.definitions, *library_names()))
        self.report(UnknownName(e.span, e.name, place, advice), scope)

    def _hidden(self, name: str, span: Span, scope: Scope, text: str = "") -> None:
        """Report what is hidden at this place, in the block where a person can change it."""
        where, notes = scope.where, scope.expanding
        notes_at: tuple[Note, ...] = ()
        if notes:
            notes_at = (Note(f"`{name}` is used here", span),)
            text, span = f"`{notes[0][0]}` depends on `{name}`", notes[0][1]
        if where.constant:
            kind = reserved_meaning(name) or "unknown"
            self.report(NotConstant(span, where.text, name, kind, None, calls=notes_at))
        elif name == "s" and where is WHERE[Place.MASK]:
            self.report(ScoreInMask(span, text or "the mask is applied to it", calls=notes_at))
        else:
            advice = _HIDDEN_ADVICE.get((where.text, name))
            reason = text or where.reason
            if name in ("Sq", "Skv"):
                reason = text or f"the length is what `{name}` means from then on"
            self.report(HiddenHere(span, where.text, name, reason, advice, calls=notes_at))

    def _not_constant(self, span: Span, name: str, kind: str, scope: Scope) -> None:
        advice = "a const is known at compile time" if kind == "a param" else None
        self.report(NotConstant(span, scope.where.text, name, kind, advice), scope)

    def _index(self, e: ast.Index, scope: Scope) -> _Step:
        bound = scope.names.get(e.tensor)
        if bound is None:
            self._unknown_tensor(e, scope)
        elif isinstance(bound, Later) and bound.statement == "tensor":
            self._later(e.tensor, bound, e.tensor_span, scope)
        elif isinstance(bound, Value | Later):
            kind = bound.kind if isinstance(bound, Value) else f"a {bound.statement}"
            self.report(NotATensor(e.tensor_span, e.tensor, f"it is {kind}", None), scope)
        elif isinstance(bound, Captured) and scope.where.constant:
            self._not_constant(e.tensor_span, e.tensor, "a tensor", scope)
        indices: list[Expr] = []
        for node in e.indices:
            index = yield node, scope
            if index is not None:
                what = f"an index of `{e.tensor}`"
                index = self.convert(index, _INT, what, node.span, scope)
            if index is not None:
                indices.append(index)
        if not isinstance(bound, Captured) or scope.where.constant:
            return None
        tensor = bound.tensor
        if len(e.indices) != len(tensor.dims):
            given = f"{_count_of(len(e.indices), 'index', 'indices')} given"
            given = given.replace("1 index", "1 index is").replace("indices", "indices are")
            dims = _count_of(len(tensor.dims), "dimension")
            text = _declared_text(tensor)
            place = tensor.span
            self.report(WrongIndexCount(e.span, e.tensor, dims, given, text, place), scope)
            return None
        if len(indices) != len(tensor.dims) or not self._indices_fit(e, tensor, indices, scope):
            return None
        return Load(tensor.name, tuple(indices), tensor.element.scalar, _at(e.span, scope))

    def _unknown_tensor(self, e: ast.Index, scope: Scope) -> None:
        kind = reserved_meaning(e.tensor)
        if kind is None and (e.tensor in self.definitions or e.tensor in library_names()):
            kind = "a definition; call it with `( )`"
        if kind is not None:
            self.report(NotATensor(e.tensor_span, e.tensor, f"it is {kind}", None), scope)
            return
        tensors = [name for name, bound in scope.names.items() if isinstance(bound, Captured)]
        place = "in a definition" if scope.in_definition else "here"
        if scope.in_definition and e.tensor in self.block_names:
            advice: str | None = f"a definition does not see the block: pass `{e.tensor}` to it"
        else:
            advice = _did_you_mean(e.tensor, tensors)
        self.report(UnknownName(e.tensor_span, e.tensor, place, advice), scope)

    def _indices_fit(self, e: ast.Index, tensor: Tensor, indices: list[Expr], scope: Scope) -> bool:
        """Constant indices lie inside of the tensor."""
        for node, index, dim in zip(e.indices, indices, tensor.dims, strict=True):
            if not isinstance(index, Const):
                continue
            value = int(index.value)
            if value < 0:
                advice = f"indices count from 0; the last one is `{dim.size} - 1`"
                reason = "negative indices do not count from the end"
                self.report(NegativeIndex(node.span, e.tensor, value, reason, advice), scope)
                return False
            if isinstance(dim.size, int) and value >= dim.size:
                reason = f"the dimension has {dim.size} elements"
                self.report(NegativeIndex(node.span, e.tensor, value, reason, None), scope)
                return False
        return True

    # ---- operators

    def _unary(self, e: ast.Unary, scope: Scope) -> _Step:
        operand = yield e.operand, scope
        if operand is None:
            return None
        span = _at(e.span, scope)
        if e.op == "not":
            truth = self.convert(operand, _BOOL, "the operand of `not`", e.operand.span, scope)
            if isinstance(truth, Const):
                return Const(not truth.value, span)
            return None if truth is None else Not(truth, span)
        number = self._number(operand, f"the operand of `{e.op}`", e.operand.span, scope)
        if number is None or e.op == "+":
            return number
        if isinstance(number, Const):
            return Const(-number.value, span)
        return Negate(number, span)

    def _number(self, value: Expr, what: str, span: Span, scope: Scope) -> Expr | None:
        if expr_type(value) is not _BOOL:
            return value
        advice = "`where(condition, 1, 0)` makes a number of a truth value"
        self.report(WrongType(span, what, "a number", "a truth value", advice), scope)
        return None

    def _binary(self, e: ast.Binary, scope: Scope) -> _Step:
        left = yield e.left, scope
        right = yield e.right, scope
        what = f"an operand of `{e.op}`"
        if left is not None:
            left = self._number(left, what, e.left.span, scope)
        if right is not None:
            right = self._number(right, what, e.right.span, scope)
        if left is None or right is None:
            return None
        if e.op == "**":
            return self._power(e, left, right, scope)
        if e.op in ("/", "//", "%") and isinstance(right, Const) and right.value == 0:
            self.report(DivisionByZero(e.right.span), scope)
            return None
        op, span = BinaryOp(e.op), _at(e.span, scope)
        if op is BinaryOp.DIV:
            return Binary(op, _to_float(left), _to_float(right), span)
        if op in (BinaryOp.FLOORDIV, BinaryOp.MOD):
            for value, node in ((left, e.left), (right, e.right)):
                if expr_type(value) is not _INT:
                    advice = _REAL_DIVISION[op]
                    wrong = WrongType(node.span, what, "an integer", found_type(value), advice)
                    self.report(wrong, scope)
                    return None
        left, right = _promote(left, right)
        if _is_int(left) and _is_int(right):
            return self._folded(_FOLD[op](_int(left), _int(right)), e.span, scope)
        return Binary(op, left, right, span)

    def _folded(self, value: int, span: Span, scope: Scope) -> Expr | None:
        if value.bit_length() <= MAX_BITS:
            return Const(value, _at(span, scope))
        what, holder = "the value of this constant expression", "any integer of attngen"
        found = f"it has more than {MAX_BITS} bits"
        self.report(NumberOutOfRange(span, what, holder, found, None), scope)
        return None

    def _power(self, e: ast.Binary, base: Expr, exponent: Expr, scope: Scope) -> Expr | None:
        """`**` by a whole constant is a product, and of the base 2 it is exp2."""
        span = _at(e.span, scope)
        if _is_int(exponent):
            n = _int(exponent)
            if _is_int(base) and n >= 0:
                if abs(_int(base)) > 1 and n * _int(base).bit_length() > 2 * MAX_BITS:
                    return self._folded(1 << MAX_BITS, e.span, scope)
                return self._folded(_int(base) ** n, e.span, scope)
            if isinstance(base, Const) and base.value == 2 and -126 <= n < 128:
                return Const(2.0**n, span)
            if 0 <= n <= MAX_EXPONENT:
                return self._product(base, n, span)
        if isinstance(base, Const) and base.value == 2:
            return replace(call("exp2", _to_float(exponent)), span=span)
        if self._symbolic and not isinstance(exponent, Const):
            return None
        found, advice = _power_advice(e, exponent)
        self.report(BadPower(e.right.span, MAX_EXPONENT, found, advice), scope)
        return None

    def _product(self, base: Expr, n: int, span: Span) -> Expr:
        """`base` to the power of n, by repeated squaring."""
        if n == 0:
            return Const(1 if expr_type(base) is _INT else 1.0, span)
        square, result = self._shared(base, "base", span), None
        while True:
            if n & 1:
                result = square if result is None else _multiply(result, square, span)
            n >>= 1
            if n == 0:
                assert result is not None
                return result
            square = _multiply(square, square, span)
            if n > 1:
                square = self._shared(square, "square", span)

    def _shared(self, value: Expr, name: str, span: Span | None) -> Expr:
        """A value that is going to be used several times."""
        return value if _is_trivial(value) else self.new_let(name, value, span)

    def _comparison(self, e: ast.Comparison, scope: Scope) -> _Step:
        values: list[Expr | None] = []
        for i, node in enumerate(e.operands):
            value = yield node, scope
            if value is not None and 0 < i < len(e.ops):
                value = self._shared(value, "middle", _at(node.span, scope))
            values.append(value)
        parts: list[Expr] = []
        for i, op in enumerate(e.ops):
            left, right = values[i], values[i + 1]
            if left is None or right is None:
                continue
            nodes = e.operands[i], e.operands[i + 1]
            part = self._compare(CompareOp(op), (left, right), nodes, scope)
            if part is not None:
                parts.append(part)
        if len(parts) < len(e.ops):
            return None
        return build_logical(LogicalOp.AND, parts, _at(e.span, scope))

    def _compare(
        self,
        op: CompareOp,
        sides: tuple[Expr, Expr],
        nodes: tuple[ast.Expr, ast.Expr],
        scope: Scope,
    ) -> Expr | None:
        is_truth = [expr_type(side) is _BOOL for side in sides]
        if any(is_truth) and (not all(is_truth) or op not in (CompareOp.EQ, CompareOp.NE)):
            node = nodes[0] if is_truth[0] else nodes[1]
            advice = "truth values can be compared by `==` and `!=`, and only with each other"
            what = f"both sides of `{op.value}`"
            wrong = WrongType(node.span, what, "numbers", "a truth value", advice)
            self.report(wrong, scope)
            return None
        left, right = sides if all(is_truth) else _promote(*sides)
        span = _at(nodes[0].span.to(nodes[1].span), scope)
        if isinstance(left, Const) and isinstance(right, Const) and expr_type(left) is not _FLOAT:
            return Const(_COMPARE[op](int(left.value), int(right.value)), span)
        return Compare(op, left, right, span)

    def _bool_op(self, e: ast.BoolOp, scope: Scope) -> _Step:
        operands: list[Expr] = []
        inner = scope
        for node in e.operands:
            value = yield node, inner
            if value is not None:
                what = f"an operand of `{e.op}`"
                value = self.convert(value, _BOOL, what, node.span, scope)
            if value is not None:
                operands.append(value)
                if _decides(value, e.op == "or"):
                    inner = replace(scope, where=_IDLE)
        if len(operands) < len(e.operands):
            return None
        return build_logical(LogicalOp(e.op), operands, _at(e.span, scope))

    # ---- functions

    def _call(self, e: ast.Call, scope: Scope) -> _Step:
        bound = scope.names.get(e.name)
        if bound is None and e.name in LANGUAGE:
            return (yield from self._call_builtin(e, scope))
        if bound is None and e.name in self.definitions:
            definition = self.definitions[e.name]
            return (yield from self._expand(definition, e.arguments, e.span, scope))
        if isinstance(bound, Failed):
            pass
        elif bound is not None:
            kind = (
                "a tensor"
                if isinstance(bound, Captured)
                else (bound.kind if isinstance(bound, Value) else f"a {bound.statement}")
            )
            advice = "a tensor is read with `[ ]`" if kind == "a tensor" else None
            self.report(NotCallable(e.name_span, e.name, kind, advice), scope)
        elif (meaning := reserved_meaning(e.name)) is not None:
            self.report(NotCallable(e.name_span, e.name, meaning, None), scope)
        else:
            callables = (*self.definitions, *library_names())
            advice = _did_you_mean(e.name, LANGUAGE, callables)
            self.report(UnknownFunction(e.name_span, e.name, advice), scope)
        for argument in e.arguments:  # for the errors in them
            if not isinstance(argument.value, ast.Name):
                yield argument.value, scope
        return None

    def _call_builtin(self, e: ast.Call, scope: Scope) -> _Step:
        name = e.name
        values: list[Expr] = []
        named = False
        for argument in e.arguments:
            if argument.name is not None:
                named = True
                advice = f"the arguments of `{name}` have no names"
                usage = f"usage: `{_USAGE[name]}`"
                wrong = UnknownArgument(argument.span, name, argument.name, usage, advice)
                self.report(wrong, scope)
            is_idle = name == "where" and values and _decides(values[0], len(values) == 2)
            value = yield argument.value, replace(scope, where=_IDLE) if is_idle else scope
            if value is not None:
                values.append(value)
        least, most = _argument_count(name)
        given = len(e.arguments)
        if given < least or (most is not None and given > most):
            text = "there is 1" if given == 1 else f"there are {given}" if given else "it has none"
            usage = f"usage: `{_USAGE[name]}`"
            self.report(WrongArgumentCount(e.span, name, _takes(name), text, usage), scope)
            return None
        if named or len(values) < given:
            return None
        return self._apply(e, values, scope)

    def _apply(self, e: ast.Call, values: list[Expr], scope: Scope) -> Expr | None:
        """A builtin function of checked arguments."""
        name, span = e.name, _at(e.span, scope)
        nodes = [argument.value for argument in e.arguments]
        if name == "where":
            return self._where(e, values, nodes, scope)
        wanted = FUNCTIONS[name].signature.argument
        what = f"an argument of `{name}`"
        numbers: list[Expr] = []
        for value, node in zip(values, nodes, strict=True):
            number = self._number(value, what, node.span, scope)
            if number is not None and wanted is not None and name != "floor":
                number = self.convert(number, wanted, what, node.span, scope)
            if number is not None:
                numbers.append(number)
        if len(numbers) < len(values):
            return None
        if name == "floor":
            first = numbers[0]
            return first if expr_type(first) is _INT else replace(call("floor", first), span=span)
        if wanted is None:
            numbers = _promote_all(numbers)
            if all(_is_int(n) for n in numbers):
                return Const(_INT_FUNCTIONS[name](*(_int(n) for n in numbers)), span)
        if name in ("min", "max"):
            result = numbers[0]
            for number in numbers[1:]:
                result = replace(call(name, result, number), span=span)
            return result
        return replace(call(name, *numbers), span=span)

    def _where(
        self, e: ast.Call, values: list[Expr], nodes: list[ast.Expr], scope: Scope
    ) -> Expr | None:
        what = "the condition of `where`"
        condition = self.convert(values[0], _BOOL, what, nodes[0].span, scope)
        then, otherwise = values[1:]
        if (expr_type(then) is _BOOL) != (expr_type(otherwise) is _BOOL):
            node = nodes[1] if expr_type(then) is _BOOL else nodes[2]
            what = "both values of `where`"
            advice = "they have one type: two numbers, or two truth values"
            wrong = WrongType(node.span, what, "numbers", "a truth value", advice)
            self.report(wrong, scope)
            return None
        if condition is None:
            return None
        if expr_type(then) is not _BOOL:
            then, otherwise = _promote(then, otherwise)
        if isinstance(condition, Const):
            return then if condition.value else otherwise
        return Select(condition, then, otherwise, _at(e.span, scope))

    # ---- definitions

    def _expand(
        self,
        definition: ast.Definition,
        arguments: tuple[ast.Argument, ...],
        span: Span,
        scope: Scope,
    ) -> _Step:
        """The body of a definition, for these arguments."""
        name = definition.name
        self._expanded.add(name)
        names = [called for called, _ in scope.expanding]
        if name in names:
            chain = " -> ".join((*names[names.index(name) :], name))
            self.report(RecursiveDefinition(span, name, chain), scope)
            return None
        if not self._signature(definition):
            return None
        given = self._match(definition, arguments, span, scope)
        inner_call = (*scope.expanding, (name, span))
        bindings: dict[str, Binding] = {}
        for parameter in definition.parameters:
            argument = None if given is None else given.get(parameter.name)
            bindings[parameter.name] = Failed()
            if parameter.type == "tensor":
                if argument is not None:
                    bindings[parameter.name] = self._tensor_argument(argument, parameter, scope)
            elif parameter.type == "flag" and argument is not None and argument.name is None:
                bindings[parameter.name] = Value(Const(True, span), "a flag")
            elif argument is not None:
                value = yield argument.value, scope
                bound = self._argument(value, argument.value, parameter, definition, scope)
                bindings[parameter.name] = bound
            elif parameter.default is not None:
                outside = Scope({}, scope.where, inner_call)
                value = yield parameter.default, outside
                bound = self._argument(value, parameter.default, parameter, definition, outside)
                bindings[parameter.name] = bound
            elif parameter.type == "flag":
                bindings[parameter.name] = Value(Const(False, span), "a flag")
        if given is None:
            return None
        inner = Scope(bindings, scope.where, inner_call)
        result = yield definition.body, inner
        return self._convert_result(result, definition, inner)

    def _convert_result(
        self, result: Expr | None, definition: ast.Definition, scope: Scope
    ) -> Expr | None:
        if result is None or definition.type not in ("int", "float", "bool"):
            return None
        what = f"the value of `{definition.name}`"
        return self.convert(result, ScalarType(definition.type), what, definition.body.span, scope)

    def _signature(self, definition: ast.Definition) -> bool:
        """Names and types of a definition, checked once."""
        known = self._sound.get(definition.name)
        if known is not None:
            return known
        before = len(self.errors)
        if definition.type not in ("int", "float", "bool"):
            self._unknown_type(
                definition.type, definition.span, "a definition", ("int", "float", "bool")
            )
        first: dict[str, ast.Parameter] = {}
        for parameter in definition.parameters:
            name, span = parameter.name, parameter.span
            meaning = reserved_meaning(name)
            if meaning is not None:
                self.report(ReservedName(span, name, meaning, other_name(name)))
            elif name in first:
                self.report(DuplicateName(span, name, first[name].span))
            if parameter.type not in _PARAMETER_TYPES:
                self._unknown_type(parameter.type, span, "a parameter", _PARAMETER_TYPES)
            first[name] = parameter
        self._sound[definition.name] = len(self.errors) == before
        return self._sound[definition.name]

    def _unknown_type(self, name: str, span: Span, what: str, choices: tuple[str, ...]) -> None:
        closest = TYPE_SYNONYMS.get(name) or find_closest(name, choices)
        place = find_word(span, name)
        self.report(UnknownType(place, name, what, list_choices(choices), closest))

    def _match(
        self,
        definition: ast.Definition,
        arguments: tuple[ast.Argument, ...],
        span: Span,
        scope: Scope,
    ) -> dict[str, ast.Argument] | None:
        """Which argument each parameter gets: by name, by being the word of a flag, or in order."""
        name, before = definition.name, len(self.errors)
        usage = f"usage: `{usage_text(definition)}`"
        flags = [p.name for p in definition.parameters if p.type == "flag"]
        in_order = [p.name for p in definition.parameters if p.type != "flag"]
        given: dict[str, ast.Argument] = {}
        for argument in arguments:
            key, value = argument.name, argument.value
            if key is None and isinstance(value, ast.Name) and value.name in flags:
                key = value.name
            if key is None:
                key = next((p for p in in_order if p not in given), None)
                if key is None:
                    takes = _count_of(len(in_order), "argument")
                    text = "this is one more"
                    error = WrongArgumentCount(argument.span, name, takes, text, usage)
                    self.report(error, scope)
                    break
            if key not in (*flags, *in_order):
                advice = _did_you_mean(key, (*in_order, *flags))
                self.report(UnknownArgument(argument.span, name, key, usage, advice), scope)
            elif key in given:
                self.report(RepeatedArgument(argument.span, name, key, given[key].span), scope)
            else:
                given[key] = argument
        if len(self.errors) > before:
            return None
        missing = [
            f"`{p.name}`"
            for p in definition.parameters
            if p.name not in given and p.default is None and p.type != "flag"
        ]
        if missing:
            self.report(MissingArgument(span, name, " and ".join(missing), usage), scope)
            return None
        return given

    def _tensor_argument(
        self, argument: ast.Argument, parameter: ast.Parameter, scope: Scope
    ) -> Binding:
        node = argument.value
        bound = scope.names.get(node.name) if isinstance(node, ast.Name) else None
        if isinstance(bound, Captured | Failed):
            return bound
        what = node.name if isinstance(node, ast.Name) else parameter.name
        found = f"the parameter `{parameter.name}` takes the bare name of a tensor"
        tensors = [name for name, b in scope.names.items() if isinstance(b, Captured)]
        advice = _did_you_mean(what, tensors) if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Index):
            what, advice = node.span.text, f"write `{node.tensor}` without an index"
        self.report(NotATensor(node.span, what, found, advice), scope)
        return Failed()

    def _argument(
        self,
        value: Expr | None,
        node: ast.Expr,
        parameter: ast.Parameter,
        definition: ast.Definition,
        scope: Scope,
    ) -> Binding:
        if value is None or parameter.type not in _PARAMETER_TYPES:
            return Failed()
        kind = f"a parameter of `{definition.name}`"
        what = f"`{parameter.name}` of `{definition.name}`"
        wanted = _BOOL if parameter.type == "flag" else ScalarType(parameter.type)
        converted = self.convert(value, wanted, what, node.span, scope)
        if converted is None:
            return Failed()
        if parameter.type == "flag" and not isinstance(converted, Const):
            advice = "a flag is set by its name, or by `true` or `false`"
            text = short_text(node.span)
            self.report(NotConstant(node.span, what, text, "a run-time value", advice), scope)
            return Failed()
        if _count_uses(definition.body, parameter.name) > 1:
            converted = self._shared(converted, parameter.name, _at(node.span, scope))
        return Value(converted, kind)


# ---- building expressions ----------------------------------------------------------------


def build_logical(op: LogicalOp, operands: Iterable[Expr], span: Span | None) -> Expr:
    """`and` / `or`, flat; constants that decide nothing are dropped, and what one makes idle."""
    decides = op is LogicalOp.OR
    kept: list[Expr] = []
    for operand in operands:
        nested = isinstance(operand, Logical) and operand.op is op
        for part in children(operand) if nested else (operand,):
            if isinstance(part, Const) and part.value is not decides:
                continue
            if not (kept and _decides(kept[-1], decides)):
                kept.append(part)
    if not kept:
        return Const(not decides, span)
    return kept[0] if len(kept) == 1 else Logical(op, tuple(kept), span)


def _decides(e: Expr, value: bool) -> bool:
    return isinstance(e, Const) and e.value is value


def _to_float(e: Expr) -> Expr:
    if expr_type(e) is _FLOAT:
        return e
    if isinstance(e, Const) and abs(e.value) < 2**53:
        return Const(float(e.value), e.span)
    return ToFloat(e, e.span)


def _promote(left: Expr, right: Expr) -> tuple[Expr, Expr]:
    """Both as one number type."""
    if expr_type(left) is expr_type(right):
        return left, right
    return _to_float(left), _to_float(right)


def _promote_all(numbers: list[Expr]) -> list[Expr]:
    if all(expr_type(n) is _INT for n in numbers):
        return numbers
    return [_to_float(n) for n in numbers]


def _multiply(left: Expr, right: Expr, span: Span) -> Expr:
    return Binary(BinaryOp.MUL, left, right, span)


def _problem_symbol(name: str, span: Span) -> Symbol:
    if name == "s":
        return Symbol(name, Role.SCORE, _FLOAT, span)
    return Symbol(name, Role.INDEX if name in INDICES else Role.SIZE, _INT, span)


def _unknown_argument(parameter: ast.Parameter) -> Value:
    """An argument of any value, to check a definition that nobody calls."""
    scalar = _BOOL if parameter.type == "flag" else ScalarType(parameter.type)
    symbol = Symbol(parameter.name, Role.PARAM, scalar, parameter.span)
    return Value(symbol, "a parameter")


def _is_int(e: Expr) -> bool:
    return isinstance(e, Const) and expr_type(e) is _INT


def _int(e: Expr) -> int:
    assert isinstance(e, Const)
    return int(e.value)


def _is_trivial(e: Expr) -> bool:
    """Whether repeating an expression costs nothing: a handful of additions and products."""
    budget, stack = 5, [e]
    while stack:
        node = stack.pop()
        budget -= 1
        match node:
            case Const() | Symbol() | Let():
                pass
            case Negate() | ToFloat():
                stack.append(node.operand)
            case Binary(BinaryOp.ADD | BinaryOp.SUB | BinaryOp.MUL, left, right):
                stack += (left, right)
            case _:
                return False
        if budget < 0:
            return False
    return True


def _count_uses(body: ast.Expr, name: str) -> int:
    return sum(isinstance(node, ast.Name) and node.name == name for node in walk(body))


def _at(span: Span, scope: Scope) -> Span:
    """The place in the attention block: what a definition does, its outermost call does."""
    return scope.expanding[0][1] if scope.expanding else span


_FOLD: Final[dict[BinaryOp, Callable[[int, int], int]]] = {
    BinaryOp.ADD: lambda a, b: a + b,
    BinaryOp.SUB: lambda a, b: a - b,
    BinaryOp.MUL: lambda a, b: a * b,
    BinaryOp.FLOORDIV: lambda a, b: a // b,
    BinaryOp.MOD: lambda a, b: a % b,
}
_COMPARE: Final[dict[CompareOp, Callable[[int, int], bool]]] = {
    CompareOp.LT: lambda a, b: a < b,
    CompareOp.LE: lambda a, b: a <= b,
    CompareOp.EQ: lambda a, b: a == b,
    CompareOp.NE: lambda a, b: a != b,
    CompareOp.GE: lambda a, b: a >= b,
    CompareOp.GT: lambda a, b: a > b,
}
_INT_FUNCTIONS: Final[dict[str, Callable[..., int]]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "clamp": lambda x, low, high: min(max(x, low), high),
}


# ---- words for messages ------------------------------------------------------------------

_USAGE: Final = {
    **{name: f"{name}(x)" for name in LANGUAGE},
    "min": "min(x, y, …)",
    "max": "max(x, y, …)",
    "clamp": "clamp(x, low, high)",
    "bit": "bit(word, i)",
    "where": "where(condition, then, otherwise)",
}
_REAL_DIVISION: Final = {
    BinaryOp.FLOORDIV: "`floor(a / b)` divides floats and rounds down",
    BinaryOp.MOD: "`a - b * floor(a / b)` is the remainder of floats",
}
_HIDDEN_ADVICE: Final = {
    ("the scale", name): "write it as a score: `score s * …`" for name in ("q", "kv", "qpos", "s")
}


def usage_text(definition: ast.Definition) -> str:
    """`window(left, right = 0)`: how a definition is called."""
    parts = []
    for p in definition.parameters:
        default = "" if p.default is None else f" = {p.default.span.text}"
        parts.append(f"[{p.name}]" if p.type == "flag" else p.name + default)
    return f"{definition.name}({', '.join(parts)})" if parts else definition.name


def _argument_count(name: str) -> tuple[int, int | None]:
    return (3, 3) if name == "where" else FUNCTIONS[name].signature.count


def _takes(name: str) -> str:
    least, most = _argument_count(name)
    return f"{least} or more arguments" if most is None else _count_of(least, "argument")


def short_text(span: Span) -> str:
    """What stands at a place, on one line; `…` where it is long."""
    text = " ".join(span.text.split())
    return text if len(text) <= 40 else "…"


def _count_of(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one}" if n == 1 else f"{n} {many or one + 's'}"


def list_choices(names: Sequence[str]) -> str:
    """`int, float or bool`"""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def find_word(span: Span, word: str, number: int = 0) -> Span:
    """The place of a word inside of a span; the whole span where it is not there."""
    found = list(re.finditer(rf"\b{re.escape(word)}\b", span.text))
    if number >= len(found):
        return span
    start, end = found[number].span()
    return span.source.span(span.start + start, span.start + end)


def _did_you_mean(
    name: str, candidates: Iterable[str], definitions: Iterable[str] = ()
) -> str | None:
    """Advice; of definitions, which are many, only a very similar name."""
    closest = (
        find_closest(name, definitions, cutoff=0.8)
        or find_closest(name, candidates)
        or _SYNONYMS.get(name)
    )
    return None if closest is None else f"did you mean `{closest}`?"


def other_name(name: str) -> str:
    return f"{name}_" if len(name) > 2 else f"my_{name}"


def _declared_text(tensor: Tensor) -> str:
    dims = ", ".join(f"{d.size}{'?' if d.optional else ''}" for d in tensor.dims)
    return f"{tensor.element.name}[{dims}]"


_INDEX_OF: Final = {"B": "b", "Hq": "h", "Hkv": "hkv", "Sq": "q", "Skv": "kv"}


def _read_example(tensor: Tensor) -> str:
    indices = (_INDEX_OF.get(str(dim.size), "0") for dim in tensor.dims)
    return f"{tensor.name}[{', '.join(indices)}]"


def _power_advice(e: ast.Binary, exponent: Expr) -> tuple[str, str]:
    """What the exponent is, and what to write instead of `**`."""
    base = short_text(e.left.span)
    match exponent:
        case Const(value) if value in (0.5, -0.5):
            return f"{value}", f"write `{'rsqrt' if value < 0 else 'sqrt'}({base})`"
        case Const(float(value)) if value.is_integer() and 0 <= value <= MAX_EXPONENT:
            return "a float", f"write `** {int(value)}`"
        case Const(int(value)) if value < 0 and -value <= MAX_EXPONENT:
            power = "" if value == -1 else f"**{-value}"
            return f"{value}", f"write `1 / ({base}){power}`"
        case Const(value):
            found = print_number(value)
        case _:
            found = "not a constant"
    return found, f"for a positive base write `exp({short_text(e.right.span)} * log({base}))`"
