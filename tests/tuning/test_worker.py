"""A candidate that does harm costs only itself: real kernels on the CPU, broken on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from attngen.diagnostics.diagnostic import AttnError
from attngen.tuning.bench import HostBench
from attngen.tuning.timing import LostError
from attngen.tuning.worker import Patience, Worker

from .candidates import BREAKS, BrokenBuilder, call_of, exams_of, simt, subject_of

GOOD, ALSO_GOOD, BROKEN = simt(16, 32), simt(8, 16), simt(16, 16)
PATIENCE = Patience(open_s=60, check_s=6, sample_s=6)

pytestmark = pytest.mark.usefixtures("host_compiler")

# What is said of each, and whether the process has to be started again.
HARM = {
    "out of bounds": ("global memory is used outside every argument", False),
    "endless": ("it did not end within 6 s", True),
    "crashing": ("its process ended with signal SIGSEGV", True),
    "exiting": ("its process ended with exit status 0", True),
    "wrong": ("times as far off as is allowed", False),
    "wrong on ragged": ("times as far off as is allowed", False),
    "half of the rows": ("elements are not written, or are NaN", False),
    "nothing": ("2048 of 2048 elements are not written, or are NaN", False),
}


def test_every_break_is_tried() -> None:
    assert HARM.keys() == BREAKS.keys()


@pytest.mark.parametrize("harm", HARM)
def test_harm_costs_only_the_candidate_that_does_it(harm: str) -> None:
    subject, call = subject_of(), call_of()
    builder = BrokenBuilder(subject, {BROKEN: BREAKS[harm]})
    words, is_restarted = HARM[harm]
    mine = np.arange(1000.0)
    with Worker(HostBench, lambda: exams_of(subject, call), PATIENCE) as worker:
        assert worker.check("good", builder.build(GOOD)).bound_ratio <= 1
        with pytest.raises(LostError, match=words):
            worker.check("broken", builder.build(BROKEN))
        assert worker.sample("good", 2) > 0
        assert worker.check("other", builder.build(ALSO_GOOD)).bound_ratio <= 1
        assert worker.sample("other", 1) > 0
        assert worker.restarts == int(is_restarted)
    assert mine.sum() == 499500  # this process is as it was


def test_what_is_wrong_only_on_ragged_lengths_passes_the_exam_without() -> None:
    subject, call = subject_of(), call_of()
    build = BrokenBuilder(subject, {BROKEN: BREAKS["wrong on ragged"]}).build(BROKEN)
    with Worker(HostBench, lambda: exams_of(subject, call)[:1], PATIENCE) as worker:
        assert worker.check("broken", build).bound_ratio <= 1


def test_a_process_that_is_killed_between_samples_is_replaced() -> None:
    subject, call = subject_of(), call_of()
    build = BrokenBuilder(subject, {}).build(GOOD)
    with Worker(HostBench, lambda: exams_of(subject, call), PATIENCE) as worker:
        worker.check("good", build)
        assert worker._process is not None
        os.kill(worker._process._popen.pid, signal.SIGKILL)
        with pytest.raises(LostError, match="SIGKILL"):
            worker.sample("good", 1)
        assert worker.sample("good", 1) > 0
        assert worker.restarts == 1


def test_other_calls_of_one_attention_need_no_other_process() -> None:
    subject = subject_of()
    builder = BrokenBuilder(subject, {BROKEN: BREAKS["wrong on ragged"]})
    with Worker(HostBench, lambda: exams_of(subject, call_of()), PATIENCE) as worker:
        worker.check("good", builder.build(GOOD))
        process = worker._process
        worker.reopen(lambda: exams_of(subject, call_of(96, B=2)))
        assert worker._process is process
        assert worker.sample("good", 1) > 0
        assert worker.check("good", builder.build(GOOD)).bound_ratio <= 1
        with pytest.raises(LostError, match="as far off as is allowed"):
            worker.check("broken", builder.build(BROKEN), 1)
        assert worker.restarts == 0


class NoDevice:
    """A bench that cannot be opened."""

    def __init__(self) -> None:
        raise OSError("there is no device here")


def test_a_device_that_cannot_be_opened_is_no_candidate_s_fault() -> None:
    subject, call = subject_of(), call_of()
    build = BrokenBuilder(subject, {}).build(GOOD)
    worker = Worker(NoDevice, lambda: exams_of(subject, call), PATIENCE)  # type: ignore[arg-type]
    with worker, pytest.raises(AttnError) as caught:
        worker.check("good", build)
    assert caught.value.diagnostics[0].code == "A472"
    assert "there is no device here" in caught.value.diagnostics[0].message()


def test_a_worker_ends_with_its_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attngen.tuning.worker"], input=b"", capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


ORPHANS = """
import sys
from attngen.tuning.worker import _Process
process = _Process()
print(process._popen.pid, flush=True)
sys.stdin.read()
"""


def test_a_worker_ends_when_its_tuner_is_killed() -> None:
    tuner = subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert tuner.stdout is not None
    worker = int(tuner.stdout.readline())
    tuner.kill()
    tuner.communicate()
    for _ in range(600):
        if not _runs(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker still runs")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
