"""`attngen explain`: the mask drawn, pairs counted, and the cost of a kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .runner import run, write

QUICK = ("--no-compile", "--arch", "sm_80")


def _block(out: str, title: str) -> list[str]:
    """The lines below a title, up to the next empty one."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return [line.strip() for line in lines[start + 1 : end]]


def test_the_first_rows_of_a_causal_mask(causal: Path) -> None:
    result = run("explain", causal, *QUICK, "--shape", "B=1,Sq=4,Skv=6", "--rows", "9")
    assert result.code == 0
    assert _block(result.out, "mask, first rows") == [
        "kv 0",
        "q 0  qpos 2 | ███···",
        "q 1  qpos 3 | ████··",
        "q 2  qpos 4 | █████·",
        "q 3  qpos 5 | ██████",
    ]
    assert "mask, all of it" not in result.out


def test_what_is_computed(documents: Path) -> None:
    result = run("explain", documents, *QUICK)
    assert _block(result.out, "computes") == [
        "scale    1 / sqrt(Dqk)",
        "score    softcap(s, cap)",
        "mask     window(left = W - 1) and doc[b, qpos] == doc[b, kv]",
        "weights  softmax: exp(s) over its sum along the attending keys",
        "output   o, lse (natural logarithm, after scale, score, mask and sink)",
    ]
    assert "doc : int32[1, 1024]  made: ids 1 to 4, in order along the tokens" in result.out
    assert "cap = 20.0" in result.out


def test_the_work(causal: Path) -> None:
    result = run("explain", causal, *QUICK, "--shape", "B=2,Hq=4,Hkv=1,Sq=8,Skv=10")
    pairs = 2 * 4 * sum(10 - 8 + q + 1 for q in range(8))
    moved = 4 * (2 * 4 * 8 * 32 + 2 * 1 * 10 * 32 + 2 * 4 * 8)
    assert _block(result.out, "work") == [
        f"pairs      {pairs:,} of 640 attend, {pairs / 640:.2%} (counted)",
        f"FLOPs      {2 * pairs * 32 / 1000:.4g} k = 2 · pairs · (Dqk + Dv)",
        f"bytes      {moved / 1000:.4g} kB: q, k, v read once, o written once",
        f"intensity  {2 * pairs * 32 / moved:.1f} FLOPs a byte",
    ]


def test_the_whole_mask_in_small(causal: Path) -> None:
    result = run("explain", causal, *QUICK, "--shape", "Sq=32,Skv=96")
    rows = _block(result.out, "mask, all of it")
    assert len(rows) == 16
    assert all(len(row) == 48 for row in rows)
    assert rows[-1] == "█" * 47 + "▓"
    assert rows[0].startswith("█" * 32)


def test_a_large_problem_is_sampled_and_says_so(causal: Path) -> None:
    result = run("explain", causal, *QUICK, "--shape", "B=3,Sq=100_000,Skv=200_000")
    assert result.code == 0
    (line,) = (line for line in _block(result.out, "work") if line.startswith("pairs"))
    assert "about" in line
    assert "estimated from" in line
    assert "of 100000 rows, evenly spaced" in line
    assert "75.0" in line


def test_the_diagonal_of_a_long_context_is_shown(causal: Path) -> None:
    result = run("explain", causal, *QUICK, "--shape", "Sq=2,Skv=5000", "--rows", "2")
    heading, first, second = _block(result.out, "mask, first rows")
    assert heading.split() == ["kv", "0", "kv", "4959"]
    assert first == f"q 0  qpos 4998 | {'█' * 12} … {'█' * 40}·"
    assert second == f"q 1  qpos 4999 | {'█' * 12} … {'█' * 41}"


def test_a_mask_that_depends_on_the_score(tmp_path: Path) -> None:
    spec = write(tmp_path, "attention a {\n    score where(s > 0.5 or kv == 0, s, -inf)\n}\n")
    result = run("explain", spec, *QUICK, "--shape", "Sq=2,Skv=3")
    assert "q 0  qpos 1 | █??" in result.out
    assert "? depends on the score" in result.out
    assert "such pairs count as attending" in result.out
    spec = write(tmp_path, "attention a {\n    score where(kv > qpos, -inf, s)\n}\n")
    result = run("explain", spec, *QUICK, "--shape", "Sq=2,Skv=3")
    assert "q 0  qpos 1 | ██·" in result.out


def test_a_bias_that_masks(tmp_path: Path) -> None:
    spec = write(
        tmp_path,
        "attention a {\n    tensor bias : float[Sq, Skv]\n    score s + bias[q, kv]\n}\n",
    )
    bias = np.zeros((2, 3), np.float32)
    bias[0, 1] = -np.inf
    np.save(tmp_path / "bias.npy", bias)
    result = run("explain", spec, *QUICK, "--input", f"bias={tmp_path / 'bias.npy'}")
    assert "q 0  qpos 1 | █·█" in result.out


