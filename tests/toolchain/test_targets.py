"""The table of targets: complete, right by the assembler's word, and explained when missed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attngen import targets
from attngen.backend.nvrtc import compile_cuda, select_target
from attngen.diagnostics.diagnostic import AttnError
from attngen.targets.base import KIB, Feature, Target
from tests.toolchain.fake_cuda import FakeCompiler

NAMES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"]

# One instruction per feature; registers that it reads are set, so that it is not removed.
PROBES = {
    Feature.CP_ASYNC: "cp.async.cg.shared.global [shared], [global], 16;",
    Feature.LDMATRIX: "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {word}, [shared];",
    Feature.BF16_MMA: (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{f, f, f, f}, {word, word, word, word}, {word, word}, {f, f, f, f};"
    ),
    Feature.FP8_MMA: (
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{f, f, f, f}, {word, word, word, word}, {word, word}, {f, f, f, f};"
    ),
    Feature.MBARRIER: "mbarrier.init.shared.b64 [shared], 1;",
    Feature.STMATRIX: "stmatrix.sync.aligned.m8n8.x1.shared.b16 [shared], {word};",
    Feature.CLUSTER: "barrier.cluster.arrive;",
    Feature.TMA: (
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[shared], [global, {word, word}], [shared];"
    ),
    Feature.DEPENDENT_LAUNCH: "griddepcontrol.wait;",
    Feature.SETMAXNREG: "setmaxnreg.inc.sync.aligned.u32 232;",
    Feature.WGMMA: "wgmma.fence.sync.aligned;",
    Feature.TCGEN05: "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [shared], 32;",
}
PROBE_TEXT = """
extern "C" __global__ void __launch_bounds__(128, 1) probe(unsigned long long global, unsigned n) {
    extern __shared__ __align__(1024) unsigned char buffer[];
    unsigned shared = (unsigned)__cvta_generic_to_shared(buffer);
    asm volatile(
        "{ .reg .b32 shared, word; .reg .b64 global; .reg .f32 f;"
        "mov.b32 shared, %0; mov.b32 word, %1; mov.b64 global, %2; mov.f32 f, 0f00000000;"
        "INSTRUCTION }" :: "r"(shared), "r"(n), "l"(global));
}
"""


def test_every_target_is_found_in_ascending_order() -> None:
    assert [target.name for target in targets.all_targets()] == NAMES
    assert [targets.get(name).name for name in NAMES] == NAMES


@pytest.mark.parametrize("target", targets.all_targets(), ids=lambda target: target.name)
def test_limits_fit_together(target: Target) -> None:
    lost = target.shared_bytes_per_sm - target.shared_bytes_per_block
    assert lost == target.shared_bytes_reserved == KIB
    assert target.max_threads_per_sm % target.threads_per_warp == 0
    assert target.max_threads_per_block <= target.max_threads_per_sm
    assert target.cubin_option == f"--gpu-architecture={target.name}"
    assert target.ptx_option == f"--gpu-architecture=compute_{target.name[3:]}"


@pytest.mark.parametrize("target", targets.all_targets(), ids=lambda target: target.name)
def test_features_are_those_the_assembler_accepts(target: Target) -> None:
    assert PROBES.keys() == set(Feature)
    accepted = set()
    for feature, instruction in PROBES.items():
        try:
            compile_cuda(
                PROBE_TEXT.replace("INSTRUCTION", instruction), name=feature.name, target=target
            )
            accepted.add(feature)
        except AttnError:
            pass
    assert accepted == target.features


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_gpu_gets_the_target_that_runs_on_it(capability: tuple[int, int], name: str) -> None:
    assert targets.for_capability(capability).name == name
    assert select_target(capability, compiler=FakeCompiler()).name == name


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (9, 1), (10, 3), (11, 0), (99, 0)])
def test_a_gpu_without_target_is_refused_before_compiling(capability: tuple[int, int]) -> None:
    compiler = FakeCompiler()
    with pytest.raises(AttnError) as caught:
        select_target(capability, compiler=compiler)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "A492"
    assert f"{capability[0]}.{capability[1]}" in diagnostic.message()
    label = diagnostic.label_text()
    assert label is not None
    assert "NVRTC 13.5" in label
    assert "sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120" in label
    assert compiler.runs == []


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("sm_90", "sm_90a"),
        ("sm90a", "sm_90a"),
        ("90", "sm_90a"),
        ("SM_87", "sm_86"),
        ("sm_103a", "sm_100a"),
        ("compute_121", "sm_120"),
        ("sm_70", "sm_80"),
        ("hopper", None),
    ],
)
def test_a_wrong_name_suggests_the_nearest(name: str, closest: str | None) -> None:
    with pytest.raises(AttnError) as caught:
        targets.get(name)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "A491"
    assert diagnostic.hint_text() == (closest and f"did you mean `{closest}`?")
    assert "sm_90a" in (diagnostic.label_text() or "")


def test_importing_loads_no_cuda() -> None:
    program = (
        "import sys, attngen.targets, attngen.options\n"
        "from attngen.backend import cache, cubin, device, launch, nvrtc\n"
        "loaded = [m for m in ('cuda', 'cupy', 'torch', 'cuda.bindings') if m in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
