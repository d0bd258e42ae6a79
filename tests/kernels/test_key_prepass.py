"""Keys summarised by a launch ahead: the same classes and the same bits as inside the kernel.

Every case runs with the workspace and without it, which leaves the launch out.  The race detector
is on, and the workspace holds numbers that no tile has before it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attngen
from attngen import targets
from attngen.backend.device import view
from attngen.binding import Binding, bind
from attngen.codegen.tiles import find_key_sets
from attngen.compiler import Rendered, lower_program, render_lowered
from attngen.cpu.build import build_library
from attngen.cpu.run import MemoryRange, RunReport, copy_apart, run_on_cpu
from attngen.engines import cpu_engine
from attngen.engines.cpu_engine import run_on_host
from attngen.engines.outputs import (
    Outputs,
    argument_values,
    due_launches,
    due_workspaces,
    grid_size,
    workspace_shape,
)
from attngen.ir.types import FP16
from attngen.kernels import forward_mma
from attngen.kernels.forward_mma import PREPASS_KEYS

from .family import join

B, HQ, HKV, D = 2, 4, 2, 8
TILE = 16
GROUP = 32 * TILE
SCHEDULE = f"kernel forward_mma; tile q = {TILE}, kv = {TILE}; warps 1; stages 1"
POISON = 0x5EADBEEF
TENSORS = {
    "doc": ("int32[B, Skv]", lambda Skv: (B, Skv), 4),
    "label": ("int32[Hq, Skv]", lambda Skv: (HQ, Skv), 3),
    "group": ("int32[Hkv, Skv]", lambda Skv: (HKV, Skv), 3),
    "kind": ("int32[B, Hq, Skv]", lambda Skv: (B, HQ, Skv), 3),
    "shared": ("int32[B, Hkv, Skv]", lambda Skv: (B, HKV, Skv), 3),
    "table": ("int32[Blocks]", lambda Skv: (-(-Skv // 4),), 5),
    "alive": ("bool[B, Skv]", lambda Skv: (B, Skv), 2),
    "keys": ("int32[B]", lambda Skv: (B,), 1),
}
"""Declared type, shape, and how many values there are."""


@dataclass(frozen=True)
class Case:
    """A mask, the sizes that its summaries of keys depend on, and the tensors that it reads."""

    lines: str
    sets: tuple[str, ...]
    tensors: tuple[str, ...]

    def text(self, name: str) -> str:
        declared = "".join(f"    tensor {t} : {TENSORS[t][0]}\n" for t in self.tensors)
        return f"attention {name} {{\n{declared}    {self.lines}\n    output o, lse\n}}\n"


CASES = {
    "documents": Case("mask causal and doc[b, qpos] == doc[b, kv]", ("B",), ("doc",)),
    "noncausal": Case("mask doc[b, q] == doc[b, kv]", ("B",), ("doc",)),
    "window": Case("mask abs(qpos - kv) <= 700 and doc[b, qpos] == doc[b, kv]", ("B",), ("doc",)),
    "block_table": Case("mask table[kv // 4] > q % 4", (), ("table",)),
    "padding": Case("mask alive[b, kv]", ("B",), ("alive",)),
    "by_head": Case("mask label[h, q] <= label[h, kv]", ("Hq",), ("label",)),
    "by_shared_head": Case("mask group[hkv, q] == group[hkv, kv]", ("Hkv",), ("group",)),
    "by_both": Case("mask kind[b, h, q] == kind[b, h, kv]", ("B", "Hq"), ("kind",)),
    "by_batch_and_shared": Case(
        "mask shared[b, hkv, q] == shared[b, hkv, kv]", ("B", "Hkv"), ("shared",)
    ),
    "ragged": Case(
        "length kv = keys[b]\n    mask table[kv // 4] == q % 5", ("B",), ("table", "keys")
    ),
    "two": Case(
        "mask causal and doc[b, qpos] == doc[b, kv] and label[h, kv] != 1",
        ("B", "Hq"),
        ("doc", "label"),
    ),
    "pointed": Case("mask doc[b, qpos] == kv and alive[b, kv]", ("B",), ("doc", "alive")),
}


@cache
def kernel_of(name: str) -> attngen.Kernel:
    text = CASES[name].text(name)
    return attngen.compile_text(text, name=f"{name}.attn", engine="cpu", schedule=SCHEDULE)


@cache
def render(name: str) -> Rendered:
    lowered = lower_program(kernel_of(name).checked, FP16, (D, D), targets.get("sm_80"))
    return render_lowered(lowered)


CLASSES = """
AG_KERNEL(kThreads, NAME_classes, Args) {
    AG_SHARED_MEMORY(memory);
    int q0;
    const Position at = place_block(args, ag_block(), q0);
    const Board board(memory);
    const int kv_end = ag_min(args.kv_end, at.Skv);
    const int next = q0 <= last_row(args, at, q0) ? args.kv_begin : kv_end;
    if (ag_thread() == 0) write_place(board, at, q0, next, kv_end);
    SUMMARISE
    ag_sync();
    const int count = (args.kv_end - args.kv_begin + kTileKv - 1) / kTileKv;
    for (int i = -1, first = 0; next_tile(args, board, i, first);) {
        const ag_u32 kinds = kinds_of(board, i);
        const ag_u32 bits = kinds & (kSeen | kFull | kFull << kWarps);  // 1, 2 and 4
        const int number = (first - args.kv_begin) / kTileKv;
        if (lane() == 0) ag_store(args.state_m + ag_block() * count + number, (float)(8 + bits));
    }
}
"""
"""What each block, which is one warp, visits: 8 plus 1, 2 and 4 for the kinds."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, host_compiler: None) -> Path:
    """All cases, each with a kernel that writes down its classes."""
    texts = []
    for name in CASES:
        rendered = render(name)
        has_rows = "void summarise_rows" in rendered.source
        summarise = "summarise_rows(read_row(args, at, q0), board);" if has_rows else ""
        classes = CLASSES.replace("NAME", name).replace("SUMMARISE", summarise)
        texts.append(replace(rendered, source=rendered.source + classes))
    folder = tmp_path_factory.mktemp("prepass")
    return build_library(join(texts), cache_dir=folder, optimization=0)


