"""Parts of a mask that need no work for each pair.

    mask    kv <= qpos and padding[b, kv] and doc[b, qpos] == doc[b, kv] and doc[b, qpos] != 0
    bounds  kv < qpos + 1                   for many keys of a row at once (key_bounds.py)
    of_row  r0 != 0                         once for a row of a tile, and for all of its pairs
    of_key  padding[b, kv]                  once for a key of a tile, and for all of its pairs
    rows    r0 = doc[b, qpos]               once for a row of a tile
    keys    k0 = doc[b, kv]                 once for a key of a tile
    pair    r0 == k0

    mask    kv <= qpos or kv < prompt_length[b]
    bounds  kv < qpos + 1 or kv < c0        all of it
    fixed   c0 = prompt_length[b]           once for a block

A part is the largest subexpression that depends on nothing else and costs more than a register.
Parts are computed whether or not a pair asks for them, so what they read must be clamped; `and`
and `or` may change the order of their operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum, Flag
from functools import lru_cache
from typing import Final, TypeAlias, final

from attngen.analysis.equalities import use_equalities
from attngen.analysis.key_bounds import find_bounds, split_mask
from attngen.analysis.ranges import INT64, compile_time_ranges, infer_ranges, range_of_work
from attngen.codegen.expr import wraps_around
from attngen.diagnostics.span import Span
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
    Symbol,
    ToFloat,
    expr_type,
)
from attngen.ir.functions import call
from attngen.ir.interval import Interval
from attngen.ir.traverse import children, postorder, rebuild, rewrite, tensors
from attngen.ir.types import ScalarType
from attngen.passes.fold_constants import fold_expr
from attngen.record import record

__all__ = [
    "MaskParts",
    "find_mask_parts",
    "gives_rows_all_keys",
    "is_dear_per_pair",
    "is_dear_to_classify",
]


class _Of(Flag):
    """What a value depends on, beside the head."""

    BLOCK = 0
    ROW = 1
    KEY = 2
    PAIR = 3


_Scopes: TypeAlias = Mapping[int, _Of]

_OF_SYMBOL: Final = {"q": _Of.ROW, "qpos": _Of.ROW, "kv": _Of.KEY}
_FREE: Final = (Const, Symbol, Let, ToFloat)
_COSTS: Final[Mapping[type, int]] = {Load: 8, Call: 2}
"""Operations of a node that is more than one, or as many as it has operands."""
_DIVISIONS: Final = (BinaryOp.DIV, BinaryOp.FLOORDIV, BinaryOp.MOD)
_DIVISION: Final = 8
_LEAST: Final = 4
"""Operations that are worth a register, or a shuffle that brings them from another lane."""
_MOST: Final = 4
"""Parts of a kind: more of them would not stay in registers."""
_DEAREST_PAIR: Final = 64
"""Operations of a pair beyond which `and` and `or` had better skip some."""
_MOST_NODES: Final = 2048
"""Nodes of a mask beyond which a pair is too dear in all likelihood, and looking takes long."""


@final
@record(eq=False)
class MaskParts:
    """A mask, and what of it is computed ahead of its pairs.

    The mask is `bounds and rest`, those that are there.

    bounds  comparisons `kv < limit` and conditions on the row, joined by `and`, `or` and `not`
    rest    `of_row op of_key op pair`, those that are there; `op` is `and` or `or`
    fixed   nodes that are computed once for a block
    rows    nodes of `of_row` and `pair` that are computed once for a row of a tile
    keys    nodes of `of_key` and `pair` that are computed once for a key of a tile
    cost    operations left for each pair, a read counted as several
    reads   whether each pair reads a tensor
    limits  `pair` as bounds, where they say all of it
    """

    bounds: Expr | None
    rest: Expr | None
    op: LogicalOp
    of_row: Expr | None
    of_key: Expr | None
    pair: Expr | None
    fixed: tuple[Expr, ...]
    rows: tuple[Expr, ...]
    keys: tuple[Expr, ...]
    cost: int
    reads: bool
    limits: Expr | None = None

    @property
    def is_in_words(self) -> bool:
        """Whether all of the rest is known for many keys at once, and nothing is bounds already."""
        is_known = self.pair is None or self.limits is not None
        return self.bounds is None and self.rest is not None and is_known

    @property
    def whole(self) -> MaskParts:
        """The same with nothing but `fixed` ahead of a pair."""
        if self.rest is None:
            return self
        cost, reads = _count(self.rest, {id(e) for e in self.fixed})
        return replace(
            self,
            of_row=None,
            of_key=None,
            pair=self.rest,
            rows=(),
            keys=(),
            cost=cost,
            reads=reads,
            limits=None,
        )


@lru_cache(maxsize=64)  # asked again for every schedule
def find_mask_parts(attention: Attention) -> MaskParts | None:
    """The parts of a variant's mask.

    None where there is no mask, where a pair would cost too much without laziness, and where
    data might divide beyond 64 bits at a pair that the mask skips.  Sums and products wrap around.
    """
    if attention.mask is None or len(list(postorder(attention.mask))) > _MOST_NODES:
        return None
    attention = use_equalities(attention)
    assert attention.mask is not None
    if _may_overflow(attention, attention.mask):
        return None
    split = split_mask(attention)
    bounds = None
    if split.bounds is not None:
        bounds = _as_limits(split.bounds)
    rest = _join(LogicalOp.AND, split.rest, attention.mask.span) if split.rest else None
    of_bounds = [] if bounds is None else _outermost(bounds, _find_scopes(bounds), (_Of.BLOCK,))
    if rest is None:
        fixed = tuple(_dearest(of_bounds))
        return MaskParts(bounds, None, LogicalOp.AND, None, None, None, fixed, (), (), 0, False)
    rest = _gather(_share_equal(_without_single_lets(rest)))
    scopes = _find_scopes(rest)
    op = LogicalOp.AND
    terms: tuple[Expr, ...] = (rest,)
    if isinstance(rest, Logical) and scopes[id(rest)] is _Of.PAIR:
        op, terms = rest.op, rest.operands
    of_row = next((e for e in terms if scopes[id(e)] in (_Of.BLOCK, _Of.ROW)), None)
    of_key = next((e for e in terms if scopes[id(e)] is _Of.KEY), None)
    of_pair = tuple(e for e in terms if scopes[id(e)] is _Of.PAIR)
    pair = _join(op, of_pair, rest.span) if of_pair else None
    parts = [e for e in _choose(rest, scopes) if e is not of_row and e is not of_key]
    of_block, rows, keys = (
        tuple(_dearest([e for e in parts if scopes[id(e)] is kind]))
        for kind in (_Of.BLOCK, _Of.ROW, _Of.KEY)
    )
    fixed = tuple(_dearest([*of_bounds, *of_block]))
    ahead = {id(e) for e in (*fixed, *rows, *keys)}
    cost, reads = (0, False) if pair is None else _count(pair, ahead)
    if cost > _DEAREST_PAIR:
        return None
    limits = None
    if pair is not None and (found := find_bounds(attention, pair)) is not None:
        limits = _as_limits(found)
    return MaskParts(bounds, rest, op, of_row, of_key, pair, fixed, rows, keys, cost, reads, limits)


def _may_overflow(attention: Attention, mask: Expr) -> bool:
    """Whether what is computed of data may leave 64 bits, as a launch does not find out."""
    known = infer_ranges((mask,), compile_time_ranges(attention), attention, _wrapped)
    return any(
        expr_type(node) is ScalarType.INT
        and not isinstance(node, Load)
        and tensors(node)
        and not range_of_work(node, known).within(*INT64.ends)
        for node in postorder(mask)
    )


def _wrapped(node: Expr, found: Interval) -> Interval:
    """What a node that wraps around leaves: sums and products of 64 bits do so in parts."""
    is_wide = expr_type(node) is ScalarType.INT and not found.within(*INT64.ends)
    return INT64 if is_wide and wraps_around(node) else found


def _as_limits(bounds: Expr) -> Expr:
    return rewrite(fold_expr(bounds), _keep_narrow)


def _keep_narrow(e: Expr) -> Expr:
    """`kv < x - 5` as `kv < max(x, 5) - 5`, which is the same and stays within the bits of `x`."""
    match e:
        case Compare(CompareOp.LT, Symbol("kv"), limit):
            match limit:
                case Binary(BinaryOp.SUB, x, Const(int(c))) if c > 0:
                    near = replace(limit, left=call("max", x, Const(c)))
                case _:
                    return e
            return replace(e, right=near)
        case _:
            return e


# ---- the mask, so that parts are large -----------------------------------------------------


def _without_single_lets(mask: Expr) -> Expr:
    """The mask without lets of `and` and `or` that are used once: they keep chains apart."""
    uses = Counter(id(child) for node in postorder(mask) for child in children(node))
    new: dict[int, Expr] = {}
    for node in postorder(mask):
        built = rebuild(node, tuple(new[id(child)] for child in children(node)))
        if isinstance(built, Let) and isinstance(built.value, Logical) and uses[id(node)] < 2:
            built = built.value
        new[id(node)] = built
    return new[id(mask)]


def _share_equal(mask: Expr) -> Expr:
    """The mask with one node for all that mean the same."""
    known: dict[tuple[object, ...], Expr] = {}
    new: dict[int, Expr] = {}
    for node in postorder(mask):
        built = rebuild(node, tuple(new[id(child)] for child in children(node)))
        own = [getattr(built, f.name) for f in fields(built) if f.name != "span"]
        plain = [repr(x) for x in own if isinstance(x, str | Enum | bool | int | float)]
        key = (type(built), *plain, *(id(child) for child in children(built)))
        new[id(node)] = known.setdefault(key, built)
    return new[id(mask)]


def _gather(mask: Expr) -> Expr:
    """The mask with the operands of each `and` and `or` in order: of the row, of the key, of both.

    Several of a row, or of a key, become one operand, and what reads comes last.
    """
    new: dict[int, Expr] = {}
    scopes: dict[int, _Of] = {}
    for node in postorder(mask):
        built = rebuild(node, tuple(new[id(child)] for child in children(node)))
        _note_scope(built, scopes)
        if isinstance(built, Logical) and scopes[id(built)] is _Of.PAIR:
            built = _gather_chain(built, scopes)
            _note_scope(built, scopes)
        new[id(node)] = built
    return new[id(mask)]


def _gather_chain(chain: Logical, scopes: dict[int, _Of]) -> Logical:
    operands: list[Expr] = []
    for e in chain.operands:
        operands += e.operands if isinstance(e, Logical) and e.op is chain.op else (e,)
    of_row = [e for e in operands if scopes[id(e)] in (_Of.BLOCK, _Of.ROW)]
    of_key = [e for e in operands if scopes[id(e)] is _Of.KEY]
    of_pair = [e for e in operands if scopes[id(e)] is _Of.PAIR]
    of_pair.sort(key=lambda e: bool(tensors(e)))
    groups = [_join(chain.op, group, chain.span) for group in (of_row, of_key) if group]
    for group in groups:
        _note_scope(group, scopes)
    return Logical(chain.op, (*groups, *of_pair), chain.span)


def _join(op: LogicalOp, operands: Sequence[Expr], span: Span | None) -> Expr:
    return Logical(op, tuple(operands), span) if len(operands) > 1 else operands[0]


# ---- the parts -----------------------------------------------------------------------------


def _find_scopes(root: Expr) -> _Scopes:
    scopes: dict[int, _Of] = {}
    for node in postorder(root):
        _note_scope(node, scopes)
    return scopes


def _note_scope(node: Expr, scopes: dict[int, _Of]) -> None:
    scope = _OF_SYMBOL.get(node.name, _Of.BLOCK) if isinstance(node, Symbol) else _Of.BLOCK
    for child in children(node):
        scope |= scopes[id(child)]
    scopes[id(node)] = scope


def _choose(pair: Expr, scopes: _Scopes) -> list[Expr]:
    """The largest nodes that are worth it, or what they are thin around.

    `bq < 2` is not worth it where `bq` is a part anyway, nor `kv < n[b]` where `n[b]` may be one.
    """
    parts = _outermost(pair, scopes, (_Of.ROW, _Of.KEY, _Of.BLOCK))
    for part in sorted(parts, key=_cost, reverse=True):
        inner = [e for e in parts if e is not part]
        if scopes[id(part)] is not _Of.BLOCK:
            inner += _outermost(part, scopes, (_Of.BLOCK,))
        inside = {id(node) for node in postorder(part)}
        inner = [e for e in inner if id(e) in inside]
        if inner and _count(part, {id(e) for e in inner})[0] <= 1:
            parts = [e for e in parts if e is not part]
            parts += [e for e in inner if all(e is not other for other in parts)]
    return parts


def _outermost(root: Expr, scopes: _Scopes, within: Collection[_Of]) -> list[Expr]:
    """The largest nodes below `root` of these scopes that are worth a register."""
    found: list[Expr] = []
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if scopes[id(node)] in within:
            found += [node] if _cost(node) >= _LEAST else []
        else:
            stack.extend(reversed(children(node)))
    return found


def _dearest(parts: list[Expr]) -> list[Expr]:
    """At most `_MOST` parts, in the order in which they were."""
    kept = sorted(parts, key=_cost, reverse=True)[:_MOST]
    return [e for e in parts if any(e is other for other in kept)]


def _cost(root: Expr) -> int:
    """Operations of an expression."""
    return _count(root, ())[0]


def _count(root: Expr, ahead: Collection[int]) -> tuple[int, bool]:
    """Operations beside the nodes that are computed ahead, and whether one of them is a read."""
    cost, reads = 0, False
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in ahead or id(node) in seen:
            continue
        seen.add(id(node))
        stack.extend(children(node))
        reads |= isinstance(node, Load)
        if isinstance(node, Binary) and node.op in _DIVISIONS:
            cost += _DIVISION
        elif isinstance(node, Logical):
            cost += len(node.operands) - 1
        elif not isinstance(node, _FREE):
            cost += _COSTS.get(type(node), 1)
    return cost, reads


_CHEAP_MASK: Final = 9
"""Nodes of a window: two comparisons of a difference."""


@lru_cache(maxsize=64)  # asked again for every schedule
def is_dear_per_pair(attention: Attention) -> bool:
    """Whether the mask reads, divides or does more than a window's work for each pair.

    What it does once for a block, or for many keys of a row, does not count.
    """
    if attention.mask is None:
        return False
    parts = find_mask_parts(attention)
    return _is_much(attention.mask if parts is None else parts.rest, parts)


def is_dear_to_classify(attention: Attention) -> bool:
    """The same of the whole mask, bounds included, which is asked for each tile."""
    return _is_much(attention.mask, find_mask_parts(attention))


def _is_much(mask: Expr | None, parts: MaskParts | None) -> bool:
    if mask is None:
        return False
    fixed_nodes = set(postorder(*(() if parts is None else parts.fixed)))
    nodes = [node for node in postorder(mask) if node not in fixed_nodes]
    return len(nodes) > _CHEAP_MASK or any(_is_dear(node) for node in nodes)


def gives_rows_all_keys(attention: Attention) -> bool:
    """Whether the mask may give a row all keys by what it knows of that row alone."""
    parts = find_mask_parts(attention)
    if parts is None:
        return False
    if isinstance(parts.bounds, Logical) and parts.bounds.op is LogicalOp.OR:
        scopes = _find_scopes(parts.bounds)
        return any(scopes[id(e)] is _Of.ROW for e in parts.bounds.operands)
    return parts.op is LogicalOp.OR and parts.of_row is not None


def _is_dear(node: Expr) -> bool:
    """Whether one node alone is more than a window's work."""
    return isinstance(node, Load) or (isinstance(node, Binary) and node.op in _DIVISIONS)
