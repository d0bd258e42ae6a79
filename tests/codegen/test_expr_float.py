"""Emitted float expressions, run on the CPU in a small kernel of their own.

Float32 arithmetic, comparisons, `floor` and conversions are exact operations, so they must agree
with NumPy bit for bit; the elementary functions must agree within their stated error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import attngen
from attngen import targets
from attngen.backend.nvrtc import compile_cuda
from attngen.codegen.expr import float_literal
from attngen.codegen.render import _environment
from attngen.cpu.build import build_library
from attngen.cpu.run import MemoryRange, copy_apart, run_on_cpu
from attngen.ir.expr import Binary, BinaryOp, Call, Const, Expr, expr_type
from attngen.ir.functions import FUNCTIONS, call
from attngen.ir.printer import print_expr
from attngen.ir.schedule import Schedule
from attngen.ir.semantics import evaluate
from attngen.ir.types import FP32, ScalarType
from attngen.kernels.forward_simt import FAMILY
from attngen.passes.name_shared import name_shared
from attngen.passes.specialize import specialize

from .random_expr import DATA, PARAM_SYMBOLS, SCORE, SIZES, expressions, variant

SM_80 = targets.get("sm_80")
THREADS = 32
LENGTHS = ((2, 3), (3, 1), (1, 1))
KERNEL = """
struct Job {
    Args args;
    const int* pairs;      // batch and head, q, kv
    const float* scores;
    float* floats;         // [roots, pairs]
    ag_i64* integers;
    ag_i64 count;
};

