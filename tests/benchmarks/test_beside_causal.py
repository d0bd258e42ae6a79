"""`benchmarks.beside_causal`: what a variant costs beside plain causal attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.beside_causal import main


def test_a_record_has_the_ratio_of_its_two_times(tmp_path: Path) -> None:
    path = tmp_path / "beside.jsonl"
    arguments = ["--device", "cpu", "--variants", "alibi", "--schedule", "auto", "--rounds", "2"]
    assert main([*arguments, "--out", str(path)]) == 0
    first, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first["suite"] == "environment"
    assert [line["variant"] for line in lines] == ["alibi", "alibi"]
    for line in lines:  # ALiBi attends to the same pairs
        assert line["of_causal"] == pytest.approx(line["causal_ms"] / line["ms"], rel=1e-2)


def test_a_variant_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--variants", "nothing"])
    assert "no variant is named nothing; there are causal" in capsys.readouterr().err
