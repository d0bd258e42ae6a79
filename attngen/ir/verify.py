"""What every pass may rely on: the rules of `ir/expr.py` and `ir/attention.py`, checked.

`verify_*` return what is wrong as sentences; an empty list is a valid value.  The frontend
reports a user's mistakes itself, so whatever is found here is a bug in attngen.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final, assert_never

from attngen.ir.attention import INDICES, OUTPUTS, SIZES, Attention, Tensor
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
    Negate,
    Not,
    Role,
    Select,
    Symbol,
    ToFloat,
    expr_type,
)
from attngen.ir.functions import FUNCTIONS
from attngen.ir.printer import print_expr
from attngen.ir.program import Axis, CeilDiv, Dim, Launch, Loop, Node, Op, Program, walk
from attngen.ir.row_state import ROW_VALUES, RowState
from attngen.ir.traverse import postorder
from attngen.ir.types import ELEMENTS, FLOATING, ScalarType

__all__ = ["HIDDEN", "MAX_HEAD_DIM", "Place", "verify_attention", "verify_program"]

MAX_HEAD_DIM: Final = 256

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


class Place(Enum):
    """Where an expression stands; the value names it in messages."""

    LENGTH = "length"
    SCALE = "scale"
    SCORE = "score"
    MASK = "mask"
    SINK = "sink"


HIDDEN: Final[dict[Place, frozenset[str]]] = {
    Place.LENGTH: frozenset(("h", "hkv", "q", "kv", "qpos", "s", "Sq", "Skv")),
    Place.SCALE: frozenset(("q", "kv", "qpos", "s")),
    Place.SCORE: frozenset(),
    Place.MASK: frozenset(("s",)),
    Place.SINK: frozenset(("q", "kv", "qpos", "s")),
}
"""Indices, sizes and `s` that an expression at a place may not depend on.

