"""What preparing a mask costs on the GPU: graph replays with and without the launches ahead.

    python -m benchmarks.preparation [--out benchmarks/results/FILE.jsonl]

A mask that depends on captured tensors is summarised by a launch ahead of the kernel, where
there are enough keys.  Of each variant three graphs are timed, interleaved: the whole call, the
kernel alone over what the launch ahead has left in its workspace, and the launch ahead alone.

One JSON object a line: `variant`, `kernel`, `B, S, H, D`, `whole_us`, `kernel_us`, `ahead_us`,
`added_us` (whole - kernel), `share` of the kernel, `workspace_bytes`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

import numpy as np

import attngen
from attngen.bench.machines import Timer
from attngen.bench.timing import Plan, measure
from attngen.engines import cuda_engine
from attngen.engines.cuda_engine import Launched
from attngen.engines.outputs import Outputs

DOCUMENTS: Final = """\
attention packed_documents {
    tensor doc : int32[B, Skv]
    mask causal and document(doc)
}
"""
MARKED: Final = """\
attention marked {
    tensor marked : bool[B, Skv]
    mask window(left = 512) or global_tokens(marked)
}
"""
CASES: Final[Sequence[tuple[str, str, tuple[int, int, int, int]]]] = (
    ("documents", DOCUMENTS, (2, 8192, 16, 128)),
    ("documents", DOCUMENTS, (1, 32768, 16, 128)),
    ("marked", MARKED, (2, 8192, 16, 128)),
    ("documents", DOCUMENTS, (1, 1 << 20, 1, 64)),
)
FAMILIES: Final = ("forward_mma", "forward_wgmma")


class _Graph(Timer):
    """Milliseconds of one replay."""

    mode = "graph"

    def __init__(self, torch: Any, call: Callable[[], object]) -> None:
        self._torch = torch
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.kept = call()
        self._graph.replay()

    def __call__(self, repeats: int) -> float:
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph.replay()
        begin.record()
        for _ in range(repeats):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / repeats


def captured_tensors(text: str, B: int, S: int) -> dict[str, np.ndarray]:
    """Documents of 1000 tokens, or one token in 512 that sees and is seen by all."""
    if "doc" in text:
        doc = (np.arange(B)[:, None] % 2 * 500 + np.arange(S)) // 1000
        return {"doc": doc.astype(np.int32)}
    marked = np.zeros((B, S), np.bool_)
    marked[:, np.random.default_rng(0).integers(0, S, S // 512)] = True
    return {"marked": marked}


def measure_case(torch: Any, text: str, shape: tuple[int, int, int, int], family: str) -> Any:
    """A record without its name; None where there is no launch ahead."""
    B, S, H, D = shape
    q, k, v = (
        torch.randn(B, S, H, D, device="cuda", dtype=torch.float32).bfloat16() for _ in range(3)
    )
    named = {n: torch.from_numpy(x).cuda() for n, x in captured_tensors(text, B, S).items()}
    kernel = attngen.compile_text(text, dtype="bf16", engine="cuda", schedule=f"kernel {family}")
    out = torch.empty_like(q)
    seen: list[tuple[Launched, Outputs]] = []
    real = cuda_engine.launch_on_gpu

    def watch(*args: Any, **options: Any) -> Any:
        launched = real(*args, **options)
        seen.append((cast(Launched, launched), args[3]))
        return launched

    def whole() -> object:
        return kernel(q, k, v, layout="bshd", out=out, **named)

    whole()
    torch.cuda.synchronize()
    # Another layout is another plan, so that the launches of its first call are seen.
    out = torch.empty((B, S, H + 1, D), device="cuda", dtype=q.dtype)[:, :, :H]
    with mock.patch.object(cuda_engine, "launch_on_gpu", watch):
        timers: dict[str, Timer] = {"whole": _Graph(torch, whole)}
    ((launched, outputs),) = seen
    if outputs.key_ends is None:
        return None

    def start(launches: Sequence[Any]) -> Callable[[], object]:
        def call() -> object:
            stream = torch.cuda.current_stream().cuda_stream
            for each in launches:
                each.start(stream, launched.block)
            return launched

        return call

    timers["kernel"] = _Graph(torch, start(launched.ready[-1:]))
    timers["ahead"] = _Graph(torch, start(launched.ready[:-1]))
    found = {name: times.ms * 1e3 for name, times in measure(timers, Plan()).items()}
    added = found["whole"] - found["kernel"]
    return {
        "kernel": family,
        **dict(zip(("B", "S", "H", "D"), shape, strict=True)),
        **{f"{name}_us": round(us, 2) for name, us in found.items()},
        "added_us": round(added, 2),
        "share": round(added / found["kernel"], 4),
        "workspace_bytes": 4 * math.prod(outputs.key_ends.shape),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="a file to append the records to")
    given = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("no GPU can be used", file=sys.stderr)
        return 2
    for variant, text, shape in CASES:
        for family in FAMILIES:
            try:
                record = measure_case(torch, text, shape, family)
            except attngen.AttnError as error:
                record = {"kernel": family, "reason": str(error).splitlines()[0]}
            if record is None:
                continue
            line = json.dumps({"suite": "preparation", "variant": variant, **record})
            print(line, flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
