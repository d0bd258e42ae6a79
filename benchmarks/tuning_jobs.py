"""What `benchmarks.tuning` tunes: a cell of a grid, or an example, as a search takes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias, final

from attngen import targets
from attngen.cli.tune_jobs import DEFAULT_SIZES, Request
from attngen.frontend.check import check
from attngen.frontend.load import load_file, load_text
from attngen.ir.digest import digest_operation
from attngen.ir.types import FLOATING
from attngen.record import record
from attngen.tuning.call import Call, Subject
from attngen.tuning.cost_model import CostModel
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.exam import Exam, make_exams
from attngen.tuning.space import Space, collect
from benchmarks.cells import Cell, make_cells
from benchmarks.variants import make_variant

__all__ = [
    "LENGTHS", "SUITES", "Example", "Job", "Task", "make_job", "make_job_exams",
    "make_tasks", "unlike",
]  # fmt: skip

SUITES: Final = ("forward", "variants", "lengths", "examples")
LENGTHS: Final = tuple(
    Cell("lengths", "causal", "bf16", 16384 // S, S, 16, 16, 128, 128)
    for S in (512, 1024, 2048, 4096, 8192, 16384)
)
_EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"
_TOKENS: Final = 4096
_FEW_TOKENS: Final = {"alphafold_pair_bias": 1024}
"""A bias for each pair of rows and keys of every head takes gigabytes at 4096 tokens."""
RAGGED: Final = 389

# From those whose kernels are compiled soonest to those of which the fewest other cells speak.
_ORDER: Final = ("full-256", "causal-128", "full-128", "causal-64", "full-64", "causal-256")


@final
@record
class Example:
    """A file of `examples/`, at usual sizes."""

    name: str
    tokens: int = _TOKENS
    suite: str = "examples"


Task: TypeAlias = Cell | Example


@final
@record(eq=False)
class Job:
    """A task as the tuner takes it."""

    subject: Subject
    call: Call
    ragged: Call
    space: Space
    model: CostModel

    @property
    def op(self) -> str:
        return digest_operation(self.subject.attention)


def make_tasks(suites: tuple[str, ...]) -> tuple[Task, ...]:
    """The tasks of some suites, the most important first; lengths of one operation ascend."""
    made: list[Task] = []
    for suite in suites:
        match suite:
            case "lengths":
                made += LENGTHS
            case "examples":
                names = sorted(path.stem for path in _EXAMPLES.glob("*.attn"))
                made += [Example(f"examples-{n}", _FEW_TOKENS.get(n, _TOKENS)) for n in names]
            case "forward":
                cells = make_cells((suite,))
                made += sorted(cells, key=lambda c: _ORDER.index(f"{c.variant}-{c.D}"))
            case _:
                made += make_cells((suite,))
    return tuple(made)


def unlike(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Without cells that are the same call as an earlier one; those of `lengths` stay."""
    seen: dict[object, Task] = {}
    for task in tasks:
        is_alone = isinstance(task, Example) or task.suite == "lengths"
        seen.setdefault(task if is_alone else replace(task, suite=""), task)
    return tuple(seen.values())


def make_job(task: Task, device: DeviceClass, ragged_tokens: int = RAGGED) -> Job:
    """The task's attention and call, and the same at a length that no tile divides."""
    if isinstance(task, Example):
        path = _EXAMPLES / f"{task.name.removeprefix('examples-')}.attn"
        usual = {**DEFAULT_SIZES, "Sq": task.tokens}
        made = Request(load_file(path), {}, None, None, {}, 0).job({}, device, usual)
        subject, call, ragged = made.subject, made.call, made.ragged
    else:
        small = replace(task, B=1, S=ragged_tokens, Hq=task.Hq // task.Hkv, Hkv=1)
        unit = load_text(make_variant(task).text)
        checked = check(unit, dtype=task.dtype)
        dims, target = (task.D, task.Dv), targets.get(device.arch)
        subject = Subject.of(unit, checked, FLOATING[task.dtype], dims, target)
        # A variant's text may hold numbers that follow the length, so both have this text.
        call, ragged = _call(task, subject), _call(small, subject)
    space = collect(subject.attention, subject.schedule, subject.target)
    return Job(subject, call, ragged, space, CostModel(subject.attention, call, device))


def make_job_exams(job: Job) -> tuple[Exam, ...]:
    """Of the call itself and of the ragged one."""
    return make_exams(job.subject, (job.call, job.ragged))


def _call(cell: Cell, subject: Subject) -> Call:
    variant = make_variant(cell)
    sizes = {
        "B": cell.B, "Hq": cell.Hq, "Hkv": cell.Hkv, "Sq": cell.S, "Skv": cell.S,
        "Dqk": cell.D, "Dv": cell.Dv,
    }  # fmt: skip
    for tensor in subject.attention.tensors:
        for dim, size in zip(tensor.dims, variant.tensors[tensor.name].shape, strict=True):
            sizes[str(dim.size)] = size
    return Call(sizes, {}, variant.tensors, layout="bshd")
