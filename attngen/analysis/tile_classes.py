"""From a mask, without evaluating it per pair: may a tile hold a pair that attends, and do all?

    mask  kv <= qpos and doc[b, qpos] == doc[b, kv]

    may   kv_first <= qpos_last and row0_low <= key0_high and key0_low <= row0_high
    all   kv_last <= qpos_first and row0_low == row0_high == key0_low == key0_high
    rest  row0_low == row0_high == key0_low == key0_high

Interval arithmetic in three-valued logic, done on expressions instead of numbers: `q` ranges
over [q_first, q_last], `kv` over [kv_first, kv_last], and every node yields expressions for its
least and largest value over the tile.  For a truth value these are "certainly" and "possibly".
Where the rest holds at all pairs, bounds of keys alone decide (key_bounds.py).
What is read from tensors along rows alone, or along keys alone, becomes a *summary*: its
minimum and maximum over the rows, or the keys, of a tile, found at run time; so does a sum of
digits, which intervals lose.  A summary has 32 bits: at their ends nothing is known.  What is read
along both, such as a table of blocks, becomes one over the few elements that a tile reaches.  What
depends on neither `q` nor `kv` is one opaque value.

Sound always: `may` false proves that no pair of the tile attends, `all` true that every one
does.  Floats stay sound because float32 rounding is monotone; where a NaN is possible a
comparison is unknown.

Source: R. E. Moore, Interval Analysis, 1966, chapter 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TypeAlias, final

from attngen.analysis.equalities import use_equalities
from attngen.analysis.key_bounds import split_mask
from attngen.analysis.ranges import INT32, INT64, compile_time_ranges, infer_ranges
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
from attngen.ir.functions import call
from attngen.ir.interval import TRUE, Interval
from attngen.ir.traverse import children, postorder, rewrite
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = [
    "MOST_IN_BOX", "TILE_SYMBOLS", "Bounds", "BoxSummary", "Summary", "TileClasses",
    "classify_tiles", "key_may_attend",
]  # fmt: skip

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


def _tile(name: str, type_: ScalarType = _INT) -> Symbol:
    return Symbol(name, Role.TILE, type_)


MOST_IN_BOX: Final = 64
"""Elements that a kernel reads of one tensor to classify one tile, at most."""

_FAR: Final = 2**61
"""Indices beyond it are unknown, so that the width of a box fits 64 bits."""

TILE_SYMBOLS: Final = ("q_first", "q_last", "qpos_first", "qpos_last", "kv_first", "kv_last")
"""A tile's first and last row and key, both included, inside the sequence."""


@final
@record(eq=False)
class Bounds:
    """Least and largest value over a tile; the same object when it is one value.

    Of a truth value: `low` says that it is true everywhere, `high` that it may be somewhere.
    """

    low: Expr
    high: Expr

    @property
    def is_point(self) -> bool:
        return self.low is self.high


@final
@record(eq=False)
class Summary:
    """A row-only or key-only value whose minimum and maximum over a tile are needed.

    The symbols are `<name>_low` and `<name>_high`; a truth value counts as 0 and 1.  What may leave
    32 bits is cut off at their ends, where `may` and `all` take it for unknown.
    """

    name: str
    value: Expr


@final
@record(eq=False)
class BoxSummary:
    """A read whose minimum and maximum over a box of elements are needed: `table[q // c, kv // c]`.

    Index i of the read lies in [`lows[i]`, `highs[i]`] over a tile; both are expressions over
    the tile's ends and over summaries before this one.  The symbols are those of a `Summary`.
    Where a box has more than MOST_IN_BOX elements, they are the type's least and largest value.
    """

    name: str
    value: Load
    lows: tuple[Expr, ...]
    highs: tuple[Expr, ...]


@final
@record(eq=False)
class TileClasses:
    """What a kernel asks about a tile of rows and keys.

    Summaries are found in this order: of rows, of keys, of boxes.  `notes` says, for each part of
    the mask that stays unknown, why.

    rest  all pairs attend that are within the bounds of keys; None where the mask is nothing but
          bounds, or has none
    """

    may: Expr
    all: Expr
    rest: Expr | None
    row_summaries: tuple[Summary, ...]
    key_summaries: tuple[Summary, ...]
    box_summaries: tuple[BoxSummary, ...]
    notes: tuple[str, ...]

    @property
    def summaries(self) -> tuple[Summary | BoxSummary, ...]:
        """All of them, in order."""
        return (*self.row_summaries, *self.key_summaries, *self.box_summaries)


