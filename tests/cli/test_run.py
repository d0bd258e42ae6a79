"""`attngen run`: inputs from files or made up, three devices, and an honest verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attngen.api import Kernel
from attngen.cpu.build import find_compiler
from attngen.diagnostics.diagnostic import AttnError

from .runner import Result, run, write

SMALL = ("--shape", "B=2,Hq=4,Hkv=2,Sq=21,Skv=40")


def _require_compiler() -> None:
    try:
        find_compiler()
    except AttnError as error:
        pytest.skip(error.diagnostics[0].message())


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_the_devices_of_any_machine(device: str, documents: Path) -> None:
    if device == "cpu":
        _require_compiler()
    result = run("run", documents, *SMALL, "--device", device)
    assert result.code == 0, result.out + result.err
    assert "compared all 21 rows with the float64 oracle" in result.out
    assert result.out.endswith("right: every element is within its bound\n")
    made = next(line for line in result.out.splitlines() if line.startswith("  doc "))
    assert made.split(maxsplit=3)[1:] == [
        "int32[2,", "40]", "made: ids 1 to 4, in order along the tokens"
    ]  # fmt: skip
    assert "of the bound at [b " in result.out


def test_cuda_without_a_gpu_says_so(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.backend.errors import GpuUnavailable
    from attngen.cli import run as module

    def fail() -> None:
        raise AttnError(GpuUnavailable(None, "no driver", None))

    monkeypatch.setattr(module, "load_driver", fail)
    result = run("run", causal, "--device", "cuda")
    assert result.code == 2
    assert "error[A611]" in result.err
    assert run("run", causal, *SMALL).code == 0


def test_no_compiler_says_so(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.cli import run as module
    from attngen.cpu.errors import NoCppCompiler

    def fail() -> None:
        raise AttnError(NoCppCompiler(None, "g++"))

    monkeypatch.setattr(module, "find_compiler", fail)
    assert run("run", causal, "--device", "cpu").code == 2


# ---- inputs -------------------------------------------------------------------------------------


def _arrays(rng: np.random.Generator, dtype: Any = np.float32) -> dict[str, Any]:
    q = rng.standard_normal((2, 4, 9, 32)).astype(dtype)
    k, v = (rng.standard_normal((2, 2, 30, 32)).astype(dtype) for _ in range(2))
    return {"q": q, "k": k, "v": v, "doc": np.zeros((2, 30), np.int64)}


def test_inputs_from_an_archive(documents: Path, tmp_path: Path) -> None:
    arrays = _arrays(np.random.default_rng(0))
    np.savez(tmp_path / "in.npz", **arrays, cap=np.float32(3.5), context=np.zeros(3))
    saved = tmp_path / "out.npz"
    result = run(
        "run", documents, "--inputs", tmp_path / "in.npz", "--save", saved, "--device", "numpy"
    )
    assert result.code == 0, result.err
    assert "in.npz, as bf16" in result.out
    assert "cap  3.5" in result.out
    assert "note: `context` of" in result.err
    out = np.load(saved)
    assert set(out.files) == {"o", "lse"}
    assert out["o"].shape == (2, 4, 9, 32)
    assert out["o"].dtype == np.float32
    named = {"doc": arrays["doc"].astype(np.int32), "cap": 3.5}
    rounded = [arrays[name].astype(ml_dtypes.bfloat16) for name in "qkv"]
    from attngen.frontend.load import load_file

    o, _ = Kernel(load_file(documents), engine="numpy")(*rounded, **named)
    assert (out["o"] == o.astype(np.float32)).all()


def test_single_arrays_win_over_an_archive(documents: Path, tmp_path: Path) -> None:
    arrays = _arrays(np.random.default_rng(0))
    np.savez(tmp_path / "in.npz", **arrays)
    np.save(tmp_path / "doc.npy", np.ones((2, 30), np.int32))
    result = run(
        "run", documents, "--inputs", tmp_path / "in.npz", "--device", "numpy",
        "--input", f"doc={tmp_path / 'doc.npy'}",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert " doc.npy\n" in result.out


def test_bf16_as_numpy_saves_it(documents: Path, tmp_path: Path) -> None:
    arrays = _arrays(np.random.default_rng(0), ml_dtypes.bfloat16)
    np.savez(tmp_path / "in.npz", **arrays)
    assert np.load(tmp_path / "in.npz")["q"].dtype.kind == "V"
    result = run("run", documents, "--inputs", tmp_path / "in.npz", "--device", "numpy")
    assert result.code == 0, result.err
    assert "in.npz\n" in result.out


def test_an_open_dtype_is_that_of_the_file(tmp_path: Path) -> None:
    spec = write(tmp_path, "attention a { }\n")
    np.save(tmp_path / "q.npy", np.zeros((1, 2, 5, 8), np.float16))
    result = run("run", spec, "--input", f"q={tmp_path / 'q.npy'}", "--device", "numpy")
    assert result.code == 0, result.err
    assert "k  fp16[1, 2, 5, 8]  made" in result.out


def test_layouts(documents: Path, tmp_path: Path) -> None:
    arrays = _arrays(np.random.default_rng(0))
    turned = {n: np.swapaxes(a, 1, 2) if n in "qkv" else a for n, a in arrays.items()}
    np.savez(tmp_path / "bhsd.npz", **arrays)
    np.savez(tmp_path / "bshd.npz", **turned)
    outputs = []
    for layout in ("bhsd", "bshd"):
        saved = tmp_path / f"out_{layout}.npz"
        result = run(
            "run", documents, "--inputs", tmp_path / f"{layout}.npz", "--layout", layout,
            "--save", saved, "--device", "numpy",
        )  # fmt: skip
        assert result.code == 0, result.err
        outputs.append(np.load(saved)["o"])
    assert outputs[1].shape == (2, 9, 4, 32)
    assert (outputs[0] == np.swapaxes(outputs[1], 1, 2)).all()


def test_made_inputs_depend_on_the_seed_alone(documents: Path, tmp_path: Path) -> None:
    outputs = []
    for i, seed in enumerate((0, 0, 1)):
        saved = tmp_path / f"{i}.npz"
        assert run(
            "run", documents, *SMALL, "--seed", seed, "--save", saved, "--device", "numpy"
        ).code == 0  # fmt: skip
        outputs.append(np.load(saved)["o"])
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] != outputs[2]).any()


def test_a_part_of_the_rows(documents: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.npz", tmp_path / "part.npz"
    assert run("run", documents, *SMALL, "--save", whole, "--device", "numpy").code == 0
    result = run("run", documents, *SMALL, "--save", part, "--device", "numpy", "--rows", "5:12")
    assert result.code == 0, result.err
    assert "compared all 7 rows" in result.out
    assert (np.load(part)["o"] == np.load(whole)["o"][:, :, 5:12]).all()


def test_every_output(tmp_path: Path) -> None:
    text = (
        "attention a {\n    dtype fp16\n    head_dim 8\n    tensor sink : float[Hq]\n"
        "    mask kv <= qpos\n    weights softmax(sink = sink[h])\n    output o, row_max\n}\n"
    )
    spec = write(tmp_path, text)
    for rows in ((), ("--rows", "2:9")):
        result = run("run", spec, "--device", "numpy", "--shape", "Sq=20,Skv=9", *rows)
        assert result.code == 0, result.err
        assert "rows see no key" in result.out
        for name in ("o ", "row_max ", "lse "):
            assert f"\n  {name}" in result.out


def test_sigmoid_has_no_lse(tmp_path: Path) -> None:
    text = "attention a {\n    mask kv <= qpos\n    weights sigmoid\n}\n"
    for rows in ((), ("--rows", "2:9")):
        result = run("run", write(tmp_path, text), "--device", "numpy", *rows)
        assert result.code == 0, result.err
        assert "\n  lse " not in result.out


@pytest.mark.parametrize("shape", ["B=0", "Sq=0", "Skv=0"])
def test_empty_problems(shape: str, causal: Path) -> None:
    result = run("run", causal, "--shape", shape, "--device", "numpy")
    assert result.code == 0, result.err


def test_consts_and_set_reach_the_kernel_and_the_oracle(documents: Path) -> None:
    result = run(
        "run", documents, *SMALL, "--device", "numpy", "-D", "W=1", "--set", "cap=0.5",
        "--set", "doc=1",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "168 of 6,720 pairs attend" in result.out
    assert "cap  0.5" in result.out


def test_a_large_problem_is_compared_in_part(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.cli.compare.MAX_PAIRS", 2000)
    result = run("run", causal, "--shape", "B=1,Hq=1,Hkv=1,Sq=100", "--device", "numpy")
    assert result.code == 0
    assert "compared 20 of 100 rows, evenly spaced, with the float64 oracle" in result.out


# ---- the verdict --------------------------------------------------------------------------------


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Change what a kernel returns; `spoiled["change"]` says how."""
    from attngen.cli import run as module

    real = module._run
    how: dict[str, Any] = {}

    def spoil(*arguments: Any) -> Any:
        outputs = real(*arguments)
        how["change"](outputs)
        return outputs

    monkeypatch.setattr(module, "_run", spoil)
    return how


