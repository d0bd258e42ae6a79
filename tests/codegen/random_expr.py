"""Random typed expressions over one made-up variant, and their exact meaning.

The variant has a param of every kind of range and a tensor of every kind of element, so that
32 and 64 bits, proved and clamped indices, and lazy reads all occur.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from attngen.ir.attention import Attention, Bound, Param, Tensor, TensorDim
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
from attngen.ir.functions import call
from attngen.ir.row_state import SOFTMAX
from attngen.ir.traverse import children, fold_up, postorder
from attngen.ir.types import ELEMENTS, FP32, ScalarType

BOOL, INT, FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT
ANY = Bound()

PARAMS = (
    Param("any", INT, None, ANY),
    Param("size", INT, None, Bound(0, 2**31, high_open=True)),
    Param("tiny", INT, None, Bound(-5, 5)),
    Param("flag", BOOL, None, ANY),
    Param("free", FLOAT, None, ANY),
    Param("unit", FLOAT, None, Bound(-1.0, 1.0)),
)
TENSORS = (
    Tensor("of_b", ELEMENTS["int32"], (TensorDim("B", False),)),
    Tensor("of_h", ELEMENTS["int8"], (TensorDim("Hq", False), TensorDim("B", False))),
    Tensor("narrow", ELEMENTS["int32"], (TensorDim(5, False),)),
    Tensor("unsigned", ELEMENTS["uint32"], (TensorDim("R", False),)),
    Tensor("wide", ELEMENTS["int64"], (TensorDim(2, False), TensorDim("R", False))),
    Tensor("seen", ELEMENTS["bool"], (TensorDim("R", False), TensorDim(3, False))),
    Tensor("value", ELEMENTS["fp32"], (TensorDim(6, False),)),
)
DATA: Mapping[str, np.ndarray] = {
    "of_b": np.array([-(2**31), 7], np.int32),
    "of_h": np.array([[-128, 127], [0, 1], [-1, 5], [9, -9]], np.int8),
    "narrow": np.array([2**31 - 1, -3, 0, 4, -(2**31)], np.int32),
    "unsigned": np.array([2**32 - 1, 0, 5], np.uint32),
    "wide": np.array([[2**40, -1, 3], [-(2**33), 0, 8]], np.int64),
    "seen": np.array([[True, False, True], [False, False, True], [True, True, False]]),
    "value": np.array([0.5, -2.25, 0.0, 3.0, -0.0, 96.0], np.float32),
}
SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "Dqk": 8, "Dv": 8, "R": 3}
"""Sizes that stay the same; `Sq` and `Skv` differ from launch to launch."""

INDEX_SYMBOLS = tuple(Symbol(n, Role.INDEX, INT) for n in ("b", "h", "hkv", "q", "kv", "qpos"))
SIZE_SYMBOLS = tuple(Symbol(n, Role.SIZE, INT) for n in ("B", "Hq", "Sq", "Skv", "Dqk", "R"))
PARAM_SYMBOLS = {p.name: Symbol(p.name, Role.PARAM, p.type) for p in PARAMS}
SCORE = Symbol("s", Role.SCORE, FLOAT)

INT_LEAVES: tuple[Expr, ...] = (
    *INDEX_SYMBOLS,
    *SIZE_SYMBOLS,
    *(s for s in PARAM_SYMBOLS.values() if s.type is INT),
)
EDGES = (2**31 - 1, -(2**31), 2**31, 2**32 + 1, -(2**40), 2**62, -(2**63), 2**63 - 1)
EXACT_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.25, 4096.0, math.inf, -math.inf, math.nan)


def variant(*roots: Expr, **parts: Any) -> Attention:
    """The made-up variant with these expressions, whatever their types, as its score lines."""
    plain = Attention(
        name="random", dtype=FP32, head_dim_qk=8, head_dim_v=8, heads_q=None, heads_kv=None,
        params=PARAMS, tensors=TENSORS, length_q=None, length_kv=None, scale=Const(1.0),
        scores=roots, mask=None, row_state=SOFTMAX, sink=None, outputs=("o",),
    )  # fmt: skip
    return replace(plain, **parts)


def structure(*roots: Expr) -> list[Any]:
    """All nodes with what they hold and where their operands are: equal for equal graphs."""
    order: dict[int, int] = {}
    nodes = []
    for node in postorder(*roots):
        order[id(node)] = len(order)
        own = [getattr(node, f.name) for f in fields(node) if f.name != "span"]
        plain = [repr(x) for x in own if not hasattr(x, "span") and not isinstance(x, tuple)]
        nodes.append((type(node), *plain, *(order[id(child)] for child in children(node))))
    return nodes


# ---- growing -----------------------------------------------------------------------------


@dataclass
class Grower:
    """Draws expressions; what was built before may be used again, as it is or under a let."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    floats: bool = False
    """Floats may occur, and integers made of them; then all integers stay small."""
    pool: list[Expr] = field(default_factory=list)
    lets: int = 0

    def grow(self, wanted: ScalarType, depth: int) -> Expr:
        known = [e for e in self.pool if expr_type(e) is wanted]
        if known and self.chance(6):
            return self.one_of(known)
        makers = {INT: self.an_int, BOOL: self.a_bool, FLOAT: self.a_float}
        made = makers[wanted](depth)
        if depth and self.chance(4):
            self.lets += 1
            made = Let(f"v{self.lets}", made)
        self.pool.append(made)
        return made

    def chance(self, of: int) -> bool:
        return self.draw(st.integers(0, of - 1)) == of - 1

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(choices))

    def several(self, wanted: ScalarType, depth: int, least: int, most: int) -> tuple[Expr, ...]:
        return tuple(self.grow(wanted, depth) for _ in range(self.draw(st.integers(least, most))))

    def int_leaf(self) -> Expr:
        if self.floats:
            small = (*INDEX_SYMBOLS, PARAM_SYMBOLS["tiny"])
            return Const(self.draw(st.integers(-9, 9))) if self.chance(3) else self.one_of(small)
        if self.chance(3):
            number = self.one_of(EDGES) if self.chance(3) else self.draw(st.integers(-9, 9))
            return Const(number)
        return self.one_of(INT_LEAVES)

    def an_int(self, depth: int) -> Expr:
        if not depth:
            return self.int_leaf()
        below = depth - 1
        kinds = ["arithmetic"] * 5 + ["divide"] * 3 + ["sign", "abs", "most", "clamp", "if", "load"]
        match self.one_of(kinds + ["floor"] * self.floats):
            case "arithmetic":
                ops = (BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL)
                op = self.one_of(ops[:2] if self.floats else ops)
                return Binary(op, self.grow(INT, below), self.grow(INT, below))
            case "divide":
                op = self.one_of((BinaryOp.FLOORDIV, BinaryOp.MOD))
                return Binary(op, self.grow(INT, below), self.grow(INT, self.one_of((0, below))))
            case "sign":
                return Negate(self.grow(INT, below))
            case "abs":
                return call("abs", self.grow(INT, below))
            case "most":
                return call(self.one_of(("min", "max")), *self.several(INT, below, 2, 3))
            case "clamp":
                return call("clamp", *(self.grow(INT, below) for _ in range(3)))
            case "if":
                return self.a_choice(INT, below)
            case "floor":
                number = call("floor", self.grow(FLOAT, below))
                return call("clamp", number, Const(-1000), Const(1000))
            case _:
                return self.a_load(INT, below)

    def a_bool(self, depth: int) -> Expr:
        if not depth:
            leaves = (PARAM_SYMBOLS["flag"], Const(True), Const(False))
            return self.one_of(leaves) if self.chance(3) else self.a_comparison(0)
        below = depth - 1
        kinds = ["compare"] * 3 + ["logic"] * 3 + ["not", "equal", "chain", "bit", "if", "load"]
        match self.one_of(kinds):
            case "compare":
                return self.a_comparison(below)
            case "logic":
                return Logical(self.one_of(tuple(LogicalOp)), self.several(BOOL, below, 2, 3))
            case "not":
                return Not(self.grow(BOOL, below))
            case "equal":
                op = self.one_of((CompareOp.EQ, CompareOp.NE))
                return Compare(op, self.grow(BOOL, below), self.grow(BOOL, below))
            case "chain":  # a < b <= c, whose middle is one node
                low, middle, high = (self.grow(INT, below) for _ in range(3))
                first, second = (self.one_of(tuple(CompareOp)) for _ in range(2))
                both = Compare(first, low, middle), Compare(second, middle, high)
                return Logical(LogicalOp.AND, both)
            case "bit":
                return call("bit", self.grow(INT, below), self.grow(INT, below))
            case "if":
                return self.a_choice(BOOL, below)
            case _:
                return self.a_load(BOOL, below)

    def a_float(self, depth: int) -> Expr:
        if not depth:
            leaves = (SCORE, PARAM_SYMBOLS["free"], PARAM_SYMBOLS["unit"])
            leaf: Expr = self.one_of(leaves)
            return Const(self.one_of(EXACT_FLOATS)) if self.chance(3) else leaf
        below = depth - 1
        kinds = ["arithmetic"] * 4 + ["sign", "abs", "most", "clamp", "if", "load", "int"]
        match self.one_of(kinds):
            case "arithmetic":
                op = self.one_of((BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL, BinaryOp.DIV))
                left, right = self.grow(FLOAT, below), self.grow(FLOAT, below)
                if op is BinaryOp.DIV:  # 1 / 0 would show the sign of a zero, which may differ
                    right = Select(Compare(CompareOp.EQ, right, Const(0.0)), Const(3.0), right)
                return Binary(op, left, right)
            case "sign":
                return Negate(self.grow(FLOAT, below))
            case "abs":
                return call("abs", self.grow(FLOAT, below))
            case "most":
                return call(self.one_of(("min", "max")), *self.several(FLOAT, below, 2, 3))
            case "clamp":
                return call("clamp", *(self.grow(FLOAT, below) for _ in range(3)))
            case "if":
                return self.a_choice(FLOAT, below)
            case "int":
                return ToFloat(self.grow(INT, min(below, 1)))
            case _:
                return self.a_load(FLOAT, below)

    def a_comparison(self, depth: int) -> Expr:
        kind = self.one_of((INT, INT, FLOAT)) if self.floats else INT
        return Compare(
            self.one_of(tuple(CompareOp)), self.grow(kind, depth), self.grow(kind, depth)
        )

    def a_choice(self, wanted: ScalarType, depth: int) -> Expr:
        return Select(self.grow(BOOL, depth), self.grow(wanted, depth), self.grow(wanted, depth))

    def a_load(self, wanted: ScalarType, depth: int) -> Expr:
        small = [t for t in TENSORS if not self.floats or t.name in ("of_h", "seen", "value")]
        tensor = self.one_of([t for t in small if t.element.scalar is wanted])
        b, h = INDEX_SYMBOLS[:2]
        if tensor.name == "of_b":
            return Load("of_b", (b,), INT)
        if tensor.name == "of_h":
            return Load("of_h", (h, b), INT)
        indices = tuple(self.grow(INT, min(depth, 1)) for _ in tensor.dims)
        return Load(tensor.name, indices, wanted)


