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
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import attngen
from attngen import targets
from attngen.analysis.ranges import (
    compile_time_ranges,
    exceeding_int64,
    infer_ranges,
    launch_ranges,
)
from attngen.backend.nvrtc import compile_cuda
from attngen.codegen.expr import ExprPrinter
from attngen.codegen.render import _environment
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.expr import (
    Binary,
    BinaryOp,
    Compare,
    CompareOp,
    Const,
    Expr,
    Load,
    Negate,
    Role,
    Symbol,
)
from attngen.ir.functions import call
from attngen.ir.interval import Interval
from attngen.ir.printer import print_expr
from attngen.ir.schedule import Schedule
from attngen.ir.semantics import evaluate
from attngen.ir.traverse import postorder
from attngen.ir.types import FP32, ScalarType
from attngen.kernels.forward_simt import FAMILY
from attngen.passes.name_shared import name_shared
from attngen.passes.pipeline import run_passes
from attngen.passes.specialize import specialize
from attngen.resources import template_source

from .random_expr import DATA, EDGES, PARAM_SYMBOLS, SIZES, TENSORS, exact, expressions, variant

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
    for known in (ranges, compile_time_ranges(attention)):
        check_ranges(root, symbols, infer_ranges((root,), known, attention))
    return [int(x) for x in found]


def check_ranges(root: Expr, symbols: Mapping[str, Any], known: Mapping[int, Interval]) -> None:
    """Every value lies in the interval that was inferred for it."""
    for node in postorder(root):
        data = evaluate(node, symbols, DATA).data
        low, high = int(np.min(data)), int(np.max(data))
        assert known[id(node)].low <= low <= high <= known[id(node)].high, print_expr(node)