def test_heads_and_batches_of_their_own(tmp_path: Path) -> None:
    spec = write(
        tmp_path,
        "attention a {\n    tensor w : int32[B]\n    mask qpos - kv <= w[b] + h\n}\n",
    )
    result = run("explain", spec, *QUICK, "--set", "w=0,2", "--shape", "B=2,Hq=2,Hkv=2,Sq=4,Skv=4")
    # Every key from qpos - w[b] - h on: behind the diagonal all, before it w[b] + h.
    pairs = sum(
        sum(q - kv <= w + h for q in range(4) for kv in range(4)) for w in (0, 2) for h in (0, 1)
    )
    assert f"{pairs} of 64 attend" in result.out
    assert "of batch 0, head 0" in result.out


def test_a_param_without_a_value(tmp_path: Path) -> None:
    text = "attention a {\n    param w : int where 1 <= w < 9\n    mask kv < w\n}\n"
    spec = write(tmp_path, text)
    result = run("explain", spec, *QUICK)
    assert result.code == 0
    assert "it needs a value: pass --set w=…" in result.out
    assert "pairs" not in _block(result.out, "work")[0]
    assert _block(result.out, "kernels")[1].startswith("sm_80")
    result = run("explain", spec, *QUICK, "--set", "w=2", "--shape", "Sq=1,Skv=3")
    assert "q 0  qpos 2 | ██·" in result.out
    assert run("explain", spec, *QUICK, "--set", "w=9").code == 2


def test_a_tensor_of_one_number(tmp_path: Path) -> None:
    spec = write(tmp_path, "attention a {\n    tensor n : int32[B]\n    mask kv < n[b]\n}\n")
    result = run("explain", spec, *QUICK, "--set", "n=2", "--shape", "Sq=1,Skv=3")
    assert "n : int32[1]  --set" in result.out
    assert "q 0  qpos 2 | ██·" in result.out


def test_a_mask_that_cannot_be_drawn_says_what_it_needs(tmp_path: Path) -> None:
    text = "attention a {\n    tensor t : bool[4, 4]\n    mask t[q, kv]\n}\n"
    result = run("explain", write(tmp_path, text), *QUICK, "--shape", "Sq=6")
    assert result.code == 0
    assert "it cannot be drawn:" in result.out
    assert "--input t=t.npy, or other sizes" in result.out


@pytest.mark.parametrize("shape", ["B=0", "Sq=0", "Skv=0", "Sq=0,Skv=0"])
def test_empty_problems(shape: str, causal: Path) -> None:
    result = run("explain", causal, *QUICK, "--shape", shape)
    assert result.code == 0
    assert "0 of 0 attend" in result.out


def test_registers_of_every_target(causal: Path) -> None:
    result = run("explain", causal, "--arch", "sm_80,sm_120")
    assert result.code == 0
    heading, *rows = _block(result.out, "kernels")
    assert heading.split()[:2] == ["target", "family"]
    assert heading.endswith("registers  stack  spills")
    for name, row in zip(("sm_80", "sm_120"), rows, strict=False):
        assert row.startswith(name)
        assert row.endswith("none")
    assert "shared memory query" in rows[2]


def test_without_a_compiler_the_rest_is_said(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.backend.errors import ToolchainMissing
    from attngen.cli import explain
    from attngen.diagnostics.diagnostic import AttnError

    def fail(_: object) -> None:
        raise AttnError(ToolchainMissing(None, "`libnvrtc`", "no file", "nvrtc"))

    monkeypatch.setattr(explain, "compile_rendered", fail)
    result = run("explain", causal, "--arch", "sm_80")
    assert result.code == 0
    assert "no registers: no CUDA compiler" in result.out
    assert "sm_80" in result.out


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--shape", "Sqq=1"), "A716"),
        (("--set", "w=1"), "A716"),
        (("--shape", "Hq=3,Hkv=2"), "A627"),
        (("--shape", "Sq=99999999999"), "A629"),
        (("--arch", "sm_1"), "A491"),
        (("--input", "q=none.npy"), "A712"),
        (("--head-dim", "17"), "A2"),
    ],
)
def test_errors(options: tuple[str, ...], code: str, causal: Path) -> None:
    result = run("explain", causal, *options)
    assert result.code == 2
    assert f"error[{code}" in result.err


def test_which_schedule_runs_on_a_gpu_and_where_it_comes_from(
    causal: Path,
) -> None:
    shape = ("--shape", "B=2,Hq=16,Sq=512")
    result = run("explain", causal, *QUICK, *shape, "--device", "a100-80g")
    found = _block(result.out, "schedule")
    assert found[0] == "device  sm_80-108sm-163k-l2.40m-hbm2.0"
    assert found[1].startswith("runs    forward_simt")
    assert found[2].startswith("grade   model: no record for it")


def test_a_device_that_nobody_knows(causal: Path) -> None:
    result = run("explain", causal, *QUICK, "--device", "h2000")
    assert result.code != 0
    assert "A493" in result.err
