"""Emitted integer and boolean C++ against its NumPy meaning, decided by the compiler itself.

The text of every expression becomes a `constexpr` function, and a `static_assert` compares it
with a table of values over a box of pairs and launches.  NVRTC does it with no GPU, and it
refuses whatever has no defined result, so a sum that needs 64 bits and has 32 is found too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from attngen import targets
from attngen.analysis.ranges import exceeding_int64, launch_ranges
from attngen.backend.nvrtc import compile_cuda
from attngen.codegen.render import _environment
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.expr import Expr
from attngen.ir.printer import print_expr
from attngen.ir.schedule import Schedule
from attngen.ir.semantics import evaluate
from attngen.ir.types import FP32, ScalarType
from attngen.kernels.forward_simt import FAMILY
from attngen.passes.name_shared import name_shared
from attngen.passes.specialize import specialize
from attngen.resources import template_source

from .random_expr import DATA, EDGES, SIZES, TENSORS, exact, expressions, variant

SM_80 = targets.get("sm_80")

# What `constexpr` code may use in place of the device's own functions.
PRELUDE = """
typedef long long ag_i64;
#define AG_DEVICE __device__ constexpr
#define AG_NOINLINE __device__ constexpr
#define AG_INFINITY __builtin_bit_cast(float, 0x7f800000u)
#define AG_NAN __builtin_bit_cast(float, 0x7fffffffu)
struct ag_fp16 {};
struct ag_bf16 {};
template <class T> AG_DEVICE T ag_load(const T* p) { return *p; }
AG_DEVICE float ag_to_float(float x) { return x; }
AG_DEVICE float ag_exp(float x) { return x; }
AG_DEVICE float ag_floor(float x) {
    if (!(x > -9e15f && x < 9e15f)) return x;
    const float down = (float)(ag_i64)x;
    return down > x ? down - 1.0f : down;
}
"""
LENGTHS = (
    (3, 5),
    (5, 3),
    (1, 1),
    (4, 2**31 - 1025),
    (2**31 - 1025, 2**31 - 1025),
    (2**31 - 1025, 2),
)
PLACES = ((0, 0), (0, 3), (1, 2))


@dataclass(frozen=True)
class Launch:
    """Lengths and params of one launch, and the pairs of it that are looked at."""

    lengths: tuple[int, int]
    params: Mapping[str, Any]

    @property
    def sizes(self) -> dict[str, int]:
        return {**SIZES, "Sq": self.lengths[0], "Skv": self.lengths[1]}

    def pairs(self) -> list[tuple[int, int, int, int]]:
        """b, h, q, kv: corners and some between."""
        q, kv = (sorted({0, min(1, n - 1), n // 2, n - 1}) for n in self.lengths)
        return [(b, h, i, j) for (b, h), i, j in itertools.product(PLACES, q, kv)]

    def symbols(self) -> dict[str, Any]:
        b, h, q, kv = (np.array(x, np.int64) for x in zip(*self.pairs(), strict=True))
        known = {n: np.int64(x) for n, x in self.sizes.items()}
        types = {bool: np.bool_, int: np.int64, float: np.float32}
        known |= {n: types[type(x)](x) for n, x in self.params.items()}
        group = SIZES["Hq"] // SIZES["Hkv"]
        at = {"b": b, "h": h, "hkv": h // group, "q": q, "kv": kv}
        return {**known, **at, "qpos": q + known["Skv"] - known["Sq"]}


big = st.sampled_from(EDGES) | st.integers(-9, 9)
launches = st.builds(
    Launch,
    st.sampled_from(LENGTHS),
    st.fixed_dictionaries(
        {
            "any": big,
            "size": st.sampled_from((0, 1, 5, 2**31 - 1)),
            "tiny": st.integers(-5, 5),
            "flag": st.booleans(),
            "free": st.sampled_from((0.0, -1.5, 3.0e9)),
            "unit": st.sampled_from((-1.0, 0.25, 1.0)),
        }
    ),
)


def constexpr_text(
    roots: Sequence[Expr], given: Sequence[Launch], tables: Sequence[Sequence[Sequence[int] | None]]
) -> str:
    """`tables[root][launch]` holds the value at each pair; None where the launch is refused."""
    # As the pipeline does: head dims are numbers, and text does not double where nodes are shared.
    attention = name_shared(specialize(variant(*roots), FP32, SIZES["Dqk"], SIZES["Dv"]))
    schedule = FAMILY.complete(attention, Schedule(), SM_80)
    whole = FAMILY.context(FAMILY.lower(attention, schedule), SM_80)
    context = replace(whole, scale=None, score_lines=())
    macros: Any = _environment().get_template("common/attention.cu.j2").module
    arithmetic = template_source("common/device.cuh").split("#endif  // AG_HOST")[1]
    parts = [PRELUDE, arithmetic, *(_array(name) for name in DATA)]
    parts += [macros.argument_struct(context), macros.tensor_reads(context)]
    parts += [macros.formulas(context), _arguments_text(given)]
    for i in range(len(roots)):
        body = macros.body(whole.score_lines[i], "random")
        parts.append(
            f"AG_DEVICE ag_i64 root_{i}(const Args& args, const Position& at) {{\n{body}}}"
        )
        for j, launch in enumerate(given):
            table = tables[i][j]
            if table is not None:
                parts.append(_comparison(f"root_{i}", j, launch, table))
    return "\n".join([*parts, 'extern "C" __global__ void nothing() {}\n'])


def _array(name: str) -> str:
    tensor = next(t for t in TENSORS if t.name == name)
    c_type = {"bool": "unsigned char", "int8": "signed char", "int64": "ag_i64", "fp32": "float"}
    c_type |= {"int32": "int", "uint32": "unsigned int"}
    values = ", ".join(_number(x) for x in DATA[name].ravel().tolist())
    return f"__device__ constexpr {c_type[tensor.element.name]} data_{name}[] = {{{values}}};"


def _number(x: bool | int | float) -> str:
    if isinstance(x, float):
        return f"{x!r}f"
    return "(-9223372036854775807LL - 1)" if x == -(2**63) else f"{int(x)}LL"


def _arguments_text(given: Sequence[Launch]) -> str:
    lines = ["AG_DEVICE Args arguments(int launch) {", "    Args args = {};"]
    for name, size in SIZES.items():
        if name not in ("Dqk", "Dv"):
            lines.append(f"    args.{'n_R' if name == 'R' else name} = {size};")
    for name, data in DATA.items():
        lines.append(f"    args.t_{name} = data_{name};")
        for i, (size, stride) in enumerate(zip(data.shape, data.strides, strict=True)):
            lines.append(f"    args.t_{name}_size{i} = {size};")
            lines.append(f"    args.t_{name}_stride{i} = {stride // data.itemsize};")
    for i, launch in enumerate(given):
        lines.append(f"    if (launch == {i}) {{")
        lines += [f"        args.{n} = {launch.sizes[n]};" for n in ("Sq", "Skv")]
        lines += [f"        args.p_{n} = {_number(x)};" for n, x in launch.params.items()]
        lines.append("    }")
    return "\n".join([*lines, "    return args;", "}"])


def _comparison(root: str, number: int, launch: Launch, table: Sequence[int]) -> str:
    name = f"{root}_in_{number}"
    pairs = ", ".join(f"{{{b * SIZES['Hq'] + h}, {q}, {kv}}}" for b, h, q, kv in launch.pairs())
    wanted = ", ".join(_number(int(x)) for x in table)
    return f"""
