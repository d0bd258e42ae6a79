"""What a schedule leaves open follows tuning records; what it says stays (O43)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import targets
from attngen.api import Kernel
from attngen.backend import device as device_module
from attngen.backend import launch as launch_module
from attngen.compiler import lower_program, reasons_against
from attngen.ir.digest import digest_operation
from attngen.ir.schedule import Schedule
from attngen.ir.types import FP16
from attngen.tuning.lookup import Grade, open_lookup
from attngen.tuning.measurement import Record
from attngen.tuning.problem import LayoutClass, Problem
from attngen.tuning.store import Contents, user_store
from tests.tuning.records import H200, make_record

from .fake_gpu import FakeGpus
from .texts import catch

CAUSAL = "attention causal {\n    mask kv <= qpos\n}\n"
D = 64
SHAPE = {"B": 1, "Hq": 4, "Hkv": 2, "Sq": 256, "Skv": 256}
LONG = {**SHAPE, "Sq": 2048, "Skv": 2048}
TUNED = "tile q = 64, kv = 32; stages 1"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels, which all tests of this file share."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: Path) -> FakeGpus:
    """A fake H200, and a cache directory without records."""
    found = FakeGpus((9, 0))
    (tmp_path / "kernels").symlink_to(kernels)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch_module, "load_driver", lambda: found)
    monkeypatch.setattr(device_module, "_libraries", {})
    monkeypatch.setattr(device_module, "_torch_names", {})
    monkeypatch.setitem(sys.modules, "torch", found.torch)
    return found


def call(kernel: Kernel, gpus: FakeGpus, shape: dict[str, int] = SHAPE, **named: Any) -> Any:
    B, Hq, Hkv, Sq, Skv = shape.values()
    sizes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, D))
    q, k, v = (gpus.tensor(np.zeros(size, np.float16)) for size in sizes)
    return kernel(q, k, v, **named)


def complete(text: str, schedule: str = "") -> tuple[str, Schedule]:
    """The digest of an operation, and a complete schedule of it for sm_90a."""
    kernel = attngen.compile_text(text, schedule=f"kernel forward_mma; {schedule}")
    program = lower_program(kernel.checked, FP16, (D, D), targets.get("sm_90a")).program
    return digest_operation(program.attention), program.schedule


def keep(text: str = CAUSAL, schedule: str = TUNED, shape: dict[str, int] = SHAPE) -> Record:
    """Put a record for an operation into the user's store."""
    op, tuned = complete(text, schedule)
    problem = Problem.of("fp16", {**shape, "Dqk": D, "Dv": D}, H200.sm_count)
    kept = make_record(op=op, schedule=tuned, problem=problem)
    store = user_store()
    assert store is not None
    store.add(Contents((kept,)))
    return kept


def schedules(kernel: Kernel) -> list[Schedule]:
    return [program.schedule for program in kernel.programs]


def test_a_record_decides_what_is_open(gpus: FakeGpus) -> None:
    kept = keep()
    kernel = attngen.compile_text(CAUSAL)
    call(kernel, gpus)
    assert schedules(kernel) == [kept.schedule]
    assert (kept.schedule.tile_q, kept.schedule.tile_kv, kept.schedule.stages) == (64, 32, 1)


def test_a_record_is_found_by_what_is_computed_not_by_names(gpus: FakeGpus) -> None:
    kept = keep()
    text = (
        "# the same\nattention other {\n    mask kv <= qpos  # causal\n}\nschedule { warps auto }\n"
    )
    kernel = attngen.compile_text(text)
    call(kernel, gpus)
    assert schedules(kernel) == [kept.schedule]


def test_the_order_of_keywords_makes_no_difference(gpus: FakeGpus) -> None:
    kept = keep()
    B, Hq, Hkv, Sq, _ = SHAPE.values()
    q, kv = (gpus.tensor(np.zeros((B, n, Sq, D), np.float16)) for n in (Hq, Hkv))
    kernel = attngen.compile_text(CAUSAL)
    kernel(v=kv, q=q, return_lse=True, k=kv)
    assert schedules(kernel) == [kept.schedule]


@pytest.mark.parametrize("options", [{"tune": "off"}, {"schedule": "tile q = 128"}])
def test_what_is_fixed_stays(gpus: FakeGpus, options: Any) -> None:
    kept = keep()
    kernel = attngen.compile_text(CAUSAL, **options)
    call(kernel, gpus)
    (used,) = schedules(kernel)
    assert used != kept.schedule
    assert "tune" in options or used.tile_q == 128


def test_a_compilation_for_each_schedule_and_none_for_a_length(gpus: FakeGpus) -> None:
    short, long = keep(), keep(schedule="tile q = 128, kv = 64", shape=LONG)
    kernel = attngen.compile_text(CAUSAL)
    for shape in (SHAPE, LONG, {**SHAPE, "Sq": 250}, {**LONG, "Skv": 2000}, SHAPE):
        call(kernel, gpus, shape)
    assert schedules(kernel) == [short.schedule, long.schedule]
    assert kernel.compilations == 2