@st.composite
def expressions(
    draw: st.DrawFn,
    wanted: Sequence[ScalarType],
    *,
    least: int = 1,
    most: int = 6,
    depth: int = 4,
    floats: bool = False,
) -> list[Expr]:
    """Some expressions that share nodes."""
    grower = Grower(draw, floats)
    kinds = draw(st.lists(st.sampled_from(wanted), min_size=least, max_size=most))
    return [grower.grow(kind, draw(st.integers(1, depth))) for kind in kinds]


# ---- exact meaning -----------------------------------------------------------------------

_EXACT: Mapping[BinaryOp, Callable[[int, int], int]] = {
    BinaryOp.ADD: operator.add,
    BinaryOp.SUB: operator.sub,
    BinaryOp.MUL: operator.mul,
    BinaryOp.FLOORDIV: lambda a, b: a // b if b else 0,
    BinaryOp.MOD: lambda a, b: a % b if b else 0,
}
_ORDER: Mapping[CompareOp, Callable[[Any, Any], bool]] = {
    CompareOp.LT: operator.lt,
    CompareOp.LE: operator.le,
    CompareOp.EQ: operator.eq,
    CompareOp.NE: operator.ne,
    CompareOp.GE: operator.ge,
    CompareOp.GT: operator.gt,
}
_CALLS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "clamp": lambda x, low, high: min(max(x, low), high),
    "bit": lambda word, i: 0 <= i < 64 and word >> i & 1 == 1,
}


