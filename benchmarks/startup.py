"""How long attngen takes before a kernel can run: each figure from fresh processes.

    python -m benchmarks.startup [--runs 9] [--out benchmarks/results/FILE.jsonl]

    import    `import attngen`
    cold      text to cubin with nothing cached, imports and NVRTC included
    warm      the same with the cubin in the disk cache
    share     warm, without the interpreter's start and the imports of NumPy and cuda-bindings:
              what attngen itself adds

Needs no GPU.  Prints the median, and the lowest and highest of the runs, in milliseconds.
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

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.attn"))
TARGET = "sm_90a"

_IMPORT = """
import time; start = time.perf_counter()
import attngen
print((time.perf_counter() - start) * 1e3)
"""

_COMPILE = """
import time; start = time.perf_counter()
import sys
import attngen
from attngen.engines.cuda_engine import compile_rendered
kernel = attngen.compile(sys.argv[1], dtype="bf16", head_dim=64, arch="{target}")
compile_rendered(kernel.render("{target}"))
print((time.perf_counter() - start) * 1e3)
"""

_SHARE = """
import time
import numpy, lark, jinja2
from cuda.bindings import nvrtc
nvrtc.nvrtcVersion()
start = time.perf_counter()
import sys
import attngen
from attngen.engines.cuda_engine import compile_rendered
kernel = attngen.compile(sys.argv[1], dtype="bf16", head_dim=64, arch="{target}")
compile_rendered(kernel.render("{target}"))
print((time.perf_counter() - start) * 1e3)
"""


def run(code: str, *arguments: str, cache: Path | None = None) -> float | None:
    """Milliseconds that a fresh process prints; None when the example does not take the options."""
    environment = {**os.environ, "ATTNGEN_CACHE": "0"}
    if cache is not None:
        environment |= {"ATTNGEN_CACHE": "1", "ATTNGEN_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code.format(target=TARGET), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    return float(done.stdout) if done.returncode == 0 else None


def example_options(name: str) -> str:
    """The compile script with the dtype and head dim that an example leaves open."""
    text = (ROOT / "examples" / f"{name}.attn").read_text(encoding="utf-8")
    options = [
        option
        for word, option in (("dtype ", 'dtype="bf16"'), ("head_dim ", "head_dim=64"))
        if not any(line.strip().startswith(word) for line in text.splitlines())
    ]
    return ", ".join([*options, f'arch="{TARGET}"'])


def script(template: str, name: str) -> str:
    return template.replace('dtype="bf16", head_dim=64, arch="{target}"', example_options(name))


def summary(values: list[float]) -> Mapping[str, float]:
    return {
        "median_ms": round(statistics.median(values), 1),
        "low_ms": round(min(values), 1),
        "high_ms": round(max(values), 1),
        "runs": len(values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, object]] = []

    def add(what: str, example: str, values: list[float | None]) -> None:
        good = [v for v in values if v is not None]
        if len(good) < len(values):
            raise SystemExit(f"{what} of {example} failed")
        rows.append({"suite": "startup", "what": what, "example": example, **summary(good)})
        row = rows[-1]
        print(f"{what:8}{example:24}{row['median_ms']:>8}  ({row['low_ms']} to {row['high_ms']})")

    add("import", "", [run(_IMPORT) for _ in range(given.runs)])
    for name in EXAMPLES:
        path = f"examples/{name}.attn"
        cold = script(_COMPILE, name)
        add("cold", name, [run(cold, path) for _ in range(max(1, given.runs // 3))])
    with tempfile.TemporaryDirectory() as folder:
        for name in ("causal", "gemma2_local", "t5"):
            path, cache = f"examples/{name}.attn", Path(folder)
            run(script(_COMPILE, name), path, cache=cache)
            warm, share = script(_COMPILE, name), script(_SHARE, name)
            add("warm", name, [run(warm, path, cache=cache) for _ in range(given.runs)])
            add("share", name, [run(share, path, cache=cache) for _ in range(given.runs)])
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