def test_prepare_compiles_for_shapes_to_come(gpus: FakeGpus) -> None:
    keep(), keep(schedule="tile q = 128, kv = 64", shape=LONG)
    kernel = attngen.compile_text(CAUSAL)
    kernel.prepare(dtype="fp16", head_dim=D, shapes=(SHAPE, LONG))
    before = kernel.compilations
    gpus.is_capturing_now = True
    call(kernel, gpus), call(kernel, gpus, LONG)
    assert kernel.compilations == before
    assert len(gpus.launches) == 2


def test_a_record_of_one_problem_is_not_used_for_another(gpus: FakeGpus) -> None:
    """Another element type, another head dim, another mask: nothing of it applies."""
    kept = keep()
    other = attngen.compile_text(CAUSAL.replace("<=", "<"))
    call(other, gpus)
    B, Hq, _, Sq, _ = SHAPE.values()
    causal = attngen.compile_text(CAUSAL)
    for dtype, dim in ((np.float32, D), (np.float16, 128)):
        x = gpus.tensor(np.zeros((B, Hq, Sq, dim), dtype))
        causal(x, x, x)
    assert kept.schedule not in schedules(other) + schedules(causal)


def test_a_schedule_that_does_not_fit_any_more_is_passed_over(gpus: FakeGpus) -> None:
    op, tuned = complete(CAUSAL)
    too_large = replace(tuned, tile_q=1024, tile_kv=1024, warps=64)
    problem = Problem.of("fp16", {**SHAPE, "Dqk": D, "Dv": D}, H200.sm_count)
    kept = make_record(op=op, schedule=too_large, problem=problem)
    store = user_store()
    assert store is not None
    store.add(Contents((kept,)))
    kernel = attngen.compile_text(CAUSAL)
    with pytest.warns(UserWarning, match=kept.id):
        call(kernel, gpus)
    assert schedules(kernel) == schedules_without_records(gpus)


def schedules_without_records(gpus: FakeGpus) -> list[Schedule]:
    kernel = attngen.compile_text(CAUSAL, tune="off")
    call(kernel, gpus)
    return schedules(kernel)


def test_operands_that_cannot_be_copied_have_problems_of_their_own(gpus: FakeGpus) -> None:
    kept = keep()
    kernel = attngen.compile_text(CAUSAL)
    B, Hq, _, Sq, _ = SHAPE.values()
    x = gpus.tensor(np.zeros((B, Hq, Sq, D + 1), np.float16)[..., 1:])
    with pytest.warns(UserWarning, match="multiple of 16"):
        kernel(x, x, x)
    assert kept.schedule not in schedules(kernel)
    assert kept.problem.layout is LayoutClass.ALIGNED


def test_a_machine_without_a_gpu_asks_for_a_device() -> None:
    answer = attngen.compile_text(CAUSAL).find_schedule(H200, SHAPE, dtype="bf16", head_dim=D)
    assert answer.grade in Grade


def test_a_gpu_that_does_not_say_what_it_is_has_no_records(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep()

    def fail(index: int) -> Any:
        raise RuntimeError("cudaErrorInvalidValue")

    monkeypatch.setattr(gpus, "traits", fail)
    kernel = attngen.compile_text(CAUSAL)
    with pytest.warns(UserWarning, match="cudaErrorInvalidValue"):
        call(kernel, gpus)
    assert kept.schedule not in schedules(kernel)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_what_a_family_completes_fits_it(arch: str, dtype: str) -> None:
    """Else every record would be passed over."""
    rendered = attngen.compile_text(CAUSAL).render(arch, dtype=dtype, head_dim=D)
    program = rendered.program
    assert reasons_against(program.attention, program.schedule, targets.get(arch)) == ()


def test_schedules_from_elsewhere_have_reasons_against_them() -> None:
    program = attngen.compile_text(CAUSAL).render("sm_80", dtype="fp16", head_dim=D).program
    attention, target = program.attention, targets.get("sm_80")
    for kernel, reason in (("forward_wgmma", "not made for"), ("forward_abc", "no kernel family")):
        (found,) = reasons_against(attention, replace(program.schedule, kernel=kernel), target)
        assert reason in found


@pytest.mark.parametrize("shape", [{}, {**SHAPE, "B": "2"}, {**SHAPE, "Skv": -1}])
def test_a_shape_has_every_size(shape: Any) -> None:
    kernel = attngen.compile_text(CAUSAL, dtype="fp16", head_dim=D)
    for ask in (lambda: kernel.find_schedule(H200, shape), lambda: kernel.prepare(shapes=[shape])):
        assert "B, Hq, Hkv, Sq, Skv" in str(catch(ask).label_text()) + catch(ask).message()


def test_the_choice_of_tune_is_checked() -> None:
    error = catch(attngen.compile_text, CAUSAL, tune="always")
    assert "auto, cached, off" in (error.label_text() or "") + error.message()


def test_one_lookup_for_each_cache_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    first = open_lookup()
    assert open_lookup() is first
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "other"))
    assert open_lookup() is not first
