"""The goldens: generated CUDA that is kept in the repository, and what is known about each.

    python -m tests.goldens                     write generated/ anew
    python -m tests.goldens --record F          take verifications from the results of a GPU run
    python -m tests.goldens --unverified WHY    say why the texts that changed are not verified yet

A golden is one example, dtype, head dim, schedule and target.  `generated/index.toml` holds the
digest of its text, the resources that the compiler gave it, and its last GPU verification;
a text that changed since then fails the suite until it is verified again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import attngen
from attngen import targets
from attngen.backend.cubin import read_resources
from attngen.backend.nvrtc import Compiled, compile_cuda, spills_from_log
from attngen.cli.guess import guess_sizes, make_tensor
from attngen.compiler import Rendered, lower_program, render_lowered
from attngen.ir.types import FLOATING

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "generated"
INDEX = GENERATED / "index.toml"


@dataclass(frozen=True)
class Golden:
    """One generated kernel that is kept."""

    name: str
    example: str
    target: str
    dtype: str
    head_dim: tuple[int, int]
    schedule: str | None = None
    consts: tuple[tuple[str, int], ...] = ()
    """Smaller windows and blocks than the example's, so that small problems reach their edges."""
    is_aligned: bool = True
    """The layout class: False for the text that takes any address and stride."""

    @property
    def file(self) -> str:
        return f"{self.target}/{self.name}.cu"

    @property
    def path(self) -> Path:
        return GENERATED / self.file

    def kernel(self, engine: attngen.api.Engine = "cpu") -> attngen.Kernel:
        return attngen.compile(
            ROOT / "examples" / f"{self.example}.attn",
            dtype=self.dtype,
            head_dim=self.head_dim,
            arch=self.target,
            engine=engine,
            schedule=self.schedule,
            consts=dict(self.consts),
            tune="off",
        )

    def render(self) -> Rendered:
        lowered = lower_program(
            self.kernel().checked, FLOATING[self.dtype], self.head_dim, targets.get(self.target)
        )
        return render_lowered(lowered, is_aligned=self.is_aligned)


_FA1 = "loop kv, q; passes fused; normalize every_tile"
_SAFE = "passes three; normalize every_tile"
_ONLINE = "passes two; normalize last"

_SIMT = "kernel forward_simt"
_WGMMA = "kernel forward_wgmma"
_MMA = "kernel forward_mma"
_MMA_WITH_ANY_TILE = f"{_MMA}; tile q = auto, kv = auto; stages auto"
_ONE_STAGE = "tile q = 32, kv = 32; stages 1"
_WINDOW = (("W", 24),)
_BLOCK = (("block", 16),)

