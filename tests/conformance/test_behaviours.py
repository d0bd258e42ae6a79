"""What the cases say beside their numbers: layouts, bits, counts, refusals (O05 to O29).

`test_engines.py` compares the numbers; `test_toolchain_cases.py` and `test_language_cases.py`
have the cases from O30 on, `tests/api/test_gpu_calls.py` what a GPU is asked for (O35 to O38).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import options
from attngen.api import Kernel
from attngen.backend.device import view
from attngen.binding import bind, split_arguments
from attngen.compiler import Rendered
from attngen.cpu.build import build_library
from attngen.cpu.run import Mode
from attngen.engines.cpu_engine import run_on_host
from attngen.engines.outputs import Outputs
from attngen.kernels import forward_mma
from tests.api.texts import catch, words

from .cases import Case, Inputs, numeric_cases
from .expected import expected
from .specs import SPECS, VARIATIONS, Spec, arguments, source

ENGINES = ("numpy", "cpu")
Array = Any


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, host_compiler: None) -> Any:
    return request.param


def first_case(id_: str) -> Case:
    return numeric_cases(id_)[0]


def compile_case(case: Case, engine: Any, spec: Spec | None = None, **options: Any) -> Kernel:
    """The kernel of a case, by its text or another one of the same meaning."""
    spec = spec or SPECS[case.id]
    consts = arguments(case.inputs(), spec).consts if spec.consts else {}
    text = source(case, spec)
    return attngen.compile_text(text, name=f"{case}.attn", engine=engine, consts=consts, **options)


def named(case: Case, inputs: Inputs, spec: Spec | None = None) -> dict[str, Any]:
    given = arguments(inputs, spec or SPECS[case.id])
    return {**given.tensors, **given.params}


def same_bits(one: Array, other: Array) -> bool:
    """Equal bit by bit: signs of zero and NaNs as well."""
    one, other = np.ascontiguousarray(one), np.ascontiguousarray(other)
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and one.tobytes() == other.tobytes()


def layout_classes(engine: Any, *calls: Sequence[Array]) -> int:
    """How many texts these q, k and v take: tensor cores have one for aligned ones, and another."""
    if engine == "numpy":
        return 1
    operands = [{n: view(x, n) for n, x in zip("qkv", call, strict=True)} for call in calls]
    return len({forward_mma.FAMILY.why_unaligned(each) is None for each in operands})


def assert_right(case: Case, inputs: Inputs, o: Array, lse: Array) -> None:
    right = expected(case, inputs)
    assert case.tolerance.accepts(o, right.o).all()
    assert case.lse_tolerance.accepts(lse, right.lse).all()


# ---- further texts of the same meaning ---------------------------------------------------


@pytest.mark.parametrize(
    ("id_", "number"), [(id_, i) for id_, specs in VARIATIONS.items() for i in range(len(specs))]
)
def test_another_text_of_the_same_meaning(engine: Any, id_: str, number: int) -> None:
    spec = VARIATIONS[id_][number]
    case = first_case(id_)
    inputs = case.inputs()
    kernel = compile_case(case, engine, spec)
    assert_right(case, inputs, *kernel(inputs.q, inputs.k, inputs.v, **named(case, inputs, spec)))


# ---- O08: head counts --------------------------------------------------------------------


def test_head_counts_that_do_not_divide(engine: Any) -> None:
    kernel = compile_case(first_case("O08"), engine)
    dtype = first_case("O08").inputs().q.dtype
    q, k = np.zeros((1, 6, 1, 128), dtype), np.zeros((1, 4, 256, 128), dtype)
    error = catch(kernel, q, k, k)
    assert error.message() == "6 query heads cannot share 4 key/value heads"
    assert kernel.compilations == 0


# ---- O09, O10: memory layouts ------------------------------------------------------------


def reorder(x: Array, *axes: int) -> Array:
    """The same array with its axes in another order in memory."""
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


def pack(x: Array) -> Array:
    """One of the three slices of a (B, S, 3, H, D) buffer, seen as (B, H, S, D)."""
    B, H, S, D = x.shape
    seen = np.full((B, S, 3, H, D), np.nan, x.dtype)[:, :, 1].transpose(0, 2, 1, 3)
    seen[...] = x
    return seen


def every_second(x: Array) -> Array:
    B, H, S, D = x.shape
    seen = np.full((B, H, 2 * S + 1, D), np.nan, x.dtype)[:, :, 1::2]
    seen[...] = x
    return seen


def reverse(x: Array, *axes: int) -> Array:
    """The same array with its elements in the opposite order in memory."""
    return np.flip(np.ascontiguousarray(np.flip(x, axes)), axes)


def misalign(x: Array) -> Array:
    """One element behind the start of an allocation, rows 43 elements apart or more."""
    *outer, D = x.shape
    row = max(43, D | 1)
    memory = np.full(math.prod(outer) * row + 1, np.nan, x.dtype)
    seen = memory[1:].reshape(*outer, row)[..., :D]
    seen[...] = x
    return seen


LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "(a) tokens before heads": lambda x: reorder(x, 0, 2, 1, 3),
    "(b) a slice of a packed buffer": pack,
    "(c) every second position": every_second,
    "(d) reversed sequence": lambda x: reverse(x, 2),
    "(d) everything reversed": lambda x: reverse(x, 0, 1, 2, 3),
    "(f) feature dim not innermost": lambda x: reorder(x, 3, 0, 1, 2),
    "misaligned": misalign,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_bit(engine: Any, layout: str) -> None:
    case = first_case("O09")
    inputs = case.inputs()
    kernel = compile_case(case, engine)
    right = kernel(inputs.q, inputs.k, inputs.v)
    assert_right(case, inputs, *right)
    q, k, v = (LAYOUTS[layout](x) for x in (inputs.q, inputs.k, inputs.v))
    assert q.strides != inputs.q.strides
    assert np.array_equal(k, inputs.k)
    calls = ((q, k, v), (q, inputs.k, inputs.v), (inputs.q, inputs.k, v))
    for operands in calls:
        for found, same in zip(kernel(*operands), right, strict=True):
            assert same_bits(found, same)
    assert kernel.compilations == layout_classes(engine, (inputs.q, inputs.k, inputs.v), *calls)


def test_keys_broadcast_over_heads_change_no_bit(engine: Any) -> None:
    """O09 (e)"""
    case = first_case("O09")
    inputs = case.inputs()
    kernel = compile_case(case, engine)
    k, v = (x[:, :1] for x in (inputs.k, inputs.v))
    shared = [np.broadcast_to(x, inputs.k.shape) for x in (k, v)]
    assert shared[0].strides[1] == 0
    copied = [np.ascontiguousarray(x) for x in shared]
    for found, right in zip(kernel(inputs.q, *shared), kernel(inputs.q, *copied), strict=True):
        assert same_bits(found, right)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_out_is_written_between_its_guards_and_nowhere_else(engine: Any, layout: Any) -> None:
    """O09 (g)"""
    case = first_case("O09")
    inputs = case.inputs()
    kernel = compile_case(case, engine)
    right, _ = kernel(inputs.q, inputs.k, inputs.v)
    B, H, S, D = right.shape
    guard, marker = 3 * D, 12345.0
    memory = np.full(B * S * H * D + 2 * guard, marker, right.dtype)
    out = memory[guard:-guard].reshape(B, S, H, D)
    out[...] = np.nan
    if layout == "bhsd":
        kernel(inputs.q, inputs.k, inputs.v, out=out.transpose(0, 2, 1, 3))
    else:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (inputs.q, inputs.k, inputs.v))
        kernel(q, k, v, out=out, layout="bshd")
    assert same_bits(out.transpose(0, 2, 1, 3), right)
    assert (memory[:guard] == marker).all()
    assert (memory[-guard:] == marker).all()


def test_an_out_with_gaps_keeps_what_is_between(engine: Any) -> None:
    case = first_case("O09")
    inputs = case.inputs()
    kernel = compile_case(case, engine)
    right, _ = kernel(inputs.q, inputs.k, inputs.v)
    B, H, S, D = right.shape
    buffer = np.full((B, H, 2 * S + 1, D), 3.0, right.dtype)
    kernel(inputs.q, inputs.k, inputs.v, out=buffer[:, :, 1::2])
    assert same_bits(buffer[:, :, 1::2], right)
    assert (buffer[:, :, ::2] == 3.0).all()


def test_misaligned_operands_and_bias(engine: Any) -> None:
    """O10: first aligned, then misaligned, then aligned again."""
    case = first_case("O10")
    inputs = case.inputs()
    bias = inputs.aux["bias"]
    kernel = compile_case(case, engine)
    right = kernel(inputs.q, inputs.k, inputs.v, bias=bias)
    assert_right(case, inputs, *right)
    q, k, v = (misalign(x) for x in (inputs.q, inputs.k, inputs.v))
    assert q.ctypes.data % 4 == 2
    assert q.strides[2] == 2 * 43
    apart = np.full(bias.size + 1, np.nan, np.float32)[1:].reshape(bias.shape)
    apart[...] = bias
    whole = inputs.q, inputs.k, inputs.v
    for operands, given in (((q, k, v), apart), (whole, bias)):
        for found, same in zip(kernel(*operands, bias=given), right, strict=True):
            assert same_bits(found, same)
    between = inputs.q.view(np.uint8).reshape(-1)[1:-1].view(np.float16)
    odd = between[: 43 * 40].reshape(1, 1, 43, 40)
    assert catch(kernel, odd, inputs.k, inputs.v, bias=bias).code == "A604"
    assert kernel.compilations == layout_classes(engine, whole, (q, k, v))


# ---- O05: the mask as a captured array ---------------------------------------------------


@pytest.mark.parametrize("element", ["uint8", "bool", "int64"])
def test_a_mask_as_formula_and_as_captured_array_agree(engine: Any, element: str) -> None:
    case = first_case("O05")
    size = 100
    dims = {**case.dims, "Sq": size, "Skv": size}
    small = Case(case.id, case.variant, {**case.record, "oracle_rows": None}, dims)
    inputs = small.inputs()
    q, kv = np.arange(size)[:, None], np.arange(size)
    keep = (kv <= q) & ((q * 7 + kv * 13) % 5 < 3)
    test = "keep[q, kv]" if element == "bool" else "keep[q, kv] != 0"
    spec = Spec(f"tensor keep : {element}[Sq, Skv]\nmask {test}")
    captured = compile_case(small, engine, spec)(
        inputs.q, inputs.k, inputs.v, keep=keep.astype(element)
    )
    formula = compile_case(small, engine)(inputs.q, inputs.k, inputs.v)
    for one, other in zip(captured, formula, strict=True):
        assert same_bits(one, other)


# ---- O13: what is parked behind the mask -------------------------------------------------


@pytest.mark.parametrize("number", range(1 + len(VARIATIONS["O13"])))
def test_what_is_parked_behind_the_mask_changes_no_bit(engine: Any, number: int) -> None:
    case = first_case("O13")
    spec = (SPECS["O13"], *VARIATIONS["O13"])[number]
    inputs = case.inputs()
    kernel = compile_case(case, engine, spec)
    tensors = named(case, inputs, spec)
    assert np.isnan(inputs.k.astype(np.float32)).any()
    parked, parked_lse = kernel(inputs.q, inputs.k, inputs.v, **tensors)
    assert np.isfinite(parked.astype(np.float32)).all()
    k, v = (np.where(np.isfinite(x), x, np.float16(0)) for x in (inputs.k, inputs.v))
    clean, clean_lse = kernel(inputs.q, k, v, **tensors)
    assert same_bits(parked, clean)
    assert same_bits(parked_lse, clean_lse)
    # The allocation goes on behind Skv, with NaN.
    longer = [np.concatenate([x, np.full_like(x, np.nan)], axis=2) for x in (inputs.k, inputs.v)]
    seen = [x[:, :, : inputs.k.shape[2]] for x in longer]
    behind, behind_lse = kernel(inputs.q, *seen, **tensors)
    assert same_bits(behind, clean)
    assert same_bits(behind_lse, clean_lse)


# ---- O14: a cap of zero ------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.0, 0, -0.0, -1.0, 1e-50, float("nan")])
def test_a_cap_of_zero_is_refused(engine: Any, cap: float) -> None:
    case = first_case("O14")
    inputs = case.inputs()
    error = catch(compile_case(case, engine), inputs.q, inputs.k, inputs.v, cap=cap)
    assert error.code == "A626"
    assert "`cap`" in error.message()


# ---- O16: counts of visible keys ---------------------------------------------------------


@pytest.mark.parametrize(
    ("W", "R"), [(1, 0), (2, 0), (4, 0), (64, 0), (128, 0), (5, 2), (1, 7), (1000, 0), (1000, 1000)]
)
def test_a_window_has_exactly_its_keys(engine: Any, W: int, R: int) -> None:
    case = first_case("O16")
    inputs = case.inputs()
    S = case.dims["Sq"]
    kernel = compile_case(case, engine)
    _, lse = kernel(np.zeros_like(inputs.q), inputs.k, inputs.v, W=W, R=R)  # LSE = log(count)
    q = np.arange(S)
    right = np.minimum(q, W - 1) + 1 + np.minimum(R, S - 1 - q)
    assert (np.rint(np.exp(lse.astype(np.float64))) == right).all()
    assert np.abs(np.exp(lse.astype(np.float64)) - right).max() < 1e-3


# ---- O20, O26: tiles ---------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(16, 16), (20, 24), (64, 64), (128, 8), (256, 512)], ids=str)
@pytest.mark.parametrize("id_", ["O02", "O16", "O18", "O19", "O20"])
def test_the_size_of_a_tile_changes_no_answer(id_: str, tile: tuple[int, int]) -> None:
    case = numeric_cases(id_)[-1]
    inputs = case.inputs()
    kernel = compile_case(case, "numpy", schedule=f"tile q = {tile[0]}, kv = {tile[1]}")
    assert_right(case, inputs, *kernel(inputs.q, inputs.k, inputs.v, **named(case, inputs)))


class HostRun:
    """One text on the CPU, in any scheduling mode, into outputs that held NaN before."""

    def __init__(self, kernel: Kernel, inputs: Inputs, tensors: Mapping[str, Any]) -> None:
        attention = kernel.attention
        captured, params = split_arguments(attention, tensors)
        self.inputs = inputs
        self.rendered: Rendered = kernel.render("sm_80")
        self.library = build_library(self.rendered.source, cache_dir=options.host_cache_dir())
        q, k, v = (view(x, name) for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)))
        views = {name: view(x, name) for name, x in captured.items()}
        self.binding = bind(attention, q, k, v, views, params)

    def __call__(self, mode: Mode, seed: int, *, check: bool = False) -> tuple[Array, Array]:
        B, H, S = self.inputs.q.shape[:3]
        Dv = self.inputs.v.shape[3]
        shapes = {"o": (B, H, S, Dv), "lse": (B, H, S)}
        if self.rendered.launch.workspaces:
            shapes |= {"state_m": (B, H, S), "state_l": (B, H, S), "state_acc": (B, H, S, Dv)}
        arrays = {
            name: np.full(shape, np.nan, self.inputs.v.dtype if name == "o" else np.float32)
            for name, shape in shapes.items()
        }
        views = {name: view(x, name, is_output=True) for name, x in arrays.items()}
        run_on_host(
            self.rendered, self.binding, Outputs(**views), self.library,
            mode=mode, seed=seed, check=check,
        )  # fmt: skip
        return arrays["o"], arrays["lse"]


@pytest.mark.parametrize(
    "schedule",
    [
        "tile q = 16, kv = 32",
        "tile q = 4, kv = 8",
        "tile q = 64, kv = 64; passes two",
        "loop kv, q",
    ],
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_run_gives_the_same_bits(schedule: str, is_causal: bool, host_compiler: None) -> None:
    case = first_case("O26")
    case = Case(case.id, 0, case.record, {**case.dims, "Hq": 2, "Hkv": 2})
    if is_causal:
        case = Case(case.id, 0, {**case.record, "mask_np": "kv <= q"}, case.dims)
    inputs = case.inputs()
    spec = Spec("mask kv <= q") if is_causal else SPECS["O26"]
    run = HostRun(compile_case(case, "cpu", spec, schedule=schedule), inputs, {})
    right = run(Mode.RING, 0, check=not is_causal)
    assert_right(case, inputs, *right)
    orders = [Mode.RING, Mode.EAGER, Mode.EAGER_LAST, Mode.RANDOM]
    for repetition in range(20):
        for found, same in zip(run(orders[repetition % 4], repetition), right, strict=True):
            assert same_bits(found, same)


# ---- O22, O23: captured tensors ----------------------------------------------------------


@pytest.mark.parametrize("number", range(1 + len(VARIATIONS["O22"])))
@pytest.mark.parametrize("case", numeric_cases("O22"), ids=str)
def test_nothing_behind_a_captured_array_is_read(engine: Any, case: Case, number: int) -> None:
    spec = (SPECS["O22"], *VARIATIONS["O22"])[number]
    inputs = case.inputs()
    buf = inputs.aux["buf"]
    memory = np.full(buf.size + 64, np.nan, np.float32)
    memory[: buf.size] = buf
    kernel = compile_case(case, engine, spec)
    found = kernel(inputs.q, inputs.k, inputs.v, buf=memory[: buf.size])
    assert_right(case, inputs, *found)


def test_an_index_out_of_range_without_a_mask(host_compiler: None) -> None:
    case = first_case("O22")
    inputs = case.inputs()
    buf = inputs.aux["buf"]
    spec = Spec("tensor buf : float[L]\nscore s + buf[kv]", tensors={"buf": "buf"})
    operands = (inputs.q, inputs.k, inputs.v)
    for engine, check in (("numpy", False), ("numpy", True), ("cpu", True)):
        error = catch(compile_case(case, engine, spec), *operands, buf=buf, check=check)
        assert error.code == "A661"
        assert error.message() == (
            "tensor `buf` is read outside its shape (127,) at a pair that attends"
        )
    nearest = np.append(buf, buf[-1])
    kernel = compile_case(case, "cpu", spec)
    memory = np.full(buf.size + 64, np.nan, np.float32)
    memory[: buf.size] = buf
    for found, right in zip(
        kernel(*operands, buf=memory[: buf.size]), kernel(*operands, buf=nearest), strict=True
    ):
        assert same_bits(found, right)
    kernel(*operands, buf=nearest, check=True)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 33, 70), (2, 1, 1, 70), (1, 4, 1, 1), (2, 4, 1, 70), (70,), (1,), (), (4, 33, 70),
        (33, 70), (33, 1), (2, 4, 33, 70), (1, 1, 1, 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_bias_of_any_broadcast_shape(engine: Any, shape: tuple[int, ...]) -> None:
    case = first_case("O23")
    inputs = case.inputs()
    bias = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    kernel = compile_case(case, engine)
    found = kernel(inputs.q, inputs.k, inputs.v, bias=bias)
    full = np.ascontiguousarray(np.broadcast_to(bias, (2, 4, 33, 70)))
    right = kernel(inputs.q, inputs.k, inputs.v, bias=full)
    for one, other in zip(found, right, strict=True):
        assert same_bits(one, other)
    wider = np.full((*shape, 3), np.nan, np.float32)
    wider[..., 1] = bias
    for one, other in zip(
        kernel(inputs.q, inputs.k, inputs.v, bias=wider[..., 1]), right, strict=True
    ):
        assert same_bits(one, other)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 34, 70),
        (1, 1, 33, 69),
        (2, 33, 70),
        (3, 1, 1, 70),
        (4, 2, 33, 70),
        (1,) * 5,
        (7, 33),
    ],
    ids=str,
)
def test_a_bias_that_does_not_broadcast_is_refused(engine: Any, shape: tuple[int, ...]) -> None:
    case = first_case("O23")
    inputs = case.inputs()
    kernel = compile_case(case, engine)
    bias = np.zeros(shape, np.float32)
    error = catch(kernel, inputs.q, inputs.k, inputs.v, bias=bias)
    assert error.code == "A621"
    assert f"({', '.join(map(str, shape))})" in error.message()
    assert "B = 2, Hq = 4, Sq = 33, Skv = 70" in words(error)
    assert kernel.compilations == 0


# ---- O25: partial results ----------------------------------------------------------------


def test_partial_results_merge_by_state_and_by_natural_logarithms(engine: Any) -> None:
    case = first_case("O25")
    inputs = case.inputs()
    kernel = compile_case(case, engine)
    whole, whole_lse = kernel(inputs.q, inputs.k, inputs.v)
    assert_right(case, inputs, whole, whole_lse)
    ranges = ((0, 90), (90, 90), (90, 200))
    parts = [kernel.partial(inputs.q, inputs.k, inputs.v, kv_range=keys) for keys in ranges]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert_right(case, inputs, *merged.finalize())
    assert_right(case, inputs, *parts[2].merge(parts[0].merge(parts[1])).finalize())
    finished = [part.finalize() for part in parts]
    assert np.isneginf(finished[1][1]).all()
    assert not finished[1][0].any()
    with np.errstate(invalid="ignore"):
        total = np.logaddexp.reduce([lse for _, lse in finished])
        combined = sum(np.exp(lse - total)[..., None] * o for o, lse in finished)
    assert_right(case, inputs, combined, total)


@pytest.mark.parametrize("seed", range(6))
def test_any_way_of_cutting_the_keys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = first_case("O25")
    inputs = case.inputs(seed)
    places = sorted(rng.integers(0, 201, 5))
    kernel = compile_case(case, "numpy", schedule="tile q = 32, kv = 48")
    parts = [
        kernel.partial(inputs.q, inputs.k, inputs.v, kv_range=(int(a), int(b)))
        for a, b in zip([0, *places], [*places, 200], strict=True)
    ]
    while len(parts) > 1:  # merge neighbours in any order
        i = int(rng.integers(len(parts) - 1))
        parts[i : i + 2] = [parts[i].merge(parts[i + 1])]
    assert_right(case, inputs, *parts[0].finalize())


# ---- O28: floor division and modulo ------------------------------------------------------


def test_division_of_indices_has_one_rule(engine: Any) -> None:
    """With one key the LSE is the score itself."""
    text = """
