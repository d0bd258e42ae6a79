"""What score lines read of tensors through shared memory: tiles, keys and diagonals.

Every pattern with either family of tensor cores, with elements of 1, 2 and 4 bytes, in arrays that
can be copied 16 bytes at a time and in others, with indices that leave the array.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

import attngen
from attngen import targets
from attngen.backend.device import view
from attngen.binding import bind
from attngen.codegen import staged_reads
from attngen.codegen.staged_reads import Pattern, find_staged_reads
from attngen.compiler import Rendered, lower_program, render_lowered
from attngen.cpu.build import build_library
from attngen.cpu.run import Landing, copy_apart
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines.cpu_engine import run_on_host
from attngen.engines.outputs import Outputs, encode_tile_map, why_no_tile_map
from attngen.ir.program import TileBox
from attngen.ir.traverse import postorder
from attngen.ir.types import FLOATING
from attngen.options import host_cache_dir
from attngen.tensor_map import TensorMap

B, H, ROWS, KEYS, D = 2, 2, 150, 200, 64
SM_90A = targets.get("sm_90a")
STORED = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class Case:
    """A declaration of `x`, score lines, and the array; `patterns` is what is staged."""

    declared: str
    score: str
    shape: tuple[int, ...]
    patterns: tuple[Pattern, ...]
    mask: str = ""
    order: tuple[int, ...] | None = None
    """The dimensions in memory, outermost first, where it is not as written."""
    pad: int = 0
    """Elements that follow each row."""
    shift: int = 0
    """Elements before the first one."""
    repeated: tuple[int, ...] = ()
    """The dimensions along which there is one element."""

    @property
    def dtype(self) -> str:
        return self.declared.partition("[")[0]

    def array(self) -> np.ndarray:
        rng = np.random.default_rng(5)
        order = self.order or tuple(range(len(self.shape)))
        outer = [self.shape[i] for i in order]
        outer[-1] += self.pad
        flat = self.values(rng, int(np.prod(outer)) + self.shift)[self.shift :]
        memory = flat.reshape(outer)[..., : self.shape[order[-1]]].transpose(np.argsort(order))
        first = tuple(slice(1) if i in self.repeated else slice(None) for i in range(memory.ndim))
        return np.broadcast_to(memory[first], self.shape)

    def values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        match self.dtype:
            case "bool":
                return rng.random(count) < 0.7
            case "int8" | "int32":
                return rng.integers(0, 5, count).astype(self.dtype)
            case _:
                return rng.standard_normal(count).astype(STORED[self.dtype])


TILE, ONE, DIAGONAL = (Pattern.TILE,), (Pattern.KEYS,), (Pattern.DIAGONAL,)
CASES = {
    "tile": Case("bf16[Sq, Skv]", "s + x[q, kv]", (ROWS, KEYS), TILE),
    "tile of heads": Case("fp16[B, Hq, Sq, Skv]", "s + x[b, h, q, kv]", (B, H, ROWS, KEYS), TILE),
    "tile of fp32": Case("fp32[Hq, Sq, Skv]", "s * x[h, q, kv]", (H, ROWS, KEYS), TILE, "causal"),
    "tile of bytes": Case("int8[Sq, Skv]", "s + 0.5 * x[q, kv]", (ROWS, KEYS), TILE),
    "tile of truth": Case(
        "bool[Sq, Skv]", "where(x[q, kv], s, s - 1.0)", (ROWS, KEYS), TILE,
        "window(left = 70, right = 9)",
    ),
    "tile by keys": Case("bf16[Skv, Sq]", "s + x[kv, q]", (KEYS, ROWS), TILE),
    "tile of heads in memory last": Case(
        "fp32[Hq, Sq, Skv]", "s + x[h, q, kv]", (H, ROWS, KEYS), TILE, order=(1, 2, 0)
    ),
    "tile with odd rows": Case("bf16[Sq, Skv]", "s + x[q, kv]", (ROWS, KEYS), TILE, pad=3),
    "tile with long rows": Case(
        "bf16[Sq, Skv]", "s + x[q, kv]", (ROWS, KEYS), TILE, "causal", pad=8
    ),
    "tile at an odd address": Case("fp32[Sq, Skv]", "s + x[q, kv]", (ROWS, KEYS), TILE, shift=1),
    "tile that is too small": Case(
        "bf16[N, M]", "s + x[q, kv]", (100, 120), TILE, "q < 100 and kv < 120"
    ),
    "tile behind an offset": Case(
        "bf16[N, M]", "s + x[q + 8, kv - 16]", (400, 400), TILE, "kv >= 16"
    ),
    "tile of a head that is repeated": Case(
        "bf16[B, Hq, Sq, Skv]", "s + x[b, h, q, kv]", (B, H, ROWS, KEYS), TILE, repeated=(0, 1)
    ),
    "tile of two heads": Case("fp16[N, Sq, Skv]", "s + x[h // 2, q, kv]", (1, ROWS, KEYS), TILE),
    "tile of a row that is repeated": Case(
        "bf16[Sq, Skv]", "s + x[q, kv]", (ROWS, KEYS), TILE, repeated=(0,)
    ),
    "tile of the aligned row": Case("fp32[Skv, Skv]", "s + x[qpos, kv]", (KEYS, KEYS), TILE),
    "keys": Case("fp32[B, Skv]", "s + x[b, kv]", (B, KEYS), ONE, "causal"),
    "keys of 16 bits": Case("fp16[Hq, Skv]", "s * x[h, kv]", (H, KEYS), ONE),
    "keys outside": Case("bf16[N]", "s + x[kv - 30]", (60,), ONE, "kv >= 30 and kv < 90"),
    "diagonal": Case(
        "fp32[Hq, N]", "s + x[h, q - kv + 100]", (H, 220), DIAGONAL, "abs(q - kv) <= 99"
    ),
    "diagonal backwards": Case("bf16[N]", "s + x[kv - q + 149]", (349,), DIAGONAL),
    "two at once": Case(
        "bf16[Sq, Skv]", "s + x[q, kv] * x[0, kv]", (ROWS, KEYS), (*TILE, *ONE),
        "kv % 3 != 0 or kv < qpos",
    ),
    "keys that take a while": Case("fp32[B, Skv]", "s + log(1.5 + exp(x[b, kv]))", (B, KEYS), ONE),
    "diagonal of a bucket": Case(
        "fp32[N, Hq]", "s + x[min(abs(kv - qpos) // 8, 11), h]", (12, H), DIAGONAL, "causal"
    ),
    "diagonal without a tensor": Case(
        "bf16[N]", "s - log(1.0 + 0.1 * abs(kv - q))", (1,), DIAGONAL
    ),
    "read by read": Case("int32[Sq, Skv]", "s + 0.25 * x[x[q, kv], kv]", (ROWS, KEYS), TILE),
}  # fmt: skip
OF_WGMMA = {
    "keys",
    "keys that take a while",
    "diagonal backwards",
    "diagonal without a tensor",
}
"""Run with forward_wgmma, the others with forward_mma: the text of these is the same in both."""
RUNS = [
    *((n, "forward_wgmma" if n in OF_WGMMA else "forward_mma") for n in CASES),
    *((n, "forward_wgmma") for n, case in CASES.items() if Pattern.TILE in case.patterns),
]
NOT_STAGED = (
    "s + x[q, 0]",
    "s + x[q // 2, kv]",
    "s + x[kv + q, 0]",
    "s + x[q, q - kv]",
    "s + 0.5 * abs(q - kv)",
)


def text_of(case: Case) -> str:
    mask = f"mask {case.mask}\n" if case.mask else ""
    return (
        f"attention a {{\ntensor x : {case.declared}\nscore {case.score}\n{mask}output o, lse\n}}\n"
    )


def find(text: str) -> tuple[Pattern, ...]:
    checked = attngen.compile_text(text, engine="numpy").checked
    lowered = lower_program(checked, FLOATING["bf16"], (D, D), targets.get("sm_80"))
    return tuple(read.pattern for read in find_staged_reads(lowered.program.attention))


@pytest.mark.parametrize("name", CASES)
def test_what_is_staged(name: str) -> None:
    assert find(text_of(CASES[name])) == CASES[name].patterns


@pytest.mark.parametrize("score", NOT_STAGED)
def test_other_reads_stay_where_they_are(score: str) -> None:
    assert find(f"attention a {{\ntensor x : fp32[N, M]\nscore {score}\n}}\n") == ()


def test_what_the_mask_reads_too_stays_where_it_is() -> None:
    shared = "let bias = x[q, kv]\nscore s + bias\nmask bias > 0.0\n"
    assert find(f"attention a {{\ntensor x : fp32[Sq, Skv]\n{shared}}}\n") == ()


@pytest.mark.filterwarnings("ignore:.*is copied by a warp")
@pytest.mark.parametrize(("name", "family"), RUNS)
def test_results(name: str, family: str, host_compiler: None) -> None:
    case, rng = CASES[name], np.random.default_rng(1)
    shapes = ((B, H, ROWS, D), (B, 1, KEYS, D), (B, 1, KEYS, D))
    given = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
    kernel = attngen.compile_text(
        text_of(case), engine="cpu", schedule=f"kernel {family}", arch="sm_90a"
    )
    x = case.array()
    right = attngen.reference(kernel.unit, *given, tensors={"x": x})
    o, lse = kernel(*given, x=x)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()


def test_every_node_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of lets would else take the square of its length, once for each schedule."""
    lets = "".join(f"let x{i} = x{i - 1} * 0.5 + {i}.0 * kv * q\n" for i in range(1, 150))
    text = f"attention a {{\nlet x0 = 1.0 * q\n{lets}score s + x149\n}}\n"
    checked = attngen.compile_text(text, engine="numpy").checked
    attention = lower_program(
        checked, FLOATING["bf16"], (D, D), targets.get("sm_80")
    ).program.attention
    seen = []
    gain = staged_reads._gain
    monkeypatch.setattr(staged_reads, "_gain", lambda n, below: seen.append(n) or gain(n, below))
    find_staged_reads.cache_clear()
    assert find_staged_reads(attention) == find_staged_reads(attention) == ()
    assert len(seen) == len(list(postorder(*attention.scores)))


