"""A trace as the tree of a `.attn` file.

traced nodes that are used twice      →  let x1 = …
doc[q], doc[kv]                       →  tensor doc : int32[doc_len]
bias[h, q - kv + 8]                   →  tensor bias : float[Hq, bias_dim2]
intervals[i, 0], intervals[i, 1]      →  tensor intervals : int32[intervals_dim1, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Final, assert_never, final

from attngen.diagnostics.span import Source, Span
from attngen.flex.captured import Captured, free_name
from attngen.flex.trace import Trace
from attngen.frontend import ast
from attngen.frontend.parse import parse

__all__ = ["rebuild", "write_file"]

_INDEX_SIZES: Final = {"b": "B", "h": "Hq", "q": "Sq", "kv": "Skv"}
"""The size of a dimension that is read at this index and at no other."""

MAX_LEVELS: Final = 100
"""Levels of operations in one statement; the parser takes 150."""

_ERF: Final = """
# The error function, within 1.5e-7: Abramowitz and Stegun, formula 7.1.26.
define erf_rational(t : float) : float = t * (
    0.254829592
    + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
)
define erf_of_size(x : float) : float = (
    1.0 - erf_rational(1.0 / (1.0 + 0.3275911 * x)) * exp(-x * x)
)
define erf_signed(y : float, x : float) : float = where(x < 0.0, -y, y)
define erf(x : float) : float = erf_signed(erf_of_size(abs(x)), x)
"""


def write_file(
    trace: Trace,
    *,
    outputs: tuple[str, ...] = ("o",),
    has_scale: bool = False,
    sink: str | None = None,
) -> ast.File:
    """The file of one attention block, and the definitions that it needs.

    has_scale:  the scale is a param, `qk_scale`.
    sink:       the element type of `qk_sink`, a logit for each head that joins the softmax.
    """
    span = _nowhere()
    lets = _Lets(trace)
    dims = _dims(trace, [read for read in trace.reads if lets.is_used(read)])
    lets.avoid(str(dim.size) for each in dims.values() for dim in each)
    score, mask = (None if e is None else lets.write(e) for e in (trace.score, trace.mask))
    statements: list[ast.Statement] = []
    if has_scale:
        statements.append(ast.Param("qk_scale", "float", None, None, span, span))
    if sink is not None:
        heads = (ast.Dim("Hq", False, span),)
        statements.append(ast.Tensor("qk_sink", sink, heads, span, span))
    for captured in trace.captured:
        if captured.name in dims:
            assert captured.element is not None
            shape = dims[captured.name]
            statements.append(ast.Tensor(captured.name, captured.element, shape, span, span))
    statements += lets.statements
    if has_scale:
        statements.append(ast.Scale(ast.Name("qk_scale", span), span))
    if score is not None:
        statements.append(ast.Score(score, span))
    if mask is not None:
        statements.append(ast.Mask(mask, span))
    if sink is not None:
        of_head = ast.Index("qk_sink", (ast.Name("h", span),), span, span)
        statements.append(ast.Weights("softmax", of_head, span))
    statements.append(ast.Output(outputs, span))
    block = ast.Attention(trace.name, tuple(statements), span, span)
    definitions = _definitions() if lets.calls & {"erf"} else ()
    return ast.File((*definitions, block), span)


@cache
def _definitions() -> tuple[ast.TopLevel, ...]:
    return parse(Source("attngen/flex/write.py", _ERF)).items


@cache
def _nowhere() -> Span:
    return Source("<traced>", "").span(0, 0)


# ---- shapes ------------------------------------------------------------------------------


def _dims(trace: Trace, reads: list[ast.Index]) -> dict[str, tuple[ast.Dim, ...]]:
    """The dimensions of every array that is read, named after what they are read at."""
    indices: dict[str, list[tuple[ast.Expr, ...]]] = {}
    for read in reads:
        indices.setdefault(read.tensor, []).append(read.indices)
    arrays = {each.name for each in trace.captured}
    return {
        captured.name: tuple(
            ast.Dim(_size(captured, at, read_at, arrays), False, _nowhere())
            for at, read_at in enumerate(zip(*indices[captured.name], strict=True))
        )
        for captured in trace.captured
        if captured.name in indices
    }


def _size(
    captured: Captured, at: int, indices: tuple[ast.Expr, ...], arrays: set[str]
) -> str | int:
    if not captured.shape:
        return 1
    names = {each.name if isinstance(each, ast.Name) else None for each in indices}
    if len(names) == 1 and (name := names.pop()) in _INDEX_SIZES:
        return _INDEX_SIZES[name]
    if all(isinstance(each, ast.Literal) for each in indices):
        return captured.shape[at]
    name = f"{captured.name}_len" if len(captured.shape) == 1 else f"{captured.name}_dim{at + 1}"
    while name in arrays:
        name += "_"
    return name


# ---- shared nodes ------------------------------------------------------------------------


@final
class _Lets:
    """Expressions with a let for every node that is used twice and costs something.

    Where they nest too deeply for the parser, a let holds the inner part.
    """

    def __init__(self, trace: Trace) -> None:
        self.statements: list[ast.Let] = []
        self.calls: set[str] = set()
        self._variables = trace.variables
        self._taken = {each.name for each in trace.captured}
        self._uses: dict[int, int] = {}
        self._written: dict[int, ast.Expr] = {}
        self._depths: dict[int, int] = {}
        for root in (trace.score, trace.mask):
            if root is not None:
                self._count(root)

    def is_used(self, node: ast.Expr) -> bool:
        """Whether the score or the mask depends on a node."""
        return id(node) in self._uses

    def avoid(self, names: Iterable[str]) -> None:
        """Let nothing have one of these names."""
        self._taken.update(names)

    def _count(self, root: ast.Expr) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            self._uses[id(node)] = self._uses.get(id(node), 0) + 1
            if self._uses[id(node)] == 1:
                stack += ast.operands(node)

    def write(self, root: ast.Expr) -> ast.Expr:
        """The expression, with names for what is shared; uses a stack of its own."""
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [e for e in ast.operands(node) if id(e) not in self._written]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if id(node) not in self._written:
                self._written[id(node)] = self._shared(node)
        return self._written[id(root)]

    def _shared(self, node: ast.Expr) -> ast.Expr:
        written = with_operands(node, [self._written[id(e)] for e in ast.operands(node)])
        if isinstance(node, ast.Call):
            self.calls.add(node.name)
        depth = self._depth(node)
        if depth <= MAX_LEVELS and (self._uses[id(node)] == 1 or _is_small(written)):
            self._depths[id(node)] = depth
            return written
        name = self._new_name(self._variables.get(id(node)))
        self.statements.append(ast.Let(name, written, node.span, node.span))
        return ast.Name(name, node.span)

    def _depth(self, node: ast.Expr) -> int:
        """Levels of operations from here down to names; a chain of `and` is one."""
        op = node.op if isinstance(node, ast.BoolOp) else None
        return max(
            (
                self._depths.get(id(e), 0) + (not (isinstance(e, ast.BoolOp) and e.op == op))
                for e in ast.operands(node)
            ),
            default=0,
        )

    def _new_name(self, variable: str | None) -> str:
        """The variable's own name, where it is free; else one with a number."""
        stem = "x" if variable is None else free_name(variable)
        name, number = (stem, 1) if variable is not None else ("x1", 1)
        while name in self._taken:
            number += 1
            name = f"x{number}" if variable is None else f"{stem}_{number}"
        self._taken.add(name)
        return name