def _spoil(spoiled: dict[str, Any], name: str, at: Any, value: float, spec: Path) -> Result:
    def change(outputs: dict[str, Any]) -> None:
        outputs[name][at] = value

    spoiled["change"] = change
    return run("run", spec, *SMALL, "--device", "numpy")


@pytest.mark.parametrize("value", [7.0, np.nan, np.inf])
@pytest.mark.parametrize(("name", "at"), [("o", (1, 2, 3, 4)), ("lse", (1, 2, 3))])
def test_a_wrong_element_is_found(
    name: str, at: tuple[int, ...], value: float, spoiled: dict[str, Any], causal: Path
) -> None:
    result = _spoil(spoiled, name, at, value, causal)
    assert result.code == 1
    place = "[b 1, h 2, row 3, d 4]" if name == "o" else "[b 1, h 2, row 3]"
    assert f"of the bound at {place}: {value:.6g}" in result.out
    assert f"of {name} are outside their bound" in result.out
    assert "wrong: 1 of" in result.out
    assert "right: " not in result.out


def test_a_wrong_row_of_a_part_has_its_own_number(spoiled: dict[str, Any], causal: Path) -> None:
    def change(outputs: dict[str, Any]) -> None:
        outputs["o"][0, 0, 0, 0] = 9.0

    spoiled["change"] = change
    result = run("run", causal, *SMALL, "--device", "numpy", "--rows", "5:9")
    assert result.code == 1
    assert "[b 0, h 0, row 5, d 0]" in result.out