AG_KERNEL(32, evaluate, Job) {
    const Args& given = args.args;
    const int i = ag_block() * 32 + ag_thread();
    if (i >= args.count) return;
    Position at = place_head(given, ag_load(args.pairs + 3 * i));
    place_row(at, ag_load(args.pairs + 3 * i + 1));
    at.kv = ag_load(args.pairs + 3 * i + 2);
    const float s = ag_load(args.scores + i);
"""
SCORES = np.array(
    [0.0, -0.0, 1.5, -2.25, 3.0e38, -1.0e-45, 1.0e-38, np.inf, -np.inf, np.nan, 88.5, -103.9, 0.1],
    np.float32,
)


def host_text(roots: Sequence[Expr]) -> tuple[str, Any]:
    """The kernel that computes every root, and the layout of its arguments."""
    attention = name_shared(specialize(variant(*roots), FP32, SIZES["Dqk"], SIZES["Dv"]))
    schedule = FAMILY.complete(attention, Schedule(), SM_80)
    whole = FAMILY.context(FAMILY.lower(attention, schedule), SM_80)
    macros: Any = _environment().get_template("common/attention.cu.j2").module
    context = replace(whole, scale=None, score_lines=())
    parts = [whole.device, macros.argument_struct(context), macros.tensor_reads(context)]
    parts.append(macros.formulas(context))
    stores = []
    for i, root in enumerate(roots):
        is_float = expr_type(root) is ScalarType.FLOAT
        c_type, array = ("float", "floats") if is_float else ("ag_i64", "integers")
        signature = f"AG_DEVICE {c_type} root_{i}(const Args& args, const Position& at, float s)"
        parts.append(f"{signature} {{\n{macros.body(whole.score_lines[i], 'random')}}}")
        place = f"args.{array} + {i} * args.count + i"
        stores.append(f"    ag_store({place}, root_{i}(given, at, s));")
    return "\n".join([*parts, KERNEL, *stores, "}\n"]), whole.arguments


def run(
    roots: Sequence[Expr], params: Mapping[str, Any], lengths: tuple[int, int], cache: Path
) -> list[np.ndarray]:
    """The value of every root at every pair and score, from the emitted text."""
    text, layout = host_text(roots)
    library = build_library(text, cache_dir=cache, optimization=0)
    pairs = list(itertools.product((0, 3, 6), range(lengths[0]), range(lengths[1])))
    places = np.array([p for p in pairs for _ in SCORES], np.int32)
    count = len(places)
    arrays = {
        "pairs": copy_apart(places),
        "scores": copy_apart(np.tile(SCORES, len(pairs))),
        "floats": copy_apart(np.zeros((len(roots), count), np.float32)),
        "integers": copy_apart(np.zeros((len(roots), count), np.int64)),
    }
    tensors = {f"t_{name}": copy_apart(data) for name, data in DATA.items()}
    values: dict[str, Any] = {f.name: 0 for f in layout.fields}
    values |= {n: SIZES[n] for n in ("B", "Hq", "Hkv")} | {"n_R": SIZES["R"]}
    values |= dict(zip(("Sq", "Skv"), lengths, strict=True))
    values |= {f"p_{name}": value for name, value in params.items()}
    for name, data in tensors.items():
        values[name] = data.ctypes.data
        for i, (size, stride) in enumerate(zip(data.shape, data.strides, strict=True)):
            values[f"{name}_size{i}"], values[f"{name}_stride{i}"] = size, stride // data.itemsize
    packed = layout.pack(values)
    packed += b"".join(a.ctypes.data.to_bytes(8, "little") for a in arrays.values())
    packed += count.to_bytes(8, "little")
    ranges = [MemoryRange.of(a, is_writable=True, name=n) for n, a in {**arrays, **tensors}.items()]
    blocks = -(-count // THREADS)
    run_on_cpu(
        library, "evaluate", packed, grid=blocks, threads=THREADS, shared_bytes=0, ranges=ranges
    )
    is_float = [expr_type(root) is ScalarType.FLOAT for root in roots]
    return [arrays["floats" if f else "integers"][i] for i, f in enumerate(is_float)]


def meaning(root: Expr, params: Mapping[str, Any], lengths: tuple[int, int]) -> np.ndarray:
    """The same from NumPy."""
    pairs = list(itertools.product((0, 3, 6), range(lengths[0]), range(lengths[1])))
    head, q, kv = np.array([p for p in pairs for _ in SCORES], np.int64).T
    b, h = head // SIZES["Hq"], head % SIZES["Hq"]
    Sq, Skv = map(np.int64, lengths)
    types = {bool: np.bool_, int: np.int64, float: np.float32}
    symbols = {n: np.int64(x) for n, x in SIZES.items()} | {"Sq": Sq, "Skv": Skv}
    symbols |= {n: types[type(x)](x) for n, x in params.items()}
    symbols |= {"b": b, "h": h, "hkv": h // 2, "q": q, "kv": kv, "qpos": q + Skv - Sq}
    symbols["s"] = np.tile(SCORES, len(pairs))
    return np.broadcast_to(evaluate(root, symbols, DATA).data, len(head))


params = st.fixed_dictionaries(
    {
        "any": st.integers(-9, 9),
        "size": st.integers(0, 9),
        "tiny": st.integers(-5, 5),
        "flag": st.booleans(),
        "free": st.sampled_from((0.0, -1.5, 3.0e9, 0.1, math.inf, math.nan)),
        "unit": st.sampled_from((-1.0, 0.25, 1.0)),
    }
)
mixed = (ScalarType.FLOAT, ScalarType.FLOAT, ScalarType.BOOL, ScalarType.INT)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, host_compiler: None) -> Path:
    return tmp_path_factory.mktemp("expressions")


# Every example builds a library, so nothing is shrunk: a failure names its expression.
@given(expressions(mixed, least=16, most=24, floats=True), params, st.sampled_from(LENGTHS))
@settings(
    max_examples=15,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_exact_operations_agree_bit_for_bit(
    cache: Path, roots: list[Expr], given: dict[str, Any], lengths: tuple[int, int]
) -> None:
    for root, found in zip(roots, run(roots, given, lengths, cache), strict=True):
        right = meaning(root, given, lengths)
        np.testing.assert_array_equal(found, right, err_msg=print_expr(root))


ELEMENTARY = sorted(n for n, f in FUNCTIONS.items() if f.ulps or n == "sqrt")


def test_elementary_functions_agree_within_their_stated_error(cache: Path) -> None:
    """Arguments are exact, so the function alone is measured; NumPy's own are good to 4 ulps."""
    free = PARAM_SYMBOLS["free"]
    inner = (SCORE, Binary(BinaryOp.MUL, SCORE, Const(0.125)), Binary(BinaryOp.ADD, SCORE, free))
    roots: list[Expr] = []
    for name in ELEMENTARY:
        both = FUNCTIONS[name].signature.count == (2, 2)
        roots += [call(name, x, free) if both else call(name, x) for x in inner]
    given = {"any": 0, "size": 0, "tiny": 0, "flag": True, "free": 0.75, "unit": 0.0}
    for root, found in zip(roots, run(roots, given, (2, 3), cache), strict=True):
        assert isinstance(root, Call)
        right = meaning(root, given, (2, 3))
        same = (found == right) | (np.isnan(found) & np.isnan(right))
        with np.errstate(invalid="ignore"):
            ulp = np.maximum(np.spacing(np.abs(right)), np.float32(2.0**-149))
            near = np.abs(found - right) <= (FUNCTIONS[root.function].ulps + 4) * ulp
        worst = [(float(a), float(b)) for a, b in zip(found, right, strict=True)]
        assert (same | near).all(), f"{print_expr(root)}: {set(worst)}"


# ---- literals ----------------------------------------------------------------------------

EDGE_FLOATS = [
    0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 1.1754942e-38, 3.4028234e38, -3.4028234e38, 5 / 2,
    0.1, 1e16, 16777217.0, 1e300, -1e300, 1e-50, math.inf, -math.inf, math.nan, 2.0**-126, 1 / 3,
]  # fmt: skip


@given(st.lists(st.floats(width=32) | st.floats(), max_size=60))
@example(EDGE_FLOATS)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_float_literals_read_back_the_same(values: list[float]) -> None:
    lines = [
        "#define AG_INFINITY __builtin_bit_cast(float, 0x7f800000u)",
        "#define AG_NAN __builtin_bit_cast(float, 0x7fffffffu)",
    ]
    for i, value in enumerate(values):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        bits = 0x7FFFFFFF if math.isnan(value) else int(single.view(np.uint32))
        lines.append(f"constexpr float f{i} = {float_literal(value)};")
        lines.append(f'static_assert(__builtin_bit_cast(unsigned, f{i}) == {bits}u, "{value!r}");')
    lines.append('extern "C" __global__ void nothing() {}')
    compile_cuda("\n".join(lines), name="literals", target=SM_80, emit="ptx")


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("5 / 2", "2.5f"),
        ("3.4028234e38", "3.4028235e+38f"),
        ("1e-45", "1e-45f"),
        ("-0.0", "-0.0f"),
        ("inf", "AG_INFINITY"),
        ("-inf", "-AG_INFINITY"),
        ("nan", "AG_NAN"),
        ("1 / 3", "0.33333334f"),
        ("2**24 + 1.0", "1.6777216e+07f"),
    ],
)
def test_constants_of_the_language_become(text: str, literal: str) -> None:
    kernel = attngen.compile_text(f"attention a {{\n    score max(s, {text})\n}}\n")
    source = kernel.render(dtype="fp32", head_dim=8).source
    assert f"return ag_max(s, {literal});" in source