A length belongs to a sequence and defines `Sq` and `Skv`; the scale is applied before the
first score line; a sink belongs to a head.
"""

_TYPES: Final = {
    Place.LENGTH: _INT,
    Place.SCALE: _FLOAT,
    Place.SCORE: _FLOAT,
    Place.MASK: _BOOL,
    Place.SINK: _FLOAT,
}


# ---- attention ---------------------------------------------------------------------------


def verify_attention(attention: Attention) -> list[str]:
    """What is wrong with a checked attention variant."""
    return [*_declarations(attention), *_row_state(attention), *_formulas(attention)]


def _declarations(a: Attention) -> Iterator[str]:
    if a.dtype is not None and FLOATING.get(a.dtype.name) != a.dtype:
        yield f"dtype {a.dtype.name} is not a floating type of queries and keys"
    for name, dim in (("qk", a.head_dim_qk), ("v", a.head_dim_v)):
        if dim is not None and not 1 <= dim <= MAX_HEAD_DIM:
            yield f"head_dim {name} = {dim} is outside 1..{MAX_HEAD_DIM}"
    if (a.heads_q is None) != (a.heads_kv is None):
        yield "one number of heads is given, the other is not"
    elif a.heads_q is not None and a.heads_kv is not None:
        even = a.heads_q > 0 and a.heads_kv > 0 and a.heads_q % a.heads_kv == 0
        if not even:
            yield f"{a.heads_q} query heads do not share {a.heads_kv} key/value heads evenly"

    taken = {*INDICES, *SIZES, "s", *a.named_sizes}
    for name in (*(p.name for p in a.params), *(t.name for t in a.tensors)):
        if name in taken:
            yield f"the name {name} is used twice"
        taken.add(name)
    for param in a.params:
        if param.default is not None:
            if expr_type(Const(param.default)) is not param.type:
                yield f"the default of {param.name} is no {param.type.value}"
            elif not param.bound.contains(param.default):
                yield f"the default of {param.name} is outside its range"
    for tensor in a.tensors:
        if ELEMENTS.get(tensor.element.name) != tensor.element:
            yield f"{tensor.name} has the unknown element type {tensor.element.name}"
        if any(isinstance(dim.size, int) and dim.size < 1 for dim in tensor.dims):
            yield f"{tensor.name} has a dimension below 1"
    unmarked = {d.size for t in a.tensors for d in t.dims if not d.optional}
    for name in a.named_sizes:
        if name not in unmarked:
            yield f"only optional dimensions bind {name}"


def _row_state(a: Attention) -> Iterator[str]:
    state = a.row_state
    if state.has_sink != (a.sink is not None):
        yield f"{state.name} and the sink do not fit together"
    if len(set(a.outputs)) != len(a.outputs) or not set(a.outputs) <= set(OUTPUTS):
        yield f"outputs {', '.join(a.outputs)} are not a choice of {', '.join(OUTPUTS)}"
    if "o" not in a.outputs:
        yield "o is not an output"
    if "lse" in a.outputs and state.lse is None:
        yield f"{state.name} has no lse"
    if "row_max" in a.outputs and not state.running_max:
        yield f"{state.name} has no row_max"
    for name, formula in _state_formulas(state):
        yield from (f"{state.name}.{name}: {problem}" for problem in _nodes(formula, {}))
        if expr_type(formula) is not _FLOAT:
            yield f"{state.name}.{name} is no float"
        for node in postorder(formula):
            if isinstance(node, Symbol) and node.name not in ROW_VALUES:
                yield f"{state.name}.{name}: {node.name} is not a row value"


def _state_formulas(state: RowState) -> Iterator[tuple[str, Expr]]:
    yield "raise_max", state.raise_max
    yield "weight", state.weight
    yield "rescale", state.rescale
    yield "output", state.output
    yield "output_of_normalized", state.output_of_normalized
    if state.lse is not None:
        yield "lse", state.lse


def _formulas(a: Attention) -> Iterator[str]:
    tensors = {tensor.name: tensor for tensor in a.tensors}
    let_values: dict[str, Let] = {}
    for label, place, e in _placed(a):
        problems = [*_nodes(e, tensors), *_symbols(e, place, a)]
        if expr_type(e) is not _TYPES[place]:
            problems.append(f"is {expr_type(e).value}, not {_TYPES[place].value}")
        for node in postorder(e):
            if isinstance(node, Let) and let_values.setdefault(node.name, node) is not node:
                problems.append(f"two lets are called {node.name}")
        yield from (f"{label}: {problem}" for problem in problems)


def _placed(a: Attention) -> Iterator[tuple[str, Place, Expr]]:
    parts: list[tuple[str, Place, Expr | None]] = [
        ("length q", Place.LENGTH, a.length_q),
        ("length kv", Place.LENGTH, a.length_kv),
        ("scale", Place.SCALE, a.scale),
        *((f"score {i}", Place.SCORE, e) for i, e in enumerate(a.scores, 1)),
        ("mask", Place.MASK, a.mask),
        ("sink", Place.SINK, a.sink),
    ]
    yield from ((label, place, e) for label, place, e in parts if e is not None)


def _symbols(e: Expr, place: Place, a: Attention) -> Iterator[str]:
    params = {param.name: param.type for param in a.params}
    for node in postorder(e):
        if not isinstance(node, Symbol):
            continue
        match node.role:
            case Role.INDEX:
                known = node.name in INDICES and node.type is _INT
            case Role.SIZE:
                known = node.name in (*SIZES, *a.named_sizes) and node.type is _INT
            case Role.PARAM:
                known = params.get(node.name) is node.type
            case Role.SCORE:
                known = node.name == "s" and node.type is _FLOAT
            case Role.ROW | Role.TILE:
                known = False
            case _:
                assert_never(node.role)
        if not known:
            yield f"{node.role.value} {node.name} : {node.type.value} does not exist"
        elif node.name in HIDDEN[place]:
            yield f"{node.name} is not visible here"


# ---- the nodes of an expression ----------------------------------------------------------


def _nodes(root: Expr, tensors: dict[str, Tensor]) -> Iterator[str]:
    for node in postorder(root):
        problem = _node_problem(node, tensors)
        if problem is not None:
            yield f"`{print_expr(node).splitlines()[-1]}`: {problem}"


def _node_problem(node: Expr, tensors: dict[str, Tensor]) -> str | None:
    match node:
        case Const(value):
            inside = not isinstance(value, int) or -(2**63) <= value < 2**63
            return None if inside else "the integer does not fit 64 bits"
        case Symbol() | Let():
            return None
        case Load():
            return _load_problem(node, tensors)
        case Negate(operand):
            return _expect((operand,), (_INT, _FLOAT))
        case Not(operand):
            return _expect((operand,), (_BOOL,))
        case ToFloat(operand):
            return _expect((operand,), (_INT,))
        case Logical(_, operands):
            return _expect(operands, (_BOOL,)) if len(operands) > 1 else "has one operand"
        case Binary(op, left, right):
            allowed: tuple[ScalarType, ...] = (_INT, _FLOAT)
            if op is BinaryOp.DIV:
                allowed = (_FLOAT,)
            elif op in (BinaryOp.FLOORDIV, BinaryOp.MOD):
                allowed = (_INT,)
            return _expect((left, right), allowed)
        case Compare(op, left, right):
            equality = op in (CompareOp.EQ, CompareOp.NE)
            return _expect((left, right), tuple(ScalarType) if equality else (_INT, _FLOAT))
        case Select(condition, then, otherwise):
            return _expect((condition,), (_BOOL,)) or _expect((then, otherwise), tuple(ScalarType))
        case Call():
            return _call_problem(node)
        case _:
            assert_never(node)


def _expect(operands: tuple[Expr, ...], allowed: tuple[ScalarType, ...]) -> str | None:
    """Every operand has the same type, one of `allowed`."""
    found = [expr_type(operand) for operand in operands]
    if len(set(found)) > 1:
        return f"operands of different types: {', '.join(t.value for t in found)}"
    if found and found[0] not in allowed:
        return f"operands are {found[0].value}, not {' or '.join(t.value for t in allowed)}"
    return None


def _load_problem(node: Load, tensors: dict[str, Tensor]) -> str | None:
    tensor = tensors.get(node.tensor)
    if tensor is None:
        return "there is no such tensor"
    if node.type is not tensor.element.scalar:
        return f"elements are {tensor.element.scalar.value}"
    if len(node.indices) != len(tensor.dims):
        return f"{len(node.indices)} indices for {len(tensor.dims)} dimensions"
    return _expect(node.indices, (_INT,))


def _call_problem(node: Call) -> str | None:
    function = FUNCTIONS.get(node.function)
    if function is None:
        return "there is no such function"
    signature = function.signature
    least, most = signature.count
    if len(node.arguments) < least or (most is not None and len(node.arguments) > most):
        return f"{len(node.arguments)} arguments"
    numbers = (_INT, _FLOAT)
    wanted = numbers if signature.argument is None else (signature.argument,)
    result = expr_type(node.arguments[0]) if signature.result is None else signature.result
    if node.type is not result:
        return f"the result is {result.value}, not {node.type.value}"
    return _expect(node.arguments, wanted)


# ---- programs ----------------------------------------------------------------------------

_NEEDS: Final[dict[Op, tuple[Op, ...]]] = {
    Op.SCORES: (Op.LOAD_QUERY, Op.LOAD_KEY),
    Op.MASK: (Op.SCORES,),
    Op.WEIGHTS: (Op.MASK,),
    Op.ADD_SUM: (Op.WEIGHTS,),
    Op.NORMALIZE_WEIGHTS: (Op.WEIGHTS,),
    Op.ACCUMULATE: (Op.WEIGHTS, Op.LOAD_VALUE),
    Op.RAISE_MAX: (Op.MASK,),
    Op.RESCALE_SUM: (Op.RAISE_MAX,),
    Op.RESCALE_ACC: (Op.RAISE_MAX,),
    Op.FINALIZE: (Op.ACCUMULATE,),
}
"""Steps that have run at least once before a step first runs."""

_PER_TILE: Final[dict[Axis, tuple[Op, ...]]] = {
    Axis.Q: (Op.LOAD_QUERY, Op.SCORES, Op.MASK, Op.FINALIZE),
    Axis.KV: (
        Op.SUMMARISE_KEYS,
        Op.LOAD_KEY,
        Op.LOAD_VALUE,
        Op.SCORES,
        Op.MASK,
        Op.ACCUMULATE,
    ),
}
"""Steps that work on one tile of an axis, and so stand inside a loop over it."""


def verify_program(program: Program) -> list[str]:
    """What is wrong with a program."""
    problems = [f"attention: {problem}" for problem in verify_attention(program.attention)]
    if not program.launches:
        problems.append("there is no launch")
    names = [launch.kernel for launch in program.launches]
    problems += [f"two kernels are called {name}" for name in set(names) if names.count(name) > 1]
    places = [workspace.name for workspace in program.workspaces]
    problems += [f"two workspaces are called {n}" for n in set(places) if places.count(n) > 1]
    if program.launches and program.main.when:
        problems.append("the last launch, which writes the outputs, is left out of some calls")
    known = {*SIZES, "Dqk", "Dv", "rows", "keys", *program.attention.named_sizes}
    for launch in program.launches:
        found = [*_launch_facts(launch, known), *_loops(launch.tiles.body, ())]
        problems += [f"{launch.kernel}: {problem}" for problem in found]
    return problems + list(_order(program))


def _launch_facts(launch: Launch, known: set[str]) -> Iterator[str]:
    if launch.threads % 32 or not 32 <= launch.threads <= 1024:
        yield f"{launch.threads} threads are not 1 to 32 whole warps"
    if launch.shared_bytes < 0:
        yield "shared memory is negative"
    if launch.tiles.tile_q < 1 or launch.tiles.tile_kv < 1:
        yield f"tiles of {launch.tiles.tile_q} rows and {launch.tiles.tile_kv} keys"
    yield from (f"its grid {problem}" for problem in _dims(launch.grid, known))
    yield from (
        f"its condition names {c.size}, which is no size"
        for c in launch.when
        if c.size not in known
    )
    for w in launch.workspaces:
        yield from (f"workspace {w.name} {problem}" for problem in _dims(w.dims, known))
        if w.element not in ("fp32", "int32"):
            yield f"workspace {w.name} has elements of {w.element}"
    steps = {node.op for node in walk(launch.tiles.body) if not isinstance(node, Loop)}
    if steps & {Op.LOAD_STATE, Op.STORE_STATE} and not launch.workspaces:
        yield "the row state is kept in a workspace that does not exist"
    if Op.SUMMARISE_KEYS in steps and not any(w.element == "int32" for w in launch.workspaces):
        yield "what it finds of keys goes into a workspace that does not exist"


def _dims(dims: tuple[Dim, ...], known: set[str]) -> Iterator[str]:
    if not dims:
        yield "has no dimension"
    for dim in dims:
        name = dim.size if isinstance(dim, CeilDiv) else dim
        number = dim.by if isinstance(dim, CeilDiv) else dim
        if isinstance(name, str) and name not in known:
            yield f"has the dimension {name}, which is no size"
        if isinstance(number, int) and number < 1:
            yield "has a dimension below 1"


def _loops(nodes: tuple[Node, ...], around: tuple[Loop, ...]) -> Iterator[str]:
    axes = {loop.axis for loop in around}
    for node in nodes:
        if not isinstance(node, Loop):
            for axis, ops in _PER_TILE.items():
                if node.op in ops and axis not in axes:
                    yield f"{node.op.value} stands outside of the loop over {axis.value}"
            continue
        if node.axis in axes:
            yield f"a loop over {node.axis.value} inside another one"
        if node.parallel and any(not loop.parallel for loop in around):
            yield f"the parallel loop over {node.axis.value} stands inside a sequential one"
        if not node.body:
            yield f"the loop over {node.axis.value} is empty"
        yield from _loops(node.body, (*around, node))


def _order(program: Program) -> Iterator[str]:
    done: set[Op] = set()
    for launch in program.launches:
        for node in walk(launch.tiles.body):
            if isinstance(node, Loop) or node.op in done:
                continue
            for needed in _NEEDS.get(node.op, ()):
                if needed not in done:
                    yield f"{launch.kernel}: {node.op.value} comes before {needed.value}"
            done.add(node.op)
    if program.launches and Op.FINALIZE not in done:
        yield "nothing is written: there is no finalize"
    if Op.RAISE_MAX in done and not program.attention.row_state.running_max:
        yield f"{program.attention.row_state.name} keeps no maximum to raise"
