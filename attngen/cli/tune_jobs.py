"""What `attngen tune` tunes for: each shape of the command line as a call, and a ragged one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from attngen import targets
from attngen.cli.errors import ReadsOutside
from attngen.cli.problem import Problem as CheckedProblem
from attngen.cli.problem import make_problem
from attngen.cli.reads import find_read_outside, longest_inside
from attngen.diagnostics.diagnostic import AttnError
from attngen.frontend.check import check
from attngen.frontend.load import Unit
from attngen.ir.attention import SIZES, Attention
from attngen.record import record
from attngen.tuning.call import Call, Subject
from attngen.tuning.cost_model import CostModel
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.exam import ragged_lengths
from attngen.tuning.problem import Problem

__all__ = ["DEFAULT_SIZES", "Job", "Request"]

DEFAULT_SIZES: Final[Mapping[str, int]] = {"B": 1, "Hq": 16, "Sq": 4096}


@final
@record(eq=False)
class Job:
    """One shape: the call to time, and a ragged one that has to be right as well."""

    subject: Subject
    call: Call
    ragged: Call
    device: DeviceClass

    @property
    def model(self) -> CostModel:
        return CostModel(self.subject.attention, self.call, self.device)

    @property
    def problem(self) -> Problem:
        dtype = self.subject.attention.dtype
        assert dtype is not None
        return Problem.of(dtype.name, self.call.sizes, self.device.sm_count)

    @property
    def title(self) -> str:
        dims = self.call.sizes["Dqk"], self.call.sizes["Dv"]
        head_dim = str(dims[0]) if dims[0] == dims[1] else f"{dims[0]}, {dims[1]}"
        dtype = self.subject.attention.dtype
        assert dtype is not None
        return f"{self.subject.attention.name}  {dtype.name}, head dim {head_dim}, {self.call.name}"


@final
@record(eq=False)
class Request:
    """The command line, without its shapes."""

    unit: Unit
    consts: Mapping[str, Any]
    dtype: str | None
    head_dim: tuple[int, int] | None
    values: Mapping[str, Any]
    seed: int

    def job(
        self,
        shape: Mapping[str, int],
        device: DeviceClass,
        defaults: Mapping[str, int] = DEFAULT_SIZES,
    ) -> Job:
        """`defaults` are B, Hq and Sq for what nothing else decides.

        Errors:  those of `make_problem`, and whatever is wrong with the text; A722.
        """
        checked = check(self.unit, consts=self.consts, dtype=self.dtype, head_dim=self.head_dim)
        attention = checked.attention

        def problem_of(sizes: Mapping[str, int]) -> CheckedProblem:
            return make_problem(
                attention, shape=sizes, values=self.values, inputs={}, defaults=defaults,
                seed=self.seed,
            )  # fmt: skip

        problem = problem_of(shape)
        _require_reads_inside(problem)
        small = problem_of(_open_sizes(ragged_lengths(problem.sizes), attention))
        dims = problem.sizes["Dqk"], problem.sizes["Dv"]
        target = targets.get(device.arch)
        subject = Subject.of(self.unit, checked, problem.dtype, dims, target, self.consts)
        return Job(subject, self._call(problem), self._call(small), device)

    def _call(self, problem: CheckedProblem) -> Call:
        tensors = {name: given.array for name, given in problem.tensors.items()}
        return Call(problem.sizes, problem.params, tensors, seed=self.seed)


def _require_reads_inside(problem: CheckedProblem) -> None:
    attention, sizes = problem.attention, problem.sizes
    name = find_read_outside(attention, problem.binding)
    if name is None:
        return
    tensor, shape = attention.tensor(name), problem.tensors[name].array.shape
    asked = ", ".join(f"{n} {sizes[n]}" for n in SIZES)
    longest = longest_inside(attention, sizes, problem.params)
    raise AttnError(ReadsOutside(tensor.span, asked, name, shape, longest))


def _open_sizes(sizes: Mapping[str, int], attention: Attention) -> dict[str, int]:
    """The sizes of a call; what is declared stays as it is."""
    declared = {"Hq": attention.heads_q, "Hkv": attention.heads_kv}
    fixed = {name: value for name, value in declared.items() if value is not None}
    return {**{name: sizes[name] for name in SIZES}, **fixed}
