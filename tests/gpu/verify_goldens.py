"""Verify every golden on the GPU at hand, and write what was found.

    python -m tests.gpu.verify_goldens OUT.json

For each golden, at sizes 1, tile - 1, tile + 1 and 3 tile + 5: poisoned outputs, compared with
the float64 oracle, 50 runs with the same bits, and the row state merged from two parts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import attngen
from tests.goldens import GOLDENS, Golden, Problem, digest, make_problem, sizes_of

RUNS = 50


def reference_of(golden: Golden, problem: Problem) -> attngen.Reference:
    """The float64 oracle's answer."""
    kernel = golden.kernel()
    params = {p.name: problem.named[p.name] for p in kernel.attention.params}
    tensors = {t.name: problem.named[t.name] for t in kernel.attention.tensors}
    return attngen.reference(
        kernel.unit,
        problem.q,
        problem.k,
        problem.v,
        tensors=tensors,
        params=params,
        consts=dict(golden.consts),
        dtype=golden.dtype,
    )


def error_over_bound(found: Any, right: attngen.Reference) -> float:
    """Largest error as a part of the bound; infinite where a value is wrong outright."""
    if not right.accepts_o(found).all():
        return float("inf")
    finite = np.isfinite(right.o) & (right.bound > 0)
    if not finite.any():
        return 0.0
    error = np.abs(found.astype(np.float64) - right.o)
    return float((error[finite] / right.bound[finite]).max())


def on_gpu(golden: Golden, target: str) -> attngen.Kernel:
    """The golden's own text, compiled for the GPU at hand."""
    from attngen import targets
    from attngen.api import _Compiled, _Key
    from attngen.backend.cache import compile_cached
    from attngen.backend.launch import CudaModule

    kernel = golden.kernel("cuda")
    rendered = golden.render()
    assert rendered.source == golden.path.read_text(encoding="utf-8")
    cubin = compile_cached(rendered.source, name=golden.name, target=targets.get(target)).binary
    module = CudaModule(cubin, name=golden.name)
    schedule = rendered.program.schedule
    key = _Key(golden.dtype, golden.head_dim, golden.target, False, golden.is_aligned, schedule)
    kernel._compiled[key] = _Compiled(rendered.program, rendered, module)
    return kernel


def on_device(x: np.ndarray) -> Any:
    """The same array on the GPU, with its strides: as rows of a wider array, where it is that."""
    import cupy

    whole = x if x.base is None else x.base
    found = cupy.asarray(np.ascontiguousarray(whole))
    if x.base is None:
        return found
    begin = (x.ctypes.data - whole.ctypes.data) // x.itemsize
    return found[..., begin : begin + x.shape[-1]]


def verify(golden: Golden, target: str, runs: int) -> float:
    import cupy

    kernel = on_gpu(golden, target)
    worst = 0.0
    for rows, keys in sizes_of(golden):
        problem = make_problem(golden, rows, keys)
        right = reference_of(golden, problem)
        q, k, v = (on_device(x) for x in (problem.q, problem.k, problem.v))
        named = {
            name: cupy.asarray(x) if isinstance(x, np.ndarray) else x
            for name, x in problem.named.items()
        }
        o = cupy.empty((*q.shape[:3], v.shape[3]), q.dtype)
        first = None
        for _ in range(runs):
            o.view(cupy.uint8)[...] = 0xFF  # NaN in every dtype
            kernel(q, k, v, out=o, **named)
            assert kernel.compilations == 1, f"{golden.file}: another text ran"
            bits = cupy.asnumpy(o.view(cupy.uint8))
            first = bits if first is None else first
            assert (bits == first).all(), f"{golden.file}: another run, other bits"
        worst = max(worst, error_over_bound(cupy.asnumpy(o), right))
        cut = keys // 2
        state = kernel.partial(q, k, v, kv_range=(0, cut), **named).merge(
            kernel.partial(q, k, v, kv_range=(cut, keys), **named)
        )
        merged = cupy.asnumpy(state.finalize()[0])
        assert right.accepts_o(merged.astype(problem.q.dtype)).all(), f"{golden.file}: merge"
    return worst


def main() -> int:
    import cupy

    from attngen.api import _target_of_gpu

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", action="append", help="names of goldens; all by default")
    given = parser.parse_args()
    target = _target_of_gpu(0).name
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    found: dict[str, Any] = {
        "device": name,
        "date": datetime.date.today().isoformat(),
        "command": "python -m tests.gpu.verify_goldens",
        "goldens": {},
    }
    failed = 0
    chosen = [g for g in GOLDENS if not given.only or g.name in given.only]
    for golden in chosen:
        try:
            worst = verify(golden, target, given.runs)
        except Exception as error:
            print(f"FAIL {golden.file}: {type(error).__name__}: {error}")
            failed += 1
            continue
        print(f"ok   {golden.file}: worst error {worst:.3f} of the bound")
        if worst > 1.0:
            failed += 1
            continue
        text = golden.path.read_text(encoding="utf-8")
        found["goldens"][golden.file] = {"sha256": digest(text), "worst": round(worst, 4)}
    given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{len(found['goldens'])} of {len(chosen)} goldens verified on {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
