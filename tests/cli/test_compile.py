"""`attngen compile`: all files of a target or none, the same bytes every time, and a manifest
from which a kernel can be launched without attngen.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen.backend.nvrtc import load_nvrtc
from attngen.cpu.build import build_library, find_compiler
from attngen.cpu.run import MemoryRange, run_on_cpu
from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.load import load_file
from attngen.kernels import forward_mma
from attngen.oracle.dense import reference

from .runner import Result, run, run_process, write


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    try:
        load_nvrtc()
    except AttnError as error:
        pytest.skip(error.diagnostics[0].message())


def test_files_of_two_targets(causal: Path, tmp_path: Path) -> None:
    out = tmp_path / "build" / "deep"
    result = run("compile", causal, "--arch", "sm_80,sm_90a", "-o", out)
    assert result.code == 0
    expected = [
        f"causal_lm.{t}.{suffix}" for t in ("sm_80", "sm_90a") for suffix in ("cu", "cubin", "json")
    ]
    assert sorted(os.listdir(out)) == sorted(expected)
    assert [line.split()[0] for line in result.out.splitlines()] == [
        str(out / name) for name in expected
    ]
    for word in ("registers", "KiB shared", "no spills"):
        assert word in result.out


def test_resources_are_those_of_the_launch_that_writes_the_outputs(tmp_path: Path) -> None:
    """And not of the one ahead of it, which summarises keys with few threads and registers."""
    result = run(
        "compile", "examples/packed_documents.attn", "--head-dim", "64", "--dtype", "bf16",
        "--arch", "sm_80", "-o", tmp_path,
    )  # fmt: skip
    assert result.code == 0
    manifest = json.loads((tmp_path / "packed_documents.sm_80.json").read_text())
    ahead, main = manifest["launches"]
    assert f"{main['threads']} threads, {main['registers']} registers" in result.out
    assert f"{ahead['threads']} threads, {ahead['registers']} registers" not in result.out


def test_everything_that_can_be_emitted(causal: Path, tmp_path: Path) -> None:
    result = run(
        "compile", causal, "--arch", "sm_80", "-o", tmp_path / "o", "--emit",
        "cu,cubin,ptx,ir,program",
    )  # fmt: skip
    assert result.code == 0
    texts = {path.suffix: path.read_bytes() for path in (tmp_path / "o").iterdir()}
    assert texts[".cubin"].startswith(b"\x7fELF")
    assert b".target sm_80" in texts[".ptx"]
    assert b"attention causal_lm {" in texts[".ir"]
    assert texts[".program"].startswith(b"program causal_lm")
    assert json.loads(texts[".json"])["files"].keys() == {"cu", "cubin", "ptx", "ir", "program"}


def test_only_what_is_asked_for(causal: Path, tmp_path: Path) -> None:
    assert run("compile", causal, "--emit", "ir", "--arch", "sm_80", "-o", tmp_path / "o").code == 0
    assert os.listdir(tmp_path / "o") == ["causal_lm.sm_80.ir"]


def test_the_same_bytes_from_two_processes(documents: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for i, folder in enumerate(folders):
        result = run_process(
            "compile", documents, "--arch", "sm_90a", "-o", folder,
            ATTNGEN_CACHE="0", PYTHONHASHSEED=str(i),
        )  # fmt: skip
        assert result.code == 0, result.err
    names = sorted(os.listdir(folders[0]))
    assert len(names) == 3
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        ("attention a {\n    mask kv <= qpos\n}\n", (), "A714"),
        ("attention a {\n    dtype bf16\n}\n", (), "A714"),
        ("attention a {\n    mask kw <= qpos\n}\n", (), "A201"),
        ("attention a { }\n", ("--dtype", "bf16", "--head-dim", "512"), "A235"),
        ("attention a { }\n", ("--dtype", "bf16", "--head-dim", "64", "--arch", "sm_91"), "A491"),
        (
            "attention a { }\n",
            ("--dtype", "bf16", "--head-dim", "64", "--schedule", "tiles 4"),
            "A4",
        ),
    ],
)
def test_errors_write_nothing(
    text: str, options: tuple[str, ...], code: str, tmp_path: Path
) -> None:
    spec = write(tmp_path, text)
    result = run("compile", spec, *options, "-o", tmp_path / "o")
    assert result.code == 2
    assert f"error[{code}" in result.err
    assert not (tmp_path / "o").exists()


def test_both_open_choices_are_asked_for_at_once(tmp_path: Path) -> None:
    result = run("compile", write(tmp_path, "attention a {\n    mask kv <= qpos\n}\n"))
    assert "--dtype bf16" in result.err
    assert "--head-dim 128" in result.err


def test_a_target_that_fails_leaves_the_others_unwritten(
    causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attngen.cli import compile as module
    from attngen.compiler import Rendered

    compile_rendered = module.compile_rendered

    def fail_for_one(rendered: Rendered) -> Any:
        if rendered.target.name == "sm_90a":
            load_nvrtc()
            from attngen.backend.errors import CompilerFailed

            raise AttnError(CompilerFailed(None, "x", "NVRTC", "broken", "", ""))
        return compile_rendered(rendered)

    monkeypatch.setattr(module, "compile_rendered", fail_for_one)
    result = run("compile", causal, "--arch", "sm_80,sm_90a", "-o", tmp_path / "o")
    assert result.code == 2
    assert not (tmp_path / "o").exists()


def test_what_was_there_stays_when_a_file_cannot_be_written(causal: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.mkdir()
    (out / "causal_lm.sm_80.cu").write_text("precious")
    (out / "causal_lm.sm_80.json").mkdir()
    result = run("compile", causal, "--arch", "sm_80", "-o", out)
    assert result.code == 2
    assert "error[A713]" in result.err
    assert (out / "causal_lm.sm_80.cu").read_text() == "precious"
    assert sorted(os.listdir(out)) == ["causal_lm.sm_80.cu", "causal_lm.sm_80.json"]


def test_an_output_folder_that_is_a_file(causal: Path, tmp_path: Path) -> None:
    (tmp_path / "o").write_text("")
    result = run("compile", causal, "--arch", "sm_80", "-o", tmp_path / "o")
    assert result.code == 2
    assert "error[A713]" in result.err


def test_consts_and_schedule_reach_the_text(documents: Path, tmp_path: Path) -> None:
    result = run(
        "compile", documents, "-D", "W=7", "--schedule", "tile q = 8, kv = 16; passes two",
        "--arch", "sm_80", "-o", tmp_path,
    )  # fmt: skip
    assert result.code == 0
    manifest = json.loads((tmp_path / "documents.sm_80.json").read_text())
    assert manifest["schedule"]["tile_q"] == 8
    assert manifest["schedule"]["passes"] == "two"
    text = (tmp_path / "documents.sm_80.cu").read_text()
    assert "const     W = 7" in text


# ---- the manifest ------------------------------------------------------------------------------


def _compile(spec: Path, folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    result = run("compile", spec, "--arch", "sm_80", "-o", folder, *options)
    assert result.code == 0, result.err
    (json_path,) = folder.glob("*.json")
    manifest = json.loads(json_path.read_text())
    return (folder / manifest["files"]["cu"]).read_text(), manifest


def test_what_it_asks_of_operands(causal: Path, documents: Path, tmp_path: Path) -> None:
    _, manifest = _compile(causal, tmp_path / "fp32")
    assert manifest["launches"][-1]["family"] == "forward_simt"
    assert manifest["operands"] == {"alignment_bytes": 1, "contiguous_rows": False}
    _, manifest = _compile(documents, tmp_path / "bf16")
    assert manifest["launches"][-1]["family"] == "forward_mma"
    assert manifest["operands"] == {"alignment_bytes": 16, "contiguous_rows": True}


def test_its_schema(documents: Path, tmp_path: Path) -> None:
    _, manifest = _compile(documents, tmp_path / "o")
    assert set(manifest) == {
        "arguments", "attention", "attngen_version", "compiler", "digests", "files", "format",
        "launches", "name", "notes", "operands", "schedule", "target",
    }  # fmt: skip
    assert manifest["format"] == "attngen-manifest/1"
    assert set(manifest["launches"][0]) == {
        "barriers", "code_bytes", "dynamic_shared_bytes", "family", "grid", "hands_out_tiles",
        "kernel", "launch_when", "max_threads", "needs_shared_opt_in", "parameters", "registers",
        "spill_load_bytes", "spill_store_bytes", "stack_bytes", "static_shared_bytes",
        "tensor_maps", "threads", "workspaces",
    }  # fmt: skip
    assert set(manifest["digests"]) == {"code", "cubin", "source", "spec", "template"}
    assert manifest["attention"]["tensors"] == [{
        "name": "doc", "element": "int32",
        "dims": [{"size": "B", "optional": False}, {"size": "Skv", "optional": False}],
    }]  # fmt: skip
    (cap,) = manifest["attention"]["params"]
    assert (cap["name"], cap["type"], cap["default"]) == ("cap", "float", 20.0)
    fields = manifest["arguments"]["fields"]
    assert all(set(field) == {
        "bytes", "c_type", "meaning", "name", "nullable", "offset", "type",
    } for field in fields)  # fmt: skip
    assert all(field["meaning"] for field in fields)
    ends = [field["offset"] + field["bytes"] for field in fields]
    assert [field["offset"] for field in fields] == [0, *ends[:-1]]
    assert manifest["arguments"]["bytes"] == -(-ends[-1] // 8) * 8
    assert manifest["launches"][0]["parameters"] == [
        {"offset": 0, "ordinal": 0, "size": manifest["arguments"]["bytes"]}
    ]


def test_a_tensor_whose_tiles_are_copied_has_a_tensor_map(tmp_path: Path) -> None:
    lines = "    tensor x : bf16[B, Hq, Sq, Skv]\n    score s + x[b, h, q, kv]\n"
    path = write(tmp_path, f"attention biased {{\n{lines}}}\n")
    result = run(
        "compile", path, "--arch", "sm_90a", "--head-dim", "64", "--dtype", "bf16",
        "--schedule", "kernel forward_wgmma; tile q = 128, kv = 64", "-o", tmp_path,
    )  # fmt: skip
    assert result.code == 0
    manifest = json.loads((tmp_path / "biased.sm_90a.json").read_text())
    (launch,) = manifest["launches"]
    assert launch["tensor_maps"][-1] == {
        "argument": "map_x0", "operand": "t_x", "dimensions": [3, 2, 1, 0], "box": [64, 128, 1, 1],
        "swizzle_bytes": 128, "interleave": "none", "outside": "zeros",
    }  # fmt: skip
    meanings = {field["name"]: field["meaning"] for field in manifest["arguments"]["fields"]}
    assert "`tensor_maps`" in meanings["map_x0"]
    assert "map_x0 is there" in meanings["has_x0"]


def test_it_names_no_machine(causal: Path, tmp_path: Path) -> None:
    _, manifest = _compile(causal, tmp_path / "o")
    assert str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [("loop q, kv", 1), ("loop kv, q; passes two", 1), ("kernel forward_mma; tile q = 16", 2)],
)
def test_a_kernel_is_launched_from_it_alone(
    schedule: str,
    count: int,
    documents: Path,
    tmp_path: Path,
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of attngen's own knowledge of arguments is used, as another language would not."""
    try:
        find_compiler()
    except AttnError as error:
        pytest.skip(error.diagnostics[0].message())
    monkeypatch.setattr(forward_mma, "PREPASS_KEYS", 49)
    text, manifest = _compile(documents, tmp_path / "o", "--schedule", schedule)
    rng = np.random.default_rng(0)
    B, Hq, Hkv, Sq, Skv, D = 2, 4, 2, 37, 50, 32
    from attngen.backend.device import numpy_dtype

    bf16 = numpy_dtype("bf16")
    q = rng.standard_normal((B, Hq, Sq, D)).astype(bf16)
    k, v = (rng.standard_normal((B, Hkv, Skv, D)).astype(bf16) for _ in range(2))
    doc = np.sort(rng.integers(0, 3, (B, Skv)), axis=1).astype(np.int32)
    o, lse = np.zeros((B, Hq, Sq, D), bf16), np.zeros((B, Hq, Sq), np.float32)
    numbers = {
        "B": B, "Hq": Hq, "Hkv": Hkv, "Sq": Sq, "Skv": Skv, "q_begin": 0, "q_end": Sq,
        "kv_begin": 0, "kv_end": Skv,
    }  # fmt: skip
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "t_doc": doc}
    formulas = {**numbers, "ceil_div": lambda a, b: -(-a // b)}
    due = []
    for launch in manifest["launches"]:
        grid = eval(launch["grid"], formulas)
        if not eval(launch["launch_when"], {**formulas, "grid": grid}):
            continue
        due.append((launch, grid))
        for workspace in launch["workspaces"]:
            size = eval(workspace["bytes"], formulas)
            arrays[workspace["argument"]] = np.zeros(size, np.uint8)
    assert len(due) == count
    values: dict[str, int | float] = {**numbers, "p_cap": 20.0}
    values |= {name: array.ctypes.data for name, array in arrays.items()}
    for name in "qkvo":
        for i, dim in enumerate("bhsd"):
            values[f"{name}_stride_{dim}"] = arrays[name].strides[i] // arrays[name].itemsize
    for i in range(2):
        values[f"t_doc_stride{i}"] = doc.strides[i] // doc.itemsize
        values[f"t_doc_size{i}"] = doc.shape[i]
    block = bytearray(manifest["arguments"]["bytes"])
    formats = {"pointer": "<Q", "int64": "<q", "int32": "<i", "float32": "<f"}
    for field in manifest["arguments"]["fields"]:
        value = values.get(field["name"], 0)
        assert field["name"] in values or field["nullable"], field
        struct.pack_into(formats[field["type"]], block, field["offset"], value)
    written = {"o", "lse", "key_ends", "state_m", "state_l", "state_acc"}
    ranges = [
        MemoryRange.of(array, is_writable=name in written, name=name)
        for name, array in arrays.items()
    ]
    for launch, grid in due:
        run_on_cpu(
            build_library(text, cache_dir=cache_folder / "host"),
            launch["kernel"],
            bytes(block),
            grid=grid,
            threads=launch["threads"],
            shared_bytes=launch["dynamic_shared_bytes"],
            ranges=ranges,
        )
    right = reference(load_file(documents), q, k, v, tensors={"doc": doc})
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()


@pytest.mark.parametrize("loop", ["q, kv", "kv, q"])
@pytest.mark.parametrize("rows", [(0, 37), (5, 6), (0, 0)])
def test_the_grid_is_the_one_that_is_launched(
    loop: str, rows: tuple[int, int], documents: Path
) -> None:
    from attngen.api import Kernel
    from attngen.cli.problem import make_problem
    from attngen.engines.outputs import grid_size
    from attngen.manifest import grid_formula

    kernel = Kernel(load_file(documents), schedule=f"loop {loop}; kernel forward_simt")
    launch = kernel.render().launch
    binding = make_problem(
        kernel.attention, shape={"Sq": 37}, values={}, inputs={},
        defaults={"B": 3, "Hq": 4, "Sq": 37}, seed=0,
    ).binding  # fmt: skip
    names: dict[str, Any] = {"B": 3, "Hq": 4, "q_begin": rows[0], "q_end": rows[1]}
    grid = eval(grid_formula(launch), {**names, "ceil_div": lambda a, b: -(-a // b)})
    launched = grid if grid > 0 and rows[1] > rows[0] else 0
    assert launched == grid_size(replace(binding, rows=rows), launch)


def test_infinity_is_json(tmp_path: Path) -> None:
    spec = write(
        tmp_path,
        "attention a {\n    dtype fp32\n    head_dim 8\n    param t : float = -inf\n"
        "    score where(s > t, s, -inf)\n}\n",
    )
    _, manifest = _compile(spec, tmp_path / "o")
    assert manifest["attention"]["params"][0]["default"] == "-inf"


def test_a_cubin_that_does_not_fit_is_a_bug(
    causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attngen import manifest as module

    read: Callable[[bytes], Any] = module.read_resources
    monkeypatch.setattr(module, "read_resources", lambda binary: {"other": read(binary)})
    result: Result = run("compile", causal, "--arch", "sm_80", "-o", tmp_path / "o")
    assert result.code == 2
    assert "error[A901]" in result.err
    assert not (tmp_path / "o").exists()
