"""forward_simt's text: what its template takes, that it is stable, and where its errors point."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import traceback
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from jinja2 import meta, nodes

import attngen
from attngen import targets
from attngen.backend.nvrtc import compile_cuda
from attngen.codegen.render import _environment, render
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.schedule import Schedule
from attngen.ir.types import FLOATING
from attngen.kernels import all_families
from attngen.kernels.forward_simt import FAMILY, Context
from attngen.passes.pipeline import run_passes
from attngen.passes.specialize import specialize
from attngen.resources import template_names, template_source
from attngen.targets import all_targets

from .family import every_variant

ROOT = Path(__file__).resolve().parents[2]
TEXT = """attention everything {
    dtype    fp16
    head_dim qk = 8, v = 12
    param    cap : float = 30.0
    tensor   doc : int32[B, Skv]
    tensor   sinks : float[Hq]
    tensor   ql : int32[B]
    tensor   kl : int32[B]
    length   q = ql[b], kv = kl[b]
    scale    0.5 + cap / 100
    score    where(doc[b, max(kv, 0)] > 3,
                 s, -s)
    score    softcap(s, cap)
    mask     kv >= 0 or where(doc[b, kv] == h,
                 doc[b, kv] > 2, true)
    mask     kv - qpos <= 3
    weights  softmax(sink = sinks[h])
    output   o, lse, row_max
}
"""
SCHEDULE = "kernel forward_simt; loop kv, q; normalize every_tile; tile q = 8, kv = 16"


def a_kernel(text: str = TEXT, schedule: str = SCHEDULE) -> attngen.Kernel:
    return attngen.compile_text(text, name="everything.attn", engine="cpu", schedule=schedule)


def a_context(text: str = TEXT, schedule: str = SCHEDULE, **options: Any) -> Context:
    program = a_kernel(text, schedule).render("sm_80").program
    return FAMILY.context(program, targets.get("sm_80"), **options)


# ---- the context -------------------------------------------------------------------------


def members_of_c(file: str) -> set[str]:
    """The names `c.<name>` in a template's syntax tree."""
    tree = _environment().parse(template_source(file))
    return {
        node.attr
        for node in tree.find_all(nodes.Getattr)
        if isinstance(node.node, nodes.Name) and node.node.name == "c"
    }


UNUSED = {"forward_wgmma": {"tile_q"}}
"""Shared fields that a family needs not: its rows are 64 for each warp group."""


@pytest.mark.parametrize("name", all_families())
def test_fields_are_the_names_that_the_template_uses(name: str) -> None:
    family = all_families()[name]
    module = sys.modules[type(family).__module__]
    used = set().union(*(members_of_c(f) for f in family.templates if f.endswith(".j2")))
    declared = {field.name for field in fields(module.Context)}
    unused = declared - used - UNUSED.get(name, set())
    assert used <= declared, f"{used - declared} are no fields"
    assert not unused, f"{unused} are used nowhere"


@pytest.mark.parametrize("file", sorted({f for x in all_families().values() for f in x.templates}))
def test_a_template_takes_nothing_but_its_context(file: str) -> None:
    if file.endswith(".j2"):
        tree = _environment().parse(template_source(file))
        # What is set inside of an `if` counts as undeclared.
        own = {a.target.name for a in tree.find_all(nodes.Assign)}  # type: ignore[attr-defined]
        free = meta.find_undeclared_variables(tree) - own
        assert free == (set() if "/" in file else {"c"})


@pytest.mark.parametrize("name", [field.name for field in fields(Context)])
def test_without_one_field_rendering_fails_and_says_where(name: str) -> None:
    whole = a_context(is_checked=True)
    known = {f.name: getattr(whole, f.name) for f in fields(Context)}
    assert render(FAMILY.templates[0], SimpleNamespace(**known), name="x")
    del known[name]
    with pytest.raises(jinja2.UndefinedError, match=rf"'{name}'") as caught:
        render(FAMILY.templates[0], SimpleNamespace(**known), name="x")
    frames = traceback.extract_tb(caught.value.__traceback__)
    templates = [f for f in frames if f.filename.endswith(".cu.j2")]
    assert templates, "the traceback shows no template"
    assert all(Path(f.filename).is_file() and f.lineno for f in templates)


def test_every_template_has_a_family_and_every_family_a_template() -> None:
    of_families = {f"{name}.cu.j2" for name in all_families()}
    assert {file for file in template_names() if "/" not in file} == of_families
    folder = ROOT / "attngen" / "kernels"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "base", "tensor_cores"}
    assert modules == set(all_families())


# ---- the same text every time ------------------------------------------------------------

DIGESTS = """
import hashlib, sys, warnings
import attngen
from tests.kernels.family import every_variant
from tests.kernels.test_forward_simt import a_kernel

warnings.simplefilter("ignore")
rendered = [v.render("sm_80") for v in every_variant()[::5]] + [a_kernel().render("sm_90a")]
for path in sys.argv[1:]:
    kernel = attngen.compile(path, engine="cpu", schedule="kernel forward_simt; stages 1")
    declared = kernel.attention
    dtype = declared.dtype.name if declared.dtype else "bf16"
    dims = (declared.head_dim_qk or 64, declared.head_dim_v or 64)
    rendered.append(kernel.render("sm_90a", dtype=dtype, head_dim=dims))
for one in rendered:
    print(one.program.attention.name, hashlib.sha256(one.source.encode()).hexdigest())
"""