# ---- bad inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "directory", "bytes", "pickle", "text", "archive"])
def test_bad_array_files(kind: str, causal: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.npy"
    match kind:
        case "directory":
            path.mkdir()
        case "bytes":
            path.write_bytes(b"\x93NUMPY\x01\x00\xff\xff nonsense")
        case "pickle":
            np.save(path, np.array([{}]), allow_pickle=True)
        case "text":
            np.save(path, np.array(["a"]))
        case "archive":
            np.savez(tmp_path / "in.npz", q=np.zeros(3))
            path = tmp_path / "in.npz"
    result = run("run", causal, "--input", f"q={path}", "--device", "numpy")
    assert result.code == 2
    assert "A902" not in result.err
    assert "error[A712]" in result.err or "error[A718]" in result.err
    if kind == "archive":
        assert f"pass --inputs {path}" in result.err


@pytest.mark.parametrize("kind", ["array", "bytes", "empty", "cut off"])
def test_bad_archives(kind: str, causal: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    match kind:
        case "array":
            with path.open("wb") as file:
                np.save(file, np.zeros(3))
        case "bytes":
            path.write_bytes(b"PK\x03\x04 nonsense")
        case "empty":
            path.write_bytes(b"")
        case "cut off":
            np.savez(path, q=np.zeros((1, 1, 4, 16)))
            path.write_bytes(path.read_bytes()[:-50])
    result = run("run", causal, "--inputs", path, "--device", "numpy")
    assert result.code == 2
    assert "error[A712]" in result.err


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"q": np.zeros((2, 4, 9))}, "A718", "four dimensions"),
        ({"q": np.zeros((3, 4, 9, 32))}, "A718", "B = 3, as `q` has"),
        ({"k": np.zeros((2, 3, 30, 32))}, "A718", "Hkv = 2"),
        ({"v": np.zeros((2, 2, 31, 32))}, "A718", "Skv = 30, as `k` has"),
        ({"q": np.zeros((2, 4, 9, 16))}, "A718", "Dqk = 32"),
        ({"q": np.zeros((2, 4, 9, 32), bool)}, "A718", "holds bool"),
        ({"q": np.zeros((2, 4, 9, 32), complex)}, "A718", "complex128"),
        ({"doc": np.zeros((2, 31), np.int32)}, "A621", "Skv = 30"),
        ({"doc": np.zeros((2, 30))}, "A718", "holds float64"),
        ({"doc": np.full((2, 30), 2**40)}, "A718", "1099511627776"),
        ({"cap": np.zeros(2)}, "A718", "one number"),
        ({"dok": np.zeros((2, 30), np.int32), "doc": None}, "A716", "did you mean `doc`"),
    ],
)
def test_arrays_that_do_not_fit(
    changes: dict[str, Any], code: str, said: str, documents: Path, tmp_path: Path
) -> None:
    arrays = {**_arrays(np.random.default_rng(0)), **changes}
    np.savez(tmp_path / "in.npz", **{n: a for n, a in arrays.items() if a is not None})
    result = run("run", documents, "--inputs", tmp_path / "in.npz", "--device", "numpy")
    assert result.code == 2
    assert f"error[{code}]" in result.err
    assert said in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--shape", "Hq=8"), "A711", "`documents` has Hq = 4"),
        (("--shape", "Sqq=8"), "A716", "did you mean `Sq`?"),
        (("--set", "cab=8"), "A716", "did you mean `cap`?"),
        (("--set", "cap=1,2"), "A711", "one number"),
        (("--set", "doc=1,2"), "A711", "shape (2, 128)"),
        (("--set", "doc=1.5"), "A718", "int32"),
        (("--set", "cap=true"), "A625", "a number"),
        (("--input", "dok=x.npy"), "A712", "no such file"),
        (("--rows", "9:5"), "A711", "no range"),
        (("--rows", "0:999"), "A711", "[0, 128)"),
        (("--dtype", "fp32"), "A2", "bf16"),
        (("--arch", "sm_81"), "A491", "sm_80"),
        (("--schedule", "passes four"), "A404", "three"),
        (("--save", "/none/at/all.npz"), "A713", "no folder"),
        (("--shape", "B=1,Sq=1000000000,Skv=2000000000"), "A719", "memory"),
    ],
)
def test_options_that_do_not_fit(
    options: tuple[str, ...], code: str, said: str, documents: Path
) -> None:
    result = run("run", documents, *options, "--device", "numpy")
    assert result.code == 2
    assert f"error[{code}" in result.err
    assert said in result.err
    assert result.out == ""