def render(text: str, tile: str) -> Rendered:
    kernel = attngen.compile_text(text, engine="cpu", schedule=f"kernel forward_wgmma; {tile}")
    return render_lowered(lower_program(kernel.checked, FLOATING["fp16"], (D, D), SM_90A))


def run_checked(rendered: Rendered, x: np.ndarray, landing: Landing) -> None:
    """Run under the eyes of the race detector."""
    rng = np.random.default_rng(1)
    shapes = {"q": (B, H, ROWS, D), "k": (B, 1, KEYS, D), "v": (B, 1, KEYS, D)}
    arrays = {n: copy_apart(rng.standard_normal(s).astype(np.float16)) for n, s in shapes.items()}
    views = [view(each, n) for n, each in arrays.items()]
    binding = bind(rendered.program.attention, *views, {"x": view(x, "x")}, {})
    written = {"o": np.empty(shapes["q"], np.float16), "lse": np.empty((B, H, ROWS), np.float32)}
    outputs = Outputs(**{n: view(each, n, is_output=True) for n, each in written.items()})
    library = build_library(rendered.source, cache_dir=host_cache_dir(), optimization=0)
    run_on_host(rendered, binding, outputs, library, landing=landing, check=True)


FENCE = "            ag_async_fence();  // between what this lane may have written"
MIXED = CASES["tile behind an offset"]
"""Of its tiles the first is copied by a warp, since it begins before the tensor does."""


