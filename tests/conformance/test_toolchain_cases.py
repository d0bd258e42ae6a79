"""What the cases say of caches, headers and shared memory, from text to cubin (O30 to O34).

`tests/toolchain` has the cache and the launcher by themselves, `tests/api/test_gpu_calls.py`
what a GPU and a compiler of another age get to see (O33).
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import resources, targets
from attngen.backend import cache
from attngen.backend.cache import CacheWarning
from attngen.backend.nvrtc import compile_cuda
from attngen.codegen import render as render_module
from attngen.compiler import Rendered
from attngen.engines import cuda_engine
from attngen.engines.cuda_engine import compile_rendered, resources_of
from attngen.oracle.dense import reference
from tests.api.texts import catch, words
from tests.toolchain.fake_cuda import FakeCompiler

# ---- O30, O31: the cache, from a text to machine code ------------------------------------

TEXTS = (
    "attention a {\n    mask kv <= qpos\n}\n",
    "attention b {\n    const W : int = 3\n    mask kv > qpos - W\n}\n",
)


SIMT = "kernel forward_simt"


def render_all() -> list[Rendered]:
    kernels = (attngen.compile_text(text, dtype="fp16", head_dim=8) for text in TEXTS)
    return [kernel.render("sm_80") for kernel in kernels]


def work_in_process(directory: str, start: Any, answers: Any) -> None:
    """Two threads compile everything for a GPU, and run it on the CPU."""
    os.environ["ATTNGEN_CACHE_DIR"] = directory
    os.environ.pop("ATTNGEN_CACHE", None)
    warnings.simplefilter("error", CacheWarning)

    def run(_: int) -> str:
        rendered = render_all()
        start.wait(120)
        found = hashlib.sha256()
        for each in rendered:
            found.update(compile_rendered(each).binary)
        x = np.ones((1, 1, 3, 8), np.float16)
        found.update(attngen.compile_text(TEXTS[0], engine="cpu")(x, x, x).tobytes())
        return found.hexdigest()

    try:
        with ThreadPoolExecutor(2) as pool:
            answers.put(list(pool.map(run, range(2))))
    except BaseException:
        answers.put([traceback.format_exc()])
        raise


def test_processes_and_threads_share_a_cold_cache(tmp_path: Path, host_compiler: None) -> None:
    context = multiprocessing.get_context("spawn")
    count = 2
    start, answers = context.Barrier(2 * count), context.Queue()
    workers = [
        context.Process(target=work_in_process, args=(str(tmp_path), start, answers))
        for _ in range(count)
    ]
    for worker in workers:
        worker.start()
    found = [answer for _ in workers for answer in answers.get(timeout=240)]
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * count, found
    assert len(set(found)) == 1
    assert len(found) == 2 * count
    folders = (tmp_path / "kernels", tmp_path / "host")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in files) == [".entry"] * len(TEXTS) + [".so"]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    """A compiler that counts, in front of an empty cache."""
    fake = FakeCompiler()
    monkeypatch.setattr(cache, "load_nvrtc", lambda: fake)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNGEN_CACHE", raising=False)
    return fake


def render_one(target: str = "sm_80") -> Rendered:
    kernel = attngen.compile_text(TEXTS[0], dtype="fp16", head_dim=8, schedule=SIMT)
    return kernel.render(target)


def test_unchanged_texts_are_compiled_once(compiler: FakeCompiler) -> None:
    first = compile_rendered(render_one())
    assert compile_rendered(render_one()) == first
    assert len(compiler.runs) == 1


@pytest.fixture
def other_templates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of the templates that the package takes for its own."""
    caches = (render_module._environment, render_module.template_digest)
    for cached in caches:
        cached.cache_clear()
    shutil.copytree(resources._CHECKOUT / "templates", tmp_path / "templates")
    shutil.copytree(resources._CHECKOUT / "grammar", tmp_path / "grammar")
    yield tmp_path / "templates"
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


def test_changed_templates_are_a_miss(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, other_templates: Path
) -> None:
    compile_rendered(render_one())
    monkeypatch.setattr(resources, "_CHECKOUT", other_templates.parent)
    template = other_templates / "forward_simt.cu.j2"
    for runs, note in ((1, ""), (2, "{# a note for nobody #}"), (3, "// a note\n")):
        template.write_text(template.read_text() + note)
        render_module._environment.cache_clear()
        render_module.template_digest.cache_clear()
        compile_rendered(render_one())
        assert len(compiler.runs) == runs


def test_a_change_of_anything_else_is_a_miss(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_rendered(render_one())
    compile_rendered(render_one("sm_86"))  # the compute capability
    compiler.build_text = "13.5.99"
    compile_rendered(render_one())
    with monkeypatch.context() as changed:
        changed.setattr(cuda_engine, "__version__", "99.0")
        compile_rendered(render_one())
    with monkeypatch.context() as changed:
        changed.setattr(cache, "FIXED_OPTIONS", (*cache.FIXED_OPTIONS, "--maxrregcount=64"))
        compile_rendered(render_one())
    assert len(compiler.runs) == 5
    compile_rendered(render_one())
    assert len(compiler.runs) == 5


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0], ids=["empty", "half", "flipped"])
def test_a_damaged_entry_is_replaced_with_one_warning(
    compiler: FakeCompiler, tmp_path: Path, keep: float
) -> None:
    right = compile_rendered(render_one())
    (entry,) = tmp_path.rglob("*.entry")
    data = bytearray(entry.read_bytes())
    whole = bytes(data)
    data[-5] ^= 0xFF
    entry.write_bytes(bytes(data[: int(keep * len(data))]))
    with pytest.warns(CacheWarning, match="damaged") as caught:
        assert compile_rendered(render_one()) == right
    assert len(caught) == 1
    assert entry.read_bytes() == whole
    assert len(compiler.runs) == 2


