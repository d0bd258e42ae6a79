"""`tune=seconds`: the first call of a problem without a record searches, and later ones do not."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.backend import device as device_module
from attngen.backend import launch as launch_module
from attngen.diagnostics.diagnostic import AttnError
from attngen.tuning import tune as tune_module
from attngen.tuning.call import Call, Subject
from attngen.tuning.errors import NothingTimed
from attngen.tuning.tune import Machine

from .fake_gpu import FakeGpus
from .test_tuned_schedules import TUNED, call, keep
from .texts import catch

CAUSAL = "attention causal {\n    mask kv <= qpos\n}\n"
DOCUMENTS = """\
attention documents {
    param w : int
    tensor doc : int32[B, Skv]
    mask document(doc) and kv <= qpos + w
}
"""


class Searches(list[tuple[Subject, Call, Machine, float]]):
    """What `improve` was asked for; `and_then` is what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.and_then: Any = lambda: None

    def __call__(self, subject: Subject, call: Call, machine: Machine, seconds: float) -> None:
        self.append((subject, call, machine, seconds))
        self.and_then()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> FakeGpus:
    found = FakeGpus((9, 0))
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch_module, "load_driver", lambda: found)
    monkeypatch.setattr(device_module, "_libraries", {})
    monkeypatch.setattr(device_module, "_torch_names", {})
    monkeypatch.setitem(sys.modules, "torch", found.torch)
    runtime = SimpleNamespace(
        deviceSynchronize=lambda: None,
        memcpyDeviceToHost=2,
        memcpy=lambda to, source, size, kind: ctypes.memmove(to, source, size),
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), ndarray=type(None))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    found = Searches()
    monkeypatch.setattr(tune_module, "improve", found)
    return found


def test_the_first_call_searches_and_its_records_are_used(
    gpus: FakeGpus, searches: Searches
) -> None:
    searches.and_then = keep
    kernel = attngen.compile_text(CAUSAL, tune=2.5)
    call(kernel, gpus)
    ((_, searched, machine, seconds),) = searches
    assert seconds == 2.5
    assert machine.device.arch == "sm_90a"
    assert (searched.sizes["Sq"], searched.layout) == (256, "bhsd")
    schedule = kernel.programs[-1].schedule
    assert (schedule.tile_q, schedule.tile_kv, schedule.stages) == (64, 32, 1)
    assert TUNED.startswith("tile q = 64")
    call(kernel, gpus)
    call(attngen.compile_text(CAUSAL, tune=2.5), gpus)  # it has a record now
    assert len(searches) == 1


def test_a_search_gets_the_tensors_and_params_of_the_call(
    gpus: FakeGpus, searches: Searches
) -> None:
    doc = (np.arange(256) // 9).astype(np.int32)[None]
    call(attngen.compile_text(DOCUMENTS, tune=1), gpus, doc=gpus.tensor(doc), w=3)
    ((subject, searched, _, _),) = searches
    assert subject.attention.name == "documents"
    assert searched.params == {"w": 3}
    assert (searched.tensors["doc"] == doc).all()


def test_a_search_that_fails_is_said_once_and_the_call_goes_on(
    gpus: FakeGpus, searches: Searches
) -> None:
    def fail() -> None:
        raise AttnError(NothingTimed(None, "causal", "sm_90a", "all are wrong"))

    searches.and_then = fail
    kernel = attngen.compile_text(CAUSAL, tune=1)
    with pytest.warns(UserWarning, match="no schedule of `causal` could be timed"):
        call(kernel, gpus)
    call(kernel, gpus)
    assert len(searches) == 1
    assert kernel.compilations == 1


@pytest.mark.parametrize("tune", [0, -1, float("inf"), float("nan"), True, "2s"])
def test_what_is_no_duration_is_refused(tune: Any) -> None:
    assert "or a number of seconds" in catch(attngen.compile_text, CAUSAL, tune=tune).message()
