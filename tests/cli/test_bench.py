"""`attngen bench`: a dry run on the CPU, what is compared with what, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attngen.bench import spec as module
from attngen.bench.libraries import LIBRARIES
from attngen.bench.spec import choose_rows

from .runner import run, write

DRY = ("--device", "numpy", "--shape", "B=2,Hq=4,Hkv=2,Sq=33,Skv=33")


def results(*arguments: Any, code: int = 0) -> dict[str, dict[str, Any]]:
    """By library."""
    found = run("bench", *arguments, "--json")
    assert found.code == code, found.err
    return {each["library"]: each for each in json.loads(found.out)["results"]}


def test_every_library_is_timed_or_has_a_reason(documents: Path) -> None:
    found = results(documents, *DRY)
    assert list(found) == ["attngen", *LIBRARIES]
    assert found["attngen"]["ms"] > 0
    assert 0 < found["attngen"]["fraction"] <= 1
    assert all((each["ms"] is None) == bool(each["reason"]) for each in found.values())


def test_a_person_reads_a_table(documents: Path) -> None:
    found = run("bench", documents, *DRY, "--peers", "fa3")
    assert found.code == 0, found.err
    assert "attention documents" in found.out
    assert "these times mean nothing" in found.out
    assert "the spec itself, on cpu\n  attngen  " in found.out
    assert "not timed\n  FlashAttention-3  " in found.out
    assert "cuDNN" not in found.out


def test_params_sizes_and_schedule_are_the_users(causal: Path, documents: Path) -> None:
    schedule = ("--schedule", "kernel forward_simt; tile q = 16")
    found = run("bench", documents, *DRY, "--set", "cap=3.0", *schedule, "--json", "--peers", "fa3")
    shown = json.loads(found.out)
    assert shown["params"] == {"cap": 3.0}
    assert shown["sizes"] | {"Sq": 33, "Dqk": 32} == shown["sizes"]
    assert run("bench", causal, *DRY, "--schedule", "tile rows = 7").code == 2


def test_a_wrong_result_has_no_time(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._own_lane

    def spoiled(*arguments: Any) -> Any:
        lane = real(*arguments)

        def call() -> Any:
            out = lane.call()
            out[:, 5] += 1
            return out

        return module._Lane(lane.library, lane.computes, call, lane.read, lane.how)

    monkeypatch.setattr(module, "_own_lane", spoiled)
    found = results(documents, *DRY, "--peers", "fa3", code=1)
    assert found["attngen"]["ms"] is None
    assert "wrong" in found["attngen"]["reason"]


def test_without_a_gpu_it_says_what_is_possible(causal: Path) -> None:
    found = run("bench", causal)
    if found.code == 0:
        pytest.skip("there is a GPU")
    assert found.code == 2
    assert "error[A711]" in found.err
    assert "--device cpu is a dry run" in found.err


@pytest.mark.parametrize(("Sq", "count"), [(1, 1), (3, 3), (64, 64), (5000, 64), (10**6, 4)])
def test_rows_to_check_hold_the_first_and_the_last(Sq: int, count: int) -> None:
    rows = choose_rows({"B": 1, "Hq": 1, "Sq": Sq, "Skv": Sq})
    assert (rows[0], rows[-1], len(rows)) == (0, Sq - 1, count)


# ---- with PyTorch --------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.usefixtures("torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("lines", "computes"),
    [
        ("mask causal", "spec"),
        ("", "spec"),
        ("scale 0.5\n    mask causal", "spec"),
        ("param t : float = 0.3\n    scale t / sqrt(Dqk)", "spec"),
        ("mask window(left = 5)", "causal"),
        ("mask window(left = 5, right = 2)", "full"),
        ("score s + 0.5 * (kv - qpos)\n    mask causal", "causal"),
    ],
)
def test_plain_libraries_compute_the_spec_or_what_is_near(
    lines: str, computes: str, tmp_path: Path
) -> None:
    path = write(tmp_path, f"attention a {{\n    head_dim 16\n    {lines}\n}}\n")
    found = results(path, *DRY, "--peers", "fa2,flex")
    assert found["fa2"]["computes"] == computes
    assert found["flex"]["computes"] == "spec"
    assert all(each["ms"] > 0 for each in found.values())
    compared = {name for name, each in found.items() if each["fraction"] is not None}
    assert compared == {"attngen", "flex", *(["fa2"] if computes == "spec" else [])}


@pytest.mark.usefixtures("torch")
@pytest.mark.filterwarnings("ignore")
def test_plain_libraries_take_one_scale(tmp_path: Path) -> None:
    path = write(tmp_path, "attention a {\n    head_dim 16\n    scale 1.0 / (h + 2)\n}\n")
    found = results(path, *DRY, "--peers", "fa2,flex")
    assert found["fa2"]["reason"] == "it takes one scale for all pairs"
    assert found["flex"]["fraction"] is not None


@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_scale_goes_to_flash_attention(
    scale: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has another word for it than PyTorch."""
    seen: list[dict[str, Any]] = []

    def call(name: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append(options)
        return lambda: q

    monkeypatch.setattr(module, "call_flash", call)
    monkeypatch.setattr(module, "why_missing", lambda name, machine: None)
    line = "" if scale is None else f"scale {scale}"
    path = write(tmp_path, f"attention a {{\n    head_dim 16\n    {line}\n}}\n")
    run("bench", path, *DRY, "--peers", "fa3")
    assert seen == [{"causal": False, "softmax_scale": scale or 0.25}]


@pytest.mark.usefixtures("torch")
def test_flexattention_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    path = write(tmp_path, "attention a {\n    head_dim 16\n    weights sigmoid\n}\n")
    found = results(path, *DRY, "--peers", "flex")
    assert "neither sinks nor other weights" in found["flex"]["reason"]


@pytest.mark.usefixtures("torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["alibi", "longformer", "t5"])
def test_flexattention_compiles_what_a_spec_becomes(name: str) -> None:
    """Its own tracing, which follows fewer operations of Python than a plain call."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.attn"
    found = results(path, "--device", "numpy", "--peers", "flex")
    assert found["flex"]["reason"] is None
    assert found["flex"]["fraction"] <= 4