GOLDENS = (
    # forward_simt
    Golden("causal_fp32_d64", "causal", "sm_80", "fp32", (64, 64)),
    Golden("causal_fp32_d64_three_passes", "causal", "sm_80", "fp32", (64, 64), _SAFE),
    Golden("causal_fp32_d64_two_passes", "causal", "sm_80", "fp32", (64, 64), _ONLINE),
    Golden("causal_fp32_d24_v20_keys_outside", "causal", "sm_80", "fp32", (24, 20), _FA1),
    Golden("softmax_off_by_one_fp32_d64", "softmax_off_by_one", "sm_80", "fp32", (64, 64)),
    Golden("alphafold_fp32_d32", "alphafold_pair_bias", "sm_100a", "fp32", (32, 32)),
    Golden("ragged_prefill_bf16_d20_v12", "ragged_prefill", "sm_80", "bf16", (20, 12)),
    Golden("causal_bf16_d256_simt", "causal", "sm_86", "bf16", (256, 256), _SIMT),
    Golden("sigmoid_fp16_d64_simt", "sigmoid_attention", "sm_89", "fp16", (64, 64), _SIMT),
    Golden("alibi_fp16_d64_simt", "alibi", "sm_90a", "fp16", (64, 64), _SIMT),
    # forward_mma
    Golden("full_bf16_d64", "full", "sm_80", "bf16", (64, 64)),
    Golden("causal_bf16_d128", "causal", "sm_80", "bf16", (128, 128)),
    Golden("causal_fp16_d256", "causal", "sm_86", "fp16", (256, 256)),
    Golden("causal_fp16_d64_one_stage", "causal", "sm_120", "fp16", (64, 64), _ONE_STAGE),
    Golden("causal_bf16_d40_v72", "causal", "sm_80", "bf16", (40, 72), "tile q = 64, kv = 32"),
    Golden("causal_bf16_d72_any_stride", "causal", "sm_89", "bf16", (72, 72), is_aligned=False),
    Golden(
        "gemma2_local_bf16_d256",
        "gemma2_local",
        "sm_90a",
        "bf16",
        (256, 256),
        _MMA_WITH_ANY_TILE,
        consts=(("W", 24),),
    ),
    Golden("grok_1_bf16_d128", "grok_1", "sm_90a", "bf16", (128, 128), _MMA),
    Golden("gpt_oss_bf16_d64", "gpt_oss", "sm_90a", "bf16", (64, 64), _MMA),
    Golden("mla_prefill_bf16_d192_v128", "mla_prefill", "sm_90a", "bf16", (192, 128), _MMA),
    Golden("sigmoid_fp16_d64", "sigmoid_attention", "sm_89", "fp16", (64, 64)),
    Golden("alibi_fp16_d64", "alibi", "sm_90a", "fp16", (64, 64), _MMA),
    Golden("alibi_bf16_d128", "alibi", "sm_90a", "bf16", (128, 128), _MMA),
    Golden("longformer_fp16_d64", "longformer", "sm_89", "fp16", (64, 64), consts=_WINDOW),
    Golden("prefix_lm_bf16_d64", "prefix_lm", "sm_90a", "bf16", (64, 64), _MMA),
    Golden("packed_documents_fp16_d64", "packed_documents", "sm_90a", "fp16", (64, 64), _MMA),
    Golden("padded_decode_fp16_d128", "padded_decode", "sm_90a", "fp16", (128, 128), _MMA),
    Golden("ragged_prefill_bf16_d64", "ragged_prefill", "sm_80", "bf16", (64, 64)),
    Golden(
        "natten_2d_fp16_d32",
        "natten_2d",
        "sm_120",
        "fp16",
        (32, 32),
        consts=(("columns", 6), ("size", 5)),
    ),
    Golden("speculative_tree_bf16_d64", "speculative_tree", "sm_90a", "bf16", (64, 64), _MMA),
    Golden(
        "block_sparse_bf16_d64",
        "block_sparse",
        "sm_90a",
        "bf16",
        (64, 64),
        _MMA,
        consts=(("block", 16),),
    ),
    Golden("alphafold_bf16_d32", "alphafold_pair_bias", "sm_80", "bf16", (32, 32)),
    Golden("t5_fp16_d64", "t5", "sm_89", "fp16", (64, 64)),
    # forward_wgmma
    Golden("full_bf16_d128_wgmma", "full", "sm_90a", "bf16", (128, 128)),
    Golden("causal_bf16_d64_wgmma", "causal", "sm_90a", "bf16", (64, 64)),
    Golden("causal_fp16_d128_wgmma", "causal", "sm_90a", "fp16", (128, 128)),
    Golden("causal_bf16_d256_wgmma", "causal", "sm_90a", "bf16", (256, 256)),
    Golden("causal_fp16_d96_v48_wgmma", "causal", "sm_90a", "fp16", (96, 48)),
    Golden("grok_1_bf16_d128_wgmma", "grok_1", "sm_90a", "bf16", (128, 128)),
    Golden("gpt_oss_bf16_d64_wgmma", "gpt_oss", "sm_90a", "bf16", (64, 64)),
    Golden("mla_prefill_bf16_d192_v128_wgmma", "mla_prefill", "sm_90a", "bf16", (192, 128)),
    Golden("sigmoid_fp16_d64_wgmma", "sigmoid_attention", "sm_90a", "fp16", (64, 64)),
    Golden("alibi_bf16_d128_wgmma", "alibi", "sm_90a", "bf16", (128, 128)),
    Golden(
        "packed_documents_bf16_d128_wgmma",
        "packed_documents",
        "sm_90a",
        "bf16",
        (128, 128),
        _WGMMA,
    ),
    Golden("padded_decode_fp16_d128_wgmma", "padded_decode", "sm_90a", "fp16", (128, 128)),
    Golden("ragged_prefill_bf16_d64_wgmma", "ragged_prefill", "sm_90a", "bf16", (64, 64)),
    Golden("alphafold_fp16_d32_wgmma", "alphafold_pair_bias", "sm_90a", "fp16", (32, 32)),
    Golden("t5_bf16_d64_wgmma", "t5", "sm_90a", "bf16", (64, 64)),
    Golden(
        "block_sparse_bf16_d64_wgmma", "block_sparse", "sm_90a", "bf16", (64, 64), consts=_BLOCK
    ),
)


