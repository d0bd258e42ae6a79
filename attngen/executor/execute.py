"""Run a `TileProgram` in NumPy: every step of every algorithm in a line or two.

This is the place to see what a kernel does.  One tile of scores exists at a time, for a
handful of heads; no array of Sq x Skv is ever formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np

from attngen.diagnostics.diagnostic import AttnError
from attngen.executor.errors import LengthOutside, ReadOutside
from attngen.ir.attention import Attention
from attngen.ir.program import Axis, Loop, Node, Op, TileProgram
from attngen.ir.row_state import RowState
from attngen.ir.schedule import Normalize, Schedule
from attngen.ir.semantics import Value, evaluate
from attngen.ir.types import Element

__all__ = ["Result", "execute", "round_to", "round_weights"]

Array: TypeAlias = Any
_SCORES_AT_ONCE = 1 << 18
"""Elements of one tile of scores, all heads of a group together: 1 MiB of float32."""


@final
@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves behind, float32, for the rows asked for.

    Shapes: o [B, Hq, rows, Dv]; lse, row_max, m, l [B, Hq, rows]; acc [B, Hq, rows, Dv].
    `m, l, acc` is the row state that `merge` takes.
    """

    o: Array
    lse: Array
    row_max: Array
    m: Array
    l: Array  # noqa: E741
    acc: Array


def execute(
    attention: Attention,
    schedule: Schedule,
    tiles: TileProgram,
    q: Array,
    k: Array,
    v: Array,
    *,
    sizes: Mapping[str, int],
    params: Mapping[str, Any],
    tensors: Mapping[str, Array],
    rows: tuple[int, int],
    keys: tuple[int, int],
) -> Result:
    """Run a loop nest on NumPy arrays.

    Shapes:  q [B, Hq, rows, Dqk], k [B, Hkv, keys, Dqk], v [B, Hkv, keys, Dv], any strides.
    Units:   `rows` and `keys` are the half-open ranges that the arrays hold, in tokens of
             the logical problem, whose lengths are `sizes["Sq"]` and `sizes["Skv"]`.
    Errors:  A661 when a visible pair reads a captured tensor outside its shape.
    """
    batch, heads = int(sizes["B"]), int(sizes["Hq"])
    shape = (batch * heads, rows[1] - rows[0])
    run = _Run(
        attention, schedule, tiles, q, k, v, dict(sizes), _typed(params), dict(tensors), rows, keys,
        lse=np.full(shape, -np.inf, np.float32),
        row_max=np.full(shape, -np.inf, np.float32),
        o=np.zeros((*shape, v.shape[-1]), np.float32),
        saved=_State.initial(attention.row_state, shape, v.shape[-1]),
    )  # fmt: skip
    with np.errstate(all="ignore"):  # infinities and NaN are values like others
        run.nodes(tiles.body)

    def split(x: Array) -> Array:
        return x.reshape(batch, heads, *x.shape[1:])

    saved = run.saved
    return Result(
        split(run.o),
        split(run.lse),
        split(run.row_max),
        split(saved.m),
        split(saved.l),
        split(saved.acc),
    )


@dataclass(slots=True)
class _State:
    """The row state of some heads and rows: m, l [heads, rows]; acc [heads, rows, Dv]."""

    m: Array
    l: Array  # noqa: E741
    acc: Array

    @staticmethod
    def initial(row_state: RowState, shape: tuple[int, int], head_dim_v: int) -> _State:
        shapes = {"m": shape, "l": shape, "acc": (*shape, head_dim_v)}
        start = {"m": -np.inf, "l": 0.0, **row_state.init}
        return _State(**{n: np.full(s, start[n], np.float32) for n, s in shapes.items()})


