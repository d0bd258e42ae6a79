"""Tune one call on one machine: from an attention to records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias, final

from attngen import __version__
from attngen.backend.device import cuda_device
from attngen.engines.cuda_engine import digest_source
from attngen.ir.digest import digest_operation
from attngen.record import record
from attngen.tuning.bench import CudaBench, HostBench, MakeBench
from attngen.tuning.build import Builder, CudaBuilder, HostBuilder
from attngen.tuning.call import Call, Subject
from attngen.tuning.cost_model import CostModel
from attngen.tuning.device_class import DeviceClass
from attngen.tuning.exam import make_exams, shrink
from attngen.tuning.measurement import (
    L2,
    Checked,
    Definition,
    Environment,
    Measurement,
    Mode,
    Record,
    timestamp,
)
from attngen.tuning.problem import Problem
from attngen.tuning.search import Findings, Measured, Plan, Search, Tell
from attngen.tuning.space import collect
from attngen.tuning.store import Contents, user_store
from attngen.tuning.worker import Patience, Worker

__all__ = ["Machine", "contents_of", "cuda_machine", "host_machine", "improve", "tune"]

MakeBuilder: TypeAlias = Callable[[Subject], Builder]

_HOST_CLASS: Final = "a100-80g"


@final
@record(eq=False)
class Machine:
    """Where candidates are timed.

    driver:   the version of CUDA that the driver has; None for the CPU, whose times mean nothing
              and are no records.
    """

    device: DeviceClass
    make_builder: MakeBuilder
    make_bench: MakeBench
    driver: str | None
    patience: Patience


def cuda_machine(index: int) -> Machine:
    """A GPU of this machine.  Errors:  A611 there is none."""
    from attngen.backend.launch import load_driver

    device = DeviceClass.of(cuda_device(index))
    driver = load_driver().describe_version()
    return Machine(device, CudaBuilder, partial(CudaBench, index), driver, Patience())


def host_machine() -> Machine:
    """The CPU, which runs the CUDA text: everything but the times is as on a GPU."""
    device = DeviceClass.named(_HOST_CLASS)
    return Machine(device, HostBuilder, HostBench, None, Patience(check_s=120.0, sample_s=60.0))


def tune(
    subject: Subject,
    calls: Sequence[Call],
    machine: Machine,
    plan: Plan | None = None,
    tell: Tell = lambda progress: None,
) -> Findings:
    """Search for the fastest schedule of the first call; candidates have to be right in all that
    are valid.

    Errors:  A452 no family takes it; A471 no candidate is left; A472 the timing process fails;
             A65x the first call is not valid.
    """
    attention = subject.attention
    space = collect(attention, subject.schedule, subject.target)
    model = CostModel(attention, calls[0], machine.device)
    stand = Worker(machine.make_bench, lambda: make_exams(subject, calls), machine.patience)
    builder = machine.make_builder(subject)
    return Search(attention.name, space, model, builder, stand, plan, tell).run()


def improve(subject: Subject, call: Call, machine: Machine, seconds: float) -> Contents:
    """Search for so long, and keep what was measured in the user's cache; also the records.

    For a program that is asked to tune at its first call.  Ctrl-C is raised again when all is kept.

    Errors:  those of `tune`.
    """
    calls = call, shrink(subject, call)
    findings = tune(subject, calls, machine, Plan(budget_s=seconds))
    contents = contents_of(findings, subject, call, machine)
    store = user_store()
    if store is not None:
        store.add(contents)
    if findings.is_interrupted:
        raise KeyboardInterrupt
    return contents


def contents_of(findings: Findings, subject: Subject, call: Call, machine: Machine) -> Contents:
    """What was measured, as records; none where it was timed on the CPU."""
    if machine.driver is None:
        return Contents()
    op = digest_operation(subject.attention)
    records = tuple(
        _record_of(one, findings, subject, call, machine, op) for one in findings.measured
    )
    definition = Definition(op, subject.attention.source)
    return Contents(records, (definition,) if records else ())


def _record_of(
    one: Measured, findings: Findings, subject: Subject, call: Call, machine: Machine, op: str
) -> Record:
    assert subject.attention.dtype is not None
    assert machine.driver is not None
    times = one.times
    return Record(
        op=op,
        device=machine.device,
        problem=Problem.of(subject.attention.dtype.name, call.sizes, machine.device.sm_count),
        schedule=one.schedule,
        is_default=one.schedule == findings.space.default,
        sass=one.build.sass,
        source=digest_source(one.build.rendered),
        resources=one.build.resources,
        times=Measurement(
            median_us=1e3 * times.ms,
            low_us=1e3 * times.low_ms,
            high_us=1e3 * times.high_ms,
            count=times.samples,
            mode=Mode(findings.mode),
            l2=L2.WARM,
        ),
        checked=Checked(
            max_error=one.verdict.max_error, bound_ratio=one.verdict.bound_ratio, seed=call.seed
        ),
        environment=Environment(nvrtc=one.build.compiler, driver=machine.driver),
        provenance={
            "at": timestamp(),
            "attngen": __version__,
            "predicted_us": round(findings.predictions[one.schedule].us, 1),
            "sizes": call.name,
        },
    )
