"""Eight processes read and write one folder, half of them are killed at random moments.

What `add` has returned for is never lost, and no reader ever meets a line that is no record.
`ATTNGEN_KILL_ROUNDS=200` makes it a long test.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from attngen.tuning.store import Contents, Store

from .records import H200, digest, make_record

ROUNDS = int(os.environ.get("ATTNGEN_KILL_ROUNDS", "8"))
PROCESSES, VICTIMS = 8, 4
OPERATIONS = [digest(f"op {i}") for i in range(3)]


def work(folder: Path, name: str, seed: int, stop: Path) -> None:
    """Add records until told to stop; log each as soon as it was added, and what was missing."""
    rng = random.Random(seed)
    store = Store(folder / "tuned")
    log = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    count = 0
    finished: dict[str, set[str]] = {op: set() for op in OPERATIONS}
    while not stop.exists():
        op = rng.choice(OPERATIONS)
        found = store.read(H200, op)
        for missing in (*found.notes, *(finished[op] - {r.id for r in found.records})):
            os.write(log, f"missing {missing}\n".encode())
        count += 1
        added = make_record(op=op, sass=digest(f"{name} {count}"))
        store.add(Contents((added,)))
        finished[op].add(added.id)
        os.write(log, f"{added.op} {added.id}\n".encode())


def run_round(folder: Path, seed: int) -> list[list[str]]:
    """The words of every log, after the processes have ended."""
    context = multiprocessing.get_context("fork")
    stop = folder / "stop"
    processes = [
        context.Process(target=work, args=(folder, f"p{i}", 100 * seed + i, stop))
        for i in range(PROCESSES)
    ]
    rng = random.Random(seed)
    for process in processes:
        process.start()
    for victim in rng.sample(processes, VICTIMS):
        time.sleep(rng.uniform(0.01, 0.12))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
    time.sleep(0.05)
    stop.touch()
    for process in processes:
        process.join()
    killed = [process for process in processes if process.exitcode == -signal.SIGKILL]
    assert len(killed) == VICTIMS
    assert all(process.exitcode == 0 for process in processes if process not in killed)
    logs = b"".join(path.read_bytes() for path in folder.glob("*.log")).decode()
    return [line.split(maxsplit=1) for line in logs.splitlines()]


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked, and killed by a signal")
def test_no_finished_record_is_lost_and_no_file_is_unreadable(tmp_path: Path) -> None:
    finished = 0
    for seed in range(ROUNDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        added = run_round(folder, seed)
        finished += len(added)
        assert [words for words in added if words[0] == "missing"] == []
        store = Store(folder / "tuned")
        known = {op: store.read(H200, op) for op in OPERATIONS}
        assert [note for found in known.values() for note in found.notes] == []
        lost = [id_ for op, id_ in added if id_ not in {r.id for r in known[op].records}]
        assert lost == []
        store.add(Contents((make_record(op=OPERATIONS[0], sass=digest("after")),)))
    assert finished > ROUNDS * PROCESSES
