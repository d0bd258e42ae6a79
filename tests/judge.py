"""What judges a mutant: problems with their answers, and all that a golden does on them.

A kernel runs on the CPU around tile sizes, whole and in parts, in two scheduling modes, with the
race detector; what it does is compared with what the golden does, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import attngen
from attngen.analysis.tile_classes import key_may_attend
from attngen.api import _in_bhsd
from attngen.backend.device import view
from attngen.binding import Binding, bind, split_arguments
from attngen.compiler import Rendered
from attngen.cpu.build import build_library
from attngen.cpu.run import Mode, RunReport
from attngen.engines.cpu_engine import run_on_host
from attngen.engines.outputs import Outputs, workspace_shape
from attngen.ir.attention import Attention
from attngen.ir.semantics import evaluate
from attngen.partial import PartialState
from tests.goldens import Golden, Problem, make_problem
from tests.gpu.verify_goldens import reference_of
from tests.tile_probe import has_tiles, probe_of, with_probe
from tests.witnesses import Witness


@dataclass(frozen=True)
class Trial:
    """A problem with its answer; `o_layout` is how the output lies in memory.

    `answers` is what it says about tiles, and `work` is what it does, run by run.
    """

    rendered: Rendered
    problem: Problem
    right: attngen.Reference
    o_layout: str
    answers: tuple[int, ...] = ()
    work: tuple[Work, ...] = ()


def prepare(golden: Golden) -> list[Trial]:
    """Problems with their answers, and with the work of the golden.  Dead keys hold NaN."""
    rendered = golden.render()
    library = build_library(
        with_probe(rendered, rendered.source),
        cache_dir=Path(tempfile.gettempdir(), "attngen-goldens"),
        optimization=1,
    )
    unused = golden.render()  # what ran once holds what cannot go to another process
    trials = []
    for layout, problem in problems_of(golden, rendered):
        right = reference_of(golden, problem)
        poison_dead_keys(rendered.program.attention, problem)
        trial = Trial(rendered, problem, right, layout)
        parts = [part for run in runs_of(trial) for part in run_all(golden, trial, library, run)]
        answers, work = ask_about_tiles(golden, trial, library), tuple(work for _, work in parts)
        trials.append(replace(trial, rendered=unused, answers=answers, work=work))
    return trials


def problems_of(golden: Golden, rendered: Rendered) -> Iterator[tuple[str, Problem]]:
    """Hardly any keys, tile + 1, whole tiles, a tile of rows that sees one key, more key tiles than
    a warp has lanes or a block of two warps has threads, many tiles; and how the output lies.

    Under a causal mask the last row of a tile of rows sees whole tiles of keys, one key more, or
    all but the last two.  One row of the query is NaN.
    """
    if isinstance(golden, Witness):
        yield from (("whole", problem) for problem in golden.problems(golden))
        return
    tile_q, tile_kv = rendered.launch.tiles.tile_q, rendered.launch.tiles.tile_kv
    many, tiles = 3 * tile_q + 5, 66 if rendered.launch.threads == 64 else 34
    for layout, rows, keys in (
        ("whole", 7, 3),
        ("whole", tile_q + 1, tile_kv + 1),
        ("longer rows", 2 * tile_q, 2 * tile_kv),
        ("wide rows", many, tile_q + 6),
        ("every other", 5, tiles * tile_kv + 29),
        ("whole", many + 1, 5 * tile_kv + 4),
    ):
        problem = make_problem(golden, rows, keys)
        problem.q[0, 0, rows // 2] = np.nan
        set_keys_apart(problem, tile_kv)
        if "prompt_length" in problem.named:  # a sequence without a prompt
            problem.named["prompt_length"][0] = 0
        yield layout, problem


def set_keys_apart(problem: Problem, tile_kv: int) -> None:
    """Documents of one key, which is the first, one inside, or the last of a tile."""
    doc = problem.named.get("doc")
    for number, key in enumerate((0, min(32, tile_kv - 2), tile_kv - 1), start=1):
        at = number * tile_kv + key
        if doc is not None and at < doc.shape[1]:
            doc[:, at] = 1000 + number


def poison_dead_keys(attention: Attention, problem: Problem) -> None:
    """NaN in the keys and values that the mask itself takes away from every row."""
    alive = key_may_attend(attention)
    B, Hq, _, _ = problem.q.shape
    Hkv, Skv = problem.k.shape[1:3]
    seen = np.zeros((B, Hkv, Skv), bool)
    for b, h in np.ndindex(B, Hq):
        at, data = known_of_head(problem, b, h)
        for length, e in (("Sq", attention.length_q), ("Skv", attention.length_kv)):
            if e is not None:
                at[length] = np.int64(evaluate(e, at, data).data)
        kv = np.arange(Skv)
        is_alive = kv < at["Skv"]
        if alive is not None:
            is_alive = is_alive & evaluate(alive, {**at, "kv": kv}, data).data
        seen[b, h // (Hq // Hkv)] |= is_alive
    problem.k[~seen] = problem.v[~seen] = np.nan


def known_of_head(problem: Problem, b: int, h: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What expressions know of a (batch, head) pair: numbers, and tensors."""
    B, Hq, Sq, _ = problem.q.shape
    Hkv, Skv = problem.k.shape[1:3]
    known = {"B": B, "Hq": Hq, "Hkv": Hkv, "Sq": Sq, "Skv": Skv, "b": b, "h": h}
    known["hkv"] = h // (Hq // Hkv)
    known |= {n: x for n, x in problem.named.items() if not isinstance(x, np.ndarray)}
    data = {n: x for n, x in problem.named.items() if isinstance(x, np.ndarray)}
    return {n: np.asarray(x) for n, x in known.items()}, data


