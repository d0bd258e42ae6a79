"""Layers of Llama with the attention of several libraries: what is exact, and what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import layer_stack
from benchmarks.layer_stack import main, render
from benchmarks.report import read_records

LINE = {"suite": "layer_stack", "B": 1, "S": 64, "layers": 4, "compiled": False}


def line(lane: str, graph_ms: float, rms_err: float) -> dict[str, Any]:
    return {**LINE, "lane": lane, "graph_ms": graph_ms, "eager_ms": 9.0, "rms_err": rms_err}


def test_attngen_is_compared_with_the_best_of_the_others() -> None:
    text = render([line("attngen", 4.0, 3e-3), line("cudnn", 5.0, 2e-3), line("fa2", 8.0, 6e-3)])
    assert "| cudnn | 5.000 | 9.000 | 0.002 |" in text
    assert "- graph: attngen is 1.250 times as fast" in text
    assert "Error: attngen's is 1.500 of the smallest" in text


def test_too_large_an_error_is_a_failure() -> None:
    others = [line("cudnn", 5.0, 2e-3), line("fa2", 5.0, 4e-3)]
    assert not layer_stack._is_too_far([*others, line("attngen", 4.0, 2.9e-3)])
    assert layer_stack._is_too_far([*others, line("attngen", 4.0, 3.1e-3)])


# ---- with PyTorch --------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("more", [[], ["--compile"]])
def test_a_dry_run_times_and_checks(more: list[str], tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path), *more]) == 0
    (file,) = tmp_path.glob("*.jsonl")
    first, *lanes = read_records(file.read_text("utf-8"))
    assert first["suite"] == "environment"
    assert [r["lane"] for r in lanes] == ["attngen", "fa2"]
    assert all(r["eager_ms"] > 0 and r["compiled"] == bool(more) for r in lanes)


def test_the_exact_attention_is_pytorchs(torch: Any) -> None:
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (torch.randn(2, 9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    turned = (x.transpose(1, 2) for x in (q, k, v))
    right = scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
    found = layer_stack._attend_densely(q, k, v)
    assert torch.allclose(found, right.transpose(1, 2), rtol=0, atol=1e-12)


def test_a_rotation_turns_pairs_by_their_distance(torch: Any) -> None:
    """The product of a rotated query and key depends on how far apart they are alone."""
    x = torch.zeros(1, 12, 1, dtype=torch.float64)
    cos, sin = layer_stack._rotation(x, 8)
    q, k = (torch.randn(8, dtype=torch.float64).expand(1, 12, 1, 8) for _ in range(2))
    turned = [layer_stack._rotate(y, cos, sin)[0, :, 0] for y in (q, k)]
    products = turned[0] @ turned[1].T
    for distance in (-3, 0, 5):
        along = products.diagonal(distance)
        assert torch.allclose(along, along[0].expand_as(along), rtol=0, atol=1e-12)
    assert not torch.allclose(products[0, 0], products[0, 1])
