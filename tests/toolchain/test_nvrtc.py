"""CUDA text to machine code on a machine without a GPU; every failure is one short error."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attngen import targets
from attngen.backend import nvrtc
from attngen.backend.errors import CompilerMessage, CudaCompileError, HeaderMissing
from attngen.backend.nvrtc import (
    Outcome,
    Spills,
    compile_cuda,
    errors_from_log,
    load_nvrtc,
    nvrtc_version,
    spills_from_log,
)
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Source
from tests.toolchain.fake_cuda import FakeCompiler
from tests.toolchain.tiny_kernel import KERNEL, PRELUDE, SOURCE

SM_80 = targets.get("sm_80")


def catch(**arguments: object) -> Diagnostic:
    with pytest.raises(AttnError) as caught:
        compile_cuda(**{"name": "case", "target": SM_80, **arguments})  # type: ignore[arg-type]
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


@pytest.mark.parametrize("target", targets.all_targets(), ids=lambda target: target.name)
def test_the_prelude_compiles_for_every_target(target: targets.Target) -> None:
    compiled = compile_cuda(SOURCE, name="tiny", target=target)
    assert compiled.binary[:4] == b"\x7fELF"
    assert compiled.target == target.name
    assert compiled.compiler_version.startswith("{}.{}".format(*nvrtc_version()))
    assert spills_from_log(compiled.log) == {KERNEL: Spills(0, 0)}
    assert "warning" not in compiled.log


def test_the_same_input_gives_the_same_bytes() -> None:
    first = compile_cuda(SOURCE, name="one", target=SM_80)
    assert compile_cuda(SOURCE, name="another", target=SM_80) == first
    with ThreadPoolExecutor(2) as pool:
        again = pool.map(lambda _: compile_cuda(SOURCE, name="x", target=SM_80), range(4))
        assert all(compiled == first for compiled in again)


def test_ptx_is_made_only_when_asked_for() -> None:
    compiled = compile_cuda(SOURCE, name="tiny", target=targets.get("sm_90a"), emit="ptx")
    assert b".target sm_90a" in compiled.binary
    assert not compiled.binary.endswith(b"\0")


def test_products_and_sums_are_not_fused() -> None:
    text = 'extern "C" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }'
    compiled = compile_cuda(text, name="f", target=SM_80, emit="ptx")
    assert b"fma.rn.f32" not in compiled.binary


def test_options_reach_the_compiler() -> None:
    text = 'static_assert(SIZE == 3, "size");\n'
    compile_cuda(text, name="x", target=SM_80, options=("--define-macro=SIZE=3",))
    error = catch(source=text, options=("--define-macro=SIZE=4",))
    assert isinstance(error, CudaCompileError)
    assert "static assertion failed" in error.first


def test_an_error_points_at_the_users_line() -> None:
    spec = Source("spec.attn", "attention a {\n    mask  kv <= undefined_name\n}\n")
    text = (
        'extern "C" __global__ void f(int* x) {\n'
        "    int first = second;\n"
        '#line 2 "spec.attn"\n'
        "    x[0] = undefined_name;\n"
        "}\n"
    )
    error = catch(source=text)
    assert isinstance(error, CudaCompileError)
    assert error.code == "A503"
    assert error.messages == (
        CompilerMessage("kernel.cu", 2, 'identifier "second" is undefined'),
        CompilerMessage("spec.attn", 2, 'identifier "undefined_name" is undefined'),
    )
    assert error.span is None
    located = error.locate_in(spec)
    assert located.span is not None
    assert located.span.text == "mask  kv <= undefined_name"
    assert located.label_text() == 'identifier "undefined_name" is undefined'
    assert [note.label for note in located.notes()] == [
        'kernel.cu(2): identifier "second" is undefined'
    ]
    other = Source("other.attn", "")
    assert error.locate_in(other).span is None
    assert error.locate_in(Source("spec.attn", "one line")).span is None


def test_many_errors_are_shortened_and_the_log_is_kept() -> None:
    names = [f"unknown_{i}" for i in range(9)]
    text = "__device__ void f() { " + " ".join(f"{name} = 0;" for name in names) + " }"
    error = catch(source=text)
    assert isinstance(error, CudaCompileError)
    assert len(error.messages) == 9
    assert [note.label for note in error.notes()][-1] == "and 5 more in the compiler's log"
    assert all(name in error.log for name in names)


def test_an_error_of_the_assembler_is_read_too() -> None:
    error = catch(source='extern "C" __global__ void f() { asm volatile("no.such;"); }')
    assert isinstance(error, CudaCompileError)
    assert error.first.startswith("ptxas: ")
    assert all("aborted" not in message.text for message in error.messages)


LOG = """\
kernel.cu(3): warning #177-D: variable "q" was declared but never referenced
     int q;
         ^

