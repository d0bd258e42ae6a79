"""What a `Kernel` is beside its calls: compilations, `prepare`, `render`, threads, imports."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attngen
from attngen import api, targets
from attngen.codegen.arguments import layout_arguments
from attngen.cpu import build
from attngen.cpu.errors import NoCppCompiler
from attngen.diagnostics.diagnostic import AttnError

from .texts import FULL, HQ, PLAIN, SINK, SKV, SQ, B, D, catch, draw, make_qkv, make_tensors

DECLARED = PLAIN.replace("mask", "dtype fp16\n    head_dim qk = 8, v = 4\n    mask")


# ---- what compiles -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_sizes_strides_and_params_never_compile(engine: Any, host_compiler: None) -> None:
    kernel = attngen.compile_text(FULL, engine=engine)
    assert kernel.compilations == 0
    sizes = ((1, 1, 1, 1, 1), (2, 4, 2, 9, 21), (1, 6, 3, 40, 50), (3, 2, 2, 0, 5), (1, 1, 1, 0, 0))
    for batch, Hq, Hkv, Sq, Skv in sizes:
        q, k = draw(batch, Hq, Sq, D), draw(batch, Hkv, Skv, D)
        doc, bias = np.zeros((batch, Skv), np.int32), draw(Sq, Skv)
        for cap in (1.0, 50.0):
            kernel(q, k, k[:, :, ::-1], doc=doc, bias=bias, cap=cap)
            kernel.partial(q, k, k, doc=doc, bias=bias, cap=cap, kv_range=(0, Skv // 2))
    assert kernel.compilations == 1


def test_dtypes_and_head_dims_compile() -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    for count, dtype in enumerate((np.float32, np.float16, ml_dtypes.bfloat16), start=1):
        for _ in range(2):
            kernel(*make_qkv(dtype))
            assert kernel.compilations == count
    kernel(*make_qkv(Dv=5))
    kernel(draw(1, 1, 2, 7), draw(1, 1, 2, 7), draw(1, 1, 2, 8))
    assert kernel.compilations == 5
    assert [program.attention.head_dim_v for program in kernel.programs] == [8, 8, 8, 5, 8]


def test_a_const_makes_another_kernel() -> None:
    text = "attention a {\n    const W : int = 3\n    mask kv > qpos - W\n    output o, lse\n}\n"
    q, k, v = make_qkv()
    found = {}
    for W in (None, 1, 3, 100):
        consts = {} if W is None else {"W": W}
        kernel = attngen.compile_text(text, consts=consts, engine="numpy")
        found[W] = kernel(q, k, v)[1]
        assert kernel.compilations == 1
        error = catch(kernel, q, k, v, W=2)
        assert error.message() == "`a` has no tensor or param `W`"
    assert np.array_equal(found[None], found[3])
    assert not np.array_equal(found[1], found[3])
    assert not np.array_equal(found[100], found[3])


# ---- prepare and render ------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_prepare_leaves_nothing_to_compile(engine: Any, host_compiler: None) -> None:
    kernel = attngen.compile_text(PLAIN, engine=engine)
    kernel.prepare(dtype="fp32", head_dim=D)
    assert kernel.compilations == 1
    kernel(*make_qkv())
    assert kernel.compilations == 1
    kernel.prepare(dtype="fp32", head_dim=(D, D))
    assert kernel.compilations == 1


def test_prepare_and_render_need_what_is_open() -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    for method in (kernel.prepare, kernel.render):
        assert "`dtype`" in catch(method, head_dim=8).message()
        assert "`head_dim`" in catch(method, dtype="fp16").message()
        assert catch(method, dtype="fp64", head_dim=8).code == "A234"
        assert catch(method, dtype="fp16", head_dim=257).code == "A235"
        assert catch(method, dtype="fp16", head_dim=0).code == "A235"
        assert catch(method, dtype="fp16", head_dim="8").code == "A632"
    assert catch(kernel.render, "sm_1", dtype="fp16", head_dim=8).code == "A491"


def test_what_was_declared_or_compiled_for_holds() -> None:
    kernel = attngen.compile_text(DECLARED, engine="numpy")
    kernel.prepare()
    kernel.prepare(dtype="fp16", head_dim=(8, 4))
    assert catch(kernel.prepare, dtype="bf16").code == "A237"
    assert catch(kernel.prepare, head_dim=8).code == "A237"
    kernel = attngen.compile_text(PLAIN, dtype="bf16", head_dim=16, engine="numpy")
    assert kernel.render().program.attention.head_dim_qk == 16
    assert "dtype=bf16" in catch(kernel.render, dtype="fp16").message()
    assert "head_dim=(16, 16)" in catch(kernel.render, head_dim=8).message()
    assert catch(kernel, *make_qkv()).message() == "argument `q` has dtype fp32"
    assert kernel.compilations == 0


@pytest.mark.parametrize("target", targets.all_targets(), ids=lambda target: target.name)
def test_render_names_its_target(target: targets.Target) -> None:
    kernel = attngen.compile_text(FULL, engine="numpy")
    first, second = (kernel.render(target.name, dtype="fp32", head_dim=D) for _ in range(2))
    assert first.target is target
    assert f"target    {target.name}" in first.source
    assert first.source == second.source
    assert "#include" not in first.source
    attention = first.program.attention
    assert attention.dtype is not None
    assert first.arguments == layout_arguments(attention, attention.dtype)
    assert kernel.compilations == 0


# ---- the engine that is chosen -----------------------------------------------------------


def test_arrays_on_the_cpu_run_there_with_a_word_said(
    monkeypatch: pytest.MonkeyPatch, host_compiler: None
) -> None:
    monkeypatch.setattr(api, "_said", set())
    right = attngen.compile_text(PLAIN, engine="cpu")(*make_qkv())
    kernel = attngen.compile_text(PLAIN)
    with pytest.warns(UserWarning, match="CUDA text runs there") as caught:
        found = [kernel(*make_qkv()) for _ in range(3)]
    assert ["runs there" in str(warning.message) for warning in caught].count(True) == 1
    assert all(np.array_equal(each, right) for each in found)


def test_without_a_cpp_compiler_numpy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise AttnError(NoCppCompiler(None, "g++"))

    monkeypatch.setattr(build, "find_compiler", fail)
    monkeypatch.setattr(api, "_said", set())
    right = attngen.compile_text(PLAIN, engine="numpy")(*make_qkv())
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert np.array_equal(attngen.compile_text(PLAIN)(*make_qkv()), right)
    assert catch(attngen.compile_text(PLAIN, engine="cpu"), *make_qkv()).code == "A541"


def test_the_cpu_runs_the_text_of_the_target_asked_for(host_compiler: None) -> None:
    kernel = attngen.compile_text(PLAIN, engine="cpu", arch="sm_90a")
    kernel(*make_qkv())
    (compiled,) = kernel._compiled.values()
    assert compiled.rendered is not None
    assert compiled.rendered.target.name == "sm_90a"


def test_a_note_about_the_schedule_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, host_compiler: None
) -> None:
    monkeypatch.setattr(api, "_said", set())
    kernel = attngen.compile_text(PLAIN, engine="cpu", schedule="tile q = 3")
    with pytest.warns(UserWarning, match="`tile q` must be a multiple of 4"):
        kernel(*make_qkv())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel(*make_qkv())


# ---- threads -----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_threads_share_a_kernel(
    engine: Any, host_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))  # so that all build at once
    kernel = attngen.compile_text(SINK, engine=engine)
    sinks = draw(HQ)
    right = attngen.compile_text(SINK, engine="numpy")
    start = threading.Barrier(6)

    def work(thread: int) -> bool:
        q, k = draw(B, HQ, SQ, D, seed=thread), draw(B, 2, SKV, D, seed=10 + thread)
        expected = right(q, k, k, sink=sinks)
        start.wait(60)
        for _ in range(5):
            whole = kernel(q, k, k, sink=sinks)
            state = kernel.partial(q, k, k, sink=sinks).finalize()
            for found, right_one in zip((*whole, *state), (*expected, *expected), strict=True):
                if not np.allclose(found, right_one, atol=1e-5):
                    return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    assert kernel.compilations == 1
    if engine == "cpu":
        assert len(list((tmp_path / "host").iterdir())) == 1


# ---- imports -----------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
HEAVY = ("numpy", "cupy", "torch", "ml_dtypes", "lark", "jinja2", "cuda", "islpy", "rich", "click")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(done.stdout.split()) & set(HEAVY)


def test_importing_attngen_imports_nothing_heavy() -> None:
    assert loaded_by("import attngen") == set()
    assert loaded_by("import attngen; attngen.__version__, dir(attngen)") == set()


def test_defining_a_kernel_touches_no_gpu_library() -> None:
    define = f"import attngen; k = attngen.compile_text({FULL!r}); k.attention"
    assert loaded_by(define) & {"cupy", "torch", "cuda"} == set()
    run = "\n".join(
        (
            "import attngen, numpy as np",
            f"k = attngen.compile_text({PLAIN!r}, engine='numpy')",
            "x = np.zeros((1, 1, 2, 8), np.float32); k(x, x, x); k.partial(x, x, x)",
        )
    )
    assert loaded_by(run) & {"cupy", "torch", "cuda"} == set()


def test_every_public_name_is_there() -> None:
    assert set(attngen.__all__) <= set(dir(attngen))
    for name in attngen.__all__:
        assert getattr(attngen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        attngen.nonsense  # noqa: B018


def test_a_file_is_a_kernel(tmp_path: Path) -> None:
    path = tmp_path / "plain.attn"
    path.write_text(PLAIN)
    for given in (path, str(path)):
        kernel = attngen.compile(given, engine="numpy", schedule="tile q = 8; passes two")
        assert kernel.name == "plain"
        assert kernel(*make_qkv()).shape == (B, HQ, SQ, D)
    tensors = attngen.compile_text(FULL, engine="numpy")
    assert tensors(*make_qkv(), **make_tensors())[0].shape == (B, HQ, SQ, D)
