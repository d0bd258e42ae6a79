"""Mutation testing over the goldens: does the CPU run notice a broken kernel?

    python -m tests.mutation [--family NAME] [--golden NAME]... [--line TEXT]... [--jobs N]
                             [--budget S] [--out FILE]
    python -m tests.mutation --figures FILE

Breaks each golden in every small way (attngen/cpu/mutate.py), one at a time, and judges what comes
out (tests/judge.py).  A mutant that several goldens share is tried in one after the other until it
is noticed, first in that which runs fastest, and all are tried once before any is tried a second
time.  With `--line` only mutants of lines with that text are tried.  `--out` takes each outcome as
it is known; a run with a file of the same texts and judge goes on where that one stopped.
`--figures` says what such a file holds.  When the budget is spent no mutant is begun any more:
those that are left are counted as such, never as noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from attngen.cpu.build import host_headers
from attngen.cpu.mutate import Judge, Mutant, Outcome, Verdict, mutants
from tests.goldens import GOLDENS, Golden, digest
from tests.judge import check_library, prepare
from tests.tile_probe import with_probe
from tests.witnesses import WITNESSES


class Key(NamedTuple):
    """What makes mutants of two goldens the same."""

    function: str
    occurrence: int  # of equal lines in that function
    source: str
    column: int
    before: str
    after: str


_SIZE = re.compile(r"(constexpr \w+ \w+ = )\d+(;.*)")


def key_of(mutant: Mutant) -> Key:
    """A size, `constexpr int kTileQ = 64;`, is the same line whatever its number."""
    *above, line = mutant.text.split("\n")[: mutant.line]
    size = _SIZE.fullmatch(mutant.source)
    if size is not None:
        return Key("", 0, f"{size[1]}n{size[2]}", mutant.column, "n", "n + 1")
    if line[:1].isalpha():  # no line of a function's body
        return Key("", 0, mutant.source, mutant.column, mutant.before, mutant.after)
    first = max((i for i, other in enumerate(above) if other[:1].isalpha()), default=0)
    function = above[first].partition("(")[0]
    occurrence = sum(other.strip() == mutant.source for other in above[first:])
    return Key(function, occurrence, mutant.source, mutant.column, mutant.before, mutant.after)


_COLUMNS = "columns are 0 to 5 and clamped ones 2 or 3: the difference stays within 2, or beyond it"
_LAST_ROW = "the last row of pixels lies behind the upper end, which is asked last"
_BUCKETS = "from distance 8 on the logarithm answers, and at 8 it says 8, too"

EXPLAINED = {
    ("constexpr int kTerms", "n + 1"): "a sum in parts is right with any number of terms",
    ("first < kHeadDimQk; first += kTerms", "<="): "one more part, without terms, adds 0",
    ("let_shared_9 = let_shared_6 ?", "1"): _COLUMNS,
    ("ag_max(ag_max((let_shared_4 ? ag_clamp(let_shared_5, 2, 3) : 2)", "4"): _COLUMNS,
    ("ag_max(ag_max((let_shared_4 ? ag_clamp(let_shared_5, 2, 3) : 2)", "6"): _COLUMNS,
    ("ag_max((let_shared_4 ? ag_clamp(let_shared_8, 2, 3) : 3)", "4"): _COLUMNS,
    ("ag_max((let_shared_4 ? ag_clamp(let_shared_8, 2, 3) : 3)", "6"): _COLUMNS,
    ("return ag_max(ag_max(ag_clamp(ag_floordiv(let_shared_10, 6)", "3"): _LAST_ROW,
    ("return ag_max(ag_max(ag_clamp(ag_floordiv(let_shared_10, 6)", "4"): _COLUMNS,
    ("(let_distance_2 < 8 ?", "<="): _BUCKETS,
    ("(let_distance_2 < 8 ?", "9"): _BUCKETS,
    ("(let_distance_2 < 8 ?", "2"): _BUCKETS,
    ("tile.row0_low = 1;", "2"): "the first warp's minimum is at most 1",
    ("key0_low[n] = 1;", "2"): "the first key's is at most 1",
    ("tile.key0_low = 0;", "1"): "whether a pair may attend is asked of the largest alone",
    ("ag_ballot(top <= kNear)", "<"): "at the limit polynomial and function are both right",
    ("int low = 1, high = 0;", "2"): "the first element is at most 1",
}
"""Why a mutant survives, by a piece of its line and what was put there."""


def explain(key: Key) -> str | None:
    for (piece, after), reason in EXPLAINED.items():
        if piece in key.source and after == key.after:
            return reason
    return None


def describe(key: Key) -> str:
    return f"`{key.before}` -> `{key.after}` in `{key.source}` of `{key.function}`"


def cost_of_check(golden: Golden) -> int:
    """About how long a check takes: pairs of a tile, times heads."""
    rendered = golden.render()
    tiles, attention = rendered.launch.tiles, rendered.program.attention
    return tiles.tile_q * tiles.tile_kv * (attention.heads_q or 18)


# ---- trying them ----------------------------------------------------------------------------


class Tried(NamedTuple):
    """What became of a mutant in one golden."""

    key: Key
    golden: str
    verdict: Verdict
    how: str
    seconds: float


@dataclass(frozen=True)
class Work:
    """Goldens, cheapest first, then witnesses, and where each mutant of a golden is to be tried."""

    goldens: tuple[Golden, ...]
    places: Mapping[Key, tuple[Golden, ...]]

    @classmethod
    def of(cls, goldens: Sequence[Golden], lines: Sequence[str] = ("",)) -> Work:
        places: dict[Key, tuple[Golden, ...]] = {}
        ordered = sorted(goldens, key=cost_of_check)
        for golden in ordered:
            for key in mutants_of(golden):
                places[key] = (*places.get(key, ()), golden)
        families = {family_of(golden) for golden in goldens}
        witnesses = [witness for witness in WITNESSES if family_of(witness) in families]
        for witness in witnesses:
            for key in mutants_of(witness).keys() & places.keys():
                places[key] = (*places[key], witness)
        places = {k: at for k, at in places.items() if any(line in k.source for line in lines)}
        return cls((*ordered, *witnesses), places)

    def after(self, tried: Sequence[Tried]) -> dict[Key, list[Golden]]:
        """Where the mutants that nothing has noticed so far are still to be tried."""
        noticed = {one.key for one in tried if one.verdict is Verdict.KILLED}
        known = {(one.key, one.golden) for one in tried}
        left = {
            key: [golden for golden in goldens if (key, golden.name) not in known]
            for key, goldens in self.places.items()
            if key not in noticed
        }
        return {key: goldens for key, goldens in left.items() if goldens}


def family_of(golden: Golden) -> str:
    return golden.render().launch.family


def mutants_of(golden: Golden) -> dict[Key, Mutant]:
    """Of equal ones the last, without their texts' probes."""
    return {key_of(m): m for m in mutants(golden.render().source)}