@dataclass(slots=True)
class _Run:
    """One run: the operands, the results, and what the loops and steps have at hand."""

    attention: Attention
    schedule: Schedule
    tiles: TileProgram
    q: Array
    k: Array
    v: Array
    sizes: dict[str, Any]
    params: dict[str, Any]
    tensors: dict[str, Array]
    rows: tuple[int, int]
    keys: tuple[int, int]
    o: Array
    lse: Array
    row_max: Array
    saved: _State
    # Set by the loops: heads [n] counts batch and head together; row and key tiles [begin, end).
    heads: Array = field(default=None)
    row_tile: tuple[int, int] = (0, 0)
    key_tile: tuple[int, int] = (0, 0)
    # Set by the steps.
    state: _State = field(default=None)  # type: ignore[assignment]
    scale: Value = field(default=None)  # type: ignore[assignment]
    query: Array = None
    key: Array = None
    value: Array = None
    s: Array = None
    p: Array = None
    f: Array = None

    # ---- the loops ----

    def nodes(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                for _ in self.walk(node.axis):
                    self.nodes(node.body)
            elif node.op is not Op.BARRIER:
                getattr(self, node.op.value)()

    def walk(self, axis: Axis) -> Iterator[None]:
        """Set the tile of one axis, tile after tile."""
        match axis:
            case Axis.BATCH_HEAD:
                total = self.sizes["B"] * self.sizes["Hq"]
                group = max(1, _SCORES_AT_ONCE // (self.tiles.tile_q * self.tiles.tile_kv))
                for first in range(0, total, group):
                    self.heads = np.arange(first, min(first + group, total))
                    yield
            case Axis.Q:
                for begin, end in _tiles(self.rows, self.tiles.tile_q):
                    self.row_tile = begin, end
                    yield
            case Axis.KV:
                for begin, end in _tiles(self.keys, self.tiles.tile_kv):
                    self.key_tile = begin, end
                    yield

    # ---- the steps ----

    def load_query(self) -> None:
        self.query = self.fetch(self.q, self.h, self.row_tile, self.rows)

    def load_key(self) -> None:
        self.key = self.fetch(self.k, self.hkv, self.key_tile, self.keys)

    def load_value(self) -> None:
        self.value = self.fetch(self.v, self.hkv, self.key_tile, self.keys)

    def init_state(self) -> None:
        shape = len(self.heads), self.row_tile[1] - self.row_tile[0]
        self.state = _State.initial(self.attention.row_state, shape, self.v.shape[-1])

    def load_state(self) -> None:
        m, l, acc = self.saved.m, self.saved.l, self.saved.acc  # noqa: E741
        self.state = _State(m[self.place].copy(), l[self.place].copy(), acc[self.place].copy())

    def store_state(self) -> None:
        saved, now = self.saved, self.state
        saved.m[self.place], saved.l[self.place], saved.acc[self.place] = now.m, now.l, now.acc

    def scores(self) -> None:
        self.scale = evaluate(self.attention.scale, self.lengths(), self.tensors)
        self.s = self.per_head(self.scale) * (self.query @ self.key.transpose(0, 2, 1))

    def mask(self) -> None:
        attends = np.broadcast_to(self.attends(), self.s.shape)
        self.require_inside(self.scale, attends)
        for line in self.attention.scores:
            value = evaluate(line, {**self.pair(), "s": self.s}, self.tensors)
            self.require_inside(value, attends)
            self.s = np.broadcast_to(value.data, self.s.shape)
        self.s = np.where(attends, self.s, np.float32(-np.inf)).astype(np.float32)

    def raise_max(self) -> None:
        m_old = self.state.m
        row_state, tile_max = self.attention.row_state, self.s.max(axis=-1)
        self.state.m = evaluate(row_state.raise_max, {"m_old": m_old, "m": tile_max}, {}).data
        self.f = evaluate(row_state.rescale, {"m_old": m_old, "m": self.state.m}, {}).data

    def rescale_sum(self) -> None:
        self.state.l = self.state.l * self.f

    def rescale_acc(self) -> None:
        self.state.acc = self.state.acc * np.broadcast_to(self.f, self.state.l.shape)[..., None]

    def weights(self) -> None:
        weight = self.attention.row_state.weight
        self.p = evaluate(weight, {"s": self.s, "m": self.state.m[..., None]}, {}).data

    def add_sum(self) -> None:
        self.state.l = self.state.l + self.p.sum(axis=-1, dtype=np.float32)

    def normalize_weights(self) -> None:
        self.p = _divide(self.p, self.state.l[..., None])

    def accumulate(self) -> None:
        # A key that no row of the tile sees is dead: its value is read as zero, even a NaN.
        seen = np.any(~np.isneginf(self.s), axis=1)[..., None]
        p = round_weights(self.p, self.attention.dtype)
        self.state.acc = self.state.acc + p @ np.where(seen, self.value, np.float32(0))

    def normalize_acc(self) -> None:
        self.state.acc = _divide(self.state.acc, self.state.l[..., None])

    def denormalize_acc(self) -> None:
        self.state.acc = self.state.acc * self.state.l[..., None]

    def finalize(self) -> None:
        row_state, state = self.attention.row_state, self.state
        normalized = self.schedule.normalize is Normalize.EVERY_TILE and row_state.running_max
        formula = row_state.output_of_normalized if normalized else row_state.output
        per_row: dict[str, Array] = {"m": state.m, "l": state.l}
        if self.attention.sink is not None:
            sink = evaluate(self.attention.sink, self.lengths(), self.tensors)
            self.require_inside(sink, np.True_)
            per_row["sink"] = self.per_head(sink)[..., 0]
        per_element = {name: np.asarray(x)[..., None] for name, x in per_row.items()}
        self.o[self.place] = evaluate(formula, {**per_element, "acc": state.acc}, {}).data
        if row_state.lse is not None:
            self.lse[self.place] = evaluate(row_state.lse, per_row, {}).data
        self.row_max[self.place] = state.m
        if normalized:
            self.denormalize_acc()
        self.store_state()

    # ---- what the steps are made of ----

    @property
    def b(self) -> Array:
        return self.heads // self.sizes["Hq"]

    @property
    def h(self) -> Array:
        return self.heads % self.sizes["Hq"]

    @property
    def hkv(self) -> Array:
        return self.h // (self.sizes["Hq"] // self.sizes["Hkv"])

    @property
    def place(self) -> tuple[Array, Array]:
        """Where this tile lies in the results."""
        rows = np.arange(self.row_tile[0], self.row_tile[1]) - self.rows[0]
        return self.heads[:, None], rows[None, :]

    def fetch(
        self, operand: Array, head: Array, tile: tuple[int, int], held: tuple[int, int]
    ) -> Array:
        """One tile of q, k or v for every head of the group, as float32 [heads, tokens, D]."""
        tokens = operand[:, :, tile[0] - held[0] : tile[1] - held[0]]
        return tokens[self.b, head].astype(np.float32, order="C")

    def lengths(self) -> dict[str, Array]:
        """Everything known before q and kv: sizes, params, b, h, hkv, and the true lengths."""
        known = {**self.sizes, **self.params}
        for name, index in (("b", self.b), ("h", self.h), ("hkv", self.hkv)):
            known[name] = index[:, None, None]
        lengths = {"Sq": self.attention.length_q, "Skv": self.attention.length_kv}
        values = {n: evaluate(e, known, self.tensors) for n, e in lengths.items() if e is not None}
        for name, value in values.items():
            self.require_inside(value, np.True_)
            if np.any((value.data < 0) | (value.data > self.sizes[name])):
                worst = int(np.max(value.data) if np.max(value.data) > 0 else np.min(value.data))
                raise AttnError(LengthOutside(None, name, worst, self.sizes[name]))
            known[name] = value.data
        return known

    def pair(self) -> dict[str, Array]:
        """The symbols of every pair of this tile."""
        known = self.lengths()
        known["q"] = np.arange(*self.row_tile)[None, :, None]
        known["kv"] = np.arange(*self.key_tile)[None, None, :]
        known["qpos"] = known["q"] + known["Skv"] - known["Sq"]
        return known

    def attends(self) -> Array:
        """True where a pair of this tile attends."""
        pair = self.pair()
        inside = (pair["q"] < pair["Sq"]) & (pair["kv"] < pair["Skv"])
        if self.attention.mask is None:
            return inside
        value = evaluate(self.attention.mask, pair, self.tensors)
        self.require_inside(value, inside)
        return inside & value.data

    def per_head(self, value: Value) -> Array:
        """A scale or a sink as float32 [heads, 1, 1]."""
        return np.broadcast_to(np.asarray(value.data, np.float32), (len(self.heads), 1, 1))

    def require_inside(self, value: Value, where: Array) -> None:
        if np.any(value.outside & where):
            assert value.tensor is not None
            raise AttnError(ReadOutside(None, value.tensor, self.tensors[value.tensor].shape))


def round_to(x: Array, element: Element | None) -> Array:
    """float32 values rounded to nearest even in a storage type, as float32 again."""
    if element is None or element.name == "fp32":
        return x
    if element.name == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def round_weights(p: Array, element: Element | None) -> Array:
    """Weights as a kernel hands them to the second product: times a power of two, rounded."""
    scale = np.float32(1.0 if element is None else element.weight_scale)
    return round_to(p * scale, element) / scale


def _typed(params: Mapping[str, Any]) -> dict[str, Any]:
    """Params as NumPy scalars of the language's types: bool, int64, float32."""
    kinds: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float32}
    return {name: kinds[type(value)](value) for name, value in params.items()}


def _divide(x: Array, l: Array) -> Array:  # noqa: E741
    """x / l, and x where l is 0 (an empty row keeps its zeros)."""
    with np.errstate(all="ignore"):
        return np.where(l == 0, x, x / np.where(l == 0, np.float32(1), l))


def _tiles(span: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
    """Half-open tiles of a span; the last one may be short."""
    for begin in range(span[0], span[1], size):
        yield begin, min(begin + size, span[1])