@dataclass(frozen=True)
class Exact:
    """A mathematical value; whether a node below left 64 bits, and without any tensor's doing."""

    value: Any
    too_large: bool = False
    too_large_without_tensors: bool = False
    from_tensor: bool = False


def exact(e: Expr, symbols: Mapping[str, Any]) -> Exact:
    """The value of an expression of integers and truth values at one pair, in Python's integers."""

    def combine(node: Expr, operands: tuple[Exact, ...]) -> Exact:
        value = _exact_node(node, [o.value for o in operands], symbols)
        large = isinstance(value, int) and not -(2**63) <= value < 2**63
        if large:
            value = 0  # nobody looks at it, and it would grow without end
        from_tensor = isinstance(node, Load) or any(o.from_tensor for o in operands)
        return Exact(
            value,
            large or any(o.too_large for o in operands),
            (large and not from_tensor) or any(o.too_large_without_tensors for o in operands),
            from_tensor,
        )

    return fold_up(e, combine)


def _exact_node(node: Expr, operands: list[Any], symbols: Mapping[str, Any]) -> Any:
    match node:
        case Const(value):
            return value
        case Symbol(name):
            return symbols[name]
        case Load(tensor):
            data = DATA[tensor]
            nearest = (min(max(i, 0), n - 1) for i, n in zip(operands, data.shape, strict=True))
            return data[tuple(nearest)].item()
        case Let():
            return operands[0]
        case Negate():
            return -operands[0]
        case Not():
            return not operands[0]
        case Binary(op):
            return _EXACT[op](*operands)
        case Compare(op):
            return _ORDER[op](*operands)
        case Logical(op):
            return all(operands) if op is LogicalOp.AND else any(operands)
        case Select():
            return operands[1] if operands[0] else operands[2]
        case Call(function):
            return _CALLS[function](*operands)
        case _:
            raise AssertionError(f"{type(node).__name__} has no exact value")
