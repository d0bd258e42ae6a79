"""Random typed expressions for the tests of the IR."""

from __future__ import annotations

from hypothesis import strategies as st

from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Compare,
    CompareOp,
    Const,
    Expr,
    Let,
    Logical,
    LogicalOp,
    Negate,
    Not,
    Role,
    Select,
    Symbol,
    expr_type,
)
from attngen.ir.functions import call
from attngen.ir.types import ScalarType

__all__ = ["INT_NAMES", "param", "random_expressions"]

INT_NAMES = ("q", "kv", "b", "w")


def param(name: str, scalar: ScalarType = ScalarType.FLOAT) -> Symbol:
    return Symbol(name, Role.PARAM, scalar)


@st.composite
def random_expressions(draw: st.DrawFn, size: int = 12) -> Expr:
    """An expression over integers and truth values; some nodes are shared, some are lets."""
    ints: list[Expr] = [Const(draw(st.integers(-5, 9))), Const(draw(st.integers(0, 3)))]
    ints += [Symbol(name, Role.INDEX, ScalarType.INT) for name in INT_NAMES]
    bools: list[Expr] = [param("on", ScalarType.BOOL)]
    lets = 0
    for _ in range(draw(st.integers(1, size))):
        i, j, k = (draw(st.sampled_from(ints)) for _ in range(3))
        x, y, z = (draw(st.sampled_from(bools)) for _ in range(3))
        kind = draw(st.sampled_from(["binary", "compare", "logical", "other", "let"]))
        new: Expr
        match kind:
            case "binary":
                ops = [op for op in BinaryOp if op is not BinaryOp.DIV]
                new = Binary(draw(st.sampled_from(ops)), i, j)
            case "compare":
                new = Compare(draw(st.sampled_from(CompareOp)), i, j)
            case "logical":
                operands = draw(st.sampled_from([(x, y), (x, y, z)]))
                new = Logical(draw(st.sampled_from(LogicalOp)), operands)
            case "let":
                lets += 1
                new = Let(f"x{lets}", draw(st.sampled_from([*ints, *bools])))
            case _:
                new = draw(
                    st.sampled_from(
                        [
                            Negate(i),
                            Not(x),
                            Select(x, i, j),
                            Select(x, y, z),
                            Compare(CompareOp.EQ, x, y),
                            call("min", i, j),
                            call("abs", i),
                            call("clamp", i, j, k),
                            call("bit", i, j),
                        ]
                    )
                )
        (bools if expr_type(new) is ScalarType.BOOL else ints).append(new)
    return draw(st.sampled_from([ints[-1], bools[-1]]))