def test_an_unknown_single_input(documents: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    result = run("run", documents, "--input", f"dok={tmp_path / 'x.npy'}", "--device", "numpy")
    assert result.code == 2
    assert "did you mean `doc`?" in result.err


def test_a_param_without_a_value(tmp_path: Path) -> None:
    spec = write(tmp_path, "attention a {\n    param w : int\n    mask kv < w\n}\n")
    result = run("run", spec, "--device", "numpy")
    assert result.code == 2
    assert "error[A715]" in result.err
    assert "--set w=…" in result.err
    assert run("run", spec, "--device", "numpy", "--set", "w=3").code == 0


def test_a_tensor_that_cannot_be_made_up(tmp_path: Path) -> None:
    text = "attention a {\n    tensor t : bool[4, 4]\n    mask t[q, kv]\n}\n"
    result = run("run", write(tmp_path, text), "--device", "numpy", "--shape", "Sq=9")
    assert result.code == 2
    assert "error[A717]" in result.err
    assert "--input t=t.npy, or other sizes" in result.err


def test_nothing_is_saved_after_an_error(documents: Path, tmp_path: Path) -> None:
    saved = tmp_path / "out.npz"
    result = run("run", documents, "--shape", "Hq=8", "--save", saved, "--device", "numpy")
    assert result.code == 2
    assert not saved.exists()