@pytest.mark.parametrize("landing", Landing)
def test_tensor_copies_and_a_warp_fill_a_stage_by_turns(
    landing: Landing, host_compiler: None
) -> None:
    rendered = render(text_of(MIXED), "tile q = 128, kv = 64")
    assert rendered.source.count(FENCE) == 1
    run_checked(rendered, MIXED.array(), landing)
    without = "\n".join(x for x in rendered.source.splitlines() if not x.startswith(FENCE))
    with pytest.raises(AttnError, match="with no ag_async_fence behind it"):
        run_checked(replace(rendered, source=without), MIXED.array(), landing)


def test_a_tensor_that_has_no_map_is_said(host_compiler: None) -> None:
    case = CASES["tile with odd rows"]
    text = text_of(case).replace("attention a", "attention said")
    schedule = "kernel forward_wgmma"
    kernel = attngen.compile_text(text, engine="cpu", schedule=schedule, arch="sm_90a")
    given = [np.zeros((1, 1, n, D), np.float16) for n in (ROWS, KEYS, KEYS)]
    with pytest.warns(UserWarning, match="not by tensor copies: it has a stride of 406 bytes"):
        kernel(*given, x=case.array())


@pytest.mark.parametrize(
    ("shape", "strides", "shift", "reason"),
    [
        ((2, 40, 64), (2560, 64, 1), 0, None),
        ((2, 40, 64), (0, 64, 1), 0, None),
        ((2, 1, 64), (2560, 3, 1), 0, None),
        ((2, 40, 1), (2560, 64, 5), 0, None),
        ((2, 0, 64), (2560, 64, 1), 0, "it has no elements"),
        ((2, 40, 64), (2560, 64, 1), 8, "it begins at an address that is no multiple of 16 bytes"),
        ((2, 40, 64), (5120, 128, 2), 0, "its elements are 2 apart from key to key, not 1"),
        ((2, 40, 64), (2560, 0, 1), 0, "it has a stride of 0 bytes along dimension 1"),
        ((2, 40, 64), (2560, -64, 1), 0, "it has a stride of -128 bytes along dimension 1"),
        ((2, 40, 64), (2564, 64, 1), 0, "it has a stride of 5128 bytes along dimension 0"),
        ((2, 40, 64), (2**39, 64, 1), 0, "it has a stride of 1099511627776 bytes"),
    ],
)
def test_which_tensors_have_a_map(
    shape: tuple[int, ...], strides: tuple[int, ...], shift: int, reason: str | None
) -> None:
    box = TileBox("x0", "x", row_dim=1, key_dim=2, rows=128, keys=64, swizzle=128)
    array = view(np.empty(shape, np.float16), "x")._replace(pointer=4096 + shift, strides=strides)
    maps: list[TensorMap] = []
    encode_tile_map(box, array, lambda tensor: maps.append(tensor) or b"")
    found = why_no_tile_map(box, array)
    assert found is None if reason is None else found is not None and found.startswith(reason)
    assert len(maps) == (reason is None)
    for one in maps:
        one.check()


TWO_TILES = """attention a {
    tensor x : fp32[Sq, Skv]
    tensor y : fp32[Hq, Sq, Skv]
    score s + x[q, kv] + y[h, q, kv]
}
"""


def test_what_finds_no_room_is_read_pair_by_pair(host_compiler: None) -> None:
    """Of 99 KiB, two tiles of float32 would leave too little for keys and values."""
    kernel = attngen.compile_text(TWO_TILES, engine="cpu", arch="sm_86")
    rendered = render_lowered(
        lower_program(kernel.checked, FLOATING["fp16"], (D, D), targets.get("sm_86"))
    )
    assert rendered.launch.family == "forward_mma"
    assert "constexpr int kStaged0At" in rendered.source
    assert "constexpr int kStaged1At" not in rendered.source
    rng = np.random.default_rng(3)
    given = [rng.standard_normal((1, 2, n, D)).astype(np.float16) for n in (70, 90, 90)]
    tensors = {
        "x": rng.standard_normal((70, 90)).astype(np.float32),
        "y": rng.standard_normal((2, 70, 90)).astype(np.float32),
    }
    right = attngen.reference(kernel.unit, *given, tensors=tensors)
    assert right.accepts_o(kernel(*given, **tensors)).all()
