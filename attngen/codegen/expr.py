"""Expressions → CUDA text.

    kv <= qpos and doc[b, qpos] == doc[b, kv]
    at.kv <= at.qpos && read_doc(args, at.b, at.qpos) == read_doc(args, at.b, at.kv)

Names: indices and the lengths of this sequence come from `at`, other sizes and params from
`args` (`args.p_cap`), tensors through one `read_<tensor>` each, lets through one
`let_<name>` each.  Nothing the user wrote is ever a C++ name by itself.  `and`, `or` and
`where` are `&&`, `||` and `?:`, which are as lazy as the language wants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from typing import Final, assert_never, final

import numpy as np

from attngen.analysis.ranges import (
    INT32,
    INT64,
    Ranges,
    compile_time_ranges,
    infer_ranges,
    range_of_work,
)
from attngen.ir.attention import Attention
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
    LogicalOp,
    Negate,
    Not,
    Role,
    Select,
    Symbol,
    ToFloat,
    expr_type,
)
from attngen.ir.functions import FUNCTIONS
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder, symbols, tensors
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "Body",
    "CType",
    "Core",
    "Emitted",
    "ExprPrinter",
    "Variable",
    "called_lets",
    "float_literal",
    "mentions_score",
    "wraps_around",
]


class CType(IntEnum):
    """C++ types of emitted expressions; of two integers the larger number is the wider type."""

    BOOL = 0
    INT32 = 1
    INT64 = 2
    FLOAT = 3

    @property
    def text(self) -> str:
        return ("bool", "int", "ag_i64", "float")[self]


class _Precedence(IntEnum):
    """C++ operators, loosest first; operands that bind looser get parentheses."""

    SELECT = 0
    OR = 1
    AND = 2
    BITS = 3
    EQUALITY = 4
    RELATION = 5
    SHIFT = 6
    SUM = 7
    PRODUCT = 8
    UNARY = 9
    PRIMARY = 10


@final
@record
class Emitted:
    """C++ text of an expression, its type, and how tightly it binds."""

    text: str
    type: CType
    precedence: _Precedence = _Precedence.PRIMARY

    def at(self, precedence: _Precedence) -> str:
        """The text, in parentheses where an operator of this precedence needs them."""
        return self.text if self.precedence >= precedence else f"({self.text})"

    def widened(self) -> Emitted:
        """The same integer as ag_i64."""
        if self.type is CType.INT64:
            return self
        return Emitted(f"(ag_i64){self.at(_Precedence.UNARY)}", CType.INT64, _Precedence.UNARY)


_RELATIONS: Final = {
    op: _Precedence.EQUALITY if op in (CompareOp.EQ, CompareOp.NE) else _Precedence.RELATION
    for op in CompareOp
}
_ARITHMETIC: Final = {
    BinaryOp.ADD: _Precedence.SUM,
    BinaryOp.SUB: _Precedence.SUM,
    BinaryOp.MUL: _Precedence.PRODUCT,
    BinaryOp.DIV: _Precedence.PRODUCT,
}
_VARYING: Final = frozenset({"q", "qpos", "kv", "s"})
_MODULAR: Final = (BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL)
_UNSIGNED: Final = "unsigned long long"
_INTEGER_FUNCTIONS: Final = {BinaryOp.FLOORDIV: "ag_floordiv", BinaryOp.MOD: "ag_mod"}


@final
@record
class Variable:
    """A local variable: a let that is computed before the expression that uses it."""

    c_type: str
    name: str
    text: str


@final
@record
class Body:
    """Local variables, then the expression itself."""

    variables: tuple[Variable, ...]
    text: str
    c_type: str


@final
@record
class Core:
    """What most of the work of a score is: the score is core * number + addend.

    power:  the core is 1 / (1 + 2^-(s power)), s the score before; None where it is not.
    """

    text: str
    number: float
    addend: float
    power: float | None


@final
@record
class _Line:
    """A value that is core * number + addend, times `scale` before the addend where `is_raw`.

    What constants do to it is done to number and addend; it costs an operation when it is used.
    The core is sigmoid2(s * scale * power) where `power` is given.
    """

    core: Emitted
    number: float = 1.0
    addend: float = 0.0
    is_raw: bool = False
    power: float | None = None

    def times(self, factor: float) -> _Line | None:
        """The value times a constant; None where that leaves the middle of the numbers."""
        number, addend = self.number * factor, self.addend * factor
        is_moderate = _LEAST <= abs(number) <= _MOST and abs(addend) <= _MOST
        return replace(self, number=number, addend=addend) if is_moderate else None

    def plus(self, constant: float) -> _Line | None:
        """The value and a constant; None where that leaves the middle of the numbers."""
        addend = self.addend + constant
        return replace(self, addend=addend) if abs(addend) <= _MOST else None

    def emitted(self) -> Emitted:
        """The value itself."""
        if self.is_raw:
            times = f"scale * {float_literal(self.number)}" if self.number != 1.0 else "scale"
        elif self.number == 1.0:
            return self.core if self.addend == 0.0 else self._sum()
        else:
            times = float_literal(self.number)
        if self.number == -1.0 and not self.is_raw:
            return self._difference()
        if self.addend == 0.0:
            factor = f"({times})" if " " in times else times
            text = f"{self.core.at(_Precedence.PRODUCT)} * {factor}"
            return Emitted(text, CType.FLOAT, _Precedence.PRODUCT)
        return Emitted(
            f"ag_fma({self.core.text}, {times}, {float_literal(self.addend)})", CType.FLOAT
        )

    def _difference(self) -> Emitted:
        if self.addend == 0.0:
            return Emitted(f"-{self.core.at(_Precedence.PRIMARY)}", CType.FLOAT, _Precedence.UNARY)
        text = f"{float_literal(self.addend)} - {self.core.at(_Precedence.PRODUCT)}"
        return Emitted(text, CType.FLOAT, _Precedence.SUM)

    def _sum(self) -> Emitted:
        sign = "-" if self.addend < 0 else "+"
        text = f"{self.core.at(_Precedence.SUM)} {sign} {float_literal(abs(self.addend))}"
        return Emitted(text, CType.FLOAT, _Precedence.SUM)


_LOG2_E: Final = math.log2(math.e)
_LEAST: Final = 2.0**-40
_MOST: Final = 2.0**40
"""Constants that are gathered stay between these, far from where float32 ends."""


@final
class ExprPrinter:
    """Prints the expressions of one attention variant.

    `further` are expressions made from the variant's, such as tile classes, and `symbols` the
    ranges of the symbols that only they mention.  With `is_quick`, what is computed from a score
    takes the quick forms of functions, multiplies by the reciprocal of what does not vary, and
    adds a product in one operation; formulas of the row state multiply by quick reciprocals.
    Calls in `short`, with what their operands can be, take their shortest forms
    (quick_functions.py).  Symbols in `raw` are the sum q.k, which `scale` makes the score.
    A node in `given`, by its id, is not computed but named (score_parts.py, mask_parts.py).
    With `is_branchless`, `and` and `or` are `&` and `|`, which skip nothing.  With `wraps`, sums
    and products that data might lead beyond 64 bits wrap around, for they are computed where the
    language would not.
    """

    def __init__(
        self,
        attention: Attention,
        further: tuple[Expr, ...] = (),
        symbols: Ranges | None = None,
        *,
        is_quick: bool = False,
        is_branchless: bool = False,
        wraps: bool = False,
        given: Mapping[int, Emitted] | None = None,
        short: Mapping[int, Interval] | None = None,
        raw: frozenset[int] = frozenset(),
    ) -> None:
        self._attention = attention
        self._short = short or {}
        self._raw = raw
        self._lines: dict[int, _Line] = {}
        self._is_quick = is_quick
        self._is_branchless = is_branchless
        self._wraps = wraps
        self._given = given or {}
        self._factors: dict[int, tuple[Emitted, Emitted]] = {}
        roots = (*attention.expressions(), *further)
        known = {**compile_time_ranges(attention), **(symbols or {})}
        self._ranges = infer_ranges(roots, known, attention)
        self._let_types: dict[int, CType] = {}
        for node in postorder(*roots):
            if isinstance(node, Let):
                self._let_types[id(node)] = self._emit(node.value).type

    def print(self, e: Expr, *, is_eager: bool = False) -> Body:
        """The C++ text of an expression, and the lets that it computes first.

        A let is a local variable where it is needed for every pair, or reads no tensor.  Any
        other stays a function, called where it is needed, because `and`, `or` and `where` must
        not read what they skip; with `is_eager` they may, and every let is a variable.
        """
        if is_eager:
            local = tuple(n for n in postorder(*children(e)) if isinstance(n, Let))
        else:
            local = eager_lets(e)
        if self._given:
            local = tuple(let for let in local if id(let) in self._computed(e))
        emitted = [(let.name, self._emit(let.value, local=local)) for let in local]
        body = self._emit(e.value if isinstance(e, Let) else e, local=local)
        variables = tuple(Variable(x.type.text, f"let_{name}", x.text) for name, x in emitted)
        return Body(variables, body.text, body.type.text)

    def print_core(self, e: Expr) -> Core | None:
        """A score as `core * number + addend`, number above 0; None where it is nothing such."""
        self.print(e)  # finds the lines
        line = self._lines.get(id(e.value if isinstance(e, Let) else e))
        if line is None or line.is_raw or line.number <= 0:
            return None
        return Core(line.core.text, line.number, line.addend, line.power)

    def _computed(self, root: Expr) -> set[int]:
        """Nodes at and below `root` that are not inside of something given."""
        found: set[int] = set()
        stack = [root]
        while stack:
            node = stack.pop()
            if id(node) not in found and id(node) not in self._given:
                found.add(id(node))
                stack.extend(children(node))
        return found

    def print_row_formula(self, e: Expr, names: Mapping[str, str]) -> str:
        """The C++ text of a formula of the row state; `names` are its row values in C++."""
        return self._emit(e, row_names=names).text

    def print_operand(self, e: Expr) -> str:
        """The C++ text of an expression, as an argument of a function."""
        return self._emit(e).text

    def type_of(self, let: Let) -> str:
        """The C++ type of a let."""
        return self._let_types[id(let)].text

    def _emit(
        self,
        root: Expr,
        row_names: Mapping[str, str] | None = None,
        local: tuple[Let, ...] = (),
    ) -> Emitted:
        variables = {id(let) for let in local}
        done: dict[int, Emitted] = {}
        of_score: set[int] = set()
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if id(node) in done:
                continue
            if id(node) in self._given:
                done[id(node)] = self._given[id(node)]
                continue
            # The inside of a let is printed once, in its own function.
            below = () if isinstance(node, Let) else children(node)
            if not ready:
                stack.append((node, True))
                stack.extend((child, False) for child in below)
                continue
            if any(id(c) in of_score for c in below) or _is_score(node):
                of_score.add(id(node))
            if id(node) in variables:
                assert isinstance(node, Let)
                done[id(node)] = Emitted(f"let_{node.name}", self._let_types[id(node)])
                continue
            operands = [done[id(c)] for c in below]
            is_line = self._is_quick and id(node) in of_score
            line = self._line(node, operands) if is_line else None
            if line is not None:
                self._lines[id(node)] = line
                done[id(node)] = line.emitted()
                if line.addend == 0.0 and line.number != 1.0 and not line.is_raw:
                    number = float_literal(line.number)
                    self._factors[id(node)] = line.core, Emitted(number, CType.FLOAT)
            else:
                done[id(node)] = self._node(node, operands, row_names)
        return done[id(root)]

    def _line(self, node: Expr, operands: list[Emitted]) -> _Line | None:
        """The node as a line of something; None where constants have no part in it."""
        if expr_type(node) is not ScalarType.FLOAT:
            return None
        match node:
            case Symbol() if id(node) in self._raw:
                return _Line(Emitted("s", CType.FLOAT), is_raw=True)
            case Negate(x):
                return self._line_of(x, operands[0]).times(-1.0)
            case Binary(BinaryOp.MUL, x, Const(c)):
                return self._line_of(x, operands[0]).times(c)
            case Binary(BinaryOp.MUL, Const(c), x):
                return self._line_of(x, operands[1]).times(c)
            case Binary(BinaryOp.DIV, x, Const(c)) if c != 0:
                return self._line_of(x, operands[0]).times(1.0 / c)
            case Binary(BinaryOp.ADD, x, Const(c)):
                return self._sum_of(x, operands[0], 1.0, c)
            case Binary(BinaryOp.ADD, Const(c), x):
                return self._sum_of(x, operands[1], 1.0, c)
            case Binary(BinaryOp.SUB, x, Const(c)):
                return self._sum_of(x, operands[0], 1.0, -c)
            case Binary(BinaryOp.SUB, Const(c), x):
                return self._sum_of(x, operands[1], -1.0, c)
            case Call(name, arguments):
                return self._short_call(node, name, self._line_of(arguments[0], operands[0]))
            case _:
                return None

    def _line_of(self, node: Expr, emitted: Emitted) -> _Line:
        is_fresh = id(node) not in self._given and not isinstance(node, Let)
        line = self._lines.get(id(node)) if is_fresh else None
        return _Line(emitted) if line is None else line

    def _sum_of(self, x: Expr, emitted: Emitted, sign: float, constant: float) -> _Line | None:
        if id(x) in self._factors and id(x) not in self._lines:
            return None  # a product and a sum are one operation
        line = self._line_of(x, emitted).times(sign)
        return None if line is None else line.plus(constant)

    def _short_call(self, node: Call, name: str, x: _Line) -> _Line | None:
        """The shortest form of a function, as a line of what it costs most to compute."""
        operand = self._short.get(id(node))
        number, addend, function = 1.0, 0.0, "ag_exp2_approx"
        power: _Line | None = x
        match name:
            case "tanh" if operand is not None:
                power, number, addend = x.times(2.0 * _LOG2_E), 2.0, -1.0
                function = "ag_sigmoid2_quick"
            case "sigmoid":
                power, function = x.times(_LOG2_E), "ag_sigmoid2_quick"
            case "exp" | "exp2":
                power = x.times(_LOG2_E) if name == "exp" else x
                function = "ag_exp2_quick" if operand is None else "ag_exp2_approx"
            case "log" | "log2" if operand is not None:
                number = 1.0 / _LOG2_E if name == "log" else 1.0
                is_normal = operand.low >= 2.0**-126 and not operand.nan
                is_normal = is_normal or self._is_never_subnormal(node.arguments[0])
                function = "ag_log2_approx" if is_normal else "ag_log2_quick"
            case "abs":
                function = "ag_abs_quick"
            case _:
                return None
        if power is None:
            return None
        core = Emitted(f"{function}({power.emitted().text})", CType.FLOAT)
        is_sigmoid = function == "ag_sigmoid2_quick" and power.is_raw and power.addend == 0.0
        return _Line(core, number, addend, power=power.number if is_sigmoid else None)

    def _is_never_subnormal(self, e: Expr) -> bool:
        """A sum with a constant: 0, or no smaller than a few roundings of the constant."""
        line = self._lines.get(id(e))
        if line is not None:  # constants may have cancelled
            return abs(line.addend) >= _LEAST
        match e:
            case Binary(BinaryOp.ADD | BinaryOp.SUB, Const(float(c)), _):
                return abs(c) >= _LEAST
            case Binary(BinaryOp.ADD | BinaryOp.SUB, _, Const(float(c))):
                return abs(c) >= _LEAST
            case _:
                return False

    def _node(
        self, node: Expr, operands: list[Emitted], row_names: Mapping[str, str] | None
    ) -> Emitted:
        match node:
            case Const(value):
                return _constant(value)
            case Symbol():
                return self._symbol(node, row_names)
            case Load(tensor):
                read = ", ".join(["args", *(o.text for o in operands)])
                return Emitted(f"read_{tensor}({read})", self._load_type(node))
            case Let(name):
                passed = "args, at, s" if mentions_score(node) else "args, at"
                return Emitted(f"let_{name}({passed})", self._let_types[id(node)])
            case ToFloat():
                return Emitted(
                    f"(float){operands[0].at(_Precedence.UNARY)}", CType.FLOAT, _Precedence.UNARY
                )
            case Negate() if self._may_wrap(node):
                return _wrapping("-", Emitted("0", CType.INT32), operands[0])
            case Negate():
                (x,) = self._fitted(node, operands)
                return Emitted(f"-{x.at(_Precedence.PRIMARY)}", x.type, _Precedence.UNARY)
            case Not():
                return Emitted(
                    f"!{operands[0].at(_Precedence.UNARY)}", CType.BOOL, _Precedence.UNARY
                )
            case Binary(op) if self._may_wrap(node):
                return _wrapping(op.value, *operands)
            case Binary(op):
                return self._binary(node, op, self._fitted(node, operands))
            case Compare(op):
                level = _RELATIONS[op]
                left, right = (o.at(_Precedence(level + 1)) for o in operands)
                return Emitted(f"{left} {op.value} {right}", CType.BOOL, level)
            case Logical():
                return self._chain(node, operands)
            case Select():
                condition, then, otherwise = operands
                if then.type is not otherwise.type:
                    then, otherwise = then.widened(), otherwise.widened()
                text = " : ".join(o.at(_Precedence.OR) for o in (then, otherwise))
                return Emitted(
                    f"{condition.at(_Precedence.OR)} ? {text}", then.type, _Precedence.SELECT
                )
            case Call(function):
                return self._call(node, function, self._fitted(node, operands))
            case _:
                assert_never(node)

    def _chain(self, node: Logical, operands: list[Emitted]) -> Emitted:
        is_and = node.op is LogicalOp.AND
        if self._is_branchless:
            sign, level, inner = " & " if is_and else " | ", _Precedence.BITS, _Precedence.UNARY
        else:
            sign, level = (" && ", _Precedence.AND) if is_and else (" || ", _Precedence.OR)
            # Not needed by C++, but `a || (b && c)` is easier to read.
            inner = _Precedence.BITS
        return Emitted(sign.join(o.at(inner) for o in operands), CType.BOOL, level)

    def _symbol(self, node: Symbol, row_names: Mapping[str, str] | None) -> Emitted:
        if row_names is not None and node.name in row_names:
            return Emitted(row_names[node.name], CType.FLOAT)
        match node.role:
            case Role.SCORE | Role.ROW:
                return Emitted(node.name, CType.FLOAT)
            case Role.TILE:
                return Emitted(f"tile.{node.name}", CType.INT32)
            case Role.PARAM:
                kind = _c_type(node.type, self._range(node))
                return Emitted(f"args.p_{node.name}", kind)
            case Role.INDEX:
                return Emitted(f"at.{node.name}", CType.INT32)
            case Role.SIZE:
                if node.name in ("Sq", "Skv"):
                    return Emitted(f"at.{node.name}", CType.INT32)
                prefix = "args.n_" if node.name in self._attention.named_sizes else "args."
                return Emitted(f"{prefix}{node.name}", CType.INT32)

    def _load_type(self, node: Load) -> CType:
        element = self._attention.tensor(node.tensor).element
        return _c_type(element.scalar, Interval(element.low, element.high))

    def _fitted(self, node: Expr, operands: list[Emitted]) -> list[Emitted]:
        """Operands of one integer type, wide enough for themselves and for what is computed."""
        integers = [o for o in operands if o.type in (CType.INT32, CType.INT64)]
        if len(integers) < len(operands) or not integers:
            return operands
        result_fits = expr_type(node) is not ScalarType.INT or self._fits32(node)
        if result_fits and all(o.type is CType.INT32 for o in operands):
            return operands
        return [o.widened() for o in operands]

    def _binary(self, node: Binary, op: BinaryOp, operands: list[Emitted]) -> Emitted:
        left, right = operands
        if op in _INTEGER_FUNCTIONS and (bits := _power_of_two(node.right)) is not None:
            # One instruction and not six or seven; it rounds down for negative numbers, too.
            x = left.at(_Precedence.PRODUCT)
            if op is BinaryOp.FLOORDIV:
                return Emitted(f"{x} >> {bits}", left.type, _Precedence.SHIFT)
            return Emitted(f"{x} & {2**bits - 1}", left.type, _Precedence.BITS)
        if op in _INTEGER_FUNCTIONS:
            return Emitted(f"{_INTEGER_FUNCTIONS[op]}({left.text}, {right.text})", left.type)
        level = _ARITHMETIC[op]
        if op is BinaryOp.MUL and left.type is CType.FLOAT:
            self._factors[id(node)] = left, right
        if self._is_quick and op in (BinaryOp.ADD, BinaryOp.SUB) and mentions_score(node):
            fused = self._fused(node, left, right)
            if fused is not None:
                return fused
        if op is BinaryOp.DIV and self._is_quick and (mentions_score(node) or _is_of_a_row(node)):
            if _is_of_a_row(node.right) or symbols(node.right) & _VARYING:
                inverse = f"ag_reciprocal_approx({right.text})"
            else:  # one division, before the loop over the keys
                inverse = f"(1.0f / {right.at(_Precedence(level + 1))})"
            return Emitted(f"{left.at(level)} * {inverse}", left.type, level)
        text = f"{left.at(level)} {op.value} {right.at(_Precedence(level + 1))}"
        return Emitted(text, left.type, level)

    def _fused(self, node: Binary, left: Emitted, right: Emitted) -> Emitted | None:
        """`x + a * b` and its like as one operation; None where there is no product, or two.

        Of two products one alone would be rounded, and `a * b - a * b` would not be 0.
        """
        if id(node.left) in self._factors and id(node.right) in self._factors:
            return None
        minus = "-" if node.op is BinaryOp.SUB else ""
        if (factors := self._factors.get(id(node.right))) is not None:
            a, b = factors
            first = f"-{a.at(_Precedence.PRIMARY)}" if minus else a.text
            return Emitted(f"ag_fma({first}, {b.text}, {left.text})", CType.FLOAT)
        if (factors := self._factors.get(id(node.left))) is not None:
            a, b = factors
            last = f"-{right.at(_Precedence.PRIMARY)}" if minus else right.text
            return Emitted(f"ag_fma({a.text}, {b.text}, {last})", CType.FLOAT)
        return None

    def _call(self, node: Call, name: str, operands: list[Emitted]) -> Emitted:
        function = FUNCTIONS[name]
        if self._is_quick and function.quick is not None and _is_of_a_score(node):
            return Emitted(f"{function.quick}({operands[0].text})", CType.FLOAT)
        text = operands[0].text
        if function.signature.count[1] is None:  # min and max of many: nested calls of two
            for operand in operands[1:]:
                text = f"{function.cuda}({text}, {operand.text})"
        else:
            text = f"{function.cuda}({', '.join(o.text for o in operands)})"
        if name == "floor":
            kind = CType.INT64
        elif function.signature.result is None:
            kind = operands[0].type
        else:
            kind = CType.BOOL if function.signature.result is ScalarType.BOOL else CType.FLOAT
        return Emitted(text, kind)

    def _may_wrap(self, node: Expr) -> bool:
        return self._wraps and wraps_around(node) and not self._range(node).within(*INT64.ends)

    def _fits32(self, node: Expr) -> bool:
        return range_of_work(node, self._ranges).within(*INT32.ends)

    def _range(self, node: Expr) -> Interval:
        return self._ranges[id(node)]


def _power_of_two(e: Expr) -> int | None:
    """The exponent of a constant that is a power of two from 2 on."""
    if not (isinstance(e, Const) and isinstance(e.value, int) and e.value > 1):
        return None
    return e.value.bit_length() - 1 if e.value.bit_count() == 1 else None


def wraps_around(node: Expr) -> bool:
    """Whether it can be computed modulo 2^64: a sum, a difference or a product of integers."""
    is_arithmetic = isinstance(node, Binary) and node.op in _MODULAR
    return (is_arithmetic or isinstance(node, Negate)) and expr_type(node) is ScalarType.INT


def _wrapping(op: str, left: Emitted, right: Emitted) -> Emitted:
    """An operation modulo 2^64; with signs it would be undefined in C++."""
    a, b = (f"({_UNSIGNED}){o.at(_Precedence.UNARY)}" for o in (left, right))
    return Emitted(f"(ag_i64)({a} {op} {b})", CType.INT64, _Precedence.UNARY)


def eager_lets(root: Expr) -> tuple[Let, ...]:
    """The lets below `root` that may be computed before it, those that others use first."""
    always = _unconditional(root)
    found: set[int] = set()
    seen: set[int] = set()
    stack = list(children(root))
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Let):
            if id(node) not in always and tensors(node):
                continue  # stays a function, and so does what only it uses
            found.add(id(node))
        stack.extend(children(node))
    return tuple(n for n in postorder(root) if isinstance(n, Let) and id(n) in found)


def called_lets(root: Expr) -> set[str]:
    """Names of the lets that the printed form of `root` calls as functions."""
    local = {id(let) for let in eager_lets(root)}
    called: set[str] = set()
    seen: set[int] = set()
    stack = list(children(root))
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Let) and id(node) not in local:
            called.add(node.name)
        else:
            stack.extend(children(node))
    return called


def is_unconditional(node: Expr, root: Expr) -> bool:
    """Whether a node is evaluated whenever the root is."""
    return id(node) in _unconditional(root)


def growing(name: str, growth: int, factor: str | None = None) -> Emitted:
    """`bases.<name>` and so many times `step`, which a score line takes, times `factor`."""
    times = "" if abs(growth) == 1 else f"{float_literal(abs(growth))} * "
    if factor is not None:
        sign = "-" if growth < 0 else ""
        return Emitted(f"ag_fma({sign}{times}step, {factor}, bases.{name})", CType.FLOAT)
    sign = "-" if growth < 0 else "+"
    return Emitted(f"bases.{name} {sign} {times}step", CType.FLOAT, _ARITHMETIC[BinaryOp.ADD])


def fixed(name: str, c_type: str) -> Emitted:
    """`fixed.<name>`, which score lines and the mask take."""
    return member("fixed", name, c_type)


def member(of: str, name: str, c_type: str) -> Emitted:
    """`<of>.<name>`, a part that is computed ahead."""
    return called(f"{of}.{name}", c_type)


def called(text: str, c_type: str) -> Emitted:
    """The call of a function."""
    return Emitted(text, next(t for t in CType if t.text == c_type))


def _unconditional(root: Expr) -> set[int]:
    """Nodes that are evaluated whenever the root is."""
    found: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in found:
            continue
        found.add(id(node))
        match node:
            case Logical():
                stack.append(node.operands[0])
            case Select():
                stack.append(node.condition)
            case _:
                stack.extend(children(node))
    return found


def mentions_score(e: Expr) -> bool:
    """Whether an expression depends on `s`."""
    return bool(symbols(e, role=Role.SCORE))


def _is_score(node: Expr) -> bool:
    """Whether a node is `s`, or a let that depends on it."""
    if isinstance(node, Let):
        return mentions_score(node)
    return isinstance(node, Symbol) and node.role is Role.SCORE


def _is_of_a_score(e: Expr) -> bool:
    """Whether an expression depends on a pair's score, in a score line or in its weight."""
    nodes = [node for node in postorder(e) if isinstance(node, Symbol)]
    return any(n.role is Role.SCORE or (n.role is Role.ROW and n.name == "s") for n in nodes)


