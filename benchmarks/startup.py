"""How long attngen takes before a kernel can run: each figure from fresh processes.

    python -m benchmarks.startup [--runs 9] [--out benchmarks/results/FILE.jsonl]

    import    `import attngen`, and what `attngen.compile` needs
    cold      text to cubin with nothing cached, imports and NVRTC included
    warm      the same with the disk cache filled
    share     warm, without the interpreter's start and the imports of NumPy, Lark, Jinja and
              cuda-bindings: what attngen itself adds

Needs no GPU.  Prints the median, and the lowest and highest of the runs, in milliseconds, and
the lowest processor time, which says more on a busy machine.  Python keeps compiled modules as
it does for an installed package, even where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import attngen

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.attn"))
TARGET = "sm_90a"

_START = """
import time
start = time.perf_counter(), time.process_time()
"""

_IMPORT = """
import attngen
attngen.compile
"""

_COMPILE = """
import attngen
from attngen.engines.cuda_engine import compile_rendered
kernel = attngen.compile({path!r}, {options})
compile_rendered(kernel.render({target!r}))
"""

_OTHERS = """
import numpy, lark, jinja2
from cuda.bindings import nvrtc
nvrtc.nvrtcVersion()
"""

_STOP = """
print((time.perf_counter() - start[0]) * 1e3, (time.process_time() - start[1]) * 1e3)
"""


class Time(NamedTuple):
    """Milliseconds of one run: by the clock, and of the processor."""

    wall: float
    cpu: float


def run(code: str, cache: Path | None = None) -> Time:
    """The time that a fresh process needs."""
    environment = {**os.environ, "ATTNGEN_CACHE": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if cache is not None:
        environment |= {"ATTNGEN_CACHE": "1", "ATTNGEN_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{code}\n{done.stderr}")
    return Time(*map(float, done.stdout.split()))


def compile_code(name: str) -> str:
    """Text to cubin; where an example leaves dtype or head dim open, bf16 and 64."""
    path = f"examples/{name}.attn"
    attention = attngen.compile(ROOT / path).attention
    options = [f"arch={TARGET!r}"]
    if attention.dtype is None:
        options.append('dtype="bf16"')
    if attention.head_dim_qk is None or attention.head_dim_v is None:
        options.append("head_dim=64")
    return _COMPILE.format(path=path, options=", ".join(options), target=TARGET)


def summary(times: list[Time]) -> Mapping[str, float]:
    wall = [time.wall for time in times]
    return {
        "median_ms": round(statistics.median(wall), 1),
        "low_ms": round(min(wall), 1),
        "high_ms": round(max(wall), 1),
        "cpu_ms": round(min(time.cpu for time in times), 1),
        "runs": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, object]] = []

    def measure(what: str, example: str, code: str, runs: int, cache: Path | None = None) -> None:
        if cache is not None:
            run(code, cache)
        times = summary([run(code, cache) for _ in range(runs)])
        row = {"suite": "startup", "what": what, "example": example, **times}
        rows.append(row)
        shown = f"{row['median_ms']:>8}  ({row['low_ms']} to {row['high_ms']}, cpu {row['cpu_ms']})"
        print(f"{what:8}{example:24}{shown}")

    run(_START + compile_code(EXAMPLES[0]) + _STOP)  # so that Python has compiled all modules
    measure("import", "", _START + _IMPORT + _STOP, given.runs)
    for name in EXAMPLES:
        code = _START + compile_code(name) + _STOP
        measure("cold", name, code, max(1, given.runs // 3))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("causal", "gemma2_local", "t5"):
            code = compile_code(name)
            measure("warm", name, _START + code + _STOP, given.runs, Path(folder))
            measure("share", name, _OTHERS + _START + code + _STOP, given.runs, Path(folder))
    if given.out is not None:
        environment = {
            "suite": "environment",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
        }
        lines = [json.dumps(row, sort_keys=True) for row in (environment, *rows)]
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
