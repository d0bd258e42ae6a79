"""Whatever the text: success, or errors in the language's words.  Never a traceback, never long.

Examples and conformance texts are mutated token by token and go through every stage: load,
check, specialise, passes, lowering, printing, rendering for both families' targets, and one
small call in the NumPy executor.
"""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import attngen
from attngen import targets
from attngen.backend.device import numpy_dtype
from attngen.backend.nvrtc import compile_cuda
from attngen.compiler import plan_for_numpy
from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.render import render_plain, to_json
from attngen.ir.attention import Attention, Tensor
from attngen.ir.functions import LANGUAGE
from attngen.ir.printer import print_program
from attngen.ir.types import FLOATING, FP32, ScalarType
from tests.conformance.specs import SPECS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [p.read_text("utf-8") for p in sorted((ROOT / "examples").glob("*.attn"))]
CASES = [
    f"{spec.definitions}\nattention case {{\n{spec.body}\noutput o, lse\n}}\n"
    for spec in SPECS.values()
    if spec.body
]
TEXTS = [*EXAMPLES, *CASES]
LINES = sorted({line.strip() for text in TEXTS for line in text.split("\n") if line.strip()})
TOKEN = re.compile(r"\s+|#[^\n]*|\d[\w.]*|\w+|\*\*|//|[<>=!]=|.", re.DOTALL)
SECONDS = 10.0
"""Of the processor, for one text; the slowest need a tenth of it."""

