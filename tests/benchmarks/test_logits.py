"""Logits of whole models beside float64: the float64 attention, a run on the CPU, the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import logits
from benchmarks.logits import attend_exactly, main, render
from benchmarks.report import read_records


def line(model: str, ratio: float | None) -> dict[str, Any]:
    errors = {"attngen_err": 3e-3, "beside_err": 2e-3, "beside": "sdpa"}
    return {"suite": "logits", "model": model, "dtype": "bf16", "ratio": ratio, **errors}


def test_the_largest_ratio_is_named() -> None:
    failed = {**line("t5", None), "reason": "it | fails"}
    text = render([line("llama", 1.1), line("bert", 1.5), failed])
    assert "| bert | bf16 | 0.003 | 0.002 (sdpa) | 1.500 |" in text
    assert "| t5 | bf16 | it / fails | | – |" in text
    assert "Largest ratio 1.500 (bert)" in text


# ---- with PyTorch --------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    pytest.importorskip("transformers", reason="Transformers is not installed")
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("model", ["llama", "gpt_oss", "bert", "t5"])
def test_logits_are_as_good_as_pytorchs(model: str, tmp_path: Path) -> None:
    command = ["--device", "cpu", "--dtypes", "bf16", "--models", model, "--out", str(tmp_path)]
    assert main(command) == 0
    (file,) = tmp_path.glob("*.jsonl")
    _, found = read_records(file.read_text("utf-8"))
    assert found["model"] == model
    assert 0 < found["attngen_err"] < 0.05


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("ratio", [None, 1.51, 1.5])
def test_a_model_that_fails_or_is_too_far_is_a_failure(
    ratio: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {**line("bert", ratio), "reason": "it fails"}
    monkeypatch.setattr(logits, "measure_model", lambda *arguments: found)
    code = main(["--device", "cpu", "--dtypes", "bf16", "--models", "bert"])
    assert code == (0 if ratio == 1.5 else 1)


def test_exact_attention(torch: Any) -> None:
    """Grouped heads, a mask that leaves a row without keys, a bias; a sink takes its share."""
    q = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 7, 8, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(2, 1, 5, 7) < 0.7
    mask[0, 0, 3] = False
    bias = torch.randn(1, 4, 5, 7, dtype=torch.float64)
    o, _ = attend_exactly(None, q, k, v, mask, position_bias=bias)
    added = bias.expand(2, 4, 5, 7).masked_fill(~mask, -float("inf"))
    attend = torch.nn.functional.scaled_dot_product_attention
    right = attend(q, k, v, attn_mask=added, enable_gqa=True)
    assert torch.allclose(o, right.nan_to_num(0.0).transpose(1, 2), rtol=0, atol=1e-12)
    assert (o[0, 3] == 0).all()
    half, _ = attend_exactly(None, q * 0, k, v, None, s_aux=torch.full((4,), 7.0).log())
    mean = v.mean(2)[:, None].repeat_interleave(2, dim=2)
    assert torch.allclose(half, mean.expand(half.shape) / 2, rtol=0, atol=1e-7)