@lru_cache(maxsize=64)  # asked again for every schedule
def classify_tiles(attention: Attention) -> TileClasses:
    """The classes of a variant's tiles; without a mask every pair attends."""
    if attention.mask is None:
        return TileClasses(Const(True), Const(True), None, (), (), (), ())
    attention = use_equalities(attention)
    assert attention.mask is not None
    ranges = {"q": Bounds(_tile("q_first"), _tile("q_last"))}
    ranges["qpos"] = Bounds(_tile("qpos_first"), _tile("qpos_last"))
    ranges["kv"] = Bounds(_tile("kv_first"), _tile("kv_last"))
    walk = _Walk(attention, ranges, summarise=True)
    bounds = walk.run(attention.mask)
    split = split_mask(attention)
    rest: Expr | None = None
    if split.bounds is not None and split.rest:
        lows = tuple(walk.run(term).low for term in split.rest)
        rest = Logical(LogicalOp.AND, lows) if len(lows) > 1 else lows[0]
    summaries = tuple(walk.rows), tuple(walk.keys), tuple(walk.boxes)
    return TileClasses(bounds.high, bounds.low, rest, *summaries, tuple(walk.notes))


def key_may_attend(attention: Attention) -> Expr | None:
    """Whether any row of the sequence may see key `kv`; None when every key may be seen.

    False marks a dead key, whose value counts as zero whatever its memory holds: it fails a
    part of the mask that depends on the key alone, or lies outside what the affine part allows.
    """
    if attention.mask is None:
        return None
    Sq, Skv = (Symbol(name, Role.SIZE, _INT) for name in ("Sq", "Skv"))
    one = Const(1)
    ranges = {"q": Bounds(Const(0), Binary(BinaryOp.SUB, Sq, one))}
    first = Binary(BinaryOp.SUB, Skv, Sq)
    ranges["qpos"] = Bounds(first, Binary(BinaryOp.SUB, Skv, one))
    walk = _Walk(attention, ranges, summarise=False)
    high = walk.run(attention.mask).high
    known = infer_ranges((high,), compile_time_ranges(attention), attention)
    high = rewrite(high, lambda e: walk.drop_certain(e, known))
    return None if isinstance(high, Const) and high.value is True else high


# ---- the walk ----------------------------------------------------------------------------

_ROW: Final = frozenset({"q", "qpos"})
_KEY: Final = frozenset({"kv"})
_NONE: Final[frozenset[str]] = frozenset()
_SUMMARY: Final = Interval(-INT32.high, INT32.high)
"""What a kernel holds of a summary; at an end the value may lie beyond it."""
_DIGITS: Final = 4
"""Remainders in a sum from which on it is taken for digits that are put together anew."""
Unknown: TypeAlias = None
"""A float of which nothing is known."""