@dataclass(frozen=True)
class Problem:
    """Inputs of one golden at one size."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    named: Mapping[str, Any]


def make_problem(golden: Golden, rows: int, keys: int, seed: int = 0) -> Problem:
    """Random inputs that the variant accepts, with the heads that it declares or 6 over 2."""
    from attngen.backend.device import numpy_dtype

    rng = np.random.default_rng(seed)
    attention = golden.kernel().attention
    Hq, Hkv = attention.heads_q or 6, attention.heads_kv or 2
    batch = 1 if Hq > 8 else 3  # many declared heads are enough work for one sequence
    Dqk, Dv = golden.head_dim
    dtype = numpy_dtype(FLOATING[golden.dtype].name)
    q, k, v = (
        _laid_out(rng.standard_normal(shape, dtype=np.float32).astype(dtype), golden.is_aligned)
        for shape in ((batch, Hq, rows, Dqk), (batch, Hkv, keys, Dqk), (batch, Hkv, keys, Dv))
    )
    sizes = {"B": batch, "Hq": Hq, "Hkv": Hkv, "Sq": rows, "Skv": keys, "Dqk": Dqk, "Dv": Dv}
    params = {p.name: _param_value(p) for p in attention.params}
    sizes |= guess_sizes(attention, sizes, params)
    named = {t.name: make_tensor(attention, t, sizes, rng)[0] for t in attention.tensors}
    if golden.example == "ragged_prefill":  # a sequence without rows, and one without keys
        named["q_length"][0] = named["kv_length"][1] = 0
    if golden.example == "grok_1":
        _add_large_scores(q, k)
    return Problem(q, k, v, {**named, **params})


_LARGE_PAIRS = ((0, 0), (16, 1), (40, 0), (57, 1))
"""Rows and keys: one for each warp of a tile, and for each place of a lane's four scores."""


def _add_large_scores(q: np.ndarray, k: np.ndarray) -> None:
    """A few products far from 0, each alone in what a warp computes in a step."""
    for column, (row, key) in enumerate(_LARGE_PAIRS):
        if row < q.shape[2] and key < k.shape[2]:
            q[:, :, row, column] = k[:, :, key, column] = 13.0


def _laid_out(x: np.ndarray, is_aligned: bool) -> np.ndarray:
    """The same numbers, or as a part of wider rows that begins in the middle of 16 bytes."""
    if is_aligned:
        return x
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def _param_value(param: Any) -> Any:
    if param.default is not None:
        return param.default
    low = param.bound.low if param.bound.low is not None else 1
    return type(low)(low + 1)


def sizes_of(golden: Golden) -> list[tuple[int, int]]:
    """(rows, keys) around the tiles: 1, tile - 1, tile + 1, 3 tile + 5."""
    tiles = golden.render().launch.tiles
    tq, tk = tiles.tile_q, tiles.tile_kv
    return [(1, 1), (tq - 1, tk - 1), (tq + 1, tk + 1), (3 * tq + 5, 3 * tk + 5)]


# ---- the index ---------------------------------------------------------------------------


