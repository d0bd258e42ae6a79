"""What the cases say of the language: cut texts, deep nesting, constants, names (O39 to O41)."""

from __future__ import annotations

import time
import traceback
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import pytest

import attngen
from attngen import targets
from attngen.codegen import render as render_module
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines.cuda_engine import compile_rendered
from attngen.kernels import forward_simt


@pytest.fixture(scope="module", params=("numpy", "cpu"))
def engine(request: pytest.FixtureRequest, host_compiler: None) -> Any:
    return request.param


# ---- O39: errors at the end of a text ----------------------------------------------------

CUT = {
    "an operator": "attention a {\n    mask kv <=",
    "a bracket three lines above": "attention a {\n    mask (kv\n        <= q\n        and q",
    "a bracket of a call": "attention a {\n    score softcap(s,",
    "a keyword": "attention a {\n    mask",
    "the name": "attention",
    "the block": "attention a {\n    mask kv <= q\n",
    "nothing": "",
    "a comment": "# nothing here\n",
    "a comment without an end": "# nothing here",
}


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("indent", ["    ", "\t"], ids=["blanks", "tabs"])
@pytest.mark.parametrize("cut", CUT)
def test_a_truncated_text(cut: str, indent: str, ends: str) -> None:
    text = CUT[cut].replace("    ", indent).replace("\n", ends)
    start = time.perf_counter()
    with pytest.raises(AttnError) as caught:
        attngen.compile_text(text, name="cut.attn")
    assert time.perf_counter() - start < 1
    for error in caught.value.diagnostics:
        assert error.span is not None
        assert 0 <= error.span.start <= error.span.end <= len(text)
        assert error.span.first.line >= 1
        assert error.span.first.column >= 1
    shown = str(caught.value)
    assert "cut.attn:" in shown
    for internal in ("$END", "_NL", "LPAR", "RPAR", "Token("):
        assert internal not in shown
    if "bracket" in cut:
        notes = [note for error in caught.value.diagnostics for note in error.notes()]
        assert any(note.span is not None and note.span.text == "(" for note in notes)


def test_a_last_line_without_an_end_is_complete() -> None:
    text = "attention a {\n    mask kv <= qpos\n}\n"
    for same in (text.rstrip(), text.replace("\n", "\r\n"), text.replace("    ", "\t")):
        attngen.compile_text(same)


# ---- O40: nesting ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [300, 12000])
@pytest.mark.parametrize(
    ("before", "core", "after"),
    [
        ("(", "kv <= q", ")"),
        ("not ", "kv <= q", ""),
        ("", "kv", " + 1"),
        ("", "kv <= q", " or q == 0"),
    ],
    ids=["brackets", "not", "sum", "or"],
)
def test_depth_ends_in_an_answer_or_a_clear_error(
    depth: int, before: str, core: str, after: str
) -> None:
    mask = before * depth + core + after * depth + (" <= q" if core == "kv" else "")
    text = f"attention a {{\n    mask {mask}\n}}\n"
    if before == "(" or ("or" in after and depth < 12000):
        attngen.compile_text(text)
        return
    with pytest.raises(AttnError, match=r"nested too deeply|operations"):
        attngen.compile_text(text)


# ---- O41: constants and names ------------------------------------------------------------


def test_integers_divide_truly(engine: Any) -> None:
    text = "attention a {\n    score 0 * s + 5 / 2 + 1 / 4 + 7 // 2 - 0.0\n    output o, lse\n}\n"
    x = np.zeros((1, 1, 1, 8), np.float32)
    _, lse = attngen.compile_text(text, engine=engine)(x, x, x)
    assert lse[0, 0, 0] == np.float32(5.75)


@pytest.mark.parametrize(
    "constant",
    ["3.4028234e38", "-3.4028234e38", "1e-45", "1e22", "-0.0", "1e-38", "16777217", "0.1"],
)
def test_a_constant_is_the_float32_that_it_names(engine: Any, constant: str) -> None:
    text = f"attention a {{\n    score 0.0 * s + {constant}\n    output row_max, o\n}}\n"
    x = np.zeros((1, 1, 1, 8), np.float32)
    row_max, _ = attngen.compile_text(text, engine=engine)(x, x, x)
    assert row_max[0, 0, 0] == np.float32(float(constant))