attention division {
    param d : int where -50 <= d < 50
    let a = q - 60
    score (a // 7) * 10000 + (a % 7) * 100 + a // -3 + 0 * s
    score s + 1000000 * (a % -4) + where(d == 0, 0, (a // d) * 64 + a % d) + a / 8
    output o, lse
}
"""
    kernel = attngen.compile_text(text, engine=engine)
    q, k = np.zeros((1, 1, 121, 8), np.float32), np.zeros((1, 1, 1, 8), np.float32)
    for d in (1, 2, 5, -1, -2, -7, 49, -50):
        _, lse = kernel(q, k, k, d=d)
        for row in range(121):
            a = row - 60
            first = np.float32(a // 7 * 10000 + a % 7 * 100 + a // -3)
            right = first + np.float32(1000000 * (a % -4))
            right = right + np.float32(a // d * 64 + a % d) + np.float32(a / 8)
            assert lse[0, 0, row] == np.float32(right), (a, d)


# ---- O29: lengths and params without a compilation ---------------------------------------


def test_forty_lengths_and_changing_params_take_one_compilation(engine: Any) -> None:
    case = first_case("O29")
    kernel = compile_case(case, engine)
    lengths = np.unique(np.linspace(1, 520, 40).astype(int))
    assert len(lengths) == 40
    for number, length in enumerate(lengths):
        W = (256, 16)[number % 2]
        dims = {**case.dims, "Hq": 1, "Hkv": 1, "Sq": int(length), "Skv": int(length)}
        one = Case(case.id, 0, {**case.record, "aux": {"W": str(W)}}, dims)
        inputs = one.inputs()
        assert_right(one, inputs, *kernel(inputs.q, inputs.k, inputs.v, W=W))
    assert kernel.compilations == 1


def test_a_changed_param_takes_effect_at_once(engine: Any) -> None:
    case = first_case("O29")
    inputs = case.inputs()
    kernel = compile_case(case, engine)
    found = [kernel(inputs.q, inputs.k, inputs.v, W=W) for W in (256, 16, 256)]
    assert same_bits(found[0][0], found[2][0])
    assert not same_bits(found[0][0], found[1][0])
    shorter = [x[:, :, :100] for x in (inputs.q, inputs.k, inputs.v)]
    for one, other in zip(
        kernel(*shorter, W=16), compile_case(case, engine)(*shorter, W=16), strict=True
    ):
        assert same_bits(one, other)
    assert kernel.compilations == 1
