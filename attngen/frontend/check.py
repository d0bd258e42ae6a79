"""Syntax tree → `ir.attention.Attention` and schedules, or every error of both at once.

Consts, params and tensors are visible in the whole block; a let from its line on, a const in
the consts below it.  Everything that is known at compile time is a number afterwards; what the
first call decides (dtype, head dims, run-time head counts) stays open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, assert_never, final

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Span
from attngen.frontend import ast
from attngen.frontend.check_errors import (
    BadTensorSize,
    ConflictingValue,
    ConstWithoutValue,
    DuplicateName,
    DuplicateStatement,
    EmptyRange,
    ExpansionTooLarge,
    ExpressionTooDeep,
    HeadDimOutOfRange,
    HeadsNotDivisible,
    NumberOutOfRange,
    OptionalSizeUnbound,
    OutsideRange,
    ReservedName,
    SigmoidWithout,
    UnknownConst,
    UnknownDtype,
    UnknownElement,
    UnknownOutput,
    UnknownType,
    UnknownWeights,
    UnsupportedRange,
    WithoutOutput,
    WrongType,
)
from attngen.frontend.check_schedule import Settings, check_schedules
from attngen.frontend.elaborate import (
    MAX_DEPTH,
    MAX_NODES,
    TYPE_SYNONYMS,
    WHERE,
    Binding,
    Captured,
    Elaborator,
    Failed,
    Later,
    Scope,
    Value,
    Where,
    build_logical,
    constant_place,
    find_closest,
    find_word,
    found_type,
    list_choices,
    other_name,
    reserved_meaning,
    short_text,
)
from attngen.frontend.load import Unit, canonical_text, is_library
from attngen.ir.attention import OUTPUTS, SIZES, Attention, Bound, Param, Tensor, TensorDim
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Const,
    Expr,
    Let,
    LogicalOp,
    Role,
    Symbol,
    ToFloat,
    expr_type,
)
from attngen.ir.functions import call
from attngen.ir.printer import print_number
from attngen.ir.row_state import SIGMOID, SOFTMAX, SOFTMAX_WITH_SINK, RowState
from attngen.ir.schedule import Schedule
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import children, postorder, rewrite
from attngen.ir.types import ELEMENTS, FLOATING, Element, ScalarType
from attngen.ir.verify import MAX_HEAD_DIM, Place
from attngen.record import record

__all__ = ["Checked", "check"]

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT

Constant = bool | int | float

LARGEST_SIZE: Final = 2**31 - 1

_ELEMENT_ALIASES: Final = {"float": "fp32", "int": "int32"}
_ELEMENT_SYNONYMS: Final = {
    "float32": "float", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "f32": "float",
    "f16": "fp16", "int32_t": "int32", "i32": "int32", "i64": "int64", "u8": "uint8",
    "long": "int64", "boolean": "bool", "double": "float", "float64": "float", "fp64": "float",
}  # fmt: skip
_INDEX_SIZES: Final = {"b": "B", "h": "Hq", "hkv": "Hkv", "q": "Sq", "kv": "Skv", "qpos": "Skv"}

_SCALARS: Final = ("int", "float", "bool")
_WEIGHTS: Final = ("softmax", "sigmoid")


@final
@record(eq=False)
class Checked:
    """A checked variant, and what its schedules fix."""

    attention: Attention
    schedules: Mapping[str | None, Settings]
    """What each block sets, by target; None is the block for every target."""

    def schedule_for(self, target: str) -> Schedule:
        """The settings for every target, overridden key by key by those for this one."""
        base, own = self.schedules.get(None, {}), self.schedules.get(target, {})
        return Schedule(**{**base, **own})


def check(
    unit: Unit,
    *,
    consts: Mapping[str, Constant] | None = None,
    dtype: str | None = None,
    head_dim: tuple[int, int] | None = None,
) -> Checked:
    """Check a unit.

    `consts` replace the values that the block gives its consts; `dtype` and `head_dim` (qk, v)
    fix what the block leaves open.

    Errors:  A2xx, and A40x in schedules; all that there are, in the order of the text.
    """
    # NumPy's numbers are numbers too.
    given = {n: v.item() if hasattr(v, "item") else v for n, v in (consts or {}).items()}
    checker = _Checker(unit, given, dtype, head_dim)
    checked = checker.run()
    errors = checker.errors
    if errors:
        raise AttnError(*sorted(errors, key=lambda error: _place(error, unit)))
    assert checked is not None
    return checked


def _place(error: Diagnostic, unit: Unit) -> tuple[int, int]:
    span = error.span
    if span is None:
        return 0, 0
    return (1 if span.source is unit.main.span.source else 2), span.start


S = TypeVar("S", bound=ast.Statement)


class _Checker:
    """One check: the names and results that accumulate on the way."""

    def __init__(
        self,
        unit: Unit,
        given: dict[str, Constant],
        dtype_given: str | None,
        head_dim_given: tuple[int, int] | None,
    ) -> None:
        self.unit = unit
        self.given = given
        self.dtype_given = dtype_given
        self.head_dim_given = head_dim_given
        self.elaborator = Elaborator(unit.definitions)

        self.names: dict[str, Binding] = {}
        self.declared: dict[str, ast.Const | ast.Param | ast.Tensor | ast.Let] = {}
        self.singles: dict[type[Any], ast.Statement] = {}
        """The first statement of each kind that may stand once."""
        self.const_values: dict[str, Constant] = {}
        self.params: list[Param] = []
        self.tensors: list[Tensor] = []
        self.scores: list[Expr] = []
        self.masks: list[Expr] = []
        self.parts: dict[str, Any] = {}
        """Finished fields of the Attention."""

    @property
    def errors(self) -> list[Diagnostic]:
        return self.elaborator.errors

    def run(self) -> Checked | None:
        """Everything, in an order in which each step knows what it needs."""
        statements = self.unit.attention.statements
        self._declare()
        self._consts()
        for statement in statements:
            if isinstance(statement, ast.Param):
                self._param(statement)
        self._tensors()
        for statement in statements:
            self._statement(statement)
        self._defaults()
        own = [item for item in self.unit.main.items if isinstance(item, ast.Definition)]
        for definition in own:
            self.elaborator.check_unused(self.unit.definitions[definition.name])
        schedules = self._schedules()
        self._check_limits()
        if self.errors:
            return None
        return Checked(self._assemble(), schedules)

    # ---- names

    def _declare(self) -> None:
        """Give every declared name a first meaning; report the ones that are taken."""
        for statement in self.unit.attention.statements:
            if not isinstance(statement, ast.Const | ast.Param | ast.Tensor | ast.Let):
                continue
            name, span = statement.name, statement.name_span
            meaning = reserved_meaning(name)
            if meaning is not None:
                self.report(ReservedName(span, name, meaning, other_name(name)))
            elif name in self.declared:
                self.report(DuplicateName(span, name, self.declared[name].name_span))
                continue
            elif (definition := self._own_definition(name)) is not None:
                self.report(DuplicateName(span, name, definition.name_span))
            self.declared.setdefault(name, statement)
            if isinstance(statement, ast.Param):
                self.names[name] = _param_symbol(statement)
            else:
                self.names[name] = Later(type(statement).__name__.lower(), span)
        self.elaborator.block_names = set(self.declared)

    def _own_definition(self, name: str) -> ast.Definition | None:
        """A definition of the main file or of a file that it imports."""
        definition = self.unit.definitions.get(name)
        return None if definition is None or is_library(definition) else definition

    def _is_first(self, statement: ast.Const | ast.Param | ast.Tensor | ast.Let) -> bool:
        return self.declared.get(statement.name) is statement

    def report(self, diagnostic: Diagnostic) -> None:
        self.elaborator.report(diagnostic)

    def _scope(self, where: Where) -> Scope:
        return Scope(self.names, where)

    # ---- constants

    def _consts(self) -> None:
        statements = self.unit.attention.statements
        consts = [s for s in statements if isinstance(s, ast.Const)]
        known = [const.name for const in consts]
        for name in self.given:
            if name not in known:
                reason = f"the consts of this block: {', '.join(known) or 'none'}"
                if isinstance(self.declared.get(name), ast.Param):
                    reason = f"`{name}` is a param: its value is given with each call"
                span, closest = self.unit.attention.name_span, find_closest(name, known)
                self.report(UnknownConst(span, name, reason, closest))
        for const in consts:
            if self._is_first(const):
                value = self._const(const)
                self.names[const.name] = (
                    Failed() if value is None else Value(Const(value, const.name_span), "a const")
                )
                if value is not None:
                    self.const_values[const.name] = value

    def _const(self, const: ast.Const) -> Constant | None:
        name, type_span = const.name, _behind(const.name_span, const.span)
        wanted = self._scalar(const.type, type_span, "a const")
        if const.type is not None and wanted is None:
            return None
        written: Constant | None = None
        if const.value is not None:
            where = constant_place(f"the const `{name}`")
            written = self._constant(const.value, where, wanted)
            if written is None:
                return None
        if name not in self.given:
            if written is None:
                example = {_INT: "128", _FLOAT: "0.5", _BOOL: "true"}[wanted or _INT]
                self.report(ConstWithoutValue(const.name_span, name, example))
            return written
        value = self.given[name]
        if wanted is None and written is not None:
            wanted = expr_type(Const(written))
        return self._given_const(name, value, wanted, const.name_span)

    def _given_const(
        self, name: str, value: Constant, wanted: ScalarType | None, span: Span
    ) -> Constant | None:
        found = expr_type(Const(value))
        if found is _INT and not -(2**63) <= value < 2**63:
            self.report(_too_large(span, int(value)))
            return None
        if wanted is None or found is wanted:
            return value
        if found is _INT and wanted is _FLOAT:
            return float(value)
        what = f"the value {print_number(value)} given to `{name}`"
        expected = {_INT: "an integer", _FLOAT: "a float", _BOOL: "a truth value"}[wanted]
        self.report(WrongType(span, what, expected, f"declared as {wanted.value}", None))
        return None

    def _scalar(self, name: str | None, span: Span, what: str) -> ScalarType | None:
        if name is None or name in _SCALARS:
            return None if name is None else ScalarType(name)
        closest = TYPE_SYNONYMS.get(name) or find_closest(name, _SCALARS)
        place = find_word(span, name)
        self.report(UnknownType(place, name, what, list_choices(_SCALARS), closest))
        return None

    def _constant(self, e: ast.Expr, where: Where, wanted: ScalarType | None) -> Constant | None:
        """The value of a constant expression, as `wanted` if that is given."""
        scope = self._scope(where)
        if wanted is None:
            value = self.elaborator.elaborate(e, scope)
        else:
            value = self.elaborator.elaborate_as(e, scope, wanted, where.text)
        if value is None:
            return None
        for node in postorder(value):
            part = node.value if isinstance(node, Const) else 0
            if isinstance(part, int) and not -(2**63) <= part < 2**63:
                self.report(_too_large(node.span or e.span, part))
                return None
        return _number_of(value)

    def _int_constant(self, e: ast.Expr, text: str) -> int | None:
        value = self._constant(e, constant_place(text), _INT)
        return None if value is None else int(value)

    # ---- params

    def _param(self, param: ast.Param) -> None:
        scalar = self._scalar(param.type, _behind(param.name_span, param.span), "a param")
        default = bound = None
        if scalar is not None:
            if param.default is not None:
                where = constant_place(f"the default of `{param.name}`")
                default = self._constant(param.default, where, scalar)
            bound = Bound() if param.range is None else self._range(param, scalar)
        if not self._is_first(param) or scalar is None:
            return
        if bound is None:
            return
        if default is not None and param.range is not None and not bound.contains(default):
            text = print_number(default)
            assert param.default is not None
            self.report(OutsideRange(param.default.span, param.name, text, param.range.span))
        self.params.append(Param(param.name, scalar, default, bound, param.name_span))

    def _range(self, param: ast.Param, scalar: ScalarType) -> Bound | None:
        """`1 <= w < 2**31` as a bound; None after an error."""
        assert param.range is not None
        if scalar is _BOOL:
            reason = "a truth value has no range"
            self.report(UnsupportedRange(param.range.span, param.name, reason))
            return None
        comparisons = [param.range]
        if isinstance(param.range, ast.BoolOp) and param.range.op == "and":
            comparisons = list(param.range.operands)
        bound: Bound | None = Bound()
        for comparison in comparisons:
            if not isinstance(comparison, ast.Comparison):
                reason = "this is no comparison; several are joined by `and`"
                self.report(UnsupportedRange(comparison.span, param.name, reason))
                return None
            operands = comparison.operands
            for left, op, right in zip(operands, comparison.ops, operands[1:], strict=False):
                end = self._range_end(param, scalar, left, op, right)
                bound = None if end is None or bound is None else _intersect(bound, *end)
        if bound is not None and _is_empty(bound, scalar):
            self.report(EmptyRange(param.range.span, param.name))
            return None
        return bound

    def _range_end(
        self, param: ast.Param, scalar: ScalarType, left: ast.Expr, op: str, right: ast.Expr
    ) -> tuple[str, Constant] | None:
        """One comparison as an operator with the param on its left, and the constant."""
        on_left, on_right = (_is_name(e, param.name) for e in (left, right))
        if on_left == on_right or op == "!=":
            reason = f"`{short_text(left.span.to(right.span))}` does not bound `{param.name}`"
            self.report(UnsupportedRange(left.span.to(right.span), param.name, reason))
            return None
        if on_right:
            op = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(op, op)
        where = constant_place(f"the range of `{param.name}`")
        value = self._constant(right if on_left else left, where, scalar)
        if value is not None and math.isnan(value):
            reason = "nothing compares with nan"
            self.report(UnsupportedRange(left.span.to(right.span), param.name, reason))
            return None
        return None if value is None else (op, value)

    # ---- tensors

    def _tensors(self) -> None:
        statements = self.unit.attention.statements
        tensors = [s for s in statements if isinstance(s, ast.Tensor)]
        for tensor in tensors:
            element = self._element(tensor)
            dims = [self._dim(dim) for dim in tensor.dims]
            if not self._is_first(tensor):
                continue
            if element is None or None in dims:
                self.names[tensor.name] = Failed()
                continue
            sizes = tuple(dim for dim in dims if dim is not None)
            checked = Tensor(tensor.name, element, sizes, tensor.span)
            self.tensors.append(checked)
            self.names[tensor.name] = Captured(checked)
        bound = {d.size for t in tensors for d in t.dims if not d.optional}
        for tensor in tensors:
            for dim in tensor.dims:
                is_new = isinstance(dim.size, str) and isinstance(self.names.get(dim.size), Value)
                if is_new and dim.size not in bound and self._kind(str(dim.size)) == "a size":
                    self.report(OptionalSizeUnbound(dim.span, str(dim.size)))

    def _kind(self, name: str) -> str:
        bound = self.names.get(name)
        match bound:
            case Value():
                return bound.kind
            case Captured():
                return "a tensor"
            case Later():
                return f"a {bound.statement}"
            case Failed():
                statement = self.declared.get(name)
                return f"a {type(statement).__name__.lower()}"
            case None:
                return ""
            case _:
                assert_never(bound)

    def _element(self, tensor: ast.Tensor) -> Element | None:
        name = tensor.dtype
        element = ELEMENTS.get(_ELEMENT_ALIASES.get(name, name))
        if element is None:
            choices = ", ".join((*ELEMENTS, "float", "int"))
            known = (*ELEMENTS, *_ELEMENT_ALIASES)
            closest = _ELEMENT_SYNONYMS.get(name) or find_closest(name, known)
            place = find_word(_behind(tensor.name_span, tensor.span), name)
            self.report(UnknownElement(place, name, choices, closest))
        return element

    def _dim(self, dim: ast.Dim) -> TensorDim | None:
        """One dimension: a number, a const, a size of the problem, or a name that it binds."""
        size, span = dim.size, dim.span
        if isinstance(size, str):
            if isinstance(self.declared.get(size), ast.Const):
                value = self.const_values.get(size)
                if value is None:
                    return None
                if isinstance(value, bool) or not isinstance(value, int):
                    reason = f"the const `{size}` is {found_type(Const(value))}"
                    self.report(BadTensorSize(span, size, reason, None))
                    return None
                size = value
            elif size not in SIZES:
                return self._named_size(dim, size)
        if isinstance(size, int) and not 1 <= size <= LARGEST_SIZE:
            reason = f"a dimension is a number from 1 to {LARGEST_SIZE}"
            self.report(BadTensorSize(span, str(size), reason, None))
            return None
        return TensorDim(size, dim.optional)

    def _named_size(self, dim: ast.Dim, name: str) -> TensorDim | None:
        """A name that the shape of the argument binds, if it can be one."""
        reason, closest = None, None
        meaning = reserved_meaning(name)
        if meaning is not None:
            reason, closest = f"`{name}` is {meaning}", _INDEX_SIZES.get(name)
        elif name in self.declared:
            reason = f"`{name}` is {self._kind(name)}, and shapes bind new names only"
        else:
            same = [size for size in SIZES if size.casefold() == name.casefold()]
            if same:
                reason, closest = f"too easily mistaken for the size `{same[0]}`", same[0]
        if reason is not None:
            advice = None if closest is None else f"did you mean `{closest}`?"
            self.report(BadTensorSize(dim.span, name, reason, advice))
            return None
        symbol = Symbol(name, Role.SIZE, _INT, dim.span)
        self.names.setdefault(name, Value(symbol, "a size"))
        return TensorDim(name, dim.optional)

    # ---- the other statements

    def _statement(self, statement: ast.Statement) -> None:
        match statement:
            case ast.Const() | ast.Param() | ast.Tensor():
                return
            case ast.Let():
                self._let(statement)
                return
            case ast.Score():
                value = self._placed(statement.value, Place.SCORE, _FLOAT, "a score")
                if value is not None:
                    self.scores.append(value)
                return
            case ast.Mask():
                value = self._placed(statement.value, Place.MASK, _BOOL, "a mask")
                if value is not None:
                    self.masks.append(value)
                return
        first = self.singles.setdefault(type(statement), statement)
        if first is not statement:
            word = statement.span.text.split(maxsplit=1)[0]
            self.report(DuplicateStatement(statement.span, word, first.span))
        match statement:
            case ast.Dtype():
                self._dtype(statement)
            case ast.HeadDim():
                self._head_dim(statement)
            case ast.Heads():
                self._heads(statement)
            case ast.Length():
                for name, e in (("length_q", statement.q), ("length_kv", statement.kv)):
                    if e is not None:
                        self.parts[name] = self._placed(e, Place.LENGTH, _INT, "a length")
            case ast.Scale():
                value = self._placed(statement.value, Place.SCALE, _FLOAT, "the scale")
                self.parts["scale"] = value
            case ast.Weights():
                self._weights(statement)
            case ast.Output():
                self._output(statement)
            case _:
                assert_never(statement)

    def _placed(self, e: ast.Expr, place: Place, wanted: ScalarType, what: str) -> Expr | None:
        return self.elaborator.elaborate_as(e, self._scope(WHERE[place]), wanted, what)

    def _let(self, let: ast.Let) -> None:
        where = Where("a let", frozenset(), "")
        value = self.elaborator.elaborate(let.value, self._scope(where))
        if not self._is_first(let):
            return
        if value is None:
            self.names[let.name] = Failed()
        elif isinstance(value, Const):
            self.names[let.name] = Value(value, "a let")
        else:
            self.names[let.name] = Value(Let(let.name, value, let.span), "a let")

    def _dtype(self, statement: ast.Dtype) -> None:
        dtype = self._find_dtype(statement.dtype, find_word(statement.span, statement.dtype))
        given = self.dtype_given
        if dtype is not None and given is not None and given != dtype.name:
            if given in FLOATING:
                self.report(ConflictingValue(statement.span, "dtype", dtype.name, given))
            else:
                self._find_dtype(given, None)
        self.parts["dtype"] = dtype

    def _find_dtype(self, name: str, span: Span | None) -> Element | None:
        dtype = FLOATING.get(name)
        if dtype is None:
            closest = _ELEMENT_SYNONYMS.get(name) or find_closest(name, FLOATING)
            closest = {"float": "fp32"}.get(closest or name, closest)
            self.report(UnknownDtype(span, name, ", ".join(FLOATING), closest))
        return dtype

    def _head_dim(self, statement: ast.HeadDim) -> None:
        same = statement.qk is statement.v
        qk = self._one_head_dim(statement.qk, "D" if same else "Dqk")
        v = qk if same else self._one_head_dim(statement.v, "Dv")
        given = self.head_dim_given
        if given is not None and qk is not None and v is not None and given != (qk, v):
            declared, asked = (f"qk = {a}, v = {b}" for a, b in ((qk, v), given))
            self.report(ConflictingValue(statement.span, "head_dim", declared, asked))
        self.parts["head_dim_qk"], self.parts["head_dim_v"] = qk, v

    def _one_head_dim(self, e: ast.Expr, name: str) -> int | None:
        value = self._int_constant(e, "a head dim")
        return None if value is None else self._in_head_dim_range(value, name, e.span)

    def _in_head_dim_range(self, value: int, name: str, span: Span | None) -> int | None:
        if 1 <= value <= MAX_HEAD_DIM:
            return value
        self.report(HeadDimOutOfRange(span, name, value, MAX_HEAD_DIM))
        return None

    def _heads(self, statement: ast.Heads) -> None:
        q = self._int_constant(statement.q, "a number of heads")
        kv = self._int_constant(statement.kv, "a number of heads")
        self.parts["heads_q"], self.parts["heads_kv"] = q, kv
        if q is None or kv is None:
            return
        if not (1 <= q <= LARGEST_SIZE and 1 <= kv <= LARGEST_SIZE):
            reason = f"there are 1 to {LARGEST_SIZE} heads"
            self.report(HeadsNotDivisible(statement.span, q, kv, reason, None))
        elif q % kv:
            near = [n for n in range(1, q + 1) if q % n == 0] if q <= 4096 else []
            nearest = min(near, key=lambda n: abs(n - kv), default=None)
            advice = None if nearest is None else f"{q} query heads could share {nearest}"
            reason = f"{q} is not a multiple of {kv}"
            self.report(HeadsNotDivisible(statement.span, q, kv, reason, advice))

    def _weights(self, statement: ast.Weights) -> None:
        sink = statement.sink
        if sink is not None:
            self.parts["sink"] = self._placed(sink, Place.SINK, _FLOAT, "a sink")
        if statement.kind not in _WEIGHTS:
            choices, closest = " or ".join(_WEIGHTS), find_closest(statement.kind, _WEIGHTS)
            place = find_word(statement.span, statement.kind)
            self.report(UnknownWeights(place, statement.kind, choices, closest))
        elif statement.kind == "sigmoid" and sink is not None:
            reason = "a sink joins the sum of a softmax; sigmoid weights have no sum"
            self.report(SigmoidWithout(sink.span, "sink", reason))

    def _output(self, statement: ast.Output) -> None:
        names = statement.names
        weights = self.singles.get(ast.Weights) or next(
            (s for s in self.unit.attention.statements if isinstance(s, ast.Weights)), None
        )
        is_sigmoid = isinstance(weights, ast.Weights) and weights.kind == "sigmoid"
        for i, name in enumerate(names):
            place = find_word(statement.span, name, names[:i].count(name))
            if name not in OUTPUTS:
                choices, closest = ", ".join(OUTPUTS), find_closest(name, OUTPUTS)
                self.report(UnknownOutput(place, name, choices, closest))
            elif name in names[:i]:
                self.report(DuplicateStatement(place, name, find_word(statement.span, name)))
            elif is_sigmoid and name != "o":
                reason = "sigmoid weights need no maximum and no sum, so none is kept"
                self.report(SigmoidWithout(place, f"`{name}`", reason))
        known = [name for name in names if name in OUTPUTS]
        if known and "o" not in known:
            fixed = ", ".join(("o", *known))
            self.report(WithoutOutput(statement.span, fixed))
        self.parts["outputs"] = tuple(names)

    # ---- what is not written

    def _defaults(self) -> None:
        if ast.Dtype not in self.singles and self.dtype_given is not None:
            self.parts["dtype"] = self._find_dtype(self.dtype_given, None)
        given = self.head_dim_given
        if ast.HeadDim not in self.singles and given is not None:
            same = given[0] == given[1]
            qk = self._in_head_dim_range(given[0], "D" if same else "Dqk", None)
            v = qk if same else self._in_head_dim_range(given[1], "Dv", None)
            self.parts["head_dim_qk"], self.parts["head_dim_v"] = qk, v

    # ---- results

    def _schedules(self) -> dict[str | None, Settings]:
        weights = self.singles.get(ast.Weights)
        is_sigmoid = isinstance(weights, ast.Weights) and weights.kind == "sigmoid"
        return check_schedules(
            self.unit.schedules,
            lambda e: self._int_constant(e, "a schedule value"),
            self.report,
            weights.span if is_sigmoid and weights is not None else None,
        )

    def _assemble(self) -> Attention:
        block, parts = self.unit.attention, self.parts
        scale = parts.get("scale")
        return Attention(
            name=block.name,
            dtype=parts.get("dtype"),
            head_dim_qk=parts.get("head_dim_qk"),
            head_dim_v=parts.get("head_dim_v"),
            heads_q=parts.get("heads_q"),
            heads_kv=parts.get("heads_kv"),
            params=tuple(self.params),
            tensors=tuple(self.tensors),
            length_q=parts.get("length_q"),
            length_kv=parts.get("length_kv"),
            scale=_default_scale() if scale is None else scale,
            scores=self._separate_scores(),
            mask=self._whole_mask(),
            row_state=self._row_state(),
            sink=parts.get("sink"),
            outputs=parts.get("outputs", ("o",)),
            source=canonical_text(self._stated(), self.unit.definitions),
        )

    def _whole_mask(self) -> Expr | None:
        if not self.masks:
            return None
        span = self.masks[0].span
        mask = build_logical(LogicalOp.AND, self.masks, span)
        return None if isinstance(mask, Const) and mask.value is True else mask

    def _row_state(self) -> RowState:
        weights = self.singles.get(ast.Weights)
        if isinstance(weights, ast.Weights) and weights.kind == "sigmoid":
            return SIGMOID
        return SOFTMAX if self.parts.get("sink") is None else SOFTMAX_WITH_SINK

    def _separate_scores(self) -> tuple[Expr, ...]:
        """Each score line has its own `s`, so a let that depends on it is one let per line."""
        separate: list[Expr] = []
        seen: set[int] = set()
        for score in self.scores:
            depends: dict[int, bool] = {}
            for node in postorder(score):
                depends[id(node)] = (isinstance(node, Symbol) and node.role is Role.SCORE) or any(
                    depends[id(child)] for child in children(node)
                )
            again = {
                node.name
                for node in postorder(score)
                if isinstance(node, Let) and depends[id(node)] and id(node) in seen
            }
            seen |= {id(node) for node in postorder(score) if isinstance(node, Let)}
            separate.append(self._with_new_lets(score, again) if again else score)
        return tuple(separate)

    def _with_new_lets(self, score: Expr, names: set[str]) -> Expr:
        def rule(node: Expr) -> Expr:
            if isinstance(node, Let) and node.name in names:
                return self.elaborator.new_let(node.name, node.value, node.span)
            return node

        return rewrite(score, rule)

    def _check_limits(self) -> None:
        """Size and depth of all expressions together, and constants that nothing can hold."""
        single = ("length_q", "length_kv", "scale", "sink")
        known = [e for e in map(self.parts.get, single) if e is not None]
        roots, span = (*known, *self.scores, *self.masks), self.unit.attention.name_span
        depth: dict[int, int] = {}
        for node in postorder(*roots):
            depth[id(node)] = 1 + max((depth[id(child)] for child in children(node)), default=0)
            if isinstance(node, Const):
                self._check_constant(node)
        if len(depth) > MAX_NODES:
            self.report(ExpansionTooLarge(span, MAX_NODES))
        for root in roots:
            if depth[id(root)] > MAX_DEPTH:
                self.report(ExpressionTooDeep(root.span or span, MAX_DEPTH))

    def _check_constant(self, node: Const) -> None:
        value, span = node.value, node.span or self.unit.attention.name_span
        if isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                self.report(_too_large(span, value))
        elif math.isfinite(value) and "inf" in print_number(value):
            advice = "infinity is written `inf`"
            what, found = f"{value:g}", "the largest float is about 3.4e38"
            self.report(NumberOutOfRange(span, what, "a float32", found, advice))

    def _stated(self) -> ast.Attention:
        """The block with every value that the caller chose written into it."""
        block = self.unit.attention
        statements: list[ast.Statement] = []
        if ast.Dtype not in self.singles and self.dtype_given is not None:
            statements.append(ast.Dtype(self.dtype_given, block.span))
        if ast.HeadDim not in self.singles and self.head_dim_given is not None:
            qk, v = (_literal(dim, block.span) for dim in self.head_dim_given)
            statements.append(ast.HeadDim(qk, v, block.span))
        for statement in block.statements:
            if isinstance(statement, ast.Const) and statement.name in self.given:
                value = _literal(self.const_values[statement.name], statement.span)
                statement = replace(statement, value=value)
            statements.append(statement)
        return replace(block, statements=tuple(statements))


def _default_scale() -> Expr:
    """1 / sqrt(Dqk)"""
    root = call("sqrt", ToFloat(Symbol("Dqk", Role.SIZE, _INT)))
    return Binary(BinaryOp.DIV, Const(1.0), root)


def _number_of(e: Expr) -> Constant:
    """The value of an expression of constants; a float is rounded to float32."""
    if isinstance(e, Const):
        return e.value
    result: Constant = evaluate(e, {}, {}).data.item()
    return result


def _literal(value: Constant, span: Span) -> ast.Expr:
    """A number as a person writes it."""
    if not isinstance(value, bool) and (value < 0 or math.copysign(1.0, value) < 0):
        return ast.Unary("-", _literal(-value, span), span)
    return ast.Literal(value, print_number(value), span)


def _too_large(span: Span, value: int) -> Diagnostic:
    what = str(value) if abs(value) < 10**40 else "this integer"
    return NumberOutOfRange(span, what, "64 bits", "integers are computed in 64 bits", None)


def _param_symbol(param: ast.Param) -> Binding:
    if param.type not in _SCALARS:
        return Failed()
    scalar = ScalarType(param.type)
    return Value(Symbol(param.name, Role.PARAM, scalar, param.name_span), "a param")


def _behind(first: Span, whole: Span) -> Span:
    """What stands in `whole` behind `first`."""
    return whole.source.span(first.end, max(first.end, whole.end))


def _is_name(e: ast.Expr, name: str) -> bool:
    return isinstance(e, ast.Name) and e.name == name


def _intersect(bound: Bound, op: str, value: Constant) -> Bound:
    """A bound and one more condition: the param, an operator, a constant."""
    if op == "==":
        return _intersect(_intersect(bound, "<=", value), ">=", value)
    is_open = op in ("<", ">")
    if op in (">", ">="):
        old, old_open = bound.low, bound.low_open
        if old is None or value > old or (value == old and is_open):
            return replace(bound, low=value, low_open=is_open)
        return replace(bound, low_open=old_open)
    old, old_open = bound.high, bound.high_open
    if old is None or value < old or (value == old and is_open):
        return replace(bound, high=value, high_open=is_open)
    return replace(bound, high_open=old_open)


def _is_empty(bound: Bound, scalar: ScalarType) -> bool:
    if bound.low is None or bound.high is None:
        return False
    if scalar is _INT:
        return bound.low + bound.low_open > bound.high - bound.high_open
    return bound.low > bound.high or (
        bound.low == bound.high and (bound.low_open or bound.high_open)
    )
