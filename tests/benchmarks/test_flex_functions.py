"""FlexAttention's functions: which are chosen, that each is right, and what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.flex_functions import SUITE, choose_functions, expect, judge, main, render
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