AG_DEVICE bool {name}() {{
    const int pairs[][3] = {{{pairs}}};
    const ag_i64 wanted[] = {{{wanted}}};
    const Args args = arguments({number});
    for (int i = 0; i < {len(table)}; ++i) {{
        Position at = place_head(args, pairs[i][0]);
        place_row(at, pairs[i][1]);
        at.kv = pairs[i][2];
        if ({root}(args, at) != wanted[i]) return false;
    }}
    return true;
}}
static_assert({name}(), "{name}");"""


def check(roots: Sequence[Expr], given: Sequence[Launch]) -> None:
    tables = [[meaning(root, launch) for launch in given] for root in roots]
    text = constexpr_text(roots, given, tables)
    try:
        compile_cuda(text, name="random", target=SM_80, emit="ptx")
    except AttnError as error:
        listed = "\n".join(f"{i}: {print_expr(root)}" for i, root in enumerate(roots))
        launched = "\n".join(f"{i}: {launch}" for i, launch in enumerate(given))
        functions = text[text.index("AG_DEVICE ag_i64 root_0") :].split("static_assert")[0]
        raise AssertionError(f"{error}\n{listed}\n{launched}\n{functions[:3000]}") from None


def meaning(root: Expr, launch: Launch) -> list[int] | None:
    """The value at every pair, from NumPy; None where this launch must be, and is, refused."""
    attention = variant(root)
    symbols = launch.symbols()
    ranges = launch_ranges(attention, launch.sizes, launch.params)
    is_refused = next(exceeding_int64(attention, ranges), None) is not None
    values = [
        exact(root, {n: x[i] if np.ndim(x) else x.item() for n, x in plain(symbols).items()})
        for i in range(len(launch.pairs()))
    ]
    if any(v.too_large_without_tensors for v in values):
        assert is_refused, f"a launch that leaves 64 bits is let through:\n{print_expr(root)}"
    if is_refused or any(v.too_large for v in values):
        event("beyond 64 bits")
        return None
    data = evaluate(root, symbols, DATA).data
    found = np.broadcast_to(data, len(values)).tolist()
    assert found == [v.value for v in values], f"NumPy is not exact:\n{print_expr(root)}"
    return [int(x) for x in found]


def plain(symbols: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as lists of Python's own numbers."""
    return {n: x.tolist() if np.ndim(x) else x for n, x in symbols.items()}


@given(expressions((ScalarType.INT, ScalarType.BOOL)), st.lists(launches, min_size=1, max_size=3))
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_emitted_integers_mean_what_numpy_says(roots: list[Expr], given: list[Launch]) -> None:
    check(roots, given)