class _Walk:
    """Bounds of every node below a root, operands first."""

    def __init__(self, attention: Attention, ranges: dict[str, Bounds], *, summarise: bool) -> None:
        self.attention = attention
        self.ranges = ranges
        self.summarise = summarise
        self.rows: list[Summary] = []
        self.keys: list[Summary] = []
        self.boxes: list[BoxSummary] = []
        self.loose: dict[int, Bounds] = {}  # by id: ends that no pair may have
        self.guards: dict[int, frozenset[str]] = {}  # by id: summaries that must have fit
        self.notes: list[str] = []
        self.done: dict[int, Bounds | Unknown] = {}  # by id: what `run` found
        self.varies: dict[int, frozenset[str]] = {}
        self.reads: dict[int, bool] = {}
        self.digits: dict[int, int] = {}
        self.mixes: dict[int, bool] = {}
        for node in postorder(*attention.expressions()):
            below = children(node)
            own = (
                frozenset({node.name} & ranges.keys()) if isinstance(node, Symbol) else frozenset()
            )
            self.varies[id(node)] = own.union(*(self.varies[id(c)] for c in below))
            is_read = isinstance(node, Load) and bool(self.varies[id(node)])
            self.reads[id(node)] = is_read or any(self.reads[id(c)] for c in below)
            self.note_digits(node)
        symbols = compile_time_ranges(attention)
        self.true = infer_ranges(attention.expressions(), symbols, attention)
        self.known = infer_ranges(attention.expressions(), symbols, attention, self.assume)

    def note_digits(self, node: Expr) -> None:
        """Count remainders, and find the sums of them that no interval describes."""
        below = children(node)
        is_digit = isinstance(node, Binary) and node.op is BinaryOp.MOD
        own = int(is_digit and bool(self.varies[id(node)]))
        self.digits[id(node)] = min(own + sum(self.digits[id(c)] for c in below), _DIGITS)
        is_sum = isinstance(node, Binary) and node.op in (BinaryOp.ADD, BinaryOp.SUB)
        mixes = is_sum and self.digits[id(node)] == _DIGITS
        self.mixes[id(node)] = mixes or any(self.mixes[id(c)] for c in below)

    def assume(self, node: Expr, found: Interval) -> Interval:
        """The values of a summary that a kernel can hold; where there are others it knows."""
        if found.within(*INT32.ends) or not self.is_summarised(node):
            return found
        low, high = (max(INT32.low, min(end, INT32.high)) for end in found.ends)
        return Interval(low, high)

    def is_summarised(self, node: Expr) -> bool:
        """Whether a value is found at every row, or every key, of a tile."""
        varies = self.varies[id(node)]
        is_along_one = bool(varies) and (varies <= _ROW or varies <= _KEY)
        is_found = self.reads[id(node)] or self.mixes[id(node)]
        if not (self.summarise and is_found and is_along_one) or expr_type(node) is _FLOAT:
            return False
        return not self.is_shifted(node)

    def is_shifted(self, node: Expr) -> bool:
        """Whether it is another value and a number that no pair changes: `x + 3`, `x - n[b]`."""
        is_sum = isinstance(node, Binary) and node.op in (BinaryOp.ADD, BinaryOp.SUB)
        return is_sum and not all(self.varies[id(c)] for c in children(node))

    def run(self, root: Expr) -> Bounds:
        """The bounds of a truth value; what was met before is not summarised again."""
        done = self.done
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if id(node) in done:
                continue
            whole = self.as_a_whole(node)
            if whole is not None:
                done[id(node)] = whole
            elif ready:
                operands = [done[id(c)] for c in children(node)]
                guards = [self.guards.get(id(c), _NONE) for c in children(node)]
                self.guards[id(node)] = _NONE.union(*guards)
                done[id(node)] = self.within_64_bits(node, operands) or self.unknown(node)
                if expr_type(node) is _BOOL:
                    done[id(node)] = self.guarded(node, done[id(node)])
            else:
                stack.append((node, True))
                stack.extend((child, False) for child in children(node))
        found = done[id(root)]
        assert found is not None, "a mask is a truth value"
        return found

    def within_64_bits(self, node: Expr, operands: list[Bounds | Unknown]) -> Bounds | Unknown:
        """The bounds of a node, where computing them cannot overflow.

        A tile's rows and keys are values that pairs have, of which the launch made sure.  Ends of
        what is read or unknown are not, so what is made of them must fit 64 bits for all values.
        """
        loose = any(o is not None and id(o) in self.loose for o in operands)
        is_wide = expr_type(node) is _INT and not self.known[id(node)].within(*INT64.ends)
        found = None if loose and is_wide else self.bounds(node, operands)
        if found is not None and loose:
            self.loose[id(found)] = found
        return found

    def as_a_whole(self, node: Expr) -> Bounds | None:
        """A node that is taken as it stands: one value, or a summary."""
        varies = self.varies[id(node)]
        if not varies:
            return Bounds(node, node)
        if isinstance(node, Symbol):
            return self.ranges[node.name]
        if not self.is_summarised(node):
            is_hard = self.mixes[id(node)] and expr_type(node) is _INT and not self.summarise
            return self.unknown(node) if is_hard else None
        along_rows = varies <= _ROW
        summaries = self.rows if along_rows else self.keys
        kind = "row" if along_rows else "key"
        name = f"{kind}{len(summaries)}"
        value = node
        if not self.true[id(node)].within(*INT32.ends):
            value = call("clamp", node, *(Const(int(end)) for end in _SUMMARY.ends))
            self.guards[id(node)] = frozenset({name})
        summaries.append(Summary(name, value))
        return self.loosely(_ends_of(name, node))

    def guarded(self, node: Expr, bounds: Bounds | Unknown) -> Bounds | Unknown:
        """A truth value that says nothing where a summary below it did not fit."""
        names = sorted(self.guards.pop(id(node), ()))
        if not names or bounds is None or bounds is _UNKNOWN_TRUTH:
            return bounds
        low, high = (Const(int(end)) for end in _SUMMARY.ends)
        fits = tuple(
            test
            for name in names
            for test in (
                Compare(CompareOp.GT, _tile(f"{name}_low"), low),
                Compare(CompareOp.LT, _tile(f"{name}_high"), high),
            )
        )
        leaves = tuple(Not(test) for test in fits)
        return Bounds(
            Logical(LogicalOp.AND, (*fits, bounds.low)),
            Logical(LogicalOp.OR, (*leaves, bounds.high)),
        )

    def loosely(self, bounds: Bounds) -> Bounds:
        self.loose[id(bounds)] = bounds
        return bounds

    def unknown(self, node: Expr) -> Bounds | Unknown:
        """What types and declared ranges alone say."""
        if expr_type(node) is _BOOL:
            return _UNKNOWN_TRUTH
        if expr_type(node) is _FLOAT:
            return None
        interval = self.known[id(node)]
        if not interval.within(*INT64.ends):
            return None
        return self.loosely(Bounds(Const(int(interval.low)), Const(int(interval.high))))

    def drop_certain(self, node: Expr, known: Mapping[int, Interval]) -> Expr:
        """`true` for what holds at every key, such as `kv <= Skv - 1`, and what follows from it."""
        match node:
            case Compare() | Logical() | Not() if id(node) in known and known[id(node)] == TRUE:
                return Const(True)
            case Compare(CompareOp.LE, left, Const(most)):
                is_certain = (isinstance(left, Load) and most >= self.known[id(left)].high) or (
                    most >= 0 and _is_distance_to_last_key(left)
                )
            case Compare(CompareOp.LE, Const(least), Load() as right):
                is_certain = least <= self.known[id(right)].low
            case Compare(CompareOp.LE, Symbol("kv"), right):
                is_certain = _is_last_key(right)
            case Compare(CompareOp.GE, left, Const(0)):
                is_certain = _is_last_key(left)
            case Logical(LogicalOp.OR, operands):
                is_certain = any(map(_is_true, operands))
            case Logical(LogicalOp.AND, operands):
                rest = tuple(o for o in operands if not _is_true(o))
                if len(rest) > 1:
                    return node if len(rest) == len(operands) else Logical(node.op, rest, node.span)
                return rest[0] if rest else Const(True)
            case _:
                return node
        return Const(True) if is_certain else node

    # ---- one node ----

    def bounds(self, node: Expr, operands: list[Bounds | Unknown]) -> Bounds | Unknown:
        """The bounds of a node from those of its operands; None where nothing is known."""
        if isinstance(node, Logical):
            return _logical(node, [o or _UNKNOWN_TRUTH for o in operands])
        if isinstance(node, Load):
            return self.load(node, operands)
        if isinstance(node, Compare):
            return self.compare(node, operands)
        if any(o is None for o in operands):
            return None
        known = [o for o in operands if o is not None]
        match node:
            case Let():
                return known[0]
            case Not():
                return Bounds(Not(known[0].high), Not(known[0].low))
            case Negate():
                return Bounds(Negate(known[0].high), Negate(known[0].low))
            case ToFloat():
                return Bounds(ToFloat(known[0].low), ToFloat(known[0].high))
            case Select():
                return _select(known[0], known[1], known[2])
            case Binary():
                if expr_type(node) is _FLOAT and self.known[id(node)].nan:
                    return None
                return self.binary(node, known[0], known[1])
            case Call(function):
                return _call(function, known)
            case _:
                return None

    def load(self, node: Load, operands: list[Bounds | Unknown]) -> Bounds | Unknown:
        """A summary over the box that the indices span."""
        is_small = self.known[id(node)].within(*INT32.ends)
        if not self.summarise or node.type is _FLOAT or not is_small:
            return None
        known = [o for o in operands if o is not None]
        is_near = all(self.known[id(i)].within(-_FAR, _FAR) for i in node.indices)
        if len(known) < len(operands) or not is_near:
            return None
        name = f"box{len(self.boxes)}"
        lows, highs = tuple(o.low for o in known), tuple(o.high for o in known)
        self.boxes.append(BoxSummary(name, node, lows, highs))
        known_where = f"is known where a tile reads at most {MOST_IN_BOX} elements of it"
        self.note(node, f"`{node.tensor}` {known_where}")
        return self.loosely(_ends_of(name, node))

    def compare(self, node: Compare, operands: list[Bounds | Unknown]) -> Bounds:
        left, right = operands
        may_be_nan = any(self.known[id(c)].nan for c in children(node))
        if left is None or right is None or may_be_nan:
            if not self.varies[id(node)]:
                return Bounds(node, node)
            kinds = {expr_type(child) for child in children(node)}
            what = "a float comparison" if _FLOAT in kinds else "what may leave 64 bits"
            self.note(node, f"{what} is decided pair by pair")
            return _UNKNOWN_TRUTH
        match node.op:
            case CompareOp.LT | CompareOp.LE:
                return Bounds(
                    Compare(node.op, left.high, right.low), Compare(node.op, left.low, right.high)
                )
            case CompareOp.GT | CompareOp.GE:
                return Bounds(
                    Compare(node.op, left.low, right.high), Compare(node.op, left.high, right.low)
                )
            case CompareOp.EQ:
                return _equal(left, right)
            case CompareOp.NE:
                equal = _equal(left, right)
                return Bounds(Not(equal.high), Not(equal.low))

    def binary(self, node: Binary, a: Bounds, b: Bounds) -> Bounds | Unknown:
        sign = self.sign(node.right) if b.is_point else 0
        match node.op:
            case BinaryOp.ADD:
                return _pair(BinaryOp.ADD, (a.low, b.low), (a.high, b.high))
            case BinaryOp.SUB:
                return _pair(BinaryOp.SUB, (a.low, b.high), (a.high, b.low))
            case BinaryOp.MUL:
                if b.is_point and sign:
                    ends = (a.low, a.high) if sign > 0 else (a.high, a.low)
                    return _pair(BinaryOp.MUL, (ends[0], b.low), (ends[1], b.low))
                if a.is_point and (left := self.sign(node.left)):
                    ends = (b.low, b.high) if left > 0 else (b.high, b.low)
                    return _pair(BinaryOp.MUL, (a.low, ends[0]), (a.low, ends[1]))
                return _corners(a, b)
            case BinaryOp.DIV:
                if not sign:
                    return None
                ends = (a.low, a.high) if sign > 0 else (a.high, a.low)
                return _pair(node.op, (ends[0], b.low), (ends[1], b.low))
            case BinaryOp.FLOORDIV | BinaryOp.MOD:
                # A divisor of 0 gives 0, which is between these ends as well.
                divisor: Interval = self.known[id(node.right)]
                if not b.is_point or divisor.low < 0 < divisor.high:
                    return None
                if node.op is BinaryOp.MOD:
                    return _modulo(a, b) if divisor.low >= 0 else None
                ends = (a.low, a.high) if divisor.low >= 0 else (a.high, a.low)
                return _pair(node.op, (ends[0], b.low), (ends[1], b.low))

    def sign(self, e: Expr) -> int:
        """1 or -1 when a value is proved to be positive or negative, else 0."""
        interval: Interval = self.known[id(e)]
        if interval.nan:
            return 0
        return 1 if interval.low > 0 else -1 if interval.high < 0 else 0

    def note(self, node: Expr, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _ends_of(name: str, node: Expr) -> Bounds:
    """The bounds that a summary gives."""
    low, high = _tile(f"{name}_low"), _tile(f"{name}_high")
    if expr_type(node) is _BOOL:
        one = Const(1)
        return Bounds(Compare(CompareOp.EQ, low, one), Compare(CompareOp.EQ, high, one))
    return Bounds(low, high)


def _is_true(e: Expr) -> bool:
    return isinstance(e, Const) and e.value is True


def _is_last_key(e: Expr) -> bool:
    """Whether it is `Skv - 1`."""
    match e:
        case Binary(BinaryOp.SUB, Symbol("Skv"), Const(1)):
            return True
        case _:
            return False


def _is_distance_to_last_key(e: Expr) -> bool:
    """Whether it is `kv - (Skv - 1)`, which is never above 0."""
    match e:
        case Binary(BinaryOp.SUB, Symbol("kv"), right):
            return _is_last_key(right)
        case _:
            return False


_UNKNOWN_TRUTH: Final = Bounds(Const(False), Const(True))


def _pair(op: BinaryOp, low: tuple[Expr, Expr], high: tuple[Expr, Expr]) -> Bounds:
    return Bounds(Binary(op, *low), Binary(op, *high))


def _corners(a: Bounds, b: Bounds) -> Bounds:
    products = [Binary(BinaryOp.MUL, x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Bounds(_nested("min", products), _nested("max", products))


def _nested(function: str, operands: list[Binary]) -> Expr:
    result: Expr = operands[0]
    for operand in operands[1:]:
        result = call(function, result, operand)
    return result


def _modulo(a: Bounds, b: Bounds) -> Bounds:
    """Within one period of a positive divisor the remainder grows with the dividend."""
    first, final = (Binary(BinaryOp.FLOORDIV, end, b.low) for end in (a.low, a.high))
    one_period = Compare(CompareOp.EQ, first, final)
    low, high = (Binary(BinaryOp.MOD, end, b.low) for end in (a.low, a.high))
    last = Binary(BinaryOp.SUB, b.low, Const(1))
    return Bounds(Select(one_period, low, Const(0)), Select(one_period, high, last))


def _equal(a: Bounds, b: Bounds) -> Bounds:
    both_points = a.is_point and b.is_point
    certain: list[Expr] = [Compare(CompareOp.EQ, a.low, b.low)]
    certain += [Compare(CompareOp.EQ, x.low, x.high) for x in (a, b) if not x.is_point]
    if both_points:
        return Bounds(certain[0], certain[0])
    possible = (Compare(CompareOp.LE, a.low, b.high), Compare(CompareOp.LE, b.low, a.high))
    return Bounds(Logical(LogicalOp.AND, tuple(certain)), Logical(LogicalOp.AND, possible))


def _logical(node: Logical, operands: list[Bounds]) -> Bounds:
    lows, highs = tuple(o.low for o in operands), tuple(o.high for o in operands)
    return Bounds(Logical(node.op, lows), Logical(node.op, highs))


def _select(condition: Bounds, then: Bounds, otherwise: Bounds) -> Bounds | Unknown:
    """The hull of both branches, or one of them where the condition is decided."""
    if expr_type(then.low) is _BOOL:
        either = Logical(LogicalOp.AND, (then.low, otherwise.low))
        neither = Logical(LogicalOp.OR, (then.high, otherwise.high))
    else:
        either = call("min", then.low, otherwise.low)  # type: ignore[assignment]
        neither = call("max", then.high, otherwise.high)  # type: ignore[assignment]
    if condition.is_point:
        return Bounds(
            Select(condition.low, then.low, otherwise.low),
            Select(condition.low, then.high, otherwise.high),
        )
    return Bounds(
        Select(condition.low, then.low, Select(condition.high, either, otherwise.low)),
        Select(condition.low, then.high, Select(condition.high, neither, otherwise.high)),
    )


def _call(function: str, operands: list[Bounds]) -> Bounds | Unknown:
    if function in ("min", "max", "clamp"):  # increasing in every argument
        return Bounds(
            call(function, *(o.low for o in operands)), call(function, *(o.high for o in operands))
        )
    if function == "abs":
        (x,) = operands
        zero = Const(0) if expr_type(x.low) is _INT else Const(0.0)
        distance = call("max", x.low, Negate(x.high))
        return Bounds(call("max", distance, zero), call("max", x.high, Negate(x.low)))
    if function == "floor":
        return Bounds(call("floor", operands[0].low), call("floor", operands[0].high))
    return None
