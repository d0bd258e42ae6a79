"""Whatever a file or an argument holds: an error in words, and never a traceback."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .runner import CAUSAL, DOCUMENTS, run

QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = """
    attention a { } dtype bf16 head_dim mask score kv <= qpos and or not ( ) [ ] = , : s where
    tensor doc int32 [B,Skv] const W 4 param x float exp log 1e30 // % ** - 0 inf nan schedule
    tile q passes two length weights softmax sink output o lse import " # é causal window
"""
SCRAPS = st.sampled_from([*WORDS.split(), "\n", "\0", "\t"])


def _fuzz(command: str, data: bytes, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.attn"
        spec.write_bytes(data)
        result = run(command, spec, *options)
        assert result.code in (0, 1, 2)
        assert "A902" not in result.err, result.err
        if result.code == 2:
            assert result.err.startswith("error[A")
            assert spec.read_bytes() == data


@QUICK
@given(st.binary(max_size=300))
def test_bytes(data: bytes) -> None:
    for command in ("check", "fmt"):
        _fuzz(command, data)


@QUICK
@given(st.lists(SCRAPS, max_size=40).map(" ".join))
def test_scraps_of_the_language(text: str) -> None:
    for command in ("check", "fmt"):
        _fuzz(command, text.encode())


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """One of two good files with some lines and characters changed."""
    lines = draw(st.sampled_from([CAUSAL, DOCUMENTS])).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["drop", "repeat", "cut", "scrap"])):
            case "drop":
                lines[i] = ""
            case "repeat":
                lines.insert(i, lines[i])
            case "cut":
                lines[i] = lines[i][: draw(st.integers(0, len(lines[i])))]
            case "scrap":
                at = draw(st.integers(0, len(lines[i])))
                lines[i] = f"{lines[i][:at]} {draw(SCRAPS)} {lines[i][at:]}"
    return "\n".join(lines) + "\n"


@QUICK
@given(mutated())
def test_mutated_files(text: str) -> None:
    _fuzz("check", text.encode())
    _fuzz("run", text.encode(), "--device", "numpy", "--shape", "Sq=5,Skv=7")
    _fuzz("explain", text.encode(), "--no-compile", "--arch", "sm_80", "--shape", "Sq=5,Skv=7")


OPTIONS = ("--shape", "--set", "-D", "--head-dim", "--dtype", "--rows", "--schedule", "--seed")


@QUICK
@given(st.sampled_from(OPTIONS), st.text(max_size=12) | st.lists(SCRAPS, max_size=6).map(" ".join))
def test_option_values(option: str, value: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.attn"
        spec.write_text(DOCUMENTS)
        result = run("run", spec, "--device", "numpy", "--shape", "Sq=5,Skv=7", option, value)
        assert result.code in (0, 2)
        assert "A902" not in result.err, (option, value, result.err)


@QUICK
@given(
    st.sampled_from(["W", "cap", "doc", "Sq", "B", "Hq", "Dqk"]),
    st.sampled_from(["-1", "0", "1", "2", "1e30", "inf", "nan", "true", "9" * 30, "0x10", "1,2"]),
)
def test_numbers(name: str, value: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.attn"
        spec.write_text(DOCUMENTS)
        for option in ("--set", "-D", "--shape"):
            result = run("run", spec, "--device", "numpy", option, f"{name}={value}")
            assert result.code in (0, 1, 2)
            assert "A902" not in result.err, (option, name, value, result.err)


@QUICK
@given(st.binary(max_size=200), st.integers(0, 400))
def test_array_files(noise: bytes, at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec, path = Path(folder) / "spec.attn", Path(folder) / "in.npz"
        spec.write_text(DOCUMENTS)
        np.savez(path, q=np.zeros((1, 4, 3, 32), np.float16), doc=np.zeros((1, 3), np.int32))
        data = path.read_bytes()
        path.write_bytes(data[:at] + noise + data[at + len(noise) :])
        result = run("run", spec, "--inputs", path, "--device", "numpy")
        assert result.code in (0, 2)
        assert "A902" not in result.err, result.err