def plain(symbols: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as lists of Python's own numbers."""
    return {n: x.tolist() if np.ndim(x) else x for n, x in symbols.items()}


@given(expressions((ScalarType.INT, ScalarType.BOOL)), st.lists(launches, min_size=1, max_size=3))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_emitted_integers_mean_what_numpy_says(roots: list[Expr], given: list[Launch]) -> None:
    check(roots, given)


def test_a_wrong_value_is_noticed() -> None:
    """What the checks above rest on: one changed entry of a table fails to compile."""
    launch = Launch(
        (3, 5), {"any": 1, "size": 1, "tiny": 1, "flag": True, "free": 0.0, "unit": 0.0}
    )
    root = Compare(CompareOp.LE, *(Symbol(n, Role.INDEX, ScalarType.INT) for n in ("kv", "qpos")))
    table = meaning(root, launch)
    assert table is not None
    table[7] = 1 - table[7]
    with pytest.raises(AttnError, match="root_0_in_0"):
        compile_cuda(
            constexpr_text([root], [launch], [[table]]), name="x", target=SM_80, emit="ptx"
        )


# ---- widths ------------------------------------------------------------------------------

SYMBOLS = {n: Symbol(n, Role.INDEX, ScalarType.INT) for n in ("q", "kv", "qpos")}
SYMBOLS |= PARAM_SYMBOLS
LARGE = [
    Launch((2**31 - 1025, 2**31 - 1025), {**params, "flag": True, "free": 0.0, "unit": 0.0})
    for params in (
        {"any": 2**31, "size": 2**31 - 1, "tiny": 5},
        {"any": -(2**31) - 1, "size": 1, "tiny": -5},
        {"any": 2**62, "size": 2**31 - 1, "tiny": -1},
        {"any": 0, "size": 0, "tiny": 0},
    )
]


def of_names(text: str) -> Expr:
    """A small expression, written in Python: `narrow(2) // q` reads a tensor, 7 is a constant."""
    known: dict[str, Any] = {n: _Operand(e) for n, e in SYMBOLS.items()}
    for tensor in ("narrow", "unsigned"):
        known[tensor] = lambda i, t=tensor: _Operand(Load(t, (Const(i),), ScalarType.INT))
    for name in ("abs", "min", "max", "clamp"):
        known[name] = lambda *xs, f=name: _Operand(call(f, *(_operand(x) for x in xs)))
    return _operand(eval(text, {"__builtins__": {}}, known))


@dataclass(frozen=True)
class _Operand:
    """An expression with Python's arithmetic."""

    e: Expr

    def _binary(self, op: BinaryOp, other: Any, *, turned: bool = False) -> _Operand:
        left, right = (_operand(other), self.e) if turned else (self.e, _operand(other))
        return _Operand(Binary(op, left, right))

    def __add__(self, other: Any) -> _Operand:
        return self._binary(BinaryOp.ADD, other)

    def __sub__(self, other: Any) -> _Operand:
        return self._binary(BinaryOp.SUB, other)

    def __rsub__(self, other: Any) -> _Operand:
        return self._binary(BinaryOp.SUB, other, turned=True)

    def __mul__(self, other: Any) -> _Operand:
        return self._binary(BinaryOp.MUL, other)

    def __floordiv__(self, other: Any) -> _Operand:
        return self._binary(BinaryOp.FLOORDIV, other)

    def __mod__(self, other: Any) -> _Operand:
        return self._binary(BinaryOp.MOD, other)

    def __neg__(self) -> _Operand:
        return _Operand(Negate(self.e))


def _operand(x: Any) -> Expr:
    return x.e if isinstance(x, _Operand) else Const(x)


WIDE = [
    "q + kv", "q * kv", "q * kv % 7", "q * kv // (q * kv)", "kv + size - size", "kv - any",
    "-(0 - 2 - q - q)", "abs(narrow(4))", "-narrow(4)", "narrow(4) // -1", "narrow(4) % -1",
    "narrow(0) + 1", "unsigned(0) + 1", "unsigned(0) - narrow(0)", "any // tiny", "kv % any",
    "clamp(any, q, kv)", "min(any, q)", "max(q * 2, kv)", "tiny * size", "(q + 1) * (kv + 1) - q",
    "narrow(4) % tiny", "narrow(4) - 1", "kv * 4 // 4", "(kv - qpos) * 2", "qpos - size - 2",
    "min(kv, -2147483648)",
]  # fmt: skip
NARROW = ["kv - qpos", "qpos - kv", "kv - q", "kv % 7", "kv // size", "qpos % size", "q - kv"]
NARROW += ["min(q, kv)", "abs(qpos)", "clamp(qpos, 0, kv)", "tiny * tiny", "q // -3"]


@pytest.mark.parametrize("text", [*WIDE, *NARROW])
def test_an_integer_has_the_bits_that_it_needs(text: str) -> None:
    """Also a value that fits 32 bits may stand on one that does not."""
    check([of_names(text)], LARGE)
    e = name_shared(variant(of_names(text))).scores[0]
    emitted = ExprPrinter(variant(e)).print(e)
    words = [emitted.text, *(v.c_type for v in emitted.variables)]
    assert any("ag_i64" in w for w in words) == (text in WIDE), words


@pytest.mark.parametrize(
    ("text", "emitted"),
    [
        ("kv // 8", "at.kv >> 3"),
        ("(kv - q) % 1024", "(at.kv - at.q) & 1023"),
        ("kv // 8 % 4 * 3", "((at.kv >> 3) & 3) * 3"),
        ("any // 4611686018427387904 - q", "(args.p_any >> 62) - (ag_i64)at.q"),
        ("kv // 6", "ag_floordiv(at.kv, 6)"),
        ("kv % -8", "ag_mod(at.kv, -8)"),
    ],
)
def test_a_power_of_two_divides_in_one_instruction(text: str, emitted: str) -> None:
    """Rounded down, where C++ would round negative numbers up."""
    check([of_names(text)], LARGE)
    e = of_names(text)
    assert ExprPrinter(variant(e)).print(e).text == emitted


def test_bits() -> None:
    """Of every word, those outside of it included."""
    places = [Const(i) for i in (-(2**40), -1, 0, 1, 31, 32, 62, 63, 64, 2**32, 2**63 - 1)]
    words: list[Expr] = [*(Const(n) for n in (*EDGES, -1, 0, 5)), SYMBOLS["kv"], SYMBOLS["any"]]
    check([call("bit", word, i) for word in words for i in places], LARGE[:2])


WINDOWS = [
    ("mask causal", {}),
    ("mask causal(top_left)", {}),
    ("mask window(left = 127)", {}),
    ("const W = 2**31 - 1\nmask window(left = W - 1, right = 0)", {}),
    ("param W : int where 1 <= W < 2**31\nmask window(left = W - 1)", {}),
    ("param W : int where 1 <= W < 2**31\nmask q - kv < W and kv - q <= W", {}),
    ("param W : int where 1 <= W < 2**31\nmask 0 <= qpos - kv < W", {}),
    ("param W : int where 1 <= W < 2**31\nmask kv - qpos > -W", {}),
    ("tensor doc : int32[B, Skv]\nmask document(doc) and causal", {}),
    ("mask chunked(64) and causal", {}),
    ("mask window(left = 254) and dilated(2)", {}),
    ("tensor p : int32[B]\nmask prefix(p[b])", {}),
]


@pytest.mark.parametrize(("body", "consts"), WINDOWS)
def test_masks_of_every_day_need_32_bits(body: str, consts: Mapping[str, int]) -> None:
    kernel = attngen.compile_text(f"attention a {{\n{body}\n}}\n", consts=consts)
    attention = run_passes(specialize(kernel.attention, FP32, 8, 8))
    assert attention.mask is not None
    body_of_mask = ExprPrinter(attention).print(attention.mask)
    for variable in body_of_mask.variables:
        assert variable.c_type in ("int", "bool")
    assert "ag_i64" not in body_of_mask.text