NUMBERS = (
    "0", "1", "-1", "2", "0.5", "1e30", "1e-45", "3.5e38", "2**31 - 1", "2**31", "-2**31", "2**62",
    "2**63 - 1", "2**63", "-2**63", "2**64", "2**4000", "1e400", "inf", "-inf", "nan", "true",
)  # fmt: skip
NAMES = ("b", "h", "hkv", "q", "kv", "qpos", "s", "Sq", "Skv", "B", "Hq", "Hkv", "Dqk", "Dv")
SIGNS = ("+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">", ">=", "and", "or", "not")
COMPARE = ("<", "<=", "==", "!=", ">", ">=")
ARITHMETIC = ("+", "-", "*", "/", "//", "%")
JOIN = ("and", "or")
CALLS = tuple(name for name in LANGUAGE if name not in ("where", "clamp", "min", "max", "bit"))
OTHERS = ("(", ")", "[", "]", "{", "}", ",", ":", "=", "?", "\n", "where", "import", "let x = ")
PIECES = (
    "exp(s)", "floor(s)", "abs(-2**63)", "2**62 * Dqk", "Dqk * Dqk * 2**50", "kv // (q - q)",
    "kv % -1", "bit(kv, 70)", "clamp(q, 5, -5)", "max(kv, 2**40)", "where(s > 0, s, -inf)",
    "log(0.0)", "sqrt(-1.0)", "1 / 0.0", "nan == nan", "kv * kv * kv * kv * kv", "min(s, s, s)",
    "floor(exp(s)) + 1", "(kv + 2**31) % 7", "-(-(-kv))", "not not true", "0 < q < kv < Skv",
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A text with tokens exchanged for others of their kind, and now and then for anything."""
    text = draw(st.sampled_from(TEXTS))
    lines = [line.split("#")[0].rstrip() for line in text.split("\n")]
    for _ in range(draw(st.integers(0, 2))):
        inside = [i for i, line in enumerate(lines) if line.startswith(" ") or "=" in line]
        i = draw(st.sampled_from(inside or [0]))
        match draw(st.sampled_from(("drop", "double", "insert"))):
            case "drop":
                lines[i] = ""
            case "double":
                lines.insert(i, lines[i])
            case _:
                lines.insert(i, draw(st.sampled_from(LINES)))
    tokens = TOKEN.findall("\n".join(lines))
    places = [i for i, t in enumerate(tokens) if not t.isspace()]
    gentle = [i for i in places if len(alike(tokens[i])) > 1]
    for _ in range(draw(st.integers(0, 4))):
        if gentle and draw(st.integers(0, 7)):
            i = draw(st.sampled_from(gentle))
            tokens[i] = draw(st.sampled_from(alike(tokens[i])))
            continue
        i = draw(st.sampled_from(places))
        anything = ("", f"{tokens[i]} {tokens[i]}", *PIECES, *OTHERS, *SIGNS, *NUMBERS)
        tokens[i] = f" {draw(st.sampled_from(anything))} "
    return "".join(tokens)


def alike(token: str) -> tuple[str, ...]:
    """What may stand where this token stands."""
    if token[:1].isdigit() or token in ("true", "false", "inf"):
        return (*NUMBERS, *(f"({p})" for p in PIECES))
    if token in NAMES:
        return (*NAMES, *NAMES, *(f"({p})" for p in PIECES))
    return next((kind for kind in (COMPARE, ARITHMETIC, JOIN, CALLS) if token in kind), (token,))


def through_everything(text: str) -> tuple[str, Any]:
    """What happened, and the rendered program where no stage refused the text."""
    started = time.process_time()
    rendered = refusal = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            warnings.simplefilter("ignore", UserWarning)  # which family runs it, and why
            rendered = stages(text)
    except AttnError as error:
        refusal = error
    assert time.process_time() - started < SECONDS
    if refusal is None:
        return "accepted", rendered
    for diagnostic in refusal.diagnostics:
        assert not diagnostic.code.startswith("A9"), f"{refusal}\n{text}"
        assert render_plain(diagnostic)
        assert to_json(diagnostic)
    return f"refused with {refusal.diagnostics[0].code[:2]}xx", None


def stages(text: str) -> Any:
    kernel = attngen.compile_text(text, name="fuzz.attn", engine="numpy")
    attention = kernel.attention
    element = attention.dtype or FP32
    dims = (attention.head_dim_qk or 8, attention.head_dim_v or 8)
    assert print_program(plan_for_numpy(kernel.checked, element, dims))
    refusal = None
    try:
        rendered = kernel.render("sm_80", dtype=element.name, head_dim=dims)
        kernel.render("sm_90a", dtype="bf16" if attention.dtype is None else None, head_dim=dims)
    except AttnError as error:  # a schedule for another family still runs in NumPy
        refusal = error
    call(kernel, attention, element.name, dims)
    if refusal is not None:
        raise refusal
    return rendered


def call(kernel: Any, attention: Attention, dtype: str, dims: tuple[int, int]) -> None:
    """One small call; an index outside of a tensor, for example, is refused there."""
    rng = np.random.default_rng(0)
    Hq, Hkv = attention.heads_q or 2, attention.heads_kv or 1
    sizes = {"B": 1, "Hq": Hq, "Hkv": Hkv, "Sq": 3, "Skv": 5, "Dqk": dims[0], "Dv": dims[1]}
    element = numpy_dtype(FLOATING[dtype].name)
    shapes = (1, Hq, 3, dims[0]), (1, Hkv, 5, dims[0]), (1, Hkv, 5, dims[1])
    if max(Hq, Hkv) > 128:
        return
    q, k, v = (rng.standard_normal(shape).astype(element) for shape in shapes)
    named: dict[str, Any] = {t.name: captured(t, sizes, rng) for t in attention.tensors}
    for p in attention.params:
        if p.default is None:
            low = p.bound.low if p.bound.low is not None else 1
            made = {ScalarType.INT: int(low) + 1, ScalarType.FLOAT: low + 0.5}
            named[p.name] = made.get(p.type, True)
    kernel(q, k, v, **named)


def captured(tensor: Tensor, sizes: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    shape = [d.size if isinstance(d.size, int) else sizes.get(d.size, 3) for d in tensor.dims]
    if np.prod(shape, dtype=np.float64) > 1e6:
        shape = [1] * len(shape)
    if tensor.element.scalar is ScalarType.FLOAT:
        values = rng.standard_normal(shape)
    else:
        values = rng.integers(0, 2, shape)
    return values.astype(numpy_dtype(tensor.element.name))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_texts_themselves_pass(text: str) -> None:
    kernel = attngen.compile_text(text, engine="numpy", consts=required(text))
    dims = (kernel.attention.head_dim_qk or 8, kernel.attention.head_dim_v or 8)
    assert kernel.render("sm_80", dtype="bf16", head_dim=dims).source


def required(text: str) -> dict[str, Any]:
    """A value for each const that the text leaves to the caller."""
    return dict.fromkeys(re.findall(r"const\s+(\w+)\s*:\s*int\s*$", text, re.MULTILINE), 2)


@given(mutated())
@settings(max_examples=250, suppress_health_check=list(HealthCheck))
def test_mutated_texts(text: str) -> None:
    happened, _ = through_everything(text)
    event(happened)


@given(mutated())
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_what_is_accepted_compiles(text: str) -> None:
    """No text that the checker lets through is refused by the C++ compiler."""
    _, rendered = through_everything(text)
    if rendered is not None:
        name = f"{rendered.program.attention.name}.cu"
        compile_cuda(rendered.source, name=name, target=targets.get("sm_80"), emit="ptx")


PLACES = (
    "score s + ({})", "mask ({}) > 0", "mask {}", "scale ({})", "let x = {}", "const c = {}",
    "const c : float = {}", "param c : float = {}", "param c : float = 1.0 where c < {}",
    "param c : int = 1 where {} <= c", "length kv = {}", "weights softmax(sink = {})",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_every_piece_in_every_place(place: str) -> None:
    for piece in (*PIECES, *NUMBERS):
        line = place.format(piece)
        through_everything(f"attention a {{\n    dtype fp32\n    head_dim 8\n    {line}\n}}\n")