def test_bytes_do_not_depend_on_the_process() -> None:
    """Two processes, in which sets and dicts of strings have another order."""
    examples = [str(p) for p in sorted((ROOT / "examples").glob("*.attn"))[::4]]
    answers = set()
    for seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS, *examples],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        answers.add(done.stdout)
    (answer,) = answers
    assert len(answer.splitlines()) == len(every_variant()[::5]) + 1 + len(examples)
    here = hashlib.sha256(a_kernel().render("sm_90a").source.encode()).hexdigest()
    assert here in answer


def test_the_text_names_no_machine() -> None:
    source = a_kernel().render("sm_80").source
    assert str(ROOT) not in source
    assert str(Path.home()) not in source
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", source)


# ---- errors of the C++ compiler ----------------------------------------------------------


def lines_of(source: str, function: str) -> tuple[int, int]:
    """First and last line (from 0) of a device function's body."""
    lines = source.split("\n")
    pattern = rf"(AG_DEVICE|AG_NOINLINE) \w+ {function}\("
    start = next(i for i, line in enumerate(lines) if re.match(pattern, line))
    return start + 1, next(i for i in range(start, len(lines)) if lines[i] == "}")


def compile_with_fault(source: str, at: int, fault: str) -> str:
    lines = source.split("\n")
    lines[at] = fault
    with pytest.raises(AttnError) as caught:
        compile_cuda("\n".join(lines), name="everything.cu", target=targets.get("sm_80"))
    return str(caught.value)


STATEMENTS = {
    "mask": "mask     kv >= 0",
    "score_line1": "score    where(",
    "score_line2": "score    softcap",
    "attention_scale": "scale    ",
    "attention_sink": "weights  ",
    "query_length": "length   ",
    "key_length": "length   ",
}


@pytest.mark.parametrize("function", STATEMENTS)
def test_an_error_points_at_the_line_of_the_attn_file(function: str) -> None:
    source = a_kernel().render("sm_80").source
    line = 1 + next(
        i
        for i, text in enumerate(TEXT.split("\n"))
        if text.strip().startswith(STATEMENTS[function])
    )
    first, last = lines_of(source, function)
    wrong = [i for i in range(first, last) if source.split("\n")[i].lstrip().startswith("return ")]
    message = compile_with_fault(source, wrong[-1], "    return not_declared;")
    assert f'everything.attn({line}): identifier "not_declared" is undefined' in message


def test_an_error_behind_lets_points_at_the_line_of_the_formula() -> None:
    text = TEXT.replace("    scale", "    let near = exp(kv - qpos)\n    scale")
    text = text.replace("s, -s)", "near, near * s)")
    source = a_kernel(text).render("sm_80").source
    at, last = lines_of(source, "score_line1")
    assert last - at == 4, "a `#line`, the let, the formula, a `#line`"
    message = compile_with_fault(source, last - 2, "    return not_declared;")
    assert 'everything.attn(12): identifier "not_declared" is undefined' in message


def test_an_error_elsewhere_points_at_the_generated_text() -> None:
    """Behind the user's lines too: the numbering goes on where it was."""
    source = a_kernel().render("sm_80").source
    for function in ("place_head", "load_query", "finalize"):
        at, _ = lines_of(source, function)
        message = compile_with_fault(source, at, "    not_declared();")
        assert f'everything.cu({at + 1}): identifier "not_declared" is undefined' in message


# ---- what fits ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", all_targets(), ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", FLOATING)
def test_every_head_dim_fits_every_target(dtype: str, target: Any) -> None:
    attention = a_kernel("attention a {\n}\n", "passes fused").attention
    for dims in [*((d, d) for d in range(1, 257, 3)), (256, 256), (256, 1), (1, 256), (192, 128)]:
        fixed = run_passes(specialize(attention, FLOATING[dtype], *dims))
        assert FAMILY.reasons_against(fixed, Schedule(), target) == ()
        complete = FAMILY.complete(fixed, Schedule(), target)
        assert sum(a.bytes for a in FAMILY.shared_arrays(fixed, complete)) <= (
            target.shared_bytes_per_block
        )
        assert FAMILY.reasons_against(fixed, complete, target) == ()


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("tile q = 6", "`tile q` must be a multiple of 4 up to 128, not 6"),
        ("tile q = 132", "`tile q` must be a multiple of 4 up to 128, not 132"),
        ("tile kv = 12", "`tile kv` must be a multiple of 8 up to 1024, not 12"),
        ("stages 2", "it has no pipeline, so `stages` must be 1"),
        ("splits 4", "it does not split keys over blocks"),
        ("tile q = 16; warps 8", "a query tile of 16 rows has 4 warps"),
        ("tile q = 128, kv = 512", "shared memory: query 4.5 KiB + key "),
    ],
)
def test_what_it_cannot_do_is_said(schedule: str, reason: str) -> None:
    text = "attention a {\n    head_dim 8\n    dtype fp32\n}\n"
    with pytest.raises(AttnError, match=re.escape(reason)):
        a_kernel(text, f"kernel forward_simt; {schedule}").render("sm_80")