C:/a dir/spec.attn(12): error: expected a ";"
  x = 1
      ^
ptxas application ptx input, line 21; error   : Unknown symbol 'a'
ptxas fatal   : (C7907) Internal compiler error.
ptxas fatal   : Ptx assembly aborted due to errors
2 errors detected in the compilation of "kernel.cu".
"""


def test_a_log_is_read_line_by_line() -> None:
    assert errors_from_log(LOG) == (
        CompilerMessage("C:/a dir/spec.attn", 12, 'expected a ";"'),
        CompilerMessage(None, None, "ptxas: Unknown symbol 'a' (line 21 of the PTX)"),
        CompilerMessage(None, None, "ptxas: (C7907) Internal compiler error."),
    )
    assert errors_from_log("") == ()


def test_spills_are_read_from_the_log() -> None:
    text = (
        'extern "C" __global__ void __launch_bounds__(1024) spilling(float* x, int k) {\n'
        "    float a[120];\n"
        "    for (int i = 0; i < 120; i++) a[i] = x[i * k];\n"
        "    __syncthreads();\n"
        "    for (int i = 0; i < 120; i++) x[i * k] = a[i] * a[(i * 7) % 120];\n"
        "}\n"
    )
    spills = spills_from_log(compile_cuda(text, name="x", target=SM_80).log)["spilling"]
    assert spills.store_bytes > 0
    assert spills.load_bytes > 0


# ---- O32: headers ------------------------------------------------------------------------


def test_the_prelude_needs_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "#include" not in PRELUDE
    for variable in ("CUDA_PATH", "CUDA_HOME", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    compile_cuda(PRELUDE, name="prelude", target=SM_80)


def test_a_missing_header_is_one_short_error() -> None:
    error = catch(source="#include <cuda_fp16.h>\n", options=("--include-path=/no/such/folder",))
    assert isinstance(error, HeaderMissing)
    assert error.code == "A504"
    assert error.header == "cuda_fp16.h"
    assert error.label_text() == "searched: /no/such/folder"
    assert "open source file" in error.log
    assert "no include path" in (catch(source="#include <a.h>\n").label_text() or "")


# ---- O33: the compiler does not know the GPU ---------------------------------------------


@pytest.mark.parametrize("name", ["sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"])
def test_an_old_compiler_is_refused_before_compiling(name: str) -> None:
    compiler = FakeCompiler(archs=(70, 75, 80))
    compiler.version_parts = (11, 0)
    error = catch(source="", target=targets.get(name), compiler=compiler)
    assert error.code == "A502"
    assert error.message() == f"NVRTC 11.0 cannot compile for {name}"
    assert error.label_text() == "it supports sm_70, sm_75, sm_80"
    assert compiler.runs == []


def test_a_suffixed_target_is_passed_as_it_is() -> None:
    compiler = FakeCompiler()
    compile_cuda("", name="x", target=targets.get("sm_90a"), compiler=compiler)
    assert compiler.runs[0][0] == "--gpu-architecture=sm_90a"


# ---- other failures ----------------------------------------------------------------------


def test_a_wrong_option_is_named() -> None:
    error = catch(source="", options=("--no-such-option",))
    assert error.code == "A505"
    assert "--no-such-option" in (error.label_text() or "")


def test_a_failure_of_the_compiler_itself_is_told_apart() -> None:
    compiler = FakeCompiler()
    compiler.outcome = Outcome("NVRTC_ERROR_OUT_OF_MEMORY", b"", "")
    error = catch(source="", compiler=compiler)
    assert error.code == "A506"
    assert "NVRTC_ERROR_OUT_OF_MEMORY" in error.message()
    compiler.outcome = Outcome("NVRTC_ERROR_COMPILATION", b"", "something unreadable\n")
    error = catch(source="", compiler=compiler)
    assert error.code == "A503"
    assert error.label_text() == "something unreadable"


@pytest.fixture
def unloaded() -> object:
    load_nvrtc.cache_clear()
    yield
    load_nvrtc.cache_clear()


def test_missing_bindings_are_one_short_error(
    monkeypatch: pytest.MonkeyPatch, unloaded: object
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    error = catch(source="")
    assert error.code == "A501"
    assert "cuda.bindings" in error.message()
    assert error.hint_text() == ("pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'")


def test_a_missing_library_is_one_short_error(
    monkeypatch: pytest.MonkeyPatch, unloaded: object
) -> None:
    from cuda.bindings import nvrtc as bindings

    def fail() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nand more lines')

    monkeypatch.setattr(bindings, "nvrtcVersion", fail)
    with pytest.raises(AttnError) as caught:
        nvrtc_version()
    (error,) = caught.value.diagnostics
    assert error.code == "A501"
    assert "libnvrtc" in error.message()
    assert error.label_text() == 'Failure finding "libnvrtc.so.13"'


def test_programs_are_destroyed_also_after_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as bindings

    compile_cuda("", name="x", target=SM_80)  # asks for the build number as well, once
    counts = {"created": 0, "destroyed": 0}
    create, destroy = bindings.nvrtcCreateProgram, bindings.nvrtcDestroyProgram

    def count_create(*arguments: object) -> object:
        counts["created"] += 1
        return create(*arguments)

    def count_destroy(*arguments: object) -> object:
        counts["destroyed"] += 1
        return destroy(*arguments)

    monkeypatch.setattr(bindings, "nvrtcCreateProgram", count_create)
    monkeypatch.setattr(bindings, "nvrtcDestroyProgram", count_destroy)
    compile_cuda("", name="x", target=SM_80)
    catch(source="wrong")
    catch(source="", options=("--wrong",))
    assert counts == {"created": 3, "destroyed": 3}
    assert nvrtc.describe_compiler(load_nvrtc()).startswith("NVRTC ")


# ---- the build number --------------------------------------------------------------------


def test_the_build_is_asked_for_once_per_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cuda.bindings import nvrtc as bindings

    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ATTNGEN_CACHE", raising=False)
    asked: list[str] = []
    real = nvrtc._Nvrtc.run

    def run(self: nvrtc._Nvrtc, source: str, *rest: Any) -> nvrtc.Outcome:
        asked.append(source)
        return real(self, source, *rest)

    monkeypatch.setattr(nvrtc._Nvrtc, "run", run)
    build = nvrtc._Nvrtc(bindings).build()
    assert build.startswith(".".join(map(str, nvrtc_version())))
    assert nvrtc._Nvrtc(bindings).build() == build
    assert asked == [""]
    identify = nvrtc._identify_library
    monkeypatch.setattr(nvrtc, "_identify_library", lambda: (*(identify() or ()), "newer"))
    assert nvrtc._Nvrtc(bindings).build() == build
    assert asked == ["", ""]
    monkeypatch.setattr(nvrtc, "_identify_library", lambda: None)
    assert nvrtc._Nvrtc(bindings).build() == build
    assert asked == ["", "", ""]


def test_another_file_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cuda import pathfinder

    library = tmp_path / "libnvrtc.so"
    library.write_bytes(b"one")
    loaded = SimpleNamespace(abs_path=str(library))
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: loaded)
    first = nvrtc._identify_library()
    assert first is not None
    assert nvrtc._identify_library() == first
    library.write_bytes(b"another")
    assert nvrtc._identify_library() != first
    library.unlink()
    assert nvrtc._identify_library() is None
    loaded.abs_path = None
    assert nvrtc._identify_library() is None
