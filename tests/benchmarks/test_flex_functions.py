"""FlexAttention's functions: which are chosen, that each is right, and what the table says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cold import ROOT
from benchmarks.flex_functions import (
    LANES,
    MOST_LOSSES,
    SUITE,
    Group,
    choose_functions,
    expect,
    group_lanes,
    judge,
    main,
    merge,
    render,
)
from benchmarks.flex_worker import Worker
from benchmarks.functions import FUNCTIONS, Made, Size
from benchmarks.report import read_records


def test_every_function_has_a_name_of_its_own() -> None:
    names = [function.name for function in FUNCTIONS]
    assert len(set(names)) == len(names)


def test_parts_share_all_functions() -> None:
    parts = [choose_functions("masks.*,mods.alibi_bias", (k, 3)) for k in (1, 2, 3)]
    chosen = [function.name for part in parts for function in part]
    assert sorted(chosen) == sorted(
        f.name for f in FUNCTIONS if f.name.startswith("masks.") or f.name == "mods.alibi_bias"
    )


@pytest.mark.parametrize("S", [64, 512, 8192, 16384])
def test_pictures_and_videos_hold_all_tokens(S: int) -> None:
    size = Size(1, 1, S, "cpu")
    (rows, columns), (frames, height, width) = size.picture, size.video
    assert rows * columns == frames * height * width == S
    assert rows <= columns <= 2 * rows


def record(name: str, lane: str, ms: float | None, **more: Any) -> dict[str, Any]:
    return {"suite": SUITE, "cell": name, "lane": lane, "peer": lane, "ms": ms, **more}


def test_the_table_counts_what_reaches_its_goal() -> None:
    text = render(
        [
            record("a", "attngen", 1.0),
            record("a", "flex", 1.3, mask_ms=7.0),
            record("b", "attngen", 2.0),
            record("b", "flex", 2.4),
            record("c", "attngen", 1.0),
            record("c", "flex", None, reason="it refuses"),
        ]
    )
    assert "| a | 1.000 | 1.300 | 1.30 |" in text
    assert "flex / attngen: at least 1.3 in 1 of 2 functions" in text
    assert "geometric mean 1.25, smallest 1.20 (b)" in text
    assert "- flex, c: it refuses" in text
    assert "flex_flash" not in text


def test_a_dry_run_never_writes_to_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--out", "benchmarks/results"])
    assert "does not write to benchmarks/results" in capsys.readouterr().err


# ---- with PyTorch --------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("attn_gym", reason="attn-gym is not installed")
    return found


@pytest.mark.usefixtures("torch")
def test_every_function_is_right(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--lanes", "attngen", "--check", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.jsonl")
    first, *found, last = read_records(file.read_text("utf-8"))
    assert first["suite"] == "environment"
    assert [r["cell"] for r in found] == [function.name for function in FUNCTIONS]
    assert all(r["bound_ratio"] <= 1 and "reason" not in r for r in found)
    assert last["left_out"] == []


def dry_run(folder: Path, *more: str) -> list[dict[str, Any]]:
    """The records of one function, without the lines around them."""
    arguments = ["--device", "cpu", "--functions", "masks.causal_mask", "--out", str(folder)]
    assert main([*arguments, *more]) == 0
    (file,) = folder.glob("*.jsonl")
    return read_records(file.read_text("utf-8"))[1:-1]


@pytest.mark.usefixtures("torch")
def test_both_are_timed(tmp_path: Path) -> None:
    found = dry_run(tmp_path)
    assert [r["lane"] for r in found] == ["attngen", "flex"]
    assert all(r["ms"] > 0 and r["call_us"] > 0 for r in found)
    assert found[1]["own_ms"] == found[0]["ms"]


@pytest.mark.usefixtures("torch")
def test_a_fresh_process_is_timed(tmp_path: Path) -> None:
    (found,) = dry_run(tmp_path, "--cold", "--lanes", "attngen")
    assert 0 < found["ms"] < found["process_ms"]  # the latter holds the former
    assert found["cached_ms"] > 0


def test_a_function_that_is_wrong_is_found(torch: Any) -> None:
    """A mask that forgets the diagonal, judged by the one that does not."""
    q, k, v = (torch.randn(1, 2, 32, 16).bfloat16() for _ in range(3))

    def later(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < q_idx

    wrong = expect(Made(mask_mod=later), q, k, v).o
    expected = expect(Made(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx), q, k, v)
    whole = torch.zeros(1, 2, 32, 16, dtype=torch.float64)
    whole[:, :, expected.rows] = expected.o
    assert judge(whole, expected, 1.0) == {"max_err": 0.0, "bound_ratio": 0.0}
    whole[:, :, expected.rows] = wrong
    with pytest.raises(ValueError, match="times the bound"):
        judge(whole, expected, 4.0)
    assert wrong[:, :, 0].abs().max() == 0  # a row without keys


# ---- processes that are lost ---------------------------------------------------------------------

STAND_IN = """
import os, sys, time
from benchmarks.flex_worker import serve

