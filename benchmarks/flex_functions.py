"""FlexAttention's functions: attngen.flex beside FlexAttention itself, Triton's kernel and FLASH.

    python -m benchmarks.flex_functions [--functions 'masks.*,mods.alibi_bias'] [--budget SECONDS]
        [--lanes attngen,flex,flex_flash] [--part 1/8] [--check] [--cold] [--out DIR]
    python -m benchmarks.flex_functions --merge FILE...
    python -m benchmarks.flex_functions --device cpu

B 2, S 8192, 16 heads, D 128, bf16, the functions of `benchmarks/functions.py`.  Every result is
checked against float64 at some rows; then the lanes are timed, interleaved.  Block masks are
built before and are not part of a time.  Writes `<date>-<gpu>-flex.jsonl` and a table beside it.

Lanes run in processes of their own, so that one which faults costs only itself: its record says
how it was lost, and the others go on in a new process.  FLASH has one to itself and attngen, which
is timed there once more: a ratio is one of two times of the same process (`own_ms` is attngen's).

--check  checks, and times nothing: it leaves what was compiled in the disk caches.
--part   every N-th function, so that several processes can do so side by side.
--cold   times the first result of a fresh process instead, with nothing cached.
--merge  prints the table of several results files, such as of one for each lane, and runs nothing.
--device cpu is a dry run with tiny sizes: its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from attngen.bench.libraries import build_block_mask, call_flex, swap
from attngen.bench.machines import Machine, Timer, open_machine
from attngen.bench.timing import Plan, Times, measure
from attngen.record import record
from benchmarks import environment
from benchmarks.attention import RESULTS, Results, choose_path, describe_run, fits
from benchmarks.cold import measure_process
from benchmarks.flex_worker import Worker, serve
from benchmarks.functions import FUNCTIONS, Function, Made, Size
from benchmarks.peers import make_peer
from benchmarks.report import geometric_mean, read_records
from benchmarks.run_cell import DeviceLostError, describe_error

__all__ = [
    "LANES", "Expected", "Group", "choose_functions", "expect", "group_lanes", "main", "merge",
    "render", "run_function",
]  # fmt: skip

Tensor: TypeAlias = Any
Record: TypeAlias = dict[str, Any]

LANES: Final = ("attngen", "flex", "flex_flash")
_APART: Final = frozenset({"flex_flash"})
"""Lanes that are timed with attngen alone: FLASH left the GPU in an error while it was timed."""
MOST_LOSSES: Final = 3
"""Of one lane; then it is left out, since a new process takes longer than a function."""
GOALS: Final = {"flex": 1.3, "flex_flash": 1.0}
"""How much faster than each attngen is to be."""
SUITE: Final = "flex_functions"
D: Final = 128
_REAL: Final = Size(2, 16, 8192, "cuda")
_TINY: Final = Size(1, 2, 64, "cpu")
_PLAN: Final = Plan(min_rounds=7, max_rounds=25, sample_ms=4.0)
_DRY_PLAN: Final = Plan(min_rounds=1, max_rounds=1, sample_ms=0.0)
_ROWS: Final = 8
_UNIT: Final = 2.0**-8
"""Relative error of rounding to bf16."""
_PRODUCT: Final = 2.0**-10
"""Room for the score: its product has float32 sums of 128 terms, and a function amplifies them."""
_LIMITS: Final = {"attngen": 1.0, "flex": 4.0, "flex_flash": 4.0}
"""Of the bound: it is what attngen promises; who promises nothing is wrong beyond four times it."""


@final
@record(eq=False)
class Expected:
    """The right output of some rows, and how far bf16 may be from it: [B, H, rows, D]."""

    rows: Tensor
    o: Tensor
    bound: Tensor


# ---- the right answer ----------------------------------------------------------------------------


def expect(made: Made, q: Tensor, k: Tensor, v: Tensor) -> Expected:
    """Dense attention in float64 at the first row, the last and some between."""
    import torch

    (B, H, count, _), keys = q.shape, k.shape[2]
    rows = torch.linspace(0, count - 1, min(_ROWS, count), device=q.device).long()
    wide_q, wide_k, wide_v = q[:, :, rows].double(), k.double(), v.double()
    score = wide_q @ wide_k.transpose(2, 3) * q.shape[3] ** -0.5
    places = (
        torch.arange(B, device=q.device),
        torch.arange(H, device=q.device),
        rows,
        torch.arange(keys, device=q.device),
    )
    if made.score_mod is not None:
        score = _over_all_pairs(made.score_mod, with_score=True)(score, *places).double()
    if made.mask_mod is not None:
        attends = _over_all_pairs(made.mask_mod, with_score=False)(*places)
        score = score.masked_fill(~attends.expand(score.shape), -float("inf"))
    top = score.amax(-1, keepdim=True)
    weight = (score - top.masked_fill(top.isinf(), 0.0)).exp()
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)
    o = weight @ wide_v
    bound = _UNIT * o.abs() + (_UNIT + _PRODUCT) * (weight @ wide_v.abs())
    return Expected(rows, o, bound)


def _over_all_pairs(function: Any, *, with_score: bool) -> Any:
    """The function over every sequence, head, row and key; it sees one of each at a time."""
    import torch

    lead = (0,) if with_score else ()
    for position in reversed(range(4)):
        which = tuple(0 if i == position else None for i in range(4))
        function = torch.vmap(function, in_dims=(*lead, *which))
    return function


def judge(output: Tensor, expected: Expected, limit: float) -> Record:
    """How far the output is from the right one.  Errors: ValueError when that is too far."""
    error = (output[:, :, expected.rows].double() - expected.o).abs()
    ratio = float((error / expected.bound.clamp(min=1e-30)).max())
    largest = float(error.max())
    if not ratio <= limit:  # NaN is not
        raise ValueError(f"wrong: {largest:.2g} off, {ratio:.2g} times the bound")
    return {"max_err": float(f"{largest:.3g}"), "bound_ratio": float(f"{ratio:.3g}")}


# ---- the lanes -----------------------------------------------------------------------------------


def make_call(
    lane: str, made: Made, q: Tensor, k: Tensor, v: Tensor, machine: Machine
) -> tuple[Callable[[], Tensor], float | None]:
    """The call to time, and the milliseconds to build its block mask once more, if it has one."""
    if lane == "attngen":
        from attngen.flex import flex_attention

        engine: Any = "auto" if machine.kind == "cuda" else "numpy"
        score_mod, mask_mod = made.score_mod, made.mask_mod

        def own() -> Tensor:
            return flex_attention(q, k, v, score_mod, mask_mod=mask_mod, engine=engine)

        return own, None
    block_mask, mask_ms = None, None
    if made.mask_mod is not None:
        B, H = q.shape[:2] if made.varies else (None, None)
        lengths = q.shape[2], k.shape[2]
        block_mask, mask_ms = build_block_mask(made.mask_mod, B, H, *lengths, machine)
    q, k, v = (swap(x) for x in (q, k, v))
    return call_flex(lane, machine, q, k, v, made.score_mod, block_mask), mask_ms


def make_operands(made: Made, size: Size, machine: Machine) -> tuple[Tensor, Tensor, Tensor]:
    """Normally distributed q, k and v, [B, H, S, D]."""
    depth = D if machine.kind == "cuda" else 16
    rows, keys = made.rows or size.S, made.keys or size.S
    lengths = (rows, keys, keys)
    q, k, v = (
        machine.randn((size.B, size.H, length, depth), "bf16", seed)
        for seed, length in enumerate(lengths)
    )
    return q, k, v


# ---- one function --------------------------------------------------------------------------------


def run_function(
    function: Function,
    lanes: Sequence[str],
    size: Size,
    machine: Machine,
    plan: Plan | None,
    tell: Callable[[str], None] = lambda lane: None,
) -> list[Record]:
    """A record for each lane: its time, or `ms` None and the reason; `plan` None times nothing.

    tell:    is called with a lane before anything of it runs.
    Errors:  DeviceLostError.
    """
    made = function.make(size)
    q, k, v = make_operands(made, size, machine)
    expected = expect(made, q, k, v)
    records: dict[str, Record] = {}
    timers: dict[str, Timer] = {}
    for lane in lanes:
        tell(lane)
        about = _about(function.name, lane)
        about |= {"B": size.B, "H": size.H, "Sq": q.shape[2], "Skv": k.shape[2], "D": q.shape[3]}
        try:
            start = time.perf_counter()
            call, mask_ms = make_call(lane, made, q, k, v, machine)
            output = call()
            machine.synchronize()
            first_ms = (time.perf_counter() - start) * 1e3
            verdict = judge(output, expected, _LIMITS[lane])
            records[lane] = {
                **about,
                **verdict,
                "first_ms": round(first_ms, 1),
                "mask_ms": None if mask_ms is None else round(mask_ms, 3),
            }
            if plan is not None:
                records[lane]["call_us"] = _time_of_caller(call, machine)
                timers[lane] = _ToldTimer(machine.timer(call), lane, tell)
        except Exception as error:  # a library's own errors have no common base
            records[lane] = {**about, "reason": describe_error(error)}
            _require_device(machine, lane)
    if plan is not None:
        for lane, times in _measure(timers, plan).items():
            found = {"ms": times.ms, "low_ms": times.low_ms, "high_ms": times.high_ms}
            records[lane] |= {name: float(f"{ms:.5g}") for name, ms in found.items()}
            records[lane] |= {"samples": times.samples, "mode": timers[lane].mode}
        own_ms = records.get("attngen", {}).get("ms")
        for lane in timers.keys() - {"attngen"}:
            records[lane]["own_ms"] = own_ms
    return [records[lane] for lane in lanes]


def _about(name: str, lane: str) -> Record:
    return {"suite": SUITE, "cell": name, "peer": lane, "lane": lane, "ms": None}


@final
class _ToldTimer:
    """A timer that says before each sample which lane it is of."""

    def __init__(self, timer: Timer, lane: str, tell: Callable[[str], None]) -> None:
        self.mode = timer.mode
        self._timer, self._lane, self._tell = timer, lane, tell

    def __call__(self, repeats: int) -> float:
        self._tell(self._lane)
        return self._timer(repeats)


def _measure(timers: Mapping[str, Timer], plan: Plan) -> dict[str, Times]:
    try:
        return measure(timers, plan)
    except Exception as error:  # every call went well before: this is a fault on the device
        raise DeviceLostError(f"while timing: {describe_error(error)}") from error


def _time_of_caller(call: Callable[[], Tensor], machine: Machine, count: int = 20) -> float:
    """Microseconds after which a call returns, whatever the device still has to do."""
    call()
    machine.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - start
    machine.synchronize()
    return round(spent / count * 1e6, 1)


def _require_device(machine: Machine, lane: str) -> None:
    try:
        machine.synchronize()
    except Exception as error:
        reason = f"{lane} left the GPU in an error: {describe_error(error)}"
        raise DeviceLostError(reason) from error


# ---- lanes in processes of their own -------------------------------------------------------------


def group_lanes(lanes: Sequence[str], *, is_timed: bool) -> list[tuple[str, ...]]:
    """Which lanes run in one process; the first group has what the table says of attngen."""
    apart = [lane for lane in lanes if lane in _APART]
    others = tuple(lane for lane in lanes if lane not in _APART)
    if not is_timed or not apart:
        return [tuple(lanes)]
    beside = tuple(lane for lane in others if lane == "attngen")
    groups = [(*beside, lane) for lane in apart]
    return groups if others == beside else [others, *groups]


@final
class Group:
    """Some lanes and their process; `lost` is what it cost so far, each with lane and reason."""

    def __init__(self, lanes: Sequence[str], worker: Worker) -> None:
        self.worker = worker
        self.lost: list[Record] = []
        self._lanes = lanes

    def run(self, name: str, known: Mapping[str, Record]) -> dict[str, Record]:
        """A record for each lane; a lane that is lost is left out, and the others run again.

        known:  records that there are already; attngen does not run again for its own sake.
        """
        found: dict[str, Record] = {}
        for lane in self._lanes:
            losses = sum(each["lane"] == lane for each in self.lost)
            if losses >= MOST_LOSSES:
                reason = f"left out: it lost its process {losses} times"
                found[lane] = {**_about(name, lane), "reason": reason}
        while todo := [lane for lane in self._lanes if lane not in found]:
            if todo == ["attngen"] and "attngen" in known:
                break
            outcome = self.worker.run(name, todo)
            found |= {each["lane"]: each for each in outcome.records}
            if outcome.lost is None:
                break
            for lane in todo if outcome.lane is None else [outcome.lane]:
                reason = f"it lost its process: {outcome.lost}"
                found[lane] = {**_about(name, lane), "reason": reason, "is_lost": True}
                self.lost.append({"lane": lane, "cell": name, "reason": outcome.lost})
        return found


def _serve(size: Size, machine: Machine, plan: Plan | None) -> None:
    by_name = {function.name: function for function in FUNCTIONS}

    def run_lanes(name: str, lanes: Sequence[str], tell: Callable[[str], None]) -> Sequence[Record]:
        return run_function(by_name[name], lanes, size, machine, plan, tell)

    serve(run_lanes)


# ---- a fresh process -----------------------------------------------------------------------------


def time_first_result(
    function: Function, lane: str, size: Size, machine: Machine, started: float
) -> Record:
    """In a fresh process: from the arguments to the first result, all that is imported included.

    ms:          without PyTorch, NumPy and the device's context, which were there before.
    process_ms:  from the start of the process on.
    """
    made = function.make(size)
    q, k, v = make_operands(made, size, machine)
    machine.synchronize()
    start = time.perf_counter()
    output = call_once(lane, made, q, k, v, machine)
    machine.synchronize()
    ms, process_ms = (time.perf_counter() - start) * 1e3, (time.time() - started) * 1e3
    verdict = judge(output, expect(made, q, k, v), _LIMITS[lane])
    return {"ms": round(ms, 1), "process_ms": round(process_ms, 1), **verdict}


def call_once(lane: str, made: Made, q: Tensor, k: Tensor, v: Tensor, machine: Machine) -> Any:
    """The result of one call; its block mask is built once."""
    if lane == "attngen":
        return make_call(lane, made, q, k, v, machine)[0]()
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = None
    if made.mask_mod is not None:
        B, H = q.shape[:2] if made.varies else (None, None)
        lengths = q.shape[2], k.shape[2]
        block_mask = create_block_mask(made.mask_mod, B, H, *lengths, device=machine.kind)
    q, k, v = (swap(x) for x in (q, k, v))
    return call_flex(lane, machine, q, k, v, made.score_mod, block_mask)()


def run_cold(function: Function, lanes: Sequence[str], machine: Machine) -> list[Record]:
    """Two fresh processes for each lane: with empty disk caches, and as the first left them."""
    records = []
    for lane in lanes:
        about = {"suite": "flex_cold", "cell": function.name, "peer": lane, "lane": lane}
        command = ["benchmarks.flex_functions", "--first", lane, "--functions", function.name]
        records.append({**about, **measure_process([*command, "--device", machine.kind])})
    return records


# ---- the table -----------------------------------------------------------------------------------


def render(records: Sequence[Record]) -> str:
    """Times, ratios and how many reach the goals, as Markdown."""
    environment_line = next((r for r in records if r["suite"] == "environment"), {})
    parts = [f"# FlexAttention's functions on {environment_line.get('gpu', 'an unknown device')}"]
    found: dict[str, dict[str, Record]] = {}
    for each in records:
        if each["suite"] == SUITE:
            found.setdefault(each["cell"], {})[each["lane"]] = each
    if found:
        parts.append(_render_times(found))
    cold = [r for r in records if r["suite"] == "flex_cold" and r["ms"] is not None]
    if cold:
        parts.append(_render_cold(cold))
    reasons = [r for r in records if r.get("reason")]
    if reasons:
        lines = [f"- {r['lane']}, {r['cell']}: {r['reason']}" for r in reasons]
        parts.append("\n".join(["## Not run", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _render_times(found: dict[str, dict[str, Record]]) -> str:
    peers = [lane for lane in LANES[1:] if any(lane in lanes for lanes in found.values())]
    head = ["function", "attngen, ms", *(f"{p}, ms" for p in peers)]
    head += [f"{p} / attngen" for p in peers]
    head += ["attngen's caller, µs", *(f"{p}'s caller, µs" for p in peers), "block mask, ms"]
    rows = [head, ["---"] * len(head)]
    ratios: dict[str, list[tuple[float, str]]] = {peer: [] for peer in peers}
    for name, lanes in found.items():
        own = _value(lanes, "attngen", "ms")
        row = [name, _number(own, 3)]
        row += [_number(_value(lanes, peer, "ms"), 3) for peer in peers]
        for peer in peers:
            other = _value(lanes, peer, "ms")
            beside = _value(lanes, peer, "own_ms") or own
            ratio = None if beside is None or other is None else other / beside
            row.append(_number(ratio, 2))
            if ratio is not None:
                ratios[peer].append((ratio, name))
        row += [_number(_value(lanes, lane, "call_us"), 0) for lane in ("attngen", *peers)]
        masks = (_value(lanes, peer, "mask_ms") for peer in peers)
        row.append(_number(next((ms for ms in masks if ms is not None), None), 2))
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(_summary(peer, ratios[peer]) for peer in peers)])


def merge(files: Sequence[Sequence[Record]]) -> list[Record]:
    """The records of several runs; of a lane the last one that has a time."""
    found: dict[tuple[Any, ...], Record] = {}
    for number, records in enumerate(files):
        for each in records:
            is_end = each["suite"] == "end"
            key = (each["suite"], number if is_end else each.get("cell"), each.get("lane"))
            if each.get("ms") is not None or key not in found:
                found[key] = each
    return list(found.values())


def _summary(peer: str, ratios: Sequence[tuple[float, str]]) -> str:
    if not ratios:
        return f"{peer}: no function has both times."
    goal, (smallest, name) = GOALS[peer], min(ratios)
    reached = sum(ratio >= goal for ratio, _ in ratios)
    mean = geometric_mean([ratio for ratio, _ in ratios])
    return (
        f"{peer} / attngen: at least {goal} in {reached} of {len(ratios)} functions; geometric mean"
        f" {mean:.2f}, smallest {smallest:.2f} ({name})."
    )


def _render_cold(records: Sequence[Record]) -> str:
    head = ["function", "lane", "first result, ms", "since the start, ms", "caches filled, ms"]
    rows = [head, ["---"] * len(head)]
    for r in records:
        times = [_number(r.get(name), 0) for name in ("ms", "process_ms", "cached_ms")]
        rows.append([r["cell"], r["lane"], *times])
    return "\n".join(["## Cold start", "", *("| " + " | ".join(row) + " |" for row in rows)])


def _value(lanes: dict[str, Record], lane: str, name: str) -> float | None:
    return lanes.get(lane, {}).get(name)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


# ---- the command ---------------------------------------------------------------------------------


def choose_functions(patterns: str | None, part: tuple[int, int]) -> tuple[Function, ...]:
    """Those whose name matches one of the comma-separated patterns; of these every N-th."""
    number, count = part
    each = ["*"] if patterns is None else patterns.split(",")
    chosen = [f for f in FUNCTIONS if any(fnmatchcase(f.name, pattern) for pattern in each)]
    return tuple(chosen[number - 1 :: count])


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    functions = choose_functions(given.functions, given.part)
    if not functions:
        raise SystemExit(f"no function is named {given.functions}")
    if given.merge is not None:
        print(render(merge([read_records(file.read_text("utf-8")) for file in given.merge])))
        return 0
    try:
        machine = open_machine(given.device)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    size = _REAL if machine.kind == "cuda" else _TINY
    if given.first is not None:
        print(json.dumps(_first(functions[0], given.first, size, machine, given.started)))
        return 0
    plan = None if given.check else _PLAN if machine.kind == "cuda" else _DRY_PLAN
    if given.worker:
        _serve(size, machine, plan)
        return 0
    missing = {lane: make_peer(lane, machine).missing() for lane in given.lanes}
    lanes = [lane for lane in given.lanes if missing[lane] is None]
    gone = {lane: reason for lane, reason in missing.items() if reason is not None}
    path = None
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = choose_path(given.out, f"{environment.file_stem(machine.name)}-flex")
    with nullcontext() if path is None else path.open("w", encoding="utf-8") as file:
        results = Results(file)
        results.write(describe_run(machine, gone, plan or _DRY_PLAN, 0))
        _run_all(functions, lanes, machine, given, results)
    report = render(results.records)
    if path is not None:
        path.with_suffix(".md").write_text(report, encoding="utf-8")
    print(report)
    own = (r for r in results.records if r.get("peer") == "attngen")
    return int(any(r.get("reason") for r in own))


def _run_all(
    functions: Sequence[Function],
    lanes: Sequence[str],
    machine: Machine,
    given: argparse.Namespace,
    results: Results,
) -> None:
    """Run the functions within the budget."""
    command = ["benchmarks.flex_functions", "--worker", "--device", machine.kind]
    command += ["--check"] if given.check else []
    begin, longest = time.monotonic(), 0.0
    left_out: tuple[str, ...] = ()
    with ExitStack() as stack:
        groups = [
            Group(group, stack.enter_context(Worker(command)))
            for group in ([] if given.cold else group_lanes(lanes, is_timed=not given.check))
        ]
        for number, function in enumerate(functions):
            start, losses = time.monotonic(), sum(len(group.lost) for group in groups)
            if not fits(start - begin, longest, given.budget):
                left_out = tuple(f.name for f in functions[number:])
                break
            found: dict[str, Record] = {}
            for group in groups:
                found = group.run(function.name, found) | found
            lines = [found[lane] for lane in lanes if lane in found]
            for line in run_cold(function, lanes, machine) if given.cold else lines:
                results.write(line)
                shown = line.get("reason") or f"{line['ms'] or line.get('first_ms', 0):10.3f} ms"
                print(f"{line['cell']:32}{line['lane']:12}{shown}", flush=True)
            if number and losses == sum(len(group.lost) for group in groups):
                longest = max(longest, time.monotonic() - start)  # not the start, nor a loss
        lost = [each for group in groups for each in group.lost]
    results.write({"suite": "end", "left_out": left_out, "lost": lost})


def _first(
    function: Function, lane: str, size: Size, machine: Machine, started: float | None
) -> Record:
    try:
        return time_first_result(function, lane, size, machine, started or time.time())
    except Exception as error:
        return {"ms": None, "reason": describe_error(error)}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flex_functions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--functions", metavar="PATTERNS")
    parser.add_argument("--lanes", type=_lanes, default=LANES)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--budget", type=float, metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", choices=LANES, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    is_run = not (given.check or given.first or given.worker or given.merge)
    if given.out is None and given.device == "cuda" and is_run:
        given.out = RESULTS
    is_dry = given.device == "cpu"
    if is_dry and given.out is not None and given.out.resolve().is_relative_to(RESULTS):
        parser.error("a dry run does not write to benchmarks/results")
    return given


def _lanes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in LANES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(LANES)}")
    return names


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    found = int(number), int(count)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError("it is K/N with K from 1 to N")
    return found


if __name__ == "__main__":
    sys.exit(main())
