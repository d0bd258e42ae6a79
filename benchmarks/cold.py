"""The first call in a fresh process, and the first call at another length.

    python -m benchmarks.cold PEER --device cuda

prints one JSON object for a peer: what passes from inputs on the device to a finished output,
the import of the peer's own packages and every compilation included, NumPy, PyTorch and the
device's context not.  `measure_cold` runs this twice, with the disk caches of all compilers first
empty and then as the first process left them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from attngen.bench.machines import Machine, open_machine
from benchmarks.cells import Cell, make_cells, shrink
from benchmarks.peers import Peer, RefusedError, make_peer
from benchmarks.run_cell import check_once, describe_error, make_expected, make_inputs
from benchmarks.variants import make_variant

__all__ = ["main", "measure_cold", "measure_process", "time_first_calls"]

ROOT: Final = Path(__file__).resolve().parents[1]
_CACHES: Final = {
    "ATTNGEN_CACHE_DIR": "attngen",
    "CUDA_CACHE_PATH": "cuda",
    "CUTE_DSL_CACHE_DIR": "cute",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "fa4",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
"""Where each compiler keeps what it made, by the variable that says so."""
_SWITCHES: Final = {"ATTNGEN_CACHE": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
"""What makes those keep it that do not by themselves; FA4 does not."""
_LIMIT_S: Final = 300.0


def measure_cold(
    cell: Cell, peer: str, machine: Machine, schedule: str | None = None
) -> dict[str, Any]:
    """A record of the suite `cold`.

    ms:             the first call, with nothing cached.
    process_ms:     from the start of that process to its result, PyTorch's import included.
    new_length_ms:  the first call at another length in that process.
    cached_ms:      the first call of a second process.
    """
    about = {**asdict(cell), "cell": cell.name, "mask": "causal", "peer": peer}
    command = ["benchmarks.cold", peer, "--device", machine.kind]
    if schedule is not None:
        command += ["--schedule", schedule]
    return {**about, **measure_process(command)}


def measure_process(command: Sequence[str]) -> dict[str, Any]:
    """What a module prints in a fresh process with empty disk caches; `cached_ms` of a second.

    command:  the module and its arguments; `--started`, the time of day, is put behind them.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, part)) for name, part in _CACHES.items()}
        first = _run(command, caches)
        if first["ms"] is None:
            return first
        return {**first, "cached_ms": _run(command, caches)["ms"]}


def _run(command: Sequence[str], caches: Mapping[str, str]) -> dict[str, Any]:
    environment = {**os.environ, **_SWITCHES, **caches}
    whole = [sys.executable, "-m", *command, "--started", repr(time.time())]
    try:
        done = subprocess.run(
            whole, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"ms": None, "reason": f"no answer within {_LIMIT_S:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"ms": None, "reason": f"its process ended with {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def time_first_calls(
    peer: Peer, cell: Cell, machine: Machine, started: float | None = None
) -> dict[str, Any]:
    """Time the first call, check its result, and time the first call at 3/4 of the length.

    started:  the time of day when the process was started.
    """
    variant = make_variant(cell)
    inputs = make_inputs(cell, variant, machine, 0)
    shorter = replace(cell, S=cell.S * 3 // 4)
    other = make_inputs(shorter, make_variant(shorter), machine, 1)
    machine.synchronize()
    start = time.perf_counter()
    prepared = peer.prepare(cell, variant, inputs)
    prepared.call()
    machine.synchronize()
    first_ms = (time.perf_counter() - start) * 1e3
    process_ms = None if started is None else round((time.time() - started) * 1e3, 2)
    start = time.perf_counter()
    peer.prepare(shorter, make_variant(shorter), other).call()
    machine.synchronize()
    new_length_ms = (time.perf_counter() - start) * 1e3
    expected = make_expected(cell, variant, inputs, machine, 0)
    verdict, _ = check_once(prepared, peer.name == "attngen", expected, machine)
    return {
        "kernel": prepared.kernel,
        "schedule": prepared.schedule,
        "ms": round(first_ms, 2),
        "process_ms": process_ms,
        "new_length_ms": round(new_length_ms, 2),
        "max_err": verdict.max_err,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold")
    parser.add_argument("peer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--schedule")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    machine = open_machine(given.device)
    (cell,) = make_cells(["cold"])
    if machine.kind == "cpu":
        cell = shrink(cell)
    try:
        peer = make_peer(given.peer, machine, given.schedule)
        result = time_first_calls(peer, cell, machine, given.started)
    except RefusedError as refusal:
        result = {"ms": None, "reason": str(refusal)}
    except Exception as error:
        result = {"ms": None, "reason": describe_error(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
