"""`benchmarks.beside_causal`: what a variant costs beside causal attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attngen.backend.nvrtc import load_nvrtc
from benchmarks import beside_causal
from benchmarks.attention import RESULTS
from benchmarks.beside_causal import main, of_causal
from benchmarks.cells import Cell
from benchmarks.peers import RefusedError


def cell_of(variant: str) -> Cell:
    return Cell("variants", variant, "bf16", B=1, S=64, Hq=1, Hkv=1, D=128, Dv=128)


def test_a_variant_of_the_same_pairs_costs_what_it_takes_longer() -> None:
    assert of_causal(cell_of("alibi"), ms=2.0, causal_ms=1.5) == pytest.approx(0.75)


def test_only_pairs_that_attend_count() -> None:
    size = 64 // 8  # the window is an eighth of the length
    pairs, causal = sum(min(q + 1, size) for q in range(64)), 64 * 65 // 2
    assert of_causal(cell_of("window"), ms=pairs / causal, causal_ms=1.0) == pytest.approx(1.0)


def test_a_dry_run_does_not_write_to_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--out", str(RESULTS)])
    assert "a dry run does not write to benchmarks/results" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nothing", "causal"])
def test_what_cannot_be_put_beside_causal_is_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--variants", name])
    assert f"'{name}' is none of window, prefix_lm" in capsys.readouterr().err


def test_each_round_has_a_line_with_both_times(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    arguments = ["--device", "cpu", "--variants", "alibi", "--schedule", "auto", "--rounds", "2"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    first, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first["suite"] == "environment"
    assert first["versions"]["NVRTC"] == ".".join(map(str, load_nvrtc().version()))
    assert [(line["suite"], line["variant"]) for line in lines] == [("beside_causal", "alibi")] * 2
    for line in lines:
        ratio = line["causal_ms"] / line["ms"]
        assert line["of_causal"] == pytest.approx(ratio, rel=1e-2)


def test_a_wrong_result_has_a_line_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")

    def refuse(*_: object) -> None:
        raise RefusedError("wrong: 3 off")

    monkeypatch.setattr(beside_causal, "make_ready", refuse)
    arguments = ["--device", "cpu", "--variants", "relative", "--schedule", "auto", "--rounds", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.iterdir()
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    assert (last["ms"], last["reason"]) == (None, "relative: wrong: 3 off")