NAMES = (
    "float", "int", "acc", "threadIdx", "min", "K", "m_i", "class", "template", "register", "asm",
    "half", "row", "args", "Args", "kTileQ", "ag_load", "shared", "state", "p", "l", "m", "o",
    "lse", "i", "nullptr", "operator", "union", "__global__", "main", "std", "Shared",
)  # fmt: skip


def is_taken(declaration: str, name: str) -> bool:
    """Whether a name may be declared; a refusal must be about the name."""
    try:
        attngen.compile_text(f"attention a {{\n    {declaration}\n}}\n")
    except AttnError as refused:
        error = refused
    else:
        return True
    assert f"`{name}`" in str(error)
    assert error.diagnostics[0].code in ("A204", "A632")
    return False


def test_any_name_is_taken_or_refused_but_no_compiler_complains(host_compiler: None) -> None:
    tensors = [n for n in NAMES if is_taken(f"tensor {n} : float[Hq]", n)]
    params = [n for n in NAMES if is_taken(f"param {n} : float", n)]
    lets = [n for n in NAMES if is_taken(f"let {n} = kv * 2", n)]
    for taken in (tensors, params, lets):
        assert {"float", "int", "acc", "threadIdx", "K", "m_i"} <= set(taken)
        assert "min" not in taken
    blocks = {
        "float": [
            *(f"tensor {name} : float[Hq]" for name in tensors),
            f"score s + {' + '.join(f'{name}[h]' for name in tensors)}",
        ],
        "operator": [
            *(f"param {name} : float = 1.0" for name in params),
            f"score s + {' + '.join(params)}",
        ],
        "main": [
            *(f"let {name} = kv * 2" for name in lets),
            f"score s + {' + '.join([*lets, *lets])}",
        ],
    }
    x = np.zeros((1, 1, 2, 8), np.float32)
    for name, lines in blocks.items():
        text = "\n    ".join((f"attention {name} {{", *lines)) + "\n}\n"
        kernel = attngen.compile_text(text, engine="cpu")
        given = dict.fromkeys(tensors, np.ones(1, np.float32)) if name == "float" else {}
        assert kernel(x, x, x, **given).shape == x.shape
        compile_rendered(kernel.render("sm_90a", dtype="fp32", head_dim=8))


EVERYTHING = """
attention everything {
    dtype fp16
    head_dim 16
    param cap : float = 30.0
    tensor doc : int32[B, Skv]
    tensor sink : float[Hq]
    tensor ql : int32[B]
    length q = ql[b], kv = ql[b]
    let near = abs(q - kv) + abs(q - kv) // 2
    scale 0.25
    score softcap(s, cap) + near
    mask kv <= qpos and doc[b, kv] == doc[b, kv // 2]
    weights softmax(sink = sink[h])
    output o, lse, row_max
}
"""


def contexts() -> list[forward_simt.Context]:
    """Contexts that use every member between them."""
    schedules = ("passes fused", "loop kv, q; normalize every_tile", "passes three")
    kernels = [
        attngen.compile_text(EVERYTHING, schedule=f"{lines}; kernel forward_simt")
        for lines in schedules
    ]
    programs = [kernel.render("sm_80").program for kernel in kernels]
    return [forward_simt.FAMILY.context(program, targets.get("sm_80")) for program in programs]


@pytest.mark.parametrize("missing", [field.name for field in fields(forward_simt.Context)])
def test_a_template_without_one_of_its_variables_raises(missing: str) -> None:
    raised = []
    for context in contexts():
        given = {f.name: getattr(context, f.name) for f in fields(context) if f.name != missing}
        try:
            render_module.render("forward_simt.cu.j2", SimpleNamespace(**given), name="x")
        except jinja2.UndefinedError as error:
            raised.append(error)
    assert raised
    for error in raised:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        assert missing in str(error)
        assert any(name.endswith(".cu.j2") for name in files)
