"""The parts of a steady call that are timed: each launches what the call itself does."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import steady_call
from benchmarks.steady_call import VARIANTS, FakeDriver, Library, Variant, fake_tensors, fakes

LIBRARY = Library("torch", "all of it", fake_tensors(), lambda: None)
Launches = list[tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Every launch of the fake driver: function, grid, threads, shared bytes, stream, block."""
    seen: Launches = []

    class Recording(FakeDriver):
        def launch(self, *arguments: Any) -> int:
            seen.append(arguments)
            return 0

    monkeypatch.setattr(steady_call, "FakeDriver", Recording)
    return seen


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_part_launches_what_the_call_does(variant: Variant, launches: Launches) -> None:
    with fakes(LIBRARY):
        parts = steady_call.parts_of_call(LIBRARY, variant)
        assert len(launches) == 2  # the call that left the plan, and one of Python functions
        found = {}
        for name, part in parts.items():
            launches.clear()
            part()
            found[name] = list(launches)
    assert found["read"] == found["fill"] == []
    assert len(found["steady"]) == variant.launches
    assert ("flex" in found) == (variant.launches == 1)
    for name in {"flex", "traced"} & found.keys():
        assert len(found[name]) == 1, name
    for name in ("start", "nothing", "full"):
        assert found[name] == found["steady"], name


def test_the_block_is_that_of_the_call(launches: Launches) -> None:
    with fakes(LIBRARY):
        parts = steady_call.parts_of_call(LIBRARY, VARIANTS[-1])
        block = parts["fill"]()
    assert {launch[-1] for launch in launches} == {block}


def test_what_the_fakes_take_is_no_share_of_attngen(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"steady": 8.0, "nothing": 3.0}
    monkeypatch.setattr(steady_call, "lowest", lambda part, library, repeats: part())
    found = steady_call.measure({n: lambda t=t: t for n, t in times.items()}, LIBRARY, 1)
    assert found == {"steady": 8.0, "nothing": 3.0, "share": 5.0}