def sinks_of(attention: Attention, problem: Problem) -> np.ndarray | None:
    """The logit per (batch, head) that joins a row's sum behind its keys."""
    if attention.sink is None:
        return None
    sinks = np.zeros((*problem.q.shape[:2], 1), np.float32)
    for b, h in np.ndindex(*problem.q.shape[:2]):
        sinks[b, h] = evaluate(attention.sink, *known_of_head(problem, b, h)).data
    return sinks


def ask_about_tiles(golden: Golden, trial: Trial, library: Path) -> tuple[int, ...]:
    """A checksum of the answers on the trial's problem, and what was read for them."""
    if not has_tiles(trial.rendered):
        return ()
    probe = replace(trial, rendered=probe_of(trial.rendered))
    _, work = run_part(golden, probe, library, (0, trial.problem.k.shape[2]), Mode.RING)
    return (work.notes, *work.accesses)


class Run(NamedTuple):
    """All keys, cut into parts at `cuts`."""

    mode: Mode
    cuts: tuple[int, ...]


def runs_of(trial: Trial) -> list[Run]:
    keys = trial.problem.k.shape[2]
    whole = Run(Mode.RING, (0, keys))
    group = 32 * trial.rendered.launch.tiles.tile_kv  # keys that are summarised ahead by one block
    if trial.rendered.program.workspaces and keys > group + 1:
        begin = 32 * group if keys > 32 * group else group  # and of those one thread looks at each
        cuts = ((0, begin, keys), (0, begin + 1, keys))
        return [whole, Run(Mode.EAGER_LAST, cuts[0]), Run(Mode.EAGER, cuts[1])]
    return [whole, Run(Mode.EAGER_LAST, (0, keys // 2, keys))]


def run_all(golden: Golden, trial: Trial, library: Path, run: Run) -> Iterator[tuple[Any, Work]]:
    return (run_part(golden, trial, library, cut, run.mode) for cut in pairwise(run.cuts))


def check_library(golden: Golden, trials: list[Trial], library: Path) -> None:
    """Raise when a built kernel of this golden is wrong."""
    for trial in trials:
        answers = ask_about_tiles(golden, trial, library)
        assert answers == trial.answers, "another answer about a tile or a key"
    for trial in trials:
        expected = iter(trial.work)
        for run in runs_of(trial):
            parts = []
            for part, work in run_all(golden, trial, library, run):
                complain_of_other_work(work, next(expected))
                parts.append(part)
            if len(parts) == 1:
                complain_of_whole(trial.right, *parts[0])
            else:
                complain_of_merged(trial, *parts)


def complain_of_whole(right: attngen.Reference, o: Any, lse: Any, row_max: Any) -> None:
    assert right.accepts_o(o).all(), "o is wrong"
    if right.lse is not None:
        assert right.accepts_lse(lse).all(), "lse is wrong"
        is_near = np.isclose(row_max, right.row_max, 1e-3, 1e-3, equal_nan=True)
        assert is_near.all(), "row_max is wrong"


def complain_of_merged(trial: Trial, one: PartialState, other: PartialState) -> None:
    o, _ = one.merge(other).finalize()
    assert trial.right.accepts_o(o.astype(trial.problem.q.dtype)).all(), "merged o is wrong"


class Work(NamedTuple):
    """What a run costs beside arithmetic."""

    accesses: tuple[int, ...]
    meetings: int
    index_reads: int
    notes: int
    summaries: bytes

    @classmethod
    def of(cls, report: RunReport, summaries: bytes) -> Work:
        accesses = (
            report.global_loads,
            report.global_stores,
            report.shared_reads,
            report.shared_writes,
            report.shared_wavefronts,
        )
        return cls(accesses, report.meetings, report.index_reads, report.notes, summaries)


def complain_of_other_work(found: Work, expected: Work) -> None:
    """Raise when a kernel accesses memory otherwise than the golden, or works more.

    A tile that is visited without need, or a conflict of banks, changes no result.  Nor does a tile
    that is masked though all of its pairs attend: that is seen in what threads note for each other.
    Fewer barriers are no complaint: what they are for is seen in races and results.
    """
    assert found.accesses == expected.accesses, "another number of accesses or wavefronts"
    assert found.summaries == expected.summaries, "other summaries of keys"
    assert found.notes == expected.notes, "other integers or words in shared memory"
    assert found.meetings <= expected.meetings, "more barriers or warp collectives"
    assert found.index_reads <= expected.index_reads, "more steps"


def run_part(golden: Golden, trial: Trial, library: Path, keys: tuple[int, int], mode: Mode) -> Any:
    """(o, lse, row_max) over all keys, or the row state over a part of them; and the work done."""
    rendered, problem = trial.rendered, trial.problem
    kernel = golden.kernel()
    attention = kernel.attention
    tensors, params = split_arguments(attention, problem.named)
    whole = keys == (0, problem.k.shape[2])
    binding: Binding = bind(
        attention,
        *(_in_bhsd(view(x, n), "bhsd") for n, x in zip("qkv", _operands(problem), strict=True)),
        tensors={n: view(x, n) for n, x in tensors.items()},
        params=params,
        kv_range=None if whole else keys,
    )
    rows = problem.q.shape[:3]
    o = empty_output((*rows, golden.head_dim[1]), problem.q.dtype, trial.o_layout)
    lse, row_max, m, l = (np.full(rows, np.nan, np.float32) for _ in range(4))  # noqa: E741
    acc = np.full((*rows, golden.head_dim[1]), np.nan, np.float32)
    state = {"state_m": view(m, "m"), "state_l": view(l, "l"), "state_acc": view(acc, "acc")}
    needs_state = bool(rendered.launch.workspaces) or not whole
    outputs = Outputs(
        o=view(o, "o") if whole else None,
        lse=view(lse, "lse") if whole and attention.row_state.lse is not None else None,
        row_max=view(row_max, "row_max") if whole else None,
        **(state if needs_state else {}),
    )
    ends = np.zeros(0, np.int32)
    if mode is not Mode.RING:  # and in the ring without what can be left out
        for workspace in rendered.program.workspaces:
            if workspace.name == "key_ends":
                ends = np.full(workspace_shape(workspace, binding), -77, np.int32)
                outputs = replace(outputs, key_ends=view(ends, "key_ends"))
    report = run_on_host(rendered, binding, outputs, library, mode=mode, workers=1, check=True)
    assert report is not None
    work = Work.of(report, ends.tobytes())
    if whole:
        return (o, lse, row_max), work
    if not attention.row_state.running_max:
        m, l = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)  # noqa: E741
    return PartialState(attention.row_state, m, l, acc, sinks_of(attention, problem)), work


def empty_output(shape: tuple[int, ...], dtype: Any, layout: str) -> np.ndarray:
    """An array full of NaN: contiguous, with rows at multiples of 8 bytes, a part of wider rows
    that begins in the middle of 4 bytes, or every other element.
    """
    *outer, Dv = shape
    match layout:
        case "longer rows":
            return np.full((*outer, Dv + 4), np.nan, dtype)[..., :Dv]
        case "wide rows":
            return np.full((*outer, Dv + 3), np.nan, dtype)[..., 1 : Dv + 1]
        case "every other":
            return np.full((*outer, 2 * Dv), np.nan, dtype)[..., ::2]
        case _:
            return np.full(shape, np.nan, dtype)


def _operands(problem: Problem) -> tuple[Any, Any, Any]:
    return problem.q, problem.k, problem.v
