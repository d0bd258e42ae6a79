"""The model beside what an H200 measured, and the directions in which its terms go."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from attngen import targets
from attngen.compiler import choose_family
from attngen.ir.schedule import Schedule
from attngen.tuning.call import Call
from attngen.tuning.cost_model import MARGIN, CostModel
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.space import collect
from benchmarks.cells import Cell
from benchmarks.variants import make_variant

from .problems import CAUSAL, FULL, specialised

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("2026-11-30-h200-3.jsonl", "2026-11-30-h200-4.jsonl")
H200 = DeviceClass.named("h200")


def call_of(B: int, S: int, H: int, D: int, *, Hkv: int | None = None, **more: Any) -> Call:
    sizes = {"B": B, "Hq": H, "Hkv": Hkv or H, "Sq": S, "Skv": S, "Dqk": D, "Dv": D}
    return Call(sizes, {}, {}, **more)


def model_of(text: str, B: int, S: int, H: int, D: int, device: DeviceClass = H200) -> CostModel:
    return CostModel(specialised(text, "bf16", (D, D)), call_of(B, S, H, D), device)


def tiles(q: int, kv: int, stages: int = 2, kernel: str = "forward_wgmma") -> Schedule:
    return Schedule(
        kernel=kernel, tile_q=q, tile_kv=kv, stages=stages, splits=1,
        warps=q // 16 if kernel == "forward_wgmma" else q // 32,
    )  # fmt: skip


def predicted_and_measured(line: dict[str, Any]) -> tuple[float, float]:
    names = ("suite", "variant", "dtype", "B", "S", "Hq", "Hkv", "D", "Dv")
    cell = Cell(**{name: line[name] for name in names})
    variant = make_variant(cell)
    attention = specialised(variant.text, cell.dtype, (cell.D, cell.Dv))
    call = call_of(cell.B, cell.S, cell.Hq, cell.D, Hkv=cell.Hkv)
    sizes = dict(call.sizes)
    for tensor in attention.tensors:
        for dim, size in zip(tensor.dims, variant.tensors[tensor.name].shape, strict=True):
            sizes[str(dim.size)] = size
    model = CostModel(attention, Call(sizes, {}, variant.tensors), H200)
    schedule = Schedule(kernel=line["kernel"])
    _, complete, _ = choose_family(attention, schedule, targets.get("sm_90a"))
    return model.predict(complete).us, 1e3 * line["ms"]


def test_the_model_is_as_far_off_as_its_docstring_says() -> None:
    errors = defaultdict(list)
    for file in FILES:
        for text in (RESULTS / file).read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line.get("peer") == "attngen" and line["ms"] is not None:
                predicted, measured = predicted_and_measured(line)
                errors[line["kernel"]].append(math.log(predicted / measured))
    assert {kernel: len(found) for kernel, found in errors.items()} == {
        "forward_wgmma": 45, "forward_mma": 47,
    }  # fmt: skip
    for kernel, most in (("forward_wgmma", 0.063), ("forward_mma", 0.05)):
        found = errors[kernel]
        assert math.sqrt(statistics.fmean(e * e for e in found)) < most
        assert statistics.median(abs(e) for e in found) < 0.025
        assert max(abs(e) for e in found) < 0.27


# What was measured of tiles: docs/performance.md.
COMPARISONS = [
    (CAUSAL, (16, 1024, 32, 64), tiles(128, 128), tiles(192, 128)),
    (FULL, (1, 16384, 16, 128), tiles(128, 176), tiles(128, 128)),
    (FULL, (1, 8192, 16, 128), tiles(128, 64, 2, "forward_mma"), tiles(128, 64, 1, "forward_mma")),
    (FULL, (1, 8192, 16, 128), tiles(128, 64, 2, "forward_mma"), tiles(128, 48, 2, "forward_mma")),
    (CAUSAL, (1, 8192, 16, 128), tiles(128, 128), tiles(128, 64, 2, "forward_mma")),
]


@pytest.mark.parametrize(("text", "shape", "faster", "slower"), COMPARISONS)
def test_tiles_compare_as_they_were_measured(
    text: str, shape: tuple[int, int, int, int], faster: Schedule, slower: Schedule
) -> None:
    model = model_of(text, *shape)
    assert model.predict(faster).us < model.predict(slower).us
    assert [s for s, _ in model.rank((slower, faster))] == [faster, slower]


def test_the_terms_are_the_time() -> None:
    found = model_of(CAUSAL, 2, 1000, 4, 64).predict(tiles(128, 128))
    assert sum(found.terms.values()) == pytest.approx(found.us)
    assert min(found.terms.values()) >= 0


def test_a_wave_that_is_not_full_costs_as_much_as_a_full_one() -> None:
    one, two = (model_of(FULL, 1, 128, heads, 64).predict(tiles(128, 64)) for heads in (132, 133))
    assert two.us == pytest.approx(2 * one.us)
    assert one.terms["waves"] == pytest.approx(0)


def test_half_the_pairs_take_about_half_the_time() -> None:
    causal, full = (
        model_of(text, 1, 16384, 16, 128).predict(tiles(128, 128)).us for text in (CAUSAL, FULL)
    )
    assert 0.45 < causal / full < 0.6


def test_a_smaller_gpu_takes_longer() -> None:
    pcie = DeviceClass.named("h100-pcie")
    shape = CAUSAL, 4, 4096, 16, 128
    schedule = tiles(128, 128)
    assert (
        model_of(*shape, device=pcie).predict(schedule).us > model_of(*shape).predict(schedule).us
    )


def test_a_default_is_left_only_for_what_is_clearly_faster() -> None:
    model = model_of(FULL, 1, 8192, 16, 128)
    default, near, far = tiles(128, 128), tiles(128, 176), tiles(128, 32)
    times = {s: model.predict(s).us for s in (default, near, far)}
    assert (1 - MARGIN) * times[default] < times[near] < times[default]
    assert model.choose(default, (default, near, far)) == default
    assert model.choose(far, (default, near, far)) == near


def test_no_call_is_too_small() -> None:
    found = CostModel(specialised(CAUSAL), call_of(1, 0, 4, 64), H200).predict(tiles(128, 64))
    assert found.us == 0


@pytest.mark.parametrize("alias", ["a100-80g", "rtx4090", "l40s", "h100-sxm", "b200"])
def test_every_known_gpu_has_rates(alias: str) -> None:
    device = DeviceClass.named(alias)
    attention = specialised(CAUSAL)
    space = collect(attention, Schedule(), targets.get(device.arch))
    ranked = CostModel(attention, call_of(1, 2048, 16, 64), device).rank(space.candidates)
    assert ranked[0][0].kernel != "forward_simt"
    assert 0 < ranked[0][1].us < ranked[-1][1].us


def test_every_target_has_rates() -> None:
    from attngen.tuning.cost_model import _RATES

    assert _RATES.keys() == {target.name for target in targets.all_targets()}


def test_the_roof_is_below_every_prediction() -> None:
    model = model_of(CAUSAL, 1, 8192, 16, 128)
    roof = model.roof()
    assert roof.flops == 16 * (8192 * 8193 / 2) * 4 * 128
    assert roof.moved_bytes == 4 * 16 * 8192 * 128 * 2
    assert roof.peak_tflops == pytest.approx(132 * 4096 * 1755 / 1e6)
    assert roof.least_us == pytest.approx(roof.flops / (roof.peak_tflops * 1e6))
    assert roof.least_us < model.predict(tiles(128, 128)).us
    assert roof.tflops(roof.least_us) == pytest.approx(roof.peak_tflops)


def test_few_rows_are_bound_by_memory() -> None:
    sizes = {"B": 1, "Hq": 8, "Hkv": 8, "Sq": 1, "Skv": 65536, "Dqk": 128, "Dv": 128}
    roof = CostModel(specialised(FULL, "bf16", (128, 128)), Call(sizes, {}, {}), H200).roof()
    assert roof.least_us == pytest.approx(roof.moved_bytes / 4.8e6)