FRESH_PROCESS = f"""
import attngen
from attngen.backend import cache
from attngen.engines.cuda_engine import compile_rendered

runs = []
real = cache.compile_cuda
cache.compile_cuda = lambda *a, **k: runs.append(a) or real(*a, **k)
kernel = attngen.compile_text({TEXTS[0]!r}, dtype="fp16", head_dim=8)
compile_rendered(kernel.render("sm_90a"))
print(len(runs))
"""


def test_a_fresh_process_compiles_nothing_again(tmp_path: Path) -> None:
    answers = []
    for seed in ("1", "2"):
        environment = os.environ | {"ATTNGEN_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        environment.pop("ATTNGEN_CACHE", None)
        command = [sys.executable, "-c", FRESH_PROCESS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        answers.append(done.stdout.strip())
    assert answers == ["1", "0"]
    assert len(list(tmp_path.rglob("*.entry"))) == 1


# ---- O32: headers ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_kernel_needs_no_header(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDA_PATH", "CUDA_HOME", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    rendered = attngen.compile_text(TEXTS[0], dtype=dtype, head_dim=8).render("sm_90a")
    assert "#include" not in rendered.source
    for header in ("cuda_fp16.h", "cuda_bf16.h", "mma.h", "cuda_runtime.h", "stdint.h"):
        (tmp_path / header).write_text("#error another release\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    found = set()
    for folder in (None, tmp_path, empty):
        includes = () if folder is None else (f"--include-path={folder}",)
        compiled = compile_cuda(rendered.source, name="a", target=rendered.target, options=includes)
        found.add(compiled.binary)
    assert len(found) == 1


# ---- O34: shared memory ------------------------------------------------------------------


@pytest.mark.parametrize("target", targets.all_targets(), ids=lambda target: target.name)
@pytest.mark.parametrize("head_dim", [192, 256])
def test_the_tiles_of_a_large_head_dim_fit(target: targets.Target, head_dim: int) -> None:
    kernel = attngen.compile_text(TEXTS[0], dtype="fp16", head_dim=head_dim, schedule=SIMT)
    rendered = kernel.render(target.name)
    assert rendered.notes == ()
    assert rendered.launch.shared_bytes <= target.shared_bytes_per_block


def test_static_shared_memory_is_counted() -> None:
    kernel = attngen.compile_text(TEXTS[0], dtype="fp16", head_dim=256, schedule=SIMT)
    rendered = kernel.render("sm_86")
    static = resources_of(rendered, compile_rendered(rendered)).shared_bytes
    needed = static + rendered.launch.shared_bytes
    assert needed <= rendered.target.shared_bytes_per_block


def test_head_dim_512_is_an_error() -> None:
    error = catch(attngen.compile_text, TEXTS[0], head_dim=512)
    assert "512" in error.message()
    assert "1 to 256" in words(error)


def test_a_tile_of_keys_shrinks_until_it_fits(host_compiler: None) -> None:
    tiles = {}
    for target in ("sm_86", "sm_90a"):
        kernel = attngen.compile_text(
            TEXTS[0],
            dtype="fp16",
            head_dim=256,
            schedule=f"tile q = 64; {SIMT}",
            engine="cpu",
            arch=target,
        )
        rendered = kernel.render(target)
        assert rendered.notes == ()
        tiles[target] = rendered.launch.tiles.tile_kv
        assert rendered.launch.shared_bytes <= rendered.target.shared_bytes_per_block
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((1, 1, 70, 256)).astype(np.float16) for _ in range(3))
        right = reference(kernel.unit, q, k, v, dtype="fp16")
        assert right.accepts_o(kernel(q, k, v)).all()
    assert tiles["sm_86"] < tiles["sm_90a"] == 32


def test_a_tile_that_cannot_fit_is_refused_with_the_sum(host_compiler: None) -> None:
    x = np.zeros((1, 1, 4, 256), np.float16)
    sizes = "query 128.5 KiB + key 514.0 KiB + value 512.0 KiB + p 256.0 KiB = 1410.5 KiB"
    kernel = attngen.compile_text(
        TEXTS[0], schedule="tile q = 128, kv = 512; kernel forward_simt", engine="cpu", arch="sm_86"
    )
    error = catch(kernel, x, x, x)
    assert error.code == "A452"
    assert sizes in error.message()
    assert "sm_86 allows 99 KiB per block" in error.message()
    assert "auto" in words(error)
    assert kernel.compilations == 0
    # Where no kernel is named, it runs with tiles that fit, and says so with the same sum.
    kernel = attngen.compile_text(TEXTS[0], schedule="tile q = 128, kv = 512")
    notes = " ".join(kernel.render("sm_86", dtype="fp16", head_dim=256).notes)
    assert sizes in notes
    assert "instead" in notes