def _is_small(node: ast.Expr) -> bool:
    """Whether a person would rather read it twice than look up a name."""
    if isinstance(node, ast.BoolOp) or (isinstance(node, ast.Call) and node.name == "where"):
        return False
    return all(isinstance(e, ast.Literal | ast.Name) for e in ast.operands(node))


def with_operands(node: ast.Expr, new: list[ast.Expr]) -> ast.Expr:
    """The node with other operands; `and` of `and` is one."""
    match node:
        case ast.Literal() | ast.Name():
            return node
        case ast.Index():
            return replace(node, indices=tuple(new))
        case ast.Call():
            return replace(node, arguments=tuple(ast.Argument(None, e, e.span) for e in new))
        case ast.Unary():
            return replace(node, operand=new[0])
        case ast.Binary():
            return replace(node, left=new[0], right=new[1])
        case ast.Comparison():
            return replace(node, operands=tuple(new))
        case ast.BoolOp():
            flat: list[ast.Expr] = []
            for e in new:
                nested = isinstance(e, ast.BoolOp) and e.op == node.op
                flat += ast.operands(e) if nested else [e]
            return replace(node, operands=tuple(flat))
        case _:
            assert_never(node)


def rebuild(
    root: ast.Expr, change: Callable[[ast.Expr, list[ast.Expr]], list[ast.Expr]]
) -> ast.Expr:
    """The expression in which `change` says, for every node, what its operands are.

    It is given those that were changed already, inner nodes first, from left to right.  A node
    that stands in two places is changed twice.  Uses a stack of its own.
    """
    stack: list[tuple[ast.Expr, list[ast.Expr]]] = [(root, [])]
    while True:
        node, done = stack[-1]
        parts = ast.operands(node)
        if len(done) < len(parts):
            stack.append((parts[len(done)], []))
            continue
        stack.pop()
        new = with_operands(node, change(node, done)) if parts else node
        if not stack:
            return new
        stack[-1][1].append(new)
