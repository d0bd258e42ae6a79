"""The records that come with attngen: still true, as far as a machine without a GPU can say."""

from __future__ import annotations

import pytest

from attngen.backend.nvrtc import load_nvrtc
from attngen.cli.verify_records import verify_record
from attngen.diagnostics.diagnostic import AttnError
from attngen.tuning.measurement import Definition, Record
from attngen.tuning.store import repository_store
from attngen.tuning.winner import find_winner

_CONTENTS = [contents for _, _, contents in repository_store().files()]
_DEFINITIONS = {d.op: d for contents in _CONTENTS for d in contents.definitions}
_WINNERS = [
    won
    for contents in _CONTENTS
    for problem in sorted({r.problem for r in contents.records}, key=str)
    if (won := find_winner(r for r in contents.records if r.problem == problem)) is not None
]


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    try:
        load_nvrtc()
    except AttnError as error:
        pytest.skip(error.diagnostics[0].message())


@pytest.mark.parametrize("won", _WINNERS, ids=lambda won: won.id)
def test_no_winner_is_stale(won: Record) -> None:
    """As `attngen cache verify tuned` says it."""
    definition: Definition | None = _DEFINITIONS.get(won.op)
    verdict = verify_record(won, definition)
    name = (definition.text if definition else won.op).splitlines()[0]
    assert not verdict.is_stale, (
        f"{name} {won.problem}: {verdict.reason}.  Tune it again and take the records in"
        " (CONTRIBUTING.md), or only leave out what is stale: `attngen cache prune tuned --stale`"
    )


def test_every_operation_has_its_definition() -> None:
    for contents in _CONTENTS:
        assert {r.op for r in contents.records} == {d.op for d in contents.definitions}
        assert contents.notes == ()