class Judges:
    """A judge for each golden, made ready in the background, a few at a time."""

    def __init__(self, goldens: Sequence[Golden], folder: Path, jobs: int, deadline: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.judge"])
        at_once = max(1, jobs // 4)
        self._processes = ProcessPoolExecutor(at_once, context)
        self._threads = ThreadPoolExecutor(at_once)
        self._deadline = deadline
        self._judges: dict[str, Future[tuple[Judge, dict[Key, Mutant]]]] = {
            golden.name: self._threads.submit(self._make, golden, folder / golden.name)
            for golden in goldens
        }

    def _make(self, golden: Golden, folder: Path) -> tuple[Judge, dict[Key, Mutant]]:
        if time.monotonic() > self._deadline:
            raise TimeoutError
        rendered = golden.render()
        text = with_probe(rendered, golden.render().source)
        known = {
            key: replace(mutant, text=with_probe(rendered, mutant.text))
            for key, mutant in mutants_of(golden).items()
        }
        trials = self._processes.submit(prepare, golden).result()
        return Judge(text, partial(check_library, golden, trials), folder), known

    def judge(self, golden: Golden, key: Key) -> Outcome:
        judge, known = self._judges[golden.name].result()
        return judge.judge(known[key])

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._processes.shutdown(cancel_futures=True)


_ONE_BY_ONE = 3
"""Goldens that a mutant is tried in one after the other; what survives is tried in all others at
once, or it alone would be what a run with many jobs ends with."""


def try_all(
    work: Work,
    tried: Sequence[Tried],
    report: Callable[[Tried], None],
    *,
    jobs: int,
    deadline: float,
) -> None:
    """Tries what is left behind `tried`, and reports each outcome; none is begun behind `deadline`
    (of `time.monotonic`)."""
    left = work.after(tried)
    needed = [golden for golden in work.goldens if any(golden in at for at in left.values())]
    with tempfile.TemporaryDirectory(prefix="attngen-mutants-") as folder:
        judges = Judges(needed, Path(folder), jobs, deadline)

        def try_one(key: Key, golden: Golden) -> Tried | None:
            start = time.monotonic()
            if start > deadline:
                return None
            try:
                outcome = judges.judge(golden, key)
            except TimeoutError:
                return None
            seconds = round(time.monotonic() - start, 2)
            return Tried(key, golden.name, outcome.verdict, outcome.how, seconds)

        pool = ThreadPoolExecutor(jobs)  # takes what was submitted first
        try:
            order = sorted(left, key=lambda key: work.goldens.index(left[key][0]))
            pending = {pool.submit(try_one, key, left[key].pop(0)): key for key in order}
            tries: Counter[Key] = Counter()
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    key, one = pending.pop(future), future.result()
                    if one is None:
                        continue
                    report(one)
                    if one.verdict is Verdict.KILLED:
                        left[key] = []
                    tries[key] += 1
                    count = 1 if tries[key] < _ONE_BY_ONE else len(left[key])
                    now, left[key] = left[key][:count], left[key][count:]
                    pending |= {pool.submit(try_one, key, golden): key for golden in now}
        finally:
            pool.shutdown(cancel_futures=True)
            judges.close()


# ---- what was found, in a file --------------------------------------------------------------


def header_of(work: Work) -> dict[str, Any]:
    """What the outcomes of a file are about: texts, and what judges them."""
    judge = hashlib.sha256()
    for name in ("judge.py", "tile_probe.py", "witnesses.py", "goldens.py"):
        judge.update(Path(__file__).with_name(name).read_bytes())
    for text in host_headers().values():
        judge.update(text.encode())
    texts = {g.name: digest(g.render().source) for g in work.goldens}
    places = [[key, [work.goldens.index(g) for g in at]] for key, at in work.places.items()]
    header = {"judge": judge.hexdigest(), "texts": texts, "mutants": places}
    return json.loads(json.dumps(header))  # as it is read from a file


class Record(NamedTuple):
    header: dict[str, Any]
    tried: list[Tried]


def read_record(file: Path) -> Record:
    """A line that a stopped run has not finished is left out."""
    header, *lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    tried = []
    for line in lines:
        if line.endswith("\n"):
            found = json.loads(line)
            key, verdict = Key(*found.pop("key")), Verdict(found.pop("verdict"))
            tried.append(Tried(key, verdict=verdict, **found))
    return Record(json.loads(header), tried)


def line_of(one: Tried) -> str:
    return json.dumps({**one._asdict(), "verdict": one.verdict.value}) + "\n"


# ---- figures --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Mutants by what became of them.

    A survivor was tried in every golden that has it, and so was one that is the same machine code
    in each of them; where there is still a golden to try it is `open`.
    """

    noticed: dict[Key, Tried]
    survived: dict[Key, tuple[str, ...]]
    equivalent: tuple[Key, ...]
    open: tuple[Key, ...]

    @property
    def judged(self) -> int:
        return len(self.noticed) + len(self.survived)

    @property
    def share(self) -> float:
        return len(self.survived) / max(self.judged, 1)

    @property
    def is_good(self) -> bool:
        """Whether all are judged, at most 2 % survive, and each of them is explained."""
        return not self.open and self.share <= 0.02 and all(map(explain, self.survived))


def figures_of(places: Mapping[Key, Sequence[str]], tried: Sequence[Tried]) -> Figures:
    by_key: dict[Key, dict[str, Tried]] = {key: {} for key in places}
    for one in tried:
        by_key[one.key][one.golden] = one
    noticed, survived, same, still_open = {}, {}, [], []
    for key, outcomes in by_key.items():
        kills = [one for one in outcomes.values() if one.verdict is Verdict.KILLED]
        passes = [one.golden for one in outcomes.values() if one.verdict is Verdict.SURVIVED]
        if kills:
            noticed[key] = kills[0]
        elif len(outcomes) < len(places[key]):
            still_open.append(key)
        elif passes:
            survived[key] = tuple(passes)
        else:
            same.append(key)
    return Figures(noticed, survived, tuple(same), tuple(still_open))


def places_of(header: Mapping[str, Any]) -> dict[Key, list[str]]:
    names = list(header["texts"])
    return {Key(*key): [names[i] for i in at] for key, at in header["mutants"]}


_WORK = ("another number of", "other ", "more ")
"""How the complaints begin of a kernel that is right and does something else than the golden."""


def way_of(how: str) -> str:
    """What noticed it: a wrong result, other answers or work than the golden's, or the CPU run."""
    kind, _, text = how.partition(": ")
    if kind != "AssertionError":
        return f"a fault: {kind}"
    return f"work: {text}" if text.startswith(_WORK) else text


def lines_of(figures: Figures, places: Mapping[Key, Sequence[str]]) -> Iterator[str]:
    """The figures as text: totals, what noticed, golden by golden, and each survivor."""
    witnesses = {witness.name for witness in WITNESSES}
    goldens = {name for names in places.values() for name in names} - witnesses
    alone = sum(one.golden in witnesses for one in figures.noticed.values())
    yield f"{len(places)} distinct mutants of {len(goldens)} goldens, {figures.judged} judged"
    yield f"{len(figures.noticed)} noticed, {alone} of them by a witness alone"
    yield f"{len(figures.survived)} survived ({figures.share:.1%} of those judged)"
    yield f"{len(figures.equivalent)} the same machine code, or no C++"
    yield f"{len(figures.open)} not judged, or not in every golden: there was no time"
    yield ""
    for way, count in Counter(way_of(x.how) for x in figures.noticed.values()).most_common():
        yield f"{count:6} noticed by {way}"
    yield ""
    yield "golden: mutants, of which nothing noticed (in the others either), and noticed first here"
    first = Counter(one.golden for one in figures.noticed.values())
    for golden in sorted(goldens):
        mine = [key for key, goldens in places.items() if golden in goldens]
        left = sum(key in figures.survived for key in mine)
        yield f"  {golden}: {len(mine)}, {left}, {first[golden]}"
    yield ""
    for key, names in figures.survived.items():
        yield f"survived: {describe(key)}"
        yield f"    in {', '.join(names)}"
        yield f"    {explain(key) or 'NOT EXPLAINED'}"
    for key in figures.open:
        yield f"open: {describe(key)}"


# ---- command line ---------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--golden", action="append", metavar="NAME")
    parser.add_argument("--family", metavar="NAME", help="only the goldens of a kernel family")
    parser.add_argument("--line", action="append", metavar="TEXT", help="mutants of such lines")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--figures", type=Path, metavar="FILE")
    given = parser.parse_args()
    deadline = time.monotonic() + given.budget
    if given.figures is not None:
        header, tried = read_record(given.figures)
    else:
        work = Work.of(
            [
                golden
                for golden in GOLDENS
                if (not given.golden or golden.name in given.golden)
                and given.family in (None, family_of(golden))
            ],
            given.line or [""],
        )
        header, tried = header_of(work), []
        if given.out is not None:
            if given.out.exists():
                before, tried = read_record(given.out)
                if before != header:
                    raise SystemExit(f"{given.out} is about other texts, or another judge")
            lines = [json.dumps(header) + "\n", *map(line_of, tried)]
            given.out.write_text("".join(lines), encoding="utf-8")

        def report(one: Tried) -> None:
            tried.append(one)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(line_of(one))
            if one.verdict is Verdict.SURVIVED:
                print(f"not noticed by {one.golden}: {describe(one.key)}", flush=True)

        try_all(work, list(tried), report, jobs=given.jobs, deadline=deadline)
    places = places_of(header)
    figures = figures_of(places, tried)
    print("\n".join(lines_of(figures, places)))
    return 0 if figures.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