class Call:
    """One call of a case; it keeps alive every array that the views point into."""

    def __init__(
        self,
        name: str,
        rows: int,
        keys: int,
        *,
        q_range: tuple[int, int] | None = None,
        kv_range: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng((seed, rows, keys))
        self.name, self.rendered = name, render(name)
        shapes = (B, HQ, rows, D), (B, HKV, keys, D), (B, HKV, keys, D)
        self.operands = [copy_apart(rng.standard_normal(s).astype(np.float16)) for s in shapes]
        self.tensors = {t: copy_apart(draw(t, keys, rng)) for t in CASES[name].tensors}
        if "keys" in self.tensors:
            self.tensors["keys"][...] = (keys, keys // 3)
        views = {n: view(x, n) for n, x in zip("qkv", self.operands, strict=True)}
        captured = {n: view(x, n) for n, x in self.tensors.items()}
        attention = self.rendered.program.attention
        self.binding: Binding = bind(
            attention, views["q"], views["k"], views["v"], captured, {},
            q_range=q_range, kv_range=kv_range,
        )  # fmt: skip

    @property
    def workspace(self) -> np.ndarray:
        (declared,) = self.rendered.program.workspaces
        shape = workspace_shape(declared, self.binding)
        return copy_apart(np.full(shape, POISON, np.int32))

    def run(self, library: Path, *, ahead: bool) -> tuple[bytes, bytes, RunReport]:
        """The bits of o and lse, with the keys summarised ahead or in the kernel."""
        rows = self.binding.rows[1] - self.binding.rows[0]
        written = {
            "o": np.full((B, HQ, rows, D), 77, np.float16),
            "lse": np.full((B, HQ, rows), 77, np.float32),
        }
        if ahead:
            written["key_ends"] = self.workspace
        written = {n: copy_apart(x) for n, x in written.items()}
        outputs = Outputs(**{n: view(x, n, is_output=True) for n, x in written.items()})
        report = run_on_host(self.rendered, self.binding, outputs, library, check=True)
        assert report is not None
        return written["o"].tobytes(), written["lse"].tobytes(), report

    def ends(self, library: Path) -> np.ndarray:
        """What the launch ahead writes."""
        ends = self.workspace
        self._launch(library, self.rendered.program.launches[0].kernel, ends)
        return ends

    def classes(self, library: Path, *, ahead: bool) -> np.ndarray:
        """[blocks, key tiles]: what the kernel's one warp visits, and as what."""
        begin, end = self.binding.keys
        launch = self.rendered.program.main
        found = np.zeros((grid_size(self.binding, launch), -(-(end - begin) // TILE)), np.float32)
        found = copy_apart(found)
        ends = self.ends(library) if ahead else None
        self._launch(library, f"{self.name}_classes", ends, found)
        return found

    def _launch(
        self,
        library: Path,
        kernel: str,
        ends: np.ndarray | None,
        state_m: np.ndarray | None = None,
    ) -> None:
        named = {"key_ends": ends, "state_m": state_m}
        views = {n: view(x, n, is_output=True) for n, x in named.items() if x is not None}
        program = self.rendered.program
        values = argument_values(program, self.binding, Outputs(**views))
        launch = program.main if state_m is not None else program.launches[0]
        ranges = [
            MemoryRange.of(x, is_writable=n in named, name=n)
            for n, x in (named | self.tensors).items()
            if x is not None
        ]
        run_on_cpu(
            library,
            kernel,
            self.rendered.arguments.pack(values),
            grid=grid_size(self.binding, launch),
            threads=launch.threads,
            shared_bytes=launch.shared_bytes,
            ranges=ranges,
        )


def draw(tensor: str, keys: int, rng: np.random.Generator) -> np.ndarray:
    """Runs of equal values, of 1 to 1000 keys, so that tiles of every class are there."""
    declared, shape_of, values = TENSORS[tensor]
    shape = shape_of(keys)
    dtype = bool if declared.startswith("bool") else np.int32
    if tensor == "keys":
        return np.zeros(shape, dtype)
    found = np.zeros(shape, dtype)
    for row in found.reshape(-1, shape[-1]):
        at = 0
        while at < row.size:
            count = int(rng.integers(1, 10 ** rng.integers(1, 4)))
            row[at : at + count] = rng.integers(0, values)
            at += count
    return found


EDGES = [n + d for n in (0, TILE, GROUP) for d in (-1, 0, 1) if n + d > 0]
"""Keys around a tile and a group of 32 tiles."""

LONG_EDGES = [32 * GROUP + d for d in (-1, 0, 1)]
"""Around the 32 groups that a warp looks at together."""

every_case = pytest.mark.parametrize("name", [name for name in CASES if name != "pointed"])


# ---- with the launch ahead and without ---------------------------------------------------


@every_case
def test_the_same_bits(name: str, library: Path) -> None:
    for keys in EDGES:
        call = Call(name, 21, keys)
        one, two = (call.run(library, ahead=ahead)[:2] for ahead in (False, True))
        assert one == two, f"{keys} keys"


@every_case
def test_the_same_classes(name: str, library: Path) -> None:
    kinds = set()
    for keys in LONG_EDGES:
        call = Call(name, 17, keys)
        one, two = (call.classes(library, ahead=ahead) for ahead in (False, True))
        assert np.array_equal(one, two), f"{keys} keys"
        kinds |= set(np.unique(one))
    assert {0, 9} < kinds, "skipped and partial tiles, and full ones or such with dead keys"


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        (32 * GROUP + 5, 32 * GROUP + 2),
        (33 * GROUP + 1, 33 * GROUP),
        (65 * GROUP + 1, 32 * GROUP - 1),
        (65 * GROUP + 1, 32 * GROUP),
        (65 * GROUP + 1, 65 * GROUP),
    ],
)
def test_one_key_that_attends_is_found(keys: int, place: int, library: Path) -> None:
    """Behind 32 or 64 groups that are left out."""
    call = Call("padding", 1, keys)
    call.tensors["alive"][...] = np.arange(keys) == place
    found = call.classes(library, ahead=True)
    assert [set(np.flatnonzero(row)) for row in found] == [{place // TILE}] * (B * HQ)


@pytest.mark.parametrize(
    ("keys", "place"),
    [(2 * GROUP - 7, GROUP - 1), (2 * GROUP - 7, 2 * GROUP - 8), (2 * GROUP, GROUP - 1)],
)
def test_the_last_key_of_a_group_is_found(keys: int, place: int, library: Path) -> None:
    """Every row sees one key, which it names; and behind whole groups no other is looked at."""
    call = Call("pointed", 1, keys)
    call.tensors["doc"][...] = place
    call.tensors["alive"][...] = True
    found = call.classes(library, ahead=True)
    assert [set(np.flatnonzero(row)) for row in found] == [{place // TILE}] * (B * HQ)


def test_the_same_bits_of_a_long_sequence(library: Path) -> None:
    call = Call("two", 17, LONG_EDGES[-1])
    assert call.run(library, ahead=False)[:2] == call.run(library, ahead=True)[:2]


@given(st.data())
def test_the_same_classes_in_parts(library: Path, data: st.DataObject) -> None:
    """Tiles and groups count from the first key of the part."""
    name = data.draw(st.sampled_from(sorted(CASES)))
    rows, keys = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 3 * GROUP))
    cuts = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in (rows, keys)]
    (q_begin, q_end), (kv_begin, kv_end) = cuts
    seed = data.draw(st.integers(0, 999))
    ranges = {"q_range": (q_begin, q_end), "kv_range": (kv_begin, kv_end)}
    if q_begin == q_end or kv_begin == kv_end:
        ranges = {}
    call = Call(name, rows, keys, seed=seed, **ranges)
    assert np.array_equal(call.classes(library, ahead=False), call.classes(library, ahead=True))


# ---- what is written, and what is read ---------------------------------------------------


VALUES: dict[str, Callable[[dict[str, np.ndarray], np.ndarray], list[np.ndarray]]] = {
    "documents": lambda t, kv: [t["doc"]],
    "block_table": lambda t, kv: [t["table"][kv // 4]],
    "padding": lambda t, kv: [t["alive"]],
    "by_head": lambda t, kv: [t["label"]],
    "by_shared_head": lambda t, kv: [t["group"]],
    "by_both": lambda t, kv: [t["kind"]],
    "by_batch_and_shared": lambda t, kv: [t["shared"]],
    "ragged": lambda t, kv: [np.broadcast_to(t["table"][kv // 4], (B, kv.size))],
    "two": lambda t, kv: [
        np.broadcast_to(t["label"] != 1, (B, HQ, kv.size)),
        np.broadcast_to(t["doc"][:, None], (B, HQ, kv.size)),
    ],
}
"""What the mask of a case reads along keys: [sets…, Skv] each."""


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("part", [(0, 2 * GROUP + 5), (37, GROUP + 38)])
def test_ends_are_minima_and_maxima(name: str, part: tuple[int, int], library: Path) -> None:
    keys = 2 * GROUP + 5
    call = Call(name, 3, keys, kv_range=part)
    for tensor in call.tensors.values():
        if tensor.dtype == np.int32 and tensor.shape != (B,):  # each tile has ends of its own
            order = np.random.default_rng(0).permutation(tensor.size)
            tensor[...] = order.reshape(tensor.shape)
    ends = call.ends(library)
    sets = [{"B": B, "Hq": HQ, "Hkv": HKV}[n] for n in CASES[name].sets]
    groups = -(-(part[1] - part[0]) // GROUP)
    values = VALUES[name](call.tensors, np.arange(keys))
    assert ends.shape == (*sets, 2 * len(values), 33, groups)
    assert not (ends == POISON).any()
    columns = ends.reshape(*sets, 2 * len(values), 33 * groups)
    for at in np.ndindex(*sets):
        end = min(part[1], int(call.tensors["keys"][at[0]])) if name == "ragged" else part[1]
        for i, value in enumerate(values):
            for width, first in ((TILE, 0), (GROUP, 32 * groups)):
                for j, begin in enumerate(range(part[0], end, width)):
                    inside = value[at][begin : min(begin + width, end)]
                    found = columns[at][2 * i : 2 * i + 2, first + j]
                    assert list(found) == [inside.min(), inside.max()], (at, i, begin)


def test_two_levels_read_less_than_one(library: Path, tmp_path: Path) -> None:
    """Without the level of groups, every tile's ends are read."""
    call = Call("noncausal", 17, 3 * 32 * GROUP)
    doc = call.tensors["doc"]
    doc[...] = np.arange(doc.shape[1]) // 3000
    source, skips = (
        render("noncausal").source,
        "next_group(args, at, tile, first, end)",
    )
    assert source.count(skips) == 1
    one_level = build_library(source.replace(skips, "first"), cache_dir=tmp_path, optimization=0)
    in_kernel, *two = call.run(library, ahead=False)
    *also_two, levels = call.run(library, ahead=True)
    *one, level = call.run(one_level, ahead=True)
    assert [in_kernel, two[0]] == also_two == one
    tiles, warps = 3 * 1024, 2 * B * HQ
    # Two numbers of each tile, but for those of the groups that are looked into anyhow.
    assert level.global_loads - levels.global_loads > 0.8 * warps * 2 * tiles
    assert levels.global_loads < two[1].global_loads


# ---- where it pays -----------------------------------------------------------------------


def spread(rows: int, keys: int) -> list[np.ndarray]:
    """q, k and v of any size that take no memory."""
    one = np.zeros(1, np.float16)
    shapes = (B, HQ, rows, D), (B, HKV, keys, D), (B, HKV, keys, D)
    return [np.lib.stride_tricks.as_strided(one, s, (0, 0, 0, 0)) for s in shapes]


@pytest.mark.parametrize(
    ("rows", "keys", "kv_range", "is_due"),
    [
        (TILE + 1, PREPASS_KEYS + 1, None, True),
        (TILE + 1, PREPASS_KEYS, None, False),
        (TILE, PREPASS_KEYS + 1, None, False),  # one query tile reads each key once either way
        (TILE + 1, 60000, (9, 9 + PREPASS_KEYS + 1), True),
        (TILE + 1, 60000, (9, 9 + PREPASS_KEYS), False),
    ],
)
def test_a_call_has_the_launch_where_it_pays(
    rows: int, keys: int, kv_range: tuple[int, int] | None, is_due: bool
) -> None:
    program = render("documents").program
    q, k, v = (view(x, n) for x, n in zip(spread(rows, keys), "qkv", strict=True))
    doc = view(np.zeros((B, keys), np.int32), "doc")
    binding = bind(program.attention, q, k, v, {"doc": doc}, {}, kv_range=kv_range)
    due = due_workspaces(program, binding)
    assert [w.name for w in due] == ["key_ends"] * is_due
    assert [launch.kernel for launch, _ in due_launches(program, binding, Outputs(), 1)] == [
        "documents_forward"
    ]


@every_case
def test_heads_share_what_they_read(name: str) -> None:
    attention = render(name).program.attention
    sets = find_key_sets(attention)
    assert sets is not None
    assert sets.dims == CASES[name].sets


@pytest.mark.parametrize(
    "mask", ["causal", "kv % 3 != q % 2", "doc[b, q] > kv", "bias[kv] > bias[q]"]
)
def test_nothing_is_launched_ahead_without_summaries(mask: str) -> None:
    """Floats are decided pair by pair."""
    tensors = "    tensor doc : int32[B, Skv]\n    tensor bias : float[Skv]\n"
    text = f"attention plain {{\n{tensors}    mask {mask}\n}}\n"
    kernel = attngen.compile_text(text, schedule=SCHEDULE)
    rendered = kernel.render(dtype="fp16", head_dim=D)
    assert len(rendered.program.launches) == 1
    assert "key_ends" not in rendered.source


# ---- calls -------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that calls launch from now on, in order."""
    kernels: list[str] = []

    def counted(library: Path, kernel: str, *arguments: Any, **named: Any) -> RunReport:
        kernels.append(kernel)
        return run_on_cpu(library, kernel, *arguments, **named)

    monkeypatch.setattr(cpu_engine, "run_on_cpu", counted)
    return kernels


PACKED = """attention packed {
    tensor sink : float[Hq]
    tensor doc : int32[B, Skv]
    mask causal and doc[b, qpos] == doc[b, kv]
    weights softmax(sink = sink[h])
    output o, lse
}
"""


def test_calls_and_parts_of_them(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a threshold of 40 keys, in the tile that is chosen, against a kernel that has none."""
    plain = attngen.compile_text(PACKED, engine="cpu")
    q, k, v = (np.random.default_rng(h).standard_normal((2, h, 140, 16)).astype(np.float16)
               for h in (4, 2, 1))  # fmt: skip
    v = np.repeat(v, 2, axis=1)
    named = {
        "sink": np.array([0.5, -np.inf, 1.0, 2.0], np.float32),
        "doc": np.sort(np.random.default_rng(5).integers(0, 6, (2, 140)), axis=1).astype(np.int32),
    }
    ranges = [
        {}, {"kv_range": (0, 41)}, {"kv_range": (41, 140)}, {"q_range": (3, 70)},
        {"q_range": (67, 140), "kv_range": (90, 133)}, {"kv_range": (3, 30)},
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(forward_mma, "PREPASS_KEYS", 40)
        ahead = attngen.compile_text(PACKED, engine="cpu")
        found = ahead(q, k, v, **named)
    expected = plain(q, k, v, **named)
    assert launched == ["packed_summarise_keys", "packed_forward", "packed_forward"]
    for one, two in zip(found, expected, strict=True):
        assert one.tobytes() == two.tobytes()
    for part in ranges:
        launched.clear()
        one, two = (kernel.partial(q, k, v, **part, **named) for kernel in (ahead, plain))
        assert launched.count("packed_summarise_keys") == (part != {"kv_range": (3, 30)})
        for name in ("m", "l", "acc", "sink"):
            assert getattr(one, name).tobytes() == getattr(two, name).tobytes(), (part, name)


def test_a_call_of_many_keys(launched: list[str]) -> None:
    """More keys than the constant as it is, against the reference."""
    kernel = attngen.compile_text(PACKED, engine="cpu", schedule=SCHEDULE)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 40, D)).astype(np.float16)
    k, v = (rng.standard_normal((1, 1, 33000, D)).astype(np.float16) for _ in range(2))
    doc = (np.arange(33000, dtype=np.int32) // 1500)[None]
    tensors = {"sink": np.array([0.0, 1.0], np.float32), "doc": doc}
    o, lse = kernel(q, k, v, **tensors)
    assert launched == ["packed_summarise_keys", "packed_forward"]
    right = attngen.reference(kernel.unit, q, k, v, tensors=tensors)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
