"""No array of Sq x Skv is ever formed: peak memory grows with Sq + Skv."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attngen

SHAPES = ((1024, 1024), (1024, 2048), (1024, 4096), (1024, 8192), (8192, 1024))
MIB = 2**20
D = 4

VARIANTS = {
    "causal": ("mask causal", "loop q, kv; passes fused"),
    "keys outside": ("mask causal", "loop kv, q; passes fused; normalize every_tile"),
    "three passes": ("score softcap(s, 5.0)\nmask window(left = 700)", "passes three"),
    "documents": ("tensor doc : int32[B, Skv]\nmask document(doc)", "loop q, kv; passes two"),
    "sigmoid": ("score s - log(Skv)\nweights sigmoid", "loop q, kv"),
}


def operands(Sq: int, Skv: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    shapes = (1, 1, Sq, D), (1, 1, Skv, D), (1, 1, Skv, D)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q, k, v


def traced_peak(run: Callable[[], Any]) -> int:
    """The most bytes that were allocated at one time; NumPy's arrays count."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_executor_grows_with_the_length(name: str) -> None:
    """With 1024 rows, 7168 more keys: as truth values, all pairs would be 7 MiB more."""
    body, schedule = VARIANTS[name]
    text = f"attention a {{\n{body}\n}}\n"
    tiles = "tile q = 256, kv = 256"
    kernel = attngen.compile_text(text, engine="numpy", schedule=f"{schedule}; {tiles}")
    kernel(*operands(2, 2), **documents(name, 2))
    peaks = {}
    for shape in SHAPES:
        arrays, named = operands(*shape), documents(name, shape[1])
        peaks[shape] = traced_peak(lambda arrays=arrays, named=named: kernel(*arrays, **named))
    first = peaks[1024, 1024]
    assert peaks[1024, 8192] - first <= MIB, peaks
    assert peaks[8192, 1024] - first <= 7168 * (2 * D + 8) * 4 + MIB, peaks  # o and the row state
    assert first < 6 * MIB, peaks


def test_the_executor_grows_with_a_square() -> None:
    text = "attention a {\nmask causal\n}\n"
    kernel = attngen.compile_text(text, engine="numpy", schedule="tile q = 256, kv = 256")
    peaks = []
    for length in (1024, 2048, 4096):
        arrays = operands(length, length)
        peaks.append(traced_peak(lambda arrays=arrays: kernel(*arrays)))
    assert peaks[2] - peaks[1] <= 2.2 * (peaks[1] - peaks[0]) + MIB // 4, peaks
    assert peaks[2] - peaks[0] < 2 * MIB, peaks


def documents(name: str, length: int) -> dict[str, Any]:
    doc = (np.arange(length, dtype=np.int32) // 700)[None]
    return {"doc": doc} if name == "documents" else {}


def test_a_partial_state_of_many_heads_takes_few_at_a_time() -> None:
    """64 heads with tiles of 64: what is in memory is one group of heads, not all of them."""
    kernel = attngen.compile_text("attention a {\nmask causal\n}\n", engine="numpy")
    peaks = []
    for heads in (64, 256):
        q = np.zeros((1, heads, 128, D), np.float32)
        peaks.append(traced_peak(lambda q=q: kernel.partial(q, q, q)) - 8 * q.nbytes)
    assert peaks[1] < peaks[0] + 2 * MIB, peaks


CPU_RUN = """
import sys, warnings
import numpy as np
import attngen

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

warnings.simplefilter("ignore")
rows, keys = map(int, sys.argv[1:])
schedule = "kernel forward_simt; tile q = 64, kv = 64"
kernel = attngen.compile_text("attention a {\\nmask causal\\n}\\n", engine="cpu", schedule=schedule)
small = np.ones((1, 1, 8, 4), np.float32)
kernel(small, small, small)
q, k = np.ones((1, 1, rows, 4), np.float32), np.ones((1, 1, keys, 4), np.float32)
before = peak()
kernel(q, k, k)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_cpu_run_grows_with_the_length(host_compiler: None) -> None:
    peaks = {}
    for rows, keys in ((512, 1024), (512, 2048), (512, 4096), (512, 8192), (4096, 1024)):
        command = [sys.executable, "-c", CPU_RUN, str(rows), str(keys)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        peaks[rows, keys] = int(done.stdout)
    for (rows, keys), peak in peaks.items():
        assert peak < rows * keys / 8 + 6 * MIB, peaks
    assert peaks[512, 8192] < peaks[512, 1024] + 2 * MIB, peaks  # one float a pair would be 14 MiB
    assert peaks[4096, 1024] < peaks[512, 1024] + 2 * MIB, peaks


# ---- long masks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("joint", "term"),
    [
        (" or ", "kv == {i}"),
        (" or ", "q + kv * h == {i}"),
        (" and ", "kv + q != {i}"),
        (" or not ", "kv != {i}"),
    ],
)
def test_a_chain_of_2000_terms(joint: str, term: str) -> None:
    """Few of its terms are in memory at a time, and no depth is too much."""
    mask = joint.join(term.format(i=3 * i) for i in range(2000))
    kernel = attngen.compile_text(f"attention a {{\nmask {mask}\n}}\n", engine="numpy")
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 24, D)).astype(np.float32)
    found = []
    peak = traced_peak(lambda: found.append(kernel(q, k, v)))
    assert peak < 5 * MIB  # all terms of the second mask at once would be 9 MiB more
    assert attngen.reference(kernel.unit, q, k, v).accepts_o(found[0]).all()


def test_a_chain_of_2000_terms_becomes_text() -> None:
    mask = " or ".join(f"kv == {3 * i}" for i in range(2000))
    kernel = attngen.compile_text(f"attention a {{\nmask {mask}\n}}\n", engine="cpu")
    source = kernel.render(dtype="fp32", head_dim=4).source
    assert source.count("at.kv == ") == 2000