def run_lanes(name, lanes, tell):
    print("what a library prints is no answer")
    found = []
    for lane in lanes:
        tell(lane)
        if (name, lane) in {("exits", "flex_flash"), ("always", "flex_flash")}:
            os._exit(3)
        if (name, lane) == ("hangs", "flex"):
            time.sleep(60)
        if (name, lane) == ("faults", "flex_flash"):
            raise RuntimeError("an illegal memory access\\nand more")
        found.append({"cell": name, "lane": lane, "ms": 1.0})
    return found

if sys.argv[1:] == ["early"]:
    raise SystemExit(4)
serve(run_lanes)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    """Starts workers that run `STAND_IN`."""
    (tmp_path / "stand_in.py").write_text(STAND_IN, "utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    with ExitStack() as stack:
        yield lambda *arguments, patience_s=20.0: stack.enter_context(
            Worker(["stand_in", *arguments], patience_s)
        )


def run_group(group: Group, name: str, known: Any = ()) -> dict[str, Any]:
    found = group.run(name, {lane: {} for lane in known})
    return {lane: each["ms"] or each["reason"] for lane, each in found.items()}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exits", "its process ended with 3"),
        ("faults", "RuntimeError: an illegal memory access"),
    ],
)
def test_a_lane_that_is_lost_costs_only_itself(
    worker: Callable[..., Worker], name: str, reason: str
) -> None:
    group = Group(("attngen", "flex_flash", "flex"), worker())
    found = run_group(group, name)
    assert found == {"attngen": 1.0, "flex_flash": f"it lost its process: {reason}", "flex": 1.0}
    assert group.lost == [{"lane": "flex_flash", "cell": name, "reason": reason}]
    assert set(run_group(group, "fine").values()) == {1.0}


def test_attngen_does_not_run_again_for_its_own_sake(worker: Callable[..., Worker]) -> None:
    group = Group(("attngen", "flex_flash"), worker())
    assert run_group(group, "exits", known=["attngen"]).keys() == {"flex_flash"}


def test_a_lane_that_hangs_is_ended(worker: Callable[..., Worker]) -> None:
    group = Group(("flex", "attngen"), worker(patience_s=4.0))
    found = run_group(group, "hangs")
    assert found == {"flex": "it lost its process: nothing for 4 s", "attngen": 1.0}


def test_a_lane_that_is_lost_too_often_is_left_out(worker: Callable[..., Worker]) -> None:
    group = Group(("attngen", "flex_flash"), worker())
    for _ in range(MOST_LOSSES):
        run_group(group, "always", known=["attngen"])
    assert run_group(group, "fine") == {
        "attngen": 1.0, "flex_flash": f"left out: it lost its process {MOST_LOSSES} times",
    }  # fmt: skip
    assert len(group.lost) == MOST_LOSSES


def test_a_process_that_does_not_start_loses_all_lanes(worker: Callable[..., Worker]) -> None:
    group = Group(("attngen", "flex"), worker("early"))
    found = run_group(group, "fine")
    assert found == dict.fromkeys(found, "it lost its process: its process ended with 4")
    assert found.keys() == {"attngen", "flex"}


def test_flash_is_timed_with_attngen_alone() -> None:
    assert group_lanes(LANES, is_timed=True) == [("attngen", "flex"), ("attngen", "flex_flash")]
    assert group_lanes(LANES, is_timed=False) == [LANES]
    assert group_lanes(("flex", "flex_flash"), is_timed=True) == [("flex",), ("flex_flash",)]
    assert group_lanes(("attngen", "flex_flash"), is_timed=True) == [("attngen", "flex_flash")]
    assert group_lanes(("flex",), is_timed=True) == [("flex",)]


def test_a_ratio_is_of_one_process() -> None:
    text = render(
        [
            record("a", "attngen", 1.0),
            record("a", "flex", 2.0, own_ms=1.0),
            record("a", "flex_flash", 2.0, own_ms=1.6),
        ]
    )
    assert "| a | 1.000 | 2.000 | 2.000 | 2.00 | 1.25 |" in text


def test_files_are_merged() -> None:
    environment, end = {"suite": "environment", "gpu": "H200"}, {"suite": "end", "lost": []}
    first = [environment, record("a", "attngen", 1.0), record("a", "flex", None, reason="no"), end]
    second = [environment, record("a", "flex", 1.5, own_ms=1.0), record("a", "attngen", None), end]
    found = merge([first, second])
    assert [r.get("ms") for r in found if r["suite"] == SUITE] == [1.0, 1.5]
    assert [r["suite"] for r in found].count("end") == 2
    assert "on H200" in render(found)


def test_the_table_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record("a", "attngen", 1.0)) + "\n", "utf-8")
    assert main(["--merge", str(path)]) == 0
    assert "| a | 1.000 |" in capsys.readouterr().out