def digest(text: str) -> str:
    """What a GPU has verified is named by: all of a text but the line of its header that names the
    digest of its template, which changes with branches that this text has none of."""
    lines = [line for line in text.splitlines() if not line.startswith("//   template ")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def measure(rendered: Rendered) -> dict[str, Any]:
    """What the compiler gives a golden."""
    compiled = compile_cuda(rendered.source, name="golden.cu", target=rendered.target)
    return resources_of(rendered, compiled)


def resources_of(rendered: Rendered, compiled: Compiled) -> dict[str, Any]:
    """Registers, stack, spills, shared memory."""
    kernel = rendered.launch.kernel
    resources = read_resources(compiled.binary)[kernel]
    spills = spills_from_log(compiled.log).get(kernel)
    return {
        "nvrtc": ".".join(compiled.compiler_version.split(".")[:2]),
        "registers": resources.registers,
        "stack_bytes": resources.stack_bytes,
        "spill_bytes": 0 if spills is None else spills.store_bytes + spills.load_bytes,
        "shared_bytes": rendered.launch.shared_bytes,
    }


def read_index() -> dict[str, dict[str, Any]]:
    """The entries by file name."""
    if not INDEX.is_file():
        return {}
    with INDEX.open("rb") as file:
        return {entry["file"]: entry for entry in tomllib.load(file)["golden"]}


def write_index(entries: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [
        "# What is known about each generated file.  Written by `python -m tests.goldens`;",
        "# `verified` is the last GPU run over this very text.",
        "",
    ]
    for golden in GOLDENS:
        lines.append("[[golden]]")
        lines += [f"{key} = {_toml(value)}" for key, value in entries[golden.file].items()]
        lines.append("")
    INDEX.write_text("\n".join(lines), encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def _entries() -> Iterator[tuple[Golden, Rendered, dict[str, Any]]]:
    old = read_index()
    for golden in GOLDENS:
        rendered = golden.render()
        entry: dict[str, Any] = {
            "file": golden.file,
            "example": golden.example,
            "target": golden.target,
            "dtype": golden.dtype,
            "head_dim": list(golden.head_dim),
            "schedule": golden.schedule or "",
            "is_aligned": golden.is_aligned,
            "consts": dict(golden.consts),
            "sha256": digest(rendered.source),
            "resources": measure(rendered),
        }
        before = old.get(golden.file, {})
        same = before.get("sha256") == entry["sha256"]
        for key in ("verified", "unverified"):
            if key in before and same:
                entry[key] = before[key]
        yield golden, rendered, entry


def write_goldens() -> None:
    """Write every file and the index; verifications of unchanged texts are kept."""
    entries = {}
    for golden, rendered, entry in _entries():
        golden.path.parent.mkdir(parents=True, exist_ok=True)
        golden.path.write_text(rendered.source, encoding="utf-8")
        entries[golden.file] = entry
    kept = {golden.path for golden in GOLDENS}
    for path in GENERATED.rglob("*.cu"):
        if path not in kept:
            path.unlink()
    write_index(entries)


def explain_unverified(reason: str) -> None:
    """Give a reason to every entry that no GPU run has verified and that has none yet."""
    entries = read_index()
    for entry in entries.values():
        if "verified" not in entry:
            entry.setdefault("unverified", reason)
    write_index(entries)


def record(results: Path) -> None:
    """Take the verifications of a GPU run (`tests/gpu/verify_goldens.py`) into the index."""
    found = json.loads(results.read_text(encoding="utf-8"))
    entries = read_index()
    for file, result in found["goldens"].items():
        entry = entries[file]
        if entry["sha256"] != result["sha256"]:
            raise SystemExit(f"{file}: the run verified another text")
        entry.pop("unverified", None)
        entry["verified"] = {
            "device": found["device"],
            "date": found["date"],
            "worst_error_over_bound": result["worst"],
            "command": found["command"],
        }
    write_index(entries)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--unverified", metavar="WHY")
    given = parser.parse_args()
    if given.record is not None:
        record(given.record)
    elif given.unverified is not None:
        explain_unverified(given.unverified)
    else:
        write_goldens()