def _is_of_a_row(e: Expr) -> bool:
    """Whether an expression depends on the row state."""
    return bool(symbols(e, role=Role.ROW))


def float_literal(value: float) -> str:
    """The float32 nearest to `value`, as the shortest C++ literal that reads back the same."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    if math.isnan(single):
        return "AG_NAN"
    if math.isinf(single):
        return "AG_INFINITY" if single > 0 else "-AG_INFINITY"
    text = str(single)
    return f"{text}f" if any(c in text for c in ".e") else f"{text}.0f"


def _constant(value: bool | int | float) -> Emitted:
    if isinstance(value, bool):
        return Emitted("true" if value else "false", CType.BOOL)
    if isinstance(value, float):
        text = float_literal(value)
        return Emitted(text, CType.FLOAT, _sign_precedence(text))
    if -(2**31) < value < 2**31:
        return Emitted(str(value), CType.INT32, _sign_precedence(str(value)))
    if value == -(2**63):
        return Emitted("(-9223372036854775807LL - 1)", CType.INT64)
    return Emitted(f"{value}LL", CType.INT64, _sign_precedence(str(value)))


def _sign_precedence(text: str) -> _Precedence:
    return _Precedence.UNARY if text.startswith("-") else _Precedence.PRIMARY


def _c_type(scalar: ScalarType, range_: Interval) -> CType:
    match scalar:
        case ScalarType.BOOL:
            return CType.BOOL
        case ScalarType.FLOAT:
            return CType.FLOAT
        case ScalarType.INT:
            return CType.INT32 if range_.within(INT32.low, INT32.high) else CType.INT64
