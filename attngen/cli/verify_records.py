"""Whether records are still true, found out without a GPU.

The kernel of a record is made again from the definition beside it, with the record's schedule and
for its architecture, and the digest of the machine code is compared with the recorded one.

    equal                                valid: these instructions were timed
    different, by the recorded compiler  stale: attngen makes other code today
    different, by another compiler
      and the text is another one        stale: attngen writes other kernels today
      and the text is the recorded one   unknown: the compiler has changed
"""

from __future__ import annotations

from enum import Enum
from typing import final

from attngen import targets
from attngen.backend.errors import ArchNotSupported, ToolchainMissing
from attngen.compiler import lower_program, reasons_against, render_lowered
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines.cuda_engine import compile_rendered, digest_code, digest_source
from attngen.frontend.check import Checked, check
from attngen.frontend.load import load_text
from attngen.ir.digest import digest_operation
from attngen.ir.types import FLOATING
from attngen.passes.pipeline import run_passes
from attngen.passes.specialize import specialize
from attngen.record import record
from attngen.targets.errors import UnknownTarget
from attngen.tuning.measurement import Definition, Record
from attngen.tuning.problem import Direction, LayoutClass

__all__ = ["State", "Verdict", "verify_record"]


class State(Enum):
    VALID = "valid"
    STALE = "stale"
    UNKNOWN = "unknown"


@final
@record
class Verdict:
    """`reason` is empty for what is valid."""

    state: State
    reason: str = ""

    @property
    def is_stale(self) -> bool:
        return self.state is State.STALE


def verify_record(found: Record, definition: Definition | None) -> Verdict:
    """Make the machine code of a record again, and compare."""
    if definition is None:
        return Verdict(State.UNKNOWN, "no definition says what its operation is")
    if found.problem.direction is not Direction.FORWARD:
        return Verdict(State.UNKNOWN, "this version has forward kernels only")
    try:
        return _compare(found, definition)
    except AttnError as error:
        return _explain(error)


def _compare(found: Record, definition: Definition) -> Verdict:
    target = targets.get(found.device.arch)
    element, dims = FLOATING[found.problem.dtype], found.problem.head_dims
    checked = _check(found, definition)
    attention = run_passes(specialize(checked.attention, element, *dims))
    if digest_operation(attention) != found.op:
        return Verdict(State.STALE, "its operation has another digest today: it is never found")
    if reasons := reasons_against(attention, found.schedule, target):
        return Verdict(State.STALE, f"its schedule does not fit any more: {'; '.join(reasons)}")
    lowered = lower_program(checked, element, dims, target, schedule=found.schedule)
    rendered = render_lowered(lowered, is_aligned=found.problem.layout is LayoutClass.ALIGNED)
    compiled = compile_rendered(rendered)
    if digest_code(rendered, compiled) == found.sass:
        return Verdict(State.VALID)
    recorded, present = found.environment.nvrtc, compiled.compiler_version
    if recorded == present:
        return Verdict(State.STALE, f"NVRTC {present} makes other machine code today")
    if digest_source(rendered) != found.source:
        return Verdict(State.STALE, "attngen writes another text today, and NVRTC other code")
    reason = f"NVRTC {present} makes other machine code than {recorded} did"
    return Verdict(State.UNKNOWN, reason)


def _check(found: Record, definition: Definition) -> Checked:
    """The definition, with the record's dtype and head dims where it leaves them open."""
    unit = load_text(definition.text, name=f"{found.op[:12]}.attn")
    checked = check(unit)
    attention = checked.attention
    dtype = None if attention.dtype is not None else found.problem.dtype
    is_open = attention.head_dim_qk is None or attention.head_dim_v is None
    return check(unit, dtype=dtype, head_dim=found.problem.head_dims if is_open else None)


def _explain(error: AttnError) -> Verdict:
    """What this machine or this version cannot compile stays open; any other error decides."""
    first = error.diagnostics[0]
    is_open = isinstance(first, ToolchainMissing | ArchNotSupported | UnknownTarget)
    return Verdict(State.UNKNOWN if is_open else State.STALE, first.message())
