"""generated/ is what the compiler writes today, compiles everywhere, and was verified as it is."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.backend.cubin import read_resources
from attngen.backend.device import view
from attngen.backend.nvrtc import Compiled, compile_cuda
from attngen.binding import bind, split_arguments
from attngen.compiler import Rendered
from attngen.cpu.build import build_library
from attngen.engines.cpu_engine import run_on_host
from attngen.engines.outputs import Outputs
from attngen.kernels import all_families
from attngen.options import host_cache_dir
from attngen.targets import all_targets
from tests.goldens import (
    GENERATED,
    GOLDENS,
    Golden,
    digest,
    make_problem,
    read_index,
    resources_of,
    sizes_of,
)

every_golden = pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: g.file)


def test_generated_holds_the_goldens_and_nothing_else() -> None:
    files = {str(p.relative_to(GENERATED)) for p in GENERATED.rglob("*.cu")}
    assert files == {golden.file for golden in GOLDENS} == set(read_index())


@every_golden
def test_text_is_current(golden: Golden) -> None:
    text = golden.path.read_text(encoding="utf-8")
    assert golden.render().source == text, "run `make goldens`, read the diff, verify on a GPU"
    assert read_index()[golden.file]["sha256"] == digest(text)


@every_golden
def test_text_was_verified_on_a_gpu(golden: Golden) -> None:
    """An entry is dropped from the index when its text changes, so having one is enough."""
    entry = read_index()[golden.file]
    if "unverified" in entry:
        warnings.warn(f"{golden.file} is not verified: {entry['unverified']}", stacklevel=1)
        return
    assert "verified" in entry, f"{golden.file} changed since it was last verified on a GPU"
    assert entry["verified"]["worst_error_over_bound"] <= 1.0


@every_golden
def test_every_other_target_gets_a_text_without_spills(golden: Golden) -> None:
    """With the tiles that are chosen for it: cards differ in shared memory."""
    needed = all_families()[golden.render().program.main.family].features
    for target in all_targets():
        is_named = "kernel" in (golden.schedule or "")
        if is_named and not target.features.issuperset(needed):
            continue  # another family does not stand in for one that is named
        if target.name != golden.target:  # which the test below has
            compile_without_spills(replace(golden, target=target.name).render())


@every_golden
def test_resources_are_those_recorded(golden: Golden) -> None:
    recorded = read_index()[golden.file]["resources"]
    assert recorded["spill_bytes"] == recorded["stack_bytes"] == 0
    rendered = golden.render()
    compiled = compile_without_spills(rendered)
    found = resources_of(rendered, compiled)
    if found["nvrtc"] != recorded["nvrtc"]:
        pytest.skip(f"recorded with NVRTC {recorded['nvrtc']}, this is {found['nvrtc']}")
    assert found == recorded


def compile_without_spills(rendered: Rendered) -> Compiled:
    compiled = compile_cuda(rendered.source, name="golden.cu", target=rendered.target)
    found = read_resources(compiled.binary)
    for launch in rendered.program.launches:
        resources = found[launch.kernel]
        assert resources.stack_bytes == 0
        assert resources.params[0].size == rendered.arguments.size
    return compiled


MANY_HEADS = 32


@every_golden
def test_text_is_right_on_the_cpu(golden: Golden, host_compiler: None) -> None:
    kernel = golden.kernel("cpu")
    sizes = sizes_of(golden)
    if (kernel.attention.heads_q or 0) > MANY_HEADS:
        sizes = sizes[::2]  # the others on a GPU alone
    for rows, keys in sizes:
        problem = make_problem(golden, rows, keys)
        right = _reference(golden, problem)
        o = np.full((*problem.q.shape[:3], golden.head_dim[1]), np.nan, problem.q.dtype)
        result = kernel(problem.q, problem.k, problem.v, out=o, **problem.named)
        assert right.accepts_o(o).all()
        if isinstance(result, tuple):
            assert right.accepts_lse(result[1]).all()


def _reference(golden: Golden, problem: object) -> attngen.Reference:
    from tests.gpu.verify_goldens import reference_of

    return reference_of(golden, problem)


MMA = [g for g in GOLDENS if g.render().launch.family == "forward_mma" and g.is_aligned]


@pytest.mark.parametrize("golden", MMA, ids=lambda g: g.file)
def test_shared_memory_takes_the_fewest_wavefronts(golden: Golden, host_compiler: None) -> None:
    """As many as the width of each access needs: no two lanes want different words of a bank."""
    rendered = golden.render()
    library = build_library(rendered.source, cache_dir=host_cache_dir(), optimization=0)
    tiles = rendered.launch.tiles
    problem = make_problem(golden, tiles.tile_q + 1, 2 * tiles.tile_kv + 1)
    tensors, params = split_arguments(rendered.program.attention, problem.named)
    operands = (view(x, n) for n, x in zip("qkv", (problem.q, problem.k, problem.v), strict=True))
    views = {n: view(x, n) for n, x in tensors.items()}
    binding = bind(rendered.program.attention, *operands, views, params)
    o = np.zeros((*problem.q.shape[:3], golden.head_dim[1]), problem.q.dtype)
    report = run_on_host(rendered, binding, Outputs(o=view(o, "o", is_output=True)), library)
    assert report is not None
    assert report.shared_wavefronts == report.shared_wavefronts_least > 0
